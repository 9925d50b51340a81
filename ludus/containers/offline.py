"""Training on recorded episodes alone: no environment is stepped but in evaluations."""

from __future__ import annotations

from ludus.containers.local import LocalWorker
from ludus.core.step import Episode
from ludus.core.types import State

UPDATES = 20  # between two looks at what is due: the log, evaluations, checkpoints, signals


class OfflineWorker(LocalWorker):
    """A LocalWorker that learns without acting; ``nb_step`` and all intervals count updates.

    Its single environment shows what observations and actions are like, and is never reset.
    """

    def _begin(self) -> None:
        return

    def _collect(self) -> int:
        """Allow the next updates; return their number."""
        updates = min(UPDATES, self._target - self.local_step_count)
        self.cache.grant(updates)
        return updates

    def _episodes(self) -> list[Episode]:
        return []

    @property
    def backend(self) -> str:
        """Where the experience comes from, for the user."""
        dataset = self.agent.dataset
        assert dataset is not None
        return (
            f"not stepped: {dataset.transitions:,} recorded steps of {len(dataset.episodes):,} episodes with mean "
            f"return {dataset.mean_return:.4g}"
        )

    def _collector_state(self, whole: bool) -> State:
        return {"noise": self.seat.noise.state_dict()}

    def _load_collector(self, state: State) -> str:
        self.seat.noise.load_state_dict(state["noise"])
        self.began = True
        if state["cache"] is None:
            return "not needed, but batches are drawn anew: the run was interrupted in the middle of an update"
        self.cache.load_state_dict(state["cache"])
        return "exactly"
