"""Tables for ``docs/benchmarks.md``."""

from __future__ import annotations

import statistics
from typing import Any

Result = dict[str, Any]


def quartiles(x: list[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(x) == 1:
        return x[0], x[0], x[0]
    low, middle, high = statistics.quantiles(x, n=4, method="inclusive")
    return low, middle, high


def ratios(ours: list[Result], theirs: list[Result]) -> list[float]:
    """Round by round, how many times faster; for a job that ends by itself, the share of the time."""
    key = "rate" if "rate" in ours[0] else "seconds"
    return [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]


def comparison_table(job: str, result: Result, peer: str = "sb3") -> str:
    """One row per side; a target is met when the median of the ratio reaches it.

    The time of a job that ends by itself depends mostly on the seed, and rounds of two sides are not pairs: there the
    ratio is that of the medians, and the target is a share of the peer's time to stay below.
    """
    rounds: dict[str, list[Result]] = result["rounds"]
    unit = "steps/s" if "rate" in rounds[peer][0] else "seconds"
    key = "rate" if unit == "steps/s" else "seconds"
    lines = [
        f"| {job} | {unit}, median (quartiles) | ratio to {peer} (quartiles) | target | met | rounds | options |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, played in rounds.items():
        low, middle, high = quartiles([r[key] for r in played])
        ratio, target, met = "1", "", ""
        if name != peer:
            r_low, r_middle, r_high = quartiles(ratios(played, rounds[peer]))
            ratio = f"**{r_middle:.2f}** ({r_low:.2f} to {r_high:.2f})"
            if unit == "seconds":
                r_middle = middle / statistics.median(r[key] for r in rounds[peer])
                ratio = f"**{r_middle:.2f}** (of the medians)"
            if (bound := result["targets"].get(f"{name}/{peer}")) is not None:
                reached = r_middle >= bound if unit == "steps/s" else r_middle <= bound
                target = f"≥ {bound}" if unit == "steps/s" else f"≤ {bound}"
                met = "yes" if reached else "no"
        options = " ".join(result["options"][name])
        lines.append(f"| {name} | {_number(middle)} ({_number(low)} to {_number(high)}) | {ratio} | {target} | {met} "
                     f"| {len(played)} | `{options}` |")  # fmt: skip
    return "\n".join(lines + _unsolved(rounds))


def limit_table(result: Result) -> str:
    """Return a table of the times of bare code and the resulting limit."""
    pieces = [f"| {name} | {seconds * 1e6:,.0f} µs |" for name, seconds in result["pieces"].items()]
    totals = [f"| limit with {name} | **{_number(rate)} steps/s** |" for name, rate in result["limit"].items()]
    return "\n".join(["| bare code | best |", "|---|---|", *pieces, *totals])


def start_table(result: Result) -> str:
    """Return a table of the medians of start-up times."""
    lines = [f"| {name} | {seconds:.2f} |" for name, seconds in result["medians"].items()]
    return "\n".join(["| start | seconds, median |", "|---|---|", *lines])


def _unsolved(rounds: dict[str, list[Result]]) -> list[str]:
    if not any("solved" in r for played in rounds.values() for r in played):
        return []
    counts = ", ".join(f"{name} {sum(r['solved'] for r in played)} of {len(played)}" for name, played in rounds.items())
    return ["", f"Solved: {counts}."]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.2f}"
