"""What an environment worker does: it steps its rows in shared memory whenever it is told to. Needs no torch."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.environments.config import EnvConfig
from ludus.environments.gym import make_environment
from ludus.environments.rows import EnvRows, StepArrays
from ludus.parallel.message import read_message, write_message
from ludus.parallel.shared_memory import Block, Fields

STEP, MESSAGE, QUIT = 0, 1, 2  # what a worker can be told to do
CACHE_LINE = 8  # int64 per cache line: what one process writes shares no line with what another writes
INFO_BYTES = 4096  # bytes for the numeric infos of a row, as JSON
STEP_PREFIX = "step/"  # names of the arrays of a StepArrays start so, those of actions as below
ACTION_PREFIX = "action/"
READY = 3  # the place after those that the rows themselves write: whether the environments are made


def fields(step: Fields, action: Fields, parts: int, workers: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shared memory of a manager and its workers."""
    batch = step["reward"][0][0]
    return {
        **{STEP_PREFIX + name: (tuple(shape), dtype) for name, (shape, dtype) in step.items()},
        **{ACTION_PREFIX + name: (tuple(shape), dtype) for name, (shape, dtype) in action.items()},
        "orders": ((parts, CACHE_LINE), "int64"),  # by the manager: number of the order, what to do
        "answers": ((parts, CACHE_LINE), "int64"),  # by the workers: number of the last order done
        "status": ((workers, CACHE_LINE), "int64"),  # by the workers: what EnvRows.where has, then ready
        "infos": ((batch, INFO_BYTES), "uint8"),
        "infos_size": ((batch,), "int64"),  # set by a worker, back to 0 by the manager once it has read them
    }


def run_worker(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Make the environments of one worker's parts, say so, and do as told until told to quit.

    Where there are several GPUs it sees one of them, so that environments which use one do not all crowd the first.
    """
    if settings["gpu"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings["gpu"]
    block, config = Block(settings["fields"], fds["memory"]), EnvConfig(**settings["config"])
    place = block["status"][settings["worker"]]
    parts = [Part(block, config, place, fds, **part) for part in settings["parts"]]
    place[READY] = 1
    go, done, spin = fds["go"], fds["done"], settings["spin"]
    os.eventfd_write(done, 1)
    while True:
        if not (spin and _comes(parts, spin)):
            os.eventfd_read(go)
        for part in parts:
            order = part.order[0]
            if order == part.answer[0]:
                continue
            told = part.order[1]
            if told == STEP:
                part.step()
            elif told == MESSAGE:
                write_message(part.letter, part.obey(read_message(part.letter)))
            else:
                _close(parts)
                return
            part.answer[0] = order
            os.eventfd_write(done, 1)


def _comes(parts: list[Part], spin: int) -> bool:
    """Look for an order for a moment; return whether there is one."""
    limit = time.perf_counter_ns() + spin
    while time.perf_counter_ns() < limit:
        for part in parts:
            if part.order[0] != part.answer[0]:
                return True
    return False


class Part:
    """The rows of one worker in one group."""

    def __init__(
        self,
        block: Block,
        config: EnvConfig,
        place: NDArray[np.int64],
        fds: dict[str, int],
        number: int,
        start: int,
        count: int,
        name: str,
        branch: int,
    ) -> None:
        self.order, self.answer = memoryview(block["orders"][number]), memoryview(block["answers"][number])
        self.letter = fds[f"letter {number}"]
        self._infos, self._sizes = block["infos"], block["infos_size"]
        arrays = block.arrays
        self._actions = {
            key.removeprefix(ACTION_PREFIX): x for key, x in arrays.items() if key.startswith(ACTION_PREFIX)
        }
        self._rows = EnvRows(lambda: make_environment(config), start, count, name, config.mask, branch, place[:READY])
        memory = {key.removeprefix(STEP_PREFIX): x for key, x in arrays.items() if key.startswith(STEP_PREFIX)}
        self._rows.attach(StepArrays.from_arrays(memory))

    def step(self) -> None:
        """Step all rows, and leave the infos of those that ended where the manager looks for them."""
        for row, info in self._rows.step(self._actions).items():
            text = _encode(info)
            self._infos[row, : len(text)] = np.frombuffer(text, np.uint8)
            self._sizes[row] = len(text)

    def close(self) -> None:
        """Close the environments."""
        self._rows.close()

    def obey(self, letter: dict[str, Any]) -> Any:
        """Do what a letter says; return the answer."""
        rows = self._rows
        rows.branch, rows.first_row = letter["branch"], letter["first_row"]
        if letter["do"] == "begin":
            rows.reset(letter["seed"], letter["episodes"])
            return None
        if letter["do"] == "snapshot":
            return [rows.snapshot(row) for row in rows.rows]
        rows.seed = letter["seed"]
        return [rows.restore_row(row, *place) for row, place in zip(rows.rows, letter["rows"], strict=True)]


def _close(parts: list[Part]) -> None:
    with ExitStack() as stack:  # one that fails does not keep the others from closing
        for part in parts:
            stack.callback(part.close)


def _encode(info: dict[str, float]) -> bytes:
    """JSON of as many of the numbers as there is room for."""
    text = json.dumps(info).encode()
    while len(text) > INFO_BYTES:
        info = dict(list(info.items())[: len(info) * INFO_BYTES // (len(text) + 1)])
        text = json.dumps(info).encode()
    return text
