"""QMIX: Q-learning for a team whose value is a monotonic function of its agents' values (Rashid et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ludus.agents.vdn import VDN, VDNConfig
from ludus.core.errors import check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, Shapes
from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.environments.multiagent import STATE
from ludus.networks.build import network_spec
from ludus.ops.mixing import monotonic_mixing


@dataclass(frozen=True)
class QMIXConfig(VDNConfig):
    """Settings of QMIX: those of VDN, and its own."""

    NETWORK_DEFAULTS = MappingProxyType({"mixer.sees": (STATE,)})
    mixing: int = 32  # units of the mixing network's hidden layer: more for teams whose agents depend on each other

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(self, positive=("mixing",))


class QMIX(VDN):
    """VDN with a mixing network in place of the sum.

    Its weights are outputs of the network ``mixer``, which gets the state of the world and is used in training only.
    They are not negative, so the choices that are best for each agent are best for the joint.
    """

    Config: type[Any] = QMIXConfig
    global_state = True
    network_names = ("q", "mixer")
    with_target = ("q", "mixer")

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask also for the network of the mixing network's weights."""
        agents, units = cls.make_joint(observation, action).size, config.mixing
        outputs: Shapes = {"weight": (agents * units,), "bias": (units,), "last_weight": (units,), "last_bias": (1,)}
        q = super().requirements(observation, action, config, shared)
        return q | {"mixer": network_spec(observation, outputs)}

    def mix(self, q: Tensor, inputs: Tensors, state: HiddenState, first: Tensor, target: bool = False) -> Tensor:
        """Return the team's value ``[T, B]`` of the agents' values ``[T, B, N]``."""
        given, _ = self.run("mixer", inputs, state, first, target)
        weight = given["weight"].reshape(*q.shape, self.config.mixing)
        return monotonic_mixing(q, weight, given["bias"], given["last_weight"], given["last_bias"].squeeze(-1))
