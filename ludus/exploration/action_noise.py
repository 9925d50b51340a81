"""Noise on continuous actions in [−1, 1]: normal, clipped normal, uniform, and Ornstein–Uhlenbeck."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from ludus.core.errors import UserError, check_ranges, did_you_mean
from ludus.core.hidden_state import HiddenState
from ludus.exploration.schedule import Schedule

NoiseKind = Literal["normal", "clipped_normal", "uniform", "ornstein_uhlenbeck"]
OU = "exploration/ou"  # where the hidden state has what Ornstein–Uhlenbeck noise remembers


class ActionNoise(ABC):
    """Numbers drawn for many steps at once, and their way onto an action; independent between rows and elements.

    ``sigma`` is one number, or ``[B, 1]`` with one for each environment. With ``end`` it goes there in a straight line
    over the run (the largest does, if there are several: they keep their proportions).
    """

    def __init__(self, sigma: float | Tensor = 0.1, end: float | None = None) -> None:
        self._rows: Tensor | None = None  # [B, 1]: each environment's share of the level
        if isinstance(sigma, Tensor):
            if sigma.dim() != 2 or sigma.shape[1] != 1:
                shape = list(sigma.shape)
                raise UserError(f"agent.noise_sigma has shape {shape}; give one number, or [environments, 1].")
            _refuse(noise_sigma=float(sigma.min()))
            largest = float(sigma.max())
            self._rows, sigma = sigma / (largest or 1.0), largest
        end = sigma if end is None else end
        _refuse(noise_sigma=sigma, noise_sigma_end=end)
        self.schedule = Schedule("linear", sigma, end)
        self.level = self.schedule.at(0.0)

    def set(self, progress: float) -> float:
        """Take σ from the share of the run that is done (0 to 1); return it."""
        self.level = self.schedule.at(progress)
        return self.level

    def initial_state(self, batch: int, size: int, device: torch.device | None = None) -> HiddenState:
        """What it remembers before the first step, for actions of ``size`` elements; of most kinds nothing."""
        return HiddenState()

    def draw(self, steps: int, batch: int, size: int, generator: torch.Generator) -> Tensor:
        """The numbers of ``steps`` steps, ``[steps, B, size]``, in units of σ; on the generator's device."""
        numbers = self._numbers((steps, batch, size), generator)
        if self._rows is None:
            return numbers
        if len(self._rows) != batch:
            raise UserError(
                f"agent.noise_sigma has {len(self._rows)} rows and there are {batch} environments; give one for each."
            )
        return numbers.mul_(self._rows.to(numbers))

    @abstractmethod
    def _numbers(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor: ...

    def apply(self, action: Tensor, drawn: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        """Add one step of what was drawn, ``[B, K]``, within [−1, 1]; rows with ``first`` begin an episode."""
        return torch.add(action, drawn, alpha=self.level).clamp_(-1, 1), state


class NormalNoise(ActionNoise):
    """N(0, σ²)."""

    def _numbers(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)


class ClippedNormalNoise(NormalNoise):
    """N(0, σ²), what lies beyond ±clip·σ put on that bound: of clip 2.5 as in TD3's targets, one number in 80.

    That narrows it: the deviation is 0.96 σ with clip 2 and 0.72 σ with clip 1.
    """

    def __init__(self, sigma: float | Tensor = 0.1, end: float | None = None, clip: float = 2.5) -> None:
        super().__init__(sigma, end)
        check_ranges(SimpleNamespace(noise_clip=clip), positive=("noise_clip",))
        self.clip = clip

    def _numbers(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return super()._numbers(shape, generator).clamp_(-self.clip, self.clip)


class UniformNoise(ActionNoise):
    """Uniform between −σ and σ: σ is half the width here, and the deviation σ/√3."""

    def _numbers(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device).mul_(2).sub_(1)


class OrnsteinUhlenbeckNoise(NormalNoise):
    """Noise that drifts: x ← x + θ(μ − x)dt + σ√dt·ε (Uhlenbeck & Ornstein 1930, in DDPG since Lillicrap et al. 2016).

    x is 0 before an episode's first action, for each environment, and one step is correlated with the next by
    1 − θ·dt. In the long run the deviation is σ/√(2θ − θ²dt), so 1.9 σ with θ = 0.15 and dt = 1.
    """

    def __init__(
        self,
        sigma: float | Tensor = 0.1,
        end: float | None = None,
        theta: float = 0.15,  # how fast it comes back
        mean: float = 0.0,  # where to (μ)
        dt: float = 1.0,  # the time between two steps
    ) -> None:
        super().__init__(sigma, end)
        given = SimpleNamespace(noise_theta=theta, noise_dt=dt, noise_mean=mean)
        check_ranges(given, positive=("noise_theta", "noise_dt"), finite=("noise_mean",))
        if theta * dt > 1:
            raise UserError(
                f"agent.noise_theta is {theta} and agent.noise_dt is {dt}; their product must be 1 at most, or the "
                "noise overshoots its mean."
            )
        self._kept, self._drift, self._root = 1 - theta * dt, theta * mean * dt, math.sqrt(dt)

    def initial_state(self, batch: int, size: int, device: torch.device | None = None) -> HiddenState:
        """Zeros."""
        return HiddenState({OU: torch.zeros(batch, size, device=device)})

    def apply(self, action: Tensor, drawn: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        """Move x by one step and add it."""
        x = state[OU].masked_fill(first.unsqueeze(-1), 0).mul_(self._kept).add_(drawn, alpha=self.level * self._root)
        if self._drift:
            x += self._drift
        return (action + x).clamp_(-1, 1), HiddenState(state | {OU: x})


KINDS: dict[str, type[ActionNoise]] = {
    "normal": NormalNoise,
    "clipped_normal": ClippedNormalNoise,
    "uniform": UniformNoise,
    "ornstein_uhlenbeck": OrnsteinUhlenbeckNoise,
}


def make_action_noise(
    kind: NoiseKind,
    sigma: float | Tensor = 0.1,
    sigma_end: float | None = None,
    *,
    clip: float = 2.5,
    theta: float = 0.15,
    mean: float = 0.0,
    dt: float = 1.0,
) -> ActionNoise:
    """Make noise of a kind; what the kind does not have (``clip``, or ``theta``, ``mean`` and ``dt``) is ignored."""
    if kind not in KINDS:
        raise UserError(f'agent.noise is "{kind}"; use one of {", ".join(KINDS)}.{did_you_mean(kind, KINDS)}')
    if kind == "clipped_normal":
        return ClippedNormalNoise(sigma, sigma_end, clip)
    if kind == "ornstein_uhlenbeck":
        return OrnsteinUhlenbeckNoise(sigma, sigma_end, theta, mean, dt)
    return KINDS[kind](sigma, sigma_end)


def _refuse(**given: float) -> None:
    """Refuse deviations that are none."""
    check_ranges(SimpleNamespace(**given), nonnegative=tuple(given))
