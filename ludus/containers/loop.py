"""The training loop, shared by every container: ``collect`` experience, ``improve`` the agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ludus.containers.guard import Guard
from ludus.core.cache import ExperienceCache
from ludus.core.environment import RoleManager
from ludus.core.hidden_state import HiddenState
from ludus.core.seat import Seat
from ludus.core.step import EnvStep
from ludus.core.types import Tensors
from ludus.logging.clock import Clock


class Collector(Protocol):
    """What ``collect`` needs of a container."""

    @property
    def manager(self) -> RoleManager: ...

    @property
    def seats(self) -> Sequence[Seat]: ...  # one for each role

    clock: Clock


class Learner(Protocol):
    """What ``improve`` needs of a learner."""

    cache: ExperienceCache
    guard: Guard


class SeatRows:
    """The rows of one seat that are in one group of environments."""

    def __init__(self, seat: Seat, manager: RoleManager, group: int) -> None:
        environments, agents = manager.groups[group], seat.rows.size // manager.groups[-1].stop  # agents of each
        self.seat, self.rows = seat, slice(environments.start * agents, environments.stop * agents)
        self.start, self.whole = self.rows.start, len(manager.groups) == 1
        assert seat.env_step is not None, "begin comes before collect"
        self.step = seat.env_step if self.whole else seat.env_step.rows(self.rows)
        self.state = seat.hidden_state if self.whole else seat.hidden_state.rows(self.rows)

    def act(self, noise: Tensors) -> Tensors:
        """Act, and write the actions to the cache."""
        seat = self.seat
        noise = noise if self.whole else {name: x[self.rows] for name, x in noise.items()}
        agent_step = seat.agent.act(self.step, self.state, noise)
        seat.cache.agent_write(agent_step, self.start)
        self.state = agent_step.state
        return agent_step.action

    def write(self, raw: EnvStep) -> None:
        """Write the next environment step to the cache."""
        seat, self.step = self.seat, raw.to(self.seat.device)
        if seat.preprocess_reward is not None:
            self.step = self.step._replace(reward=seat.preprocess_reward(self.step.reward))
        final = self.step.final
        final_value = None if final is None else seat.agent.final_value(final, self.state)
        seat.cache.env_write(self.step, self.state, self.start, final_value)


def begin(loop: Collector, seed: int) -> None:
    """Reset the environments and write their first step."""
    steps = loop.manager.reset_roles(seed)
    for seat in loop.seats:
        seat.env_step = steps[seat.role].to(seat.device)
        seat.hidden_state = seat.agent.initial_state(seat.rows.size)
        for group in range(len(loop.manager.groups)):
            part = SeatRows(seat, loop.manager, group)
            seat.cache.env_write(part.step, part.state, part.start)


def collect(loop: Collector, agree: Callable[[bool], bool] = bool) -> int:
    """Act and step until the caches are ready to be learned from; return the number of real environment steps.

    With several groups, one steps while the actions of the next are computed, in a fixed order. Group 0 decides when to
    stop, so all groups step equally often. Several seats play different roles in the same environments; ``agree`` lets
    all ranks stop after the same step.
    """
    manager, seats, clock = loop.manager, loop.seats, loop.clock
    groups = range(len(manager.groups))
    parts = [[SeatRows(seat, manager, group) for seat in seats] for group in groups]
    noise: dict[str, Tensors] = {}
    count: int | Tensor = 0

    def act(group: int) -> None:
        actions: dict[str, Tensors] = {}
        for part in parts[group]:
            role = part.seat.role
            if group == 0:
                noise[role] = part.seat.noise.next()  # for all groups
            actions[role] = part.act(noise[role])
        clock.lap("acting")
        manager.send_roles(actions, group)

    for group in groups:
        act(group)
    goes_on = True
    while goes_on:
        for group in groups:
            steps = manager.recv_roles(group)
            clock.lap("environment")
            for part in parts[group]:
                part.write(steps[part.seat.role])
            count = count + manager.count_real(steps)
            if group == 0:
                goes_on = agree(all([part.seat.cache.accepts(part.start) for part in parts[0]]))
            if goes_on:
                act(group)
    for seat, *mine in zip(seats, *parts, strict=True):
        seat.env_step = mine[0].step if mine[0].whole else manager.last_roles()[seat.role].to(seat.device)
        seat.hidden_state = HiddenState.concatenate([part.state for part in mine])
    clock.lap("other")
    return int(count)


def improve(learner: Learner) -> tuple[Tensors, int]:
    """Learn while the cache is ready; return the metrics of the last update, and the number of updates."""
    metrics: Tensors = {}
    count = 0
    while learner.cache.agree(learner.guard.updater):  # ranks learn equally often
        if not count:  # later, there are no new steps
            learner.guard.agent.observe(learner.cache, learner.guard.updater)
        batch = learner.cache.read()
        learned = learner.guard.learn(batch)
        if learned.priority is not None and batch.index is not None:
            learner.cache.feedback(batch.index, learned.priority)
        metrics, count = learned.metrics, count + 1
    return metrics, count
