"""How steps per second grow with the number of environments (native vector CartPole), and docs/growth.png."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
COUNTS = (8, 64, 512, 4_096)
PICTURE = Path(__file__).parent.parent / "docs" / "growth.png"
THREADS = (1, 2)


def measure(call: Callable[..., Result]) -> Result:
    """The best thread count for each number of environments, and the picture."""
    rates = {n: max(_rate(call, n, threads) for threads in THREADS) for n in COUNTS}
    draw(rates)
    return {"rates": rates}


def _rate(call: Callable[..., Result], n: int, threads: int) -> float:
    result = call("benchmarks.ours", "cartpole", "--environments", str(n), "--threads", str(threads), "--warm-up", "10")
    return float(result["rate"])


def table(result: Result) -> str:
    """One column per number of environments."""
    rates: dict[int, float] = result["rates"]
    heads = " | ".join(f"{n:,}" for n in rates)
    cells = " | ".join(f"{rate:,.0f}" for rate in rates.values())
    return f"| environments | {heads} |\n|---|{'---|' * len(rates)}\n| steps/s | {cells} |"


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
        axes.annotate(f"{rate:,.0f}", (n, rate), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.margins(x=0.12, y=0.2)
    axes.set_xlabel("environments (CartPole-v1, Gymnasium's own vector version)")
    axes.set_ylabel("agent steps per second")
    axes.spines[["top", "right"]].set_visible(False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=150)
    plt.close(figure)
