"""Hindsight replaces goals by ones achieved later in the episode, with their rewards and endings."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from replay_model import CPU

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.config import ReplayConfig
from ludus.experience.replay import ExperienceReplay

GOALS: Specs = {
    "achieved_goal": Spec((2,), "float32"),
    "desired_goal": Spec((2,), "float32"),
    "observation": Spec((1,), "float32"),
}
GAMMA, ROWS = 0.5, 2


def judge(reached: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Only goals of even times end an episode, so that windows pass others and meet the old ending."""
    assert reached.shape == wanted.shape
    assert reached.dim() == 2
    return -(reached - wanted).abs().sum(1), (reached == wanted).all(1) & (wanted[:, 1] % 2 == 0)


def rewards_alone(reached: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, None]:
    return judge(reached, wanted)[0], None


class Goals:
    """Row r at time t reaches (r, t) and wants (r, −episode); rewards are those of ``judge``, times ``scale``.

    Episodes terminate and truncate in turn.
    """

    def __init__(self, longest: int = 9, seed: int = 0, scale: float = 1.0) -> None:
        self.scale = scale
        self.rng = np.random.default_rng(seed)
        self.longest, self.time = longest, -1
        self.episode, self.left = np.zeros(ROWS, int), np.zeros(ROWS, int)
        self.firsts: list[list[bool]] = []
        self.terminated: list[list[bool]] = []

    def write(self, *replays: ExperienceReplay) -> None:
        self.time += 1
        first = self.left == 0
        self.episode += first
        self.left = np.where(first, self.rng.integers(1, self.longest + 1, ROWS), self.left - 1)
        self.firsts.append(first.tolist())
        if self.time:
            acted = torch.full((ROWS,), self.time - 1.0)
            for replay in replays:
                replay.agent_write(AgentStep({"a": acted}, {}, HiddenState()))
        row = torch.arange(ROWS, dtype=torch.float32)
        observation = {
            "achieved_goal": torch.stack([row, torch.full((ROWS,), float(self.time))], 1),
            "desired_goal": torch.stack([row, -torch.from_numpy(self.episode).float()], 1),
            "observation": torch.full((ROWS, 1), float(self.time)),
        }
        terminated, truncated = (self.left == 0) & (self.episode % 2 == 0), (self.left == 0) & (self.episode % 2 == 1)
        self.terminated.append(terminated.tolist())
        ends = torch.from_numpy(terminated), torch.from_numpy(truncated)
        reward = self.scale * judge(observation["achieved_goal"], observation["desired_goal"])[0]
        step = EnvStep(observation, reward, *ends, torch.tensor(first), ~torch.tensor(first))
        for replay in replays:
            replay.env_write(step, HiddenState())

    def last(self, t: int, row: int) -> int:
        """The time of the last observation of the episode that ``t`` is in."""
        while t < self.time and not self.firsts[t + 1][row]:
            t += 1
        return t

    def expected(self, t: int, row: int, n: int, goal: int, told: bool) -> tuple[int, float, float, bool]:
        """Steps, reward, discount and termination of a window from ``t``, with the goal (row, ``goal``).

        ``told``: whether the environment can say what ends with a new goal.
        """
        value, over, steps = 0.0, False, 0
        while steps < n and t + steps < self.last(t, row) and not over:
            value += GAMMA**steps * -abs(t + steps + 1 - goal)
            steps += 1
            over = t + steps == goal and goal % 2 == 0 if told and goal >= 0 else self.terminated[t + steps][row]
        return steps, value, 0.0 if over else GAMMA**steps, over


def make(function: Any = judge, window: bool = False, **settings: Any) -> ExperienceReplay:
    config = ReplayConfig(**({"replay": 60 * ROWS, "batch_size": 64, "warmup": 0, "hindsight": 0.8} | settings))
    replay = ExperienceReplay(config, ROWS, GAMMA, GOALS, CPU, function, window=window)
    replay.generator.manual_seed(0)
    return replay


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("prioritized", [False, True])
def test_goals_come_from_later_in_the_episode(n: int, prioritized: bool) -> None:
    goals, replay = Goals(), make(n_step=n, prioritized=prioritized)
    changed, total = check(goals, replay, n, told=True)
    assert abs(changed / total - 0.8) < 4 * np.sqrt(0.16 / total)


@pytest.mark.parametrize("n", [1, 4])
def test_endings_stay_with_one_warning_if_they_cannot_be_recomputed(n: int) -> None:
    goals, replay = Goals(), make(rewards_alone, n_step=n)
    with pytest.warns(RuntimeWarning, match=r"no compute_terminated.*keep their endings with new goals") as warned:
        check(goals, replay, n, told=False)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Goals(), make(n_step=n), n, told=True)  # no cause


