"""Q(s, a) critics: the action is concatenated before the first layer; recurrent pieces see only observations."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ludus.core.calls import parse_call
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shapes
from ludus.core.types import Tensors
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork
from ludus.networks.pieces import piece_class

ACTION = "taken_action"  # the critic's input besides the observations
MEMORY = "memory"  # the output of the recurrent part


def concatenate_inputs(config: NetworkConfig) -> NetworkConfig:
    """Return settings where vectors and matrices are concatenated before their first layer.

    If observation and action had separate layers joined only by a linear one, Q would be a sum of both and the best
    action would not depend on the observation. Images keep their sources. The concatenated features go through the
    body if one is set, else through ``net1d``; if that is not an mlp, an mlp follows.
    """
    if config.body not in ("auto", "identity1d"):
        body, head = config.body, "mlp"
    elif config.net1d == "identity1d":
        body, head = "mlp", "identity1d"
    else:
        body = config.net1d
        head = "identity1d" if parse_call(body, "network.net1d").name == "mlp" else "mlp"
    return replace(
        config,
        net1d="identity1d",
        net2d="identity2d" if config.net2d in ("auto", "flat_mlp") else config.net2d,
        body=body,
        head1d=head if config.head1d == "identity1d" else config.head1d,
    )


def has_memory(config: NetworkConfig, spec: NetworkSpec) -> bool:
    """Return whether the network is a critic with a recurrent piece."""
    if not spec.concatenate or ACTION not in spec.inputs:
        return False
    pieces = config.used_pieces(config.feature_shapes(spec.inputs, spec.categories), spec.outputs)
    return any(piece_class(*piece).recurrent for piece in pieces)


class RecurrentCritic(Network):
    """A recurrent network over observations, followed by an mlp over its output and the action.

    The hidden state does not depend on the actions, so Q can be evaluated for any action at each step.
    """

    recurrent = True

    def __init__(self, spec: NetworkSpec, config: NetworkConfig) -> None:
        super().__init__()
        observations = {name: shape for name, shape in spec.inputs.items() if name != ACTION}
        outputs: Shapes = {MEMORY: (config.lstm_size,)}
        memory = NetworkSpec(observations, outputs, masks=spec.masks, categories=spec.categories)
        self.memory = ModularNetwork(memory, config)
        mlp = concatenate_inputs(replace(config, net1d="mlp", body="auto", head1d="identity1d"))
        inputs = {MEMORY: (config.lstm_size,), ACTION: spec.inputs[ACTION]}
        q_network = NetworkSpec(inputs, spec.outputs, streams=spec.streams, noisy=spec.noisy)
        self.q_network = ModularNetwork(q_network, mlp)

    def initial_state(self, batch: int) -> HiddenState:
        return self.memory.initial_state(batch)

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        features, new_state = self.memory(observation, state, first)
        outputs, _ = self.q_network(features | {ACTION: observation[ACTION]}, HiddenState(), first)
        return outputs, new_state
