from __future__ import annotations

import re
import time
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import ludus
from ludus.core.errors import UserError
from ludus.environments.check import check_environment
from ludus.environments.config import EnvConfig

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Good(gymnasium.Env):
    """A valid environment; each case below breaks one part of it."""

    def __init__(self, **parts):
        self.observation_space = parts.pop("observation_space", BOX)
        self.action_space = parts.pop("action_space", spaces.Discrete(3))
        self.parts = parts

    def value(self, part, default):
        chosen = self.parts.get(part, default)
        return chosen(self) if callable(chosen) else chosen

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.value("reset", (self.observe(), self.value("info", {})))

    def observe(self):
        return self.value("observation", lambda env: env.np_random.uniform(-1, 1, 2).astype(np.float32))

    def step(self, action):
        self.count += 1
        five = (
            self.observe(),
            self.value("reward", 0.5),
            self.value("terminated", self.count > 9),
            self.value("truncated", False),
            self.value("info", {}),
        )
        return self.value("step", five)


def check(config, environment=None, **limits):
    return check_environment(config, environment, **limits).problems


def found(**parts):
    return check(EnvConfig(), lambda: Good(**parts), steps=60)


def raising(env):
    raise ValueError("broken inside")


CASES = {
    "old step": ({"step": lambda env: (env.observe(), 0.0, False, {})}, "step returned 4 values", "five values"),
    "old reset": ({"reset": lambda env: env.observe()}, "reset returned a ndarray", "observation, info"),
    "reset info": ({"reset": lambda env: (env.observe(), None)}, "info of type NoneType", "dict"),
    "step raises": ({"step": raising}, "step raised ValueError: broken inside", "Correct step"),
    "shape": ({"observation": np.zeros(3, np.float32)}, r"float32 of shape \(3,\)", "reshape"),
    "dtype": ({"observation": np.zeros(2, np.int64)}, "int64 of shape", "astype"),
    "bounds": ({"observation": np.full(2, 5, np.float32)}, "outside the bounds.*5", "Widen"),
    "nan": ({"observation": np.full(2, np.nan, np.float32)}, "NaN", "division"),
    "text": ({"observation": "hello"}, "its space is float32", "space"),
    "reward text": ({"reward": "1"}, "reward is of type str", "float"),
    "reward by agent": ({"reward": {"agent_0": 1.0}}, "reward is of type dict", "add possible_agents"),
    "reward array": ({"reward": np.zeros(1)}, "reward is of type ndarray", "float"),
    "reward of no numbers": ({"reward": np.array(None)}, "reward is of type ndarray", "float"),
    "reward nan": ({"reward": float("nan")}, "reward is NaN", "division"),
    "terminated": ({"terminated": lambda env: int(env.count > 9)}, "terminated is of type int", r"bool\(terminated\)"),
    "truncated": ({"truncated": None}, "truncated is of type NoneType", r"bool\(truncated\)"),
    "info": ({"step": lambda env: (env.observe(), 0.0, False, False, [])}, "info of type list", "dict"),
    "discrete range": ({"observation_space": spaces.Discrete(3), "observation": 3}, "outside its space", "Widen"),
    "parts": (
        {"observation_space": spaces.Dict(a=BOX), "observation": {"b": 1}},
        r"parts \['b'\].*\['a'\]",
        "exactly the parts",
    ),
    "no dict": ({"observation_space": spaces.Dict(a=BOX)}, "space is a Dict", "dict"),
    "unsupported": ({"observation_space": spaces.Text(4), "observation": "a"}, "is a Text", "supported"),
    "no space": ({"action_space": 4}, "action_space is of type int", "Gymnasium space"),
    "mask empty": ({"info": {"action_mask": np.zeros(3)}}, "allows nothing", "at least one"),
    "mask length": ({"info": {"action_mask": np.ones(4)}}, "4 entries", "one entry per choice"),
    "no choice": ({"action_space": spaces.Box(0, np.float32([0, 1]))}, "low that is not below", "low < high"),
}  # fmt: skip


TAKEN = ("bounds", "terminated", "truncated", "no choice")  # warnings, which training takes as they are


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_each_problem_is_reported_with_its_fix(name):
    parts, what, fix = CASES[name]
    problems = found(**parts)
    assert len(problems) == 1, problems
    assert problems[0].severity == ("warning" if name in TAKEN else "error")
    assert re.search(what, problems[0].what)
    assert re.search(fix, problems[0].fix)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_training_refuses_errors_and_accepts_warnings(name, tmp_path):
    settings = {"env.num": 2, "agent.rollout": 16, "evaluation.episodes": 1, "threads": 1, "compile": "off"}
    settings |= {"quiet": True, "runs": str(tmp_path), "agent.minibatches": 2, "env.max_episode_steps": 20}
    train = partial(ludus.train, lambda: Good(**CASES[name][0]), preset="none", nb_step=64, settings=settings)
    if name not in TAKEN:
        with pytest.raises(UserError):
            train()
        return
    log = (train().run / "log.txt").read_text()
    assert ("outside the bounds of its Box (for example 5); widen low and high" in log) == (name == "bounds")


