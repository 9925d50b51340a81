"""The gradient flow of a network as an SVG: bars with mean and maximum of the absolute gradient of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple
from xml.sax.saxutils import escape

ROW, BAR = 26, 14  # height of a row, and of the bar in it
PLOT = 460  # width of the bars' area
TOP, BOTTOM, MARGIN = 64, 44, 16
LETTER = 7.0  # width of a letter of the labels
MEAN, MAX, GRID, TEXT = "#2c6fad", "#b5d3ec", "#dddddd", "#222222"


class LayerGradient(NamedTuple):
    """Mean and maximum of the absolute gradient of a layer's parameters."""

    mean: float
    max: float


def draw_gradients(layers: Mapping[str, LayerGradient], title: str) -> str:
    """Return an SVG with a row per layer, on a logarithmic axis; gradients that are not finite are written out."""
    low, high = _decades(layers)
    left = MARGIN + LETTER * max(map(len, layers)) + 10
    width, height = left + PLOT + 2 * MARGIN + 30, TOP + ROW * len(layers) + BOTTOM
    bottom = TOP + ROW * len(layers)

    def x(value: float) -> float:
        return left + PLOT * (math.log10(value) - low) / (high - low)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}' font-size='12' "
        f"font-family='Helvetica, Arial, sans-serif' fill='{TEXT}'>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='{MARGIN}' y='24' font-size='15' font-weight='bold'>{escape(title)}</text>",
        *_legend(left),
    ]
    step = max(1, math.ceil((high - low) / 8))  # at most 9 labels
    for decade in range(low, high + 1, step):
        at = x(10.0**decade)
        parts.append(f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{TOP - 4}' y2='{bottom}' stroke='{GRID}'/>")
        parts.append(f"<text x='{at:.1f}' y='{bottom + 16}' text-anchor='middle'>1e{decade}</text>")
    middle, caption = left + PLOT / 2, "absolute gradient, before clipping"
    parts.append(f"<text x='{middle:.0f}' y='{bottom + 34}' text-anchor='middle'>{caption}</text>")
    for row, (name, gradient) in enumerate(layers.items()):
        y = TOP + ROW * row + (ROW - BAR) / 2
        parts.append(f"<text x='{left - 10:.0f}' y='{y + 11:.0f}' text-anchor='end'>{escape(name)}</text>")
        if not all(map(math.isfinite, gradient)) or not gradient.max:
            text = "no gradient" if gradient.max == 0 else "NaN or Inf"
            parts.append(f"<text x='{left + 6:.0f}' y='{y + 11:.0f}' fill='#b03030'>{text}</text>")
            continue
        for value, colour in ((gradient.max, MAX), (gradient.mean, MEAN)):
            parts.append(
                f"<rect x='{left:.1f}' y='{y:.0f}' width='{x(value) - left:.1f}' height='{BAR}' fill='{colour}'>"
                f"<title>{escape(name)}: mean {gradient.mean:.3g}, max {gradient.max:.3g}</title></rect>"
            )
    return "\n".join([*parts, "</svg>", ""])


def _decades(layers: Mapping[str, LayerGradient]) -> tuple[int, int]:
    """Return the powers of ten at the ends of the axis."""
    values = [x for gradient in layers.values() for x in gradient if 0 < x < math.inf]
    if not values:
        return -1, 0
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low - (low == math.log10(min(values))), max(high, low + 1)  # so that the least bar has a width


def _legend(left: float) -> list[str]:
    found = []
    for at, colour, text in ((left, MEAN, "mean"), (left + 70, MAX, "maximum")):
        found.append(f"<rect x='{at:.0f}' y='38' width='12' height='12' fill='{colour}'/>")
        found.append(f"<text x='{at + 17:.0f}' y='48'>{text}</text>")
    return found
