"""Self-play: one policy learns in games against frozen older selves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ludus.containers.build import build_agent, divide_environments
from ludus.containers.evaluate import Evaluator
from ludus.core.agent import Agent
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors
from ludus.managers.roles import RolesManager
from ludus.networks.placement import device_of
from ludus.settings.settings import SelfPlayConfig, Settings

CURRENT = -1  # in place of a member's step: the policy that is being trained
K = 16.0  # how far one game moves the Elo rating
OPPONENT = "opponent"  # info of a finished game, for ``Pool.rate``: the step of the opponent
STEPS = "steps"  # name of the steps of members among the tensors that are sent to workers


class Member(NamedTuple):
    """A frozen copy of the policy."""

    step: int  # environment steps after which it was made
    agent: Agent


class Store(Protocol):
    """Where the tensors of members are kept."""

    def save(self, step: int, state: State) -> None: ...

    def load(self, step: int) -> State: ...


class Pool:
    """The newest frozen selves, and the Elo rating of the policy against them; the first one has a rating of 0.

    After a game with score s (1 won, ½ drawn, 0 lost) against a member with rating r, the rating R of the policy moves
    by K · (s − 1 / (1 + 10^((r − R) / 400))) (Elo 1978). A member keeps the rating of the moment when it was made.
    """

    def __init__(self, agent: Agent, make: Callable[[], Agent], config: SelfPlayConfig) -> None:
        self.agent, self.size, self._make = agent, config.size, make
        self.members: list[Member] = []  # oldest first
        self.rating = 0.0
        self.ratings: dict[int, float] = {}  # of all copies so far, by step
        self.store: Store | None = None  # None: checkpoints have the tensors of the members

    def add(self, step: int) -> None:
        """Add a copy of the policy."""
        state = dict(self.agent.state_dict())
        if self.store is not None:
            self.store.save(step, state)
        self.ratings[step] = self.rating
        self._add(step, partial(Agent.load_state_dict, state_dict=state))

    def restore(self, step: int) -> None:
        """Add a member that is in the store."""
        assert self.store is not None
        self._add(step, partial(Agent.load_state_dict, state_dict=self.store.load(step)))

    def _add(self, step: int, load: Callable[[Agent], object]) -> None:
        copy = self._make()
        load(copy)
        copy.eval()
        copy.schedule(1.0)  # explore as at the end of a run
        self.members = [*self.members, Member(step, copy)][-self.size :]

    def actor(self, step: int) -> Agent:
        """Return the member made at a step, or the current policy."""
        return self.agent if step == CURRENT else next(member.agent for member in self.members if member.step == step)

    def rate(self, episodes: list[Episode]) -> list[Episode]:
        """Count the results of games; return them without the infos that are meant for this."""
        for episode in episodes:
            against = self.ratings.get(int(episode.infos[OPPONENT]))
            if against is not None:
                expected = 1 / (1 + 10 ** ((against - self.rating) / 400))
                self.rating += K * (episode.infos["score"] - expected)
        return [
            episode._replace(infos={name: x for name, x in episode.infos.items() if name != OPPONENT})
            for episode in episodes
        ]

    def metrics(self) -> dict[str, float]:
        """Return the Elo rating and the number of opponents."""
        return {"elo": self.rating, "opponents": float(len(self.members))}

    def to_workers(self) -> Tensors:
        """Return the tensors of all members, for processes that act; the policy's in place of those not made yet."""
        steps = [member.step for member in self.members]
        tensors: Tensors = {STEPS: torch.tensor(steps + [CURRENT] * (self.size - len(steps)))}
        copies = [member.agent for member in self.members]
        for i, copy in enumerate(copies + [self.agent] * (self.size - len(copies))):
            tensors |= {f"{i}/{name}": x for name, x in _all_tensors(copy).items()}
        return tensors

    def from_host(self, tensors: Tensors) -> None:
        """Add the members that ``to_workers`` of another process returned."""
        known = {member.step for member in self.members}
        for i, step in enumerate(tensors[STEPS].tolist()):
            if step != CURRENT and step not in known:
                self._add(step, partial(_load_tensors, state=HiddenState(tensors).select(str(i))))

    def state_dict(self, with_tensors: bool = False) -> State:
        """Return the ratings; ``with_tensors``, or without a store, also the tensors of the members."""
        state: State = {"rating": self.rating, "ratings": dict(self.ratings)}
        state["members"] = [member.step for member in self.members]
        if with_tensors or self.store is None:
            state["tensors"] = [dict(member.agent.state_dict()) for member in self.members]
        return state

    def load_state_dict(self, state: State) -> None:
        """Load the members, from the store unless the state has their tensors."""
        self.rating, self.ratings, self.members = state["rating"], dict(state["ratings"]), []
        for i, step in enumerate(state["members"]):
            if "tensors" in state:
                self._add(step, partial(Agent.load_state_dict, state_dict=state["tensors"][i]))
            else:
                self.restore(step)


