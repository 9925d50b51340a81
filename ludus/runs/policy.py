"""A trained policy loaded from a run, with its observation normalizer and hidden state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludus.containers.build import (
    build_evaluator,
    choose_device,
    evaluation_rows,
    refuse_nameless,
    refuse_too_large,
)
from ludus.containers.evaluate import Evaluation, Finished, summarize
from ludus.containers.roles import build_player, outline_player
from ludus.containers.self_play import play_pool
from ludus.containers.threads import set_threads
from ludus.core.agent import Agent
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import EnvStep
from ludus.core.types import State
from ludus.environments.multiagent import STATE
from ludus.managers.base import BatchManager
from ludus.managers.make import can_divide, make_manager
from ludus.parallel.resources import cores
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory, check_checkpoint_name
from ludus.runs.opponents import load_pool
from ludus.runs.translate import Translator
from ludus.settings.settings import Settings, class_overrides, from_flat
from ludus.settings.trust import read_run_settings

OPTIONAL = "reward_scaler."  # not needed for acting


class Player:
    """A trained policy; ``act`` takes one observation of the environment, or a batch of them."""

    def __init__(
        self,
        settings: Settings[Any],
        state: State,
        meta: Mapping[str, Any],
        device: str,
        environment: Callable[..., Any] | None,
        world: BatchManager,
        run: RunDirectory,
    ) -> None:
        self.settings, self.meta, self._make, self._run = settings, meta, environment, run
        self.device = choose_device(device)
        self._world, self._translator = world, Translator(world)
        # initial weights are overwritten
        quick = replace(settings, network=replace(settings.network, orthogonal=False))
        self.agent, learned = build_player(quick, self._world, self.device)
        self._learned = learned
        if tensor := mismatch(learned, state["agent"]):
            raise _another_network(tensor)
        load_tensors(learned, state["agent"])
        self.agent.eval()
        if settings.engine == "auto":
            self.agent.use_numpy()
        self.agent.track_critic_state()
        self._world.set_action_transform(self.agent.action_transform)
        named = {name: x for name, x in self.agent.named_modules() if isinstance(x, Network) and STATE in x.sees}
        self._see_state = list(named.values())  # networks
        self._critics = [network for name, network in named.items() if name.endswith("networks.critic")]
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
        reward: Any = None,
        greedy: bool = True,
        state: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the environment's action(s) for an observation or a batch.

        A recurrent policy keeps its hidden state between calls: pass ``first=True`` (or a bool per row) at the start of
        an episode, or call ``reset``. The same goes for the frames of a stack, the previous action and the previous
        reward, where the policy observes them (``preprocess.observation``); ``reward`` is that of the last step.
        ``info`` is only needed for environments with an action mask in it.

        With ``state`` (from ``initial_state`` or the previous call), return the pair of action and next state and keep
        nothing, for a server with many clients. Observations then have whole stacks and the previous step.
        ``policy.state`` is the state that the policy keeps itself.

        Several agents: observations of one world and ``info`` are dicts by agent, as the environment gives them, and so
        are the actions. Agents that are not given are absent. If a network that acts sees ``state`` and only the
        environment knows it, give it beside the agents.
        """
        given = observation
        step, batched, rows = self._read(observation, info, first, reward, state, keep=state is None)
        before = self._before(state, rows)
        if not greedy and (self._noise is None or rows != self._noise_rows):
            self._noise, self._noise_rows = self.agent.make_noise(Rows.all(rows), self._generator), rows
        noise = None if greedy or self._noise is None else self._noise.next()
        with self._needing_state(given):
            agent_step = self.agent.act(step, before, noise)
        action = self._of_given(given, self._translator.format_actions(agent_step.action, batched, keep=state is None))
        if state is not None:
            return action, agent_step.state
        self._rows, self._state = rows, agent_step.state
        return action

    def initial_state(self, rows: int = 1) -> HiddenState:
        """Return the hidden state at the start of ``rows`` episodes: tensors ``[rows, …]`` by name.

        Empty for feed-forward networks. ``state.rows(slice)`` selects rows, ``HiddenState.concatenate`` joins states.
        """
        return self.agent.initial_state(rows)

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """The hidden state after the last call: a copy, as arrays ``[rows, …]`` by name; empty before the first one.

        ``load_state`` continues with it, in another process too. Networks without recurrent pieces have none.
        """
        return {name: x.cpu().numpy().copy() for name, x in self._state.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the hidden state that ``state`` had; an empty one begins new episodes."""
        rows = len(next(iter(state.values()))) if state else 0
        self._rows, self._state = rows, self._check_state(state, rows).map(torch.clone)

    def value(
        self,
        observation: Any,
        info: Mapping[str, Any] | None = None,
        *,
        first: Any = None,
        reward: Any = None,
        state: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the expected discounted return from an observation (a float) or a batch (an array ``[B]``).

        It is the critic's estimate in the environment's units: V for PPO, A2C and ACER; the largest Q for DQN; the
        smallest Q of the greedy action for DDPG, TD3 and SAC. Arguments are as in ``act``; the hidden state is not
        changed.

        Several agents: a dict by agent, of those that are given; agents that learn together (MADDPG, VDN, QMIX) have
        one value for the world, which is that of the mean of the agents' rewards.
        """
        step, batched, rows = self._read(observation, info, first, reward, state)
        with self._needing_state(observation, of_critics=True):
            found = self.agent.value(step, self._before(state, rows))
        if isinstance(found, Tensor):
            return self._plain_value(found, batched)
        return self._of_given(observation, {agent: self._plain_value(x, batched) for agent, x in found.items()})

    def _plain_value(self, value: Tensor, batched: bool) -> Any:
        """Return values as an array or a float; refuse NaN of a critic that has missed a state."""
        array = value.cpu().numpy()
        if np.isnan(array).any() and self._lacks_state({}):  # a recurrent critic has not seen all states so far
            self._refuse_lack_of_state()
        return array if batched else float(array[0])

    def distribution(
        self,
        observation: Any,
        info: Mapping[str, Any] | None = None,
        *,
        first: Any = None,
        reward: Any = None,
        state: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the distribution that actions are sampled from, as a dict of arrays; arguments are as in ``value``.

        Discrete: ``probabilities`` of each choice; MultiDiscrete: ``probabilities`` ``[choices, options]``, padded with
        0; MultiBinary: ``probabilities`` of 1. Box: ``mean`` and ``std`` in the environment's units, before clipping to
        its bounds; ``mean_before_tanh`` and ``std_before_tanh`` for SAC and agent.distribution tanh; ``alpha`` and
        ``beta`` for beta, with support [0, 1] scaled to low and high; ``probabilities`` of values from low to high for
        discretized. Spatial: ``probabilities`` ``[H, W]``. A batch has one more leading dimension. For Dict
        and Tuple actions, there is one such dict per part, and for several agents one for each that is given.
        """
        step, batched, rows = self._read(observation, info, first, reward, state)
        with self._needing_state(observation):
            found = self.agent.distribution(step, self._before(state, rows))
        plain = {
            name: {key: x.cpu().numpy() if batched else x[0].cpu().numpy() for key, x in parts.items()}
            for name, parts in found.items()
        }
        return self._of_given(observation, self._translator.nest_actions(plain))

    def _of_given(self, observation: Any, found: Any) -> Any:
        """Leave out what was found for agents that are not given, and name the others as they are given."""
        if self._world.joint_env is None:
            return found
        return {agent: found[str(agent)] for agent in observation if str(agent) in found}

    def _read(
        self,
        observation: Any,
        info: Mapping[str, Any] | None,
        first: Any,
        reward: Any,
        state: Mapping[str, Any] | None = None,
        keep: bool = False,
    ) -> tuple[EnvStep, bool, int]:
        """Return the observation as the agent sees it, whether it is a batch, and the number of rows.

        Stacks of frames are kept for the next call if ``keep``, unless the caller keeps the ``state``.
        """
        stateless, info, lacks_state = state is not None, info or {}, self._lacks_state(observation)
        if self._world.joint_env is not None:
            observation, info = self._world.joint_env.assemble(observation, info)
        step, batched = self._translator.read_step(observation, info, first, reward, stateless, keep)
        if lacks_state and step.observation[STATE].is_floating_point():
            # NaN marks the missing state, also in a recurrent critic's hidden state
            step.observation[STATE] = torch.full_like(step.observation[STATE], torch.nan)
        return step.to(self.device), batched, len(step.first)

    def _lacks_state(self, observation: Any) -> bool:
        """Return whether ``state`` is missing that only the environment of several agents knows."""
        return self._world.joint_env is not None and self._world.joint_env.lacks_state(observation)

    @contextmanager
    def _needing_state(self, observation: Any, of_critics: bool = False) -> Iterator[None]:
        """Within the context, networks that see ``state`` refuse to run without it.

        Critics refuse only with ``of_critics``: while acting, a recurrent critic runs without its value being used.
        """
        needing = self._see_state if of_critics else [x for x in self._see_state if x not in self._critics]
        lacking = needing if self._lacks_state(observation) else []
        hooks = [network.register_forward_pre_hook(self._refuse_lack_of_state) for network in lacking]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _refuse_lack_of_state(self, *_: Any) -> None:
        raise UserError(
            f"{self._world.name}: the policy sees the state of the world here, which only the environment knows; give "
            'it in every call, beside the agents, as in policy.value({**observations, "state": env.state()}).'
        )

    def _before(self, state: Mapping[str, Any] | None, rows: int) -> HiddenState:
        """Return the given hidden state, or the stored one, or the initial one."""
        if state is not None:
            return self._check_state(state, rows)
        return self._state if rows == self._rows else self.agent.initial_state(rows)

    def _check_state(self, state: Mapping[str, Any], rows: int) -> HiddenState:
        """Return a state of tensors or arrays as tensors; refuse that of another network or number of rows."""
        expected = self.agent.initial_state(rows) if rows else HiddenState()
        for name in expected | dict(state):
            found, wanted = (f"shape {tuple(np.shape(x[name]))}" if name in x else "nothing" for x in (state, expected))
            if found != wanted:
                raise UserError(
                    f'The hidden state has {found} for "{name}", not {wanted}: start with policy.initial_state({rows}) '
                    "and pass what the last call returned."
                )
        return HiddenState({name: torch.as_tensor(state[name]).to(x) for name, x in expected.items()})

    def reset(self, rows: int = 1) -> None:
        """Reset what is kept between calls, such as the hidden state, at the start of ``rows`` episodes."""
        self._rows, self._state = rows, self.agent.initial_state(rows)
        self._translator.reset()

    def evaluate(self, episodes: int = 100, seed: int = 0, greedy: bool = True) -> Evaluation:
        """Evaluate on new episodes, different from those that selected the best checkpoint."""
        return summarize(self.play_rows(None, episodes, seed, greedy))

    def play_rows(self, rows: Rows | None, episodes: int, seed: int, greedy: bool) -> list[Finished]:
        """Play the episodes of an evaluation that are in these rows; None: all."""
        changed = replace(self.settings.evaluation, episodes=episodes, greedy=greedy)
        settings = replace(self.settings, evaluation=changed, seed=seed)
        if rows is not None and settings.env.backend == "subproc":  # its share of the processes
            workers = (settings.env.workers or cores()) * rows.size // rows.total
            settings = replace(settings, env=replace(settings.env, workers=max(1, workers)))
        evaluator, actor = build_evaluator(settings, self.agent, self._make, 2, rows), self.agent
        if settings.self_play.every and isinstance(self._learned, Agent):  # against the frozen selves of the run
            pool = load_pool(settings, self._learned, self._world, self._run)
            evaluator.wrap, actor = partial(play_pool, settings, pool), self._learned
        try:
            finished = evaluator.play(actor, self.device)
            assert finished is not None
            return finished
        finally:
            evaluator.close()

    def divide_rows(self, episodes: int, parts: int) -> list[Rows]:
        """Divide the rows of an evaluation into at most ``parts`` for ``play_rows``, one if they cannot be divided."""
        settings = replace(self.settings, evaluation=replace(self.settings.evaluation, episodes=episodes))
        total = evaluation_rows(settings)
        divisible = can_divide(settings.env, total, self._make, settings.preprocess) and not settings.self_play.every
        parts = min(parts, total) if divisible else 1
        return [Rows(total * part // parts, total * (part + 1) // parts, total) for part in range(parts)]

    @property
    def observation(self) -> Specs:
        """The specs of the observations that the policy sees."""
        return self._world.observation

    @property
    def action(self) -> Specs:
        """The specs of the environment's actions."""
        return self._world.action

    def environments(self, rows: Rows, branch: int) -> EnvironmentManager:
        """Create environments for this policy as in training; another ``branch`` gives other episodes."""
        settings = self.settings
        manager = make_manager(settings.env, rows, None, self._make, branch, settings.preprocess)
        manager.set_action_transform(self.agent.action_transform)
        return manager

    def environment(self, render_mode: str | None = None) -> EnvironmentManager:
        """Create one environment for this policy, in this process."""
        manager = _make_world(self.settings, self._make, render_mode)
        manager.set_action_transform(self.agent.action_transform)
        return manager

    def use_threads(self) -> None:
        """Set torch to the number of threads chosen in training, for the whole process."""
        set_threads(self.settings.threads or 1)

    def close(self) -> None:
        """Close the environment that translates observations and actions; may be called twice."""
        self._world.close()


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

    ``environment`` creates one environment, if the one named in the run cannot be imported; ``agent``, ``network`` and
    ``wrappers`` replace the classes named in the run in the same way. ``trust``: import the classes that the run names
    even if this user did not create it on this machine.
    """
    given = class_overrides(agent, network, wrappers)
    unused = (*given, "network_check.", *(("env.id",) if environment else ()))
    directory = RunDirectory.open(run, runs)
    check_checkpoint_name(checkpoint)
    settings = from_flat(read_run_settings(directory.path, directory.config, trust, unused).flat | given)
    refuse_nameless(settings.env.id, environment)
    choose_device(device)  # refuse a wrong name first
    world = _make_world(settings, environment)
    try:
        outline = outline_player(settings, world)
        with open_by_name(directory, checkpoint) as found:
            refuse_mismatch(outline, agent_of_checkpoint(found))
            return Player(settings, found.read("agent"), found.meta, device, environment, world, directory)
    except BaseException:
        world.close()
        raise


def _make_world(
    settings: Settings[Any], environment: Callable[..., Any] | None, render_mode: str | None = None
) -> BatchManager:
    """Make one environment of a run, in this process."""
    return make_manager(settings.env, 1, render_mode, environment, preprocess=settings.preprocess)


def open_by_name(directory: RunDirectory, name: str) -> AbstractContextManager[checkpoints.Checkpoint]:
    """Open the checkpoint ``best``, ``latest`` or ``step_<n>`` of a run; without a best one, the latest."""
    if name == "best" and (best := directory.best_checkpoint()):
        return checkpoints.open_checkpoint(best)
    if name.startswith("step_"):
        return checkpoints.open_checkpoint(directory.step_checkpoint(name))
    return checkpoints.open_newest(directory, warnings.warn)


def agent_of_checkpoint(checkpoint: checkpoints.Checkpoint) -> Mapping[str, Any]:
    """Return the agent's state in a checkpoint, with meta tensors; refuse a checkpoint without one."""
    agent = checkpoint.outline.get("agent")
    if not isinstance(agent, dict) or not all(isinstance(name, str) for name in agent):
        raise UserError(f'The checkpoint "{checkpoint.folder}" holds no agent: use another checkpoint of this run.')
    return agent


def refuse_mismatch(outline: nn.Module | None, saved: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another or a too large network before the network is built."""
    if outline is not None:
        if tensor := mismatch(outline, saved):
            raise _another_network(tensor)
        refuse_too_large(outline)


def _another_network(tensor: str) -> UserError:
    return UserError(
        f"The checkpoint is of another network than the settings of the run: {tensor}. Undo changes to its config.toml "
        "or its environment."
    )


def mismatch(agent: nn.Module, saved: Mapping[str, Any]) -> str:
    """Describe the first tensor with another shape in the checkpoint than in the agent; empty if all match."""
    own = agent.state_dict()
    names = (name for name in own.keys() | saved.keys() if not name.endswith("_extra_state"))  # counters
    for name in sorted(name for name in names if not name.startswith(OPTIONAL)):
        here, there = (tuple(getattr(x[name], "shape", ())) if name in x else "nothing" for x in (own, saved))
        if here != there:
            return f"{name} has shape {there} in the checkpoint and {here} here"
    return ""


def load_tensors(agent: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load those of the tensors that the agent has."""
    kept = agent.state_dict().keys() & saved.keys()
    agent.load_state_dict({name: saved[name] for name in kept}, strict=False)
