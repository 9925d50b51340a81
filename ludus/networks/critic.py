"""Networks that judge an action: it meets the observation before their first layer, and no memory ever sees it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.names import resolve
from ludus.core.network import Network, NetworkSpec
from ludus.core.types import Tensors
from ludus.networks import SUBMODULES
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork

TAKEN = "taken_action"  # the input that is no observation
MEMORY = "memory"  # what is remembered of observations


def joined(config: NetworkConfig) -> NetworkConfig:
    """The same pieces, but what vectors and matrices would go through one by one they go through together.

    A critic Q(s, a) needs that: where observation and action have a layer each and are then added up by a linear one,
    the best action does not depend on the observation. Images still have their sources. The joined features go through
    the body, if one is set, else through ``net1d``; an mlp follows where these are something else.
    """
    if config.body not in ("auto", "identity1d"):
        body, head = config.body, "mlp"
    elif config.net1d in ("identity1d", "mlp"):
        body, head = "mlp", "identity1d"
    else:
        body, head = config.net1d, "mlp"
    return replace(
        config,
        net1d="identity1d",
        net2d="identity2d" if config.net2d == "flat_mlp" else config.net2d,
        body=body,
        head=head if config.head == "identity1d" else config.head,
    )


def remembers(config: NetworkConfig, need: NetworkSpec) -> bool:
    """Whether a piece that such a network would have is recurrent."""
    shapes = [shape for shape in need.inputs.values() if len(shape) in (1, 2, 3, 4)]
    sources = {config.net3d_for(shape) if len(shape) == 3 else getattr(config, f"net{len(shape)}d") for shape in shapes}
    names = {*sources, config.settled(len(need.inputs)).body, config.head}
    return any(resolve(name, SUBMODULES, "piece of a network").recurrent for name in names)


class MemoryFirst(Network):
    """A memory of observations, and an mlp that judges what is remembered together with an action.

    What is remembered does not depend on the action judged, so that one step's values are those after the steps that
    were, whatever actions they are asked for.
    """

    recurrent = True

    def __init__(self, need: NetworkSpec, config: NetworkConfig) -> None:
        super().__init__()
        seen = {name: shape for name, shape in need.inputs.items() if name != TAKEN}
        self.memory = ModularNetwork(seen, {MEMORY: (config.lstm_size,)}, config)
        plain = replace(config, net1d="mlp", body="auto", head="identity1d")
        inputs = {MEMORY: (config.lstm_size,), TAKEN: need.inputs[TAKEN]}
        self.judge = ModularNetwork(inputs, need.outputs, joined(plain), need.streams, need.noisy)

    def initial_state(self, batch: int) -> HiddenState:
        return self.memory.initial_state(batch)

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        remembered, new = self.memory(observation, state, first)
        outputs, _ = self.judge(remembered | {TAKEN: observation[TAKEN]}, HiddenState(), first)
        return outputs, new
