"""Action distributions, one class each, over actions flattened to ``[…, K]``."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.spec import Spec
from ludus.ops import distributions as ops
from ludus.ops.fused import categorical_terms
from ludus.preprocess.actions import rescaling

Parameters = tuple[Tensor, ...]
LOG_STD = (-5.0, 2.0)  # bounds of a log standard deviation computed by a network
TRIES = 8  # of the rejection sampling of a Beta


class ActionHead(nn.Module, ABC):
    """The distribution of one action, made from ``size`` network outputs."""

    action_transform = "none"  # applied before the action goes to the environment
    parameter_count = 1
    size: int

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        """Return the parameters of the distribution from the network's output; logits unless overridden."""
        return (output if mask is None else ops.mask_logits(output, mask),)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw the noise for ``sample``, with ``leading`` dimensions; Gumbel noise unless overridden."""
        return ops.gumbel(torch.rand(*leading, self.size, generator=generator, device=generator.device))

    @abstractmethod
    def sample(self, p: Parameters, noise: Tensor) -> Tensor: ...

    @abstractmethod
    def mode(self, p: Parameters) -> Tensor: ...

    @abstractmethod
    def log_prob(self, p: Parameters, action: Tensor) -> Tensor: ...

    @abstractmethod
    def entropy(self, p: Parameters) -> Tensor: ...

    @abstractmethod
    def kl(self, p: Parameters, q: Parameters) -> Tensor: ...

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

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.size = spec.sizes[0]

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return ops.categorical_sample(p[0], noise)

    def mode(self, p: Parameters) -> Tensor:
        return ops.categorical_mode(p[0])

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return ops.categorical_log_prob(p[0], action)

    def entropy(self, p: Parameters) -> Tensor:
        return ops.categorical_entropy(p[0])

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        return categorical_terms(p[0], action)

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return ops.categorical_kl(p[0], q[0])


class MultiCategorical(ActionHead):
    """Several independent choices, out of ``sizes[i]`` each."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.sizes, self.size = spec.sizes, sum(spec.sizes)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return ops.multi_categorical_sample(p[0], self.sizes, noise)

    def mode(self, p: Parameters) -> Tensor:
        return ops.multi_categorical_mode(p[0], self.sizes)

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return ops.multi_categorical_log_prob(p[0], self.sizes, action)

    def entropy(self, p: Parameters) -> Tensor:
        return ops.multi_categorical_entropy(p[0], self.sizes)

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return ops.multi_categorical_kl(p[0], q[0], self.sizes)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"probabilities": ops.multi_categorical_probabilities(p[0], self.sizes)}


class Bernoulli(ActionHead):
    """Independent bits."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.size = spec.size

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return (
            output if mask is None else ops.mask_bernoulli_logits(output, mask.reshape(*mask.shape[:-1], self.size, 2)),
        )

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(*leading, self.size, generator=generator, device=generator.device)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return ops.bernoulli_sample(p[0], noise)

    def mode(self, p: Parameters) -> Tensor:
        return ops.bernoulli_mode(p[0])

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return ops.bernoulli_log_prob(p[0], action)

    def entropy(self, p: Parameters) -> Tensor:
        return ops.bernoulli_entropy(p[0])

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return ops.bernoulli_kl(p[0], q[0])

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"probabilities": p[0].sigmoid()}


class Gaussian(ActionHead):
    """A diagonal Gaussian with its mean from the network and a state-independent standard deviation."""

    action_transform = "clip"
    parameter_count = 2

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__()
        self.size, self._spec = spec.size, spec
        self.log_std = nn.Parameter(torch.full((spec.size,), log_std_init))

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return output, self.log_std

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.size, generator=generator, device=generator.device)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return ops.gaussian_sample(p[0], p[1], noise)

    def mode(self, p: Parameters) -> Tensor:
        return ops.gaussian_mode(p[0], p[1])

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return ops.gaussian_log_prob(p[0], p[1], action)

    def entropy(self, p: Parameters) -> Tensor:
        return ops.gaussian_entropy(p[0], p[1])

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return ops.gaussian_kl(p[0], p[1], q[0], q[1])

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        scale, shift = (torch.from_numpy(x).to(p[0]).broadcast_to(self._spec.shape) for x in rescaling(self._spec))
        mean, std = p[0], p[1].exp().expand_as(p[0])
        return {"mean": mean * scale.reshape(-1) + shift.reshape(-1), "std": std * scale.reshape(-1)}


class TanhGaussian(ActionHead):
    """A diagonal Gaussian over u with mean and standard deviation from the network; the environment gets tanh(u)."""

    action_transform = "tanh"
    parameter_count = 2

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__()
        self._action_size, self.size = spec.size, 2 * spec.size
        self._log_std_init = log_std_init

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        mean, log_std = output.chunk(2, -1)
        return mean, (log_std + self._log_std_init).clamp(*LOG_STD)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self._action_size, generator=generator, device=generator.device)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return ops.tanh_gaussian_sample(p[0], p[1], noise)

    def mode(self, p: Parameters) -> Tensor:
        return ops.tanh_gaussian_mode(p[0], p[1])

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return ops.tanh_gaussian_log_prob(p[0], p[1], action)

    def entropy(self, p: Parameters) -> Tensor:
        return ops.tanh_gaussian_entropy(p[0], p[1])

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return ops.tanh_gaussian_kl(p[0], p[1], q[0], q[1])

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"mean_before_tanh": p[0], "std_before_tanh": p[1].exp()}


class Beta(ActionHead):
    """Beta distributions on [0, 1] with both parameters from the network, above 1 so that they are unimodal."""

    action_transform = "unit"
    parameter_count = 2

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._action_size, self.size = spec.size, 2 * spec.size

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return (1 + functional.softplus(output)).chunk(2, -1)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        shape = (*leading, self._action_size, 2, TRIES)
        normal = torch.randn(*shape, generator=generator, device=generator.device)
        return torch.stack([normal, torch.rand(*shape, generator=generator, device=generator.device)], -1)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return ops.beta_sample(p[0], p[1], *noise.unbind(-1))

    def mode(self, p: Parameters) -> Tensor:
        return ops.beta_mode(p[0], p[1])

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return ops.beta_log_prob(p[0], p[1], action)

    def entropy(self, p: Parameters) -> Tensor:
        return ops.beta_entropy(p[0], p[1])

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return ops.beta_kl(p[0], p[1], q[0], q[1])

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"alpha": p[0], "beta": p[1]}
