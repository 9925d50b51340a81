"""Collecting with environments in groups: one group steps while the actions of another are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors

if TYPE_CHECKING:
    from ludus.containers.loop import Loop


def alternate(loop: Loop) -> int:
    """One group of rows steps while the actions of the others are computed; in a fixed order, whoever is faster.

    The first group is asked for all, so that all step equally often: if each were, those already on their way when
    another makes learning due would step once more, and in a fixed order these are always the same.
    """
    agent, manager, cache, clock = loop.agent, loop.manager, loop.cache, loop.clock
    groups, decisions = manager.groups, 0
    steps = [loop.env_step.rows(rows) for rows in groups]
    states = [loop.hidden_state.rows(rows) for rows in groups]
    numbers: Tensors = {}

    def act(group: int) -> None:
        rows = groups[group]
        agent_step = agent.act(steps[group], states[group], {name: x[rows] for name, x in numbers.items()})
        cache.agent_write(agent_step, rows.start)
        manager.send(agent_step.action, group)
        states[group] = agent_step.state
        clock.lap("acting")

    numbers = loop.noise.next()
    for group in range(len(groups)):
        act(group)
    goes_on = True
    while goes_on:
        for group, rows in enumerate(groups):
            raw = manager.recv(group)
            clock.lap("environment")
            steps[group] = raw.to(loop.device)
            final = steps[group].final
            final_value = None if final is None else agent.final_value(final, states[group])
            cache.env_write(steps[group], states[group], rows.start, final_value)
            decisions += len(raw.real) if manager.all_real else int(np.count_nonzero(raw.real.numpy()))
            if group == 0 and (goes_on := cache.accepts(rows.start)):
                numbers = loop.noise.next()
            if goes_on:
                act(group)
    loop.env_step, loop.hidden_state = manager.last().to(loop.device), HiddenState.join(states)
    return decisions
