"""The function ``on_update`` that a user gives, which is called after every update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ludus.core.errors import Stop
from ludus.core.types import Tensors

OnUpdate = Callable[..., Any]  # hook(numbers, worker), or hook(numbers)
HOOK = "on_update"  # prefix of the reason where the hook ended the run


class UpdateNumbers(Mapping[str, float]):
    """The metrics after one update, each converted to a float when it is first read."""

    def __init__(self, step: int, metrics: Tensors, progress: Callable[[], Mapping[str, float]]) -> None:
        self._numbers, self._metrics = {"step": float(step)}, metrics
        self._progress: Callable[[], Mapping[str, float]] | None = progress

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add floats."""
        self._numbers |= numbers

    def compute(self) -> dict[str, float]:
        """Convert all of them, so that they no longer depend on the worker."""
        if self._progress is not None:
            metrics = {name: float(x) for name, x in self._metrics.items()}
            self._numbers = {**self._progress(), **metrics, **self._numbers}
            self._progress = None
        return self._numbers

    def __getitem__(self, name: str) -> float:
        if name not in self._numbers and name in self._metrics:
            self._numbers[name] = float(self._metrics[name])
        if name not in self._numbers and name not in self.compute():
            raise KeyError(f'there is no metric "{name}" after this update; there are {", ".join(sorted(self))}')
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.compute())

    def __len__(self) -> int:
        return len(self.compute())

    def __repr__(self) -> str:
        return repr(self.compute())


class UpdateHook:
    """Calls ``on_update``, which ends the run by returning False or raising Stop.

    It also gets the worker if it has two parameters without a default, or ``*args``.
    """

    def __init__(self, function: OnUpdate) -> None:
        self._function = function
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # builtins have no signature
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = sum(p.kind in positional and p.default is p.empty for p in parameters)
        self._takes_worker = needed >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)

    def __call__(self, numbers: Mapping[str, float], worker: object) -> str:
        """Return why the run ends; empty if it goes on."""
        try:
            answer = self._function(numbers, worker) if self._takes_worker else self._function(numbers)
        except Stop as stop:
            return f"{HOOK} raised Stop" + (f": {stop}" if str(stop) else "")
        ends = isinstance(answer, bool | np.bool_) and not answer
        return f"{HOOK} returned False" if ends else ""
