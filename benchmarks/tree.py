"""Prioritized sampling: ExperienceReplay and its SumTree against Tianshou's PrioritizedReplayBuffer and segment tree.

``python -m benchmarks.tree --tianshou PYTHON`` (or ``TIANSHOU_PYTHON``) with the interpreter of an environment that has
Tianshou; its version 2 cannot be installed beside our pins (filelock). An update draws 256 of 1,000,000
transitions by priority, computes their importance weights and gives them new priorities; the whole replays also
fetch the transitions. Each side has one process for the whole run, and they take short turns on one thread,
and the time is their CPU time, so that other work on the machine does less harm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.protocol import emit
from benchmarks.report import quartiles

CAPACITY, BATCH = 1_000_000, 256
ALPHA, BETA = 0.6, 0.4
OBSERVATION, ACTION = 17, 6  # HalfCheetah's
DRAWN = 512  # batches of new priorities, used again and again
Update = Callable[[Any], None]


def ludus() -> tuple[Update, list[Any]]:
    """The whole replay buffer."""
    import torch

    from benchmarks.replay import filled

    torch.set_num_threads(1)
    replay = filled("halfcheetah", CAPACITY, prioritized=True)[0]
    for start in range(0, CAPACITY, BATCH):  # priorities that differ, as they would
        index = torch.arange(start, min(start + BATCH, CAPACITY - 1))
        replay.feedback(index, torch.rand(len(index)))

    def update(error: torch.Tensor) -> None:
        batch = replay.read()
        assert batch.index is not None
        replay.feedback(batch.index, error.abs())

    return update, [torch.from_numpy(x) for x in _errors()]


def ludus_python() -> tuple[Update, list[Any]]:
    """The whole replay buffer without a C compiler."""
    from ludus.experience import native

    native.LIBRARY = None
    return ludus()


def ludus_tree() -> tuple[Update, list[Any]]:
    """SumTree with everything that a prioritized replay buffer does except gathering transitions."""
    import torch

    from ludus.experience.sum_tree import SumTree

    torch.set_num_threads(1)
    tree, generator, strata = SumTree(CAPACITY), torch.Generator().manual_seed(0), torch.arange(BATCH).double()
    tree.set(torch.arange(CAPACITY), torch.rand(CAPACITY, generator=generator).pow_(ALPHA))

    def update(error: torch.Tensor) -> None:
        uniform = torch.rand(BATCH, generator=generator, dtype=torch.float64).add_(strata).mul_(1 / BATCH)
        index, value = tree.sample(uniform)
        weight = value.mul_(CAPACITY / tree.total).pow_(-BETA)
        weight.div_(weight.max())
        tree.set(index, error.abs().add_(1e-6).pow_(ALPHA))

    return update, [torch.from_numpy(x) for x in _errors()]


def tianshou_tree() -> tuple[Update, list[Any]]:
    """The same steps with Tianshou's segment tree (numba)."""
    buffer = _tianshou(1)

    def update(error: Any) -> None:
        index = buffer.sample_indices(BATCH)
        weight = buffer.get_weight(index)
        weight /= weight.max()
        buffer.update_weight(index, error)

    return update, _errors()


def tianshou_buffer() -> tuple[Update, list[Any]]:
    """Tianshou's whole buffer, including transitions."""
    buffer = _tianshou(OBSERVATION)

    def update(error: Any) -> None:
        _, index = buffer.sample(BATCH)
        buffer.update_weight(index, error)

    return update, _errors()


def _tianshou(width: int) -> Any:
    """Return a full buffer."""
    from tianshou.data import Batch, PrioritizedReplayBuffer

    rng = np.random.default_rng(0)
    buffer = PrioritizedReplayBuffer(CAPACITY, alpha=ALPHA, beta=BETA)
    seen, none = rng.random((CAPACITY, width), np.float32), np.zeros(CAPACITY, bool)
    act, rew = rng.random((CAPACITY, ACTION), np.float32), rng.random(CAPACITY)
    ends = {"terminated": rng.random(CAPACITY) < 0.01, "truncated": none, "done": none}
    buffer.set_batch(Batch(obs=seen, obs_next=seen.copy(), act=act, rew=rew, info=Batch(), **ends))
    buffer._size = CAPACITY  # a million calls of add() would take minutes
    buffer.update_weight(np.arange(CAPACITY), rng.random(CAPACITY))
    return buffer


def _errors() -> list[Any]:
    return list(np.random.default_rng(1).standard_normal((DRAWN, BATCH), np.float32))


SIDES = {
    "ludus": ludus,
    "tianshou": tianshou_buffer,
    "ludus, not compiled": ludus_python,
    "ludus tree": ludus_tree,
    "tianshou tree": tianshou_tree,
}


def serve(side: str) -> None:
    """For each line of standard input, run for that many seconds of CPU time and print the rate."""
    update, errors = SIDES[side]()
    emit(side=side)
    for line in sys.stdin:
        count, began = 0, time.process_time()
        while (now := time.process_time()) < began + float(line):
            for error in errors[count % DRAWN :][:32]:
                update(error)
            count += 32
        emit(rate=count / (now - began))


def contest(tianshou: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Start all sides, then run rounds in turn; the first is a warm-up."""
    running = {}
    for side in SIDES:
        python = sys.executable if side.startswith("ludus") else tianshou
        command = [python, "-m", "benchmarks.tree", "--side", side]
        running[side] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        _answer(running[side])
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_ in range(rounds + 1):
        for side in list(SIDES) if round_ % 2 else list(SIDES)[::-1]:
            print(seconds, file=running[side].stdin, flush=True)
            rates[side].append(float(_answer(running[side])["rate"]))
    for process in running.values():
        process.communicate()
    return {side: x[1:] for side, x in rates.items()}


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.wait()}.")  # type: ignore[arg-type]
    answer: dict[str, Any] = json.loads(line)
    return answer


def table(rates: dict[str, list[float]]) -> str:
    """Return a table with one row per side; ratios are between adjacent rounds."""
    lines = [
        f"| prioritized, {BATCH} of {CAPACITY:,} | updates/s, median (quartiles) | µs | ludus is faster by | rounds |",
        "|---|---|---|---|---|",
    ]
    for side, x in rates.items():
        low, middle, high = quartiles(x)
        told = f"| {side} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) | {1e6 / middle:.0f} |"
        ours = rates[side.replace("tianshou", "ludus")]
        r_low, r_middle, r_high = quartiles([a / b for a, b in zip(ours, x, strict=True)])
        ratio = "" if side.startswith("ludus") else f"**{r_middle:.2f}** ({r_low:.2f} to {r_high:.2f})"
        lines.append(f"{told} {ratio} | {len(x)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sum trees: sampling by priority and updating priorities.")
    parser.add_argument("--tianshou", default=os.environ.get("TIANSHOU_PYTHON"), help="a Python that has Tianshou")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="CPU time of a turn")
    parser.add_argument("--side", choices=list(SIDES), help="be one side, for the run that started it")
    args = parser.parse_args()
    if args.side:
        serve(args.side)
        return
    if not args.tianshou:
        parser.error("give --tianshou, the Python of an environment that has Tianshou")
    from benchmarks.harness import BUSY, machine, save

    taken_on, rates = machine(), contest(args.tianshou, args.rounds, args.seconds)
    save("tree", {"rates": rates}, taken_on)
    print(table(rates))
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
