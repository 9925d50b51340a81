"""Self-play: one policy learns in games against frozen older selves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ludus.containers.build import build_agent, divide_environments
from ludus.containers.evaluate import Evaluation, Evaluator
from ludus.containers.hook import OnUpdate
from ludus.containers.local import LocalWorker
from ludus.core.agent import Agent
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors
from ludus.core.updater import Updater
from ludus.managers.roles import RolesManager
from ludus.networks.placement import device_of
from ludus.settings.settings import SelfPlayConfig, Settings

CURRENT = -1  # in place of a member's step: the policy that is being trained
K = 16.0  # how far one game moves the Elo rating


class Member(NamedTuple):
    """A frozen copy of the policy."""

    step: int  # environment steps after which it was made
    rating: float  # its Elo rating then
    agent: Agent


class Store(Protocol):
    """Where the tensors of members are kept."""

    def save(self, step: int, state: State) -> None: ...

    def load(self, step: int) -> State: ...


class MemoryStore(dict[int, State]):
    """Keeps them in memory, for runs without a folder."""

    def save(self, step: int, state: State) -> None:
        """Keep a copy."""
        self[step] = {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()}

    def load(self, step: int) -> State:
        """Return it."""
        return self[step]


class Pool:
    """The newest frozen selves, and the Elo rating of the policy against them; the first one has a rating of 0.

    After a game with score s (1 won, ½ drawn, 0 lost) against a member with rating r, the rating R of the policy moves
    by K · (s − 1 / (1 + 10^((r − R) / 400))) (Elo 1978). A member keeps the rating of the moment when it was made.
    """

    def __init__(self, agent: Agent, make: Callable[[], Agent], config: SelfPlayConfig) -> None:
        self.agent, self.config, self._make = agent, config, make
        self.members: list[Member] = []  # oldest first, with older ones than the opponents while their games last
        self.rating = 0.0
        self.store: Store = MemoryStore()

    @property
    def opponents(self) -> list[Member]:
        """Those that new games are played against."""
        return self.members[-self.config.size :]

    def add(self, step: int) -> None:
        """Add a copy of the policy."""
        self.store.save(step, dict(self.agent.state_dict()))
        self.restore(step, self.rating)

    def keep(self, playing: Collection[int]) -> None:
        """Drop the members that are no opponents any more and not among those that still play."""
        newest = {member.step for member in self.opponents}
        self.members = [member for member in self.members if member.step in newest or member.step in playing]

    def actor(self, step: int) -> Agent:
        """Return the member made at a step, or the current policy."""
        return self.agent if step == CURRENT else next(member.agent for member in self.members if member.step == step)

    def count(self, step: int, score: float) -> None:
        """Count a game against a member."""
        against = next((member.rating for member in self.members if member.step == step), None)
        if against is not None:
            self.rating += K * (score - 1 / (1 + 10 ** ((against - self.rating) / 400)))

    def restore(self, step: int, rating: float = 0.0) -> None:
        """Add a member that is in the store."""
        agent = self._make()
        agent.load_state_dict(self.store.load(step))
        agent.eval()
        agent.schedule(1.0)  # explore as at the end of a run
        self.members.append(Member(step, rating, agent))

    def state_dict(self) -> State:
        """Return the ratings; the tensors are in the store."""
        return {"rating": self.rating, "members": [[member.step, member.rating] for member in self.members]}

    def load_state_dict(self, state: State) -> None:
        """Read the members from the store."""
        self.rating, self.members = state["rating"], []
        for step, rating in state["members"]:
            self.restore(step, rating)


class SelfPlayManager(EnvironmentManager):
    """Shows one player of each game; the others are played by an opponent of the pool, or by the current policy.

    Player and opponent are drawn anew for every game. The return of an episode is that of the player shown.
    """

    def __init__(self, inner: RolesManager, pool: Pool, latest: float, rated: bool) -> None:
        (self._part,) = inner.parts.values()
        self.inner, self.pool, self._latest, self._rated = inner, pool, latest, rated
        self.players = len(self._part.agents)
        self.name, self.batch, self.groups, self.backend = inner.name, inner.batch, inner.groups, inner.backend
        self.observation, self.action = inner.observation, inner.action
        self.on_warning = lambda text: inner.on_warning(text)
        self._generator = torch.Generator()
        self._device = device_of(pool.agent)
        self._rows = Rows.all(self.batch * self.players)
        self._player = torch.zeros(self.batch, dtype=torch.int64)  # the one shown
        self._opponent = torch.full((self.batch,), CURRENT)  # by the step when it was made
        self._numbers: Tensors = {}
        self._finished: list[Episode] = []

    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        self.inner.set_action_transform(action_transform)

    def reset(self, seed: int) -> EnvStep:
        self._generator.manual_seed(seed)
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
        members = torch.tensor([member.step for member in self.pool.opponents] or [CURRENT])
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
        against = self._opponent[rows].repeat_interleave(self.players)
        for member in sorted(set(against[others].tolist())):
            index = (others & (against == member)).nonzero().flatten().to(self._device)
            noise = {name: x[within][index] for name, x in self._numbers.items()}
            state = self._hidden.rows(within).rows(index)
            played = self.pool.actor(member).act(step.rows(index), state, noise)
            for name, x in played.action.items():
                done[name][index] = x
            for name, x in played.state.items():
                self._hidden[name][index + within.start] = x
        self.inner.send(done, group)

    def recv(self, group: int = 0) -> EnvStep:
        step, rows = self.inner.recv(group), self.groups[group]
        self._finished += [self._finish(episode) for episode in self.inner.episodes()]
        begins = self.inner.joint.last_step().first[rows]
        if begins.any():
            self._draw(begins, rows)
            if self._rated:  # an evaluation only borrows the pool
                self.pool.keep(set(self._opponent.tolist()))
        return self._show(step, rows)

    def _finish(self, episode: Episode) -> Episode:
        """Return an episode as that of the player shown, and count its result."""
        returns = [episode.infos[f"return/{agent}"] for agent in self._part.agents]
        mine = returns.pop(int(self._player[episode.row]))
        others = sum(returns) / len(returns)
        score = 0.5 if mine == others else float(mine > others)
        if self._rated:
            self.pool.count(int(self._opponent[episode.row]), score)
        return episode._replace(reward=mine, infos=episode.infos | {"score": score})

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
    return SelfPlayManager(divided, pool, 0.0, rated=False)


class SelfPlayWorker(LocalWorker):
    """A LocalWorker whose agent plays one player of each game, against itself and frozen older selves.

    Evaluations are games against the older selves alone. Their mean return says how the policy does against opponents
    that change, so ``best/`` is the policy of the last evaluation.
    """

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        updater: Updater,
        evaluator: Evaluator,
        on_update: OnUpdate | None = None,
    ) -> None:
        if not isinstance(manager, RolesManager) or sum(len(part.agents) for part in manager.parts.values()) < 2:
            raise UserError(
                f"self_play.every is {settings.self_play.every}, but {manager.name} has no players that share a "
                "policy; leave it out."
            )
        self.pool = make_pool(settings, agent, manager)
        games = SelfPlayManager(manager, self.pool, settings.self_play.latest, rated=True)
        evaluator.wrap = partial(play_pool, settings, self.pool)
        super().__init__(settings, agent, games, updater, evaluator, on_update)

    def _begin(self) -> None:
        if not self.pool.members:
            self.pool.add(self.local_step_count)
        super()._begin()

    def _after_update(self, before: int, metrics: Tensors) -> None:
        if self._passed(before, self.settings.self_play.every):
            self.pool.add(self.local_step_count)
        super()._after_update(before, metrics)

    def _is_better(self, evaluation: Evaluation) -> bool:
        return True

    def progress(self) -> dict[str, float]:
        """Also return the Elo rating and the number of opponents."""
        return super().progress() | {"elo": self.pool.rating, "opponents": float(len(self.pool.opponents))}

    def _collector_state(self, whole: bool) -> State:
        return super()._collector_state(whole) | {"pool": self.pool.state_dict()}

    def _load_collector(self, state: State) -> str:
        self.pool.load_state_dict(state["pool"])
        return super()._load_collector(state)
