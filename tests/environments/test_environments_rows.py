"""EnvRows against a plain loop over the same environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ludus.core.errors import UserError
from ludus.environments.gym import make
from ludus.environments.rows import EnvRows, StepArrays, episode_seed
from ludus.environments.toy import MaskedEnv, MixedActionEnv


def attached(maker, *ranges, batch):
    parts = [EnvRows(maker, start, count, "World", branch=2) for start, count in ranges]
    memory = StepArrays.allocate(parts[0].observation, batch)
    for part in parts:
        part.attach(memory)
    return parts, memory


def copy(memory):
    flat = (memory.reward, memory.terminated, memory.truncated, memory.first, memory.seed)
    return [x.copy() for x in (*memory.observation.values(), *flat)]


def test_rows_equal_a_plain_loop_with_next_step_resets():
    maker = lambda: make("CartPole-v1", max_episode_steps=25)  # noqa: E731
    (rows,), memory = attached(maker, (0, 3), batch=3)
    envs, episodes, ended = [maker() for _ in range(3)], [4, 0, 9], [True] * 3
    actions = np.random.default_rng(0).integers(0, 2, (200, 3))
    for time in range(200):
        if time == 0:
            rows.reset(7, episodes)
        else:
            rows.step({"action": actions[time]})
        for row, env in enumerate(envs):
            if ended[row]:
                episodes[row] += time > 0
                seed = episode_seed(7, 2, row, episodes[row])
                (observation, _), reward, ends = env.reset(seed=seed), 0, (False, False)
                assert memory.seed[row] == seed
            else:
                observation, reward, *ends, _ = env.step(actions[time, row])
            assert memory.observation["observation"][row].tobytes() == observation.tobytes()
            assert (memory.reward[row], memory.first[row]) == (reward, ended[row])
            assert (memory.terminated[row], memory.truncated[row]) == tuple(ends)
            ended[row] = any(ends)


@pytest.mark.parametrize(
    ("maker", "draw"),
    [
        (MaskedEnv, lambda random: {"action": random.integers(0, 10, 5)}),
        (
            MixedActionEnv,
            lambda random: {"choice": random.integers(0, 3, 5), "amount": random.random((5, 2), np.float32)},
        ),
        (
            lambda: make("Pendulum-v1", max_episode_steps=9),
            lambda random: {"action": random.random((5, 1), np.float32)},
        ),
    ],
)
def test_results_do_not_depend_on_how_rows_are_divided(maker, draw):
    (whole,), a = attached(maker, (0, 5), batch=5)
    parts, b = attached(maker, (0, 2), (2, 3), batch=5)
    random = np.random.default_rng(1)
    for time in range(60):
        actions = draw(random)
        if time == 0:
            whole.reset(3, [0] * 5)
            parts[0].reset(3, [0, 0])
            parts[1].reset(3, [0, 0, 0])
        else:
            infos = whole.step(actions)
            assert {**parts[0].step(actions), **parts[1].step(actions)} == infos
        assert all(np.array_equal(x, y) for x, y in zip(copy(a), copy(b), strict=True))
    assert a.seed.min() > 0


class Odd(gymnasium.Env):
    """Returns the same values as Even in other types than those of the space."""

    observation_space, action_space = spaces.Box(-100, 100, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return [0.0, float(self.np_random.integers(9))], {}

    def step(self, action):
        self.steps += 1
        ends = np.bool_(self.steps > 4)
        return [self.steps, 0.5], np.float64(self.steps), ends, 0, {"steps": np.int64(self.steps)}


class Even(Odd):
    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return np.array(observation, np.float32), info

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return np.array(observation, np.float32), float(reward), bool(terminated), False, {"steps": info["steps"]}


def test_unusual_types_give_the_same_arrays_as_usual_ones():
    (odd,), a = attached(Odd, (0, 2), batch=2)
    (even,), b = attached(Even, (0, 2), batch=2)
    odd.reset(0, [0, 0])
    even.reset(0, [0, 0])
    for _ in range(20):
        actions = {"action": np.zeros(2, np.int64)}
        assert odd.step(actions) == even.step(actions)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(copy(a), copy(b), strict=True))


def test_infos_are_those_of_rows_that_end():
    (rows,), _ = attached(Even, (3, 2), batch=6)
    rows.reset(0, [0, 0])
    found = [rows.step({"action": np.zeros(6, np.int64)}) for _ in range(6)]
    assert found == [{}, {}, {}, {}, {3: {"steps": 5.0}, 4: {"steps": 5.0}}, {}]


def test_status_has_the_row_being_called():
    seen = []

    class Looks(Even):
        def step(self, action):
            seen.append(int(rows.status[0]))
            return super().step(action)

    (rows,), _ = attached(Looks, (2, 3), batch=5)
    rows.status = np.zeros(1, np.int64)
    rows.reset(0, [0] * 3)
    rows.step({"action": np.zeros(5, np.int64)})
    assert seen == [2, 3, 4]


@pytest.mark.parametrize("space", [spaces.Box(-9, 9, (2,), np.float32), spaces.Dict(a=spaces.MultiDiscrete([9, 9]))])
def test_actions_are_copies(space):
    class Keeps(Even):
        action_space = space
        kept: list = []  # noqa: RUF012

        def step(self, action):
            self.kept.append(action["a"] if isinstance(action, dict) else action)
            return super().step(action)

    (rows,), _ = attached(Keeps, (0, 1), batch=1)
    rows.reset(0, [0])
    (name,), actions = rows.action, np.zeros((1, 2), next(iter(rows.action.values())).dtype)
    for number in range(3):
        actions[:] = number
        rows.step({name: actions})
    assert [action.tolist() for action in Keeps.kept] == [[0, 0], [1, 1], [2, 2]]


def test_arrays_by_flat_names():
    specs = EnvRows(MaskedEnv, 0, 1, "World").observation
    fields = StepArrays.fields(specs, 4)
    assert fields["observation/action_mask"] == ((4, 10), "bool")
    assert fields["seed"] == ((4,), "int64")
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in fields.items()}
    memory = StepArrays.from_arrays(arrays)
    memory.rows(slice(2, 4)).mark_first()
    assert arrays["first"].tolist() == [False, False, True, True]
    assert memory.observation["observation"] is arrays["observation/observation"]


class Board(gymnasium.Env):
    """A board of 200 kinds of cells, more than 8 bits hold; one of them is outside of the space at the second step."""

    def __init__(self, kinds=200, more=False):
        board = spaces.MultiDiscrete(np.full((3, 4), kinds), start=np.full((3, 4), 5))
        self.observation_space = spaces.Dict(board=board) if more else board
        self.action_space = spaces.Discrete(2)
        self.kinds, self.more = kinds, more

    def reset(self, *, seed=None, options=None):
        return self._observe(self.kinds - 1), {}

    def step(self, action):
        return self._observe(2**16 + 1), 0.0, False, False, {}

    def _observe(self, last):
        board = np.arange(12).reshape(3, 4)
        board[-1, -1] = last
        return {"board": board + 5} if self.more else board + 5


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("kinds", "dtype"), [(12, "int8"), (128, "int8"), (200, "int16"), (40_000, "int32")])
def test_grids_are_stored_in_small_integers(kinds, dtype, more):
    rows = EnvRows(lambda: Board(kinds, more), 0, 1, "Board")
    ((name, spec),) = rows.observation.items()
    assert (spec.axes, spec.dtype) == ("grid", dtype)
    memory = StepArrays.allocate(rows.observation, 1)
    rows.attach(memory)
    rows.reset(0, [0])
    assert memory.observation[name][0].ravel().tolist() == [*range(11), kinds - 1]
    with pytest.raises(UserError, match=f"has the choice 65537 .* its space has {kinds}"):
        rows.step({"action": np.zeros(1, np.int64)})
