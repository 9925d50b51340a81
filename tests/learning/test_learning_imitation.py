"""Policies from demonstrations: cloned, taught by a teacher, told from an expert by a discriminator, and fine-tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demonstrations import TOY, balance, obey, record_to
from learning_tasks import evaluations

import ludus
from ludus.agents.gail import AdversarialImitation
from ludus.cli.main import main
from ludus.core.batch import Batch

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
RUN: dict[str, Any] = {
    "quiet": True,
    "threads": 1,
    "compile": "off",
    "checkpoint_every": 0,
    "evaluation.episodes": 100,
    "evaluation.environments": 100,
}


def train(folder: Path, environment: str, agent: str, nb_step: int, seed: int = 0, **changes: Any) -> Any:
    settings = RUN | {"runs": str(folder)} | {key.replace("__", "."): x for key, x in changes.items()}
    return ludus.train(environment, agent, nb_step=nb_step, seed=seed, settings=settings)


def shuffle_labels(patch: pytest.MonkeyPatch) -> None:
    """A discriminator that learns from labels without meaning."""
    draw = AdversarialImitation.draw_pairs

    def draw_pairs(self: Any, batch: Batch, updater: Any) -> Batch:
        pairs = draw(self, batch, updater)
        label = pairs.experience["expert"]
        order = self._draw(label.numel(), label.numel())  # with replacement, which is as good
        pairs.experience["expert"] = label[:, order]
        return pairs

    patch.setattr(AdversarialImitation, "draw_pairs", draw_pairs)


def skip_updates(patch: pytest.MonkeyPatch) -> None:
    """A discriminator that never learns, as in Machin, where its optimizer holds the actor's parameters."""
    patch.setattr(AdversarialImitation, "learn_discriminator", lambda self, batch, updater: {})


BROKEN = {"labels shuffled": shuffle_labels, "never updated": skip_updates}
TOY_GAIL: dict[str, Any] = {
    "network__hidden": (32, 32),
    "agent__gamma": 0.0,
    "agent__rollout": 16,
    "agent__epochs": 4,
    "agent__learning_rate": 5e-3,
    "agent__discriminator_learning_rate": 5e-3,
    "agent__discriminator_updates": 4,
    "agent__discriminator_batch": 128,
    "agent__gradient_penalty_coef": 1.0,
    "agent__normalize_reward": False,
    "evaluation__every": 0,
}


def imitate_toy(folder: Path, agent: str = "gail", **changes: Any) -> float:
    data = record_to(folder / "x.npz", TOY + "MaskedEnv", obey, 40)
    result = train(folder, TOY + "MaskedEnv", agent, 5_000, data=data, **(TOY_GAIL | changes))
    return float(result.evaluation.mean)


def test_gail_learns_a_toy(tmp_path: Path) -> None:
    assert imitate_toy(tmp_path) > 6.5  # of 8; any legal action: 2.7


@pytest.mark.parametrize("kind", ["never updated", pytest.param("labels shuffled", marks=pytest.mark.slow)])
def test_gail_with_a_broken_discriminator_does_not(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[kind](monkeypatch)
    assert imitate_toy(tmp_path) < 5


@pytest.mark.slow
def test_gail_with_trpo_learns_a_toy(tmp_path: Path) -> None:
    settings = {key: x for key, x in TOY_GAIL.items() if key not in ("agent__epochs", "agent__learning_rate")}
    data = record_to(tmp_path / "x.npz", TOY + "MaskedEnv", obey, 40)
    result = train(tmp_path, TOY + "MaskedEnv", "gail_trpo", 16_000, data=data, **settings)
    assert result.evaluation.mean > 6.5


GAIL_STEPS = 100_000


def imitate_cartpole(folder: Path, seed: int, agent: str = "gail", **changes: Any) -> float:
    """GAIL from 10 expert episodes; the best of ten evaluations, of 100 fresh episodes each."""
    data = record_to(folder / "x.npz", CARTPOLE, balance, 10)
    result = train(folder, CARTPOLE, agent, GAIL_STEPS, seed, data=data, evaluation__every=10_000, **changes)
    return max(mean for _, mean in evaluations(result.run))


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["gail", "gail_trpo"])
@pytest.mark.parametrize("seed", range(5))
def test_gail_on_cartpole_from_10_episodes(seed: int, agent: str, tmp_path: Path) -> None:
    assert imitate_cartpole(tmp_path, seed, agent) >= 450


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["gail", "gail_trpo"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_discriminator_does_not_learn_cartpole(
    kind: str, seed: int, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN[kind](monkeypatch)
    assert imitate_cartpole(tmp_path, seed, agent) < 450


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_bc_on_cartpole(seed: int, tmp_path: Path) -> None:
    """10 episodes of a teacher that has 500."""
    data = record_to(tmp_path / "x.npz", CARTPOLE, balance, 10)
    assert train(tmp_path, CARTPOLE, "bc", 5_000, seed, data=data).evaluation.mean >= 475


@pytest.mark.slow
def test_bc_and_dagger_on_pendulum(tmp_path: Path) -> None:
    """At least 95% of the way from a random policy (−1,200) to the teacher."""
    teacher = train(tmp_path / "teacher", PENDULUM, "ppo", 100_000, evaluation__every=10_000)
    goal = ludus.load(teacher.run).evaluate(100).mean
    assert goal > -250
    reached = goal - 0.05 * (goal + 1_200)
    out = tmp_path / "x.npz"
    assert main(["record", str(teacher.run), "--episodes", "50", "--out", str(out)]) == 0
    for seed in range(5):
        cloned = train(tmp_path / f"bc {seed}", PENDULUM, "bc", 5_000, seed, data=str(out))
        assert ludus.load(cloned.run).evaluate(100).mean >= reached
        taught = train(tmp_path / f"dagger {seed}", PENDULUM, "dagger", 20_000, seed, agent__teacher=str(teacher.run))
        assert ludus.load(taught.run).evaluate(100).mean >= reached


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_dagger_on_cartpole(seed: int, tmp_path: Path) -> None:
    teacher = train(tmp_path / "teacher", CARTPOLE, "ppo", 100_000, evaluation__every=5_000, evaluation__stop_at=490)
    goal = ludus.load(teacher.run).evaluate(100).mean
    taught = train(tmp_path / "dagger", CARTPOLE, "dagger", 10_000, seed, agent__teacher=str(teacher.run))
    assert ludus.load(taught.run).evaluate(100).mean >= 0.95 * goal


@pytest.mark.slow
def test_demonstrations_clone_fine_tune(tmp_path: Path) -> None:
    """The three commands of docs/imitation.md: PPO goes on from where the clone is, and does not fall back."""
    data = record_to(tmp_path / "x.npz", CARTPOLE, balance, 10)
    cloned = train(tmp_path / "bc", CARTPOLE, "bc", 5_000, data=data)
    assert cloned.best >= 475
    tuned = train(tmp_path / "ppo", CARTPOLE, "ppo", 10_000, init_from=str(cloned.run), evaluation__every=2_500)
    assert tuned.best >= 475
    assert tuned.evaluation.mean >= 475
