"""Plot a learning curve as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille bits: [row][column] in a cell of 4 × 2 dots


def curve(
    steps: Sequence[float], values: Sequence[float], target: float | None = None, width: int = 72, height: int = 10
) -> str:
    """Plot ``values`` over ``steps`` as lines of text no wider than ``width``, with the target as a dashed line."""
    points = [(float(s), float(v)) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not points:
        return "(nothing to plot yet)"
    shown = [v for _, v in points] + ([] if target is None else [target])
    low, high = min(shown), max(shown)
    if low == high:
        room = max(abs(low) / 100, 0.5)
        low, high = low - room, high + room
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    dashes = None if target is None else round(_row(target, low, high, height * 4)) // 4
    labels = {0: short(high), height - 1: short(low)}
    if target is not None and dashes is not None:
        labels[dashes] = f"target {short(target)}"  # in place of the label of an end
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 8)
    canvas = _Canvas(columns, height)
    dots = [((s - first) / (last - first) * (columns * 2 - 1), _row(v, low, high, height * 4)) for s, v in points]
    for start, end in zip(dots, dots[1:] or dots, strict=False):
        canvas.line(start, end)
    rows = [f"{labels.get(i, ''):>{margin}} ┤{canvas.row(i, dashed=i == dashes)}".rstrip() for i in range(height)]
    axis = f"{'':>{margin}} └{'─' * columns}"
    left, right = short(first), f"{short(last)} steps"
    return "\n".join([*rows, axis, f"{'':>{margin}}  {left}{right:>{columns - len(left)}}"])


def short(x: float) -> str:
    """Format a number in few characters: 1234, 50k, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(x) >= size:
            return f"{x / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{x:.0f}" if x == round(x) else f"{x:.3g}"


def _row(value: float, low: float, high: float, dots: int) -> float:
    return (high - value) / (high - low) * (dots - 1)


class _Canvas:
    """A grid of braille characters, each with 2 × 4 dots."""

    def __init__(self, columns: int, rows: int) -> None:
        self._cells = [[0] * columns for _ in range(rows)]

    def line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        count = max(round(max(abs(end[0] - start[0]), abs(end[1] - start[1]))), 1)
        for i in range(count + 1):
            x = round(start[0] + (end[0] - start[0]) * i / count)
            y = round(start[1] + (end[1] - start[1]) * i / count)
            self._cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def row(self, index: int, dashed: bool) -> str:
        blank = [" ", "╌"] if dashed else [" ", " "]
        return "".join(chr(0x2800 + c) if c else blank[i % 2] for i, c in enumerate(self._cells[index]))
