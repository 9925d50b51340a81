"""Measure learning from recorded episodes: ``python -m benchmarks.offline --seeds 3``.

Mean returns of offline agents and of behaviour cloning on data of mixed quality, and returns and steps of SAC with and
without demonstrations, as in ``tests/learning/recorded_tasks.py``; one process, one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ludus.data.npz import load_npz
from tests.learning.recorded_tasks import (
    DATA,
    TASKS,
    record_demonstrations,
    record_mixed,
    score,
    train_car,
    train_expert,
)


def main() -> None:
    """Print a line for each task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", nargs="*", default=[*TASKS, "demonstrations"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in DATA:
            tasks = [task for task in given.task if task.startswith(name)]
            if tasks:
                path = record_mixed(name, train_expert(name, folder), folder)
                returns = [float(episode.reward.sum()) for episode in load_npz(path).episodes]
                print(
                    f"{name}: {len(returns)} episodes, best {max(returns):.1f}, mean {sum(returns) / len(returns):.1f}"
                )
            for task in tasks:
                found = [score(TASKS[task], path, seed, folder) for seed in range(given.seeds)]
                print(task, " ".join(f"{x:.1f}" for x in found), flush=True)
        if "demonstrations" in given.task:
            demonstrations = record_demonstrations(folder / "demos.npz")
            for what, file in (("alone", ""), ("with demonstrations", demonstrations)):
                found = [train_car(file, seed, folder) for seed in range(given.seeds)]
                print("car", what, ", ".join(f"{mean:.1f} after {steps:,}" for steps, mean in found), flush=True)


if __name__ == "__main__":
    main()
