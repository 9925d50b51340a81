"""Train for some minutes under random faults; after each fault the run must make further progress.

The part runs in a separate namespace if possible, with the runs on a small disk that can be filled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.soak_kills import the_run
from benchmarks.soak_watch import (
    ROOT,
    Part,
    Sampler,
    Tell,
    all_gone,
    kill_tree,
    last_step,
    left_behind,
    mark,
    named_memory,
    send,
    servers,
    start,
    workers,
)
from benchmarks.soak_workers import FDS, MEMORY
from ludus.runs.checkpoint import load_newest
from ludus.runs.folder import RunDirectory

TRAIN = """benchmarks.soak_worlds:Flaky --nb-step 1000000000 --env.backend subproc --env.workers 2 --env.timeout 1
--env.max-restarts 100000 --env.num 8 --agent.rollout 32 --log-every 256 --checkpoint-every 2000 --evaluation.every 4000
--evaluation.episodes 4 --threads 1 --compile off --quiet"""
INSIDE = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size=16m tmpfs "$0"'
PAUSE = (0.5, 2.0)  # seconds from one fault to the next
PATIENCE = 60.0  # seconds after which a training that gets no further counts as dead
STOPPED, REFUSED = 130, 2  # exit codes after SIGTERM, and after a sentence
TINY = 4096  # bytes, where the size of files is limited in place of a full disk


class Broken(Exception):
    """The run did not survive a fault."""


class Patient:
    """A run over many commands: train, then repeated resumes."""

    def __init__(self, folder: Path, small: bool, rng: random.Random) -> None:
        self.folder, self.small, self.rng, self.marked = folder, small, rng, mark()
        self.runs, self.errors = folder / "disk", folder / "stderr"
        self.faults, self.lost, self.worst = Counter[str](), 0, 0
        self.sampler = Sampler(self.marked)
        self.process: Any = None
        self.begin()

    @property
    def metrics(self) -> Path:
        """The file with its metrics."""
        return (the_run(self.runs) or self.runs) / "metrics.jsonl"

    def begin(self, *more: str) -> None:
        """Start the next command and wait for progress."""
        run = the_run(self.runs)
        before, at, said = last_step(self.metrics), self._saved(), self._log()
        words = ["resume", str(run), *more] if run else ["train", *TRAIN.split(), "--runs", str(self.runs)]
        with self.errors.open("w") as errors:
            self.process = start(words, self.marked, self.folder, errors)
        self.sampler.root = 0
        self.lost, self.worst = self.lost + max(0, before - at), max(self.worst, before - at)
        if run:  # what a killed run logged after its last checkpoint is there until then
            self.until(lambda: "Resumed" in self._log()[len(said) :], "say that it resumed")
        if not more:
            self.advance(at)
            self.sampler.root = self.process.pid

    def advance(self, beyond: int) -> None:
        """Wait until it has done more steps."""
        self.until(lambda: last_step(self.metrics) > beyond, f"get beyond step {beyond:,}")

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fail if the process ends or time runs out."""
        end = time.monotonic() + PATIENCE
        while not done():
            if self.process.poll() is not None:
                raise Broken(f"it ended with {self.process.returncode}: {self.errors.read_text()[-1000:]}")
            if time.monotonic() > end:
                raise Broken(f"it did not {what} in {PATIENCE:g} s")
            time.sleep(0.02)

    def _log(self) -> str:
        log = self.metrics.with_name("log.txt")
        return log.read_text() if log.exists() else ""

    def expect(self, code: int, said: str = "") -> None:
        """Wait for its end and check the exit code."""
        try:
            found = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"it did not end in {PATIENCE:g} s") from error
        text = self.errors.read_text()
        if found != code or said not in text:
            raise Broken(f"it ended with {found} in place of {code}: {text[-1000:]}")

    def _saved(self) -> int:
        run = the_run(self.runs)
        with suppress(Exception):
            return int(load_newest(RunDirectory(run), lambda _: None)[1]["step"]) if run else 0
        return 0

    def hit(self, among: Callable[[str, int], list[int]], number: int) -> None:
        """A worker, or the server that forks workers, is killed or hangs."""
        self.until(lambda: bool(among(self.marked, self.process.pid)), "have processes of its own")
        step = last_step(self.metrics)
        send([self.rng.choice(among(self.marked, self.process.pid))], number)
        self.advance(step + 512)

    def hold_trainer(self) -> None:
        """Stop the trainer for longer than the timeout of a worker."""
        step = last_step(self.metrics)
        send([self.process.pid], signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.1, 2.5))
        send([self.process.pid], signal.SIGCONT)
        self.advance(step + 512)

    def kill(self, tree: bool) -> None:
        """SIGKILL, then resume."""
        if tree:
            kill_tree(self.process, self.marked)
        else:
            self.process.kill()
            self.process.wait()
        if left := all_gone(self.marked):
            raise Broken(f"{left} processes outlived their trainer by 10 s")
        self.begin()

    def terminate(self) -> None:
        """SIGTERM, a clean exit, then a resume that repeats no step."""
        self.process.terminate()
        self.expect(STOPPED)
        step = last_step(self.metrics)
        if self._saved() < step:
            raise Broken(f"SIGTERM lost steps: {self._saved():,} are saved of {step:,}")
        self.begin()

    def fill_disk(self) -> None:
        """Fill the disk: an error message, and existing checkpoints are intact."""
        filler = self.runs / "filler"
        if self.small:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                for size in (1 << 16, 1):
                    with suppress(OSError):
                        while file.write(bytes(size)):
                            pass
        else:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (TINY, resource.RLIM_INFINITY))
        self.expect(REFUSED, "cannot be written")
        filler.unlink(missing_ok=True)
        self.begin()

    def end(self) -> None:
        """SIGTERM, then a resume to the end."""
        self.process.terminate()
        self.expect(STOPPED)
        self.begin("--nb-step", str(last_step(self.metrics) + 3000))
        self.expect(0)
        load_newest(RunDirectory(the_run(self.runs) or self.runs), _refuse)


