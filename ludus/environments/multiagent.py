"""Adapt an environment with several agents to one Gymnasium environment per world. Needs no torch.

A PettingZoo ``ParallelEnv``, an ``AECEnv`` (through PettingZoo's converters) or a plain class with ``possible_agents``,
``reset`` and ``step`` becomes a ``JointEnv``. For agents called agent_0, agent_1, … its names are:

- observations ``agent_0/observation`` (``agent_0/<key>`` for each key of a Dict), masks ``action_mask/agent_0``;
- actions ``agent_0`` (``agent_0/<key>`` for each key of a Dict);
- turn-based games: ``agent_0/turn``, 1 if it is the agent's turn and 0 if it waits;
- results of the last step ``reward/agent_0`` and ``status/agent_0``, which networks do not see;
- ``state``, the state of the world, with ``env.global_state``.

``managers/roles.py`` divides this into rows of single agents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.environments.problems import describe_result
from ludus.environments.spaces import ResultSpace

# status: in the world; left it in this step, in two ways; not in it; entered in this step, later than at the reset
ACTIVE, TERMINATED, TRUNCATED, ABSENT, ENTERED = range(5)
PRESENT = (ACTIVE, ENTERED)
GOES_ON = (*PRESENT, TRUNCATED)  # in the world, or would be but for a time limit
REWARD, STATUS, STATE, OBSERVATION, TURN = "reward", "status", "state", "observation", "turn"


def has_agents(env: Any) -> bool:
    """Return whether an object is an environment with several agents."""
    return all(hasattr(env, part) for part in ("possible_agents", "reset", "step"))


class JointEnv(gymnasium.Env[Any, Any]):
    """All agents of a world as one: Dicts of their observations and actions, the mean of their rewards.

    An episode ends when no agent is left. The reward is divided by the number of all agents, so that the return of an
    episode is the mean of theirs; ``info`` has each one's return so far, of which the last is logged.

    Where it is not an agent's turn, its observation is a real one, and its mask allows the first choice only, which is
    not used: so the choice has a log-probability of 0 and no gradient, and rewards of other players' moves reach it
    through n-step returns, GAE and bootstrapping like those of its own. The same goes for an agent whose mask allows
    nothing. In PettingZoo's turn-based games each agent also observes ``turn``: the same board may be seen by who is to
    move and by who waits, and has another value. An agent that is not in the world keeps its last observation, but in
    ``state``, where it is made of all observations, its part is zero.
    """

    def __init__(self, env: Any, name: str, mask: str = "action_mask", global_state: bool = False) -> None:
        self.env, self._turns = to_parallel(env, name)
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)
        self._name, self._mask = name, mask
        self._ids = {str(agent): agent for agent in self.env.possible_agents}
        taken = {REWARD, STATUS, STATE, TURN, mask}
        if not self._ids or any("/" in agent or agent in taken for agent in self._ids):
            raise UserError(
                f'{name}: possible_agents is {list(self._ids)}; give at least one name, without "/" and other than '
                f"{', '.join(filter(None, sorted(taken)))}."
            )
        observed = {agent: self._space("observation", id) for agent, id in self._ids.items()}
        self._choices = {agent: self._space("action", id) for agent, id in self._ids.items()}
        # agents with a mask of the environment, and with any: in turn-based games, who waits has a mask
        self._given_masks = {
            agent for agent, x in observed.items() if isinstance(x, spaces.Dict) and mask and mask in x.spaces
        }
        self._masked = self._given_masks | {
            agent
            for agent, space in self._choices.items()
            if mask and self._turns is not None and isinstance(space, spaces.Discrete)
        }
        self._parts = {agent: self._observed_parts(space) for agent, space in observed.items()}
        self._blank = {agent: blank_value(space) for agent, space in self._parts.items()}
        self._knows_masks = False  # whether a reset has shown which agents have a mask in their info
        self._own_state: bool | None = None  # whether the environment has a state; None: it is not observed
        whole: OrderedDict[str, spaces.Space[Any]] = OrderedDict(self._parts)
        whole[REWARD] = _dict({agent: ResultSpace(agent, -np.inf, np.inf, np.float32) for agent in self._ids})
        whole[STATUS] = _dict({agent: ResultSpace(agent, 0, ENTERED, np.uint8) for agent in self._ids})
        if global_state:
            whole[STATE] = self._make_state_space()
            self._blank_state = blank_value(whole[STATE])
        self.observation_space = spaces.Dict(whole)
        self.action_space = _dict(self._choices)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Mapping) for part in result)):
            raise UserError(
                f"{self._name}: reset returned {describe_result(result)}, but must return 2 dicts by agent: "
                "observations and infos."
            )
        observations, infos = result
        if not observations:
            raise UserError(f"{self._name}: reset returned no observation; return one for each agent in the world.")
        if not self._knows_masks:
            self._knows_masks = True
            self._given_masks |= {a for a, id in self._ids.items() if self._mask and self._mask in infos.get(id, {})}
            self._masked |= self._given_masks
        self._last = dict(self._blank)
        self._last_masks: dict[str, Any] = {}
        self.restart_returns()
        listed = getattr(self.env, "agents", None)
        self._lists_agents = isinstance(listed, Collection) and any(id in listed for id in observations)
        here = self._in_world(observations)
        self._status = {agent: ACTIVE if id in here else ABSENT for agent, id in self._ids.items()}
        return self._observe(observations, dict.fromkeys(self._ids, 0.0)), self._info(observations, infos)

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        active = [agent for agent, status in self._status.items() if status in PRESENT]
        result = self.env.step({self._ids[agent]: action[agent] for agent in active})
        if not (isinstance(result, tuple) and len(result) == 5 and all(isinstance(part, Mapping) for part in result)):
            raise UserError(
                f"{self._name}: step returned {describe_result(result)}, but must return 5 dicts by agent: "
                "observations, rewards, terminations, truncations and infos."
            )
        observations, given, terminations, truncations, infos = result
        rewards, here = dict.fromkeys(self._ids, 0.0), self._in_world(observations)
        for agent, id in self._ids.items():
            terminated, truncated = bool(terminations.get(id, False)), bool(truncations.get(id, False))
            if agent in active:
                rewards[agent] = float(given.get(id, 0.0))
                left = TERMINATED if terminated else TRUNCATED if truncated else None
                # one that is gone without an ending has terminated
                self._status[agent] = (ACTIVE if id in here else TERMINATED) if left is None else left
            else:
                self._status[agent] = ENTERED if id in here and not (terminated or truncated) else ABSENT
            self._returns[agent] += rewards[agent]
        over = not any(status in PRESENT for status in self._status.values())
        truncated = over and TRUNCATED in self._status.values()
        info = self._info(observations, infos) | {"return": dict(self._returns)}
        observation = self._observe(observations, rewards)
        return observation, sum(rewards.values()) / len(rewards), over and not truncated, truncated, info

    def restart_returns(self) -> None:
        """Count each agent's return from here on, as if the episode had begun now."""
        self._returns = dict.fromkeys(self._ids, 0.0)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def _observe(self, observations: Mapping[Any, Any], rewards: Mapping[str, float]) -> dict[str, Any]:
        for agent, id in self._ids.items():
            if id in observations:
                self._last[agent] = self._part(agent, observations[id], self._acts(agent))
        observation: dict[str, Any] = dict(self._last)
        observation[REWARD] = {agent: np.asarray(reward, np.float32) for agent, reward in rewards.items()}
        observation[STATUS] = {agent: np.asarray(status, np.uint8) for agent, status in self._status.items()}
        if self._own_state is not None:
            here = [agent for agent, status in self._status.items() if status in GOES_ON]
            observation[STATE] = self._env_state() if self._own_state else self._join(self._last, here)
        return observation

    def assemble(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> tuple[Any, dict[str, Any]]:
        """Return observations and infos by agent, of any moment, in the joint layout; the others are absent.

        ``state`` may be given beside the agents. If not, it is made of their observations, and blank where only the
        environment knows it (``lacks_state``). In PettingZoo's turn-based games ``turn`` may name the agent to move
        beside the agents, where their masks do not say it.
        """
        beside = (STATE,) if self._turns is None else (STATE, TURN)
        named = {str(id): x for id, x in observations.items() if id not in beside}
        by_name = {str(id): info for id, info in infos.items()}
        moves = [str(observations[TURN])] if TURN in beside and TURN in observations else []
        if unknown := [agent for agent in (*named, *moves) if agent not in self._ids]:
            raise UserError(
                f'{self._name}: there is no agent "{unknown[0]}"; give observations by the names of agents: '
                f"{', '.join(self._ids)}."
            )
        acting = moves or self._find_acting(named, by_name)
        for agent in self._given_masks.intersection(named, acting):
            if self._find_mask(named[agent], by_name.get(agent)) is None:
                raise UserError(
                    f'{self._name} gives agent "{agent}" an action mask "{self._mask}", which is missing; give it too, '
                    "in the agent's observation, or in its info, as in policy.act(observations, infos)."
                )
        observation: dict[str, Any] = {
            agent: self._part(agent, named[agent], agent in acting) if agent in named else blank
            for agent, blank in self._blank.items()
        }
        status = {agent: ACTIVE if agent in named else ABSENT for agent in self._ids}
        observation[REWARD] = dict.fromkeys(self._ids, np.zeros((), np.float32))
        observation[STATUS] = {agent: np.asarray(x, np.uint8) for agent, x in status.items()}
        if self._own_state is not None:
            made = self._blank_state if self._own_state else self._join(observation, named)
            observation[STATE] = observations.get(STATE, made)
        masks = {
            agent: self._mask_of(agent, named.get(agent), by_name.get(agent, {}), agent in acting)
            for agent in self._ids
            if agent in self._masked
        }
        return observation, self._with_masks({}, masks)

    def _find_acting(self, observations: Mapping[str, Any], infos: Mapping[str, Any]) -> list[str]:
        """Return the agents whose next action is used; in turn-based games those whose mask allows something."""
        if self._turns is None:
            return list(observations)
        acting = [agent for agent, x in observations.items() if np.any(self._find_mask(x, infos.get(agent), True))]
        untold = [agent for agent in acting if not _has(observations[agent], TURN)]
        if len(untold) > 1:
            raise UserError(
                f"{self._name}: the masks of {' and '.join(untold)} do not say whose turn it is; name the agent beside "
                'the observations, as in policy.act({**observations, "turn": game.agent_selection}).'
            )
        return acting

    def lacks_state(self, observations: Mapping[Any, Any]) -> bool:
        """Return whether ``state`` is observed, not given, and known to the environment alone."""
        return bool(self._own_state) and STATE not in observations

    def _with_masks(self, info: dict[str, Any], masks: dict[str, Any]) -> dict[str, Any]:
        """Return an info with the masks; with a single action there is no dict of them."""
        if not masks:
            return info
        (space, *more) = self._choices.values()
        single = not more and not isinstance(space, spaces.Dict | spaces.Tuple)
        return info | {self._mask: next(iter(masks.values())) if single else masks}

    def _part(self, agent: str, observation: Any, acts: bool) -> dict[str, Any]:
        """Return an agent's observation as in ``_parts``, without its mask."""
        seen = observation if isinstance(observation, Mapping) else {OBSERVATION: observation}
        if self._turns is not None:
            seen = {TURN: np.int64(acts), **seen}
        return {key: seen[key] for key in self._parts[agent].spaces}

    def _info(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the infos by agent, and the masks."""
        info: dict[str, Any] = {agent: infos.get(id, {}) for agent, id in self._ids.items()}
        late = [x for x in info if x not in self._masked and self._find_mask(None, info[x]) is not None]
        if late:
            raise UserError(
                f'{self._name}: the info of agent "{late[0]}" has "{self._mask}", which that of the first reset had '
                f'not; give it there too, or in a Dict observation with "{self._mask}".'
            )
        masks = {
            agent: self._mask_of(agent, observations.get(id), info[agent], self._acts(agent))
            for agent, id in self._ids.items()
            if agent in self._masked
        }
        return self._with_masks(info, masks)

    def _in_world(self, observations: Mapping[Any, Any]) -> list[Any]:
        """Return the agents that are observed, and in ``env.agents`` where the environment has such a list."""
        return [id for id in observations if not self._lists_agents or id in self.env.agents]

    def _acts(self, agent: str) -> bool:
        """Return whether the next action of an agent is used, or would be but for a time limit (values bootstrap)."""
        turn = self._turns is None or self._turns.agent_selection == self._ids[agent]
        return turn and self._status[agent] in GOES_ON

    def _mask_of(self, agent: str, observation: Any, info: Any, acts: bool) -> Any:
        """Return the mask of an agent; it allows the first choice only where the action is not used."""
        space = self._choices[agent]
        mask = self._find_mask(observation, info)
        if isinstance(space, spaces.Discrete):
            if acts and mask is None:
                return np.ones(int(space.n), np.int8)
            return mask if acts and np.any(mask) else np.eye(1, int(space.n), dtype=np.int8)[0]
        if mask is not None:
            self._last_masks[agent] = mask
        return mask if acts else _allow_all(self._last_masks.get(agent))

    def _find_mask(self, observation: Any, info: Any, default: Any = None) -> Any:
        """Return the mask in an observation, or else in an info."""
        found = [x[self._mask] for x in (observation, info) if _has(x, self._mask) and x[self._mask] is not None]
        return found[0] if found else default

    def _space(self, kind: str, id: Any) -> spaces.Space[Any]:
        """Return the space of an agent, given by a method or in a dict."""
        method = getattr(self.env, f"{kind}_space", None)
        try:
            space = method(id) if callable(method) else getattr(self.env, f"{kind}_spaces", method)[id]  # type: ignore[index]
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f'{self._name}: there is no {kind} space of agent "{id}"; add a method {kind}_space(agent), or a dict '
                f"{kind}_spaces."
            ) from error
        if not isinstance(space, spaces.Space):
            raise UserError(f'{self._name}: the {kind} space of agent "{id}" is a {type(space).__name__}; return one.')
        return space

    def _observed_parts(self, space: spaces.Space[Any]) -> spaces.Dict:
        """Return what an agent observes, without its mask, and with ``turn`` in turn-based games."""
        parts = space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}
        rest = {key: child for key, child in parts.items() if key != self._mask}
        if not rest:
            raise UserError(f'{self._name}: an agent observes nothing but "{self._mask}"; add something to observe.')
        return _dict(rest if self._turns is None else {**rest, TURN: rest.get(TURN, spaces.Discrete(2))})

    def _make_state_space(self) -> spaces.Box:
        """Return the space of ``state``: that of the environment, else all observations in one vector."""
        self.env.reset(seed=0)
        try:
            state = self._env_state()
            self._own_state = True
        except (AttributeError, NotImplementedError):
            self._own_state = False
            state = self._join(self._blank, ())
        space = getattr(self.env, "state_space", None)
        if self._own_state and isinstance(space, spaces.Box):
            return space
        dtype: Any = state.dtype
        low, high = (
            (-np.inf, np.inf) if np.issubdtype(dtype, np.floating) else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        )
        return spaces.Box(low, high, state.shape, dtype)

    def _env_state(self) -> NDArray[Any]:
        state = np.asarray(self.env.state())
        return state.astype(np.float32) if state.dtype == np.float64 else state

    def _join(self, parts: Mapping[str, Any], here: Collection[str]) -> NDArray[Any]:
        """Return the observations of all agents in one vector, with zeros for those that are not ``here``."""
        flat: list[Any] = [
            spaces.flatten(space, parts[agent]) if agent in here else np.zeros(spaces.flatdim(space))
            for agent, space in self._parts.items()
        ]
        return np.concatenate(flat, dtype=np.float32)


def to_parallel(env: Any, name: str) -> tuple[Any, Any]:
    """Return the environment with PettingZoo's parallel interface, and the one that says whose turn it is, if any."""
    if not hasattr(env, "agent_iter"):
        return env, None
    try:
        from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel
    except ImportError as error:
        raise UserError(
            f'Environment "{name}" is turn-based (PettingZoo\'s AEC), which needs PettingZoo: '
            "pip install 'ludus[multiagent]'."
        ) from error
    if (getattr(env, "metadata", None) or {}).get("is_parallelizable", False):
        return aec_to_parallel(env), None
    return turn_based_aec_to_parallel(env), env


def blank_value(space: spaces.Space[Any]) -> Any:
    """Return a value of a space, near zero: the observation of an agent that has not been in the world yet."""
    match space:
        case spaces.Dict():
            return {key: blank_value(child) for key, child in space.spaces.items()}
        case spaces.Tuple():
            return tuple(map(blank_value, space.spaces))
        case spaces.Box():
            return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
        case spaces.Discrete():
            return space.start
        case spaces.MultiDiscrete():
            return space.start.copy()
        case spaces.MultiBinary():
            return np.zeros(space.shape, space.dtype)
    space.seed(0)
    return space.sample()


def _has(x: Any, key: str) -> bool:
    return isinstance(x, Mapping) and key in x


def _allow_all(mask: Any) -> Any:
    if isinstance(mask, Mapping):
        return {key: _allow_all(part) for key, part in mask.items()}
    return tuple(map(_allow_all, mask)) if isinstance(mask, tuple) else np.ones_like(mask)


def _dict(parts: Mapping[str, spaces.Space[Any]]) -> spaces.Dict:
    """Return a Dict that keeps the order of its parts; agent_10 comes after agent_2."""
    return spaces.Dict(OrderedDict(parts))
