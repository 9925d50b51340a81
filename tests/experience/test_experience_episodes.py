"""The cache of whole episodes, against episodes told apart by hand."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec
from ludus.core.step import AgentStep, EnvStep
from ludus.experience import episodes
from ludus.experience.episodes import EpisodeCache
from ludus.ops.returns import running_returns


@pytest.fixture(autouse=True, params=[64, 2])
def pause(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also stack every two steps, so that short episodes cross blocks."""
    monkeypatch.setattr(episodes, "PAUSE", request.param)


SPECS = {"x": Spec((), "float32", "continuous", low=-np.inf, high=np.inf)}


def make(rows: int, count: int = 1) -> EpisodeCache:
    return EpisodeCache(count, rows, 0.9, SPECS, SPECS, torch.device("cpu"), with_returns=True)


class World:
    """Rows whose episodes have the given lengths, in turn; the observation is 100 · episode + step of the row."""

    def __init__(self, lengths: list[list[int]], same_step: bool = False) -> None:
        self.lengths, self.same_step = lengths, same_step
        self.episode, self.time = [0] * len(lengths), [0] * len(lengths)
        self.over = [False] * len(lengths)

    def observation(self) -> Tensor:
        return torch.tensor([100.0 * e + t for e, t in zip(self.episode, self.time, strict=True)])

    def start(self) -> EnvStep:
        n = len(self.lengths)
        no = torch.zeros(n, dtype=torch.bool)
        return EnvStep({"x": self.observation()}, torch.zeros(n), no, no, ~no, no)

    def step(self) -> EnvStep:
        """The reward of a step is its observation; odd episodes are truncated."""
        n = len(self.lengths)
        reward, flags = torch.zeros(n), torch.zeros(4, n, dtype=torch.bool)
        terminated, truncated, first, real = flags
        final = self.observation()
        for row in range(n):
            if self.over[row]:  # the step after an ending is the reset
                self._reset(row)
                first[row] = True
                continue
            real[row] = True
            reward[row] = 100.0 * self.episode[row] + self.time[row]
            self.time[row] += 1
            if self.time[row] == self.lengths[row][self.episode[row]]:
                (truncated if self.episode[row] % 2 else terminated)[row] = True
                final[row] = 100.0 * self.episode[row] + self.time[row]
                if self.same_step:
                    self._reset(row)
                    first[row] = True
                else:
                    self.over[row] = True
        last = {"x": final} if self.same_step else None
        return EnvStep({"x": self.observation()}, reward, terminated, truncated, first, real, last)

    def _reset(self, row: int) -> None:
        self.episode[row], self.time[row], self.over[row] = self.episode[row] + 1, 0, False


def act(cache: EpisodeCache, step: EnvStep, start: int = 0) -> None:
    x = step.observation["x"]
    cache.agent_write(AgentStep({"x": x + 0.5}, {"seen": x}, HiddenState()), start)


def fill(cache: EpisodeCache, world: World, step: EnvStep) -> EnvStep:
    """Play until the cache is ready."""
    for _ in range(200):
        if cache.ready():
            return step
        act(cache, step)
        step = world.step()
        cache.env_write(step, HiddenState())
    raise AssertionError("never ready")


def played(batch: Batch) -> list[list[float]]:
    """The observations that were acted on, by row."""
    return [batch.observation["x"][:-1, row][batch.real[:, row]].tolist() for row in range(batch.real.shape[1])]


@pytest.mark.parametrize("same_step", [False, True])
def test_a_batch_holds_the_next_whole_episodes_of_each_row(same_step: bool) -> None:
    world = World([[2, 3, 4, 2, 9], [5, 2, 3, 3, 9]], same_step)
    cache, step = make(2), world.start()
    cache.env_write(step, HiddenState())
    step = fill(cache, world, step)
    first = cache.read()
    assert played(first) == [[0, 1], [0, 1, 2, 3, 4]]
    assert not cache.ready()
    step = fill(cache, world, step)
    second = cache.read()
    # row 0 was in its second episode (or third) when the first batch was read: that one is left out
    assert [rows[0] % 100 for rows in played(second)] == [0, 0]
    assert played(second)[0][0] // 100 in (2, 3)
    for batch in (first, second):
        check(batch)


def check(batch: Batch) -> None:
    """Every row has one episode, from its start to its end, whose parts belong together."""
    x, real = batch.observation["x"], batch.real
    assert batch.first[0].all()
    for row in range(real.shape[1]):
        length = int(real[:, row].sum())
        assert real[:length, row].all()
        assert bool((batch.terminated | batch.truncated)[length - 1, row])
        assert not (batch.terminated | batch.truncated)[: length - 1, row].any()
        assert torch.equal(x[:length, row] % 100, torch.arange(float(length)))
        assert torch.equal(batch.reward[:length, row], x[:length, row])
        assert torch.equal(batch.action["x"][:length, row], x[:length, row] + 0.5)
        assert torch.equal(batch.experience["seen"][:length, row], x[:length, row])
        last = batch.final["x"][length - 1, row] if batch.final else x[length, row]
        assert float(last) % 100 == length
    ended = batch.terminated | batch.truncated
    returns, _ = running_returns(batch.reward, ended, real, 0.9, torch.zeros(real.shape[1], dtype=torch.float64))
    torch.testing.assert_close(batch.row_state["return"], returns)
    assert torch.equal(batch.discount, 0.9 * (~batch.terminated).float())


def test_several_episodes_of_a_row_come_after_each_other_with_padding_between() -> None:
    world = World([[2, 3, 4], [4, 1, 9]])
    cache, step = make(2, count=2), world.start()
    cache.env_write(step, HiddenState())
    fill(cache, world, step)
    batch = cache.read()
    assert played(batch) == [[0, 1, 100, 101, 102], [0, 1, 2, 3, 100]]
    assert batch.real.int().T.tolist() == [[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 1]]
    assert batch.continues[1, 0] == batch.continues[2, 0] == 0


