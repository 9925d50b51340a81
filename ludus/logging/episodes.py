"""Statistics of recent training episodes, for the log."""

from __future__ import annotations

from collections import deque

from ludus.core.step import Episode
from ludus.core.types import State

RECENT = 100  # episodes whose mean is shown
INFOS = 1000  # episodes whose infos one line of metrics sums up, at most


class RecentEpisodes:
    """Return and length of the last episodes, and the numeric infos of those since the last line of metrics."""

    def __init__(self) -> None:
        self.returns: deque[float] = deque(maxlen=RECENT)
        self.lengths: deque[float] = deque(maxlen=RECENT)
        self.infos: dict[str, deque[float]] = {}

    def add(self, episodes: list[Episode]) -> None:
        """Take episodes that ended."""
        for episode in episodes:
            self.returns.append(episode.reward)
            self.lengths.append(episode.length)
            for name, x in episode.infos.items():
                self.infos.setdefault(f"episode/{name}", deque(maxlen=INFOS)).append(x)

    def means(self) -> dict[str, float]:
        """Mean return and length, once there are any."""
        if not self.returns:
            return {}
        return {"return": sum(self.returns) / len(self.returns), "length": sum(self.lengths) / len(self.lengths)}

    def take_infos(self) -> dict[str, float]:
        """The mean of every info since the last call."""
        infos, self.infos = self.infos, {}
        return {name: sum(xs) / len(xs) for name, xs in infos.items()}

    def state_dict(self) -> State:
        """All of it."""
        infos = {name: list(xs) for name, xs in self.infos.items()}
        return {"returns": list(self.returns), "lengths": list(self.lengths), "infos": infos}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.infos = {name: deque(xs, maxlen=INFOS) for name, xs in state["infos"].items()}