def test_a_box_with_low_above_high_is_an_error(tmp_path):
    box = spaces.Box(0, 1, (2,))
    box.high[0] = -1  # Gymnasium makes no such Box
    assert any("low above its high" in problem.what for problem in found(action_space=box))
    with pytest.raises(UserError, match="low above its high; make low < high everywhere"):
        ludus.train(lambda: Good(action_space=box), preset="none", settings={"runs": str(tmp_path)})


def test_all_problems_are_reported_at_once():
    problems = found(
        observation=np.zeros(3, np.float32), reward="1", terminated=0, action_space=spaces.Box(-np.inf, np.inf, (2,))
    )
    assert len(problems) == 4
    assert sum(p.severity == "warning" for p in problems) == 2


@pytest.mark.parametrize(
    ("parts", "what", "fix"),
    [
        ({"observation": np.zeros(2)}, "is float64, and is cast to float32", "astype"),
        ({"observation": np.full(2, 1 + 1e-12)}, "is float64, and is cast to float32", "astype"),
        ({"reward": np.array(1.0)}, "array without dimensions", r"float\(reward\)"),
        ({"reward": torch.tensor(1.0)}, "array without dimensions", r"float\(reward\)"),
    ],
)
def test_a_cast_is_a_warning(parts, what, fix):
    (problem,) = found(**parts)
    assert problem.severity == "warning"
    assert re.search(what, problem.what)
    assert re.search(fix, problem.fix)


def test_a_cast_observation_is_checked_further():
    cast, bounds = found(observation=np.full(2, 5.0))
    assert (cast.severity, bounds.severity) == ("warning", "warning")
    assert "outside the bounds" in bounds.what
    problems = found(observation=np.zeros(2), info={"action_mask": np.zeros(3)})
    assert any("allows nothing" in problem.what for problem in problems)


def test_infinite_action_bounds_are_a_warning():
    (problem,) = found(action_space=spaces.Box(-np.inf, np.inf, (2,)))
    assert problem.severity == "warning"
    assert "infinite bounds" in problem.what


def test_an_ignored_seed_is_a_warning():
    (problem,) = found(observation=lambda env: np.random.uniform(-1, 1, 2).astype(np.float32))
    assert (problem.severity, "reset ignores its seed" in problem.what) == ("warning", True)


def test_a_random_step_is_a_warning():
    (problem,) = found(reward=lambda env: float(np.random.random()))
    assert problem.severity == "warning"
    assert "same seed and actions differ" in problem.what


def test_a_reset_without_seed_is_an_error():
    class Old(Good):
        def reset(self):
            return super().reset()

    problems = check(EnvConfig(), Old)
    assert len(problems) == 1
    assert "reset(self, *, seed=None" in problems[0].fix


def test_a_call_that_never_returns_is_abandoned():
    problems = check(EnvConfig(), lambda: Good(reward=lambda env: time.sleep(1000)), deadline=1.5)
    assert [p.what for p in problems] == ["step did not return within 1.5 seconds."]


def test_an_environment_that_cannot_be_made_is_reported():
    def maker():
        raise RuntimeError("no licence")

    (problem,) = check(EnvConfig(), maker)
    assert "no licence" in problem.what
    assert problem.fix == "Correct it there."
    assert 'Did you mean "CartPole-v1"' in check(EnvConfig(id="Cartpole-v1"))[0].fix
    assert "env.num" in check(EnvConfig(num=0))[0].what


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "Blackjack-v1", "FrozenLake-v1"])
def test_valid_environments_have_no_problems(id):
    assert check(EnvConfig(id=id)) == []


def test_empty_masks_are_allowed_when_the_episode_has_ended():
    def info(env):
        return {"action_mask": np.zeros(3) if env.count > 9 else np.array([0, 1, 0])}

    assert found(info=info) == []


def everything(**parts):
    """Return the problems of an environment with these faults, without examples, with their severity."""
    return {problem.what.split(" (for")[0]: problem.severity for problem in found(**parts)}


def test_an_invalid_reset_does_not_hide_other_problems():
    rest = {"reward": "1", "terminated": 0, "action_space": spaces.Box(-np.inf, np.inf, (2,))}
    others = {
        "The reward is of type str, which is not a number.": "error",
        "terminated is of type int, not bool.": "warning",
        'The Box of action "action" has infinite bounds.': "warning",
    }
    for nonsense, said in {
        None: "reset returned a NoneType",
        7: "reset returned a int",
        (1, 2, 3): "reset returned 3 values",
    }.items():
        said = f"{said}, not the two values observation and info."
        observed = {'Observation "observation" is int64 of shape (), but its space is float32 of shape (2,).': "error"}
        assert everything(reset=nonsense, **rest) == others | {said: "error"} | (observed if nonsense == 7 else {})


