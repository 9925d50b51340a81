"""Distributions of continuous actions, scaled to [−1, 1] (a Beta to [0, 1])."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.spec import Spec
from ludus.core.types import Tensors
from ludus.networks.action_heads import CATEGORICAL, ActionHead, Functions, Parameters
from ludus.ops import distributions as ops
from ludus.preprocess.actions import rescaling

LOG_STD = (-5.0, 2.0)  # bounds of a log standard deviation computed by a network
TRIES = 8  # of the rejection sampling of a Beta
GAUSSIAN = Functions(
    ops.gaussian_sample, ops.gaussian_mode, ops.gaussian_log_prob, ops.gaussian_entropy, ops.gaussian_kl
)


class GaussianHead(ActionHead):
    """The base class of diagonal Gaussians, whose first two parameters are mean and log standard deviation."""

    functions = GAUSSIAN
    action_transform = "clip"
    parameter_count = 2

    def draw_noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.spec.size, generator=generator, device=generator.device)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        """Return mean and standard deviation in the environment's units."""
        mean, std = (self._shaped(x.expand_as(p[0])) for x in (p[0], p[1].exp()))
        scale, shift = (torch.as_tensor(x).to(mean).broadcast_to(self.spec.shape) for x in rescaling(self.spec))
        return {"mean": mean * scale + shift, "std": std * scale}


class Gaussian(GaussianHead):
    """A diagonal Gaussian with its mean from the network and a state-independent standard deviation."""

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__(spec)
        self.log_std = nn.Parameter(torch.full((spec.size,), log_std_init))

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        return output, self.log_std


class StateGaussian(GaussianHead):
    """A diagonal Gaussian with mean and standard deviation from the network."""

    outputs = 2

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__(spec)
        self._log_std_init = log_std_init

    def decode(self, output: Tensor, observation: Tensors) -> Parameters:
        mean, log_std = output.chunk(2, -1)
        return mean, (log_std + self._log_std_init).clamp(*LOG_STD)


class TanhGaussian(StateGaussian):
    """A diagonal Gaussian over u with mean and standard deviation from the network; the environment gets tanh(u)."""

    functions = GAUSSIAN._replace(log_prob=ops.tanh_gaussian_log_prob, entropy=ops.tanh_gaussian_entropy)
    action_transform = "tanh"

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        return {"mean_before_tanh": self._shaped(p[0]), "std_before_tanh": self._shaped(p[1].exp())}


class GSDE(GaussianHead):
    """Generalized state-dependent exploration (Raffin et al. 2021): noise that is a function of the state.

    The network gives the mean and a vector z of ``features``, here of length 1, so that ``log_std_init`` means the same
    as in a Gaussian. The noise is zᵀE with E ``[features, K]``, which has standard deviations exp(log_std) and is held
    for some steps; for one step it is a Gaussian of variance Σ z² exp(2 log_std).
    """

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
