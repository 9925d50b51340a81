"""RolloutCache: what is written is read, the last step starts the next rollout, minibatches contain every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.batch import Batch
from ludus.core.cache import Unroll
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.rollout import RolloutCache
from ludus.ops.returns import gae

B, T, GAMMA = 3, 4, 0.9


def env_step(t: int, first: bool = False, terminated: bool = False, truncated: bool = False) -> EnvStep:
    flags = [torch.full((B,), x) for x in (terminated, truncated, first)]
    observation = {"x": torch.full((B, 2), float(t)), "frame": torch.full((B, 1, 2, 2), t, dtype=torch.uint8)}
    return EnvStep(observation, torch.full((B,), float(t)), *flags, ~flags[-1])


def agent_step(t: int) -> AgentStep:
    state = HiddenState({"h": torch.full((B, 2), float(t + 1))})
    return AgentStep({"action": torch.full((B,), 100 + t)}, {"value": torch.full((B,), 10.0 * t)}, state)


def fill(cache: RolloutCache, start: int, **endings: dict[int, bool]) -> tuple[Batch, int]:
    """Write until ready, from time ``start`` (whose observation is written at the very beginning only)."""
    t, state = start, HiddenState({"h": torch.full((B, 2), float(start))})
    if start == 0:
        cache.env_write(env_step(0, first=True), state)
    while not cache.ready():
        said = agent_step(t)
        cache.agent_write(said)
        t += 1
        flags = {name: when.get(t, False) for name, when in endings.items()}
        cache.env_write(env_step(t, **flags), said.state)
    return cache.read(), t


def test_steps_are_written_in_order() -> None:
    batch, _ = fill(RolloutCache(T, B, GAMMA, torch.device("cpu")), 0)
    assert batch.observation["x"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert batch.observation["frame"].dtype == torch.uint8
    assert batch.action["action"][:, 0].tolist() == [100, 101, 102, 103]
    assert batch.reward[:, 0].tolist() == [1, 2, 3, 4]  # the reward that came with the successor
    assert batch.experience["value"][:, 0].tolist() == [0, 10, 20, 30]
    assert batch.state["h"][0, 0] == 0
    assert batch.last_state["h"][0, 0] == 4


def test_last_step_starts_the_next_rollout() -> None:
    cache = RolloutCache(T, B, GAMMA, torch.device("cpu"))
    _, t = fill(cache, 0)
    assert not cache.ready()  # read once
    batch, _ = fill(cache, t)
    assert batch.observation["x"][:, 0, 0].tolist() == [4, 5, 6, 7, 8]
    assert batch.action["action"][:, 0].tolist() == [104, 105, 106, 107]
    assert batch.reward[:, 0].tolist() == [5, 6, 7, 8]
    assert batch.state["h"][0, 0] == 4


def test_endings_determine_real_discount_and_continues() -> None:
    """Termination at 2 (reset row 3), truncation at 4."""
    cache = RolloutCache(T, B, GAMMA, torch.device("cpu"))
    batch, _ = fill(cache, 0, terminated={2: True}, first={3: True}, truncated={4: True})
    assert batch.real[:, 0].tolist() == [True, True, False, True]  # 2 → 3 is the reset, no transition
    torch.testing.assert_close(batch.discount[:, 0], torch.tensor([GAMMA, 0, GAMMA, GAMMA]))
    assert batch.continues[:, 0].tolist() == [1, 0, 0, 0]


def test_no_bootstrapping_across_a_lost_episode() -> None:
    """A ``first`` without an ending before it: the last real transition bootstraps from the last observation."""
    cache = RolloutCache(T, B, GAMMA, torch.device("cpu"))
    batch, _ = fill(cache, 0, first={3: True})
    assert batch.real[:, 0].tolist() == [True, True, False, True]
    assert batch.continues[:, 0].tolist() == [1, 0, 0, 1]
    value_t = torch.ones(T, B)
    value_t[2] = torch.nan  # of the new episode's first observation
    advantage = gae(batch.reward, batch.discount, batch.continues, torch.zeros(T, B), value_t, 0.95)
    assert advantage[:2].isfinite().all()
    assert advantage[1, 0] == pytest.approx(2 + GAMMA)


def test_state_dict_after_a_read() -> None:
    whole, half = (RolloutCache(T, B, GAMMA, torch.device("cpu")) for _ in range(2))
    _, t = fill(whole, 0)
    half.load_state_dict(whole.state_dict())
    expected, _ = fill(whole, t)
    got, _ = fill(half, t)
    for name in ("reward", "first", "real", "discount"):
        assert torch.equal(getattr(expected, name), getattr(got, name))
    assert torch.equal(expected.observation["x"], got.observation["x"])


def test_state_dict_of_an_unfinished_rollout() -> None:
    whole, half = (RolloutCache(T, B, GAMMA, torch.device("cpu")) for _ in range(2))
    _, t = fill(whole, 0)
    for _ in range(2):  # two rows of the second rollout
        said = agent_step(t)
        whole.agent_write(said)
        t += 1
        whole.env_write(env_step(t), said.state)
    half.load_state_dict({k: dict(x) if isinstance(x, dict) else x for k, x in whole.state_dict().items()})
    expected, got = (fill(cache, t)[0] for cache in (whole, half))
    assert torch.equal(expected.reward, got.reward)
    assert torch.equal(expected.action["action"], got.action["action"])
    assert torch.equal(expected.observation["x"], got.observation["x"])
    assert torch.equal(expected.state["h"], got.state["h"])


def test_state_dict_of_a_batch_with_one_of_two_unrolls() -> None:
    whole, half = (RolloutCache(T, 2 * B, GAMMA, torch.device("cpu")) for _ in range(2))
    unrolls = []
    for number in range(3):
        part = RolloutCache(T, B, GAMMA, torch.device("cpu"))
        batch, _ = fill(part, 0)
        tensors = {name: x + number if x.is_floating_point() else x for name, x in part.blocks.items()}
        tensors |= {"state/h": batch.state["h"] + number, "last_state/h": batch.last_state["h"] + number}
        unrolls.append(Unroll(tensors, Rows.all(B), 5 + number, number))
    whole.receive(unrolls[0])
    half.load_state_dict(whole.state_dict())
    assert not half.ready()
    for cache in (whole, half):
        cache.receive(unrolls[1])
        assert cache.ready()
    expected, got = whole.read(), half.read()
    assert got.version is not None
    assert got.version.tolist() == [5] * B + [6] * B
    for name in ("observation", "action", "experience", "state", "last_state"):
        mine, its = getattr(expected, name), getattr(got, name)
        assert list(mine) == list(its)
        assert all(torch.equal(x, its[key]) for key, x in mine.items()), name
    for name in ("reward", "first", "real", "discount"):
        assert torch.equal(getattr(expected, name), getattr(got, name))
    half.receive(unrolls[2])  # starts a new batch
    assert not half.ready()


def numbered_batch(time: int, columns: int) -> Batch:
    numbers = torch.arange(time * columns).reshape(time, columns)
    flags = torch.zeros(time, columns, dtype=torch.bool)
    floats = numbers.float()
    return Batch(
        {"x": torch.cat([floats, torch.full((1, columns), torch.nan)]).unsqueeze(-1)},
        torch.zeros(time + 1, columns, dtype=torch.bool),
        {"action": numbers}, floats, flags, flags, floats, ~flags, floats, {"value": floats},
        state=HiddenState({"h": numbers[0].float().unsqueeze(-1)}),
    )  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(time=st.integers(1, 7), columns=st.integers(1, 7), n=st.integers(1, 7), seed=st.integers(0, 99))
@pytest.mark.parametrize("by", ["transition", "environment"])
def test_minibatches_contain_every_row_once(by: str, time: int, columns: int, n: int, seed: int) -> None:
    batch = numbered_batch(time, columns)
    n = min(n, columns if by == "environment" else time * columns)
    parts = list(batch.minibatches(n, by, torch.Generator().manual_seed(seed)))  # type: ignore[arg-type]
    assert len(parts) == n
    sizes = [part.reward.shape[1] for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(torch.cat([p.action["action"].flatten() for p in parts]).tolist()) == list(range(time * columns))
    for part in parts:
        assert torch.equal(part.observation["x"].squeeze(-1), part.reward)  # and the NaN successor is gone
        assert torch.equal(part.action["action"].float(), part.reward)
        if by == "environment":
            assert part.reward.shape[0] == time
            assert torch.equal(part.state["h"].squeeze(-1), part.reward[0])


def test_every_epoch_has_another_permutation() -> None:
    batch, generator = numbered_batch(8, 8), torch.Generator().manual_seed(0)
    orders = [[p.reward.flatten().tolist() for p in batch.minibatches(2, "transition", generator)] for _ in range(2)]
    assert orders[0] != orders[1]


def test_images_are_channels_last_in_cache_and_minibatches() -> None:
    """Convolutions are faster with this layout, and no update has to convert it."""
    cache = RolloutCache(T, B, GAMMA, torch.device("cpu"))
    frames = torch.randint(0, 255, (T + 1, B, 3, 8, 9), dtype=torch.uint8)
    flags = torch.zeros(B, dtype=torch.bool)
    for t in range(T + 1):
        cache.env_write(EnvStep({"frame": frames[t]}, torch.zeros(B), flags, flags, flags, ~flags), HiddenState())
        if t < T:
            cache.agent_write(agent_step(t))
    batch = cache.read()
    assert torch.equal(batch.observation["frame"], frames)
    for part in batch.minibatches(2, "transition", torch.Generator().manual_seed(0)):
        picked = part.observation["frame"]
        assert picked[0].is_contiguous(memory_format=torch.channels_last)
        rows = [next(i for i, f in enumerate(frames[:T].flatten(0, 1)) if torch.equal(f, x)) for x in picked[0]]
        assert part.action["action"][0].tolist() == [100 + row // B for row in rows]
