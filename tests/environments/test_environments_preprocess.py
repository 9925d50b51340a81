"""Ops in the environment's process: images, the previous step, repeated and sticky actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.environments.config import EnvConfig
from ludus.environments.gym import frame_stack, make_environment
from ludus.environments.preprocess import PreviousStep, with_wrappers
from ludus.environments.snapshot import restore_snapshot, take_snapshot
from ludus.managers.make import make_manager
from ludus.preprocess.config import PreprocessConfig
from ludus.preprocess.frames import Compress, Crop, Grayscale, Resize

IMAGE = Spec((12, 10, 3), "uint8", low=0, high=255)


class World(gymnasium.Env[Any, Any]):
    """A camera that shows random pixels, a nested one, the step's number and an action of several parts."""

    def __init__(self, length: int = 6) -> None:
        image = spaces.Box(0, 255, (8, 6, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {"eye": spaces.Dict({"left": image, "right": image}), "time": spaces.Box(0, 99, (1,), np.float32)}
        )
        self.action_space = spaces.Dict({"go": spaces.Discrete(3), "turn": spaces.Box(-2, 2, (2,), np.float32)})
        self.length, self.time, self.taken = length, 0, []  # type: ignore[var-annotated]

    def _observe(self) -> Any:
        left, right = (self.np_random.integers(0, 256, (8, 6, 3), np.uint8) for _ in range(2))
        return {"eye": {"left": left, "right": right}, "time": np.array([self.time], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.taken = 0, []
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        self.taken.append(int(action["go"]))
        return self._observe(), float(self.time), self.time >= self.length, False, {}

    def snapshot(self) -> dict[str, Any]:
        return {"time": self.time, "taken": self.taken}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.time, self.taken = snapshot["time"], snapshot["taken"]


WORLD = f"{__name__}:World"
PIPELINE = (
    "eye/*: grayscale",
    "eye/left: crop(height=6, width=4, top=1)",
    "previous_action, previous_reward",
)


def wrapped(*observation: str, action: tuple[str, ...] = (), id: str = WORLD, **more: Any) -> Any:
    return make_environment(with_wrappers(EnvConfig(id=id, **more), PreprocessConfig(observation, action=action)))


def act(go: int = 1) -> Any:
    return {"go": np.int64(go), "turn": np.array([0.5, -1], np.float32)}


def test_parts_of_a_nested_observation_are_processed() -> None:
    plain, env = World(), wrapped(*PIPELINE)
    grey = Grayscale(Spec((8, 6, 3), "uint8", low=0, high=255)).apply
    raw, got = plain.reset(seed=3)[0], env.reset(seed=3)[0]
    for _ in range(4):
        assert env.observation_space.contains(got)
        np.testing.assert_array_equal(got["eye"]["left"], grey(raw["eye"]["left"])[1:7, :4])
        np.testing.assert_array_equal(got["eye"]["right"], grey(raw["eye"]["right"]))
        np.testing.assert_array_equal(got["time"], raw["time"])
        raw, got = plain.step(act())[0], env.step(act())[0]


def test_a_stack_by_a_wrapper_is_known_below_the_previous_step() -> None:
    stacks = ("gymnasium.wrappers:FrameStackObservation(stack_size=2)",)
    catch = "ludus.environments.image_toy:CatchEnv"
    assert frame_stack(wrapped("previous_reward", wrappers=stacks, id=catch), "observation") == 2


def test_the_previous_step_is_zero_at_the_start_of_an_episode() -> None:
    env = wrapped("previous_reward", "previous_action")
    first = env.reset(seed=0)[0]
    assert first["previous_reward"] == 0
    assert first["previous_action/go"].tolist() == [0, 0, 0]
    assert first["previous_action/turn"].tolist() == [0, 0]
    for time in (1, 2):
        got = env.step(act(go=2))[0]
        assert env.observation_space.contains(got)
        assert got["previous_reward"] == time
        assert got["previous_action/go"].tolist() == [0, 0, 1]
        assert got["previous_action/turn"].tolist() == [0.5, -1]
    assert not env.reset(seed=1)[0]["previous_action/go"].any()


def test_a_plain_observation_keeps_its_name_beside_the_previous_step() -> None:
    manager = make_manager(EnvConfig(id="CartPole-v1", num=1), preprocess=PreprocessConfig(("previous_action",)))
    assert {name: spec.kind for name, spec in manager.observation.items()} == {
        "observation": "continuous",
        "previous_action": "binary",
    }
    manager.close()
    with pytest.raises(UserError, match="an observation of this name"):
        PreviousStep(PreviousStep(World(), ["previous_reward"]), ["previous_reward"])


def test_actions_are_repeated_and_rewards_added_up() -> None:
    env = wrapped(action=("repeat(n=4)",))
    env.reset(seed=0)
    assert env.step(act())[1:4] == (1 + 2 + 3 + 4, False, False)
    assert env.step(act())[1:4] == (5 + 6, True, False)
    assert len(env.unwrapped.taken) == 6


@pytest.mark.parametrize("op", ["repeat(n=2)", "sticky(probability=0.5)"])
def test_actions_that_masks_may_forbid_are_not_repeated(op: str) -> None:
    masked = EnvConfig(id="ludus.environments.toy:MaskedEnv", num=1)
    with pytest.raises(UserError, match="has action masks, which may forbid an action when it is repeated"):
        make_manager(masked, preprocess=PreprocessConfig(action=(op,)))


def test_sticky_actions_repeat_with_their_probability_and_by_the_seed() -> None:
    def taken(seed: int, *ops: str) -> list[int]:
        env = wrapped(action=ops, options=("length=3000",))
        env.reset(seed=seed)
        for i in range(1000):
            env.step(act(go=i % 3))
        return list(env.unwrapped.taken)

    once = taken(0, "sticky(probability=0.25)")
    assert once == taken(0, "sticky(probability=0.25)")
    assert once != taken(1, "sticky(probability=0.25)")
    assert once[0] == 0
    assert np.mean([a != i % 3 for i, a in enumerate(once)]) == pytest.approx(0.25, abs=0.05)
    # repeat is next to the policy: each of the repeated steps may stick
    frames = taken(0, "repeat(n=3), sticky(probability=0.25)")
    assert any(len(set(frames[i : i + 3])) == 2 for i in range(0, 300, 3))


def test_sticky_actions_do_not_use_the_numbers_of_the_environment() -> None:
    env = wrapped(action=("sticky(probability=0.25)",), options=("length=30",))
    env.reset(seed=3)
    theirs, _ = gymnasium.utils.seeding.np_random(3)
    assert not np.isclose(env.get_wrapper_attr("_generator").random(4), theirs.random(4)).any()


def test_a_snapshot_has_the_previous_step_and_sticky_actions() -> None:
    env = wrapped(*PIPELINE, action=("sticky(probability=0.5)",), options=("length=50",))
    env.reset(seed=5)
    for i in range(5):
        env.step(act(i % 3))
    snapshot = take_snapshot(env)
    assert snapshot is not None
    expected = [env.step(act(i % 3))[0] for i in range(6)]
    again = wrapped(*PIPELINE, action=("sticky(probability=0.5)",), options=("length=50",))
    again.reset(seed=9)
    restore_snapshot(again, snapshot)
    for i, want in enumerate(expected):
        got = again.step(act(i % 3))[0]
        np.testing.assert_equal(got, want)
    assert again.unwrapped.taken == env.unwrapped.taken


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 10), st.sampled_from(["uint8", "float32"]), st.integers(0, 99))
def test_resizing_by_area_keeps_the_mean_and_constants(height: int, width: int, dtype: str, seed: int) -> None:
    for shape in ((12, 10), (12, 10, 3), (3, 12, 10)):
        spec = Spec(shape, dtype, low=0, high=255)
        op = Resize(spec, height=height, width=width)
        x = np.random.default_rng(seed).integers(0, 256, shape).astype(dtype)
        y = op.apply(x)
        assert (y.shape, str(y.dtype)) == (op.output.shape, dtype)
        assert y.mean(dtype=np.float64) == pytest.approx(x.mean(dtype=np.float64), abs=0.6)
        assert op.apply(np.full_like(x, 7)) == pytest.approx(7)


@pytest.mark.parametrize("size", [(84, 84), (105, 80), (42, 40)])
@pytest.mark.parametrize("shape", [(210, 160), (210, 160, 3)])
def test_area_equals_opencv(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    cv2 = pytest.importorskip("cv2")
    x = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    ours = Resize(Spec(shape, "uint8", low=0, high=255), height=size[0], width=size[1]).apply(x)
    theirs = cv2.resize(x, size[::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1


def test_nearest_takes_pixels_as_they_are_and_grey_follows_the_weights() -> None:
    x = np.random.default_rng(0).integers(0, 256, IMAGE.shape, np.uint8)
    small = Resize(IMAGE, height=6, width=5, method="nearest").apply(x)
    np.testing.assert_array_equal(small, x[1::2, 1::2])
    grey = x.astype(np.float64) @ [0.299, 0.587, 0.114]
    assert np.abs(Grayscale(IMAGE).apply(x) - grey).max() <= 0.501
    first = Spec((3, 12, 10), "uint8", low=0, high=255)
    np.testing.assert_array_equal(Grayscale(first).apply(np.moveaxis(x, -1, 0)), Grayscale(IMAGE).apply(x))
    np.testing.assert_array_equal(Crop(first, height=2, width=3, left=4).apply(np.moveaxis(x, -1, 0))[2], x[:2, 4:7, 2])


def test_floats_in_bytes_come_back_on_the_device() -> None:
    import torch

    from ludus.preprocess.observation import ObsPreprocessor

    op = Compress(Spec((5, 6), "float32", low=0.0, high=1.0))
    x = np.random.default_rng(0).random((5, 6), np.float32)
    ready = ObsPreprocessor({"x": op.output})({"x": torch.from_numpy(op.apply(x))[None, None]})["x"]
    assert op.apply(x).dtype == np.uint8
    np.testing.assert_allclose(ready[0, 0, 0], x, atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (
            "time: grayscale",
            (),
            r'"grayscale" cannot be applied to observation "time", continuous float32 of shape \(1,',
        ),
        ("eye/left: crop(height=9, width=2)", (), "rows 0 to 9 and columns 0 to 2 are not all in it"),
        ("eye/left: resize(height=0, width=2)", (), "height is 0, but must be a whole number above 0"),
        ("eye/left: compress", (), "floats from 0 to 1"),
        ("eye/left: grayscale, grayscale", (), "it takes colour images \\[H, W, 3\\]"),
        ("nose: grayscale", (), "but the observations are eye/left, eye/right, time"),
        ("time: previous_action", (), "write previous_action alone"),
        ("time: drop", ("repeat",), "repeat without n; give it, as in repeat"),
        ("time: drop", ("repeat(n=1)",), "above 1"),
        ("time: drop", ("repeat(m=1)",), 'has no argument "m"'),
        ("time: drop", ("sticky(probability=1.5)",), "between 0 and 1"),
    ],
)
def test_ops_that_do_not_fit_are_refused(observation: str, action: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrapped(observation, action=action)


@pytest.mark.parametrize("backend", ["vector", "envpool", "tensor"])
def test_backends_without_wrappers_are_refused(backend: Any) -> None:
    with pytest.raises(UserError, match=f"runs in the process of each environment, but env.backend is {backend}"):
        with_wrappers(EnvConfig(backend=backend), PreprocessConfig(("grayscale",)))
    assert with_wrappers(EnvConfig(backend=backend), PreprocessConfig(("stack(n=2), symlog",))).wrappers == ()