def test_a_lost_episode_is_played_again() -> None:
    """A crashed worker: a reset without an ending before it."""
    world, cache = World([[5, 5], [3, 5]]), make(2)
    step = world.start()
    cache.env_write(step, HiddenState())
    for _ in range(2):
        act(cache, step)
        step = world.step()
        cache.env_write(step, HiddenState())
    act(cache, step)
    world.episode[0], world.time[0] = 1, 0
    lost = world.step()  # row 0 takes a first step of an episode whose reset was never seen
    world.time[0] = 0
    lost = lost._replace(
        observation={"x": world.observation()}, first=torch.tensor([True, False]), real=torch.tensor([False, True])
    )
    cache.env_write(lost, HiddenState())
    fill(cache, world, lost)
    assert played(cache.read()) == [[100, 101, 102, 103, 104], [0, 1, 2]]


def test_groups_that_step_in_turn_make_one_batch() -> None:
    worlds = [World([[2, 9]]), World([[4, 9], [3, 9]])]
    cache, starts = make(3), [0, 1]
    steps = [world.start() for world in worlds]
    for start, step in zip(starts, steps, strict=True):
        cache.env_write(step, HiddenState(), start)
    while not cache.ready():
        for i, start in enumerate(starts):
            act(cache, steps[i], start)
            steps[i] = worlds[i].step()
            cache.env_write(steps[i], HiddenState(), start)
    assert played(cache.read()) == [[0, 1], [0, 1, 2, 3], [0, 1, 2]]


def test_what_is_saved_in_the_middle_of_an_episode_goes_on() -> None:
    world = World([[6, 3, 9], [4, 5, 9]])
    cache, step = make(2), world.start()
    cache.env_write(step, HiddenState({"h": torch.ones(2, 3)}))
    for _ in range(3):
        act(cache, step)
        step = world.step()
        cache.env_write(step, HiddenState())
    other = make(2)
    other.load_state_dict(cache.state_dict())
    other.amend(step)
    fill(other, world, step)
    batch = other.read()
    assert played(batch) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert torch.equal(batch.state["h"], torch.zeros(2, 3))


def test_episodes_without_an_end_end_the_run_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "LONGEST", 20)
    world = World([[1_000]])
    cache, step = make(1), world.start()
    cache.env_write(step, HiddenState())
    with pytest.raises(UserError, match=r"had no end after 20 steps; set env.max_episode_steps"):
        fill(cache, world, step)


def write_one_long_episode(cache: EpisodeCache, rows: int, steps: int) -> None:
    """Write steps with all that the agents store, and final observations."""
    no, x = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows)
    for time in range(steps):
        first = torch.full_like(no, time == 0)
        cache.env_write(EnvStep({"x": x}, x, no, no, first, ~first, {"x": x}), HiddenState())
        cache.agent_write(AgentStep({"x": x}, {"log_prob": x, "value": x, "environment": x.long()}, HiddenState()))


def test_the_memory_of_a_step_is_that_of_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "LONGEST", 1_000)
    cache, before = make(2), count_tensors()
    write_one_long_episode(cache, 2, 1_000)
    (saved,) = cache.state_dict()["groups"]
    stored = sum(x.nbytes for name in ("observations", "transitions", "actions") for x in saved[name].values())
    assert cache.max_bytes / 4 < stored <= cache.max_bytes
    del saved
    # about 8 for each block and for each of the last steps, not for each of 1,000 steps
    assert count_tensors() - before < 8_000


def count_tensors() -> int:
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


def test_episodes_that_leave_too_little_memory_for_a_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "CHECK_EVERY", 1)
    monkeypatch.setattr(episodes, "free_bytes", lambda *_: 50_000)
    cache = make(2)
    said = r"episodes, of \d,\d{3} steps so far, needs another 0.00 GB .*; set env.max_episode_steps to the length"
    with pytest.raises(UserError, match=said):
        write_one_long_episode(cache, 2, 2_000)
    write_one_long_episode(make(2), 2, 400)


def test_several_episodes_may_be_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "LONGEST", 20)
    world = World([[15, 15, 15]])
    cache, step = make(1, count=2), world.start()
    cache.env_write(step, HiddenState())
    fill(cache, world, step)
    assert len(played(cache.read())[0]) == 30


def test_masks_of_padding_allow_the_repeated_action() -> None:
    mask = Spec((3,), "bool", "binary")
    cache = EpisodeCache(1, 2, 0.9, SPECS | {"action_mask": mask}, SPECS, torch.device("cpu"))
    no = torch.zeros(2, dtype=torch.bool)
    for time in range(4):  # row 0 ends after 1 step, row 1 after 3
        legal = torch.zeros(2, 3, dtype=torch.bool)
        legal[:, time % 3] = True
        ended = torch.tensor([time == 1, time == 3])
        observation = {"x": torch.full((2,), float(time)), "action_mask": legal}
        first = torch.tensor([time in (0, 2), time == 0])
        cache.env_write(EnvStep(observation, torch.zeros(2), ended, no, first, ~first), HiddenState())
        if time < 3:
            cache.agent_write(AgentStep({"x": torch.full((2,), float(time % 3))}, {}, HiddenState()))
    batch = cache.read()
    assert batch.real.tolist() == [[True, True], [False, True], [False, True]]
    chosen = batch.observation["action_mask"][:-1].gather(2, batch.action["x"].long().unsqueeze(-1))
    assert chosen.all()
    assert batch.observation["action_mask"][0].tolist() == [[True, False, False]] * 2  # real rows keep theirs
