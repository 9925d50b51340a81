"""Parameter space noise: a perturbed copy of the policy acts for an episode (Plappert et al. 2018)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ludus.core.types import SumOverRanks, single_rank

SEED = "perturbation"  # among the noise of acting: what a perturbation is drawn with
SIGMA = 0.05  # initial σ where the target is not a distance of actions
ADAPT_EVERY = 50  # updates from a replay between two adaptations


class ParameterNoise(nn.Module):
    """A copy of a module with θ̃ = θ + σ·ε, where σ adapts to keep its actions at a target distance.

    ``perturbed`` acts, ``resample`` redraws it from the module's current parameters, and ``adapt`` changes σ. The state
    dict has σ and the copy, but not the module, which belongs to the agent. Normalization layers get no noise.

    All environments share one perturbation. It is redrawn when row 0 starts an episode, so it may change during the
    episodes of other rows. If rows step in groups, the first row of each group counts.
    """

    sigma: Tensor

    def __init__(self, module: nn.Module, sigma_init: float = 0.1, target: float = 0.1, rate: float = 1.01) -> None:
        super().__init__()
        self.target, self.rate = target, rate
        self._module = (module,)  # in a tuple, so that PyTorch does not register it
        self.perturbed = copy.deepcopy(module).requires_grad_(False)
        self.register_buffer("sigma", torch.tensor(sigma_init, dtype=torch.float64))
        norms = {id(p) for m in self.perturbed.modules() if _normalizes(m) for p in m.parameters()}
        self._noisy: list[Tensor] = [
            p for p in self.perturbed.parameters() if p.is_floating_point() and id(p) not in norms
        ]

    @torch.no_grad()
    def resample(self, generator: torch.Generator) -> None:
        """Copy the module's current parameters and add new noise to them."""
        torch._foreach_copy_(_tensors(self.perturbed), _tensors(*self._module))
        sizes = [p.numel() for p in self._noisy]
        flat = torch.randn(sum(sizes), generator=generator, device=generator.device).to(self.sigma.device)
        parts = torch.split(flat.mul_(self.sigma), sizes)
        noise = [part.view_as(p).to(p.dtype) for part, p in zip(parts, self._noisy, strict=True)]
        torch._foreach_add_(self._noisy, noise)

    def resample_on_reset(self, first: Tensor, seeds: Tensor) -> None:
        """Resample if row 0 starts an episode (``first``: ``[B]``); ``seeds`` ``[B]`` are those of ``draw_seeds``."""
        if bool(first[0]):
            self.resample(generator_from(seeds))

    @torch.no_grad()
    def measure(self, generator: torch.Generator, distance: Callable[[nn.Module], Tensor]) -> Tensor:
        """Return the distance of a fresh perturbation.

        The acting one is of older parameters, so it is not measured; it is restored.
        """
        kept = [x.clone() for x in _tensors(self.perturbed)]
        self.resample(generator)
        found = distance(self.perturbed)
        torch._foreach_copy_(_tensors(self.perturbed), kept)
        return found

    @torch.no_grad()
    def adapt(self, distance: Tensor) -> None:
        """Increase σ by the factor ``rate`` if the distance of the actions is within the target, else decrease it."""
        self.sigma.copy_(torch.where(distance <= self.target, self.sigma * self.rate, self.sigma / self.rate))


def _normalizes(module: nn.Module) -> bool:
    """Return whether a module is a normalization layer; those of Ludus have the attribute ``normalizes``."""
    known = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase
    return isinstance(module, known) or bool(getattr(module, "normalizes", False))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def rms_distance(action: Tensor, perturbed: Tensor, real: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> Tensor:
    """Return √(mean (a − ã)²) over real rows, which equals σ for Gaussian action noise of that σ."""
    return _mean((action - perturbed).square(), real, sum_over_ranks).sqrt()


def softmax_kl(logits: Tensor, perturbed: Tensor, real: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> Tensor:
    """Return the mean KL over real rows of two categorical policies (Plappert et al., appendix C).

    Policies are given as logits or Q ``[…, A]``, and ``real`` is ``[…]``.
    """
    log_p, log_q = logits.log_softmax(-1), perturbed.log_softmax(-1)
    return _mean((log_p.exp() * (log_p - log_q)).sum(-1), real, sum_over_ranks)


def _mean(x: Tensor, real: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
    """Return the mean over the real rows of all ranks."""
    rows = x[real]
    total, count = sum_over_ranks(torch.stack([rows.sum(), rows.new_tensor(rows.numel())])).unbind()
    return total / count


def epsilon_kl(epsilon: float, choices: int) -> float:
    """Return the KL of a greedy policy to the ε-greedy one, −log(1 − ε + ε/|A|) (ibid., appendix C)."""
    return -math.log(1 - epsilon + epsilon / choices)


def draw_seeds(steps: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draw seeds of perturbations for many steps, ``[steps, rows]``."""
    return torch.randint(2**31, (steps, rows), generator=generator, device=generator.device)


def generator_from(numbers: Tensor) -> torch.Generator:
    """Return a generator seeded by the noise of acting, so that acting does not change the numbers of learning."""
    return torch.Generator(numbers.device).manual_seed(int(numbers[0]))
