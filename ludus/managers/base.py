"""What all managers share: the memory behind a step, the account of episodes, and the way of actions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.core.types import EnvStep, Episode, State, Tensors
from ludus.environments.masks import ObservationReader
from ludus.environments.spaces import Arrays, Layout
from ludus.managers.infos import numeric_row
from ludus.preprocess.actions import ActionPreprocessor


class StepMemory:
    """Numpy arrays ``[B, …]`` and the one EnvStep of torch views on them, made once and written in place."""

    def __init__(self, specs: Specs, batch: int) -> None:
        self.observation: Arrays = {name: np.zeros((batch, *s.shape), s.dtype) for name, s in specs.items()}
        self.reward = np.zeros(batch, np.float32)
        self.terminated, self.truncated, self.first = (np.zeros(batch, np.bool_) for _ in range(3))
        self.step = EnvStep(
            {name: torch.from_numpy(x) for name, x in self.observation.items()},
            *(torch.from_numpy(x) for x in (self.reward, self.terminated, self.truncated, self.first)),
        )

    def begin(self) -> None:
        """Make every row the first of an episode."""
        self.reward[:] = 0
        self.terminated[:] = self.truncated[:] = False
        self.first[:] = True


class BatchManager(EnvironmentManager):
    """The part of a manager that does not depend on what steps the environments.

    A subclass sets up its environments and implements ``_begin`` (reset all rows) and ``_advance`` (one step of all
    rows, an ended row being reset instead); both fill ``_memory`` and the second calls ``_account``.
    """

    def __init__(self, name: str, batch: int, reader: ObservationReader, actions: Layout, branch: int = 0) -> None:
        self.name, self.batch, self.groups = name, batch, [slice(0, batch)]
        self.observation, self.action = reader.specs, actions.specs
        self._reader, self._layout = reader, actions
        self._treat = ActionPreprocessor(self.action, {})
        self._memory = StepMemory(self.observation, batch)
        self._pending: Arrays = {}
        self._finished: list[Episode] = []
        self._seed, self._branch, self._restored = 0, branch, False
        self._seeds: list[int | None] = [None] * batch  # of the running episodes, where they have their own
        self._episode = np.zeros(batch, np.int64)  # number of the running episode of each row
        self._return = np.zeros(batch, np.float64)
        self._length, self._one = np.zeros(batch, np.int64), np.ones(batch, np.int64)
        self._ended = np.zeros(batch, np.bool_)
        self._any_ended = False

    @abstractmethod
    def _begin(self) -> None:
        """Reset every row."""

    @abstractmethod
    def _advance(self) -> None:
        """Step every row by the pending actions; a row whose episode has ended is reset instead."""

    def use(self, treatment: Mapping[str, str]) -> None:
        self._treat = ActionPreprocessor(self.action, treatment)

    def reset(self, seed: int) -> EnvStep:
        if seed < 0:
            raise UserError(f"The seed is {seed}, but seeds are 0 or more.")
        if self._restored:  # the episodes that ran when the state was saved are lost; go on with the next ones
            self._episode += 1
        else:
            self._seed = seed
            self._episode[:] = 0
        self._restored = False
        self._return[:], self._length[:], self._ended[:], self._any_ended = 0, 0, False, False
        self._finished = []
        self._memory.begin()
        self._begin()
        return self._memory.step

    def send(self, actions: Tensors, group: int = 0) -> None:
        self._pending = self._treat({name: _numpy(x) for name, x in actions.items()})

    def recv(self, group: int = 0) -> EnvStep:
        self._advance()
        return self._memory.step

    def read(self, observation: Any, info: Mapping[str, Any]) -> tuple[Arrays, bool]:
        """One observation of the environment, or a batch, as named arrays ``[B, …]``; and whether it was a batch."""
        try:
            name, array = next(iter(self._reader.layout.flatten(observation).items()))
        except (KeyError, IndexError, TypeError) as error:
            parts = ", ".join(self._reader.layout.specs)
            raise UserError(
                f"{self.name}: the observation is a {type(observation).__name__} that lacks a part of {parts}; give it "
                "as the environment does."
            ) from error
        batched = array.ndim == len(self.observation[name].shape) + 1
        arrays = self._reader.read(observation, info, (len(array),) if batched else ())
        for name, x in arrays.items():
            expected = self.observation[name].shape
            if x.shape[batched:] != expected:
                raise UserError(
                    f'{self.name}: the observation "{name}" has shape {x.shape}; give {expected}, or a batch of such.'
                )
            typed = x.astype(self.observation[name].dtype, copy=False)
            arrays[name] = np.ascontiguousarray(typed if batched else typed[None])
        return arrays, batched

    def write(self, actions: Tensors, batched: bool) -> Any:
        """Policy-space actions ``[B, …]`` as the environment takes them: a batch, or the only row."""
        arrays = self._treat({name: _numpy(x) for name, x in actions.items()})
        return self._layout.unflatten(arrays) if batched else self._layout.unflatten_row(arrays, 0)

    def episodes(self) -> list[Episode]:
        finished, self._finished = self._finished, []
        return finished

    def seed_of(self, *place: int) -> int:
        """The seed at a place under the run's seed and this manager's branch; 31 bits, which every engine takes."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self._branch, *place))
        return int(sequence.generate_state(1)[0] >> 1)

    def state_dict(self) -> State:
        return {
            "restore": "episode boundary",
            "seed": self._seed,
            "branch": self._branch,
            "episode": torch.from_numpy(self._episode.copy()),
            "return": torch.from_numpy(self._return.copy()),
            "length": torch.from_numpy(self._length.copy()),
        }

    def load_state_dict(self, state: State) -> None:
        """Take over the counters; the next ``reset`` begins the episodes after the saved ones, whatever its seed."""
        saved_batch = len(state["episode"])
        if saved_batch != self.batch:
            raise UserError(
                f"The checkpoint holds {saved_batch} environments, env.num is {self.batch}; set it to {saved_batch}."
            )
        self._seed, self._branch, self._restored = int(state["seed"]), int(state["branch"]), True
        for own, saved in ((self._episode, "episode"), (self._return, "return"), (self._length, "length")):
            own[:] = state[saved].numpy()

    def _account(self, infos: Any, reward: NDArray[Any]) -> None:
        """Add a step to the running episodes and close those that ended; ``reward`` is what returns are made of."""
        memory = self._memory
        self._return += reward
        np.add(self._length, self._one, out=self._length)  # half the time of += 1
        if self._any_ended:  # these rows were reset in this step: their episode starts now
            begun = memory.first
            self._return[begun], self._length[begun] = 0, 0
            self._episode[begun] += 1
        np.logical_or(memory.terminated, memory.truncated, out=self._ended)
        self._any_ended = bool(np.count_nonzero(self._ended))  # a third of the time of any()
        if self._any_ended:
            rows = self._ended.nonzero()[0]
            ends = zip(rows.tolist(), self._return[rows].tolist(), self._length[rows].tolist(), strict=True)
            seeds, read = self._seeds, self._row_infos if infos else _no_infos
            self._finished += [Episode(row, total, n, seeds[row], read(infos, row)) for row, total, n in ends]

    def _row_infos(self, infos: Any, row: int) -> dict[str, float]:
        return numeric_row(infos, row)

    def _settle_masks(self) -> None:
        if self._reader.masks is not None:
            self._reader.masks.settle(self._memory.observation, self._ended)

    def _take_reset(self, observation: Any, infos: Mapping[str, Any]) -> None:
        """Take the reset of environments that step as a batch; a space that lies shows here."""
        for name, x in self._reader.read(observation, infos, (self.batch,)).items():
            own = self._memory.observation[name]
            if x.shape != own.shape or not np.can_cast(x.dtype, own.dtype, "same_kind"):
                raise UserError(
                    f'{self.name}: observation "{name}" is {x.dtype} of shape {x.shape}, but its space says '
                    f"{own.dtype} of shape {own.shape}; mend the space or the observation."
                )
        self._take_observation(observation, infos)
        self._settle_masks()

    def _take(self, observation: Any, reward: Any, terminated: Any, truncated: Any, infos: Mapping[str, Any]) -> None:
        """Take a step of environments that step as a batch and reset themselves at the step after an ending."""
        memory = self._memory
        self._take_observation(observation, infos)
        memory.reward[...] = reward
        memory.terminated[...] = terminated
        memory.truncated[...] = truncated
        memory.first[...] = self._ended
        if self._any_ended:
            begun = memory.first
            memory.reward[begun], memory.terminated[begun], memory.truncated[begun] = 0, False, False
        self._account(infos, self._raw_reward(infos))
        self._settle_masks()

    def _take_observation(self, observation: Any, infos: Mapping[str, Any]) -> None:
        target = self._memory.observation
        for name, x in self._reader.read(observation, infos, (self.batch,)).items():
            target[name][...] = x

    def _raw_reward(self, infos: Mapping[str, Any]) -> NDArray[Any]:
        """The reward that an episode's return is made of."""
        return self._memory.reward


def _no_infos(infos: Any, row: int) -> dict[str, float]:
    return {}


def _numpy(x: Tensor) -> NDArray[Any]:
    return x.numpy() if x.is_cpu else x.cpu().numpy()
