"""Acting in numpy on views of the parameters: in small networks, torch's dispatch costs more than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ludus.core.hidden_state import HiddenState
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import Tensors
from ludus.networks.action_heads import Categorical
from ludus.networks.continuous_heads import Gaussian
from ludus.networks.modular import ModularNetwork
from ludus.networks.module_checks import NoHooks
from ludus.networks.policy import Policy
from ludus.networks.slots import module_key
from ludus.preprocess.normalization import ObsNormalizer
from ludus.preprocess.observation import ObsPreprocessor

Array = NDArray[np.float32]
ZERO = np.float32(0)  # avoids converting an int at each call
ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "tanh": np.tanh,
    "relu": lambda x, out: np.maximum(x, ZERO, out=out),
}
LOG_2PI = float(np.log(2 * np.pi))


class NumpyMLP:
    """The hidden layers and some projections of an MLP, as arrays that share memory with its parameters.

    Observations are normalized first if there is a ``normalizer``. ``skipped`` are other modules that are bypassed, as
    those of preprocessing. Where it is not ``usable``, since one of the modules has a hook, torch is used instead.
    """

    def __init__(
        self,
        network: ModularNetwork,
        outputs: Sequence[str],
        skipped: Iterable[nn.Module],
        normalizer: ObsNormalizer | None,
    ) -> None:
        modules = [*network.modules(), *skipped, *([] if normalizer is None else normalizer.modules())]
        self.usable = NoHooks(modules)
        self._normalizer, (self._seen, *_) = normalizer, network.inputs
        mlp: Any = network.plain_mlp()
        self._activate = ACTIVATIONS[mlp.activation]
        self._layers = [_views(layer) for layer in mlp.layers]
        self._projections = [_views(network.projections[name]) for name in outputs]

    def __call__(self, x: Array) -> list[Array]:
        """Return the outputs that the constructor names."""
        if self._normalizer is not None:
            x = self._normalizer.numpy(x, self._seen)
        for weight, bias in self._layers:
            x = x @ weight
            x += bias
            self._activate(x, out=x)
        return [x @ weight + bias for weight, bias in self._projections]


class NumpyActor:
    """Computes ``ActorCritic.act`` for plain MLPs on the CPU that see one vector, and one action.

    The action is a Discrete without mask, or a Box with a Gaussian. Optimizer steps take effect at once, since the
    parameters are not copied.
    """

    def __init__(
        self,
        network: ModularNetwork,
        policy: Policy,
        preprocess: ObsPreprocessor,
        normalizer: ObsNormalizer | None,
    ) -> None:
        ((self._name, spec),) = policy.action.items()
        (self._seen,) = network.inputs
        output = module_key(f"policy/{self._name}")
        outputs = [output, "value"] if "value" in network.projections else [output]  # a shared network
        self._mlp = NumpyMLP(network, outputs, preprocess.modules(), normalizer)
        head: Any = policy.heads[output]
        self._log_std = None if spec.kind == "categorical" else head.log_std.detach().numpy()
        self.usable = self._mlp.usable

    @classmethod
    def build(
        cls,
        networks: Mapping[str, nn.Module],
        policy: Policy,
        preprocess: ObsPreprocessor,
        normalizer: ObsNormalizer | None,
    ) -> NumpyActor | None:
        """Return an actor, or None where a class, a network or an action is not one that it supports."""
        heads, specs = [type(head) for head in policy.heads.values()], list(policy.action.values())
        supported_action = heads == [Categorical] or (heads == [Gaussian] and len(specs[0].shape) == 1)
        supported_classes = type(policy) is Policy and type(normalizer) in (ObsNormalizer, type(None))
        if not (supported_action and supported_classes) or len(networks) > 1:
            return None
        (network,) = networks.values()
        if is_plain_mlp(network) and is_plain_vector(preprocess, network.inputs):
            return cls(network, policy, preprocess, normalizer)
        return None

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> AgentStep:
        """Return the same as ``Agent.act``."""
        output, *value = self._mlp(step.observation[self._seen].numpy())
        if noise is None:
            action: NDArray[Any] = output.argmax(1) if self._log_std is None else output
            return AgentStep({self._name: torch.from_numpy(action)}, {}, state)
        drawn = noise[self._name].numpy()
        if self._log_std is None:
            action = (output + drawn).argmax(1)  # drawn: Gumbel noise
            log_prob = output[np.arange(len(action)), action] - np.logaddexp.reduce(output, axis=1)
        else:
            action = (output + np.exp(self._log_std) * drawn).astype(np.float32, copy=False)
            constant = self._log_std.sum() + 0.5 * LOG_2PI * output.shape[1]
            log_prob = (-0.5 * np.square(drawn).sum(1) - constant).astype(np.float32, copy=False)
        experience = {"log_prob": torch.from_numpy(log_prob)}
        if value:
            experience["value"] = torch.from_numpy(value[0][:, 0])
        return AgentStep({self._name: torch.from_numpy(action)}, experience, state)


def is_plain_vector(preprocess: ObsPreprocessor, seen: Iterable[str] | None = None) -> bool:
    """Return whether the only observation that is ``seen`` (None: of all) is a float32 vector without preprocessing."""
    names = list(preprocess.specs if seen is None else seen)
    if type(preprocess) is not ObsPreprocessor or len(names) != 1 or names[0] not in preprocess.specs:
        return False
    spec = preprocess.specs[names[0]]
    return not spec.ops and spec.kind == "continuous" and spec.dtype == "float32" and len(spec.shape) == 1


def is_plain_mlp(network: nn.Module) -> TypeGuard[ModularNetwork]:
    """Return whether a network is an MLP on the CPU with an activation that numpy has."""
    mlp = network.plain_mlp() if type(network) is ModularNetwork else None
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in network.parameters())
    return mlp is not None and mlp.activation in ACTIVATIONS and on_cpu


def _views(layer: Any) -> tuple[Array, Array]:
    """Return the transposed weight and the bias of a linear layer."""
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()
