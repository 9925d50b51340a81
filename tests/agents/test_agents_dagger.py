"""DAgger: whose actions are taken, which are the labels, what is kept, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import train
from demonstrations import TOY, Recall, aim, record_to

import ludus
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.step import EnvStep

TARGET = TOY + "TargetEnv"
SMALL: dict[str, Any] = {"agent__rollout": 8, "agent__updates": 4, "agent__batch_size": 64, "compile": "off"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A good policy of TargetEnv, with another network and distribution than its students."""
    folder = tmp_path_factory.mktemp("teacher")
    data = record_to(folder / "x.npz", TARGET, aim, 100)
    settings = {"agent__distribution": "tanh", "agent__learning_rate": 5e-3, "network__hidden": (48,), "compile": "off"}
    result = train(folder, TARGET, "bc", data=data, nb_step=400, **settings)
    assert result.evaluation is not None
    assert result.evaluation.mean > -0.1
    return str(result.run)


def test_a_student_learns_from_its_teacher(teacher: str, tmp_path: Path) -> None:
    changes = {"network__hidden": (32, 32), "agent__learning_rate": 5e-3, "agent__updates": 16}
    result = train(tmp_path, TARGET, "dagger", agent__teacher=teacher, nb_step=1_000, **(SMALL | changes))
    assert result.evaluation is not None
    assert result.evaluation.mean > -0.3  # of 0; untrained: −2.7


def watch(teacher: str, tmp_path: Path, **changes: Any) -> tuple[Any, list[Any]]:
    """Train for three rollouts; return the agent, and of each update the cache's rollout as it was."""
    seen: list[Any] = []

    def hook(values: Any, worker: Any) -> None:
        blocks = {name: x.clone() for name, x in worker.cache.blocks.items()}
        seen.append((blocks, worker.cache.size, worker.cache._steps, worker.agent))

    train(tmp_path, TARGET, "dagger", hook, agent__teacher=teacher, nb_step=64, **(SMALL | changes))
    return seen[-1][3], seen


def test_labels_are_the_teachers_actions_and_the_student_acts(teacher: str, tmp_path: Path) -> None:
    player: Any = ludus.load(teacher)
    agent, seen = watch(teacher, tmp_path, agent__beta=0.0)
    blocks = seen[0][0]
    real = blocks["real"]
    observation, label = blocks["observation/observation"][:-1][real], blocks["experience/label/action"][real]
    expected = torch.as_tensor(player.act(observation.numpy())) / 2  # the Box has bounds ±2
    torch.testing.assert_close(label, expected.float(), atol=1e-5, rtol=0)
    assert not torch.allclose(blocks["action/action"][real], label, atol=1e-2)
    assert agent.beta == 0


def test_with_beta_1_the_teacher_acts(teacher: str, tmp_path: Path) -> None:
    agent, seen = watch(teacher, tmp_path, agent__beta=1.0, agent__beta_end=1.0)
    blocks = seen[0][0]
    torch.testing.assert_close(blocks["action/action"], blocks["experience/label/action"])
    assert agent.beta == pytest.approx(1 - seen[1][1] / 64)  # before the third of three rollouts
    blocks = seen[1][0]
    same = (blocks["action/action"] == blocks["experience/label/action"]).all(-1).float().mean()
    assert 0.2 < float(same) < 0.8


def test_real_steps_are_kept_with_their_labels(teacher: str, tmp_path: Path) -> None:
    _, seen = watch(teacher, tmp_path)
    sizes = [size for _, size, _, _ in seen]
    assert sizes == torch.tensor([int(blocks["real"].sum()) for blocks, *_ in seen]).cumsum(0).tolist()
    steps, size = seen[-1][2], seen[-1][1]
    player: Any = ludus.load(teacher)
    expected = torch.as_tensor(player.act(steps["observation/observation"][:size].numpy())) / 2
    torch.testing.assert_close(steps["action/action"][:size], expected.float(), atol=1e-5, rtol=0)


def test_the_oldest_labels_are_dropped(teacher: str, tmp_path: Path) -> None:
    _, seen = watch(teacher, tmp_path, agent__labels=30)
    assert [size for _, size, _, _ in seen] == [seen[0][1], 30, 30]
    last = seen[-1][0]
    newest = last["observation/observation"][:-1][last["real"]]
    kept = seen[-1][2]["observation/observation"]
    assert len(kept) == 30
    assert all((kept == row).all(-1).any() for row in newest)


