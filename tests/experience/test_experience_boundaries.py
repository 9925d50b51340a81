"""What is learned at the end of an episode, in the six ways in which one can end, worked out by hand.

One row of five steps; the observation is a number, which is its own value too, and γ is 0.5. The transition that leads
to step 2 is the last of its episode. Managers with next-step resets give the new episode's observation at step 3, those
with same-step resets at step 2, in place of the last one, which they give as ``final`` if they know it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from ludus.core.batch import Batch
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.config import ReplayConfig
from ludus.experience.replay import ExperienceReplay
from ludus.experience.rollout import RolloutCache
from ludus.ops.retrace import retrace
from ludus.ops.returns import gae, lambda_returns, n_step_returns
from ludus.ops.vtrace import vtrace

GAMMA, CPU, NEW, FINAL, NAN = 0.5, torch.device("cpu"), 100.0, 50.0, math.nan
Drawn = dict[int, tuple[float, float, float]]  # by time: reward, discount, observation that it leads to


class Case(NamedTuple):
    """An ending of an episode, and the expected values."""

    observation: list[float]
    terminated: bool
    truncated: bool
    first: list[int]
    padding: list[int]  # steps whose transition did not happen
    final: bool
    continues: list[int]
    returns: list[float]  # NaN: of no transition
    one_step: Drawn
    two_step: Drawn  # of the transitions that two others follow


NEXT, SAME = [0, 1, 2, NEW, 4], [0, 1, NEW, 3, 4]
CASES = {
    "next-step terminated": Case(
        NEXT, True, False, [0, 3], [0, 3], False, [1, 0, 0, 1], [2, 2, NAN, 6],
        {0: (1, 0.5, 1), 1: (2, 0, 2), 3: (4, 0.5, 4)}, {0: (2, 0, 2), 1: (2, 0, 2)},
    ),
    "next-step truncated": Case(
        NEXT, False, True, [0, 3], [0, 3], False, [1, 0, 0, 1], [2.5, 3, NAN, 6],
        {0: (1, 0.5, 1), 1: (2, 0.5, 2), 3: (4, 0.5, 4)}, {0: (2, 0.25, 2), 1: (2, 0.5, 2)},
    ),
    "same-step terminated": Case(
        SAME, True, False, [0, 2], [0], False, [1, 0, 1, 1], [2, 2, 6, 6],
        {0: (1, 0.5, 1), 1: (2, 0, NEW), 2: (3, 0.5, 3), 3: (4, 0.5, 4)},
        {0: (2, 0, NEW), 1: (2, 0, NEW), 2: (5, 0.25, 4)},
    ),
    "same-step truncated with final": Case(
        SAME, False, True, [0, 2], [0], True, [1, 0, 1, 1], [14.5, 27, 6, 6],
        {0: (1, 0.5, 1), 1: (2, 0.5, FINAL), 2: (3, 0.5, 3), 3: (4, 0.5, 4)},
        {0: (2, 0.25, FINAL), 1: (2, 0.5, FINAL), 2: (5, 0.25, 4)},
    ),
    "same-step truncated without final": Case(
        SAME, False, True, [0, 2], [0], False, [1, 0, 1, 1], [2.25, 2.5, 6, 6],
        {0: (1, 0.5, 1), 2: (3, 0.5, 3), 3: (4, 0.5, 4)}, {0: (1, 0.5, 1), 2: (5, 0.25, 4)},
    ),
    "lost": Case(
        NEXT, False, False, [0, 3], [0, 3], False, [1, 0, 0, 1], [2.5, 3, NAN, 6],
        {0: (1, 0.5, 1), 1: (2, 0.5, 2), 3: (4, 0.5, 4)}, {0: (2, 0.25, 2), 1: (2, 0.5, 2)},
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def env_step(case: Case, t: int) -> EnvStep:
    real = t not in case.padding
    flags = [torch.tensor([x]) for x in (case.terminated and t == 2, case.truncated and t == 2, t in case.first, real)]
    final = {"x": torch.tensor([[FINAL if t == 2 else NAN]])} if case.final else None
    return EnvStep(
        {"x": torch.tensor([[case.observation[t]]])}, torch.tensor([float(t) if real else NAN]), *flags, final
    )


def write(cache: RolloutCache | ExperienceReplay, case: Case) -> None:
    for t in range(5):
        cache.env_write(env_step(case, t), HiddenState())
        if t < 4:
            cache.agent_write(AgentStep({"action": torch.tensor([t])}, {}, HiddenState()))


@each_case
def test_a_rollout(case: Case) -> None:
    cache = RolloutCache(4, 1, GAMMA, CPU)
    write(cache, case)
    batch = cache.read()
    real = [t not in case.padding for t in range(1, 5)]
    assert batch.real[:, 0].tolist() == real
    assert batch.continues[:, 0].tolist() == case.continues
    assert torch.equal(batch.weight, torch.ones(4, 1))
    value = batch.observation["x"].squeeze(-1)
    value_t = batch.next_value(value, batch.final["x"].squeeze(-1) if case.final else None)
    given = batch.reward, batch.discount, batch.continues
    zeros = torch.zeros(4, 1)
    for found in (
        lambda_returns(*given, value_t, 1.0),
        n_step_returns(*given, value_t, 3),
        gae(*given, value[:-1], value_t, 1.0) + value[:-1],
        vtrace(zeros, *given, value[:-1], value_t).target,
        retrace(zeros, *given, value[:-1], value_t),
    ):
        assert found[batch.real].tolist() == [x for x in case.returns if not math.isnan(x)]


@each_case
@pytest.mark.parametrize("n_step", [1, 2])
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
def test_a_replay_of_transitions(case: Case, n_step: int, prioritized: bool) -> None:
    replay = make_replay(n_step=n_step, prioritized=prioritized)
    write(replay, case)
    drawn = read(replay)
    expected = case.one_step if n_step == 1 else case.two_step
    assert drawn == expected
    other = make_replay(n_step=n_step, prioritized=prioritized)
    other.load_state_dict(replay.state_dict())
    assert read(other) == expected


@each_case
def test_sequences_exclude_transitions_without_a_known_successor(case: Case) -> None:
    replay = make_replay(sequence=4, batch_size=4)
    write(replay, case)
    batch = replay.read()
    real, continues = [t not in case.padding for t in range(1, 5)], [*case.continues]
    if case.observation is SAME and case.truncated:
        real[1], continues[0] = False, 0
    assert batch.real[:, 0].tolist() == real
    assert torch.equal(batch.weight, torch.ones(4, 4))
    assert batch.continues[:, 0].tolist() == continues


def test_amend_invalidates_transitions_to_lost_episodes() -> None:
    """If a resume cannot restore a row, the transition to its last observation is not real."""
    case = CASES["next-step truncated"]
    rollout, replay = RolloutCache(4, 1, GAMMA, CPU), make_replay()
    for cache in (rollout, replay):
        for t in range(3):
            cache.env_write(env_step(case, t), HiddenState())
            cache.agent_write(AgentStep({"action": torch.tensor([t])}, {}, HiddenState()))
        yes = torch.tensor([True])
        cache.amend(EnvStep({"x": torch.tensor([[NEW]])}, torch.zeros(1), ~yes, ~yes, yes, ~yes))
        for t in (3, 4):
            cache.env_write(env_step(CASES["same-step terminated"], t), HiddenState())
            if t < 4:
                cache.agent_write(AgentStep({"action": torch.tensor([t])}, {}, HiddenState()))
    assert rollout.read().real[:, 0].tolist() == [True, False, True, True]
    assert set(read(replay)) == {0, 2, 3}


def make_replay(**settings: object) -> ExperienceReplay:
    config = ReplayConfig(**({"replay": 256, "batch_size": 48, "warmup": 0} | settings))  # type: ignore[arg-type]
    replay = ExperienceReplay(config, 1, GAMMA, {"x": Spec((1,), "float32")}, CPU)
    replay.generator.manual_seed(0)
    return replay


def read(replay: ExperienceReplay) -> Drawn:
    batch: Batch = replay.read()
    assert batch.index is not None
    assert batch.real.all()
    columns = batch.index.tolist(), batch.reward[0].tolist(), batch.discount[0].tolist()
    return {
        time: (reward, discount, after)
        for time, reward, discount, after in zip(*columns, batch.observation["x"][1, :, 0].tolist(), strict=True)
    }
