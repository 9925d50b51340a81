"""Checks of networks: what they find, and that they change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import make_worker, saved, train
from torch import Tensor, nn

import ludus
from ludus.containers.network_check import NetworkCheck, NetworkReport
from ludus.core.errors import UserError
from ludus.core.updater import NonFiniteError
from ludus.logging.hints import hints

AGENTS: dict[str, dict[str, Any]] = {
    "ppo": {"environment": "CartPole-v1", "agent": "ppo"},
    "lstm": {"environment": "CartPole-v1", "agent": "ppo", "network__body": "lstm"},
    "random layers": {"environment": "CartPole-v1", "agent": "ppo", "network__name": f"{__name__}:Random"},
    "sac": {"environment": "Pendulum-v1", "agent": "sac", "agent__warmup": 40, "agent__batch_size": 16},
    "rainbow": {"environment": "CartPole-v1", "agent": "rainbow", "agent__warmup": 40, "agent__batch_size": 16},
}


class Random(nn.Module):
    """Features with batch statistics and dropout."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, observation: Tensor) -> Tensor:
        y: Tensor = self.layers(observation)
        return y


def flat(state: Any) -> dict[str, Tensor]:
    """All tensors of a state by path."""
    if isinstance(state, Tensor):
        return {"": state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {f"{key}/{path}": x for key, value in items for path, x in flat(value).items()}


def without_checks(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: x for key, x in line.items() if not key.startswith(("network/", "time"))} for line in lines]
    return [line for line in kept if len(line) > 1]


def checks(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in line.items() if k != "time"} for line in lines if any("network/" in k for k in line)]


@pytest.mark.parametrize("name", AGENTS)
def test_checks_change_nothing_and_a_resume_is_exact(name: str, tmp_path: Path) -> None:
    given = AGENTS[name] | {"nb_step": 120, "log_every": 20}
    plain = train(tmp_path / "plain", **given)
    checked = train(tmp_path / "checked", **given, network_check__every=30)
    expected, found = flat(saved(plain.run)), flat(saved(checked.run))
    assert expected.keys() == found.keys()
    different = [key for key, x in expected.items() if not torch.equal(x, found[key])]
    assert different == []
    assert without_checks(plain.run) == without_checks(checked.run)
    assert len(checks(checked.run)) >= 2
    part = train(tmp_path / "part", **given, network_check__every=30, on_update=lambda x: x["step"] < 70)
    ludus.resume(part.run)
    resumed = flat(saved(part.run))
    assert [key for key, x in expected.items() if not torch.equal(x, resumed[key])] == []
    assert checks(part.run) == checks(checked.run)


@pytest.mark.slow
def test_checks_change_nothing_in_compiled_updates(tmp_path: Path) -> None:
    given = {"environment": "CartPole-v1", "compile": "on", "nb_step": 120}
    plain, checked = (train(tmp_path / str(every), **given, network_check__every=every).run for every in (0, 30))
    expected, found = flat(saved(plain)), flat(saved(checked))
    assert [key for key, x in expected.items() if not torch.equal(x, found[key])] == []
    assert "compiled update" in (checked / "log.txt").read_text()
    assert checks(checked)


def test_the_numpy_engine_stays_on_and_no_hook_remains() -> None:
    worker = make_worker("CartPole-v1", network_check__every=1)
    assert worker.agent.use_numpy()
    worker.network_check = NetworkCheck(worker.agent, worker.updater, worker.settings.network_check)  # type: ignore[arg-type]
    worker.run(100)
    assert worker.network_check.last is not None
    assert worker.agent._numpy.usable()  # type: ignore[union-attr, operator]
    assert not any(m._forward_hooks for m in worker.agent.modules())
    worker.close()


def reports(worker: Any, steps: int = 100) -> list[NetworkReport]:
    """Train with a check at every update, and return the reports."""
    found: list[NetworkReport] = []
    worker.network_check = NetworkCheck(worker.agent, worker.updater, worker.settings.network_check)
    worker._checked = found.append
    worker.run(steps)
    worker.close()
    return found


