"""The worker process of a SubProcEnvManager, which steps its rows in shared memory. Needs no torch."""

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

STEP, MESSAGE, QUIT = 0, 1, 2  # orders to a worker
CACHE_LINE = 8  # int64 per cache line: processes that write to different lines do not slow each other down
INFO_BYTES = 4096  # bytes for the numeric infos of a row, as JSON
STEP_PREFIX = "step/"  # of the names of the arrays of a StepArrays
ACTION_PREFIX = "action/"
READY = 3  # index in the status, after those of EnvRows: whether the environments are made


def fields(step: Fields, action: Fields, parts: int, workers: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of all arrays that a manager and its workers share."""
    batch = step["reward"][0][0]
    return {
        **{STEP_PREFIX + name: (tuple(shape), dtype) for name, (shape, dtype) in step.items()},
        **{ACTION_PREFIX + name: (tuple(shape), dtype) for name, (shape, dtype) in action.items()},
        "orders": ((parts, CACHE_LINE), "int64"),  # written by the manager: number of the order, order
        "answers": ((parts, CACHE_LINE), "int64"),  # written by the workers: number of the last order done
        "status": ((workers, CACHE_LINE), "int64"),  # written by the workers: EnvRows.status, then READY
        "infos": ((batch, INFO_BYTES), "uint8"),
        "infos_size": ((batch,), "int64"),  # set by a worker, and back to 0 by the manager
    }


def run_worker(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Make the environments of a worker and carry out orders until QUIT.

    With several GPUs, the worker sees one of them, so that environments that use a GPU are spread over all.
    """
    if settings["gpu"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings["gpu"]
    block, config = Block(settings["fields"], fds["memory"]), EnvConfig(**settings["config"])
    status = block["status"][settings["worker"]]
    parts = [Part(block, config, status, fds, **part) for part in settings["parts"]]
    status[READY] = 1
    go, done, spin = fds["go"], fds["done"], settings["spin"]
    os.eventfd_write(done, 1)
    while True:
        if not (spin and _spin(parts, spin)):
            os.eventfd_read(go)
        for part in parts:
            order = part.order[0]
            if order == part.answer[0]:
                continue
            kind = part.order[1]
            if kind == STEP:
                part.step()
            elif kind == MESSAGE:
                write_message(part.message, part.answer_message(read_message(part.message)))
            else:
                with ExitStack() as stack:  # closes all, even if one fails
                    for each in parts:
                        stack.callback(each.rows.close)
                return
            part.answer[0] = order
            os.eventfd_write(done, 1)


def _spin(parts: list[Part], spin: int) -> bool:
    """Poll for an order for ``spin`` nanoseconds; return whether there is one."""
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
        status: NDArray[np.int64],
        fds: dict[str, int],
        number: int,
        start: int,
        count: int,
        name: str,
        branch: int,
    ) -> None:
        self.order, self.answer = memoryview(block["orders"][number]), memoryview(block["answers"][number])
        self.message = fds[f"letter {number}"]
        self._infos, self._sizes = block["infos"], block["infos_size"]
        self._actions = block.with_prefix(ACTION_PREFIX)
        self.rows = EnvRows(lambda: make_environment(config), start, count, name, config, branch, status[:READY])
        self.rows.attach(StepArrays.from_arrays(block.with_prefix(STEP_PREFIX)))

    def step(self) -> None:
        """Step all rows and write the infos of those that ended."""
        for row, info in self.rows.step(self._actions).items():
            text = _encode(info)
            self._infos[row, : len(text)] = np.frombuffer(text, np.uint8)
            self._sizes[row] = len(text)

    def answer_message(self, message: dict[str, Any]) -> Any:
        """Carry out a message (begin, snapshot or restore) and return the answer."""
        rows = self.rows
        rows.seed, rows.branch, rows.first_row = message["seed"], message["branch"], message["first_row"]
        if message["do"] == "begin":
            rows.reset(message["seed"], message["episodes"])
            return None
        if message["do"] == "snapshot":
            return [rows.snapshot(row) for row in rows.rows]
        return [rows.restore_row(row, *place) for row, place in zip(rows.rows, message["rows"], strict=True)]


def _encode(info: dict[str, float]) -> bytes:
    """Encode as many numbers as fit into INFO_BYTES."""
    text = json.dumps(info).encode()
    while len(text) > INFO_BYTES:
        info = dict(list(info.items())[: len(info) * INFO_BYTES // (len(text) + 1)])
        text = json.dumps(info).encode()
    return text
