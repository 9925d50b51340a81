"""Action distributions, one class each, over actions flattened to ``[…, K]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.network import Shape
from ludus.core.spec import Spec
from ludus.core.types import Tensors
from ludus.networks.action_embeddings import ChoiceEmbedding, EntityEmbedding, NumberEmbedding
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
BERNOULLI = Functions(
    ops.bernoulli_sample, ops.bernoulli_mode, ops.bernoulli_log_prob, ops.bernoulli_entropy, ops.bernoulli_kl
)
GAUSSIAN = Functions(
    ops.gaussian_sample, ops.gaussian_mode, ops.gaussian_log_prob, ops.gaussian_entropy, ops.gaussian_kl
)


class ActionHead(nn.Module):
    """The distribution of one action, made from a network output of shape ``output_shape``.

    ``mask`` names the observation that is the action's mask, if there is one.
    """

    functions: Functions
    action_transform = "none"  # applied before the action goes to the environment
    parameter_count = 1
    outputs = 1  # of the network, per element of a continuous or binary action
    unused_value: float = 0  # of an action that another choice does not use: the centre of a Box
    embeds_entities = False  # whether ``make_embedding`` is of the features of a list

    def __init__(self, spec: Spec, mask: str = "") -> None:
        super().__init__()
        self.spec, self.mask = spec, mask
        self.size = sum(spec.sizes) if spec.kind == "categorical" else self.outputs * spec.size
        self.output_shape: Shape = (self.size,)

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        """Return the parameters of the distribution from the network's output and the masks in ``observation``."""
        mask = observation.get(self.mask)
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
        """Return the parameters by name, in the shape of the action; probabilities for discrete actions."""
        return {"probabilities": p[0].softmax(-1)}

    def pack(self, p: Parameters) -> Tensor:
        """Concatenate the parameters, to store them."""
        return p[0] if len(p) == 1 else torch.cat([p[0], p[1].expand_as(p[0])], -1)

    def unpack(self, packed: Tensor) -> Parameters:
        """Undo ``pack``."""
        return packed.chunk(self.parameter_count, -1)

    def make_embedding(self, width: int) -> nn.Module:
        """Make the embedding of the action on which later parts of an autoregressive action depend."""
        if self.spec.kind == "categorical":
            return ChoiceEmbedding(self.spec.sizes, width, single=not self.spec.shape)
        return NumberEmbedding(self.spec.size, width)

    def _shaped(self, x: Tensor) -> Tensor:
        """Reshape ``x`` ``[…, K]`` to the shape of the action."""
        return x.reshape(*x.shape[:-1], *self.spec.shape)


class Categorical(ActionHead):
    """One choice out of n."""

    functions = CATEGORICAL

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        return ops.categorical_terms(p[0], action)


class MultiCategorical(ActionHead):
    """k independent choices, out of ``sizes[i]`` each: one categorical ``[…, k, max(sizes)]``, padded."""

    functions = CATEGORICAL

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        return (ops.pad_choices(super().decode(output, observation)[0], self.spec.sizes),)

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


