"""State dicts of managers: a loaded manager continues exactly like the saved one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig
from ludus.environments.toy import CountingEnv, MaskedEnv, MemoryEnv, MixedActionEnv, TargetEnv
from ludus.managers import history
from ludus.managers.make import make_manager
from ludus.managers.simple import SimpleEnvManager
from ludus.managers.vector import VectorEnvManager
from ludus.runs import checkpoint

FRAMES = "gymnasium.wrappers:FrameStackObservation(stack_size=3)"


class Parts(gymnasium.Env):
    """A nested observation with a NaN, actions that start at 2, infos, and episodes of random length."""

    observation_space = spaces.Dict(
        place=spaces.Dict(x=spaces.Box(-np.inf, np.inf, (2,), np.float64), room=spaces.Discrete(4, start=2)),
        picture=spaces.Box(0, 255, (1, 3, 3), np.uint8),
    )
    action_space = spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.total, self.started = 0, 0, False
        return self.observe(), {}

    def step(self, action):
        assert action in (-1, 0, 1)
        self.steps, self.started = self.steps + 1, True
        self.total += int(action)
        draw = self.np_random.random()
        return self.observe(), draw * self.total, draw < 0.05, draw > 0.97, {"total": self.total, "draw": draw}

    def observe(self):
        x = self.np_random.normal(size=2) + self.total
        if self.started and x[0] > 1:
            x[1] = np.nan
        room = 2 + self.steps % 4
        return {"place": {"x": x, "room": room}, "picture": np.full((1, 3, 3), self.steps % 256, np.uint8)}


class Remembers(CountingEnv):
    """Counts episodes over resets, which only its snapshot restores."""

    def snapshot(self):
        return {"numbers": self._numbers, "place": [self._episode, self._step, self._next]}

    def restore(self, snapshot):
        self._numbers = snapshot["numbers"]
        self._episode, self._step, self._next = snapshot["place"]


def own(make):
    return lambda batch: SimpleEnvManager(make, batch, "own")


def registered(**fields):
    return lambda batch: make_manager(EnvConfig(**fields), batch)


KINDS = {
    "counting": own(lambda: CountingEnv(length=200)),  # a number that is known from the seed in the first episode only
    "counting with a snapshot": own(lambda: Remembers(length=4, ending="truncation")),
    "memory": own(MemoryEnv),
    "masked": own(MaskedEnv),
    "masked in info": own(lambda: MaskedEnv(in_info=True)),
    "mixed": own(lambda: MixedActionEnv(more=True)),
    "target": own(TargetEnv),
    "parts": own(Parts),
    "CartPole": registered(id="CartPole-v1", backend="simple"),
    "CartPole in frames": registered(id="CartPole-v1", wrappers=(FRAMES,), max_episode_steps=12),
    "Pendulum": registered(id="Pendulum-v1", max_episode_steps=30),
    "CartPole as a vector": registered(id="CartPole-v1", backend="vector"),
}


def made(kind, batch):
    manager = KINDS[kind](batch)
    manager.set_action_transform({name: "clip" for name, spec in manager.action.items() if spec.kind == "continuous"})
    return manager


def started(kind, batch, seed):
    manager = made(kind, batch)
    manager.reset(seed)
    return manager


def draw(manager, generator):
    """Return random policy-space actions; an illegal masked choice ends the episode."""
    actions = {}
    for name, spec in manager.action.items():
        shape = (manager.batch, *spec.shape)
        if spec.kind == "continuous":
            actions[name] = torch.from_numpy(generator.normal(size=shape).astype(np.float32))
        else:
            sizes = np.reshape(spec.sizes, spec.shape) if spec.kind == "categorical" else 2
            actions[name] = torch.from_numpy(generator.integers(0, sizes, shape))
    return actions


def same(a, b):
    """Whether two tensors are the same, bits of NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def assert_same_step(a, b):
    assert a.observation.keys() == b.observation.keys()
    assert all(same(x, b.observation[name]) for name, x in a.observation.items())
    assert all(same(x, y) for x, y in zip(a[1:6], b[1:6], strict=True))


def through_files(state):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "step_1", {"manager": state}, {})
        return checkpoint.load(Path(folder) / "step_1")[0]["manager"]


def step_alike(a, b, steps, generator):
    for _ in range(steps):
        actions = draw(a, generator)
        assert_same_step(a.step(actions), b.step(actions))
    assert a.episodes() == b.episodes()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 70), st.integers(1, 3), st.integers(0, 2**31 - 1))
