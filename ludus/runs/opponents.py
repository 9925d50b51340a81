"""The frozen older selves of a run with self-play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludus.containers.build import divide_environments
from ludus.containers.self_play import Pool, make_pool
from ludus.core.agent import Agent
from ludus.core.types import State
from ludus.managers.base import BatchManager
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory, step_folders
from ludus.settings.settings import Settings


class PoolFolder:
    """Keeps each of them in ``pool/step_<n>/``; a resume may need any of those made until its checkpoint."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.pool

    def save(self, step: int, state: State) -> None:
        """Write the tensors of the agent."""
        self._folder.mkdir(exist_ok=True)
        checkpoints.save(self._folder / f"step_{step}", {"agent": state}, {"step": step})

    def forget_after(self, step: int) -> None:
        """Delete copies made after the checkpoint of a resume: if it is not exact, others are made at other steps."""
        for folder in step_folders(self._folder):
            if _step_of(folder) > step:
                checkpoints.remove(folder)

    def load(self, step: int) -> State:
        """Read them."""
        state, _ = checkpoints.load(self._folder / f"step_{step}")
        agent: State = state["agent"]
        return agent


def load_pool(settings: Settings[Any], agent: Agent, joint: BatchManager, run: RunDirectory) -> Pool:
    """Return the newest opponents in the folder of a run, for games against ``agent``."""
    pool = make_pool(settings, agent, divide_environments(joint, settings))
    pool.store = PoolFolder(run)
    for folder in step_folders(run.pool)[-settings.self_play.size :]:
        pool.restore(_step_of(folder))
    return pool


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
