"""Agents, networks, pieces, wrappers and environments given as classes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import SMALL, train
from torch import Tensor, nn

import ludus
from ludus.agents.dqn import DQN
from ludus.agents.ppo import PPO, PPOConfig
from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.core.imports import name_for, resolve
from ludus.networks.net1d.mlp import MLP
from ludus.settings.config_file import read_config
from ludus.settings.settings import resolve_settings


@dataclass(frozen=True)
class CalmConfig(PPOConfig):
    calm_coef: float = 0.5


class Calm(PPO):
    Config: type[Any] = CalmConfig


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, observation: Tensor) -> Tensor:
        return torch.tanh(self.layer(observation))


class Halved(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return reward / 2


class Outer:
    class Inner(Calm):
        pass


RUN: dict[str, Any] = SMALL | {"quiet": True, "agent.rollout": 8}


def config_of(run: Path) -> dict[str, Any]:
    return read_config(run / "config.toml")


def test_classes_become_their_import_paths_and_are_found_again(tmp_path: Path) -> None:
    settings = RUN | {"runs": str(tmp_path), "env.wrappers": [Halved], "agent.calm_coef": 0.25}
    result = ludus.train("CartPole-v1", Calm, network=Wide, nb_step=64, settings=settings)
    assert (result.run / "config.toml").is_file()
    kept = config_of(result.run)
    assert kept["agent.name"] == f"{__name__}:Calm"
    assert kept["network.name"] == f"{__name__}:Wide"
    assert kept["env.wrappers"] == (f"{__name__}:Halved",)
    player = ludus.load(result.run)
    assert isinstance(player.agent, Calm)
    assert player.agent.config.calm_coef == 0.25
    evaluation = player.evaluate(4)
    assert evaluation.returns == [n / 2 for n in evaluation.lengths]
    assert ludus.resume(result.run, nb_step=128).steps >= 128


def test_our_own_classes_go_by_their_short_names() -> None:
    settings = resolve_settings("CartPole-v1", PPO).settings
    assert (settings.agent_name, settings.agent.gae_lambda) == ("ppo", 0.8)  # so the preset fits
    assert resolve_settings("CartPole-v1", DQN, "none").settings.agent_name == "dqn"
    chosen = resolve_settings("CartPole-v1", overrides={"network.body": MLP}).settings
    assert chosen.network.body == "mlp"


@pytest.mark.parametrize("key", ["agent", "agent.name"])
def test_short_and_long_keys_take_classes_too(key: str) -> None:
    overrides = {key: Calm, "network": Wide, "stop_at": 3.0}
    settings = resolve_settings("CartPole-v1", overrides=overrides).settings
    assert settings.agent_name == f"{__name__}:Calm"
    assert settings.network.name == f"{__name__}:Wide"
    assert settings.evaluation.stop_at == 3.0


def test_a_class_inside_a_class_is_found(tmp_path: Path) -> None:
    result = train(tmp_path, "CartPole-v1", Outer.Inner)
    assert config_of(result.run)["agent.name"] == f"{__name__}:Outer.Inner"
    assert type(ludus.load(result.run).agent) is Outer.Inner


def local_classes() -> tuple[type[Any], type[Any]]:
    class Local(Calm):
        pass

    class Net(Wide):
        pass

    return Local, Net


def test_local_classes_train_load_and_resume_in_this_process(tmp_path: Path) -> None:
    agent, network = local_classes()
    settings = RUN | {"runs": str(tmp_path), "env.wrappers": [lambda env: Halved(env)]}
    result = ludus.train("CartPole-v1", agent, network=network, nb_step=64, settings=settings)
    assert type(result.load().agent) is agent
    assert ludus.resume(result.run, nb_step=96).steps >= 96
    assert "local_classes.<locals>.Local" in config_of(result.run)["agent.name"]


def test_two_local_classes_of_one_name_are_not_confused() -> None:
    (first, _), (second, _) = local_classes(), local_classes()
    names = [name_for(first, {}), name_for(second, {}), name_for(first, {})]
    assert names[0] == names[2] != names[1]
    assert [resolve(name, {}, "agent") for name in names] == [first, second, first]


OTHER = """
import ludus, sys
from test_runs_classes import Calm, Wide, Halved
run = sys.argv[1]
try:
    ludus.load(run)
except ludus.UserError as error:
    print(error)