@example("CartPole as a vector", 60, 3, 5)
@example("counting with a snapshot", 61, 2, 1)
@example("masked", 70, 3, 3)
@example("parts", 70, 3, 4)
@example("CartPole", 40, 3, 2)
def test_loaded_manager_continues_exactly(kind, k, batch, seed):
    generator = np.random.default_rng(seed)
    manager = started(kind, batch, seed)
    for _ in range(k):
        manager.step(draw(manager, generator))
    state = through_files(manager.state_dict())
    other = made(kind, batch)
    if kind != "counting":  # which counts resets
        other.reset(seed + 1)
        other.step(draw(other, generator))
    other.load_state_dict(state)
    assert other.restored == "exactly"
    assert_same_step(manager.last_step(), other.last_step())
    step_alike(manager, other, 50, generator)
    third = made(kind, batch)  # a resume of a resume
    third.load_state_dict(through_files(other.state_dict()))
    assert third.restored == "exactly"
    step_alike(manager, third, 10, generator)


def test_unread_episodes_are_saved():
    manager = started("counting with a snapshot", 2, 3)
    for _ in range(8):
        manager.step(draw(manager, np.random.default_rng(0)))
    other = KINDS["counting with a snapshot"](2)
    other.load_state_dict(through_files(manager.state_dict()))
    found = other.episodes()
    assert [(e.row, e.reward, e.length, e.infos["step"]) for e in found] == [(0, 10.0, 4, 4.0), (1, 10.0, 4, 4.0)]
    assert found == manager.episodes()


