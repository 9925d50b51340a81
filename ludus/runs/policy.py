"""A trained policy loaded from a run; it acts on raw observations and keeps normalizer and hidden state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludus.containers.build import (
    build_agent,
    build_evaluator,
    bytes_of,
    choose_device,
    outline_agent,
    refuse_nameless,
    refuse_too_large,
)
from ludus.containers.evaluate import Evaluation
from ludus.containers.threads import set_threads
from ludus.core.agent import Agent
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.step import EnvStep
from ludus.core.types import State
from ludus.managers.base import BatchManager
from ludus.managers.make import make_manager
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory, check_checkpoint_name
from ludus.settings.parse import format_value
from ludus.settings.settings import Settings, class_overrides, from_flat, to_flat
from ludus.settings.trust import read_run_settings

ROOM = 1 << 20  # bytes that a checkpoint may have beside what the networks need
OPTIONAL = "reward_scaler."  # acting needs none
SHAPING = (  # settings that decide the shapes of an agent's tensors, the likeliest cause of a difference first
    *(f"network.{name}" for name in ("name", "net1d", "net2d", "net3d", "net4d", "body", "head", "hidden")),
    *("network.lstm_size", "network.shared", "agent.normalize_observation", "agent.distribution"),
    *("env.id", "env.options", "env.backend", "env.mask", "agent.name"),
)


class Player:
    """A trained policy. ``act`` takes one observation of the environment, or a batch of them."""

    def __init__(
        self,
        settings: Settings[Any],
        state: State,
        meta: Mapping[str, Any],
        device: str = "auto",
        environment: Callable[..., Any] | None = None,
        world: BatchManager | None = None,
    ) -> None:
        refuse_nameless(settings.env.id, environment)
        self.settings, self.meta, self._make = settings, meta, environment
        self.device = choose_device(device)
        self._world = world or make_manager(settings.env, 1, environment=environment)
        quick = replace(settings, network=replace(settings.network, orthogonal=False))  # first weights are not needed
        self.agent = build_agent(quick, self._world.observation, self._world.action, self.device)
        load_agent(self.agent, state["agent"])
        self.agent.eval()
        if settings.engine == "auto":
            self.agent.use_numpy()
        self.agent.track_critic_state()
        self._world.set_action_transform(self.agent.action_transform)
        self._state, self._rows = HiddenState(), 0
        self._noise_rows = 0
        self._generator = torch.Generator(self.device).manual_seed(settings.seed)
        self._noise: Noise | None = None

    def __repr__(self) -> str:
        where = f"step {self.meta.get('step')}" if "step" in self.meta else "a checkpoint"
        return f"Player({self.settings.agent_name} on {self.settings.env.id}, {where})"

    def act(
        self,
        observation: Any,
        info: Mapping[str, Any] | None = None,
        *,
        first: Any = None,
        greedy: bool = True,
        state: HiddenState | None = None,
    ) -> Any:
        """Return the environment's action(s) for an observation or a batch.

        A recurrent policy remembers from call to call: say ``first=True`` (or a bool per row) where an episode begins,
        or call ``reset``. ``info`` is needed only by environments that give their action mask there.

        With ``state`` (what ``initial_state`` gave, or the call before) return the pair of action and next state
        instead, and remember nothing: for a server with many clients.
        """
        step, batched, rows = self._read(observation, info, first)
        if state is None:
            if rows != self._rows:
                self.reset(rows)
            before = self._state
        else:
            before = self._check_state(state, rows)
        agent_step = self.agent.act(step, before, None if greedy else self._draw(rows))
        action = self._world.format_actions({name: x.cpu() for name, x in agent_step.action.items()}, batched)
        if state is not None:
            return action, agent_step.state
        self._state = agent_step.state
        return action

    def initial_state(self, rows: int = 1) -> HiddenState:
        """The hidden state before the first observations of ``rows`` episodes: tensors ``[rows, …]`` by name.

        Empty for feed-forward networks. ``state.rows(slice)`` selects rows, ``HiddenState.concatenate`` joins states.
        """
        return self.agent.initial_state(rows)

    def value(
        self,
        observation: Any,
        info: Mapping[str, Any] | None = None,
        *,
        first: Any = None,
        state: HiddenState | None = None,
    ) -> Any:
        """Return the expected discounted return from an observation (a float) or a batch (an array ``[B]``).

        It is in the environment's rewards, as the critic estimates it: V for PPO, A2C and ACER; the largest Q for DQN;
        for DDPG, TD3 and SAC the smallest Q of the greedy action. Arguments are as in ``act``; nothing is remembered.
        """
        step, batched, rows = self._read(observation, info, first)
        value = self.agent.value(step, self._before(state, rows)).cpu().numpy()
        return value if batched else float(value[0])

    def distribution(
        self,
        observation: Any,
        info: Mapping[str, Any] | None = None,
        *,
        first: Any = None,
        state: HiddenState | None = None,
    ) -> Any:
        """Return the distribution that actions are drawn from, as a dict of arrays; arguments are those of ``value``.

        Discrete: ``probabilities`` of each choice; MultiDiscrete: ``probabilities`` ``[choices, options]``, 0 where a
        choice has fewer options; MultiBinary: ``probabilities`` of 1. Box: ``mean`` and ``std`` in the environment's
        units, before clipping to its bounds; ``mean_before_tanh`` and ``std_before_tanh`` for SAC and
        agent.distribution tanh; ``alpha`` and ``beta`` for beta, which lies in [0, 1] from low to high. A batch has one
        more dimension in front. Where actions are a Dict or Tuple, it has such a dict for each part.
        """
        step, batched, rows = self._read(observation, info, first)
        found = self.agent.distribution(step, self._before(state, rows))
        plain = {
            name: {key: x.cpu().numpy() if batched else x[0].cpu().numpy() for key, x in parts.items()}
            for name, parts in found.items()
        }
        return self._world.nest_actions(plain)

    def _read(self, observation: Any, info: Mapping[str, Any] | None, first: Any) -> tuple[EnvStep, bool, int]:
        """The observation as an agent gets it, whether it was a batch, and the number of rows."""
        arrays, batched = self._world.parse_observation(observation, info or {})
        for name, x in arrays.items():
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                element = np.argwhere(~np.isfinite(x if batched else x[0]))[0].tolist()
                raise UserError(
                    f'The observation "{name}" has a number that is not finite at {element}; fix what made it, for no '
                    "policy can act on it."
                )
        rows = len(next(iter(arrays.values())))
        begins = torch.as_tensor(
            np.broadcast_to(np.asarray(bool(first) if np.ndim(first) == 0 else first), (rows,)).copy()
        )
        zeros = torch.zeros(rows)
        step = EnvStep(
            {name: torch.from_numpy(x).to(self.device) for name, x in arrays.items()},
            zeros,
            zeros.bool(),
            zeros.bool(),
            begins.to(self.device),
            ~begins.to(self.device),
        )
        return step, batched, rows

    def _before(self, state: HiddenState | None, rows: int) -> HiddenState:
        """The hidden state to start from: the one given, the player's own, or the initial one."""
        if state is not None:
            return self._check_state(state, rows)
        return self._state if rows == self._rows else self.agent.initial_state(rows)

    def _check_state(self, state: HiddenState, rows: int) -> HiddenState:
        expected = self.agent.initial_state(rows)
        for name, x in expected.items():
            if name not in state or state[name].shape != x.shape:
                found = f"shape {tuple(state[name].shape)}" if name in state else "nothing"
                raise UserError(
                    f'The state given with {rows} observation{"s" * (rows > 1)} has {found} for "{name}", not shape '
                    f"{tuple(x.shape)}: begin with policy.initial_state({rows}), and give what the last call returned."
                )
        return HiddenState(state)

    def reset(self, rows: int = 1) -> None:
        """Reset the hidden state: the next observations begin episodes."""
        self._rows, self._state = rows, self.agent.initial_state(rows)

    def evaluate(self, episodes: int = 100, seed: int = 0, greedy: bool = True) -> Evaluation:
        """Evaluate on fresh episodes, other than those that selected the best checkpoint."""
        changed = replace(self.settings.evaluation, episodes=episodes, greedy=greedy)
        evaluator = build_evaluator(
            replace(self.settings, evaluation=changed, seed=seed), self.agent, self._make, branch=2
        )
        try:
            evaluation = evaluator.run(self.agent, self.device)
            assert evaluation is not None  # nothing stops it
            return evaluation
        finally:
            evaluator.close()

    def environment(self, render_mode: str | None = None) -> EnvironmentManager:
        """One environment that this policy can play, in this process."""
        manager = make_manager(self.settings.env, 1, render_mode, self._make)
        manager.set_action_transform(self.agent.action_transform)
        return manager

    def use_threads(self) -> None:
        """Set torch and BLAS to the number of threads that training chose; for a process that does nothing else."""
        set_threads(self.settings.threads or 1)

    def close(self) -> None:
        """Close the environment that translates observations and actions; may be called twice."""
        self._world.close()

    def _draw(self, rows: int) -> dict[str, torch.Tensor]:
        if self._noise is None or rows != self._noise_rows:
            self._noise, self._noise_rows = self.agent.make_noise(Rows.all(rows), self._generator), rows
        return self._noise.next()


