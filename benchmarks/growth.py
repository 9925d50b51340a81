"""How steps per second grow with the number of environments (native vector CartPole), and docs/growth.png."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.limit import measure_limit
from benchmarks.protocol import THREADS

Result = dict[str, Any]
Call = Callable[..., Result]
COUNTS = (8, 64, 512, 4_096)
LIMITED = (512, 4_096)  # environments for which the limit of the bare pieces is measured too
TARGET = 0.75  # the share of that limit to reach, by the median
PICTURE = Path(__file__).parent.parent / "docs" / "growth.png"


def measure(call: Call, rounds: int, seconds: float) -> Result:
    """Measure each number of environments with its best thread count, by turns with the limit of the bare pieces."""
    rates: dict[int, float] = {}
    limits: dict[int, float] = {}
    shares: dict[int, list[float]] = {}
    for n in COUNTS:
        tried = {threads: _rate(call, n, threads, seconds) for threads in THREADS}
        threads = max(tried, key=tried.__getitem__)
        measured = [tried[threads]]
        if n in LIMITED:
            best = [_limit(call, n)]
            for _ in range(rounds - 1):
                measured.append(_rate(call, n, threads, seconds))
                best.append(_limit(call, n))
            limits[n] = statistics.median(best)
            shares[n] = [rate / most for rate, most in zip(measured, best, strict=True)]
        rates[n] = statistics.median(measured)
    draw(rates)
    return {"rates": rates, "limits": limits, "shares": shares, "target": TARGET}


def _rate(call: Call, n: int, threads: int, seconds: float) -> float:
    options = ("--environments", str(n), "--threads", str(threads), "--warm-up", "10", "--seconds", str(seconds))
    return float(call("benchmarks.ours", "cartpole", *options)["rate"])


def _limit(call: Call, n: int) -> float:
    """Return the limit with the faster of the updates."""
    return float(max(measure_limit(call, "cartpole", n)["limit"].values()))


def table(result: Result) -> str:
    """One column per number of environments."""
    shares = {n: statistics.median(found) for n, found in result["shares"].items()}
    rows = {
        "environments": {n: f"{n:,}" for n in COUNTS},
        "steps/s": {n: f"{rate:,.0f}" for n, rate in result["rates"].items()},
        "limit of bare code": {n: f"{most:,.0f}" for n, most in result["limits"].items()},
        f"share of the limit (target ≥ {TARGET:.0%})": {
            n: f"{share:.0%}, {'met' if share >= TARGET else 'not met'}" for n, share in shares.items()
        },
    }
    lines = ["| " + " | ".join([head, *(cells.get(n, "") for n in COUNTS)]) + " |" for head, cells in rows.items()]
    return "\n".join([lines[0], "|---|" + "---|" * len(COUNTS), *lines[1:]])


def draw(rates: dict[int, float]) -> None:
    """Both axes by powers, a dot per measurement."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(list(rates), list(rates.values()), marker="o", color="#1f6f8b")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(rates), [f"{n:,}" for n in rates])
    for n, rate in rates.items():
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        place = {"textcoords": "offset points", "xytext": (0, 10), "ha": "center"}
        axes.annotate(f"{rate:,.0f}", (n, rate), bbox=box, **place)
    axes.margins(x=0.15, y=0.2)
    axes.set_xlabel("environments (CartPole-v1, Gymnasium's native vector version)")
    axes.set_ylabel("env steps per second")
    axes.spines[["top", "right"]].set_visible(False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=150)
    plt.close(figure)
