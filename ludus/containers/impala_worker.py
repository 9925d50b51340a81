"""A worker of IMPALA: acts on its own copy of the weights, and submits unrolls to the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from ludus.containers.build import agents_per_environment, build_agent, choose_device, divide_environments
from ludus.containers.channel import Report, WorkerChannel
from ludus.containers.local import generators
from ludus.containers.loop import begin, collect
from ludus.containers.shared_channel import SharedWorkerChannel
from ludus.containers.threads import requested_threads, set_threads
from ludus.core.agent import Agent
from ludus.core.cache import UnrollWriter
from ludus.core.container import Container
from ludus.core.environment import EnvironmentManager
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.seat import Seat
from ludus.core.types import State
from ludus.logging.clock import Clock
from ludus.managers.make import make_manager
from ludus.networks.placement import device_of
from ludus.preprocess.rewards import make_reward_ops
from ludus.settings.settings import Settings, from_flat

WORKER_PHASES = ("environment", "acting", "waiting", "other")


class ImpalaWorker(Container):
    """Fills unrolls with the newest weights that the learner has published; it learns nothing itself."""

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        channel: WorkerChannel,
        rows: Rows,
        env_seed: int,
        noise_seed: int,
    ) -> None:
        self.agent, self.manager, self.channel, self._env_seed = agent, manager, channel, env_seed
        for module in agent.children():
            module.eval()
        manager.set_action_transform(agent.action_transform)
        if agent.generator is not None:
            agent.generator.manual_seed(noise_seed)
        self._warnings: list[str] = []
        manager.on_warning = self._warnings.append
        self._unrolls = [agent.make_unroll(rows, memory) for memory in channel.memory]
        self._unroll: UnrollWriter = self._unrolls[0]
        device = device_of(agent)
        noise = agent.make_noise(rows, torch.Generator(device).manual_seed(noise_seed))
        rewards = make_reward_ops(settings.preprocess.reward)
        self.seat = Seat(agent, self._unroll, noise, rows, device, preprocess_reward=rewards)
        self.seats = [self.seat]
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
        self._start_unroll(self._unrolls[slot])
        steps = collect(self)
        unroll = self._unroll.submit()._replace(number=self._submitted)
        self._submitted += 1
        self.channel.submit(unroll, self._report(steps))
        return steps

    def _take_weights(self) -> None:
        state = self.channel.acting_state(self._version)
        if state is not None:
            self.agent.load_acting_state(state.tensors)
            self.agent.schedule(state.progress)
            self._version = state.version

    def _start_unroll(self, unroll: UnrollWriter) -> None:
        last, self._unroll, self.seat.cache = self._unroll, unroll, unroll
        if self.seat.env_step is None:
            begin(self, self._env_seed)
        elif unroll is not last:
            unroll.continue_from(last)
        unroll.version = self._version

    def _report(self, steps: int) -> Report:
        seconds = {phase: spent / 1e9 for phase, spent in self.clock.nanoseconds.items()}
        self.clock.nanoseconds = dict.fromkeys(WORKER_PHASES, 0)
        first = self.seat.rows.start // agents_per_environment(self.manager)
        episodes = [episode._replace(row=episode.row + first) for episode in self.manager.episodes()]
        warnings = list(self._warnings)
        self._warnings.clear()
        return Report(steps, episodes, warnings, seconds)

    def state_dict(self) -> State:
        """Return what continues between two unrolls: environments, random numbers, hidden state and the last step."""
        if self.seat.env_step is None:
            return {}
        return {
            "manager": self.manager.state_dict(),
            "noise": self.seat.noise.state_dict(),
            "unroll": self._unroll.state_dict(),
            "hidden_state": dict(self.seat.hidden_state),
            "submitted": self._submitted,
            "torch": torch.get_rng_state(),
            "generators": {name: generator.get_state() for name, generator in generators(self.agent).items()},
        }

    def load_state_dict(self, state: State) -> str:
        """Restore it; return how the environments were restored."""
        self.manager.load_state_dict(state["manager"])
        self.seat.noise.load_state_dict(state["noise"])
        self._unroll.load_state_dict(state["unroll"])
        self.seat.env_step = self.manager.last_step().to(self.seat.device)
        self._unroll.amend(self.seat.env_step)
        self.seat.hidden_state = HiddenState(state["hidden_state"]).map(lambda x: x.to(self.seat.device))
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
    settings, rows = from_flat(given["settings"]), Rows(*given["rows"])
    env_seed, noise_seed = (
        stream_seed(given[name], given["worker"], given["incarnation"]) for name in ("env_seed", "noise_seed")
    )
    torch.manual_seed(noise_seed)  # for environments and networks that draw from torch's own generator
    environments = Rows(*(row // settings.env.agents for row in rows))
    joint = make_manager(settings.env, environments, preprocess=settings.preprocess)
    manager = divide_environments(joint, settings)
    try:
        device = choose_device(settings.impala.device)
        agent = build_agent(settings, manager.observation, manager.action, device)
        if settings.engine == "auto":
            agent.use_numpy()
        return ImpalaWorker(settings, agent, manager, channel, rows, env_seed, noise_seed)
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
