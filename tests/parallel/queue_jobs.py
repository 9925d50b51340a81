"""Functions that put and take messages in child processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from ludus.parallel import shared_queue
from ludus.parallel.shared_queue import SharedQueue


def put(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Put numbered arrays of different sizes."""
    queue = SharedQueue.open("out", fds)
    for i in range(settings["count"]):
        queue.put({"from": settings["name"], "number": i, "x": np.full(1 + 500 * (i % 7), i)})


def answer(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Answer questions until there is a None."""
    questions, answers = SharedQueue.open("in", fds), SharedQueue.open("out", fds)
    while (question := questions.get()) is not None:
        answers.put(question * 2)


def die_within(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Put one message, and be killed in the middle of the next one."""
    queue = SharedQueue.open("out", fds)
    queue.put("whole")

    def write_half(fd: int, message: Any) -> None:
        os.pwrite(fd, b"half", 0)
        os.kill(os.getpid(), signal.SIGKILL)

    shared_queue.write_message = write_half
    queue.put("half")


def fail(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Put a message and raise."""
    SharedQueue.open("out", fds).put("last")
    raise ValueError("the pump is broken")
