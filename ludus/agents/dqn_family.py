"""Known combinations of DQN's settings, under the names that people use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ludus.agents.dqn import DQNConfig
from ludus.experience.config import REMEMBERING

Values = Literal["expected", "categorical", "quantile", "implicit"]


@dataclass(frozen=True)
class DoubleDQNConfig(DQNConfig):
    """Double DQN (van Hasselt et al. 2016): the online network selects, the target network evaluates."""

    double: bool = True  # the network chooses the next action, the target values it: less optimism


@dataclass(frozen=True)
class DuelingDQNConfig(DQNConfig):
    """Dueling Double DQN with prioritized replay (Wang et al. 2016)."""

    double: bool = True  # the network chooses the next action, the target values it: less optimism
    dueling: bool = True  # the value of a state and the advantage of each action apart
    prioritized: bool = True  # draw what surprised more often, and correct for it


@dataclass(frozen=True)
class C51Config(DQNConfig):
    """C51 (Bellemare et al. 2017): categorical return distribution on fixed atoms."""

    values: Values = "categorical"  # probabilities of fixed returns


@dataclass(frozen=True)
class QRDQNConfig(DQNConfig):
    """QR-DQN (Dabney et al. 2018a): return distribution by quantile regression."""

    values: Values = "quantile"  # quantiles of the return


@dataclass(frozen=True)
class IQNConfig(DQNConfig):
    """IQN (Dabney et al. 2018b): implicit quantile network, quantiles sampled at any level."""

    values: Values = "implicit"  # quantiles of the return at any level
    atoms: int = 8  # quantiles per update


@dataclass(frozen=True)
class MunchausenDQNConfig(DQNConfig):
    """Munchausen DQN (Vieillard et al. 2020): adds the scaled log-policy to the reward."""

    munchausen: float = 0.9  # share of the policy's own log-probability in the reward; 0: off


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Rainbow (Hessel et al. 2018): double, dueling, prioritized, n-step, C51 and noisy layers."""

    double: bool = True  # the network chooses the next action, the target values it: less optimism
    dueling: bool = True  # the value of a state and the advantage of each action apart
    noisy: bool = True  # layers that explore by themselves (NoisyNet) instead of ε
    prioritized: bool = True  # draw what surprised more often, and correct for it
    priority_exponent: float = 0.5  # 0: all alike; 1: in proportion to the surprise
    n_step: int = 3  # rewards summed before the value of what follows: more is quicker and less exact
    values: Values = "categorical"  # probabilities of fixed returns


@dataclass(frozen=True)
class R2D2Config(DQNConfig):
    """R2D2 (Kapturowski et al. 2019): recurrent DQN on prioritized sequences with burn-in."""

    NETWORK_DEFAULTS = REMEMBERING
    batch_size: int = 32  # sequences per update
    sequence: int = 20  # steps of a sequence to learn from
    burn_in: int = 10  # steps before each sequence that only bring the memory up to date
    overlap: int = 10  # steps that one sequence shares with the next
    double: bool = True  # the network chooses the next action, the target values it: less optimism
    dueling: bool = True  # the value of a state and the advantage of each action apart
    prioritized: bool = True  # draw what surprised more often, and correct for it
    priority_exponent: float = 0.9  # 0: all alike; 1: in proportion to the surprise
    importance_exponent: float = 0.6  # how much of that bias is corrected at first; all of it at nb_step
    n_step: int = 5  # rewards summed before the value of what follows: more is quicker and less exact
    rescaled: bool = True  # values on a scale that squeezes large ones
    epsilon_schedule: Literal["linear", "exponential", "constant"] = "constant"  # of random actions over the run
    epsilon_start: float = 0.4  # of the first environment
    epsilon_ladder: float = 7.0  # environments explore differently; 0: all alike
