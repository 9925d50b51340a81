"""Acting in numpy on views of the parameters: in tiny networks, torch's dispatch costs more than the maths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ludus.core.hidden_state import HiddenState
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import Tensors
from ludus.networks.heads import Categorical, Gaussian
from ludus.networks.modular import ModularNetwork, module_key
from ludus.networks.policy import Policy
from ludus.networks.untouched import untouched
from ludus.preprocess.normalization import ObsNormalizer
from ludus.preprocess.observation import ObsPreprocessor

Array = NDArray[np.float32]
ZERO = np.float32(0)  # an int would be converted each time
ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "tanh": np.tanh,
    "relu": lambda x, out: np.maximum(x, ZERO, out=out),
}
LOG_2PI = float(np.log(2 * np.pi))


class NumpyActor:
    """Does what ``ActorCritic.act`` does, for plain MLPs on the CPU with one vector observation and one action.

    The action is a Discrete without mask or a Box with a Gaussian. Parameters are seen, not copied: a step of the
    optimizer shows at the next action.
    """

    def __init__(
        self,
        networks: list[ModularNetwork],
        policy: Policy,
        preprocess: ObsPreprocessor,
        normalizer: ObsNormalizer | None,
    ) -> None:
        (self.action_name, self.spec), *_ = policy.action.items()
        self.normalizer = normalizer
        head = module_key(f"policy/{self.action_name}")
        self.actor = next(NumpyMlp(net, head) for net in networks if head in net.projections)
        self.critic = next(NumpyMlp(net, "value") for net in networks if "value" in net.projections)
        self.shared = len(networks) == 1
        self._called: list[nn.Module] = [module for net in (*networks, preprocess) for module in net.modules()]
        self._called += [] if normalizer is None else normalizer.modules()
        self.log_std = None if self.spec.kind == "categorical" else _view(policy.log_std[self.action_name])
        self._rows = np.arange(0)

    @classmethod
    def build(
        cls, networks: nn.ModuleDict, policy: Policy, preprocess: ObsPreprocessor, normalizer: ObsNormalizer | None
    ) -> NumpyActor | None:
        """Return an actor, or None where something is not plain enough or not of our own classes."""
        heads, specs = [type(head) for head in policy.heads.values()], list(policy.action.values())
        plain_action = heads == [Categorical] or (heads == [Gaussian] and len(specs[0].shape) == 1)
        ours = type(policy) is Policy and type(normalizer) in (ObsNormalizer, type(None))
        if not (ours and plain_action and plain_input(preprocess) and all(map(plain_network, networks.values()))):
            return None
        return cls(
            [net for net in networks.values() if isinstance(net, ModularNetwork)], policy, preprocess, normalizer
        )

    def applies(self) -> bool:
        """Whether no hook waits for a call of a module that is gone around here."""
        return untouched(self._called)

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> AgentStep:
        """As ``Agent.act``."""
        x: Array = next(iter(step.observation.values())).numpy()
        if self.normalizer is not None:
            x = self.normalizer.numpy(x)
        features = self.actor.trunk(x)
        output = self.actor.project(features)
        if noise is None:
            action: NDArray[Any] = output.argmax(1) if self.log_std is None else output.copy()
            return AgentStep({self.action_name: torch.from_numpy(action)}, {}, state)
        drawn = noise[self.action_name].numpy()
        action, log_prob = self._discrete(output, drawn) if self.log_std is None else self._gaussian(output, drawn)
        value = self.critic.project(features if self.shared else self.critic.trunk(x))[:, 0]
        experience = {"log_prob": torch.from_numpy(log_prob), "value": torch.from_numpy(value)}
        return AgentStep({self.action_name: torch.from_numpy(action)}, experience, state)

    def _discrete(self, logits: Array, gumbel: Array) -> tuple[NDArray[np.int64], Array]:
        action = (logits + gumbel).argmax(1)
        if len(self._rows) != len(action):
            self._rows = np.arange(len(action))
        return action, logits[self._rows, action] - np.logaddexp.reduce(logits, axis=1)

    def _gaussian(self, mean: Array, normal: Array) -> tuple[Array, Array]:
        assert self.log_std is not None
        action = mean + np.exp(self.log_std) * normal
        log_prob = -0.5 * np.square(normal).sum(1) - (self.log_std.sum() + 0.5 * LOG_2PI * mean.shape[1])
        return action.astype(np.float32, copy=False), log_prob.astype(np.float32, copy=False)


def plain_input(preprocess: ObsPreprocessor) -> bool:
    """Whether the only observation is a vector that needs no preparation."""
    if type(preprocess) is not ObsPreprocessor:
        return False
    inputs = list(preprocess.specs.values())
    plain = len(inputs) == 1 and inputs[0].kind == "continuous" and inputs[0].dtype == "float32"
    return plain and len(inputs[0].shape) == 1


def plain_network(network: nn.Module) -> bool:
    """Whether a network is nothing but an MLP on the CPU."""
    piece = network.only_mlp() if type(network) is ModularNetwork else None
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in network.parameters())
    return piece is not None and piece.activation in ACTIVATIONS and on_cpu


class NumpyMlp:
    """A trunk and one projection as arrays that share memory with the parameters.

    ``called``: other modules that would be called on the way, to be looked at for hooks.
    """

    def __init__(self, network: ModularNetwork, output: str, called: Iterable[nn.Module] = ()) -> None:
        self._called = [*network.modules(), *called]
        piece: Any = network.only_mlp()
        activation = ACTIVATIONS[piece.activation]
        self.layers = [(_view(layer.weight).T, _view(layer.bias), activation) for layer in piece.layers]
        last: Any = network.projections[output]
        self.weight, self.bias = _view(last.weight).T, _view(last.bias)

    def __call__(self, x: Array) -> Array:
        return self.project(self.trunk(x))

    def applies(self) -> bool:
        """Whether no hook waits for a call of a module that is gone around here."""
        return untouched(self._called)

    def trunk(self, x: Array) -> Array:
        for weight, bias, activation in self.layers:
            x = x @ weight
            x += bias
            activation(x, out=x)
        return x

    def project(self, x: Array) -> Array:
        x = x @ self.weight
        x += self.bias
        return x


def _view(parameter: torch.Tensor) -> Array:
    view: Array = parameter.detach().numpy()
    return view