def _all_tensors(agent: Agent) -> Tensors:
    """Return what an agent acts with, with the parts that a worker would draw itself."""
    return Agent.acting_state(agent) | agent.acting_state()


@torch.no_grad()
def _load_tensors(agent: Agent, state: Tensors) -> None:
    own = Agent.acting_state(agent)
    torch._foreach_copy_(list(own.values()), [state[name] for name in own])
    agent.load_acting_state({name: state[name] for name in agent.acting_state()})


class SelfPlayManager(EnvironmentManager):
    """Shows one player of each game; the others are played by an opponent of the pool, or by the current policy.

    Player and opponent are drawn anew for every game; a game against a member that leaves the pool goes on against the
    oldest one left. The return of an episode is that of the player shown. ``environments`` are those of this process in
    the whole run, by default all.
    """

    def __init__(self, inner: RolesManager, pool: Pool, latest: float, environments: Rows | None = None) -> None:
        (self._part,) = inner.parts.values()
        self.inner, self.pool, self._latest = inner, pool, latest
        self.players = len(self._part.agents)
        self.name, self.batch, self.groups, self.backend = inner.name, inner.batch, inner.groups, inner.backend
        self.observation, self.action = inner.observation, inner.action
        inner.on_warning = lambda text: self.on_warning(text)
        self._generator = torch.Generator()
        self._device = device_of(pool.agent)
        self._rows = (environments or Rows.all(self.batch)).times(self.players)
        self._player = torch.zeros(self.batch, dtype=torch.int64)  # the one shown
        self._opponent = torch.full((self.batch,), CURRENT)  # by the step when it was made
        self._numbers: Tensors = {}
        self._real = torch.zeros(0, dtype=torch.bool)  # games whose last step was real, in the group received last
        self._finished: list[Episode] = []

    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        self.inner.set_action_transform(action_transform)

    def reset(self, seed: int) -> EnvStep:
        self._generator.manual_seed(seed + self._rows.start)  # other numbers on other ranks
        self._start_noise(seed)
        self._finished = []
        step = self.inner.reset(seed)
        self._draw(torch.ones(self.batch, dtype=torch.bool), slice(None))
        return self._show(step, slice(None))

    def _start_noise(self, seed: int) -> None:
        generator = torch.Generator(self._device).manual_seed(seed)
        self._noise = self.pool.agent.make_noise(self._rows, generator)
        self._hidden = self.pool.agent.initial_state(self._rows.size)

    def _draw(self, begins: Tensor, rows: slice) -> None:
        """Draw player and opponent of the games that begin."""
        count = len(begins)
        player = torch.randint(self.players, (count,), generator=self._generator)
        members = torch.tensor([member.step for member in self.pool.members] or [CURRENT])
        opponent = members[torch.randint(len(members), (count,), generator=self._generator)]
        current = torch.rand(count, generator=self._generator) < self._latest
        self._player[rows] = torch.where(begins, player, self._player[rows])
        self._opponent[rows] = torch.where(begins, opponent.masked_fill(current, CURRENT), self._opponent[rows])

    def _shown(self, rows: slice) -> Tensor:
        """Return the index of the row that is shown, for each environment of ``rows``, within their rows."""
        player = self._player[rows]
        return torch.arange(len(player)) * self.players + player

    def _show(self, step: EnvStep, rows: slice) -> EnvStep:
        return step.rows(self._shown(rows))

    def send(self, actions: Tensors, group: int = 0) -> None:
        """Let the opponents act too, and step the games."""
        if group == 0:
            self._numbers = self._noise.next()  # for all groups
        rows = self.groups[group]
        within = slice(rows.start * self.players, rows.stop * self.players)
        step = self.inner.last_step().rows(within).to(self._device)
        shown = self._shown(rows).to(self._device)
        done = {name: x.new_zeros((len(step.first), *x.shape[1:])) for name, x in actions.items()}
        for name, x in actions.items():
            done[name][shown] = x
        others = torch.ones(len(step.first), dtype=torch.bool)
        others[shown.cpu()] = False
        opponent, oldest = self._opponent[rows], self.pool.members[0].step if self.pool.members else CURRENT
        opponent[(opponent != CURRENT) & (opponent < oldest)] = oldest
        against = opponent.repeat_interleave(self.players)
        for member in sorted(set(against[others].tolist())):
            index = (others & (against == member)).nonzero().flatten().to(self._device)
            noise = {name: x[within][index] for name, x in self._numbers.items()}
            state = self._hidden.rows(within).rows(index)
            actor = self.pool.actor(member)
            with _as_opponent(actor):
                played = actor.act(step.rows(index), state, noise)
            for name, x in played.action.items():
                done[name][index] = x
            for name, x in played.state.items():
                self._hidden[name][index + within.start] = x
        self.inner.send(done, group)

    def recv(self, group: int = 0) -> EnvStep:
        step, rows = self.inner.recv(group), self.groups[group]
        self._finished += [self._finish(episode) for episode in self.inner.episodes()]
        games = self.inner.joint.last_step()
        self._real, begins = games.real[rows], games.first[rows]
        if begins.any():
            self._draw(begins, rows)
        return self._show(step, rows)

    def count_real(self, steps: dict[str, EnvStep]) -> int:
        """Count the games of the group received last, also those that the player shown has left."""
        return int(self._real.sum())

    def _finish(self, episode: Episode) -> Episode:
        """Return an episode as that of the player shown, with its result."""
        returns = [episode.infos[f"return/{agent}"] for agent in self._part.agents]
        mine = returns.pop(int(self._player[episode.row]))
        others = sum(returns) / len(returns)
        score = 0.5 if mine == others else float(mine > others)
        result = {"score": score, OPPONENT: float(self._opponent[episode.row])}
        return episode._replace(reward=mine, infos=episode.infos | result)

    def last_step(self) -> EnvStep:
        return self._show(self.inner.last_step(), slice(None))

    def episodes(self) -> list[Episode]:
        self.inner.episodes()  # for its warnings
        finished, self._finished = self._finished, []
        return finished

    @property
    def nb_calls(self) -> int:  # type: ignore[override]
        """Steps and resets of a group so far."""
        return self.inner.nb_calls

    @property
    def longest_call(self) -> float:  # type: ignore[override]
        """Seconds of the longest of them."""
        return self.inner.longest_call

    @property
    def restored(self) -> str:  # type: ignore[override]
        """How ``load_state_dict`` restored the environments."""
        return self.inner.restored

    def current_call(self) -> tuple[int, ...] | None:
        return self.inner.current_call()

    def close(self) -> None:
        self.inner.close()

    def state_dict(self) -> State:
        return {
            "inner": self.inner.state_dict(),
            "games": torch.stack([self._player, self._opponent]),
            "generator": self._generator.get_state(),
            "noise": self._noise.state_dict(),
            "hidden": dict(self._hidden),
            "finished": [list(episode) for episode in self._finished],
        }

    def load_state_dict(self, state: State) -> None:
        self._start_noise(0)
        self.inner.load_state_dict(state["inner"])
        self._player, self._opponent = state["games"].clone().unbind()
        self._generator.set_state(state["generator"])
        self._noise.load_state_dict(state["noise"])
        self._hidden = HiddenState(state["hidden"]).map(lambda x: x.to(self._device))
        self._finished = [Episode(*episode) for episode in state["finished"]]


