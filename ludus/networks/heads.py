"""What a policy knows of each kind of action: one class per distribution, over flat vectors ``[…, K]``."""

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
LOG_STD = (-5.0, 2.0)  # bounds of a log-deviation that a network gives
TRIES = 8  # of the rejection that samples a Beta


class Head(nn.Module, ABC):
    """The distribution of one action: ``size`` network outputs become parameters, and these do everything else."""

    action_transform = "none"
    size: int

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        """From what the network gave to the distribution's parameters; discrete kinds have masked logits alone."""
        return (output if mask is None else ops.mask_logits(output, mask),)

    def noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What ``sample`` needs for rows ``leading``; Gumbel noise unless a kind says otherwise."""
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
        """Log-probability and entropy."""
        return self.log_prob(p, action), self.entropy(p)

    def describe(self, p: Parameters) -> dict[str, Tensor]:
        """The distribution in plain numbers, ``[…, K]`` each; for choices the probability of each."""
        return {"probabilities": p[0].softmax(-1)}

    def pack(self, p: Parameters) -> Tensor:
        """All parameters as one tensor, to be stored."""
        return p[0] if len(p) == 1 else torch.cat([p[0], p[1].expand_as(p[0])], -1)

    def unpack(self, packed: Tensor) -> Parameters:
        """Undo ``pack``; kinds with two parameters have them side by side."""
        return (packed,)


class Categorical(Head):
    """One of n choices."""

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


class MultiCategorical(Head):
    """Several choices of ``sizes[i]`` each, independent of one another."""

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


class Bernoulli(Head):
    """Bits, independent of one another."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.size = spec.size

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return (
            output if mask is None else ops.mask_bernoulli_logits(output, mask.reshape(*mask.shape[:-1], self.size, 2)),
        )

    def noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
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


class Gaussian(Head):
    """Real numbers around a mean from the network, with a deviation that is the same in every state."""

    action_transform = "clip"

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__()
        self.size, self._spec = spec.size, spec
        self.log_std = nn.Parameter(torch.full((spec.size,), log_std_init))

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return output, self.log_std

    def noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
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

    def unpack(self, packed: Tensor) -> Parameters:
        return packed.chunk(2, -1)


class TanhGaussian(Head):
    """Numbers u around a mean, mean and deviation from the network; the environment gets tanh(u)."""

    action_transform = "tanh"

    def __init__(self, spec: Spec, log_std_init: float) -> None:
        super().__init__()
        self._k, self.size = spec.size, 2 * spec.size
        self._log_std_init = log_std_init

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        mean, log_std = output.chunk(2, -1)
        return mean, (log_std + self._log_std_init).clamp(*LOG_STD)

    def noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*leading, self._k, generator=generator, device=generator.device)

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

    def unpack(self, packed: Tensor) -> Parameters:
        return packed.chunk(2, -1)


class Beta(Head):
    """Numbers in [0, 1] with one hump: both parameters from the network, and above 1."""

    action_transform = "unit"

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._k, self.size = spec.size, 2 * spec.size

    def decode(self, output: Tensor, mask: Tensor | None) -> Parameters:
        return (1 + functional.softplus(output)).chunk(2, -1)

    def noise(self, leading: tuple[int, ...], generator: torch.Generator) -> Tensor:
        shape = (*leading, self._k, 2, TRIES)
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

    def unpack(self, packed: Tensor) -> Parameters:
        return packed.chunk(2, -1)
