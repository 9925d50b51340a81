"""Kill runs at random times and resume them; the result must equal that of an uninterrupted run bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.soak_watch import LUDUS, Part, Tell, all_gone, kill_tree, left_behind, mark, named_memory, start
from ludus.core.errors import UserError
from ludus.runs.checkpoint import load, load_newest
from ludus.runs.folder import RunDirectory

TRAIN = """CartPole-v1 --nb-step 18000 --checkpoint-every 256 --log-every 500 --evaluation.every 4000
--evaluation.episodes 5 --agent.epochs 4 --agent.normalize-observation --agent.normalize-reward
--compile off --threads 1 --quiet"""
BACKENDS = {"vector": ["--env.backend", "vector"], "subproc": ["--env.backend", "subproc", "--env.workers", "2"]}
AT_ONCE = 2
TWICE = 5  # of so many resumes, one is killed too
BEYOND = 1.15  # moments are drawn up to so much more than the time of a run, as that varies
PATIENCE = 300.0  # seconds for any one command


class Case(NamedTuple):
    """One run to kill."""

    number: int
    backend: str
    tree: bool  # kill all of its processes, else only the trainer
    shares: list[float]  # of the time that a run takes, after which each of its commands is killed


class Outcome(NamedTuple):
    """The result of one run."""

    case: Case
    places: list[str]  # where the kills hit
    fingerprint: str
    left: int  # processes that outlived the trainer
    folder: Path


def fingerprint(run: Path) -> str:
    """Return a hash of a run's last state, metrics and best policy, without times."""
    directory = RunDirectory(run)
    state = {key: x for key, x in load_newest(directory, _fail)[0].items() if key != "metrics"}
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    lines = [{k: x for k, x in line.items() if k != "time" and not k.startswith("time/")} for line in lines]
    digest = hashlib.sha256()
    for part in (state, lines, *load(directory.best)):
        _feed(digest, part)
    return digest.hexdigest()


def _fail(warning: str) -> None:
    raise RuntimeError(warning)


def _feed(digest: Any, tree: Any) -> None:
    if isinstance(tree, dict):
        for key in sorted(tree, key=repr):
            digest.update(repr(key).encode())
            _feed(digest, tree[key])
    elif isinstance(tree, list | tuple):
        digest.update(f"[{len(tree)}".encode())
        for item in tree:
            _feed(digest, item)
    elif isinstance(tree, torch.Tensor | np.ndarray):
        array = np.ascontiguousarray(tree.numpy() if isinstance(tree, torch.Tensor) else tree)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    else:
        digest.update(repr(tree).encode())


def the_run(runs: Path) -> Path | None:
    """Return the run folder below ``runs``, if there is one."""
    try:
        return RunDirectory.open("latest", runs).path
    except UserError:
        return None


def command(backend: str, runs: Path, train: str = TRAIN) -> list[str]:
    """Return the next command: train, or resume if there is a run."""
    run = the_run(runs)
    return ["resume", str(run)] if run else ["train", *train.split(), *BACKENDS[backend], "--runs", str(runs)]


def where(runs: Path) -> str:
    """Return in which phase the run was killed, judged by its files."""
    run = the_run(runs)
    if run is None:
        return "before there was a run"
    if not (run / "log.txt").exists():
        return "before the first checkpoint"
    if any(run.rglob(".tmp-*")) or any(run.rglob(".old-*")):
        return "during a write"
    if "ended at step" in (run / "log.txt").read_text():
        return "after the last write"
    return "in training" if any(run.glob("checkpoints/step_*")) else "before the first checkpoint"