class Spatial(ActionHead):
    """A place on a map of H × W: one categorical over all places, from a network output ``[1, H, W]``.

    The action is a Discrete(H·W), or a MultiDiscrete([H, W]) of row and column, whose mask has H + W entries.
    """

    functions = CATEGORICAL

    def __init__(self, spec: Spec, mask: str, height: int, width: int) -> None:
        super().__init__(spec, mask)
        self.size, self.output_shape = height * width, (1, height, width)
        self._height, self._width = height, width

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        logits, mask = output.flatten(-3), observation.get(self.mask)
        if mask is None:
            return (logits,)
        if self.spec.shape:
            rows, columns = torch.split(mask.bool(), [self._height, self._width], -1)
            mask = (rows.unsqueeze(-1) & columns.unsqueeze(-2)).flatten(-2)
        return (ops.mask_logits(logits, mask),)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return self._action(super().sample(p, noise))

    def mode(self, p: Parameters) -> Tensor:
        return self._action(super().mode(p))

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return super().log_prob(p, self._index(action))

    def evaluate(self, p: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        return ops.categorical_terms(p[0], self._index(action))

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"probabilities": torch.unflatten(p[0].softmax(-1), -1, (self._height, self._width))}

    def _action(self, index: Tensor) -> Tensor:
        return torch.stack([index // self._width, index % self._width], -1) if self.spec.shape else index

    def _index(self, action: Tensor) -> Tensor:
        return action[..., 0] * self._width + action[..., 1] if self.spec.shape else action


class Pointer(Categorical):
    """One entity out of a list, from a network output ``[1, S]``; padding of the list is never chosen.

    ``padding`` names the observation that is True for entities that are present, if the list has one. With an empty
    list the choice is 0.
    """

    embeds_entities = True

    def __init__(self, spec: Spec, mask: str, padding: str) -> None:
        super().__init__(spec, mask)
        self.output_shape = (1, self.size)
        self.padding = padding

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        (logits,) = super().decode(output.squeeze(-2), observation)
        present = observation.get(self.padding)
        return (logits if present is None else ops.mask_logits(logits, present),)

    def make_embedding(self, width: int) -> nn.Module:
        return EntityEmbedding(self.size, width, index=True)


class Bernoulli(ActionHead):
    """Independent bits."""

    functions = BERNOULLI

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        mask = observation.get(self.mask)
        return (
            output if mask is None else ops.mask_bernoulli_logits(output, mask.reshape(*mask.shape[:-1], self.size, 2)),
        )

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(*leading, self.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"probabilities": self._shaped(p[0].sigmoid())}


class Select(Bernoulli):
    """Any number of entities out of a list, one bit each, from a network output ``[1, S]``; padding stays 0.

    ``padding`` is as in ``Pointer``.
    """

    embeds_entities = True

    def __init__(self, spec: Spec, mask: str, padding: str) -> None:
        super().__init__(spec, mask)
        self.output_shape = (1, self.size)
        self.padding = padding

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        (logits,) = super().decode(output.squeeze(-2), observation)
        present = observation.get(self.padding)
        return (logits if present is None else ops.mask_logits(logits, present),)

    def make_embedding(self, width: int) -> nn.Module:
        return EntityEmbedding(self.size, width, index=False)


class Gaussian(ActionHead):
    """A diagonal Gaussian with its mean from the network and a state-independent standard deviation."""

    functions = GAUSSIAN
    action_transform = "clip"
    parameter_count = 2

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__(spec)
        self.log_std = nn.Parameter(torch.full((spec.size,), log_std_init))

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        return output, self.log_std

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.spec.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return _mean_and_std(self.spec, p)


class StateGaussian(ActionHead):
    """A diagonal Gaussian with mean and standard deviation from the network."""

    functions = GAUSSIAN
    action_transform = "clip"
    parameter_count = outputs = 2

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__(spec)
        self._log_std_init = log_std_init

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        mean, log_std = output.chunk(2, -1)
        return mean, (log_std + self._log_std_init).clamp(*LOG_STD)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.spec.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return _mean_and_std(self.spec, p)


class TanhGaussian(StateGaussian):
    """A diagonal Gaussian over u with mean and standard deviation from the network; the environment gets tanh(u)."""

    functions = Functions(
        sample=ops.tanh_gaussian_sample,
        mode=ops.tanh_gaussian_mode,
        log_prob=ops.tanh_gaussian_log_prob,
        entropy=ops.tanh_gaussian_entropy,
        kl=ops.tanh_gaussian_kl,
    )
    action_transform = "tanh"

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"mean_before_tanh": self._shaped(p[0]), "std_before_tanh": self._shaped(p[1].exp())}


class GSDE(ActionHead):
    """Generalized state-dependent exploration (Raffin et al. 2021): noise that is a function of the state.

    The network gives the mean and a vector z of ``features``, here of length 1, so that ``log_std_init`` means the same
    as in a Gaussian. The noise is zᵀE with E ``[features, K]``, which has standard deviations exp(log_std) and is held
    for some steps; for one step it is a Gaussian of variance Σ z² exp(2 log_std).
    """

    functions = GAUSSIAN
    action_transform = "clip"
    parameter_count = 2

    def __init__(self, spec: Spec, log_std_init: float, features: int) -> None:
        super().__init__(spec)
        self.output_shape = (spec.size + features,)
        self.log_std = nn.Parameter(torch.full((features, spec.size), log_std_init))

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        mean, z = torch.split(output, [self.spec.size, len(self.log_std)], -1)
        z = functional.normalize(z, dim=-1)
        return mean, 0.5 * (z.square() @ (2 * self.log_std).exp()).log(), z

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw one matrix per row for all steps: ``[steps, batch, features, K]``."""
        steps, batch = leading
        drawn = torch.randn(1, batch, *self.log_std.shape, generator=generator, device=generator.device)
        return drawn.expand(steps, *drawn.shape[1:])

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        mean, _, z = p
        return mean + (z.unsqueeze(-2) @ (self.log_std.exp() * noise)).squeeze(-2)

    def mode(self, p: Parameters) -> Tensor:
        return p[0]

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return super().log_prob(p[:2], action)

    def entropy(self, p: Parameters) -> Tensor:
        return super().entropy(p[:2])

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return super().kl(p[:2], q[:2])

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return _mean_and_std(self.spec, p)


class Beta(ActionHead):
    """Beta distributions on [0, 1] with both parameters from the network, above 1 so that they are unimodal."""

    functions = Functions(ops.beta_sample, ops.beta_mode, ops.beta_log_prob, ops.beta_entropy, ops.beta_kl)
    action_transform = "unit"
    parameter_count = outputs = 2
    unused_value = 0.5

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        return (1 + functional.softplus(output)).chunk(2, -1)

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        shape = (*leading, self.spec.size, 2, TRIES)
        normal = torch.randn(*shape, generator=generator, device=generator.device)
        return torch.stack([normal, torch.rand(*shape, generator=generator, device=generator.device)], -1)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"alpha": self._shaped(p[0]), "beta": self._shaped(p[1])}


class Discretized(ActionHead):
    """A categorical over ``bins`` evenly spaced values of each element, from −1 to 1.

    ``ordinal``: neighbouring values share parameters (``ops.distributions.ordinal_logits``).
    """

    functions = CATEGORICAL
    action_transform = "clip"

    def __init__(self, spec: Spec, bins: int, ordinal: bool) -> None:
        super().__init__(spec)
        self.size = bins * spec.size
        self.output_shape = (self.size,)
        self._bins, self._ordinal = bins, ordinal

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        (logits,) = self.unpack(output)
        return (ops.ordinal_logits(logits) if self._ordinal else logits,)

    def sample(self, p: Parameters, noise: Tensor) -> Tensor:
        return self._value(super().sample(p, *self.unpack(noise)))

    def mode(self, p: Parameters) -> Tensor:
        return self._value(super().mode(p))

    def log_prob(self, p: Parameters, action: Tensor) -> Tensor:
        return super().log_prob(p, self._index(action)).sum(-1)

    def entropy(self, p: Parameters) -> Tensor:
        return super().entropy(p).sum(-1)

    def kl(self, p: Parameters, q: Parameters) -> Tensor:
        return super().kl(p, q).sum(-1)

    def pack(self, p: Parameters) -> Tensor:
        return p[0].flatten(-2)

    def unpack(self, packed: Tensor) -> Parameters:
        return (torch.unflatten(packed, -1, (self.spec.size, self._bins)),)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        """Return the probability of each value, from the lowest to the highest, in a last dimension."""
        return {"probabilities": p[0].softmax(-1).reshape(*p[0].shape[:-2], *self.spec.shape, self._bins)}

    def _value(self, index: Tensor) -> Tensor:
        return index * (2 / (self._bins - 1)) - 1

    def _index(self, value: Tensor) -> Tensor:
        return ((value + 1) * ((self._bins - 1) / 2)).round().long()


def _mean_and_std(spec: Spec, p: Parameters) -> dict[str, Tensor]:
    """Return mean and standard deviation in the environment's units."""
    scale, shift = (torch.as_tensor(x).to(p[0]).broadcast_to(spec.shape) for x in rescaling(spec))
    mean, std = (x.expand_as(p[0]).reshape(*p[0].shape[:-1], *spec.shape) for x in (p[0], p[1].exp()))
    return {"mean": mean * scale + shift, "std": std * scale}
