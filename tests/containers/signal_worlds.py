"""Environments in the training process that hang after they asked it to stop, as Ctrl-C does."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv


class Hangs(CartPoleEnv):
    """Hangs at the step ``at`` of its life if the file ``once`` is there, which it removes.

    ``how``: asleep, c (in a call that no signal interrupts) or again (with a second signal).
    """

    def __init__(self, at: int = 40, once: str = "", how: str = "asleep", render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.at, self.once, self.how, self.count = at, Path(once), how, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == self.at and self.once.is_file():
            self.once.unlink()
            os.kill(os.getpid(), signal.SIGINT)
            self.hang()
        return super().step(action)

    def hang(self) -> None:
        if self.how == "c":  # a lock that is held: no signal wakes it
            mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        if self.how == "again":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)
