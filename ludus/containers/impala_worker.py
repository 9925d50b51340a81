"""A worker of IMPALA: acts on its own copy of the weights, and submits unrolls to the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from ludus.containers.build import choose_device, divide_environments
from ludus.containers.channel import Report, WorkerChannel
from ludus.containers.loop import begin, collect
from ludus.containers.resumable import generators
from ludus.containers.roles import RolePart, build_agents, by_role
from ludus.containers.self_play import Pool, make_games
from ludus.containers.shared_channel import SharedWorkerChannel
from ludus.containers.team import members
from ludus.containers.threads import requested_threads, set_threads
from ludus.core.agent import Actor, Agent
from ludus.core.cache import Unroll
from ludus.core.container import Container
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.seat import Seat
from ludus.core.types import State, Tensors
from ludus.logging.clock import Clock
from ludus.managers.make import make_manager
from ludus.networks.placement import device_of
from ludus.preprocess.rewards import make_reward_ops
from ludus.settings.settings import Settings, from_flat

WORKER_PHASES = ("environment", "acting", "waiting", "other")


class SeatUnrolls(RolePart):
    """An agent in its seat, with an unroll for each slot of the channel."""

    def __init__(self, settings: Settings[Any], agent: Agent, role: str, rows: Rows, seed: int) -> None:
        self.agent, self.role, self.prefix = agent, role, f"{role}/" if settings.roles.agents else ""
        device = device_of(agent)
        noise = agent.make_noise(rows, torch.Generator(device).manual_seed(seed))
        rewards = make_reward_ops(settings.preprocess.reward)
        self.unroll = agent.make_unroll(rows)
        self.unrolls = [self.unroll]
        self.seat = Seat(agent, self.unroll, noise, rows, device, role=role, preprocess_reward=rewards)

    def use_memory(self, slots: Sequence[Tensors | None]) -> None:
        """Write the unrolls to the memory of the slots."""
        given = [None if memory is None else self.select(memory) for memory in slots]
        self.unrolls = [self.agent.make_unroll(self.seat.rows, memory) for memory in given]
        self.unroll = self.seat.cache = self.unrolls[0]

    def schedule(self, progress: float) -> None:
        """Set scheduled values from the progress of the run (0 to 1)."""
        self.agent.schedule(progress)
        for unroll in self.unrolls:
            unroll.schedule(progress)

    def continue_in(self, slot: int) -> None:
        """Start the unroll of a slot with the last observation of the one before."""
        last, self.unroll = self.unroll, self.unrolls[slot]
        self.seat.cache = self.unroll
        if self.seat.env_step is not None and self.unroll is not last:
            self.unroll.continue_from(last)


class ImpalaWorker(Container):
    """Fills unrolls with the newest weights that the learner has published; it learns nothing itself.

    With several roles, ``agent`` is a team, and what is exchanged with the host has the tensors of all roles.
    """

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        channel: WorkerChannel,
        environments: Rows,
        env_seed: int,
        noise_seed: int,
    ) -> None:
        self.pool: Pool | None = None
        if settings.self_play.every:
            manager = games = make_games(settings, agent, manager, environments)
            self.pool = games.pool
        self.agent, self.manager, self.channel, self._env_seed = agent, manager, channel, env_seed
        self.environments = environments
        manager.set_action_transform(agent.action_transform)
        self._warnings: list[str] = []
        manager.on_warning = self._warnings.append
        self._parts = make_seats(settings, agent, manager, environments, noise_seed)
        for number, part in enumerate(self._parts):
            for module in part.agent.children():
                module.eval()
            if part.agent.generator is not None:
                part.agent.generator.manual_seed(noise_seed + number)
            part.use_memory(channel.memory)
        self.seats = [part.seat for part in self._parts]
        self.clock: Clock = BeatingClock(channel.beat)
        self._version, self._submitted = 0, 0

    def run(self, nb_step: int, initial_step: int = 0) -> Self:
        """Fill and submit unrolls until ``nb_step`` steps of this worker; the host usually ends it before."""
        done = initial_step
        while done < nb_step:
            done += self.fill_unroll()
        return self

    def fill_unroll(self) -> int:
        """Fill and submit an unroll; return its environment steps."""
        slot = self.channel.next_slot(self.state_dict)
        self.clock.lap("waiting")
        self._take_weights()
        for part in self._parts:
            part.continue_in(slot)
            part.unroll.version = self._version
        if self.seats[0].env_step is None:
            begin(self, self._env_seed)
        steps = collect(self)
        tensors = {name: x for part in self._parts for name, x in part.named(part.unroll.submit().tensors).items()}
        unroll = Unroll(tensors, self.environments, self._version, self._submitted)
        self._submitted += 1
        self.channel.submit(unroll, self._report(steps))
        return steps

    def _take_weights(self) -> None:
        state = self.channel.acting_state(self._version)
        if state is None:
            return
        for part in self._parts:
            part.agent.load_acting_state(part.select(state.tensors))
            part.schedule(state.progress)
        if self.pool is not None and state.opponents is not None:
            self.pool.from_host(state.opponents)
        self._version = state.version

    def _report(self, steps: int) -> Report:
        seconds = {phase: spent / 1e9 for phase, spent in self.clock.nanoseconds.items()}
        self.clock.nanoseconds = dict.fromkeys(WORKER_PHASES, 0)
        first = self.environments.start
        episodes = [episode._replace(row=episode.row + first) for episode in self.manager.episodes()]
        warnings = list(self._warnings)
        self._warnings.clear()
        return Report(steps, episodes, warnings, seconds)

    def state_dict(self) -> State:
        """Return what continues between two unrolls: environments, random numbers, hidden state and the last step."""
        if self.seats[0].env_step is None:
            return {}
        return {
            "manager": self.manager.state_dict(),
            "noise": by_role(self._parts, lambda part: part.seat.noise.state_dict()),
            "unroll": by_role(self._parts, lambda part: part.unroll.state_dict()),
            "hidden_state": by_role(self._parts, lambda part: dict(part.seat.hidden_state)),
            "submitted": self._submitted,
            "torch": torch.get_rng_state(),
            "generators": {name: generator.get_state() for name, generator in generators(self.agent).items()},
        }

    def load_state_dict(self, state: State) -> str:
        """Restore it; return how the environments were restored."""
        self.manager.load_state_dict(state["manager"])
        last = self.manager.last_roles()
        for part in self._parts:
            seat = part.seat
            seat.noise.load_state_dict(part.own(state["noise"]))
            part.unroll.load_state_dict(part.own(state["unroll"]))
            seat.env_step = last[part.role].to(seat.device)
            part.unroll.amend(seat.env_step)
            saved = HiddenState(part.own(state["hidden_state"]))
            seat.hidden_state = saved.map(lambda x, device=seat.device: x.to(device))  # type: ignore[misc]
        self._submitted = state["submitted"]
        torch.set_rng_state(state["torch"])
        for name, generator in generators(self.agent).items():
            generator.set_state(state["generators"][name])
        return self.manager.restored

    def close(self) -> None:
        """Close the environments."""
        self.manager.close()


class BeatingClock(Clock):
    """A clock that also tells the host at every lap that the worker is alive."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__(WORKER_PHASES)
        self._beat = beat

    def lap(self, phase: str) -> None:
        """Add the time since the previous lap to ``phase``."""
        super().lap(phase)
        self._beat()


