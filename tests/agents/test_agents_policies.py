"""Agents with every kind of policy: acting and learning agree, updates are finite, runs resume exactly."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from agents_setup import SMALL, make_worker
from gymnasium import spaces
from masked_parts import Doors
from test_agents_consistency import assert_replayed

import ludus
from ludus.containers.loop import begin, collect
from ludus.containers.updater import LocalUpdater
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.managers.simple import SimpleEnvManager
from ludus.managers.vector import VectorEnvManager

TARGET, COMMAND = "ludus.environments.toy:TargetEnv", "ludus.environments.command_toy:CommandEnv"
MAPS: dict[str, Any] = {"network.net3d": "identity3d", "network.net2d": "identity2d", "network.body": "mlp"}
HEADS: dict[str, Any] = MAPS | {"agent.heads": ("place=spatial(screen)", "target=pointer(units)")}
ARGUMENTS = {"agent.arguments": ("function: 1=place, 2=place, 3=place+target",)}
CHAIN = {"agent.autoregressive": ("function", "target", "place"), "agent.head_width": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "state_gaussian": (TARGET, {"agent.distribution": "state_gaussian"}),
    "discretized": (TARGET, {"agent.distribution": "discretized", "agent.bins": 5}),
    "ordinal": (TARGET, {"agent.distribution": "discretized", "agent.ordinal": True}),
    "gsde": (TARGET, {"agent.distribution": "gsde", "agent.gsde_interval": 5}),
    "heads": (COMMAND, HEADS),
    "arguments": (COMMAND, HEADS | ARGUMENTS),
    "autoregressive": (COMMAND, HEADS | ARGUMENTS | CHAIN),
    "conditional masks": ("masked_parts:Doors", {"agent.autoregressive": ("room", "door"), "agent.head_width": 8}),
}
NETWORKS: dict[str, dict[str, Any]] = {"separate": {}, "shared": {"network.shared": "yes"}}


def keywords(settings: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in settings.items()}


class Places(gymnasium.Env[Any, Any]):
    """The marked cell of a map, or the marked entity of a list whose padding is marked too, is the right answer."""

    def __init__(self, entities: bool = False) -> None:
        self.entities = entities
        self.observation_space = spaces.Dict(
            {"units": spaces.Box(0, 1, (6, 2), np.float32), "units/mask": spaces.MultiBinary(6)}
            if entities
            else {"screen": spaces.Box(0, 1, (2, 2, 3), np.float32)}
        )
        self.action_space = spaces.Discrete(6)
        self.present, self.count = np.ones(6, np.int8), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.draw(), {}

    def draw(self) -> Any:
        marked = np.zeros((6, 2), np.float32)
        self.present = (np.arange(6) < self.np_random.integers(1, 7)).astype(np.int8)
        self.right = int(self.np_random.integers(self.present.sum() if self.entities else 6))
        marked[:, 1] = 1 - self.present if self.entities else 0
        marked[self.right, 1] = 1
        return {"units": marked, "units/mask": self.present} if self.entities else {"screen": marked.T.reshape(2, 2, 3)}

    def step(self, action: Any) -> Any:
        assert not self.entities or self.present[action], "padding was chosen"
        self.count += 1
        reward = float(action == self.right)
        return self.draw(), reward, self.count >= 5, False, {}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("agent", ["ppo", "a2c", "vtrace"])
@pytest.mark.parametrize("kind", KINDS)
def test_ratios_are_one_before_the_first_step_and_training_goes_on(kind: str, agent: str, network: str) -> None:
    environment, changes = KINDS[kind]
    exact = {"agent.learning_rate_schedule": "kl", "agent.target_kl": 0.01} if agent == "ppo" else {}
    worker = make_worker(environment, agent, **keywords(NETWORKS[network] | changes | exact))
    try:
        begin(worker, 3)
        for _ in range(2):
            collect(worker)
            batch = worker.cache.read()
            assert_replayed(worker.agent, batch)
            learned = worker.agent.learn(batch, worker.updater)
            assert all(torch.isfinite(x) for x in learned.metrics.values())
            if exact:
                assert learned.metrics["kl"] > 0
        worker.evaluator.run(worker.agent, worker.device)
        assert not worker.agent.use_numpy()
    finally:
        worker.close()


@pytest.mark.parametrize("kind", [*KINDS, "gaussian", "tanh", "beta"])
def test_acer_with_vtrace_learns_every_kind(kind: str) -> None:
    environment, changes = KINDS.get(kind, (TARGET, {"agent.distribution": kind}))
    changes = changes | {"agent.rollout": 8, "agent.warmup": 16}
    worker = make_worker(environment, "acer_vtrace", **keywords(NETWORKS["shared"] | changes))
    agent: Any = worker.agent
    try:
        begin(worker, 3)
        kls = []
        for _ in range(2):
            collect(worker)
            while worker.cache.ready():  # the fresh rollout, then replayed ones
                batch = worker.cache.read()
                if batch.index is None and not kls:
                    with torch.no_grad():
                        terms, _ = agent.evaluate(batch.without_last_observation())
                    torch.testing.assert_close(terms["log_prob"], batch.experience["log_prob"], rtol=0, atol=1e-4)
                metrics = agent.learn(batch, worker.updater).metrics
                assert all(torch.isfinite(x) for x in metrics.values())
                kls.append(float(metrics["kl"]))
        assert abs(kls[0]) < 1e-5  # the average policy begins as a copy
        assert len(kls) > 2
        assert kls[-1] > 0
    finally:
        worker.close()


@pytest.mark.parametrize("agent", ["acer", "acer_vtrace", "ppo"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("entities", [False, True])
def test_one_place_or_entity(entities: bool, network: str, agent: str) -> None:
    head = "action=pointer(units)" if entities else "action=spatial(screen)"
    options: dict[str, Any] = {"env.options": (f"entities={str(entities).lower()}",), "agent.heads": (head,)}
    options |= {"agent.rollout": 8} | ({} if agent == "ppo" else {"agent.warmup": 50})
    worker = make_worker(f"{__name__}:Places", agent, **keywords(MAPS | NETWORKS[network] | options))
    try:
        worker.run(300)
        step = worker.seat.env_step
        assert worker.agent.value(step, worker.seat.hidden_state).shape == (4,)
        described = worker.agent.distribution(step, worker.seat.hidden_state)["action"]["probabilities"]
        assert described.shape == ((4, 6) if entities else (4, 2, 3))
        if entities:
            assert not described[step.observation["units/mask"] == 0].any()
    finally:
        worker.close()


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("in_info", [False, True])
def test_masks_that_depend_on_an_earlier_choice_come_from_every_backend(in_info: bool, vector: bool) -> None:
    def make() -> Doors:
        return Doors(in_info)

    manager: Any = SimpleEnvManager(make, 3, "doors")
    if vector:
        manager = VectorEnvManager(gymnasium.vector.SyncVectorEnv([make] * 3), "doors")
    assert manager.observation["action_mask/door|room"].shape == (3, 4)
    step = manager.reset(0)
    rooms = torch.arange(3)
    for _ in range(12):
        mask = step.observation["action_mask/door|room"]
        step = manager.step({"room": rooms, "door": mask[rooms, rooms].int().argmax(1)})  # Doors refuses closed ones
    manager.close()


def test_gsde_noise_is_held_for_its_interval_and_follows_the_row() -> None:
    worker = make_worker(TARGET, "ppo", **keywords(KINDS["gsde"][1]))
    try:
        every = worker.agent.make_noise(Rows.all(6), torch.Generator().manual_seed(2))
        some = worker.agent.make_noise(Rows(2, 5, 6), torch.Generator().manual_seed(2))
        steps = [every.next()["action"] for _ in range(12)]
        assert torch.equal(steps[0], steps[4])
        assert not torch.equal(steps[4], steps[5])
        assert torch.equal(steps[5], steps[9])
        for step in steps[:3]:
            assert torch.equal(some.next()["action"], step[2:5])
        resumed = worker.agent.make_noise(Rows(2, 5, 6), torch.Generator())
        resumed.load_state_dict(copy.deepcopy(some.state_dict()))
        for step in steps[3:]:
            assert torch.equal(resumed.next()["action"], step[2:5])
    finally:
        worker.close()


def stop_at(update: int) -> Callable[[dict[str, float]], None]:
    def hook(values: dict[str, float]) -> None:
        if values["updates"] == update:
            signal.raise_signal(signal.SIGTERM)

    return hook


@pytest.mark.parametrize("kind", ["gsde", "autoregressive"])
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(kind: str, tmp_path: Path) -> None:
    environment, changes = KINDS[kind]
    settings = SMALL | changes | {"agent.rollout": 8, "quiet": True, "evaluation.every": 0, "evaluation.episodes": 2}

    def train(name: str, hook: Any = None) -> Any:
        mine = settings | {"runs": str(tmp_path / name)}
        return ludus.train(environment, "ppo", nb_step=256, preset="none", settings=mine, on_update=hook)

    straight, stopped = train("straight"), train("stopped", stop_at(3))
    assert stopped.steps < 256
    resumed = ludus.resume(stopped.run)
    one, other = (ludus.load(run, "latest") for run in (straight.run, resumed.run))
    for name, x in one.agent.state_dict().items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, other.agent.state_dict()[name]), name
    if kind == "autoregressive":
        observation, info = other.environment().reset(0), {}
        step = {name: x[0].numpy() for name, x in observation.observation.items() if "action_mask" not in name}
        info = {"action_mask": {"function": np.array([1, 0, 0, 1])}}
        found = other.distribution(step, info)
        assert found["place"]["probabilities"].shape == (6, 6)
        assert found["function"]["probabilities"][1] == 0
        action = other.act(step, info, greedy=False)
        assert other.settings.agent.arguments == ARGUMENTS["agent.arguments"]
        assert set(action) == {"function", "place", "target"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ppo", "gsde"),
        ("ppo", "autoregressive"),
        ("ppo", "ordinal"),
        ("ppo", "conditional masks"),
        ("acer_vtrace", "autoregressive"),
        ("acer_vtrace", "gsde"),
    ],
)
def test_a_compiled_step_is_an_eager_one(name: str, kind: str) -> None:
    """Both have the same losses and gradients; with gSDE, steps are proportional to gradients.

    While all log_std of gSDE are equal, its deviation does not depend on the features z, so the gradient by the weights
    of z is only rounding (2e-5 at most, where that of the mean is 7). RMSprop, ACER's default, divides it by its own
    size: after one step, these weights differ by 8e-4 and all others by at most 1e-6; after two, the entropy by 2.3e-4.
    With SGD all parameters agree within 1e-6 after three steps.
    """
    environment, changes = KINDS[kind]
    changes = changes | ({"agent.optimizer": "sgd", "agent.learning_rate": 0.01} if kind == "gsde" else {})
    changes = changes | ({"agent.rollout": 8, "agent.warmup": 16} if name == "acer_vtrace" else {})
    worker = make_worker(environment, name, **keywords(changes))
    begin(worker, 0)
    collect(worker)
    agent: Any = worker.agent
    reference = copy.deepcopy(agent)
    rows = agent.prepare(worker.cache.read())
    if name == "ppo":
        rows = agent.with_shares(rows.without_last_observation())
    compiled, eager = LocalUpdater(agent), LocalUpdater(reference)
    compiled.compile(on_failure=pytest.fail)
    for _ in range(3):
        one, other = compiled.step(agent.compute_loss, rows, "all"), eager.step(reference.compute_loss, rows, "all")
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
    worker.close()


@pytest.mark.parametrize("orthogonal", [True, False])
def test_layers_of_an_autoregressive_policy_follow_network_orthogonal(orthogonal: bool) -> None:
    environment, changes = KINDS["autoregressive"]
    worker = make_worker(environment, "ppo", **keywords(changes), network__orthogonal=orthogonal)
    layers = {name: x for name, x in worker.agent.policy.named_modules() if isinstance(x, torch.nn.Linear)}  # type: ignore[operator, union-attr]
    assert set(layers) == {"conditioners.target.last", "conditioners.place.last", "embeddings.target.linear"}
    for name, layer in layers.items():
        gain = 0.01 if name.startswith("conditioners") else 1.0
        gram = layer.weight @ layer.weight.T
        is_orthogonal = torch.allclose(gram, gain**2 * torch.eye(len(gram)), atol=1e-4 * gain**2)
        assert is_orthogonal == orthogonal
        assert layer.bias.any() != orthogonal
    worker.close()


@pytest.mark.parametrize("agent", ["ppo", "acer"])
def test_padding_of_a_renamed_list_is_not_chosen(agent: str) -> None:
    renamed = {"preprocess.observation": ('units: rename(to="army")',), "agent.heads": ("action=pointer(army)",)}
    options = {"env.options": ("entities=true",), "network.net2d": "entity_mlp"}
    options |= {"agent.warmup": 50} if agent == "acer" else {}
    worker = make_worker(f"{__name__}:Places", agent, **keywords(renamed | options))
    begin(worker, 0)
    collect(worker)  # Places refuses padding
    worker.close()


@pytest.mark.parametrize(
    ("agent", "changes", "words"),
    [
        ("ppo", {"agent.heads": ("place=spatial",), "network.net3d": "small_cnn"}, "needs a map of the same size"),
        ("acer", {"agent.warmup": 50, "agent.targets": "retrace"}, "retrace, which needs one Discrete action"),
        (
            "acer_vtrace",
            {"agent.autoregressive": ("function",), "agent.warmup": 50},
            'agent.autoregressive is "function" alone',
        ),
        ("sac", {"agent.distribution": "gsde"}, "sac has no such setting; a2c, a3c, ppo"),
        ("ppo", {"agent.bins": 1, "agent.distribution": "discretized"}, "agent.bins is 1"),
    ],
)
def test_what_cannot_work_is_refused(agent: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_worker(COMMAND, agent, **keywords(changes))
