"""Functions that the tests call in process pools."""

from __future__ import annotations

import os
import signal
import sys
import time

from ludus.core.errors import UserError


def double(item):
    return {"twice": item["x"] * 2, "name": item["name"], "worker": os.getpid()}


def pid(item):
    return os.getpid()


def fail_at_three(item):
    print("a last word", file=sys.stderr)
    if item == 3:
        raise ValueError("this is wrong")
    return item


def mistake(item):
    raise UserError("Set x to 1.")


def kill_itself(item):
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(item):
    time.sleep(item)


def return_object(item):
    return object()


class Context:
    def __init__(self, worker):
        self.worker, self.calls = worker, 0


def count_calls(context, item):
    context.calls += 1
    return [context.worker, context.calls, item]


def make_nothing(worker):
    raise ValueError(f"no context for worker {worker}")
