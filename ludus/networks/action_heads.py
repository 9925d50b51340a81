"""Action distributions, one class each, over actions flattened to ``[…, K]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.spec import Spec
from ludus.ops import distributions as ops
from ludus.preprocess.actions import rescaling

Parameters = tuple[Tensor, ...]
LOG_STD = (-5.0, 2.0)  # bounds of a log standard deviation computed by a network
TRIES = 8  # of the rejection sampling of a Beta


class Functions(NamedTuple):
    """The functions of a distribution; their first arguments are its parameters."""

    sample: Callable[..., Tensor]
    mode: Callable[..., Tensor]
    log_prob: Callable[..., Tensor]
    entropy: Callable[..., Tensor]
    kl: Callable[..., Tensor]


CATEGORICAL = Functions(
    sample=ops.categorical_sample,
    mode=ops.categorical_mode,
    log_prob=ops.categorical_log_prob,
    entropy=ops.categorical_entropy,
    kl=ops.categorical_kl,
)


class ActionHead(nn.Module):
    """The distribution of one action, made from ``size`` network outputs."""

    functions: Functions
    action_transform = "none"  # applied before the action goes to the environment
    parameter_count = 1
    outputs = 1  # of the network, per element of a continuous or binary action

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.size = sum(spec.sizes) if spec.kind == "categorical" else self.outputs * spec.size

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        """Return the parameters of the distribution from the network's output."""
        return (output if mask is None else ops.mask_logits(output, mask),)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw the noise for ``sample``, with ``leading`` dimensions."""
        return ops.gumbel(torch.rand(*leading, self.size, generator=generator, device=generator.device))

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        """Return the action that ``noise`` selects."""
        return self.functions.sample(*p, noise)

    def mode(self, p: Parameters) -> Tensor:
        """Return the most likely action."""
        return self.functions.mode(*p)

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        """Return the log-probability of ``action``."""
        return self.functions.log_prob(*p, action)

    def entropy(self, p: Parameters) -> Tensor:
        """Return the entropy."""
        return self.functions.entropy(*p)

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        """Return KL(p‖q)."""
        return self.functions.kl(*p, *q)

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of ``action`` and the entropy."""
        return self.log_prob(p, action), self.entropy(p)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        """Return the parameters by name, ``[…, K]`` each; probabilities for discrete actions."""
        return {"probabilities": p[0].softmax(-1)}

    def pack(self, p: Parameters) -> Tensor:
        """Concatenate the parameters, to store them."""
        return p[0] if len(p) == 1 else torch.cat([p[0], p[1].expand_as(p[0])], -1)

    def unpack(self, packed: Tensor) -> Parameters:
        """Undo ``pack``."""
        return packed.chunk(self.parameter_count, -1)


class Categorical(ActionHead):
    """One choice out of n."""

    functions = CATEGORICAL

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        return ops.categorical_terms(p[0], action)


class MultiCategorical(ActionHead):
    """k independent choices, out of ``sizes[i]`` each: one categorical ``[…, k, max(sizes)]``, padded."""

    functions = CATEGORICAL

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return (ops.pad_choices(super().decode(output, mask)[0], self.spec.sizes),)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return super().sample(p, ops.pad_choices(noise, self.spec.sizes))

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return super().log_prob(p, action).sum(-1)

    def entropy(self, p: Parameters) -> Tensor:
        return super().entropy(p).sum(-1)

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return super().kl(p, q).sum(-1)

    def pack(self, p: Parameters) -> Tensor:
        choices = zip(p[0].unbind(-2), self.spec.sizes, strict=True)
        return torch.cat([logits[..., :size] for logits, size in choices], -1)

    def unpack(self, packed: Tensor) -> Parameters:
        return (ops.pad_choices(packed, self.spec.sizes),)


class Bernoulli(ActionHead):
    """Independent bits."""

    functions = Functions(
        ops.bernoulli_sample, ops.bernoulli_mode, ops.bernoulli_log_prob, ops.bernoulli_entropy, ops.bernoulli_kl
    )

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return (
            output if mask is None else ops.mask_bernoulli_logits(output, mask.reshape(*mask.shape[:-1], self.size, 2)),
        )

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(*leading, self.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"probabilities": p[0].sigmoid()}


class Gaussian(ActionHead):
    """A diagonal Gaussian with its mean from the network and a state-independent standard deviation."""

    functions = Functions(
        ops.gaussian_sample, ops.gaussian_mode, ops.gaussian_log_prob, ops.gaussian_entropy, ops.gaussian_kl
    )
    action_transform = "clip"
    parameter_count = 2

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__(spec)
        self.log_std = nn.Parameter(torch.full((spec.size,), log_std_init))

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return output, self.log_std

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        scale, shift = (torch.as_tensor(x).to(p[0]).broadcast_to(self.spec.shape) for x in rescaling(self.spec))
        mean, std = p[0], p[1].exp().expand_as(p[0])
        return {"mean": mean * scale.reshape(-1) + shift.reshape(-1), "std": std * scale.reshape(-1)}


class TanhGaussian(ActionHead):
    """A diagonal Gaussian over u with mean and standard deviation from the network; the environment gets tanh(u)."""

    functions = Functions(
        sample=ops.tanh_gaussian_sample,
        mode=ops.tanh_gaussian_mode,
        log_prob=ops.tanh_gaussian_log_prob,
        entropy=ops.tanh_gaussian_entropy,
        kl=ops.tanh_gaussian_kl,
    )
    action_transform = "tanh"
    parameter_count = outputs = 2

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__(spec)
        self._log_std_init = log_std_init

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        mean, log_std = output.chunk(2, -1)
        return mean, (log_std + self._log_std_init).clamp(*LOG_STD)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.spec.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"mean_before_tanh": p[0], "std_before_tanh": p[1].exp()}


class Beta(ActionHead):
    """Beta distributions on [0, 1] with both parameters from the network, above 1 so that they are unimodal."""

    functions = Functions(ops.beta_sample, ops.beta_mode, ops.beta_log_prob, ops.beta_entropy, ops.beta_kl)
    action_transform = "unit"
    parameter_count = outputs = 2

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return (1 + functional.softplus(output)).chunk(2, -1)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        shape = (*leading, self.spec.size, 2, TRIES)
        normal = torch.randn(*shape, generator=generator, device=generator.device)
        return torch.stack([normal, torch.rand(*shape, generator=generator, device=generator.device)], -1)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"alpha": p[0], "beta": p[1]}
