"""A replay that receives whole unrolls holds what one holds that is written step by step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "containers"))

from containers_setup import make_worker

from ludus.containers.loop import begin, collect
from ludus.core.cache import CacheWriter, Unroll
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.replay import ExperienceReplay

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transitions": ("CartPole-v1", "dqn", {"agent__replay": 400}),
    "n steps": ("CartPole-v1", "dqn", {"agent__replay": 400, "agent__n_step": 3}),
    "priorities": ("CartPole-v1", "dqn", {"agent__replay": 400, "agent__prioritized": True, "agent__n_step": 3}),
    "sequences": (
        "CartPole-v1",
        "r2d2",
        {"agent__replay": 96, "agent__sequence": 8, "agent__burn_in": 4, "agent__overlap": 4},
    ),
    "hindsight": (
        "ludus.environments.goal_toy:BitFlipEnv",
        "dqn",
        {"agent__replay": 400, "agent__hindsight": 0.8},
    ),
    "same-step resets": (
        "ludus.environments.tensor_toy:TensorCue",
        "dqn",
        {"agent__replay": 400, "env__backend": "tensor"},
    ),
}
SMALL: dict[str, Any] = {"agent__warmup": 0, "agent__batch_size": 8, "nb_step": 10_000}


class Both(CacheWriter):
    """Writes to two caches; the second says when to stop."""

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Any = None) -> None:
        self.one.env_write(step, state, start, final_value)
        self.other.env_write(step, state, start, final_value)

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        self.one.agent_write(step, start)
        self.other.agent_write(step, start)

    def accepts(self, start: int) -> bool:
        return bool(self.other.accepts(start))

    def amend(self, step: EnvStep) -> None:
        raise NotImplementedError


def contents(replay: ExperienceReplay) -> dict[str, Any]:
    (group,) = replay._groups.values()
    numbers = torch.from_numpy(group.numbers[-replay.config.batch_size :])
    replay.generator.manual_seed(0)  # draws goals
    batch = replay._reader.read(numbers, None, replay.generator)
    return {
        "numbers": group.numbers,
        "observation": {k: x.clone() for k, x in batch.observation.items()},
        "action": {k: x.clone() for k, x in batch.action.items()},
        "state": {k: x.clone() for k, x in batch.state.items()},
        **{k: getattr(batch, k).clone() for k in ("first", "reward", "discount", "real", "terminated")},
        "counters": [replay._real, replay.size],
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("case", CASES)
def test_unrolls_are_written_as_steps_are(case: str) -> None:
    environment, agent, changes = CASES[case]
    worker = make_worker(environment, agent, **SMALL | changes)
    unroll: Any = worker.agent.make_unroll(Rows.all(4))
    direct: Any = worker.cache
    received: Any = worker.agent.make_cache(Rows.all(4))
    worker.seat.cache = Both(direct, unroll)
    begin(worker, 3)
    for number in range(8):
        collect(worker)
        sent: Unroll = unroll.submit()
        received.receive(sent._replace(number=number))
        if direct.size >= direct.config.batch_size:
            assert_same(contents(received), contents(direct))
    assert direct._groups[0].oldest > 0  # the ring is full
    if case == "priorities":
        errors = sent.tensors["td_error"]
        numbers = received._groups[0].numbers[-8:]
        values = received._priorities.get(torch.from_numpy(numbers)).float()
        times = numbers // 4 + 3 - (received._groups[0].time - len(errors) + 1)
        expected = (errors[times, numbers % 4] + 1e-6) ** received.config.priority_exponent
        assert torch.allclose(values, expected)
    worker.close()


def test_no_transition_leads_to_an_unroll_after_a_missing_one() -> None:
    worker = make_worker("CartPole-v1", "dqn", **SMALL, agent__replay=400)
    unroll: Any = worker.agent.make_unroll(Rows.all(4))
    received: Any = worker.agent.make_cache(Rows.all(4))
    worker.seat.cache = unroll
    begin(worker, 3)
    for number in (0, 1, 5):
        collect(worker)
        sent = unroll.submit()
        received.receive(sent._replace(number=number))
    (group,) = received._groups.values()
    length = len(sent.tensors["reward"])
    assert group.time == 3 * length + 1
    gap = 2 * length + 1  # the time of the first observation after the missing unrolls
    assert not received._drawable[:, gap].any()
    stored = received._ring.columns["observation/observation"][:, gap]
    assert torch.equal(stored, sent.tensors["observation/observation"][0])
    assert torch.equal(received._ring.columns["action/action"][:, gap], sent.tensors["action/action"][0])
    worker.close()