def _refuse(warning: str) -> None:
    raise Broken(warning)


def faults(patient: Patient) -> dict[str, tuple[int, Callable[[], None]]]:
    """Return the faults and their weights."""
    return {
        "SIGKILL of a worker": (6, lambda: patient.hit(workers, signal.SIGKILL)),
        "SIGTERM of a worker": (2, lambda: patient.hit(workers, signal.SIGTERM)),
        "a worker hangs (SIGSTOP)": (3, lambda: patient.hit(workers, signal.SIGSTOP)),
        "SIGKILL of the fork server": (2, lambda: patient.hit(servers, signal.SIGKILL)),
        "the trainer is held (SIGSTOP, SIGCONT)": (3, patient.hold_trainer),
        "full disk, then resume": (2, patient.fill_disk),
        "SIGKILL of all processes, then resume": (2, lambda: patient.kill(tree=True)),
        "SIGKILL of the trainer, then resume": (2, lambda: patient.kill(tree=False)),
        "SIGTERM, then resume": (2, patient.terminate),
    }


def soak(minutes: float, seed: int, folder: Path, small: bool, tell: Tell) -> Part:
    """Inject faults until the time is over, each kind once before any is repeated."""
    before, rng, broken, survived = named_memory(), random.Random(seed), list[str](), 0
    (folder / "disk").mkdir(exist_ok=True)
    began, patient = time.monotonic(), None
    try:
        patient = Patient(folder, small, rng)
        kinds = faults(patient)
        first = rng.sample(list(kinds), len(kinds))
        while (now := time.monotonic() - began) < 60 * minutes:
            tell(now / (60 * minutes), f"{survived} of {patient.faults.total()} faults survived")
            time.sleep(rng.uniform(*PAUSE))
            name = first.pop() if first else rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
            patient.faults[name] += 1
            kinds[name][1]()
            survived += 1
        patient.end()
    except Broken as error:
        broken.append(f"{error} (after: {patient.faults if patient else 'nothing'})")
    finally:
        if patient is not None:
            patient.sampler.stop()
            if patient.process.poll() is None:
                kill_tree(patient.process, patient.marked)
    left, stays = all_gone(patient.marked) if patient else 0, left_behind(before)
    if left or stays:
        broken.append(f"left behind: {left} processes, {stays}")
    return Part(_figures(patient, survived, broken) | {
        "disk": "a tmpfs of 16 MB, filled" if small else "limit of the size of files (no tmpfs can be mounted here)",
        "processes left behind": left,
        "semaphores and shared memory left behind": len(stays),
    }, broken)  # fmt: skip


def _figures(patient: Patient | None, survived: int, broken: list[str]) -> dict[str, Any]:
    if patient is None:
        return {}
    log = (patient.metrics.parent / "log.txt").read_text()
    raised, left = len(re.findall("step raised ValueError: a part of", log)), log.count("ended with exit code 3")
    fds, memory = patient.sampler.growth()
    if fds > FDS or memory > MEMORY:
        broken.append(f"descriptors grew by {fds:g}, memory by {memory:.1f} MB")
    if patient.sampler.sockets:
        broken.append(f"sockets that others could reach: {sorted(patient.sampler.sockets)}")
    return {
        "faults injected": patient.faults.total() + raised + left,
        "survived": survived + raised + left,
        **dict(patient.faults.most_common()),
        "the environment raises": raised,
        "the environment ends its process": left,
        "steps in the end": last_step(patient.metrics),
        "steps done again after a kill or a full disk": f"{patient.lost:,} (at most {patient.worst:,} at once)",
        "descriptors of a trainer grew by": f"{fds:g} (allowed: {FDS})",
        "memory of a trainer grew by": f"{memory:.1f} MB (allowed: {MEMORY:g})",
        "sockets that others could reach": len(patient.sampler.sockets),
    }


def run(minutes: float, seed: int, tell: Tell) -> Part:
    """Run the part in a separate namespace if possible."""
    with tempfile.TemporaryDirectory(prefix="ludus-faults-") as name:
        disk = Path(name) / "disk"
        disk.mkdir()
        try:
            small = subprocess.run([*INSIDE, MOUNT, str(disk)], capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            small = False
        own = [sys.executable, "-m", "benchmarks.soak_faults", str(minutes), str(seed), name, *["--small"] * small]
        before = [*INSIDE, f'{MOUNT} && exec "$@"', str(disk)] if small else []
        found: dict[str, Any] = {}
        with subprocess.Popen([*before, *own], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = json.loads(line)
                if "tell" in found:
                    tell(*found["tell"])
        if process.returncode or "figures" not in found:
            return Part({}, [f"the injector itself ended with {process.returncode}"])
        return Part(found["figures"], found["broken"])


def main() -> None:
    parser = argparse.ArgumentParser(description="The injector, as `python -m benchmarks.soak faults` starts it.")
    parser.add_argument("minutes", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="the folder's disk is small and may be filled")
    args = parser.parse_args()

    def tell(share: float, words: str) -> None:
        print(json.dumps({"tell": [share, words]}), flush=True)

    part = soak(args.minutes, args.seed, args.folder, args.small, tell)
    print(json.dumps(part._asdict()), flush=True)


if __name__ == "__main__":
    os.environ.pop("DISPLAY", None)
    main()
