"""The frozen older selves of a run with self-play."""

from __future__ import annotations

from ludus.core.types import State
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory


class PoolFolder:
    """Keeps each of them in ``pool/step_<n>/``, which is never deleted during a run: a resume may need any of them."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.pool

    def save(self, step: int, state: State) -> None:
        """Write the tensors of the agent; a resumed run replaces what was written after its checkpoint."""
        self._folder.mkdir(exist_ok=True)
        checkpoints.save(self._folder / f"step_{step}", {"agent": state}, {"step": step})

    def load(self, step: int) -> State:
        """Read them."""
        state, _ = checkpoints.load(self._folder / f"step_{step}")
        agent: State = state["agent"]
        return agent
