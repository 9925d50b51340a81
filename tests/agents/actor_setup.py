"""Workers of actors that learn from a replay, batches made by hand, and Stable-Baselines3 with the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from ludus.containers.build import build_agent, build_evaluator, build_manager
from ludus.containers.local import LocalWorker
from ludus.containers.updater import LocalUpdater
from ludus.core.batch import Batch
from ludus.settings.settings import resolve_settings

TOY = "ludus.environments.toy:"
POINT = f"{__name__}:Point"
SMALL: dict[str, Any] = {
    "network.hidden": (32, 32),
    "network.activation": "relu",
    "network.lstm_size": 8,
    "agent.batch_size": 16,
    "agent.warmup": 32,
    "agent.replay": 1_000,
    "evaluation.every": 0,
    "evaluation.episodes": 4,
    "nb_step": 1_000,
}


def make_worker(environment: str, agent: str, **changes: Any) -> LocalWorker:
    """A worker that reports to nobody; keys of ``changes`` have ``__`` for dots."""
    torch.set_num_threads(1)
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    settings = resolve_settings(environment, agent, "none", None, SMALL | dotted).settings
    manager = build_manager(settings)
    made = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(made.action_transform)
    return LocalWorker(settings, made, manager, LocalUpdater(made), build_evaluator(settings, made))


class Point(gymnasium.Env[Any, Any]):
    """A bounded vector in and out; it is only looked at, never played."""

    def __init__(self, observation: int = 5, action: int = 3) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (observation,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (action,), np.float32)

    def reset(self, **_: Any) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}


def random_batch(name: str, rows: int, time: int = 1, observation: int = 5, action: int = 3, seed: int = 0) -> Batch:
    """A batch of ``Point``, of transitions or sequences, with actions in [−1, 1] and some that terminate."""
    g = torch.Generator().manual_seed(seed)
    terminated = torch.rand(time, rows, generator=g) < 0.2
    return Batch(
        observation={name: torch.randn(time + 1, rows, observation, generator=g)},
        first=torch.zeros(time + 1, rows, dtype=torch.bool),
        action={"action": torch.rand(time, rows, action, generator=g) * 1.8 - 0.9},
        reward=torch.randn(time, rows, generator=g),
        terminated=terminated,
        truncated=torch.zeros(time, rows, dtype=torch.bool),
        discount=0.99 * (~terminated).float(),
        real=torch.ones(time, rows, dtype=torch.bool),
        weight=torch.ones(time, rows),
        experience={},
        index=torch.arange(rows),
    )


def scalars(losses: dict[str, Tensor]) -> dict[str, float]:
    """Losses as numbers."""
    return {name: float(x.detach()) for name, x in losses.items()}


Layers = list[tuple[Tensor, Tensor]]  # weight [out, in] and bias


def layers_of(network: Any, what: str = "data") -> list[Layers]:
    """The layers of each member, as views of the parameters or of their gradients (``grad``)."""
    last = next(iter(network.projections.values()))
    if hasattr(network, "size"):  # an ensemble in one block
        found = [(getattr(x.weight, what), getattr(x.bias, what)) for x in (*network.layers, last)]
        return [[(weight[e].t(), bias[e, 0]) for weight, bias in found] for e in range(network.size)]
    (piece,) = network.pieces.values()
    return [[(getattr(x.weight, what), getattr(x.bias, what)) for x in (*piece.layers, last)]]


def as_sb3(batch: Batch, action: Tensor) -> Any:
    """What its replay would have given."""
    (observation,) = batch.observation.values()
    return SimpleNamespace(
        observations=observation[0],
        next_observations=observation[1],
        actions=action,
        rewards=batch.reward[0].unsqueeze(-1),
        dones=batch.terminated[0].float().unsqueeze(-1),
        discounts=None,
    )


class Recorder:
    """A logger that only remembers."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def record(self, name: str, value: Any, exclude: Any = None) -> None:
        """Keep the last value."""
        self.seen[name.removeprefix("train/")] = float(value)


class Peer:
    """An agent of Stable-Baselines3 on ``Point`` that learns from given batches.

    ``grad`` has what each step was taken on; ``layers`` are those of its networks in our layout, where two of its
    layers may be one.
    """

    def __init__(self, kind: Any, **more: Any) -> None:
        policy = {"net_arch": [32, 32], "activation_fn": torch.nn.ReLU}
        self.model = kind("MlpPolicy", Point(), policy_kwargs=policy, buffer_size=10, seed=3, device="cpu", **more)
        self.model._logger = self.log = Recorder()
        self.grad: dict[int, Tensor] = {}
        for optimizer in (self.model.actor.optimizer, self.model.critic.optimizer):
            optimizer.register_step_pre_hook(lambda stepped, *_: self._spy(stepped))

    def _spy(self, optimizer: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            self.grad[id(p)] = p.grad.clone()

    def learn(self, batch: Batch, action: Tensor) -> dict[str, float]:
        """One update; returns what was logged."""
        self.model.replay_buffer.sample = lambda *_, **__: as_sb3(batch, action)
        self.model.train(1, len(action))
        return self.log.seen

    def layers(self, critic: bool, what: str = "data", target: bool = False) -> list[Layers]:
        """As ``layers_of``."""
        if critic:
            networks = (self.model.critic_target if target else self.model.critic).q_networks
            return [[self._look(x, what) for x in _linear(net)] for net in networks]
        actor = self.model.actor_target if target else self.model.actor
        if not hasattr(actor, "latent_pi"):
            return [[self._look(x, what) for x in _linear(actor.mu)]]
        last = [self._look(x, what) for x in (actor.mu, actor.log_std)]
        joined = torch.cat([weight for weight, _ in last]), torch.cat([bias for _, bias in last])
        return [[*(self._look(x, what) for x in _linear(actor.latent_pi)), joined]]

    def _look(self, layer: Any, what: str) -> tuple[Tensor, Tensor]:
        if what == "data":
            return layer.weight.data, layer.bias.data
        return self.grad[id(layer.weight)], self.grad[id(layer.bias)]


def _linear(module: Any) -> list[Any]:
    return [layer for layer in module if isinstance(layer, torch.nn.Linear)]


def copy_layers(into: list[Layers], layers: list[Layers]) -> None:
    """Take weights over."""
    for ours, theirs in zip(into, layers, strict=True):
        for (weight, bias), (their_weight, their_bias) in zip(ours, theirs, strict=True):
            weight.copy_(their_weight)
            bias.copy_(their_bias)


def assert_same(ours: list[Layers], theirs: list[Layers], atol: float = 1e-5) -> None:
    """All members and layers are equal."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=atol)
