"""Train under injected faults and check the guarantees of docs/robustness.md: ``make soak``.

``python -m benchmarks.soak`` runs all parts (about 20 minutes), ``python -m benchmarks.soak kills sockets``
some. What was found is printed as a table, kept in ``benchmarks/out/soak.json``, and the exit code is 1 where a promise
of docs/robustness.md is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import soak_faults, soak_kills, soak_workers
from benchmarks.protocol import OUT
from benchmarks.soak_watch import ROOT, Part, Sampler, Tell, all_gone, mark, start

FUZZ = "tests/faults/test_faults_fuzz.py"
TRIES, SEEDS = 2_000, 10  # of damaged runs
LOCAL = "CartPole-v1 --nb-step 30000 --checkpoint-every 5000 --evaluation.every 10000 --threads 1 --compile off --quiet"


def sockets(tell: Tell) -> Part:
    """Check every socket of local runs and an evaluation many times a second."""
    found, looks = set[str](), 0
    with tempfile.TemporaryDirectory(prefix="ludus-sockets-") as runs:
        flags = [*LOCAL.split(), "--runs", runs]
        kinds = [["train", *flags, *more] for more in soak_kills.BACKENDS.values()]
        for done, words in enumerate([*kinds, ["evaluate", "latest", "--runs", runs]]):
            tell(done / 3, f"ludus {words[0]}, {looks} looks")
            marked = mark()
            sampler = Sampler(marked, every=0.01)
            code = start(words, marked, Path(runs)).wait(soak_kills.PATIENCE)
            sampler.stop()
            all_gone(marked)
            found, looks = found | sampler.sockets, looks + sampler.looks
            if code:
                return Part({}, [f"ludus {' '.join(words)} ended with {code}"])
    figures = {"commands": 3, "looks": looks, "sockets bound, listening or with a name": len(found)}
    return Part(figures, [f"sockets: {sorted(found)}"] if found else [])


def fuzz(tell: Tell) -> Part:
    """Run the tests of damaged run folders with all seeds."""
    command = [sys.executable, "-m", "pytest", FUZZ, "-vv", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    passed, lines = 0, list[str]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            passed += "PASSED" in line
            tell(passed / SEEDS, f"{passed} of {SEEDS} seeds")
    each = int(re.findall(r"^TRIES = (\d+)", (ROOT / FUZZ).read_text(), re.MULTILINE)[0])
    figures = {"damaged runs read": passed * each, "an error message or a valid load, and nothing else": passed * each}
    return Part(figures, ["".join(lines[-40:])] if process.returncode or passed * each < TRIES else [])


class Plan(NamedTuple):
    """One part: its title, approximate duration and function."""

    title: str
    seconds: float
    run: Callable[[argparse.Namespace, Tell], Part]


PARTS = {
    "kills": Plan(
        "SIGKILL of a training at random moments, then resume",
        4.0,  # for each kill
        lambda args, tell: soak_kills.run(args.kills, args.seed, tell),
    ),
    "workers": Plan(
        "Worker kills in one training",
        0.5,  # for each kill
        lambda args, tell: soak_workers.run(soak_workers.ENVIRONMENTS, args.worker_kills, args.seed, tell),
    ),
    "impala": Plan(
        "Worker kills in one IMPALA run",
        0.5,  # for each kill
        lambda args, tell: soak_workers.run(soak_workers.IMPALA, args.worker_kills, args.seed, tell),
    ),
    "faults": Plan(
        "Training under a random injector of faults",
        60.0,  # for each minute
        lambda args, tell: soak_faults.run(args.minutes, args.seed, tell),
    ),
    "fuzz": Plan("Damaged run folders", 15.0, lambda args, tell: fuzz(tell)),
    "sockets": Plan("Sockets in local mode", 25.0, lambda args, tell: sockets(tell)),
}


class Progress:
    """Progress as one line that is overwritten, or as a line every ten seconds if there is no terminal."""

    def __init__(self, expected: dict[str, float]) -> None:
        self.left, self._told = expected, 0.0

    def follow(self, name: str) -> Tell:
        """Return the function to which a part reports its progress."""
        expected, began = self.left.pop(name), time.monotonic()

        def tell(share: float, words: str) -> None:
            now, live = time.monotonic(), sys.stderr.isatty()
            if now - self._told < (0.2 if live else 10.0):
                return
            self._told, spent = now, now - began
            whole = expected if share < 0.05 else spent / share
            left = max(0.0, whole - spent) + sum(self.left.values())
            line = f"{name}: {words}, {share:.0%}; about {left / 60:.1f} min left in all"
            print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)

        return tell

    def clear(self) -> None:
        """Clear the line."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def table(name: str, part: Part, seconds: float) -> str:
    lines = [f"### {PARTS[name].title} (`python -m benchmarks.soak {name}`, {seconds:.0f} s)", "", "| | |", "|---|---|"]
    for what, x in part.figures.items():
        lines.append(f"| {what} | {f'{x:,}' if isinstance(x, int) else x} |")
    lines += ["", "**Violated**: " + "; ".join(part.broken) if part.broken else "All guarantees hold.", ""]
    return "\n".join(lines)


def expected(args: argparse.Namespace) -> dict[str, float]:
    """Return the approximate seconds of each part."""
    times = {"kills": args.kills, "faults": args.minutes} | dict.fromkeys(("workers", "impala"), args.worker_kills)
    return {name: PARTS[name].seconds * times.get(name, 1) for name in args.parts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train under injected faults.")
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of times, processes and faults")
    parser.add_argument("--kills", type=int, default=100, help="number of runs to kill and resume")
    parser.add_argument("--worker-kills", type=int, default=200, help="number of workers to kill in one run")
    parser.add_argument("--minutes", type=float, default=3.0, help="duration of the part faults")
    parser.add_argument("--out", type=Path, default=OUT / "soak.json", help="file for the results")
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; choose from {', '.join(PARTS)}")
    args.parts = list(dict.fromkeys(args.parts)) or list(PARTS)
    progress, found, tables = Progress(expected(args)), {}, []
    for name in args.parts:
        began = time.monotonic()
        part = PARTS[name].run(args, progress.follow(name))
        seconds = time.monotonic() - began
        progress.clear()
        tables.append(table(name, part, seconds))
        found[name] = {"seconds": round(seconds, 1), **part._asdict()}
        print(f"{name}: {'VIOLATED' if part.broken else 'ok'} after {seconds:.0f} s", file=sys.stderr, flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.release()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"seed": args.seed, "machine": machine, "parts": found}, indent=1) + "\n")
    print("\n".join(tables))
    sys.exit(any(result["broken"] for result in found.values()))


if __name__ == "__main__":
    main()