def check(goals: Goals, replay: ExperienceReplay, n: int, told: bool) -> tuple[int, int]:
    """Compare all that is drawn with what it should be; return how many had a new goal, and how many there were."""
    changed, total = 0, 0
    for round_ in range(60):
        for _ in range(61 if round_ == 0 else 7):
            goals.write(replay)
        batch = replay.read()
        assert batch.index is not None
        wanted = batch.observation["desired_goal"]
        assert torch.equal(wanted[0], wanted[1])
        for i, number in enumerate(batch.index.tolist()):
            t, row = divmod(number, ROWS)
            to_row, goal = wanted[0, i].tolist()
            assert to_row == row
            assert goal < 0 or t < goal <= goals.last(t, row)
            steps, *rest = goals.expected(t, row, n, goal, told)
            assert batch.observation["achieved_goal"][:, i].tolist() == [[row, t], [row, t + steps]]
            assert [float(x[0, i]) for x in (batch.reward, batch.discount, batch.terminated)] == rest
            changed, total = changed + (goal > 0), total + 1
    return changed, total


def test_goals_are_drawn_uniformly_from_the_future() -> None:
    goals, replay = Goals(longest=1), make(hindsight=1.0)
    goals.longest = 10_000
    for _ in range(12):
        goals.write(replay)  # an episode that goes on, reached up to time 11
    first = goals.firsts.index([True, True], 1) if [True, True] in goals.firsts[1:] else 0
    drawn = np.zeros((12, 12))
    for _ in range(400):
        batch = replay.read()
        assert batch.index is not None
        t = batch.index.numpy() // ROWS
        np.add.at(drawn, (t, batch.observation["desired_goal"][0, :, 1].numpy().astype(int)), 1)
    for t in range(first, 10):
        counts = drawn[t, t + 1 :]
        assert drawn[t, : t + 1].sum() == 0
        expected = counts.sum() / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < len(counts) + 5 * np.sqrt(2 * len(counts))


def test_states_inside_n_step_transitions_have_the_new_goal() -> None:
    goals, replay = Goals(), make(window=True, n_step=3)
    for _ in range(60):
        goals.write(replay)
    batch = replay.read()
    assert batch.index is not None
    passed = batch.window["discount"] > 0
    wanted = batch.observation["desired_goal"][0].expand(2, -1, -1)
    assert torch.equal(batch.window["observation/desired_goal"][passed], wanted[passed])
    times = (batch.index // ROWS + torch.arange(1, 3)[:, None]).float()
    assert torch.equal(batch.window["observation/achieved_goal"][..., 1][passed], times[passed])
    assert 0 < int(passed.sum()) < passed.numel()


def test_resumed_replay_draws_equal_goals() -> None:
    goals, whole, resumed = Goals(), make(n_step=2), make(n_step=2)
    for _ in range(100):
        goals.write(whole)
    whole.read()
    resumed.load_state_dict(whole.state_dict())
    for _ in range(10):
        a, b = whole.read(), resumed.read()
        assert torch.equal(a.observation["desired_goal"], b.observation["desired_goal"])
        assert torch.equal(a.reward, b.reward)
        assert torch.equal(a.discount, b.discount)
        for _ in range(9):
            goals.write(whole, resumed)


def test_rewards_that_differ_from_compute_reward_raise() -> None:
    goals, replay = Goals(longest=1000, scale=4.0), make()
    goals.write(replay)
    goals.write(replay)
    with pytest.raises(
        UserError, match=r"agent.hindsight is 0.8, but .* a reward of -12 where compute_reward gives -3 "
    ):
        goals.write(replay)


def test_reward_may_refer_to_the_goal_before_the_step() -> None:
    """A task that sets its next goal at once rewards the goal before the step, and shows the next one."""
    replay, wanted = make(), torch.zeros(ROWS, 2)
    for time in range(50):
        reached, first = torch.full((ROWS, 2), float(time)), torch.full((ROWS,), time == 0)
        reward, ends = judge(reached, wanted)
        if time:
            replay.agent_write(AgentStep({"a": torch.zeros(ROWS)}, {}, HiddenState()))
        wanted = torch.full((ROWS, 2), 7.0 * time)
        observation = {"achieved_goal": reached, "desired_goal": wanted, "observation": torch.zeros(ROWS, 1)}
        replay.env_write(EnvStep(observation, reward, ends & False, ends & False, first, ~first), HiddenState())


def test_rewards_are_compared_until_enough_have_agreed() -> None:
    asked: list[int] = []

    def count(reached: torch.Tensor, wanted: torch.Tensor) -> Any:
        asked.append(len(reached))
        return judge(reached, wanted)

    goals, replay = Goals(), make(count)
    for _ in range(800):
        goals.write(replay)
    assert 1000 <= sum(asked) <= 1000 + ROWS


@pytest.mark.parametrize(
    ("specs", "function", "settings", "says"),
    [
        ({"observation": GOALS["observation"]}, judge, {}, 'no observation "achieved_goal" .it has observation.'),
        (GOALS, None, {}, "compute_reward"),
        (GOALS | {"desired_goal": Spec((3,), "float32")}, judge, {}, r"achieved_goal has shape \(2,\)"),
        (
            GOALS | {"desired_goal/mask": Spec((2,), "bool", "binary", masks="desired_goal")},
            judge,
            {},
            "achieved_goal or desired_goal is a list of variable length",
        ),
        (GOALS, judge, {"sequence": 5}, "single transitions; set agent.sequence to 0"),
    ],
)
def test_invalid_hindsight_settings_raise(specs: Specs, function: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ExperienceReplay(ReplayConfig(hindsight=0.5, **settings), 1, 0.9, specs, CPU, function)
