"""Drawings of networks as SVG: inputs at the left, outputs at the right."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from ludus.cli.show import count, label, shapes

if TYPE_CHECKING:
    from ludus.networks.summary import NetworkSummary

WIDTH, HEIGHT, LANE = 190, 78, 8  # of a box; height of a line that passes a column
GAP_X, GAP_Y, MARGIN, TITLE = 56, 16, 20, 34
COLOURS = {"source": "#d5e8d4", "embedding": "#d5e8d4", "body": "#fff2cc", "head": "#ffe6cc", "output": "#f8cecc"}
INPUT, OTHER, LINE = "#e8eef7", "#eeeeee", "#666666"
LONGEST = 30  # characters that fit into a box
HEADER = (
    "<defs><marker id='tip' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
    f"<path d='M0,0 L8,4 L0,8 z' fill='{LINE}'/></marker></defs><rect width='100%' height='100%' fill='white'/>"
)


class Box(NamedTuple):
    """A box with lines of text, of which the first is bold."""

    column: int
    lines: list[str]
    inputs: tuple[str, ...]
    colour: str


Node = str | tuple[str, int]  # a box, or where the line from a box passes a column


def draw(networks: dict[str, NetworkSummary]) -> str:
    """Return an SVG with one block per network."""
    body: list[str] = []
    top = right = MARGIN
    for name, summary in networks.items():
        size = f"{summary.parameters:,} parameters, {count(summary.flops)} FLOPs per observation"
        body.append(_text(MARGIN, top + 16, f"{name}: {size}", 15, "start", bold=True))
        boxes = _boxes(summary)
        edges = _edges(boxes)
        places, height = _places(boxes, edges, top + TITLE)
        body += [_arrow(start, end, places) for start, end in edges]
        body += [_box(*places[key], box) for key, box in boxes.items()]
        right = max(right, *(int(x) + WIDTH for x, _ in places.values()))
        top += TITLE + int(height) + 2 * MARGIN
    size = f"width='{right + MARGIN}' height='{top}' viewBox='0 0 {right + MARGIN} {top}'"
    font = "font-family='Helvetica, Arial, sans-serif'"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size} {font}>", HEADER, *body, "</svg>", ""])


def _boxes(summary: NetworkSummary) -> dict[str, Box]:
    """Return the boxes; each stands one column to the right of the last that it gets, and outputs at the end."""
    boxes = {name: Box(0, [name, str(shape)], (), INPUT) for name, shape in summary.inputs.items()}
    for part in summary.parts:
        name, _, kind = label(part).partition(": ")
        size = f"{part.parameters:,} parameters" if part.parameters else ""
        lines = [line for line in (name, kind, shapes(part, summary.inputs), size) if line]
        place = next((word for word in COLOURS if word in name.split("/")[0] or f"/{word}" in name), "")
        column = 1 + max(boxes[given].column for given in part.inputs)
        boxes[part.name] = Box(column, lines, part.inputs, COLOURS.get(place, OTHER))
    last = max(box.column for box in boxes.values())
    return {key: box._replace(column=last) if key.startswith("output/") else box for key, box in boxes.items()}


def _edges(boxes: dict[str, Box]) -> list[tuple[Node, Node]]:
    """Return lines between neighbouring columns; a longer one passes the columns between."""
    edges: dict[tuple[Node, Node], None] = {}
    for key, box in boxes.items():
        for given in box.inputs:
            passes = [(given, column) for column in range(boxes[given].column + 1, box.column)]
            nodes: list[Node] = [given, *passes, key]
            edges |= dict.fromkeys(pairwise(nodes))
    return list(edges)


def _places(
    boxes: dict[str, Box], edges: list[tuple[Node, Node]], top: float
) -> tuple[dict[Node, tuple[float, float]], float]:
    """Return the left upper corner of every node, and the height of all; nodes stand near those before them."""
    columns: dict[int, list[Node]] = {}
    for node in dict.fromkeys([*boxes, *(end for _, end in edges)]):
        columns.setdefault(boxes[node].column if isinstance(node, str) else node[1], []).append(node)
    whole = max(sum(_height(node) + GAP_Y for node in nodes) - GAP_Y for nodes in columns.values())
    places: dict[Node, tuple[float, float]] = {}
    for column, nodes in sorted(columns.items()):
        before = {node: [_middle(start, places) for start, end in edges if end == node] for node in nodes}
        nodes.sort(key=lambda node: sum(before[node]) / max(1, len(before[node])))
        y = top + (whole - sum(_height(node) + GAP_Y for node in nodes) + GAP_Y) / 2
        for node in nodes:
            places[node] = MARGIN + column * (WIDTH + GAP_X), y
            y += _height(node) + GAP_Y
    return places, whole


def _height(node: Node) -> int:
    return HEIGHT if isinstance(node, str) else LANE


def _middle(node: Node, places: dict[Node, tuple[float, float]]) -> float:
    return places[node][1] + _height(node) / 2


def _box(x: float, y: float, box: Box) -> str:
    rectangle = (
        f"<rect x='{x:.0f}' y='{y:.0f}' width='{WIDTH}' height='{HEIGHT}' rx='6' fill='{box.colour}' "
        f"stroke='{LINE}'><title>{escape(' '.join(box.lines))}</title></rect>"
    )
    first = y + HEIGHT / 2 - 8 * (len(box.lines) - 1) + 4
    texts = [
        _text(
            x + WIDTH / 2, first + 16 * i, line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…", 12, bold=i == 0
        )
        for i, line in enumerate(box.lines)
    ]
    return "".join([rectangle, *texts])


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle", bold: bool = False) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' text-anchor='{anchor}'{weight}>{escape(text)}</text>"


def _arrow(start: Node, end: Node, places: dict[Node, tuple[float, float]]) -> str:
    """Return the line from one node to the next, through the whole column where it only passes."""
    x, y = places[start][0] + WIDTH, _middle(start, places)
    to_x, to_y = places[end][0], _middle(end, places)
    bend = GAP_X / 2
    path = f"M{x:.0f},{y:.0f} C{x + bend:.0f},{y:.0f} {to_x - bend:.0f},{to_y:.0f} {to_x:.0f},{to_y:.0f}"
    tip = " marker-end='url(#tip)'" if isinstance(end, str) else ""
    path += "" if isinstance(end, str) else f" h{WIDTH}"
    return f"<path d='{path}' fill='none' stroke='{LINE}' stroke-width='1.3'{tip}/>"