@contextmanager
def _as_opponent(actor: Agent) -> Iterator[None]:
    """Let an agent act as in an evaluation: without parameter noise, which the current policy has in its own games."""
    before, actor.training = actor.training, False
    try:
        yield
    finally:
        actor.training = before


def make_pool(settings: Settings[Any], agent: Agent, manager: EnvironmentManager) -> Pool:
    """Return a pool without members for an agent and environments in rows."""

    def make() -> Agent:
        made = build_agent(settings, manager.observation, manager.action, device_of(agent))
        if settings.engine == "auto":
            made.use_numpy()
        return made

    return Pool(agent, make, settings.self_play)


def play_pool(settings: Settings[Any], pool: Pool, joint: Any) -> EnvironmentManager:
    """Return environments of an evaluation against the opponents of a pool."""
    divided: Any = divide_environments(joint, settings)
    return SelfPlayManager(divided, pool, 0.0)


def make_games(
    settings: Settings[Any], agent: Agent, manager: EnvironmentManager, environments: Rows
) -> SelfPlayManager:
    """Return training environments in which the agent plays one player of each game, with an empty pool."""
    if not isinstance(manager, RolesManager) or sum(len(part.agents) for part in manager.parts.values()) < 2:
        raise UserError(
            f"self_play.every is {settings.self_play.every}, but {manager.name} has no players that share a "
            "policy; leave it out."
        )
    return SelfPlayManager(manager, make_pool(settings, agent, manager), settings.self_play.latest, environments)


def start_self_play(
    settings: Settings[Any], agent: Agent, manager: EnvironmentManager, evaluator: Evaluator, environments: Rows
) -> tuple[EnvironmentManager, Pool | None]:
    """With self-play, return games and their pool, and let evaluations be games against it; else only the manager."""
    if not settings.self_play.every:
        return manager, None
    games = make_games(settings, agent, manager, environments)
    evaluator.wrap = partial(play_pool, settings, games.pool)
    return games, games.pool