def make_seats(
    settings: Settings[Any], agent: Actor, manager: EnvironmentManager, environments: Rows, seed: int
) -> list[SeatUnrolls]:
    """Make the seat of every role; unrolls of all roles have the same number of steps."""
    agents = members(agent)
    if len(agents) > 1:
        match_unrolls(agents)
    return [
        SeatUnrolls(settings, member, role, environments.times(manager.roles[role].agents), seed + number)
        for number, (role, member) in enumerate(agents.items())
    ]


def match_unrolls(agents: Mapping[str, Agent]) -> None:
    """Let agents that can choose have unrolls as long as those of the others; refuse agents that differ."""

    def lengths() -> dict[str, int]:
        return {role: agent.make_unroll(Rows.all(1)).length for role, agent in agents.items()}

    before = lengths()
    for steps in before.values():
        for agent in agents.values():
            agent.unroll_steps = steps
        if set(lengths().values()) == {steps}:
            return
    first, *others = before.items()
    other = next(pair for pair in others if pair[1] != first[1])
    raise UserError(
        f"container is impala, but role {first[0]} has unrolls of {first[1]} steps, and role {other[0]} of {other[1]}; "
        f"give them the same length, as with --roles.{other[0]}.agent.rollout."
    )


def stream_seed(seed: int, worker: int, incarnation: int) -> int:
    """Return the seed of a worker's random numbers; those of the first worker are those of a local run.

    A replaced worker has other numbers than the one before it, so it does not play the same episodes again.
    """
    if worker == incarnation == 0:
        return seed
    return int(np.random.SeedSequence([seed, worker, incarnation]).generate_state(1)[0]) >> 1


def build_worker(given: dict[str, Any], channel: WorkerChannel) -> ImpalaWorker:
    """Build a worker in its process; ``given`` are its settings, rows and seeds."""
    set_threads(requested_threads() or 1)
    settings, environments = from_flat(given["settings"]), Rows(*given["rows"])
    env_seed, noise_seed = (
        stream_seed(given[name], given["worker"], given["incarnation"]) for name in ("env_seed", "noise_seed")
    )
    torch.manual_seed(noise_seed)  # for environments and networks that draw from torch's own generator
    joint = make_manager(settings.env, environments, preprocess=settings.preprocess)
    manager = divide_environments(joint, settings)
    try:
        agent: Any = build_agents(settings, manager, choose_device(settings.impala.device))
        if settings.engine == "auto":
            agent.use_numpy()
        return ImpalaWorker(settings, agent, manager, channel, environments, env_seed, noise_seed)
    except BaseException:
        manager.close()
        raise


def run_worker(given: dict[str, Any], fds: dict[str, int]) -> None:
    """Act in a worker process until the host ends it."""
    channel = SharedWorkerChannel(given, fds)
    worker = build_worker(given, channel)
    try:
        state = channel.saved_state()
        channel.ready("" if state is None else worker.load_state_dict(state))
        worker.run(sys.maxsize)
    finally:
        worker.close()
