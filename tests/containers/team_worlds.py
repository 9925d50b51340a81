"""Small worlds with several agents, plain classes with the methods of PettingZoo's ParallelEnv, and workers on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from ludus.containers.build import (
    adapt_to_environment,
    agents_per_environment,
    build_agent,
    build_evaluator,
    build_manager,
)
from ludus.containers.local import LocalWorker
from ludus.containers.updater import LocalUpdater
from ludus.core.batch import Batch
from ludus.settings.settings import resolve_settings

SMALL: dict[str, Any] = {
    "network.hidden": (16,),
    "network.lstm_size": 8,
    "env.num": 4,
    "evaluation.every": 0,
    "evaluation.episodes": 4,
    "nb_step": 1_000,
}
REPLAY: dict[str, Any] = {"agent.batch_size": 16, "agent.warmup": 32, "agent.replay": 1_000}
Results = tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]


def make_worker(world: str, agent: str, **changes: Any) -> LocalWorker:
    """A worker that reports to nobody; keys of ``changes`` have ``__`` for dots."""
    torch.set_num_threads(1)
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    small = SMALL | (REPLAY if agent in ("maddpg", "vdn", "qmix") else {})
    resolved = resolve_settings(f"{__name__}:{world}", agent, "none", None, small | dotted)
    manager = build_manager(resolved.settings)
    agents = agents_per_environment(manager)
    settings = adapt_to_environment(resolved, manager.observation, manager.action, agents).settings
    made = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(made.action_transform)
    return LocalWorker(settings, made, manager, LocalUpdater(made), build_evaluator(settings, made))


class World:
    """What the worlds below share: a reward of the whole team, and an end for all agents at once."""

    def __init__(self, observations: dict[str, spaces.Space[Any]], actions: dict[str, spaces.Space[Any]]) -> None:
        self.possible_agents = list(observations)
        self.observation_spaces, self.action_spaces = observations, actions
        self.time = 0

    def observe(self) -> dict[str, Any]:
        raise NotImplementedError

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.time = 0
        self.random = np.random.default_rng(seed)
        return self.observe(), {}

    def results(self, reward: float, over: bool) -> Results:
        """The same reward and ending for all agents."""
        rewards, ends = dict.fromkeys(self.possible_agents, reward), dict.fromkeys(self.possible_agents, over)
        return self.observe(), rewards, ends, dict.fromkeys(self.possible_agents, False), {}


class TwoSteps(World):
    """Two steps (Rashid et al. 2018, §5): the first player chooses a matrix game, in which both play once.

    The first game pays 0.7 whatever they do; the second one pays ``payoff``.
    """

    payoff: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.1), (0.1, 0.8))

    def __init__(self) -> None:
        agents = ("first", "second")
        super().__init__({x: spaces.Discrete(3) for x in agents}, {x: spaces.Discrete(2) for x in agents})

    def observe(self) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, 0 if self.time == 0 else 1 + self.game)

    def state(self) -> Any:
        return np.eye(3, dtype=np.float32)[0 if self.time == 0 else 1 + self.game]

    def step(self, action: dict[str, int]) -> Results:
        self.time += 1
        if self.time == 1:
            self.game = int(action["first"])
            return self.results(0.0, over=False)
        return self.results(0.7 if self.game == 0 else self.payoff[action["first"]][action["second"]], over=True)


class AdditiveTwoSteps(TwoSteps):
    """A second game whose payoff is a sum over players, each of whom sees 0.6 on average where the best is 0.8."""

    payoff = ((0.0, 0.4), (0.4, 0.8))


class Speech(World):
    """A speaker sees one of three goals and says a word; the listener hears it and has to go there, of five places."""

    def __init__(self) -> None:
        seen: Any = {"speaker": spaces.Discrete(3), "listener": spaces.Box(0, 1, (4,), np.float32)}
        super().__init__(seen, {"speaker": spaces.Discrete(3), "listener": spaces.Discrete(5)})

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.heard = np.zeros(4, np.float32)
        self.goal = int(np.random.default_rng(seed).integers(3))
        return super().reset(seed)

    def observe(self) -> dict[str, Any]:
        return {"speaker": self.goal, "listener": self.heard.copy()}

    def step(self, action: dict[str, int]) -> Results:
        self.time += 1
        if self.time == 1:
            self.heard[action["speaker"]] = self.heard[3] = 1
            return self.results(0.0, over=False)
        return self.results(float(action["listener"] == self.goal), over=True)


class Meeting(World):
    """Two points on a line, of which each sees its own place and that of the other; they are paid for being near."""

    def __init__(self) -> None:
        agents = ("left", "right")
        seen: Any = {x: spaces.Box(-2, 2, (2,), np.float32) for x in agents}
        super().__init__(seen, {x: spaces.Box(-0.5, 0.5, (1,), np.float32) for x in agents})

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.place = np.random.default_rng(seed).uniform(-1, 1, 2)
        return super().reset(seed)

    def observe(self) -> dict[str, Any]:
        pairs = zip(self.possible_agents, (self.place, self.place[::-1]), strict=True)
        return {agent: place.astype(np.float32) for agent, place in pairs}

    def step(self, action: dict[str, Any]) -> Results:
        self.time += 1
        self.place = np.clip(self.place + [float(action[agent][0]) for agent in self.possible_agents], -2, 2)
        return self.results(-abs(float(self.place[0] - self.place[1])), over=self.time == 6)


class Mixed(World):
    """Three agents that differ in all: a choice with a mask, a choice without, and numbers; rewards of their own.

    ``masked`` may not take the choice that it took before; ``leaver`` leaves after three steps, and the world ends
    after six, or at a time limit for the others.
    """

    def __init__(self, agents: tuple[str, ...] = ("masked", "leaver", "mover")) -> None:
        mask = spaces.MultiBinary(4)
        seen = {
            "masked": spaces.Dict(place=spaces.Box(-9, 9, (3,), np.float32), action_mask=mask),
            "leaver": spaces.Discrete(2),
            "mover": spaces.Box(-9, 9, (5,), np.float32),
        }
        done = {
            "masked": spaces.Discrete(4),
            "leaver": spaces.Discrete(2),
            "mover": spaces.Box(-2, 3, (3,), np.float32),
        }
        super().__init__({x: seen[x] for x in agents}, {x: done[x] for x in agents})

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.allowed = np.ones(4, np.int8)
        self.agents = list(self.possible_agents)
        return super().reset(seed)

    def observe(self) -> dict[str, Any]:
        seen = {
            "masked": {"place": self.random.normal(size=3).astype(np.float32), "action_mask": self.allowed.copy()},
            "leaver": self.time % 2,
            "mover": self.random.normal(size=5).astype(np.float32),
        }
        return {agent: seen[agent] for agent in self.agents}

    def step(self, action: dict[str, Any]) -> Results:
        assert list(action) == self.agents
        assert self.allowed[action["masked"]]
        assert "mover" not in action or (np.abs(action["mover"] - 0.5) <= 2.5).all()
        self.time += 1
        self.allowed[:] = 1
        self.allowed[action["masked"]] = 0
        rewards = {agent: float(i + self.time) for i, agent in enumerate(self.agents)}
        leaves = {agent: agent == "leaver" and self.time == 3 for agent in self.agents}
        limit = dict.fromkeys(self.agents, self.time == 6)
        if self.time == 3:
            result = self.observe(), rewards, leaves, limit, {}
            self.agents.remove("leaver")
            return result
        return self.observe(), rewards, leaves, limit, {}


class Chooser(Mixed):
    """The two agents of Mixed that choose."""

    def __init__(self) -> None:
        super().__init__(("masked", "leaver"))


class Parting(World):
    """Two agents that leave together after two steps: ``ends`` has terminated, ``stops`` is truncated."""

    def __init__(self) -> None:
        agents = ("ends", "stops")
        super().__init__({x: spaces.Discrete(3) for x in agents}, {x: spaces.Discrete(2) for x in agents})

    def observe(self) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, self.time)

    def step(self, action: dict[str, int]) -> Results:
        self.time += 1
        over, rewards = self.time == 2, {"ends": float(self.time), "stops": 10.0 * self.time}
        return self.observe(), rewards, {"ends": over, "stops": False}, {"ends": False, "stops": over}, {}


class Pictures(World):
    """Agents that see images."""

    def __init__(self, agents: int = 2) -> None:
        names = [f"agent_{i}" for i in range(agents)]
        seen: Any = {x: spaces.Box(0, 255, (8, 8, 3), np.uint8) for x in names}
        super().__init__(seen, {x: spaces.Discrete(2) for x in names})

    def observe(self) -> dict[str, Any]:
        return {agent: np.zeros((8, 8, 3), np.uint8) for agent in self.possible_agents}

    def step(self, action: dict[str, Any]) -> Results:
        self.time += 1
        return self.results(0.0, over=self.time == 4)


def batch_of(worker: LocalWorker) -> Batch:
    """A batch from the replay of a worker that has begun."""
    from ludus.containers.loop import collect

    cache: Any = worker.cache
    while not cache.ready():
        collect(worker)
    return cache.read()
