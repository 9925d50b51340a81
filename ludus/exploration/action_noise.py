"""Noise on continuous actions in [−1, 1]: normal, clipped normal, uniform and Ornstein–Uhlenbeck."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace

import torch
from torch import Tensor

from ludus.core.calls import check_arguments, parse_call
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.imports import resolve
from ludus.core.schedule import Schedule
from ludus.exploration import NOISES

SETTING = "agent.noise"
OU = "exploration/ou"  # the state of Ornstein–Uhlenbeck noise in the hidden state


class ActionNoise(ABC):
    """Noise that is drawn for many steps at once and added to actions, independent across rows and elements.

    ``sigma`` may be a schedule; with ``end`` it changes linearly over the run. A subclass of your own implements
    ``draw``, and ``apply`` if its noise is more than σ times the numbers drawn; what it keeps from step to step is part
    of the hidden state.
    """

    def __init__(self, sigma: float = 0.1, end: float | None = None) -> None:
        end = sigma if end is None else end
        settings = SimpleNamespace(noise_sigma=sigma, noise_sigma_end=end)
        check_ranges(settings, nonnegative=("noise_sigma", "noise_sigma_end"))
        self.schedule = sigma if isinstance(sigma, Schedule) else Schedule("linear", sigma, end)
        self.sigma = self.schedule.at(0.0)

    def update(self, progress: float) -> float:
        """Set σ by the fraction of the run that is done (0 to 1) and return it."""
        self.sigma = self.schedule.at(progress)
        return self.sigma

    def initial_state(self, batch: int, size: int, device: torch.device | None = None) -> HiddenState:
        """Return the noise's state before the first step, for actions of ``size`` elements; most kinds have none."""
        return HiddenState()

    @abstractmethod
    def draw(self, steps: int, batch: int, size: int, generator: torch.Generator) -> Tensor:
        """Draw noise for ``steps`` steps in units of σ: ``[steps, B, size]`` on the generator's device."""

    def apply(self, action: Tensor, drawn: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        """Add one step of drawn noise ``[B, K]`` and clip to [−1, 1]; rows with ``first`` start an episode."""
        return torch.add(action, drawn, alpha=self.sigma).clamp_(-1, 1), state


class NormalNoise(ActionNoise):
    """N(0, σ²)."""

    def draw(self, steps: int, batch: int, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(steps, batch, size, generator=generator, device=generator.device)


class ClippedNormalNoise(NormalNoise):
    """N(0, σ²) clipped to ±clip·σ; TD3's target noise has clip 2.5.

    Clipping reduces the standard deviation, to 0.96 σ with clip 2 and 0.72 σ with clip 1.
    """

    def __init__(self, sigma: float = 0.1, end: float | None = None, clip: float = 2.5) -> None:
        super().__init__(sigma, end)
        check_ranges(SimpleNamespace(noise_clip=clip), positive=("noise_clip",))
        self.clip = clip

    def draw(self, steps: int, batch: int, size: int, generator: torch.Generator) -> Tensor:
        return super().draw(steps, batch, size, generator).clamp_(-self.clip, self.clip)


class UniformNoise(ActionNoise):
    """Uniform on [−σ, σ]; the standard deviation is σ/√3."""

    def draw(self, steps: int, batch: int, size: int, generator: torch.Generator) -> Tensor:
        return torch.rand(steps, batch, size, generator=generator, device=generator.device).mul_(2).sub_(1)


class OrnsteinUhlenbeckNoise(NormalNoise):
    """Ornstein–Uhlenbeck noise x ← x − θx + σε, as in DDPG (Lillicrap et al. 2016).

    x starts at 0 in each episode, and successive steps have the correlation 1 − θ. The stationary standard deviation
    is σ/√(2θ − θ²): 1.9 σ with θ = 0.15.
    """

    def __init__(self, sigma: float = 0.1, end: float | None = None, theta: float = 0.15) -> None:
        super().__init__(sigma, end)
        check_ranges(SimpleNamespace(noise_theta=theta), positive=("noise_theta",))
        if theta > 1:
            raise UserError(f"agent.noise_theta is {theta}; it must be 1 at most, or the noise overshoots its mean.")
        self._decay = 1 - theta

    def initial_state(self, batch: int, size: int, device: torch.device | None = None) -> HiddenState:
        return HiddenState({OU: torch.zeros(batch, size, device=device)})

    def apply(self, action: Tensor, drawn: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        """Advance x by one step and add it to the action."""
        x = state[OU].masked_fill(first.unsqueeze(-1), 0).mul_(self._decay)
        x.add_(drawn, alpha=self.sigma)
        return (action + x).clamp_(-1, 1), HiddenState(state | {OU: x})


def make_action_noise(
    kind: str, sigma: float = 0.1, sigma_end: float | None = None, *, clip: float = 2.5, theta: float = 0.15
) -> ActionNoise:
    """Make noise of one kind, which ignores the settings of the others (``clip``, ``theta``).

    ``kind`` is a key of ``NOISES``, or a class of the user as ``package.module:Class`` or
    ``package.module:Class(name=value, …)``, which is called with σ, its end and these arguments.
    """
    if kind == "clipped_normal":
        return ClippedNormalNoise(sigma, sigma_end, clip)
    if kind == "ornstein_uhlenbeck":
        return OrnsteinUhlenbeckNoise(sigma, sigma_end, theta)
    made: ActionNoise = noise_class(kind)(sigma, sigma_end, **parse_call(kind, SETTING).arguments)
    return made


def noise_class(kind: str) -> type[ActionNoise]:
    """Return the class of a kind of noise, and check the arguments that are given with it."""
    call = parse_call(kind, SETTING, "ornstein_uhlenbeck or my_package.my_module:MyNoise(size=2)")
    cls = resolve(call.name, NOISES | {"parameter": ""}, SETTING)  # which is no noise on actions
    if not (isinstance(cls, type) and issubclass(cls, ActionNoise)):
        raise UserError(f'{SETTING} "{call.name}" is not a noise: it must be a subclass of {__name__}.ActionNoise.')
    if call.name in NOISES and call.arguments:
        raise UserError(
            f"{SETTING} is {kind}, but {call.name} takes no arguments; its settings are agent.noise_sigma, "
            "agent.noise_clip and agent.noise_theta."
        )
    check_arguments(cls, call, 2, f'{SETTING} "{kind}"')
    return cls