class Dice(gymnasium.Env):
    """Observes a number that does not depend on the seed, from a certain step on."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, honest_steps):
        self.honest_steps = honest_steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        chance = np.random.default_rng() if self.steps > self.honest_steps else self.np_random
        return chance.random(2, np.float32), 1.0, False, False, {}


class Impatient(Dice):
    """Ends earlier the older the process is."""

    limit = 10

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps >= Impatient.limit, False, {}


def saved_and_loaded(make, steps, batch=3):
    manager = SimpleEnvManager(make(), batch, "World")
    manager.reset(4)
    zero = {"action": torch.zeros(batch, dtype=torch.int64)}
    for _ in range(steps):
        manager.step(zero)
    other = SimpleEnvManager(make(), batch, "World")
    other.load_state_dict(through_files(manager.state_dict()))
    return manager, other, zero


def test_nondeterministic_environment_starts_its_next_episode():
    def make():
        honest = iter((100, 3, 100))
        return lambda: Dice(next(honest))

    manager, other, zero = saved_and_loaded(make, 6)
    assert other.restored.startswith(
        "restarted at an episode boundary: environment 1 of World: it is not deterministic"
    )
    step, before = other.last_step(), manager.last_step()
    assert step.first.tolist() == [False, True, False]
    assert step.reward.tolist() == [1, 0, 1]
    assert not (step.terminated | step.truncated).any()
    assert step.observation["observation"][1].tolist() == [0, 0]
    for row in (0, 2):
        assert torch.equal(step.observation["observation"][row], before.observation["observation"][row])
    state = other.state_dict()["stats"]
    assert state["length"].tolist() == [6, 0, 6]
    assert state["total"].tolist() == [6, 0, 6]
    assert state["episode"].tolist() == [0, 1, 0]
    assert other.episodes() == []  # a lost episode is none
    assert other.step(zero).first.tolist() == [False] * 3
    assert other._memory.seed.tolist() == [other.derive_seed(0, 0), other.derive_seed(1, 1), other.derive_seed(2, 0)]


@pytest.mark.parametrize("limit", [4, 6, 7])
def test_ending_at_another_step_is_detected(monkeypatch, limit):
    manager = SimpleEnvManager(lambda: Impatient(0), 1, "World")
    manager.reset(0)
    for _ in range(7):
        manager.step({"action": torch.zeros(1, dtype=torch.int64)})
    monkeypatch.setattr(Impatient, "limit", limit)
    other = SimpleEnvManager(lambda: Impatient(0), 1, "World")
    other.load_state_dict(manager.state_dict())
    assert "not deterministic" in other.restored
    assert other.last_step().first.all()
    assert not other.last_step().terminated.any()


def test_ended_rows_need_no_replay():
    class Short(Dice):
        def step(self, action):
            observation, reward, *_ = super().step(action)
            return observation, reward, self.steps == 5, False, {}

    manager, other, zero = saved_and_loaded(lambda: lambda: Short(0), 5)
    assert other.restored == "exactly"
    assert_same_step(manager.last_step(), other.last_step())
    assert other.last_step().terminated.all()
    assert_same_step(manager.step(zero), other.step(zero))
    assert other.last_step().first.all()


def test_nan_observations_are_compared_as_equal(monkeypatch):
    class Missing(Dice):
        sign = 1.0

        def step(self, action):
            return np.full(2, np.copysign(np.nan, Missing.sign), np.float32), 1.0, False, False, {}

    manager = SimpleEnvManager(lambda: Missing(0), 1, "World")
    manager.reset(0)
    manager.step({"action": torch.zeros(1, dtype=torch.int64)})
    monkeypatch.setattr(Missing, "sign", -1.0)
    other = SimpleEnvManager(lambda: Missing(0), 1, "World")
    other.load_state_dict(manager.state_dict())
    assert other.restored == "exactly"
    assert_same_step(manager.last_step(), other.last_step())


def test_environment_that_raises_in_the_replay_is_reported():
    class Breaks(Dice):
        def step(self, action):
            raise RuntimeError("no more")

    manager = SimpleEnvManager(lambda: Dice(100), 2, "World")
    manager.reset(0)
    manager.step({"action": torch.zeros(2, dtype=torch.int64)})
    other = SimpleEnvManager(lambda: Breaks(100), 2, "World")
    other.load_state_dict(manager.state_dict())
    assert "all environments of World: it cannot be restored (World: step raised RuntimeError" in other.restored
    assert other.last_step().first.all()


def test_too_long_episode_starts_the_next_one(monkeypatch):
    monkeypatch.setattr(history, "MAX_BYTES", 150 * 3 * 8)  # bytes for 150 steps of 3 rows
    _, other, _ = saved_and_loaded(lambda: lambda: Dice(1000), 151)
    assert "all environments of World: its episode is too long" in other.restored
    assert other.last_step().first.all()
    _, other, _ = saved_and_loaded(lambda: lambda: Dice(1000), 150)
    assert other.restored == "exactly"


def test_vector_environment_without_a_snapshot_starts_new_episodes():
    def make():
        return VectorEnvManager(SyncVectorEnv([lambda n=n: CountingEnv(n) for n in (1, 2, 5)]), "counting")

    manager = make()
    manager.reset(3)
    for _ in range(10):
        manager.step({"action": torch.zeros(3, dtype=torch.int64)})
    assert manager.state_dict()["stats"]["length"].tolist() == [10 % 2, 10 % 3, 10 % 6]
    other = make()
    other.load_state_dict(through_files(manager.state_dict()))
    assert other.restored.startswith("restarted at an episode boundary: all environments of counting: ")
    step = other.last_step()
    assert step.first.all()
    assert step.reward.tolist() == [0, 0, 0]
    assert not (step.terminated | step.truncated).any()
    account = other.state_dict()["stats"]
    assert (account["episode"] == manager.state_dict()["stats"]["episode"] + 1).all()
    assert account["length"].tolist() == [0, 0, 0]
    step = other.step({"action": torch.zeros(3, dtype=torch.int64)})
    assert not step.first.any()
    assert step.observation["observation"][:, 1].tolist() == [1, 1, 1]


def test_envpool_starts_new_episodes():
    pytest.importorskip("envpool")
    make = registered(id="CartPole-v1", backend="envpool")
    manager = make(2)
    manager.reset(1)
    for _ in range(5):
        manager.step({"action": torch.zeros(2, dtype=torch.int64)})
    other = make(2)
    other.load_state_dict(through_files(manager.state_dict()))
    assert "EnvPool" in other.restored
    assert other.last_step().first.all()
    assert other.step({"action": torch.zeros(2, dtype=torch.int64)}).reward.tolist() == [1, 1]
    manager.close()
    other.close()


def test_state_of_other_environments_raises():
    state = started("CartPole", 3, 0).state_dict()
    with pytest.raises(UserError, match=r"holds 3 environments, env\.num is 1; set it to 3"):
        KINDS["CartPole"](1).load_state_dict(state)
    with pytest.raises(UserError, match=r"observation \(4,\), but own gives observation \(3,\)"):
        KINDS["memory"](3).load_state_dict(state)


def test_reset_after_a_load():
    manager = started("CartPole", 2, 7)
    first = manager.last_step().observation["observation"].clone()
    for _ in range(30):
        manager.step(draw(manager, np.random.default_rng(0)))
    other = KINDS["CartPole"](2)
    other.load_state_dict(manager.state_dict())
    assert torch.equal(other.reset(7).observation["observation"], first)
    assert other.restored == ""
