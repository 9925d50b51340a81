"""From rounds to the tables of ``docs/benchmarks.md``."""

from __future__ import annotations

import statistics
from typing import Any

Result = dict[str, Any]


def quartiles(x: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(x) == 1:
        return x[0], x[0], x[0]
    low, middle, high = statistics.quantiles(x, n=4, method="inclusive")
    return low, middle, high


def ratios(ours: list[Result], theirs: list[Result]) -> list[float]:
    """Round by round, how many times faster; of a job that ends by itself, how many times shorter."""
    if "rate" in ours[0]:
        return [a["rate"] / b["rate"] for a, b in zip(ours, theirs, strict=True)]
    return [b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)]


def comparison_table(job: str, result: Result, peer: str = "sb3") -> str:
    """One row per contestant; a target is met when the lower quartile of the ratio meets it.

    How long a job takes that ends by itself is its seed's luck, and the seeds of two sides are no pairs: there the
    ratio is that of the medians.
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
                r_low = statistics.median(r[key] for r in rounds[peer]) / middle
                ratio = f"**{r_low:.2f}** (of the medians)"
            if name in result["targets"]:
                target = f"{result['targets'][name]}"
                met = "yes" if r_low >= result["targets"][name] else "no"
        options = " ".join(result["options"][name])
        lines.append(f"| {name} | {_number(middle)} ({_number(low)} to {_number(high)}) | {ratio} | {target} | {met} "
                     f"| {len(played)} | `{options}` |")  # fmt: skip
    return "\n".join(lines + _unsolved(rounds))


def limit_table(result: Result) -> str:
    """The bare pieces and the limit that they set."""
    pieces = [f"| {name} | {seconds * 1e6:,.0f} µs |" for name, seconds in result["pieces"].items()]
    totals = [f"| limit with {name} | **{_number(rate)} steps/s** |" for name, rate in result["limit"].items()]
    return "\n".join(["| bare piece | best |", "|---|---|", *pieces, *totals])


def start_table(result: Result) -> str:
    """Medians of start-up times."""
    lines = [f"| {name} | {seconds:.2f} |" for name, seconds in result["medians"].items()]
    return "\n".join(["| start | seconds, median |", "|---|---|", *lines])


def _unsolved(rounds: dict[str, list[Result]]) -> list[str]:
    if not any("solved" in r for played in rounds.values() for r in played):
        return []
    counts = ", ".join(f"{name} {sum(r['solved'] for r in played)} of {len(played)}" for name, played in rounds.items())
    return ["", f"Solved: {counts}."]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.2f}"
