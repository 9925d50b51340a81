"""The same seed gives the same run to the bit, evaluation disturbs nothing, the user's process is left as it was."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import COUNTING, TOY, saved, train

from ludus.core.types import State

TRAINED = ("agent", "updater", "noise", "generators", "manager", "cache", "hidden_state")  # not counters and metrics
NETWORKS: dict[str, dict[str, Any]] = {
    "numpy": {},
    "torch": {"engine": "torch"},
    "lstm": {"network__body": "lstm"},
    "shared lstm source": {"network__net1d": "lstm", "network__shared": "yes"},
}


def assert_same(a: Any, b: Any, place: str = "") -> None:
    """Equal to the bit, through nested dicts and lists."""
    if isinstance(a, list):
        assert len(a) == len(b), place
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for key in a:
            assert_same(a[key], b[key], f"{place}/{key}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, place
        assert torch.equal(a, b), place
    else:
        assert a == b, place


def trained(state: State) -> State:
    return {key: state[key] for key in TRAINED}


def same_agent(a: State, b: State) -> bool:
    return all(torch.equal(a["agent"][name], b["agent"][name]) for name in a["agent"])


@pytest.mark.parametrize("agent", ["ppo", "a2c"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(agent: str, network: str, tmp_path: Path) -> None:
    def run(seed: int) -> State:
        torch.manual_seed(int.from_bytes(random.randbytes(4)))  # the process's own numbers must not matter
        normalizers: dict[str, Any] = {"agent__normalize_observation": True, "agent__normalize_reward": True}
        return saved(train(tmp_path, "CartPole-v1", agent, seed=seed, **NETWORKS[network], **normalizers).run)

    first, again, other = run(3), run(3), run(4)
    assert_same({k: x for k, x in first.items() if k != "metrics"}, {k: x for k, x in again.items() if k != "metrics"})
    assert not same_agent(first, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"env__backend": "vector"},
        {"env__backend": "simple"},
        {"env__backend": "envpool"},
        {"agent__distribution": "beta", "environment": "Pendulum-v1", "env__max_episode_steps": 9},
        {"environment": TOY + "MixedActionEnv", "env__options": ("more=true",)},
        {"environment": TOY + "MaskedEnv"},
        {"agent__learning_rate_schedule": "kl", "agent__target_kl": 0.01, "engine": "torch"},
    ],
    ids=str,
)
def test_every_source_of_chance_is_seeded(changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("env__backend") == "envpool":
        pytest.importorskip("envpool")
    rest = {key: x for key, x in changes.items() if key != "environment"}
    environment = changes.get("environment", "CartPole-v1")
    first, again = (saved(train(tmp_path, environment, **rest).run) for _ in range(2))
    assert_same(trained(first), trained(again))


def test_the_kl_schedule_and_the_default_engine_go_together(tmp_path: Path) -> None:
    train(tmp_path, "CartPole-v1", agent__learning_rate_schedule="kl", agent__target_kl=0.01)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("network", ["numpy", "lstm"])
def test_evaluation_does_not_touch_training(network: str, greedy: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = NETWORKS[network] | {"agent__normalize_observation": True, "nb_step": 130}
    without = train(tmp_path, "CartPole-v1", **changes)
    often = train(tmp_path, "CartPole-v1", evaluation__every=1, evaluation__greedy=greedy, **changes)
    assert saved(often.run)["evaluator"]["round"] > saved(without.run)["evaluator"]["round"] + 2
    assert_same(trained(saved(without.run)), trained(saved(often.run)))


def test_watching_does_not_touch_training(tmp_path: Path) -> None:
    quiet = train(tmp_path, "CartPole-v1", log_every=0)
    watched = train(tmp_path, "CartPole-v1", on_update=lambda _: None, log_every=1, checkpoint_every=1)
    assert_same(trained(saved(quiet.run)), trained(saved(watched.run)))


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    """Random numbers, signals and torch's switches; the number of torch's threads alone is set for good."""

    def facts() -> tuple[Any, ...]:
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        switches = torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        return random.getstate(), np.random.get_state()[1].tolist(), np.geterr(), handlers, switches  # type: ignore[index]

    numbers, before = torch.get_rng_state(), facts()
    lstm: dict[str, Any] = {"network__body": "lstm"}
    for environment, size in (("CartPole-v1", 4), (COUNTING, 2)):
        for agent, network in (("ppo", {}), ("a2c", lstm)):
            result = train(tmp_path, environment, agent, evaluation__every=30, evaluation__greedy=False, **network)
            player = result.load()
            player.evaluate(2)
            player.act(np.zeros(size, np.float32), greedy=False)
    assert torch.equal(numbers, torch.get_rng_state())
    assert before == facts()


def test_training_works_outside_the_main_thread(tmp_path: Path) -> None:
    """Signals can be caught in the main thread alone; a notebook's or server's worker thread does without."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path, COUNTING)))
    thread.start()
    thread.join()
    assert results[0].steps >= 100


def test_a_signal_ends_the_run_at_an_update_with_everything_saved(tmp_path: Path) -> None:
    def hook(values: dict[str, float]) -> None:
        if values["updates"] == 2:
            signal.raise_signal(signal.SIGTERM)

    result = train(tmp_path, COUNTING, on_update=hook, nb_step=10_000)
    assert result.reason == "SIGTERM was received"
    assert saved(result.run)["counters"] == saved(result.run)["counters"] | {"step": result.steps, "updates": 2}
    assert result.evaluation is None


@pytest.mark.slow
def test_a_compiled_run_repeats_itself_and_says_that_it_is_compiled(tmp_path: Path) -> None:
    first, again = (train(tmp_path, "CartPole-v1", compile="on") for _ in range(2))
    assert_same(trained(saved(first.run)), trained(saved(again.run)))
    assert "compiled update" in (first.run / "log.txt").read_text()
