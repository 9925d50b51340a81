"""``ludus check`` and ``ludus train`` refuse the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.cli.main import main

SHORT = ["--preset", "none", "--env.num", "4", "--evaluation.episodes", "1", "--quiet"]
REFUSED = {
    "--agent.rollout 1000000000": ["agent.rollout is 1000000000", "GB of memory", "lower agent.rollout or env.num"],
    "--agent a2c --agent.rollout 100000000000": ["agent.rollout is 100000000000", "GB of memory"],
    "--agent dqn --agent.replay 1000000000000": ["agent.replay needs", "GB in memory"],
    "--agent acer --agent.replay 1000000000000": ["agent.replay needs", "GB of memory"],
    "--agent dqn --agent.replay 2000 --agent.n-step 600": ["agent.replay is 2000", "too few"],
    "--network.hidden 1000000 1000000": ["million parameters needs", "GB of memory", "lower network.hidden"],
    "--network.body lstm --compile on": ["compile is on, but a recurrent network"],
    "--agent sac": ["sac"],
    "--agent dqn --agent.sequence 8": ["agent.sequence is 8", "not recurrent"],
    "--init-from nowhere": ['The run "nowhere" does not exist'],
    "--network no_such:Net": ["there is no module no_such"],
    "--self-play.every 1000": ["self_play.every is 1000", "has no players that share a policy"],
    "--container impala --agent ppo": ["agent ppo cannot learn from unrolls of older policies"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_training_refuses_check_says(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    argv = ["CartPole-v1", *SHORT, *words.split()]
    assert main(["train", *argv]) == 2
    by_train = capsys.readouterr().err
    assert main(["check", *argv]) == 2
    out, err = capsys.readouterr()
    for said in REFUSED[words]:
        assert said in by_train
        assert said.lower() in (out + err).lower()
    assert not list(tmp_path.iterdir())


def test_check_takes_the_flags_of_train_and_names_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "Pendulum-v1", "--agent", "sac", "--agent.replay", "5000"]) == 0
    out = capsys.readouterr().out
    assert "Pendulum-v1 is ready for training (tested with 298 random steps in 2 episodes): " in out
    assert "`ludus train Pendulum-v1 --agent sac --agent.replay 5000`" in out
    assert not list(tmp_path.iterdir())


def test_a_name_that_a_module_lacks_is_answered_with_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    assert main(["check", "ludus.environments.image_toy:Nope"]) == 2
    assert "fix: Choose one of CatchEnv" in capsys.readouterr().out
    assert main(["check", "ludus.environments.image_toy:CatchEn"]) == 2
    assert 'fix: Did you mean "CatchEnv"?' in capsys.readouterr().out