def test_recorded_episodes_are_the_first_labels(teacher: str, tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    _, seen = watch(teacher, tmp_path, data=data)
    steps = seen[0][2]
    torch.testing.assert_close(steps["action/action"][:20] * 2, steps["observation/observation"][:20].flip(-1))
    assert seen[0][1] == 20 + int(seen[0][0]["real"].sum())


def test_a_recurrent_teacher_has_a_hidden_state_of_its_own(tmp_path: Path) -> None:
    run = str(train(tmp_path / "lstm", TARGET, "ppo", network__body="lstm").run)
    player: Any = ludus.load(run)
    labels: list[torch.Tensor] = []

    def hook(values: Any, worker: Any) -> None:
        labels.append(worker.cache.blocks["experience/label/action"].clone())
        if len(labels) == 1:
            state, expected = player.agent.initial_state(4), []
            blocks = worker.cache.blocks
            for t in range(8):
                flags = [torch.zeros(4, dtype=torch.bool)] * 3
                step = EnvStep(
                    {"observation": blocks["observation/observation"][t]},
                    torch.zeros(4),
                    flags[0],
                    flags[1],
                    blocks["first"][t],
                    flags[2],
                )
                acted = player.agent.act(step, state)
                state = HiddenState(acted.state)
                expected.append(acted.action["action"].clamp(-1, 1))
            torch.testing.assert_close(labels[0], torch.stack(expected), atol=1e-5, rtol=0)

    train(tmp_path / "student", TARGET, "dagger", hook, agent__teacher=run, nb_step=64, **SMALL)
    assert labels


MEMORY = TOY + "MemoryEnv"
LSTM: dict[str, Any] = {
    "network__body": "lstm",
    "network__lstm_size": 16,
    "network__hidden": (16,),
    "agent__sequence": 12,
    "agent__burn_in": 6,
    "agent__learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def remembering_teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A good policy of MemoryEnv, which needs memory."""
    folder = tmp_path_factory.mktemp("remembering")
    data = record_to(folder / "x.npz", MEMORY, Recall(), 60)
    result = train(folder, MEMORY, "bc", data=data, nb_step=150, **LSTM)
    assert result.evaluation is not None
    assert result.evaluation.mean >= 0.95
    return str(result.run)


@pytest.mark.parametrize("body", ["lstm", "mlp"])
def test_a_student_with_memory_learns_what_its_teacher_remembers(
    body: str, remembering_teacher: str, tmp_path: Path
) -> None:
    memory = LSTM if body == "lstm" else {"agent__learning_rate": 1e-2}
    more = {"agent__rollout": 16, "agent__updates": 8, "agent__batch_size": 128, "evaluation__episodes": 100}
    settings = SMALL | memory | more
    result = train(tmp_path, MEMORY, "dagger", agent__teacher=remembering_teacher, nb_step=1_500, **settings)
    assert result.evaluation is not None
    assert result.evaluation.mean >= 0.95 if body == "lstm" else result.evaluation.mean < 0.5


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_students_hidden_state_follows_all_observations(
    beta: float, remembering_teacher: str, tmp_path: Path
) -> None:
    """Whoever acts: the values stored while acting are those of the rollout as one sequence."""
    compared = []

    def hook(values: Any, worker: Any) -> None:
        blocks = worker.cache.blocks
        if len(compared) < 1:  # of the first rollout the student's parameters are known: the initial ones
            compared.append((blocks["experience/value"].clone(), blocks["observation/observation"].clone()))
            compared[-1] = (*compared[-1], blocks["first"].clone())

    untrained = SMALL | LSTM | {"agent__learning_rate": 1e-30, "agent__normalize_observation": False}
    more = {"agent__beta": beta, "agent__beta_end": 1.0, "nb_step": 64}
    result = train(tmp_path, MEMORY, "dagger", hook, agent__teacher=remembering_teacher, **untrained, **more)
    agent: Any = result.load("latest").agent
    value, seen, first = compared[0]
    with torch.no_grad():
        outputs, _ = agent.outputs({"observation": seen[:-1]}, agent.initial_state(4), first[:-1])
    torch.testing.assert_close(value, outputs["value"].squeeze(-1), atol=1e-5, rtol=1e-4)


def test_recorded_episodes_are_the_first_labels_of_a_recurrent_student(teacher: str, tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    _, seen = watch(teacher, tmp_path, data=data, **LSTM)
    assert seen[0][1] == 20 + int(seen[0][0]["real"].sum())
    steps = seen[0][2]
    assert steps["observation/observation"].shape[1:] == (4, 2)  # a row is a step of all environments
    kept = {name: x[:7][steps["real"][:7]] for name, x in steps.items()}  # 25 steps and their padding, in 4 columns
    torch.testing.assert_close(kept["action/action"] * 2, kept["observation/observation"].flip(-1))


def refused(folder: Path, environment: str, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        train(folder / "runs", environment, "dagger", **(SMALL | changes))
    assert not (folder / "runs").exists()
    return str(error.value)


def test_refusals(teacher: str, tmp_path: Path) -> None:
    assert "agent.teacher is empty" in refused(tmp_path, TARGET)
    assert "does not exist" in refused(tmp_path, TARGET, agent__teacher=str(tmp_path / "nothing"))
    assert "a policy with the observations" in refused(tmp_path, "CartPole-v1", agent__teacher=teacher)
    assert "set it to local" in refused(tmp_path, TARGET, agent__teacher=teacher, container="distrib", ranks=2)
    team = "ludus.environments.agents_toy:CueTeam"
    several = train(tmp_path / "team", team, nb_step=64, agent__rollout=8)
    assert "a policy of several agents, which cannot teach" in refused(tmp_path, team, agent__teacher=str(several.run))
    few = {"network__body": "lstm", "agent__labels": 100}
    assert "agent.labels is 100, too few for a sequence of 48 steps" in refused(
        tmp_path, TARGET, agent__teacher=teacher, **few
    )


def test_a_loaded_student_needs_no_teacher(teacher: str, tmp_path: Path) -> None:
    run = train(tmp_path, TARGET, "dagger", agent__teacher=teacher, nb_step=64, **SMALL).run
    policy: Any = ludus.load(run)
    assert policy.agent.teacher is None
    assert policy.evaluate(4, greedy=False).returns
    assert Path(policy.settings.agent.teacher).is_absolute()


def test_a_teacher_that_names_code_must_be_trusted(teacher: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(teacher, foreign)
    config = foreign / "config.toml"
    text = config.read_text()
    assert '"bc"' in text
    config.write_text(text.replace('"bc"', '"evil:Agent"'))
    assert "is not trusted" in refused(tmp_path, TARGET, agent__teacher=str(foreign))