def test_gradients_and_updates_are_those_of_the_step() -> None:
    plain = {"agent__max_grad_norm": 0, "agent__optimizer": "sgd", "agent__learning_rate": 0.1}
    worker = make_worker("CartPole-v1", "a2c", network_check__every=1, **plain)
    steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    updater: Any = worker.updater
    step = updater._step

    def spy(loss: Any, batch: Any, part: Any) -> Any:
        before = {place[0]: p.detach().clone() for place, p in zip(part.places, part.group.parameters, strict=True)}
        metrics = step(loss, batch, part)
        gradients = {place[0]: x.clone() for place, x in zip(part.places, part.gradients, strict=True)}
        steps.append((before, gradients))
        return metrics

    updater._step = spy
    found = reports(worker)
    assert len(found) == len(steps)
    for report, (before, gradients) in zip(found, steps, strict=True):
        assert list(report.layers) == list(
            dict.fromkeys(n.rpartition(".")[0].removeprefix("networks.") for n in before)
        )
        for layer, numbers in report.layers.items():
            names = [f"networks.{layer}.{key}" for key in ("weight", "bias")]
            g = torch.cat([gradients[name].flatten() for name in names]).double()
            w = torch.cat([before[name].flatten() for name in names]).double()
            expected = {"gradient_norm": g.norm(), "gradient_mean": g.abs().mean(), "gradient_max": g.abs().max()}
            expected["update_ratio"] = updater.learning_rate * g.norm() / w.norm()
            for key, x in expected.items():
                assert numbers[key] == pytest.approx(float(x), rel=1e-3), (layer, key)


def test_dead_units_are_reported_and_hinted_at() -> None:
    worker = make_worker("CartPole-v1", network_check__every=1, network__activation="relu", network__hidden=(8, 8))
    with torch.no_grad():
        bias: Any = worker.agent.networks["actor"].pieces["source/observation"].layers[0].bias  # type: ignore
        bias.copy_(torch.tensor([-1e3] * 5 + [10.0] * 3))
    (first, *_, last) = reports(worker, 500)
    assert first.layers["actor.pieces.source/observation.layers.0"]["dead"] == 5 / 8
    text = "62% of the units of actor.pieces.source/observation.layers.0 are dead (relu) on the whole batch"
    assert any(problem.text.startswith(text) for problem in first.problems)
    assert text in first.text()
    assert "Linear: (" in first.text()  # shapes, once
    assert not last.shapes
    assert any(text in hint and "lower agent.learning_rate" in hint for hint in hints(worker, 1.0))


def test_a_nan_is_named_before_it_ends_the_run() -> None:
    worker = make_worker("CartPole-v1", network_check__every=1)
    with torch.no_grad():
        worker.agent.networks["critic"].pieces["source/observation"].layers[0].weight[0, 0] = float("nan")  # type: ignore
    found: list[NetworkReport] = []
    worker.network_check = NetworkCheck(worker.agent, worker.updater, worker.settings.network_check)  # type: ignore[arg-type]
    worker._checked = found.append  # type: ignore[method-assign]
    with pytest.raises((UserError, NonFiniteError)):
        worker.run(100)
    worker.close()
    assert "networks.critic.pieces.source/observation.layers.0 (Linear) is the first with NaN" in found[0].text()


def exploding(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> str | None:
    """A check as a user would write it."""
    return f"{tuple(inputs[0].shape)[1:]}" if name.endswith("layers.0") else None


def test_functions_of_the_user_are_called_for_every_module(tmp_path: Path) -> None:
    names: list[str] = []
    functions = [exploding, lambda name, module, inputs, output: names.append(name)]
    run = train(tmp_path, "CartPole-v1", network_check__every=50, network_check__functions=functions).run
    assert "networks.actor.pieces.source/observation.layers.0: (4,)" in (run / "log.txt").read_text()
    assert {"networks.actor", "networks.actor.pieces.source/observation", "networks.critic"} <= set(names)


REFUSED: dict[str, tuple[Any, str]] = {
    "raises": (lambda name, module, inputs, output: 1 / 0, "raised ZeroDivisionError for the module preprocess"),
    "a number": (lambda name, module, inputs, output: 1.0, "returned a float for the module preprocess"),
    "a class": ("torch.nn:Linear", 'has "torch.nn:Linear", which is not a function'),
    "missing": ("torch.nn:Lineer", "module torch.nn has no Lineer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_functions_are_refused_with_their_name(name: str, tmp_path: Path) -> None:
    function, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        train(tmp_path, "CartPole-v1", network_check__every=50, network_check__functions=[function])


def test_functions_without_checks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"network_check.every is 0, so there are no checks"):
        train(tmp_path, "CartPole-v1", network_check__functions=[exploding])


def test_the_console_shows_each_problem_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "CartPole-v1", network_check__every=20, network_check__functions=[exploding], quiet=False)
    shown = capsys.readouterr().out
    layer = "networks.actor.pieces.source/observation.layers.0: (4,)"
    assert sum("network check at step" in line and layer in line for line in shown.splitlines()) == 1
