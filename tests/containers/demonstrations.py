"""Recorded episodes of hand-written experts in real environments."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludus.core.dataset import RecordedEpisode
from ludus.core.spec import Specs
from ludus.data.episodes import RowSteps, cut_into_episodes
from ludus.data.npz import save_npz
from ludus.environments.config import EnvConfig
from ludus.managers.make import make_manager

TOY = "ludus.environments.toy:"
Arrays = dict[str, Any]
Expert = Callable[[Arrays], Arrays]


def balance(seen: Arrays) -> Arrays:
    """An expert of CartPole-v1: 500 of 500 (linear in position, velocity, angle and angular velocity)."""
    return {"action": (seen["observation"] @ np.array([0.1, 0.3, 1.0, 1.0]) > 0).astype(np.int64)}


def aim(seen: Arrays) -> Arrays:
    """That of TargetEnv."""
    return {"action": seen["observation"][:, ::-1].copy()}


def obey(seen: Arrays) -> Arrays:
    """That of MaskedEnv."""
    return {"action": seen["observation"].argmax(-1)}


def mix(seen: Arrays) -> Arrays:
    """That of MixedActionEnv with ``more``."""
    x = seen["observation"]
    found = {"choice": x[:, :3].argmax(-1), "amount": x[:, 3:5].copy()}
    return found | {"switches": x[:, 5:7].astype(np.int8), "dials": x[:, 7:9].astype(np.int64)}


class Recall:
    """That of MemoryEnv, in one environment: it answers the cue that the first observation showed."""

    cue = 0

    def __call__(self, seen: Arrays) -> Arrays:
        """Answer at every step."""
        cues = seen["observation"][0, :-1]
        self.cue = int(cues.argmax()) if cues.any() else self.cue
        return {"action": np.array([self.cue])}


def record(environment: str, expert: Expert, episodes: int, *options: str, seed: int = 0) -> list[RecordedEpisode]:
    """Play whole episodes in one environment."""
    manager = make_manager(EnvConfig(id=environment, num=1, options=options), 1)
    manager.set_action_transform({})
    step, done = manager.reset(seed), 0
    seen: list[Arrays] = []
    acted: list[Arrays] = []
    flags: list[Arrays] = []
    while True:
        observation = {name: x.numpy().copy() for name, x in step.observation.items()}
        action = expert(observation)
        seen.append(observation)
        acted.append(action)
        names = ("reward", "terminated", "truncated", "first", "real")
        flags.append({name: getattr(step, name).numpy().copy() for name in names})
        done += len(manager.episodes())
        if done == episodes:
            break
        step = manager.step({name: torch.from_numpy(x) for name, x in action.items()})
    manager.close()
    parts: list[Any] = [
        {name: np.stack([x[name][0] for x in part]) for name in part[0]} for part in (seen, acted, flags)
    ]
    steps = RowSteps(parts[0], parts[1], **parts[2])
    return list(islice(cut_into_episodes(steps), episodes))


def record_to(path: Path, environment: str, expert: Expert, episodes: int, *options: str) -> str:
    """Write such episodes to a file; return its name."""
    save_npz(path, record(environment, expert, episodes, *options))
    return str(path)


def specs_of(environment: str, *options: str, global_state: bool = False) -> tuple[Specs, Specs]:
    """The observations and actions of an environment."""
    manager = make_manager(EnvConfig(id=environment, num=1, options=options, global_state=global_state), 1)
    manager.close()
    return manager.observation, manager.action
