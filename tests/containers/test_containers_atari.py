"""Atari games by Gymnasium's ids: the preset's frames, and what is said about raw ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ludus
from ludus.containers.build import build_manager
from ludus.settings.settings import resolve_settings

pytest.importorskip("ale_py")
pytest.importorskip("cv2")
QUICK: dict[str, Any] = {"env.num": 2, "evaluation.episodes": 1, "evaluation.every": 0, "quiet": True, "threads": 1}
QUICK |= {"agent.epochs": 1, "agent.minibatches": 1}
QUICK |= {"network.orthogonal": False}  # orthogonalizing large matrices takes seconds


@pytest.mark.parametrize("id", ["ALE/Pong-v5", "ALE/Breakout-v5"])
def test_the_preset_gives_stacked_small_frames(id: str) -> None:
    settings = resolve_settings(id).settings
    manager = build_manager(settings)
    assert manager.batch == 8
    (spec,) = manager.observation.values()
    assert (spec.shape, spec.dtype, spec.stack) == ((4, 84, 84), "uint8", 4)
    step = manager.reset(0)
    assert step.observation["observation"].numpy().max() > 0
    manager.close()


def test_a_run_by_the_preset_says_nothing_of_raw_frames_and_goes_on_exactly(tmp_path: Path) -> None:
    settings = QUICK | {"runs": str(tmp_path), "agent.rollout": 8, "env.max_episode_steps": 30}
    result = ludus.train("ALE/Pong-v5", nb_step=32, settings=settings)
    log = (result.run / "log.txt").read_text()
    assert "preset atari/ppo" in log
    assert "gives raw frames" not in log
    resumed = ludus.resume(result.run, nb_step=48)
    assert resumed.steps >= 48
    assert "Environments were restored exactly" in (result.run / "log.txt").read_text()
    assert ludus.load(result.run).act(np.zeros((4, 84, 84), np.uint8)) in range(6)


def test_raw_frames_are_told_with_the_flags_that_change_them(tmp_path: Path) -> None:
    settings = QUICK | {"runs": str(tmp_path), "agent.rollout": 4, "env.max_episode_steps": 10}
    result = ludus.train("ALE/Pong-v5", preset="none", nb_step=8, settings=settings)
    (line,) = [line for line in (result.run / "log.txt").read_text().splitlines() if "gives raw frames" in line]
    assert "Hint: ALE/Pong-v5 gives raw frames (210 x 160 x 3, not stacked)" in line
    advised = {
        "env.options": ("frameskip=1",),
        "env.wrappers": (
            "gymnasium.wrappers:AtariPreprocessing",
            "gymnasium.wrappers:FrameStackObservation(stack_size=4)",
        ),
    }
    assert all(value in line for values in advised.values() for value in values)
    result = ludus.train("ALE/Pong-v5", preset="none", nb_step=8, settings=settings | advised)
    assert "gives raw frames" not in (result.run / "log.txt").read_text()


def test_the_memory_of_the_console_is_no_picture(tmp_path: Path) -> None:
    settings = QUICK | {"runs": str(tmp_path), "agent.rollout": 4, "env.max_episode_steps": 10}
    settings |= {"env.options": ('obs_type="ram"',)}
    result = ludus.train("ALE/Pong-v5", preset="none", nb_step=8, settings=settings)
    assert "gives raw frames" not in (result.run / "log.txt").read_text()
