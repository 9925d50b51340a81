"""Environments for workers to import, including ones that fail."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """A random walk with nested observations, a mask in info and infos to log."""

    def __init__(self, length=7, many=0):
        part = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.observation_space = spaces.Dict(
            walk=part, more=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2)))
        )
        self.action_space = spaces.Discrete(4)
        self.length, self.many = length, many

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.normal(size=2), 0
        return self._observe()

    def step(self, action):
        self.x = self.x + (action + 1) * self.np_random.normal(size=2)
        self.t += 1
        observation, info = self._observe()
        ends = bool(self.np_random.random() < 1 / self.length)
        return observation, float(self.x[0]), ends, not ends and self.t >= 2 * self.length, info

    def _observe(self):
        mask = self.np_random.integers(0, 2, 4).astype(np.int8)
        mask[self.t % 4] = 1
        choice = int(self.np_random.integers(1, 4))
        more = {f"number {i}": i / 7 for i in range(self.many)}
        info = {"action_mask": mask, "x": self.x[0], "deep": {"t": self.t}, "odd": float("nan"), "name": "x", **more}
        return {"walk": self.x.copy(), "more": (choice, mask[:2])}, info


class Kept(Walk):
    """A walk that can be saved at any time, also before its first reset."""

    x, t = np.zeros(2), 0

    def snapshot(self):
        return {"x": self.x, "t": self.t}

    def restore(self, snapshot):
        self.x, self.t = snapshot["x"], snapshot["t"]


class Faulty(gymnasium.Env):
    """Fails as ``how`` says at step ``at`` of an episode, as often as the folder ``left`` has files.

    It observes [seed, step, process].
    """

    def __init__(self, how="raise", at=3, left="", call="step", length=6):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.how, self.at, self.left, self.call, self.length = how, at, Path(left) if left else None, call, length
        self._perhaps("constructor")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.t = seed, 0
        if seed:  # not the reset that only shows what the environment is like
            self._perhaps("reset")
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        if self.t == self.at:
            self._perhaps("step")
        return self._observe(), float(self.t), self.t >= self.length, False, {"torch": "torch" in sys.modules}

    def _observe(self):
        return np.array([self.seed or 0, self.t, os.getpid()], np.float64)

    def _perhaps(self, call):
        if call != self.call or self.left is None or os.environ.get("SPARED") == str(os.getpid()):
            return
        for token in sorted(self.left.iterdir()):
            with suppress(FileNotFoundError):  # another process took it
                token.unlink()
                self._fail()

    def _fail(self):
        print("about to fail", file=sys.stderr, flush=True)
        if self.how == "raise":
            raise ValueError("a bad day")
        if self.how == "exit":
            os._exit(7)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "crash":
            ctypes.string_at(0)
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "busy":
            while True:
                pass
        time.sleep(1000)


class Unsure(Faulty):
    """Not deterministic: its observation contains a number that does not depend on the seed."""

    def _observe(self):
        return np.array([self.seed or 0, self.t, time.perf_counter_ns()], np.float64)


class Sees(gymnasium.Env):
    """Observes the number of the GPU that its process sees; −1 if none is set."""

    def __init__(self):
        self.observation_space = spaces.Box(-1, 9, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def _gpu(self):
        return np.array([os.environ.get("CUDA_VISIBLE_DEVICES") or -1], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._gpu(), {}

    def step(self, action):
        return self._gpu(), 0.0, False, False, {}


class Slow(gymnasium.Env):
    """Takes ``seconds`` for each step and reset."""

    def __init__(self, seconds=0.1):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)
        self.seconds = seconds

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        time.sleep(self.seconds)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(self.seconds)
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Wide(gymnasium.Env):
    """Steps (not resets) give float64 in a Box of float32, and rewards are arrays without dimensions."""

    def __init__(self):
        self.observation_space, self.action_space = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, 2), np.array(0.5), False, False, {}
