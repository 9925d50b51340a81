"""The whole of training in two functions, shared by every container: ``collect`` and ``improve``."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ludus.containers.alternate import alternate
from ludus.containers.guard import Guard
from ludus.core.agent import Agent
from ludus.core.cache import ExperienceCache
from ludus.core.environment import EnvironmentManager
from ludus.core.hidden_state import HiddenState
from ludus.core.noise import Noise
from ludus.core.step import EnvStep
from ludus.core.types import Tensors
from ludus.core.updater import Updater
from ludus.logging.clock import Clock


class Loop(Protocol):
    """What the two functions need of a container."""

    agent: Agent
    manager: EnvironmentManager
    cache: ExperienceCache
    updater: Updater
    noise: Noise
    clock: Clock
    guard: Guard
    device: torch.device
    env_step: EnvStep  # what the environments said last, written to the cache already
    hidden_state: HiddenState  # before the agent acts on it


def begin(loop: Loop, seed: int) -> None:
    """Reset the environments and write what they say."""
    loop.env_step = loop.manager.reset(seed).to(loop.device)
    loop.hidden_state = loop.agent.initial_state(loop.manager.batch)
    for rows in loop.manager.groups:
        loop.cache.env_write(loop.env_step.rows(rows), loop.hidden_state.rows(rows), rows.start)


def collect(loop: Loop) -> int:
    """Act and step while the cache takes more; return the number of real decisions (a reset row's is none)."""
    decisions = _together(loop) if len(loop.manager.groups) == 1 else alternate(loop)
    loop.clock.lap("other")
    return decisions


def _together(loop: Loop) -> int:
    """All rows step at once."""
    agent, manager, cache, noise, clock = loop.agent, loop.manager, loop.cache, loop.noise, loop.clock
    step, state, decisions = loop.env_step, loop.hidden_state, 0
    while True:
        agent_step = agent.act(step, state, noise.next())
        cache.agent_write(agent_step)
        clock.lap("acting")
        raw = manager.step(agent_step.action)
        clock.lap("environment")
        step, state = raw.to(loop.device), agent_step.state
        final_value = None if step.final is None else agent.final_value(step.final, state)
        cache.env_write(step, state, 0, final_value)
        decisions += manager.batch if manager.all_real else int(np.count_nonzero(raw.real.numpy()))
        if not cache.accepts(0):
            break
    loop.env_step, loop.hidden_state = step, state
    return decisions


def improve(loop: Loop) -> tuple[Tensors, int]:
    """Learn while the cache is ready; return the metrics of the last learning, and how many there were."""
    metrics: Tensors = {}
    count = 0
    while loop.cache.ready():
        batch = loop.cache.read()
        learned = loop.guard.learn(batch)
        if learned.priority is not None and batch.index is not None:
            loop.cache.feedback(batch.index, learned.priority)
        metrics, count = learned.metrics, count + 1
    loop.clock.lap("learning")
    return metrics, count