policy = ludus.load(run, agent=Calm, network=Wide, wrappers=[Halved])
print(type(policy.agent).__name__, policy.settings.agent_name)
print(ludus.resume(run, agent=Calm, network=Wide, wrappers=[Halved], nb_step=128).steps >= 128)
print(type(ludus.load(run).agent).__name__)
"""


def test_another_process_is_given_the_classes(tmp_path: Path) -> None:
    agent, network = local_classes()
    settings = RUN | {"runs": str(tmp_path), "env.wrappers": [partial(Halved)]}
    run = ludus.train("CartPole-v1", agent, network=network, nb_step=64, settings=settings).run
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "containers")]
    code = f"import sys; sys.path[:0] = {folders!r}\n" + OTHER
    said = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True).stdout
    refusal, *rest = said.splitlines()
    assert refusal.startswith('agent "test_runs_classes:local_classes.<locals>.Local')
    assert " was defined in a function, a notebook or at a prompt, so it cannot be imported by that name" in refusal
    assert "ludus.load(run, agent=…)" in refusal
    assert rest == ["Calm test_runs_classes:Calm", "True", "Calm"]


SCRIPT = """
import sys, ludus
from dataclasses import dataclass
from torch import nn
from ludus.agents.ppo import PPO, PPOConfig

class Mine(PPO):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, observation):
        return self.layer(observation).tanh()

if __name__ == "__main__":
    if len(sys.argv) == 1:
        settings = {"quiet": True, "env.num": 2, "agent.rollout": 8, "evaluation.episodes": 2, "network.shared": "yes"}
        print(ludus.train("CartPole-v1", Mine, network=Net, nb_step=32, settings=settings).run)
    else:
        print(ludus.resume(sys.argv[1], nb_step=64).steps >= 64)
        print(type(ludus.load(sys.argv[1]).agent).__name__)
"""


def test_classes_of_a_script_train_and_come_back_with_the_same_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_classes_script.py").write_text(SCRIPT)

    def script(*words: str) -> list[str]:
        command = [sys.executable, "my_classes_script.py", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()

    run = script()[-1]
    assert config_of(tmp_path / run)["agent.name"] == "my_classes_script:Mine"
    assert script(run) == ["True", "Mine"]
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", run, "--episodes", "1"]) == 0
    assert "my_classes_script:Mine" in capsys.readouterr().out


def test_a_script_that_trains_when_imported_is_told_so_and_does_not_train_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unguarded = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "my_unguarded_script.py").write_text(unguarded)
    command = [sys.executable, "my_unguarded_script.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", run, "--episodes", "1"]) == 2
    err = capsys.readouterr().err
    assert "The module my_unguarded_script calls ludus." in err
    assert err.count("\n") == 1
    assert len(list(tmp_path.glob("runs/*/*"))) == 1


PROMPT = """
import ludus
from ludus.agents.ppo import PPO
class Mine(PPO):
    pass
settings = {"quiet": True, "env.num": 2, "agent.rollout": 8, "evaluation.episodes": 2}
result = ludus.train("CartPole-v1", Mine, nb_step=32, settings=settings)
print(type(ludus.load(result.run).agent).__name__)
print(result.run)
"""


def test_a_class_of_a_prompt_or_notebook_comes_back_in_the_same_session_only(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROMPT]
    found, run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == "Mine"
    with pytest.raises(UserError, match=r'^agent "__main__:Mine" was defined in a function, a notebook or at a prompt'):
        ludus.load(tmp_path / run)
    assert type(ludus.load(tmp_path / run, agent=Calm).agent) is Calm


def test_worker_processes_cannot_have_local_classes_and_a_sentence_says_so(tmp_path: Path) -> None:
    settings = {"env__backend": "subproc", "env__workers": 1}
    said = r"^env\.backend is subproc, but [^\n]* cannot be imported by another process; [^\n]*$"
    with pytest.raises(UserError, match=said):
        train(tmp_path, "CartPole-v1", env__wrappers=[lambda env: Halved(env)], **settings)
    with pytest.raises(UserError, match=said):
        train(tmp_path, lambda: gymnasium.make("CartPole-v1"), **settings)
    assert list(tmp_path.iterdir()) == []
    agent, _ = local_classes()  # an agent lives in this process
    assert train(tmp_path, "CartPole-v1", agent, **settings).steps


def test_environments_are_classes_or_functions_and_not_objects(tmp_path: Path) -> None:
    assert train(tmp_path, gymnasium.envs.classic_control.CartPoleEnv, env__max_episode_steps=20).steps
    assert train(tmp_path, lambda: gymnasium.make("CartPole-v1")).steps
    said = r"is a [^\n]*; give its class, or a function that returns a new environment"
    with pytest.raises(UserError, match=said):
        train(tmp_path, gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"network": Wide()}, "network.name is an object of class Wide; give a class"),
        ({"agent": 3}, "agent.name is an object of class int; give a class"),
        ({"agent": Wide}, "is not a subclass of ludus.core.agent.Agent"),
        ({"network": np.ndarray}, "is not a class of torch modules"),
        ({"settings": {"env.wrappers": [Wide]}}, "is a class but not a wrapper"),
    ],
)
def test_what_is_no_such_class_is_one_sentence(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings = RUN | {"runs": str(tmp_path)} | given.pop("settings", {})
    with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*$"):
        ludus.train("CartPole-v1", nb_step=8, settings=settings, **given)
    assert list(tmp_path.iterdir()) == []
