"""Every piece in a run: resumed to the bit, its hidden state exported, its update compiled, and acting in numpy or not.

docs/networks.md has a table of this.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import make_worker, train
from piece_cases import ALL, Case, name
from test_containers_determinism import assert_same
from test_runs_resume import EVERYTHING, assert_same_run, stop_at

import ludus
from ludus.containers import compiled
from ludus.containers.build import choose_engines
from ludus.containers.local import LocalWorker
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.networks import SUBMODULES
from ludus.networks.pieces import piece_class
from ludus.runs import checkpoint as checkpoints

ENVIRONMENTS = {
    1: "CartPole-v1",
    2: "ludus.environments.entity_toy:MatchEnv",
    3: "ludus.environments.image_toy:CatchEnv",
    4: "ludus.environments.entity_toy:MotionEnv",
}
HEAVY = ("resnet18", "resnet50(norm='none')")
NUMPY = ("mlp", "mlp(hidden=[])")  # pieces that act in numpy; the others step aside for torch
SLOW = [pytest.mark.slow]
MORE = [(1, Case("mlp(dropout=0.2)", lambda f: (4,))), (1, Case("mlp(norm='batch')", lambda f: (4,)))]
FIRST = {piece_class(case.piece, "piece"): case for _, case in reversed(ALL)}  # of each class
PARAMETERS = [
    pytest.param(
        *(rank, case),
        marks=[] if case in (*FIRST.values(), *[case for _, case in MORE]) and case.piece not in HEAVY else SLOW,
        id=name(case),
    )
    for rank, case in [*ALL, *MORE]
]
RECURRENT = [(rank, case) for rank, case in ALL if piece_class(case.piece, "piece").recurrent]
FEED_FORWARD = [parameters for parameters in PARAMETERS if tuple(parameters.values) not in RECURRENT]


def setup(rank: int, case: Case) -> tuple[str, str, dict[str, Any]]:
    """Return environment, agent and settings of a small run with the piece as a source."""
    settings: dict[str, Any] = {f"network__net{rank}d": case.piece, "network__hidden": (5, 4), "nb_step": 10_000}
    if rank == 2:
        settings["env__max_length"] = 8
    if rank == 3:
        settings["env__options"] = (f"size={max(12, case.smallest)}",)
    if "noisy" in case.piece:
        return ENVIRONMENTS[rank], "dqn", settings | {"agent__noisy": True, "agent__warmup": 16, "agent__batch_size": 8}
    settings |= {"network__shared": "yes", "agent__epochs": 1, "agent__minibatches": 2}
    return ENVIRONMENTS[rank], "ppo", settings


def make(rank: int, case: Case, **changes: Any) -> LocalWorker:
    environment, agent, settings = setup(rank, case)
    return make_worker(environment, agent, **settings | changes)


@pytest.mark.parametrize(("rank", "case"), PARAMETERS)
def test_resumed_run_is_the_run_that_was_never_stopped_and_only_mlps_act_in_numpy(
    rank: int, case: Case, tmp_path: Path
) -> None:
    def saved(worker: LocalWorker, folder: str) -> State:
        checkpoints.save(tmp_path / folder, worker.state_dict(), {})
        return checkpoints.load(tmp_path / folder)[0]

    straight, resumed = make(rank, case), make(rank, case)
    straight.run(64)
    stopped = saved(straight, "stopped")
    straight.run(128, straight.local_step_count)
    assert resumed.load_state_dict(stopped) == "exactly"
    resumed.run(128, resumed.local_step_count)
    assert_same(saved(straight, "straight"), saved(resumed, "resumed"))
    assert bool(straight.seat.hidden_state) == ((rank, case) in RECURRENT)
    assert straight.agent.use_numpy() == (case.piece in NUMPY)
    for worker in (straight, resumed):
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "case"), PARAMETERS)
def test_stopped_run_folder_is_resumed_exactly(rank: int, case: Case, tmp_path: Path) -> None:
    environment, agent, settings = setup(rank, case)
    settings |= EVERYTHING | {"nb_step": 200}
    if agent == "dqn":
        del settings["agent__normalize_reward"]
    straight = train(tmp_path / "straight", environment, agent, **settings)
    stopped = train(tmp_path / "stopped", environment, agent, stop_at(3), **settings)
    assert stopped.steps < straight.steps
    assert_same_run(straight.run, ludus.resume(stopped.run).run)


def observations(rank: int, count: int) -> list[Any]:
    random = np.random.default_rng(0)
    if rank == 1:
        return list(random.normal(size=(count, 4)).astype(np.float32))
    return list(random.integers(0, 256, (count, 12, 12, 3), np.uint8))


@pytest.mark.parametrize(("rank", "case"), RECURRENT, ids=name)
def test_loaded_policy_hands_out_and_takes_back_its_hidden_state(rank: int, case: Case, tmp_path: Path) -> None:
    environment, agent, settings = setup(rank, case)
    result = train(tmp_path, environment, agent, **settings | {"nb_step": 32})
    player, other, fresh = (result.load("latest") for _ in range(3))
    *before, last, now = observations(rank, 5)
    assert player.state == {}
    for x in (*before, last):
        player.act(x)
    state = player.state
    assert state.keys() == player.initial_state().keys()
    assert {len(x) for x in state.values()} == {1}
    np.savez(tmp_path / "state.npz", **state)
    with np.load(tmp_path / "state.npz") as saved:  # refuses pickles
        other.load_state(dict(saved))
    for x in (now, last):
        expected = player.distribution(x)["probabilities"]
        np.testing.assert_array_equal(other.distribution(x)["probabilities"], expected)
        assert other.value(x) == player.value(x)
        assert not np.array_equal(fresh.distribution(x)["probabilities"], expected)
        assert other.act(x) == player.act(x)
        fresh.act(x)
    for key, x in state.items():  # a copy: later steps and changes do not reach it
        x += 1
        assert not np.array_equal(x, player.state[key])
    other.load_state({})
    assert other.state == {}
    with pytest.raises(UserError, match=r"has nothing for .* start with policy.initial_state\(1\)"):
        other.load_state(dict(list(state.items())[1:]) or {"h": np.zeros((1, 3))})
    with pytest.raises(UserError, match='for "x", not nothing'):
        other.load_state(state | {"x": np.zeros(1)})


def test_policy_without_memory_has_an_empty_state(tmp_path: Path) -> None:
    player = train(tmp_path, "CartPole-v1").load("latest")
    player.act(observations(1, 1)[0])
    assert player.state == {}
    player.load_state({})
    with pytest.raises(UserError, match=r'has shape .* for "h", not nothing'):
        player.load_state({"h": np.zeros((1, 4))})


def run_twice(rank: int, case: Case, tolerance: float = 1e-5) -> None:
    """Learn eagerly and compiled, with steps that are proportional to gradients, and compare the parameters."""
    steps: dict[str, Any] = {} if "noisy" in case.piece else {"agent__optimizer": "sgd", "agent__learning_rate": 0.1}
    results = []
    for compiles in (False, True):
        worker = make(rank, case, **steps)
        before = {key: x.clone() for key, x in worker.agent.state_dict().items() if isinstance(x, torch.Tensor)}
        if compiles:
            worker.updater.compile(on_failure=pytest.fail)  # type: ignore[attr-defined]
        worker.run(40)
        after = {key: x for key, x in worker.agent.state_dict().items() if isinstance(x, torch.Tensor)}
        assert any(not torch.equal(x, before[key]) for key, x in after.items())
        results.append(after)
        worker.close()
    if "dropout" in case.piece:  # its numbers are drawn in another order
        return
    for key, x in results[0].items():
        torch.testing.assert_close(results[1][key], x, rtol=1e-4, atol=tolerance, msg=partial("{}: {}".format, key))


@pytest.mark.parametrize(("rank", "case"), FEED_FORWARD)
def test_traced_update_equals_an_eager_one(rank: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler, which takes seconds for each piece: what it gets is the same computation."""
    monkeypatch.setattr(compiled, "compile_graph", lambda traced, inputs: traced)
    run_twice(rank, case)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "case"), FEED_FORWARD)
def test_compiled_update_equals_an_eager_one(rank: int, case: Case) -> None:
    run_twice(rank, case, tolerance=1e-4)


@pytest.mark.parametrize(("rank", "case"), RECURRENT, ids=name)
def test_recurrent_pieces_are_not_compiled_and_named(rank: int, case: Case) -> None:
    worker = make(rank, case, nb_step=100_000_000)
    engines = choose_engines(worker.settings, worker.agent)
    assert engines.update == "eager"
    assert engines.obstacle == f"a recurrent network has shapes that change ({case.piece})"
    worker.close()
    worker = make(rank, case, compile="on")
    with pytest.raises(UserError, match=r"^compile is on, but a recurrent network") as caught:
        choose_engines(worker.settings, worker.agent)
    assert case.piece in str(caught.value)
    worker.close()


def test_table_of_the_page_lists_the_recurrent_pieces() -> None:
    page = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("|") and "policy.state" in line]
    recurrent = {piece for piece in SUBMODULES if piece_class(piece, "piece").recurrent}
    assert set(re.findall(r"`(\w+)`", row.split("|")[1])) == recurrent
