"""Frame stacks in the manager: the same for every backend, across resets, groups, checkpoints and replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import make_worker
from gymnasium import spaces
from numpy.typing import NDArray

import ludus
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.environments.config import EnvConfig
from ludus.experience.config import ReplayConfig
from ludus.experience.replay import ExperienceReplay
from ludus.managers.base import BatchManager
from ludus.managers.make import make_manager
from ludus.preprocess.config import PreprocessConfig
from ludus.preprocess.frame_stack import FrameStack, Stack, make_frame_stack
from ludus.preprocess.observation import ObsPreprocessor

N = 3
PIPELINE = (f"stack(n={N})",)
CUE = "ludus.environments.tensor_toy:TensorCue"
CONFIGS: dict[str, EnvConfig] = {
    "simple": EnvConfig(id="CartPole-v1", num=3, backend="simple", max_episode_steps=4),
    "vector": EnvConfig(id="CartPole-v1", num=3, backend="vector", max_episode_steps=4),
    "envpool": EnvConfig(id="CartPole-v1", num=3, backend="envpool", max_episode_steps=4),
    "subproc": EnvConfig(id="CartPole-v1", num=3, backend="subproc", max_episode_steps=4, workers=2, alternate=True),
    "tensor": EnvConfig(id=CUE, num=3, backend="tensor", options=("length=3",)),
}


class Stacked:
    """The stacks of one row, kept the plain way."""

    def __init__(self) -> None:
        self.frames: list[NDArray[Any]] = []

    def push(self, x: NDArray[Any], first: bool) -> NDArray[Any]:
        self.frames = [x] * N if first else [*self.frames[1:], x]
        return np.stack(self.frames)


def both(name: str) -> tuple[BatchManager, BatchManager]:
    """Managers with and without the stack, of the same environments."""
    return make_manager(CONFIGS[name]), make_manager(CONFIGS[name], preprocess=PreprocessConfig(PIPELINE))


def frames(step: EnvStep) -> NDArray[Any]:
    return next(iter(step.observation.values())).numpy().copy()


@pytest.mark.parametrize("backend", CONFIGS)
def test_every_backend_stacks_what_it_observes(backend: str) -> None:
    plain, stacked = both(backend)
    try:
        ((name, spec),) = plain.observation.items()
        assert stacked.observation[name].shape == (N, *spec.shape)
        assert stacked.observation[name].stack == N
        rows, oracle = range(3), [Stacked() for _ in range(3)]
        x, y = plain.reset(5), stacked.reset(5)
        ended = 0
        for _ in range(14):
            got = stacked.last_step().observation[name].numpy()
            for row in rows:
                before = list(oracle[row].frames)
                want = oracle[row].push(frames(x)[row], bool(x.first[row]))
                np.testing.assert_array_equal(y.observation[name][row], want)
                np.testing.assert_array_equal(got[row], want)
                if y.final is not None and bool(x.first[row]):
                    assert x.final is not None
                    np.testing.assert_array_equal(
                        y.final[name][row], np.stack([*before[1:], x.final[name][row].numpy()])
                    )
                    ended += 1
            action = {"action": torch.tensor([0, 1, 1])}
            for manager in (plain, stacked):
                for group, part in enumerate(manager.groups):
                    manager.send({"action": action["action"][part]}, group)
                for group in range(len(manager.groups)):
                    step = manager.recv(group)
                assert step.observation[name].shape[0] == manager.groups[-1].stop - manager.groups[-1].start
            x, y = plain.last_step(), stacked.last_step()
            if backend == "tensor":  # the step itself has the final observations
                y = step
        assert (ended > 0) == (backend == "tensor")
    finally:
        plain.close()
        stacked.close()


@pytest.mark.parametrize("backend", ["simple", "vector", "tensor", "envpool"])
def test_a_checkpoint_has_the_stacks_and_lost_rows_begin_new_ones(backend: str) -> None:
    (plain, one), (_, two) = both(backend), both(backend)
    plain.close()
    one.reset(5)
    for _ in range(5):
        one.step({"action": torch.tensor([0, 1, 1])})
    two.load_state_dict(one.state_dict())
    (name,) = one.observation
    if backend == "envpool":
        assert two.last_step().first.all()
        stack = two.last_step().observation[name]
        assert torch.equal(stack, stack[:, :1].expand_as(stack))
    else:
        assert two.restored == "exactly"
        for _ in range(6):
            assert torch.equal(one.last_step().observation[name], two.last_step().observation[name])
            for manager in (one, two):
                manager.step({"action": torch.tensor([1, 0, 1])})
    one.close()
    two.close()


@pytest.mark.parametrize("n_step", [1, 2])
def test_a_replay_has_final_stacks_and_stores_each_frame_once(n_step: int) -> None:
    manager = make_manager(CONFIGS["tensor"], preprocess=PreprocessConfig(PIPELINE))
    config = ReplayConfig(replay=60, batch_size=16, warmup=0, n_step=n_step)
    replay = ExperienceReplay(config, 3, 0.9, manager.observation, torch.device("cpu"), action=manager.action)
    steps, step = [], manager.reset(1)
    for _ in range(50):  # the ring wraps
        steps.append(step)
        replay.env_write(step, HiddenState())
        actions = torch.randint(2, (3,))
        replay.agent_write(AgentStep({"action": actions}, {}, HiddenState()))
        step = manager.step({"action": actions})
    finals = 0
    for _ in range(20):
        batch = replay.read()
        assert batch.index is not None
        now, then = batch.observation["observation"]
        for i, (time, row) in enumerate(zip(*divmod(batch.index.numpy(), 3), strict=True)):
            assert torch.equal(now[i], steps[time].observation["observation"][row])
            end = next((k for k in range(1, n_step + 1) if steps[time + k].first[row]), n_step)
            last = steps[time + end]
            if last.first[row]:
                assert last.final is not None
                assert torch.equal(then[i], last.final["observation"][row])
                finals += 1
            else:
                assert torch.equal(then[i], last.observation["observation"][row])
    assert finals > 20
    assert replay._ring.columns["final/observation"].shape == (3, 20, 1, 3)  # the newest frame
    manager.close()


def test_stacks_of_images_are_laid_out_as_env_axes_says() -> None:
    def spec(*axes: str) -> Spec:
        config = EnvConfig(id="ludus.environments.image_toy:CatchEnv", num=1, axes=axes)
        manager = make_manager(config, preprocess=PreprocessConfig(("grayscale, stack(n=4)",)))
        manager.close()
        return manager.observation["observation"]

    assert ObsPreprocessor({"x": spec()}).shapes == {"x": (4, 36, 36)}
    assert ObsPreprocessor({"x": spec("observation=clip")}).shapes == {"x": (1, 4, 36, 36)}
    with pytest.raises(UserError, match=r"env\.axes lays"):
        spec("observation=entities")


SPECS: Specs = {
    "x": Spec((2,), "float32", low=(-1.0, 0.0), high=(1.0, 5.0)),
    "units": Spec((4, 3), "float32"),
    "units/mask": Spec((4,), "bool", "binary", masks="units"),
    "level": Spec((), "int64", "categorical", sizes=(5,)),
    "previous_reward": Spec((), "float32"),
}


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("units: stack(n=2)", "a list of variable length"),
        ("level: stack(n=2)", "it stacks numbers"),
        ("x: stack(n=1)", "n is 1, but must be a whole number above 1"),
        ("x: stack(n=2), stack(n=3)", "two stacks"),
        ("x: symlog, stack(n=2)", "runs in the manager, before what runs on the device; put it first"),
        ("x: stack(n=2), compress", "runs in the environment's process, before what runs in the manager"),
        ("y: stack(n=2)", "but the observations are x, units, level"),
    ],
)
def test_what_cannot_be_stacked_is_refused(pipeline: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_frame_stack(SPECS, [pipeline, "previous_reward"])


def test_bounds_repeat_and_other_observations_stay() -> None:
    specs, stack = make_frame_stack(SPECS, ["x: stack(n=2)"])
    assert specs["x"].bounds[1].tolist() == [[1.0, 5.0], [1.0, 5.0]]
    assert specs["units"] is SPECS["units"]
    assert stack is not None
    assert list(stack.ops) == ["x"]
    assert make_frame_stack(SPECS, ["x: symlog"])[1] is None


def test_groups_of_rows_do_not_mix() -> None:
    stack = FrameStack({"x": Stack(SPECS["x"], n=2)})
    x = torch.arange(8.0).view(4, 2)
    no = torch.zeros(4, dtype=torch.bool)
    stack.push(EnvStep({"x": x}, torch.zeros(4), no, no, ~no, no))
    half = EnvStep({"x": x[2:] + 10}, torch.zeros(2), no[2:], no[2:], torch.tensor([False, True]), no[2:])
    pushed = stack.push(half, slice(2, 4)).observation["x"]
    assert torch.equal(pushed[0], torch.stack([x[2], x[2] + 10]))
    assert torch.equal(pushed[1], torch.stack([x[3] + 10, x[3] + 10]))
    assert torch.equal(stack.stacks["x"][:2], torch.stack([x[:2], x[:2]], 1))
    assert torch.equal(stack.stacks["x"][2:], pushed)


def test_a_policy_without_memory_learns_from_stacked_frames(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "nb_step": 6_000,
        "env.backend": "tensor",
        "preprocess.observation": ("stack(n=4), flatten",),
        "network.hidden": (16,),
        "runs": str(tmp_path),
        "evaluation.every": 0,
        "evaluation.episodes": 50,
        "compile": "off",
        "threads": 1,
        "quiet": True,
    }
    run = ludus.train(CUE, "ppo", preset="none", settings=settings).run
    assert ludus.load(run).evaluate(50).mean > 0.9  # 0.5 without the first frame


@pytest.mark.parametrize(("ops", "shape"), [("stack(n=4)", (3,)), ("stack(n=4), flatten", (12,))])
def test_stacks_of_vectors_are_normalized(ops: str, shape: tuple[int, ...]) -> None:
    worker: Any = make_worker("Pendulum-v1", "ppo", preprocess__observation=(ops,))
    assert [x.mean.shape for x in worker.agent.normalizer.statistics.values()] == [shape]
    worker.close()


class Two(gymnasium.Env[Any, Any]):
    """Two vectors."""

    observation_space = spaces.Dict({name: spaces.Box(-9, 9, (2,), np.float32) for name in "ab"})
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_replay_agents_normalize_what_is_no_stack(order: str) -> None:
    joined = {name: ("stack(n=3), flatten, " if name == "a" else "") + 'concat(to="state")' for name in "ab"}
    ops = tuple(f"{name}: {joined[name]}" for name in order)
    settings: dict[str, Any] = {"preprocess__observation": ops, "agent__normalize_observation": True}
    settings |= {"agent__warmup": 16, "agent__batch_size": 4, "agent__replay": 200}
    with pytest.raises(UserError, match=r'"state" is a stack of frames, which agents with a replay buffer do not'):
        make_worker(f"{__name__}:Two", "sac", **settings)
    worker: Any = make_worker(f"{__name__}:Two", "sac", **settings | {"preprocess__observation": ("a: stack(n=3)",)})
    assert worker.agent.normalizer.names == ["b"]
    worker.run(60)
    assert worker.updates > 0
    worker.close()


def test_replays_that_keep_frames_one_by_one_refuse_to_normalize_stacks() -> None:
    with pytest.raises(UserError, match=r'agent.normalize_observation is on, but "observation" is a stack of frames'):
        make_worker("Pendulum-v1", "sac", preprocess__observation=("stack(n=4)",), agent__normalize_observation=True)
