"""Batches drawn from recorded episodes, for agents that imitate them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import ExperienceCache
from ludus.core.dataset import Dataset
from ludus.core.hidden_state import HiddenState
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.experience.memory import check_fits, free_bytes
from ludus.experience.rollout import select_prefix
from ludus.experience.sequences import SequenceShape, draw_sequences
from ludus.preprocess.action_inverter import ActionInverter

Actions = Mapping[str, NDArray[Any]]


def recorded_steps(dataset: Dataset, inverter: ActionInverter, device: torch.device) -> tuple[Tensors, Tensors]:
    """Return all observations before an action, and the actions in policy space, ``[N, …]`` by name."""
    episodes = dataset.episodes
    _check_memory(dataset, device)
    observation = {
        name: np.concatenate([episode.observation[name][:-1] for episode in episodes])
        for name in episodes[0].observation
    }
    action = {name: np.concatenate([episode.action[name] for episode in episodes]) for name in episodes[0].action}
    return tuple(  # type: ignore[return-value]
        {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
        for arrays in (observation, inverter(action))
    )


def _check_memory(dataset: Dataset, device: torch.device) -> None:
    arrays = (x for episode in dataset.episodes for x in (*episode.observation.values(), *episode.action.values()))
    what = f'data.path is "{dataset.name}", whose {dataset.transitions:,} steps need'
    check_fits(what, sum(x.nbytes for x in arrays), free_bytes(device, ""), "use fewer episodes")


def recorded_stream(dataset: Dataset, inverter: Callable[[Actions], Actions], device: torch.device) -> Tensors:
    """Return all episodes as the steps of one environment, ``[n, 1, …]``, as ``draw_sequences`` takes them.

    The last observation of an episode is a step too. It is not real, and repeats the action before it, which is one
    that a policy can have taken.
    """
    episodes = dataset.episodes
    _check_memory(dataset, device)
    last = np.cumsum([episode.length + 1 for episode in episodes]) - 1  # steps with the last observations
    flags = {name: np.zeros(last[-1] + 1, np.bool_) for name in ("first", "terminated", "truncated")}
    flags["first"][[0, *(last[:-1] + 1)]] = True
    flags["terminated"][last - 1] = [episode.terminated for episode in episodes]
    flags["truncated"][last - 1] = [episode.truncated for episode in episodes]
    real = np.ones(last[-1] + 1, np.bool_)
    real[last] = False
    observation = {name: np.concatenate([x.observation[name] for x in episodes]) for name in episodes[0].observation}
    action = {
        name: np.concatenate([part for x in episodes for part in (x.action[name], x.action[name][-1:])])
        for name in episodes[0].action
    }
    reward = np.concatenate([part for x in episodes for part in (x.reward, np.zeros(1, np.float32))])
    arrays = {f"observation/{name}": x for name, x in observation.items()}
    arrays |= {f"action/{name}": x for name, x in inverter(action).items()}
    arrays |= {**flags, "real": real, "reward": reward}
    return {name: torch.from_numpy(x).to(device).unsqueeze(1) for name, x in arrays.items()}


def last_observations(dataset: Dataset, device: torch.device) -> Tensors:
    """Return the last observation of every episode, ``[E, …]`` by name."""
    episodes = dataset.episodes
    arrays = {name: np.stack([x.observation[name][-1] for x in episodes]) for name in episodes[0].observation}
    return {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}


class ReturnsToGo(NamedTuple):
    """The discounted rewards from each recorded step to the end of its episode, ``[N]`` each.

    The return is ``total`` + ``discount`` · V(s_T), where s_T is the last observation of episode number ``episode``;
    ``discount`` is γ^(T−t), or 0 if the episode terminated there. ``so_far`` are the discounted returns from the start
    of the episode, R_t = r_t + γ R_{t−1}, of which reward scaling takes the standard deviation.
    """

    total: Tensor
    discount: Tensor
    so_far: Tensor  # float64
    episode: Tensor


def returns_to_go(dataset: Dataset, gamma: float, device: torch.device) -> ReturnsToGo:
    """Compute the returns to go of all recorded steps."""
    rows = []
    for number, episode in enumerate(dataset.episodes):
        reward, steps = episode.reward.astype(np.float64), episode.length
        total, so_far = np.zeros(steps), np.zeros(steps)
        ahead = behind = 0.0
        for t in range(steps):
            so_far[t] = behind = reward[t] + gamma * behind
        for t in reversed(range(steps)):
            total[t] = ahead = reward[t] + gamma * ahead
        discount = gamma ** np.arange(steps, 0, -1) * (not episode.terminated)
        rows.append((total, discount, so_far, np.full(steps, number)))
    columns = [torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*rows, strict=True)]
    return ReturnsToGo(columns[0].float(), columns[1].float(), *columns[2:])


def make_batch(observation: Tensors, action: Tensors, experience: Tensors, index: Tensor, final: Tensors) -> Batch:
    """Return steps ``[N, …]`` as a batch ``[1, N]`` of single steps without successors."""
    row = next(iter(observation.values())).new_zeros(len(index), dtype=torch.float32).unsqueeze(0)
    flag = row.bool()
    return Batch(
        observation=_as_row(observation),
        first=flag,
        action=_as_row(action),
        reward=row,
        terminated=flag,
        truncated=flag,
        discount=row,
        real=~flag,
        weight=torch.ones_like(row),
        experience=_as_row(experience),
        final=_as_row(final),
        index=index,
    )


def _as_row(tensors: Tensors) -> Tensors:
    return {name: x.unsqueeze(0) for name, x in tensors.items()}


class RecordedCache(ExperienceCache):
    """Draws batches from recorded episodes; nothing is written to it."""

    observation: Tensors  # [n, …] of all steps
    action: Tensors  # [n, …]
    real: Tensor  # [n]: False for the last observation of an episode, which has no action

    def __init__(self) -> None:
        self.generator: torch.Generator = torch.Generator()
        self._granted = 0

    @abstractmethod
    def draw(self) -> Batch:
        """Return a batch of random steps."""

    def grant(self, reads: int) -> None:
        self._granted += reads

    def ready(self) -> bool:
        return self._granted > 0

    def read(self) -> Batch:
        """Return the next batch."""
        self._granted -= 1
        return self.draw()

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Ignore the step: the container does not act."""

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Ignore the action."""

    def amend(self, step: EnvStep) -> None:
        """Ignore the step."""

    def state_dict(self) -> State:
        """Return the state of sampling; the episodes are in their file."""
        return {"generator": self.generator.get_state(), "granted": self._granted}

    def load_state_dict(self, state: State) -> None:
        """Restore it."""
        self.generator.set_state(state["generator"])
        self._granted = int(state["granted"])


class RecordedSteps(RecordedCache):
    """Draws batches of single recorded steps, with replacement.

    Batches have the ``total`` and ``discount`` of ``ReturnsToGo`` in their experience, and in ``final`` the last
    observation of each step's episode, unless all episodes terminated.
    """

    def __init__(
        self, dataset: Dataset, inverter: ActionInverter, batch_size: int, returns: ReturnsToGo, device: torch.device
    ) -> None:
        super().__init__()
        self.observation, self.action = recorded_steps(dataset, inverter, device)
        self.real = torch.ones(len(returns.total), dtype=torch.bool, device=device)
        self.final = last_observations(dataset, device) if bool(returns.discount.any()) else {}
        self.returns, self.batch_size, self.device = returns, batch_size, device

    def draw(self) -> Batch:
        """Return ``[1, batch_size]`` steps."""
        returns = self.returns
        index = torch.randint(len(returns.total), (self.batch_size,), generator=self.generator).to(self.device)
        episode = returns.episode[index]
        return make_batch(
            {name: x[index] for name, x in self.observation.items()},
            {name: x[index] for name, x in self.action.items()},
            {"total": returns.total[index], "discount": returns.discount[index]},
            index,
            {name: x[episode] for name, x in self.final.items()},
        )


class RecordedSequences(RecordedCache):
    """Draws batches of sequences (``draw_sequences``), which may go on from the end of an episode to the next one."""

    def __init__(
        self, dataset: Dataset, inverter: ActionInverter, shape: SequenceShape, gamma: float, device: torch.device
    ) -> None:
        super().__init__()
        self.shape, self.gamma = shape, gamma
        self._steps = recorded_stream(dataset, inverter, device)
        single = {name: x.squeeze(1) for name, x in self._steps.items()}
        self.observation, self.action = (select_prefix(single, kind) for kind in ("observation", "action"))
        self.real = single["real"]

    def draw(self) -> Batch:
        """Return ``shape.columns`` sequences."""
        return draw_sequences(self._steps, 0, self.shape, self.gamma, self.generator)
