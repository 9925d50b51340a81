"""Shared by the off-policy benchmarks: jobs, their settings and the meter.

Nothing but the standard library is imported here, so that a side in another interpreter can read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.protocol import Meter

Kind = Literal["dqn", "sac", "td3"]
SETTLED = 50  # updates after which every kind of update has been made, and compiled, more than once


@dataclass(frozen=True)
class OffPolicySettings:
    """The settings of one job, independent of the library; one environment, Adam with default betas."""

    environment: str
    agent: Kind
    hidden: tuple[int, ...] = (256, 256)  # relu; the same for actor and critics
    batch: int = 256
    replay: int = 1_000_000
    learning_rate: float = 3e-4
    gamma: float = 0.99
    train_every: int = 1  # steps per update
    learning_starts: int = 1_000  # steps of random actions before the first update
    target_every: int = 500  # DQN: steps from one copy of the target to the next
    max_grad_norm: float = 10.0  # only DQN
    epsilon: tuple[float, float] = (0.05, 0.05)  # DQN: at first, and after ``explore`` steps
    explore: int = 1
    tau: float = 0.005  # SAC and TD3: how far a target follows at each update
    policy_delay: int = 2  # TD3, as what follows
    target_noise: float = 0.2
    noise_clip: float = 0.5
    exploration_noise: float = 0.1
    log_every: int = 4_000  # steps: about as often as Stable-Baselines3, which logs every four episodes
    steps: int = 100_000_000  # for a timed job: more than it can reach


CARTPOLE = OffPolicySettings(
    "CartPole-v1", "dqn", (120, 84), batch=128, replay=10_000, learning_rate=2.5e-4, train_every=10, log_every=500
)
MINATAR = OffPolicySettings(  # a convolution and a layer of 128, see off_policy_minatar.py
    "benchmarks.off_policy_minatar:Breakout",
    "dqn",
    (),
    batch=32,
    replay=100_000,
    learning_rate=2.5e-4,
    train_every=2,
    target_every=1_000,
    epsilon=(1.0, 0.05),
    explore=50_000,
    log_every=2_000,
)
JOBS: dict[str, OffPolicySettings] = {
    "dqn10": CARTPOLE,
    "dqn1": OffPolicySettings(**(vars(CARTPOLE) | {"train_every": 1})),
    "sac": OffPolicySettings("HalfCheetah-v5", "sac"),
    "td3": OffPolicySettings("HalfCheetah-v5", "td3"),
}
CURVES: dict[str, OffPolicySettings] = {"sac": JOBS["sac"], "td3": JOBS["td3"], "pong": MINATAR}


class SettledMeter:
    """Measures steps per second like ``Meter``, but only after some updates."""

    def __init__(self, settings: OffPolicySettings, warm_up: float, seconds: float) -> None:
        self._after = settings.learning_starts + SETTLED * settings.train_every
        self._warm_up, self._seconds = warm_up, seconds
        self._meter: Meter | None = None

    def update(self, step: int) -> bool:
        """Record that ``step`` steps are done; return whether to stop."""
        if step < self._after:
            return False
        if self._meter is None:
            self._meter = Meter(self._warm_up, self._seconds)
        return self._meter.update(step)

    @property
    def rate(self) -> float:
        """Steps per second."""
        if self._meter is None:
            raise RuntimeError("The run ended before its updates began; give more steps.")
        return self._meter.rate
