"""``on_update``: what it is given, and how it ends a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers_setup import COUNTING, saved, train

import ludus
from ludus.containers.local import LocalWorker
from ludus.logging.metrics import read_metrics


def test_a_hook_gets_the_numbers_and_the_worker(tmp_path: Path) -> None:
    seen = []

    def hook(numbers: Mapping[str, float], worker: LocalWorker) -> None:
        seen.append((numbers["step"], worker.local_step_count, worker.agent))

    train(tmp_path, COUNTING, on_update=hook)
    assert seen
    assert all(step == count for step, count, _ in seen)
    assert len({id(agent) for *_, agent in seen}) == 1
    assert isinstance(seen[0][2], ludus.Agent)


def test_an_unknown_number_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    def hook(numbers: Mapping[str, float]) -> bool:
        with pytest.raises(KeyError, match=r'no metric "nope" .* there are .*kl, learning_rate.*step'):
            numbers["nope"]
        assert "nope" not in numbers
        assert numbers.get("nope", 3.0) == 3.0
        return False

    train(tmp_path, COUNTING, on_update=hook)


class Method:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def one(self, numbers: Any) -> None:
        self.seen.append((numbers,))

    def two(self, numbers: Any, worker: Any) -> None:
        self.seen.append((numbers, worker))

    def __call__(self, *given: Any) -> None:
        self.seen.append(given)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda m: m.one, 1),
        (lambda m: m.two, 2),
        (lambda m: m, 2),
        (lambda m: lambda numbers: m(numbers), 1),
        (lambda m: lambda numbers, worker: m(numbers, worker), 2),
        (lambda m: lambda numbers, kept="mine": m(numbers, kept) if kept == "mine" else None, 2),  # not the worker
        (lambda m: partial(m.two, worker="mine"), 2),
        (lambda m: m.seen.append, 1),  # the numbers themselves
    ],
)
def test_hooks_of_one_and_of_two_arguments_work(make: Callable[[Method], Any], given: int, tmp_path: Path) -> None:
    method = Method()
    train(tmp_path, COUNTING, on_update=make(method))
    assert method.seen
    for arguments in method.seen:
        if isinstance(arguments, tuple):
            assert len(arguments) == given
            assert given == 1 or arguments[1] == "mine" or isinstance(arguments[1], LocalWorker)


def raise_stop(numbers: Mapping[str, float]) -> None:
    if numbers["updates"] >= 3:
        raise ludus.Stop("good enough")


def raise_bare_stop(numbers: Mapping[str, float]) -> None:
    if numbers["updates"] >= 3:
        raise ludus.Stop


STOPS: dict[str, tuple[Any, str]] = {
    "stop": (raise_stop, "on_update raised Stop: good enough"),
    "bare stop": (raise_bare_stop, "on_update raised Stop"),
    "false": (lambda numbers: numbers["updates"] < 3, "on_update returned False"),
    "numpy's false": (lambda numbers: np.bool_(numbers["updates"] < 3), "on_update returned False"),
}


@pytest.mark.parametrize("how", STOPS)
def test_a_hook_ends_the_run_and_all_is_saved(how: str, tmp_path: Path) -> None:
    hook, reason = STOPS[how]
    result = train(tmp_path, COUNTING, on_update=hook, nb_step=10_000)
    assert result.reason == reason
    assert 0 < result.steps < 10_000
    counters = saved(result.run)["counters"]
    assert (counters["step"], counters["updates"]) == (result.steps, 3)
    assert f"ended at step {result.steps}: {reason}" in (result.run / "log.txt").read_text()


@pytest.mark.parametrize("answer", [None, True, 0, 0.0, "", []])
def test_anything_but_false_goes_on(answer: Any, tmp_path: Path) -> None:
    result = train(tmp_path, COUNTING, on_update=lambda _: answer)
    assert result.reason == "all steps done"


def test_a_run_that_a_hook_ended_is_resumed_as_if_it_had_not(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nb_step": 400, "evaluation__every": 90, "log_every": 30}
    straight = train(tmp_path / "straight", "CartPole-v1", **settings)
    stopped = train(tmp_path / "stopped", "CartPole-v1", on_update=raise_stop, **settings)
    assert stopped.steps < 400
    resumed = ludus.resume(stopped.run)
    assert resumed.reason == "all steps done"

    def numbers(run: Path) -> list[dict[str, float]]:
        lines = read_metrics(run / "metrics.jsonl")
        return [{k: x for k, x in line.items() if not k.startswith("time")} for line in lines]

    assert numbers(straight.run) == numbers(resumed.run)
