"""Plans and unused settings of agents' configs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import ludus
from ludus.agents import AGENTS
from ludus.core.config import AgentConfig, Plan
from ludus.core.spec import Spec
from ludus.settings.settings import agent_config

OBSERVATION = {"observation": Spec((4,), "float32", "continuous", low=-1.0, high=1.0)}
CHOICE = {"action": Spec((), "int64", "categorical", sizes=(3,))}
GUESS = re.compile(r"(getattr|hasattr)\((settings\.agent|(\w+\.)*agent\.config|self\.settings\.agent)\b")


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_has_a_plan_and_declares_existing_settings(name: str) -> None:
    config = agent_config(name)()
    assert isinstance(config, AgentConfig)
    plan = config.plan(8)
    if plan.fixed_shapes:  # else whole episodes, whose number of steps is unknown
        assert plan.optimizer_steps > 0
        assert plan.batch > 0
        assert plan.rollout or plan.replay or config.ONLY_OFFLINE
    names = {field.name for field in fields(config)}
    assert {part for unused in config.UNUSED for part in (*unused.names.split(), unused.depends_on)} <= names
    assert {found for found, _ in config.unused(OBSERVATION, CHOICE, 1)} <= names


def test_plans_of_known_settings() -> None:
    ppo, acer, dqn = (agent_config(name) for name in ("ppo", "acer", "dqn"))
    assert ppo(rollout=128, epochs=4, minibatches=4, normalize_observation=False).plan(8) == Plan(
        128, 3, 0, 0, 16 / (8 * 128), 256
    )
    assert ppo(rollout=16, epochs=1, minibatches=1, normalize_observation=True).plan(2) == Plan(16, 1, 5, 0, 1 / 32, 32)
    assert acer(rollout=20, replay=500, replay_ratio=4.0, normalize_observation=False).plan(4) == Plan(
        20, 1, 0, 500, 5 / 80, 80
    )
    assert dqn(replay=1000, batch_size=64, updates_per_step=0.5).plan(4) == Plan(0, 1, 0, 1000, 0.5, 64)
    assert dqn(replay=1000, replay_folder="somewhere").plan(4).replay == 0


def test_base_config_defaults() -> None:
    config = AgentConfig()
    config.validate()
    config.check_run_length(1, 1)
    assert config.plan(8) == Plan()
    assert list(config.unused(OBSERVATION, CHOICE, 8)) == []


def test_agent_config_is_not_probed_outside_agents() -> None:
    package = Path(ludus.__file__).parent
    files = [path for path in package.rglob("*.py") if "agents" not in path.relative_to(package).parts]
    guesses = [
        f"{path.name}: {line.strip()}" for path in files for line in path.read_text().splitlines() if GUESS.search(line)
    ]
    assert not guesses
