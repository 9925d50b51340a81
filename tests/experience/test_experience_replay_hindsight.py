"""Goals are replaced by what was reached later in the same episode, with the rewards of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from replay_model import CPU

from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs
from ludus.core.types import AgentStep, EnvStep, HiddenState
from ludus.experience.config import ReplayConfig
from ludus.experience.replay import ExperienceReplay

GOALS: Specs = {
    "achieved_goal": Spec((2,), "float32"),
    "desired_goal": Spec((2,), "float32"),
    "observation": Spec((1,), "float32"),
}
GAMMA, ROWS = 0.5, 2


def reward(reached: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    assert reached.shape == wanted.shape
    assert reached.dim() == 2
    return -(reached - wanted).abs().sum(1)


class Goals:
    """Row r at time t reaches (r, t) and wants (r, −episode); every reward in it is 0.5, which no new one is."""

    def __init__(self, longest: int = 9, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.longest, self.time = longest, -1
        self.episode, self.left = np.zeros(ROWS, int), np.zeros(ROWS, int)
        self.firsts: list[list[bool]] = []

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
        no = torch.zeros(ROWS, dtype=torch.bool)
        step = EnvStep(observation, torch.full((ROWS,), 0.5), no, torch.from_numpy(self.left == 0), torch.tensor(first))
        for replay in replays:
            replay.env_write(step, HiddenState())

    def last(self, t: int, row: int) -> int:
        """The time of the last observation of the episode that ``t`` is in."""
        while t < self.time and not self.firsts[t + 1][row]:
            t += 1
        return t


def make(**settings: Any) -> ExperienceReplay:
    config = ReplayConfig(**({"replay": 60 * ROWS, "batch_size": 64, "warmup": 0, "hindsight": 0.8} | settings))
    replay = ExperienceReplay(config, ROWS, GAMMA, GOALS, CPU, reward)
    replay.generator.manual_seed(0)
    return replay


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("prioritized", [False, True])
def test_goals_come_from_later_in_the_episode(n: int, prioritized: bool) -> None:
    goals, replay = Goals(), make(n_step=n, prioritized=prioritized)
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
            last = goals.last(t, row)
            k = min(n, last - t)
            assert batch.observation["achieved_goal"][:, i].tolist() == [[row, t], [row, t + k]]
            to_row, goal = wanted[0, i].tolist()
            assert to_row == row
            if goal < 0:  # as it was
                expected = sum(0.5 * GAMMA**j for j in range(k))
            else:
                assert t < goal <= last
                expected = sum(-abs(t + j + 1 - goal) * GAMMA**j for j in range(k))
            assert batch.reward[0, i] == expected
            changed, total = changed + (goal > 0), total + 1
    assert abs(changed / total - 0.8) < 4 * np.sqrt(0.16 / total)


def test_each_later_moment_has_an_equal_chance() -> None:
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


def test_a_resumed_replay_draws_the_same_goals() -> None:
    goals, whole, resumed = Goals(), make(n_step=2), make(n_step=2)
    for _ in range(100):
        goals.write(whole)
    whole.read()
    resumed.load_state_dict(whole.state_dict())
    for _ in range(10):
        a, b = whole.read(), resumed.read()
        assert torch.equal(a.observation["desired_goal"], b.observation["desired_goal"])
        assert torch.equal(a.reward, b.reward)
        for _ in range(9):
            goals.write(whole, resumed)


@pytest.mark.parametrize(
    ("specs", "function", "settings", "says"),
    [
        ({"observation": GOALS["observation"]}, reward, {}, 'no observation "achieved_goal" .it has observation.'),
        (GOALS, None, {}, "compute_reward"),
        (GOALS | {"desired_goal": Spec((3,), "float32")}, reward, {}, r"achieved_goal has shape \(2,\)"),
        (GOALS, reward, {"sequence": 5}, "single transitions; set agent.sequence to 0"),
    ],
)
def test_hindsight_without_goals_is_refused(specs: Specs, function: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ExperienceReplay(ReplayConfig(hindsight=0.5, **settings), 1, 0.9, specs, CPU, function)
