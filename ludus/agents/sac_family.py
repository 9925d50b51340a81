"""Settings of known SAC variants: other defaults of SACConfig."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from ludus.agents.sac import SACConfig
from ludus.experience.config import WIDE_MLP

DROPOUT_CRITIC = MappingProxyType({**WIDE_MLP, "critic.net1d": 'mlp(norm="layer", dropout=0.01, dropout_first=true)'})
RENORM = MappingProxyType(
    {**WIDE_MLP, "net1d": 'mlp(norm="batch_renorm", norm_inputs=true)', "critic.hidden": (1024, 1024)}
)


@dataclass(frozen=True)
class TQCConfig(SACConfig):
    """TQC (Kuznetsov et al. 2020): quantile critics, and targets without their largest quantiles."""

    quantiles: int = 25  # quantiles of the return that each critic gives; 0: its expected value
    pessimistic_actor: bool = False  # the policy maximizes the minimum over critics; off: their mean


@dataclass(frozen=True)
class DroQConfig(SACConfig):
    """DroQ (Hiraoka et al. 2022): critics with dropout and layer norms, and many updates of them per step."""

    NETWORK_DEFAULTS = DROPOUT_CRITIC
    updates_per_step: float = 20.0  # more: learns from fewer steps and takes longer
    # updates of the critics per update of the actor and the temperature: as updates_per_step, one actor update per step
    policy_delay: int = 20
    pessimistic_actor: bool = False  # the policy maximizes the minimum over critics; off: their mean


@dataclass(frozen=True)
class CQLConfig(SACConfig):
    """CQL (Kumar et al. 2020): SAC with conservative values, for offline training."""

    PREFERS_OFFLINE = True
    actor_learning_rate: float = 1e-4  # of the actor; 0: learning_rate
    # weight of the conservative loss, which lowers Q of actions that the data lacks; higher stays nearer to the data
    conservative_coef: float = 5.0


@dataclass(frozen=True)
class CrossQConfig(SACConfig):
    """CrossQ (Bhatt et al. 2024): networks with batch renormalization, and no target networks."""

    NETWORK_DEFAULTS = RENORM
    target_networks: bool = False  # targets by averaged critics; off: by the critics themselves
    learning_rate: float = 1e-3  # raise for speed, lower when the return collapses
    policy_delay: int = 3  # updates of the critics per update of the actor and the temperature
    adam_beta1: float = 0.5  # decay of Adam's mean of gradients: lower follows new gradients sooner