def finish(backend: str, runs: Path, train: str = TRAIN) -> Path:
    """Run to the end and return the run folder."""
    words = command(backend, runs, train)
    done = subprocess.run([*LUDUS, *words], cwd=runs, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode and "is complete" not in done.stderr:
        raise RuntimeError(f"ludus {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    run = the_run(runs)
    assert run is not None
    return run


def suffer(case: Case, folder: Path, seconds: dict[str, float], train: str = TRAIN) -> Outcome:
    """Start, kill, start again, and look at the end; a run that is over before it can be killed is done again.

    ``seconds`` says how long a run takes, and learns from those that take less.
    """
    places, left, again = list[str](), 0, random.Random(case.number)
    folder.mkdir(parents=True)
    for share in case.shares:
        ended, living = _kill(case, folder, share * seconds[case.backend], train)
        left += living
        while ended and not places:
            seconds[case.backend] = min(seconds[case.backend], ended)
            shutil.rmtree(folder)
            folder.mkdir()
            ended, living = _kill(case, folder, again.uniform(0, 1) * seconds[case.backend], train)
            left += living
        if not ended:  # else a resume that was to be killed too had done all that was left
            places.append(where(folder))
    return Outcome(case, places, fingerprint(finish(case.backend, folder, train)), left, folder)


def _kill(case: Case, folder: Path, moment: float, train: str) -> tuple[float, int]:
    """Start the next command and kill it; return the seconds if it ended before, and the surviving processes."""
    marked, began = mark(), time.monotonic()
    process = start(command(case.backend, folder, train), marked, folder)
    with suppress(subprocess.TimeoutExpired):
        process.wait(moment)
        return time.monotonic() - began, all_gone(marked)
    if case.tree:
        kill_tree(process, marked)
    else:
        process.kill()
        process.wait()
    return 0.0 if process.returncode == -signal.SIGKILL else time.monotonic() - began, all_gone(marked)


def references(folder: Path, train: str = TRAIN) -> tuple[dict[str, str], dict[str, float]]:
    """Return the hashes and durations of uninterrupted runs."""

    def run(backend: str) -> tuple[str, float]:
        (folder / backend).mkdir(parents=True)
        began = time.monotonic()
        done = finish(backend, folder / backend, train)
        return fingerprint(done), time.monotonic() - began

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(BACKENDS, pool.map(run, BACKENDS), strict=True))
    return {name: x for name, (x, _) in found.items()}, {name: x for name, (_, x) in found.items()}


def draw(count: int, seed: int) -> list[Case]:
    """Return cases of all kinds in turn, with times uniform over the duration of a run."""
    rng, cases = random.Random(seed), []
    for number in range(count):
        shares = [rng.uniform(0, BEYOND) for _ in range(2 if number % TWICE == TWICE - 1 else 1)]
        cases.append(Case(number, list(BACKENDS)[number % 2], tree=number // 2 % 2 == 0, shares=shares))
    return cases


def run(count: int, seed: int, tell: Tell) -> Part:
    """Kill ``count`` runs; each must end like an uninterrupted one."""
    folder, before, broken, hit = Path(tempfile.mkdtemp(prefix="ludus-kills-")), named_memory(), [], Counter[str]()
    tell(0.0, "two uninterrupted runs")
    expected, seconds = references(folder / "never killed")
    took = " and ".join(f"{x:.1f} ({name})" for name, x in seconds.items())
    same = left = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(suffer, case, folder / str(case.number), seconds) for case in draw(count, seed)]
        for done, future in enumerate(as_completed(waiting), 1):
            try:
                outcome = future.result()
            except Exception as error:
                broken.append(f"a killed run did not come to its end: {error}")
                continue
            hit.update(outcome.places)
            left += outcome.left
            if outcome.fingerprint == expected[outcome.case.backend]:
                same += 1
                shutil.rmtree(outcome.folder)
            else:
                broken.append(f"{outcome.case} hit {outcome.places} and ended otherwise, see {outcome.folder}")
            tell(done / count, f"{done} of {count} killed and resumed, {same} identical")
    stays = left_behind(before)
    if hit.total() < count:
        broken.append(f"only {hit.total()} kills hit a training that ran")
    if left:
        broken.append(f"{left} processes outlived their trainer by 10 s")
    if stays:
        broken.append(f"left in memory: {stays}")
    if not broken:
        shutil.rmtree(folder)
    figures = {
        "trainings killed and resumed": count,
        "SIGKILLs": hit.total(),
        "identical to the run never killed": f"{same} of {count}",
        **{f"killed {place}": n for place, n in hit.most_common()},
        "seconds of a run": took,
        "processes left behind": left,
        "semaphores and shared memory left behind": len(stays),
    }
    return Part(figures, broken)
