"""The whole of training in two functions, shared by every container: ``collect`` and ``improve``."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ludus.core.agent import Agent, ExperienceCache, Updater
from ludus.core.environment import EnvironmentManager
from ludus.core.noise import Noise
from ludus.core.types import EnvStep, HiddenState, Tensors
from ludus.experience.validate import check_batch
from ludus.track.clock import Clock


class Loop(Protocol):
    """What the two functions need of a container."""

    agent: Agent
    manager: EnvironmentManager
    cache: ExperienceCache
    updater: Updater
    noise: Noise
    clock: Clock
    device: torch.device
    env_step: EnvStep  # what the environments said last, written to the cache already
    hidden_state: HiddenState  # before the agent acts on it


def begin(loop: Loop, seed: int) -> None:
    """Reset the environments and write what they say."""
    loop.env_step = place(loop.manager.reset(seed), loop.device)
    loop.hidden_state = loop.agent.initial_state(loop.manager.batch)
    loop.cache.env_write(loop.env_step, loop.hidden_state)


def collect(loop: Loop) -> int:
    """Act and step until the cache is ready; return the number of real decisions (a reset row's is none)."""
    agent, manager, cache, noise, clock = loop.agent, loop.manager, loop.cache, loop.noise, loop.clock
    step, state, decisions = loop.env_step, loop.hidden_state, 0
    try:
        while not cache.ready():
            said = agent.act(step, state, noise.next())
            cache.agent_write(said)
            clock.lap("acting")
            raw = manager.step(said.action)
            clock.lap("environment")
            step, state = place(raw, loop.device), said.state
            cache.env_write(step, state)
            decisions += manager.batch - int(np.count_nonzero(raw.first.numpy()))
    finally:  # whatever ends it, the state agrees with the cache
        loop.env_step, loop.hidden_state = step, state
    clock.lap("other")
    return decisions


def improve(loop: Loop) -> Tensors:
    """Learn while the cache is ready; return the metrics of the last learning."""
    metrics: Tensors = {}
    while loop.cache.ready():
        batch = loop.cache.read()
        check_batch(batch, loop.manager.action, getattr(loop.manager, "name", "The environment"))
        learned = loop.agent.learn(batch, loop.updater)
        if learned.priority is not None and batch.index is not None:
            loop.cache.feedback(batch.index, learned.priority)
        metrics = learned.metrics
    loop.clock.lap("learning")
    return metrics


def place(step: EnvStep, device: torch.device) -> EnvStep:
    """The step on the device where the agent is."""
    if device.type == "cpu":
        return step
    observation = {name: x.to(device, non_blocking=True) for name, x in step.observation.items()}
    return EnvStep(observation, *(x.to(device, non_blocking=True) for x in step[1:]))
