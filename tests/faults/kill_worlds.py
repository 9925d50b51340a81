"""An environment that ends its worker in every way, for workers to import."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces


class Mortal(gymnasium.Env):
    """At the third step of an episode it takes a file out of the folder ``left``, and fails as the file's name says."""

    def __init__(self, left=""):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)
        self.left = Path(left)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.count = seed, 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == 3:
            for token in sorted(self.left.iterdir()):
                with suppress(FileNotFoundError):  # another process took it
                    token.unlink()
                    self.fail(token.name.partition("-")[0], action)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), 1.0, self.count > 9, False, {}

    def fail(self, how, action):
        print(f"{how} at seed {self.seed}, action {action}", file=sys.stderr, flush=True)
        if how == "raise":
            raise ValueError("the wheel fell off")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)


class Serves(Mortal):
    """Starts a process when it is made, which it never ends, and notes it in the folder ``note``."""

    def __init__(self, left="", note=""):
        super().__init__(left)
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        (Path(note) / str(process.pid)).touch()
        self.process = process
