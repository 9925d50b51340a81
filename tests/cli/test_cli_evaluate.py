"""``ludus evaluate``: several runs, a chosen checkpoint, and output for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import ludus
from ludus.cli.main import main
from ludus.runs.folder import step_folders

SETTINGS = {"env.num": 2, "agent.rollout": 16, "evaluation.episodes": 2, "checkpoint_every": 32, "quiet": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("evaluated")
    made = []
    for seed in (0, 1):
        settings = SETTINGS | {"runs": str(folder), "threads": 1}
        made.append(ludus.train("CartPole-v1", nb_step=100, seed=seed, preset="none", settings=settings).run)
    return made


def test_json_is_one_object_per_run(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *map(str, runs), "--json", "--episodes", "3", "--seed", "5"]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [x["run"] for x in found] == [str(run) for run in runs]
    assert err == ""
    for x, run in zip(found, runs, strict=True):
        expected = ludus.load(run).evaluate(3, seed=5)
        assert (x["returns"], x["lengths"], x["mean"]) == (expected.returns, expected.lengths, expected.mean)
        assert (x["environment"], x["agent"], x["checkpoint"]) == ("CartPole-v1", "ppo", "best")
        assert (x["episodes"], x["seed"], x["greedy"]) == (3, 5, True)
        assert x["interval"][0] <= x["mean"] <= x["interval"][1]
        assert x["step"] == ludus.load(run).meta["step"]


def test_several_runs_are_told_one_after_another(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *map(str, runs), "--episodes", "2"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    for text, run in zip((first, second), runs, strict=True):
        assert str(run) in text
        assert "95% confidence interval" in text


def test_a_checkpoint_is_chosen_by_its_step(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    kept = [path.name for path in step_folders(runs[0] / "checkpoints")]
    assert len(kept) > 1
    for name in kept:
        assert main(["evaluate", str(runs[0]), "--checkpoint", name, "--episodes", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == int(name.removeprefix("step_"))
        assert ludus.load(runs[0], name).meta["step"] == int(name.removeprefix("step_"))
    assert main(["evaluate", str(runs[0]), "--checkpoint", "step_7"]) == 2
    assert f'no checkpoint "step_7": choose one of best, latest, {", ".join(kept)}.' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step_", "step_x", ".old-step_32", "../best", "step_32/../../best", "newest"])
def test_what_is_no_name_of_a_checkpoint_is_refused(
    name: str, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(runs[0]), "--checkpoint", name]) == 2
    assert f'"{name}" is not a checkpoint: choose best, latest or a step such as step_50000' in capsys.readouterr().err


def test_a_missing_run_among_several_is_told_before_any_is_played(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(runs[0]), "nowhere"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nowhere" in err


def test_without_an_evaluation_the_latest_policy_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(numbers: Mapping[str, float]) -> bool:
        return False  # ends the run before its first evaluation

    settings = SETTINGS | {"runs": str(tmp_path), "threads": 1}
    run = ludus.train("CartPole-v1", nb_step=100, preset="none", settings=settings, on_update=stop).run
    assert not (run / "best").exists()
    assert main(["evaluate", str(run), "--episodes", "1", "--checkpoint", "best"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the latest policy of" in said
    assert "(there is no best policy before the first evaluation)" in said
    assert main(["evaluate", str(run), "--episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == "latest"


def test_workers_give_the_same_returns(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", *map(str, runs), "--json", "--episodes", "4", "--stochastic"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, "--workers", "4"]) == 0
    assert capsys.readouterr() == (expected, "")
    assert main([*command, "--workers", "0"]) == 2
    assert "--workers" in capsys.readouterr().err


def test_several_agents_are_named_and_not_suggested_for_cloning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS | {"runs": str(tmp_path), "threads": 1, "roles.agents": "agent=ppo, guide=a2c"}
    settings |= {"env.options": ("agents=1", "guides=1"), "evaluation.every": 0, "roles.guide.agent.rollout": 16}
    run = ludus.train("ludus.environments.agents_toy:CueTeam", nb_step=32, preset="none", settings=settings).run
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "CueTeam, ppo-a2c: the " in printed
    mean, *own = (float(x) for x in re.search(r"return +(\S+) \(agent_0 (\S+), guide_0 (\S+)\)", printed).groups())
    assert mean == pytest.approx(sum(own) / 2, abs=0.01)
    assert main(["record", str(run), "--episodes", "1", "--out", str(tmp_path / "team.npz")]) == 0
    assert "Each step has all agents" in (out := capsys.readouterr().out)
    assert "Clone it" not in out
