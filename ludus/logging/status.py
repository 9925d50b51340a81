"""Training progress as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    step: int
    mean: float
    spread: float
    episodes: int

    def __str__(self) -> str:
        return f"{number(self.mean)} +- {number(self.spread)} at {self.step:,} steps"


@dataclass
class Status:
    """The numbers on the console."""

    total: int
    step: int = 0
    rate: float = 0.0  # steps per second, recent
    elapsed: float = 0.0  # seconds
    mean_return: float | None = None  # over the last 100 episodes
    episode_length: float | None = None  # over the last 100 episodes
    losses: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    best: Evaluation | None = None
    workers: Sequence[str] = ()  # facts about worker processes

    @property
    def done(self) -> float:
        """Return the completed share of the run, 0 to 1."""
        return min(max(self.step / self.total, 0.0), 1.0) if self.total > 0 else 1.0

    @property
    def left(self) -> str:
        """Return the remaining time at the recent rate."""
        return duration(max(self.total - self.step, 0) / self.rate) if self.rate > 0 else "-:--"

    def rows(self) -> dict[str, list[str]]:
        """Return the numbers by topic, for the live display."""
        rows = {
            "speed": [f"{self.rate:,.0f} steps/s", f"elapsed {duration(self.elapsed)}", f"left {self.left}"],
            "last 100": _format({"return": self.mean_return, "length": self.episode_length}),
            "evaluation": [] if self.evaluation is None else [str(self.evaluation)],
            "losses": _format(self.losses),
            "workers": list(self.workers),
        }
        if self.evaluation is not None and self.best is not None and self.best.step != self.evaluation.step:
            rows["evaluation"].append(f"best {number(self.best.mean)} at {self.best.step:,}")
        return {topic: cells for topic, cells in rows.items() if cells}

    def line(self) -> str:
        """Return the numbers on one line, for plain output."""
        cells = [
            f"{self.step:,}/{self.total:,} steps ({percent(self.done)})",
            f"{self.rate:,.0f}/s",
            f"left {self.left}",
        ]
        cells += _format({"return": self.mean_return, "length": self.episode_length}) + _format(self.losses)
        cells += [f"workers: {', '.join(self.workers)}"] * bool(self.workers)
        shares = " ".join(f"{phase} {percent(share)}" for phase, share in self.shares.items())
        return "  ".join(cells + ([f"[{shares}]"] if shares else []))


def number(x: float) -> str:
    """Format a number with four digits."""
    if math.isfinite(x) and abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.4g}"


def percent(share: float) -> str:
    """Format a share as a whole percentage, rounded down so that 100% is the end."""
    return f"{math.floor(share * 100) if share > 0.5 else round(share * 100)}%"


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours and days if there are any."""
    minutes, second = divmod(round(min(seconds, 1e10)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _format(values: Mapping[str, float | None]) -> list[str]:
    return [f"{name} {number(x)}" for name, x in values.items() if x is not None]