def test_values_of_the_old_gym_api_are_checked():
    wide = np.full(2, 5, np.float32)
    said = everything(reset=lambda env: wide, step=lambda env: (np.zeros(3, np.float32), None, env.count > 9, {}))
    assert said == {
        "reset returned a ndarray, not the two values observation and info.": "error",
        'Observation "observation" lies outside the bounds of its Box': "warning",
        "step returned 4 values, not five values.": "error",
        "The reward is of type NoneType, which is not a number.": "error",
        'Observation "observation" is float32 of shape (3,), but its space is float32 of shape (2,).': "error",
    }


def test_a_step_that_raises_does_not_hide_a_random_reset():
    said = everything(step=raising, observation=lambda env: np.random.uniform(-1, 1, 2).astype(np.float32))
    assert said == {
        "step raised ValueError: broken inside.": "error",
        "reset ignores its seed: runs will not be repeatable.": "warning",
    }


def test_a_reset_without_seed_does_not_hide_other_problems():
    class Old(Good):
        def reset(self):
            return super().reset()

    said = [problem.what for problem in check(EnvConfig(), lambda: Old(reward="1"), steps=60)]
    assert len(said) == 2
    assert "reset raised TypeError" in said[0]
    assert "reward is of type str" in said[1]


class Drawn(Good):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, picture, render_mode=None):
        super().__init__()
        self.picture, self.render_mode = picture, render_mode

    def render(self):
        return self.picture()


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (lambda: np.zeros((8, 9, 3), np.uint8), None),
        (lambda: np.zeros((8, 9)), r"render returned float64 of shape \(8, 9\)"),
        (lambda: None, "render returned NoneType"),
        (lambda: raising(None), "render raised ValueError: broken inside"),
    ],
)
def test_render_is_checked(picture, said):
    problems = check(EnvConfig(), lambda render_mode=None: Drawn(picture, render_mode), steps=20)
    assert [problem.severity for problem in problems] == ["warning"] * bool(said)
    assert not said or re.search(said, problems[0].what)


def test_an_environment_with_render_modes_needs_the_argument_render_mode():
    (problem,) = check(EnvConfig(), lambda: Drawn(lambda: None), steps=20)
    assert (problem.severity, "takes no render_mode" in problem.what) == ("warning", True)


def test_nan_observations_count_as_repeatable():
    (problem,) = found(observation=np.full(2, np.nan, np.float32))
    assert "NaN" in problem.what


def test_episodes_that_may_never_end_are_a_warning():
    (problem,) = found(terminated=False)
    assert problem.severity == "warning"
    assert problem.what == "No episode ended in 59 random steps, and nothing limits their length."
    limited = check(EnvConfig(max_episode_steps=1000), lambda: Good(terminated=False), steps=60)
    assert limited == []


LIST = spaces.Sequence(BOX)
GRAPH = spaces.Graph(BOX, spaces.Discrete(3))
ROW = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("space", "observation", "says"),
    [
        (LIST, (ROW,) * 33, "33 elements, but env.max_length is 32; raise it"),
        (LIST, [ROW], 'Observation "observation" is of type list, but a Sequence; return a tuple'),
        (LIST, (ROW, np.full(2, 5, np.float32)), "outside the bounds of its Box .for example 5"),
        (LIST, (ROW, np.zeros(3, np.float32)), r"float32 of shape \(3,\), but its space is float32 of shape \(2,\)"),
        (spaces.Sequence(BOX, stack=True), np.full((3, 2), np.nan, np.float32), "NaN"),
        (GRAPH, (ROW, None, None), "give a gymnasium.spaces.GraphInstance"),
        (
            GRAPH,
            spaces.GraphInstance(np.stack([ROW]), np.array([3]), np.zeros((1, 2), int)),
            '"observation/edges" lies',
        ),
        (spaces.OneOf((BOX, LIST)), (1, (np.zeros(1, np.float32),)), r'"observation/1" is float32 of shape \(1,\)'),
        (spaces.OneOf((BOX, LIST)), (2, ROW), "the number of an alternative .0 to 1."),
    ],
)
def test_problems_of_observations_of_variable_size(space, observation, says):
    (problem,) = found(observation_space=space, observation=lambda env: observation)
    assert re.search(says, str(problem))


def test_lists_without_problems():
    drawn = lambda env: tuple(env.np_random.uniform(-1, 1, (env.count % 4, 2)).astype(np.float32))  # noqa: E731
    assert found(observation_space=LIST, observation=drawn) == []
    (problem,) = found(action_space=LIST)
    assert "is a Sequence, which is not supported" in problem.what