def load(
    run: str | Path,
    checkpoint: str = "best",
    runs: str = "runs",
    device: str = "auto",
    environment: Callable[..., Any] | None = None,
    trust: bool = False,
    *,
    agent: str | type[Any] | None = None,
    network: str | type[Any] | None = None,
    wrappers: Sequence[str | Callable[..., Any]] | None = None,
) -> Player:
    """Load the policy of a run (a folder, or ``latest``): its ``best`` checkpoint, the ``latest``, or ``step_<n>``.

    ``environment`` makes one environment, where the run's own name for it cannot be imported; ``agent``, ``network``
    and ``wrappers`` are classes that stand for those of the run likewise. ``trust``: import what the run names, though
    this user did not make it on this machine.
    """
    given = class_overrides(agent, network, wrappers)
    unused = (*given, *(("env.id",) if environment else ()))
    directory = RunDirectory.open(run, runs)
    check_checkpoint_name(checkpoint)
    settings = from_flat(read_run_settings(directory.path, directory.config, trust, unused).flat | given)
    refuse_nameless(settings.env.id, environment)
    choose_device(device)  # a wrong name is told first
    world = make_manager(settings.env, 1, environment=environment)
    try:
        outline = outline_agent(settings, world.observation, world.action)
        with open_checkpoint(directory, checkpoint, outline) as found:
            refuse_other(outline, agent_of_checkpoint(found))
            return Player(settings, found.read("agent"), found.meta, device, environment, world)
    except BaseException:
        world.close()
        raise


