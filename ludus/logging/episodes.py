"""Statistics of recent training episodes, for the log."""

from __future__ import annotations

from collections import deque

from ludus.core.step import Episode
from ludus.core.types import State

RECENT = 100  # episodes in the mean return and length
MAX_INFOS = 1000  # episodes in the means of infos


class RecentEpisodes:
    """Returns and lengths of the last episodes, and their numeric infos since the last line of metrics."""

    def __init__(self) -> None:
        self.returns: deque[float] = deque(maxlen=RECENT)
        self.lengths: deque[float] = deque(maxlen=RECENT)
        self.infos: dict[str, deque[float]] = {}

    def add(self, episodes: list[Episode]) -> None:
        """Add finished episodes."""
        for episode in episodes:
            self.returns.append(episode.reward)
            self.lengths.append(episode.length)
            for name, x in episode.infos.items():
                self.infos.setdefault(f"episode/{name}", deque(maxlen=MAX_INFOS)).append(x)

    def means(self) -> dict[str, float]:
        """Return the mean return and length; empty before the first episode."""
        if not self.returns:
            return {}
        return {"return": sum(self.returns) / len(self.returns), "length": sum(self.lengths) / len(self.lengths)}

    def take_infos(self) -> dict[str, float]:
        """Return the mean of every info since the last call."""
        infos, self.infos = self.infos, {}
        return {name: sum(xs) / len(xs) for name, xs in infos.items()}

    def state_dict(self) -> State:
        infos = {name: list(xs) for name, xs in self.infos.items()}
        return {"returns": list(self.returns), "lengths": list(self.lengths), "infos": infos}

    def load_state_dict(self, state: State) -> None:
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.infos = {name: deque(xs, maxlen=MAX_INFOS) for name, xs in state["infos"].items()}
