from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import (
    AtariPreprocessing,
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TimeLimit,
)

from ludus.core.errors import UserError
from ludus.environments.gym import make
from ludus.environments.snapshot import restore_snapshot, take_snapshot
from ludus.environments.toy import CountingEnv
from ludus.managers.saved_state import to_arrays, to_tensors
from ludus.runs import checkpoint

FAST = ("Ant-v5", "HalfCheetah-v5", "Humanoid-v5")
SLOW = (
    "Hopper-v5",
    "HumanoidStandup-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
    "Pusher-v5",
    "Reacher-v5",
    "Swimmer-v5",
    "Walker2d-v5",
)


class Walk(gymnasium.Env):
    """A random walk with snapshot and restore; ``kept`` replaces the content of its snapshot."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, kept=None):
        self.place, self.path, self.kept = np.zeros(2, np.float32), deque(maxlen=3), kept
        self._game = "walk"  # a name that Atari uses too

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place[:] = self.np_random.normal(size=2)
        self.path.clear()
        return self.place.copy(), {}

    def step(self, action):
        self.path.append(float(self.np_random.normal() + action))
        self.place += self.path[0]
        return self.place.copy(), sum(self.path), bool(abs(self.place[0]) > 9), False, {}

    def snapshot(self):
        return {"place": self.place, "path": self.path} if self.kept is None else {"kept": self.kept}

    def restore(self, snapshot):
        self.place[:], self.path = snapshot["place"], snapshot["path"]


class WalkBeside:
    """The same without deriving from gymnasium.Env."""

    observation_space, action_space = Walk.observation_space, Walk.action_space

    def __init__(self):
        self.walk = Walk()

    def __getattr__(self, name):
        return getattr(self.__dict__["walk"], name)

    def snapshot(self):
        return {**self.walk.snapshot(), "random": self.walk.np_random}

    def restore(self, snapshot):
        self.walk.restore(snapshot)
        self.walk.np_random = snapshot["random"]


class Noted(gymnasium.Wrapper):
    """Has arbitrary attributes."""

    def __init__(self, env, **notes):
        super().__init__(env)
        self.__dict__.update(notes)


def through_a_checkpoint(snapshot, folder):
    assert snapshot is not None
    checkpoint.save(folder, {"env": to_tensors(snapshot)}, {})
    return to_arrays(checkpoint.load(folder)[0]["env"])


def alike(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a if key != "episode")
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def steps(env, count, random, ends=None):
    """Play at random; every second new episode has a seed."""
    results = []
    for _ in range(count):
        results.append(
            env.step(
                random.integers(env.action_space.n)
                if hasattr(env.action_space, "n")
                else random.uniform(env.action_space.low, env.action_space.high).astype(np.float32)
            )
        )
        if results[-1][2] or results[-1][3]:
            results.append(env.reset(seed=len(results) if len(results) % 2 else None))
            if ends is not None:
                ends.append(len(results))
    return results


def goes_on(maker, folder, before=30, after=200, tries=1):
    """Compare an environment with a new one that restored its snapshot; return the number of ended episodes."""
    env, fresh, ends = maker(), maker(), []
    env.reset(seed=3)
    fresh.reset(seed=4)
    steps(env, before, np.random.default_rng(0))
    taken = take_snapshot(env)
    while taken is None and (tries := tries - 1):
        steps(env, 1, np.random.default_rng(tries))
        taken = take_snapshot(env)
    restore_snapshot(fresh, through_a_checkpoint(taken, folder))
    expected = steps(env, after, np.random.default_rng(1), ends)
    assert alike(tuple(steps(fresh, after, np.random.default_rng(1))), tuple(expected))
    fresh.reset(seed=5)
    restore_snapshot(fresh, taken)  # a copy: what happened since has not changed it
    assert alike(tuple(steps(fresh, after, np.random.default_rng(1))), tuple(expected))
    return len(ends)


def test_native_vector_environment(tmp_path):
    env, fresh = (gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point") for _ in range(2))
    actions = np.random.default_rng(0).integers(2, size=(330, 3))
    env.reset(seed=3)
    fresh.reset(seed=4)
    for action in actions[:30]:
        env.step(action)
    taken = take_snapshot(env)
    restore_snapshot(fresh, through_a_checkpoint(taken, tmp_path / "c"))
    results = [(env.step(action), fresh.step(action)) for action in actions[30:]]
    assert all(alike(a, b) for a, b in results)
    assert sum(a[2].sum() for a, _ in results) > 10
    assert alike(env.reset(), fresh.reset())
    restore_snapshot(fresh, taken)
    assert all(alike(a, fresh.step(action)) for (a, _), action in zip(results, actions[30:], strict=True))


def test_vector_environments_without_a_snapshot():
    assert take_snapshot(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")) is None
    ale = pytest.importorskip("ale_py")
    assert take_snapshot(ale.AtariVectorEnv("pong", num_envs=1)) is None


@pytest.mark.parametrize("id", [*FAST, *(pytest.param(id, marks=pytest.mark.slow) for id in SLOW)])
def test_mujoco(id, tmp_path):
    pytest.importorskip("mujoco")
    for before in (1, 17):
        limited = lambda: make(id, max_episode_steps=90)  # noqa: E731
        assert goes_on(limited, tmp_path / str(before), before, 200) >= 2


def test_mujoco_restores_derived_quantities_of_the_last_substep():
    pytest.importorskip("mujoco")
    env, fresh = make("Ant-v5"), make("Ant-v5")
    env.reset(seed=0)
    fresh.reset(seed=1)
    steps(env, 20, np.random.default_rng(0))
    restore_snapshot(fresh, take_snapshot(env))
    assert alike(fresh.unwrapped.data.body(1).xpos, env.unwrapped.data.body(1).xpos)
    assert not alike(fresh.unwrapped.data.body(1).xpos, env.unwrapped.data.qpos[:3])  # no state gives it back


def test_a_subclass_of_a_mujoco_task_has_no_snapshot():
    pytest.importorskip("mujoco")
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

    env = type("Mine", (HopperEnv,), {"__module__": "mine"})()
    env.reset(seed=0)
    assert take_snapshot(env) is None


def atari(id="ALE/Breakout-v5", sticky=0.25, **options):
    env = make(id, {"frameskip": 1, "repeat_action_probability": sticky, **options})
    return TimeLimit(FrameStackObservation(AtariPreprocessing(env, noop_max=8, terminal_on_life_loss=True), 4), 120)


@pytest.mark.parametrize(("id", "sticky"), [("ALE/Breakout-v5", 0.0), ("ALE/Seaquest-v5", 0.25)])
def test_atari(id, sticky, tmp_path):
    pytest.importorskip("ale_py")
    assert goes_on(lambda: atari(id, sticky), tmp_path / "c", 20, 200, tries=20) >= 1


def test_atari_tetris(tmp_path):
    pytest.importorskip("ale_py")
    goes_on(lambda: make("ALE/Tetris-v5", {"repeat_action_probability": 0.0}), tmp_path / "c", 20, 30)
    goes_on(lambda: make("ALE/Tetris-v5", {"repeat_action_probability": 0.0}), tmp_path / "c", 0, 30)


def test_atari_has_no_snapshot_if_the_action_may_be_repeated():
    pytest.importorskip("ale_py")
    env = make("ALE/Pong-v5", {"frameskip": 1, "repeat_action_probability": 0.25, "obs_type": "ram"})
    env.reset(seed=0)
    taken = [(env.step(2), take_snapshot(env) is not None)[1] for _ in range(400)]
    assert 0.68 < np.mean(taken) < 0.82  # 0.75 ± 3 deviations of 0.022
    assert take_snapshot(atari(sticky=1.0)) is None
    assert take_snapshot(make("ALE/Pong-v5", {"sound_obs": True})) is None
    assert take_snapshot(make("ALE/MiniatureGolf-v5", {"repeat_action_probability": 0.0})) is None


def test_atari_refuses_the_state_of_another_game():
    pytest.importorskip("ale_py")
    pong, breakout = atari("ALE/Pong-v5", 0.0), atari("ALE/Breakout-v5", 0.0)
    pong.reset(seed=0)
    breakout.reset(seed=0)
    with pytest.raises(UserError, match="of the game pong"):
        restore_snapshot(breakout, take_snapshot(pong))


@pytest.mark.slow
def test_restore_in_another_process(tmp_path):
    pytest.importorskip("ale_py")
    env = atari(sticky=0.0)
    env.reset(seed=3)
    steps(env, 40, np.random.default_rng(0))
    through_a_checkpoint(take_snapshot(env), tmp_path / "c")
    seen = [float(np.sum(result[0], dtype=np.int64)) for result in steps(env, 50, np.random.default_rng(1))]
    code = (
        "import sys, json, pathlib, numpy as np\n"
        "from test_environments_snapshot import atari, checkpoint, restore_snapshot, steps, to_arrays\n"
        "env = atari(sticky=0.0)\nenv.reset(seed=9)\n"
        "restore_snapshot(env, to_arrays(checkpoint.load(pathlib.Path(sys.argv[1]))[0]['env']))\n"
        "results = steps(env, 50, np.random.default_rng(1))\n"
        "print(json.dumps([float(np.sum(r[0], dtype=np.int64)) for r in results]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c")]
    here = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == seen
    assert len(set(seen)) > 10


@pytest.mark.parametrize("maker", [Walk, WalkBeside])
def test_an_environment_with_snapshot_and_restore(maker, tmp_path):
    assert goes_on(lambda: make(maker, max_episode_steps=50), tmp_path / "c") >= 3


def test_an_unsupported_value_in_a_snapshot_is_refused():
    for kept, word in (
        (object(), "a object"),
        (np.array(["a"]), "an array of <U1"),
        (spaces.Discrete(2), "only constants"),
    ):
        with pytest.raises(UserError, match=f"Walk.snapshot returned {word}"):
            take_snapshot(make(lambda kept=kept: Walk(kept)))


def test_wrappers_with_state(tmp_path):
    def maker():
        env = RecordEpisodeStatistics(NormalizeReward(NormalizeObservation(make(Walk, max_episode_steps=50))))
        return FrameStackObservation(env, 3)

    assert goes_on(maker, tmp_path / "c") >= 3


def test_attributes_of_all_types(tmp_path):
    shared, loop = np.arange(4.0), []
    loop.append(loop)
    notes = {
        "plain": {"a": 1, 2: None, "x": -np.inf, "text": "é"},
        "scalar": np.float32(0.1),
        "raw": b"\x00\xff",
        "frames": deque([np.zeros((2, 0)), np.uint64(2**64 - 1)], maxlen=2),
        "nested": ([1, (True, {3})],),
        "twister": np.random.Generator(np.random.MT19937(5)),
        "legacy": np.random.RandomState(5),
        "one": shared,
        "same": [shared],
        "high": np.array([1, 2], ">i4"),
        "setting": [spaces.Discrete(2)],
    }
    env, fresh = Noted(Walk(), **notes), Noted(Walk())
    env.reset(seed=0)
    fresh.reset(seed=1)
    notes["legacy"].normal()  # leaves a second number in hand
    restore_snapshot(fresh, through_a_checkpoint(take_snapshot(env), tmp_path / "c"))
    assert fresh.plain == notes["plain"]
    assert list(fresh.plain) == list(notes["plain"])
    assert (fresh.raw, fresh.nested) == (notes["raw"], notes["nested"])
    assert type(fresh.scalar) is np.float32
    assert fresh.scalar == np.float32(0.1)
    assert fresh.frames.maxlen == 2
    assert fresh.frames[0].shape == (2, 0)
    assert fresh.frames[1] == np.uint64(2**64 - 1)
    assert alike(fresh.twister.normal(size=9), env.twister.normal(size=9))
    assert alike(fresh.legacy.normal(size=9), env.legacy.normal(size=9))
    assert fresh.same[0] is fresh.one
    assert fresh.one is not shared
    assert list(fresh.high) == [1, 2]
    assert not hasattr(fresh, "setting")
    for unknown in (loop, object(), np.array([object()]), [spaces.Discrete(2), 1], CountingEnv(), (shared, shared[1:])):
        assert take_snapshot(Noted(Walk(), unknown=unknown)) is None


def test_other_environments_have_no_snapshot():
    for env in (make("CartPole-v1"), CountingEnv()):
        env.reset(seed=0)
        assert take_snapshot(env) is None


def test_a_snapshot_of_another_environment_is_refused():
    env, other = make(Walk, max_episode_steps=5), make(Walk)
    env.reset(seed=0)
    other.reset(seed=0)
    with pytest.raises(UserError, match="same settings"):
        restore_snapshot(other, take_snapshot(env))
    pytest.importorskip("mujoco")
    arm, ant = make("Reacher-v5"), make("Reacher-v5")
    taken = take_snapshot(arm)
    taken["base"]["mujoco"]["state"] = np.zeros(3)
    with pytest.raises(UserError, match="does not fit"):
        restore_snapshot(ant, taken)
