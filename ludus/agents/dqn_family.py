"""Settings of known DQN variants: other defaults of DQNConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ludus.agents.dqn import DQNConfig
from ludus.experience.config import LSTM_BODY

Values = Literal["expected", "categorical", "quantile", "implicit"]


@dataclass(frozen=True)
class DoubleDQNConfig(DQNConfig):
    """Double DQN (van Hasselt et al. 2016): the online network selects, the target network evaluates."""

    double: bool = True  # select next actions online, evaluate them by the target network


@dataclass(frozen=True)
class DuelingDQNConfig(DQNConfig):
    """Dueling Double DQN with prioritized replay (Wang et al. 2016)."""

    double: bool = True  # select next actions online, evaluate them by the target network
    dueling: bool = True  # separate streams for state value and advantages
    prioritized: bool = True  # prioritized replay: sample by TD error, with importance weights


@dataclass(frozen=True)
class C51Config(DQNConfig):
    """C51 (Bellemare et al. 2017): categorical return distribution on fixed atoms."""

    values: Values = "categorical"  # categorical return distribution


@dataclass(frozen=True)
class QRDQNConfig(DQNConfig):
    """QR-DQN (Dabney et al. 2018a): return distribution by quantile regression."""

    values: Values = "quantile"  # quantile regression


@dataclass(frozen=True)
class IQNConfig(DQNConfig):
    """IQN (Dabney et al. 2018b): implicit quantile network, quantiles sampled at any level."""

    values: Values = "implicit"  # quantiles at sampled levels
    atoms: int = 8  # quantiles per update


@dataclass(frozen=True)
class MunchausenDQNConfig(DQNConfig):
    """Munchausen DQN (Vieillard et al. 2020): adds the scaled log-policy to the reward."""

    munchausen: float = 0.9  # weight of the log-policy that is added to the reward; 0: off


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Rainbow (Hessel et al. 2018): double, dueling, prioritized, n-step, C51 and noisy layers."""

    double: bool = True  # select next actions online, evaluate them by the target network
    dueling: bool = True  # separate streams for state value and advantages
    noisy: bool = True  # noisy layers (NoisyNet) explore instead of ε
    prioritized: bool = True  # prioritized replay: sample by TD error, with importance weights
    priority_exponent: float = 0.5  # 0: uniform; 1: proportional to the TD error
    n_step: int = 3  # steps of n-step returns
    values: Values = "categorical"  # categorical return distribution


@dataclass(frozen=True)
class DiscreteCQLConfig(DQNConfig):
    """Discrete CQL (Kumar et al. 2020): Double DQN with conservative values, for offline training."""

    PREFERS_OFFLINE = True
    double: bool = True  # select next actions online, evaluate them by the target network
    # weight of the conservative loss, which lowers Q of actions that the data lacks; higher stays nearer to the data
    conservative_coef: float = 1.0


@dataclass(frozen=True)
class R2D2Config(DQNConfig):
    """R2D2 (Kapturowski et al. 2019): recurrent DQN on prioritized sequences with burn-in."""

    NETWORK_DEFAULTS = LSTM_BODY
    batch_size: int = 32  # sequences per update
    sequence: int = 20  # length of replayed sequences
    burn_in: int = 10  # steps before each sequence that only warm up the hidden state
    overlap: int = 10  # steps that one sequence shares with the next
    double: bool = True  # select next actions online, evaluate them by the target network
    dueling: bool = True  # separate streams for state value and advantages
    prioritized: bool = True  # prioritized replay: sample by TD error, with importance weights
    priority_exponent: float = 0.9  # 0: uniform; 1: proportional to the TD error
    importance_exponent: float = 0.6  # exponent of the importance weights at first; 1 at nb_step
    n_step: int = 5  # steps of n-step returns
    rescaled: bool = True  # learn values on the invertible square-root scale
    epsilon_schedule: Literal["linear", "exponential", "constant"] = "constant"  # of ε over the run
    epsilon_start: float = 0.4  # ε of the first environment
    epsilon_ladder: float = 7.0  # exponent of the ladder of ε over environments (Ape-X)
