"""Measure learning from recorded episodes: ``python -m benchmarks.offline --seeds 3``.

Mean returns of offline agents and of behaviour cloning on data of mixed quality, and the steps that SAC takes to a
target with and without demonstrations, as in ``tests/learning/recorded_tasks.py``; one process, one thread.
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
    steps_to_target,
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
            demonstrated = name == "pendulum" and "demonstrations" in given.task
            if tasks or demonstrated:
                expert = train_expert(name, folder)
            if tasks:
                path = record_mixed(name, expert, folder)
                returns = [float(episode.reward.sum()) for episode in load_npz(path).episodes]
                print(
                    f"{name}: {len(returns)} episodes, best {max(returns):.1f}, mean {sum(returns) / len(returns):.1f}"
                )
            for task in tasks:
                found = [score(TASKS[task], path, seed, folder) for seed in range(given.seeds)]
                print(task, " ".join(f"{x:.1f}" for x in found), flush=True)
            if demonstrated:
                demos = record_demonstrations(expert, 5, folder)
                for what, file in (("alone", ""), ("with 5 demonstrations", demos)):
                    steps = [steps_to_target(file, seed, folder) for seed in range(given.seeds)]
                    print("sac to -200", what, *steps, flush=True)


if __name__ == "__main__":
    main()
