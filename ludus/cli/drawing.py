"""Drawings of networks as SVG: inputs at the left, outputs at the right."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from ludus.cli.show import count, label

if TYPE_CHECKING:
    from ludus.networks.summary import NetworkSummary

WIDTH, HEIGHT = 190, 62  # of a box
GAP_X, GAP_Y, MARGIN, TITLE = 56, 16, 20, 34
COLOURS = {"input": "#e8eef7", "source": "#d5e8d4", "embedding": "#d5e8d4", "body": "#fff2cc", "head": "#ffe6cc"}
OTHER = "#f8cecc"  # of outputs
LINE = "#666666"
FONT = "font-family='Helvetica, Arial, sans-serif'"
LONGEST = 30  # characters that fit into a box


class Box(NamedTuple):
    """A box with lines of text; the first is bold."""

    column: int
    lines: list[str]
    inputs: tuple[str, ...]
    colour: str


def draw(networks: dict[str, NetworkSummary]) -> str:
    """Return an SVG with one block per network."""
    body: list[str] = []
    top, right = MARGIN, 0
    for name, summary in networks.items():
        boxes = _boxes(summary)
        size = f"{summary.parameters:,} parameters, {count(summary.flops)} FLOPs"
        body.append(_text(MARGIN, top + 16, f"{name}: {size}", 15, bold=True))
        columns: dict[int, list[str]] = {}
        for key, box in boxes.items():
            columns.setdefault(box.column, []).append(key)
        rows = max(map(len, columns.values()))
        height = rows * (HEIGHT + GAP_Y) - GAP_Y
        place: dict[str, tuple[float, float]] = {}
        for column, keys in columns.items():
            used = len(keys) * (HEIGHT + GAP_Y) - GAP_Y
            for i, key in enumerate(keys):
                x = MARGIN + column * (WIDTH + GAP_X)
                place[key] = x, top + TITLE + (height - used) / 2 + i * (HEIGHT + GAP_Y)
        body += [_arrow(place[given], place[key]) for key, box in boxes.items() for given in box.inputs]
        body += [_box(*place[key], box) for key, box in boxes.items()]
        right = max(right, MARGIN + (max(columns) + 1) * (WIDTH + GAP_X) - GAP_X)
        top += TITLE + height + 2 * MARGIN
    size = f"width='{right + MARGIN}' height='{top:.0f}' viewBox='0 0 {right + MARGIN} {top:.0f}'"
    marker = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{LINE}'/></marker></defs>"
    )
    background = "<rect width='100%' height='100%' fill='white'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", marker, background, *body, "</svg>", ""])


def _boxes(summary: NetworkSummary) -> dict[str, Box]:
    """Return the boxes of a network; each stands one column to the right of the last that it gets."""
    boxes = {name: Box(0, [name, str(shape)], (), COLOURS["input"]) for name, shape in summary.inputs.items()}
    for part in summary.parts:
        column = 1 + max(boxes[name].column for name in part.inputs)
        name, _, kind = label(part).partition(": ")
        lines = [name, *([kind] if kind else []), f"→ {part.output_shape}" if part.output_shape else ""]
        if part.parameters:
            lines[-1] += f"  {count(part.parameters)}"
        place = next((word for word in COLOURS if word in name.split("/")[0] or f"/{word}" in name), "")
        boxes[part.name] = Box(column, lines, part.inputs, COLOURS.get(place, OTHER))
    last = max(box.column for box in boxes.values())
    return {  # outputs in one column
        key: box._replace(column=last) if key.startswith("output/") else box for key, box in boxes.items()
    }


def _box(x: float, y: float, box: Box) -> str:
    lines = [line for line in box.lines if line]
    first = y + HEIGHT / 2 - 8 * (len(lines) - 1) + 4
    rectangle = (
        f"<rect x='{x:.0f}' y='{y:.0f}' width='{WIDTH}' height='{HEIGHT}' rx='6' fill='{box.colour}' "
        f"stroke='{LINE}'><title>{escape(' '.join(lines))}</title></rect>"
    )
    middle = x + WIDTH / 2
    texts = [_text(middle, first + 16 * i, line, 12, i == 0, "middle") for i, line in enumerate(lines)]
    return "".join([rectangle, *texts])


def _text(x: float, y: float, text: str, size: int, bold: bool = False, anchor: str = "start") -> str:
    short = text if anchor == "start" or len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' text-anchor={quoteattr(anchor)} {FONT}{weight}>"
        f"{escape(short)}</text>"
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x, y = start[0] + WIDTH, start[1] + HEIGHT / 2
    to_x, to_y = end[0], end[1] + HEIGHT / 2
    bend = (to_x - x) / 2
    return (
        f"<path d='M{x:.0f},{y:.0f} C{x + bend:.0f},{y:.0f} {to_x - bend:.0f},{to_y:.0f} {to_x:.0f},{to_y:.0f}' "
        f"fill='none' stroke='{LINE}' stroke-width='1.3' marker-end='url(#tip)'/>"
    )