@contextmanager
def open_checkpoint(directory: RunDirectory, name: str, agent: Agent | None = None) -> Iterator[checkpoints.Checkpoint]:
    """Open a checkpoint of a run by its name; one of a best ``agent`` is refused unread if it is larger than that."""
    if name == "best" and (best := directory.best_checkpoint()):
        opened = checkpoints.opened(best, None if agent is None else bytes_of(agent) + ROOM)
    elif name.startswith("step_"):
        opened = checkpoints.opened(directory.step_checkpoint(name))
    else:
        opened = checkpoints.opened_newest(directory, warnings.warn)
    with opened as found:
        yield found


def agent_of_checkpoint(checkpoint: checkpoints.Checkpoint) -> Mapping[str, Any]:
    """The names and shapes of an agent's tensors in a checkpoint; refuse one that holds no agent."""
    agent = checkpoint.outline.get("agent")
    if not isinstance(agent, dict) or not all(isinstance(name, str) for name in agent):
        raise UserError(f'The checkpoint "{checkpoint.folder}" holds no agent: take another checkpoint of this run.')
    return agent


def refuse_other(outline: Agent | None, saved: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another network, or one that is too large, before anything of it is read or built."""
    if outline is not None:
        if tensor := mismatch(outline, saved):
            raise _another_network(tensor)
        refuse_too_large(outline)


def initialise_from(agent: Agent, settings: Settings[Any], trust: bool = False) -> None:
    """Start from the weights and normalizers of the run ``settings.init_from``, to fine-tune."""
    directory = RunDirectory.open(settings.init_from, settings.runs)
    theirs = from_flat(read_run_settings(directory.path, directory.config, trust, unused=("env.",)).flat)
    with open_checkpoint(directory, "best") as found:
        if tensor := mismatch(agent, agent_of_checkpoint(found)):
            raise UserError(f'init_from is "{settings.init_from}", but {_difference(theirs, settings)} ({tensor}).')
        state = found.read("agent")
    counts = [name for name in state["agent"] if name.endswith("_extra_state")]  # those of a run that ended
    _load(agent, {name: x for name, x in state["agent"].items() if name not in counts})


def load_agent(agent: Agent, saved: Mapping[str, Any]) -> None:
    """Load parameters and buffers, refusing those of another network by name."""
    if tensor := mismatch(agent, saved):
        raise _another_network(tensor)
    _load(agent, saved)


def _another_network(tensor: str) -> UserError:
    return UserError(
        f"The checkpoint is of another network than the run's settings ask for: {tensor}; undo what was changed in its "
        "environment or its config.toml."
    )


def mismatch(agent: Agent, saved: Mapping[str, Any]) -> str:
    """The first tensor that a checkpoint has in another shape than the agent, and both shapes; nothing if all fit."""
    own = agent.state_dict()
    for name in sorted(name for name in own.keys() | saved.keys() if not name.startswith(OPTIONAL)):
        here, there = (tuple(getattr(x[name], "shape", ())) if name in x else "nothing" for x in (own, saved))
        if here != there:
            return f"{name} has shape {there} in the checkpoint and {here} here"
    return ""


def _load(agent: Agent, saved: Mapping[str, Any]) -> None:
    kept = agent.state_dict().keys() & saved.keys()
    agent.load_state_dict({name: saved[name] for name in kept}, strict=False)


def _difference(theirs: Settings[Any], ours: Settings[Any]) -> str:
    """Which setting makes the networks of two runs differ, and how to fix it."""
    there, here = to_flat(theirs), to_flat(ours)
    if theirs.network.shared == "auto":  # a run from before Ludus 0.2.0 does not say what was chosen
        here["network.shared"] = "auto"
    for key in SHAPING:
        if there.get(key) != here.get(key):
            others, own = format_value(there.get(key)), format_value(here.get(key))
            return f"{key} is {others} in that run and {own} here: give both the same"
    return "its environment has other observations or actions: use the environment of that run"
