"""Replays of recorded episodes: alone, for offline training, or mixed with new experience (RLPD)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import Unroll
from ludus.core.dataset import Dataset, RecordedEpisode
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.types import State, Tensors
from ludus.experience.config import ReplayConfig
from ludus.experience.memory import check_fits, free_bytes
from ludus.experience.recorded import Actions, recorded_stream
from ludus.experience.replay import ExperienceReplay

ROW = Rows.all(1)
CHUNK = 10_000  # steps of short episodes that are written at once


class RecordedReplay(ExperienceReplay):
    """A replay that holds recorded episodes; nothing is written to it while training.

    The episodes are one row, as if one environment had played them, so that n-step returns, stacks of frames and
    priorities are those of any replay. ``to_policy`` maps the environment's actions to the policy's. It is read as
    often as ``grant`` allows. Checkpoints do not have the episodes, which a resumed run reads again.
    """

    def __init__(
        self,
        config: ReplayConfig,
        dataset: Dataset,
        to_policy: Callable[[Actions], Actions],
        gamma: float,
        observation: Specs,
        action: Specs,
        device: torch.device,
        window: bool = False,
    ) -> None:
        for name in ("sequence", "hindsight"):
            if value := getattr(config, name):
                raise UserError(
                    f"agent.{name} is {value:g}, which does not work with recorded episodes (data.path); set it to 0, "
                    "or leave out data.path."
                )
        episodes = dataset.episodes
        self.name = dataset.name
        stack = max((spec.stack for spec in observation.values()), default=1)
        steps = dataset.transitions + stack * len(episodes)  # each first stack is stored whole
        length = max(steps, config.batch_size) + (stack + 1) * config.span
        filled = replace(config, replay=length, warmup=0)
        super().__init__(filled, 1, gamma, observation, device, action=action, window=window)
        number = 0
        for part in _divide(episodes, 1 if stack > 1 else CHUNK):
            tensors = unroll_tensors(Dataset(part, dataset.name), observation, action, to_policy)
            self.receive(Unroll(tensors, ROW, 0, number))
            number += 2  # numbers with gaps: none continues the one before
        self._credit = 0.0  # the episodes earn none
        if config.span > 1:  # n-step transitions are complete after n steps
            self.receive(Unroll(_padding(tensors, config.span - 1), ROW, 0, number))
        if self.size < (transitions := dataset.transitions):
            raise UserError(
                f'data.path "{self.name}": {transitions - self.size} of {transitions} recorded transitions do not fit '
                "into memory, since their stacks of frames are not shifted by one frame per step; record them without "
                "skipped frames."
            )

    def grant(self, reads: int) -> None:
        self._credit += reads

    def metrics(self) -> dict[str, float]:
        values = {"replay/recorded": float(self.size)}
        return values if self._priorities is None else {**values, "replay/largest_priority": self._priorities.largest}

    def state_dict(self) -> State:
        """Return what changes while training."""
        (group,) = self._groups.values()
        numbers = torch.from_numpy(group.numbers)
        return {
            "generator": self.generator.get_state(),
            "counters": [self._reads, self._credit],
            "fresh": group.fresh,
            "carried": group.carried,
            "priorities": None if self._priorities is None else self._priorities.get(numbers),
            "largest": None if self._priorities is None else self._priorities.largest,
        }

    def load_state_dict(self, state: State) -> None:
        """Load what ``state_dict`` returned."""
        (group,) = self._groups.values()
        self.generator.set_state(state["generator"])
        self._reads, self._credit = state["counters"]
        group.fresh, group.carried = state["fresh"], state["carried"].to(self.device)
        if self._priorities is not None and state["priorities"] is not None:
            self._priorities.set(torch.from_numpy(group.numbers), state["priorities"])
            self._priorities.largest = state["largest"]

    def _check_memory(self, needed: int, why: str = "") -> None:
        folder = self.config.replay_folder
        what = f'{why}The recorded episodes of data.path "{self.name}" need'
        check_fits(what, needed, free_bytes(self.device, folder), "use fewer episodes, or set agent.replay_folder")


class MixedReplay(ExperienceReplay):
    """A replay whose batches are in part recorded transitions (RLPD, Ball et al. 2023, §4.1).

    A batch has new transitions first, then ``recorded.config.batch_size`` recorded ones; each part has priorities of
    its own.
    """

    def __init__(self, recorded: RecordedReplay, config: ReplayConfig, *args: Any, **options: Any) -> None:
        new = config.batch_size - recorded.config.batch_size
        super().__init__(replace(config, batch_size=new), *args, **options)
        self.recorded = recorded
        self.recorded.generator = self.generator
        self.bytes += recorded.bytes

    def read(self) -> Batch:
        """Draw new and recorded transitions."""
        return concatenate(super().read(), self.recorded.read())

    def feedback(self, index: Tensor, priority: Tensor) -> None:
        new = self.config.batch_size
        super().feedback(index[:new], priority[:new])
        self.recorded.feedback(index[new:], priority[new:])

    def fresh(self, names: Sequence[str], with_returns: bool = False) -> tuple[Tensors, Tensor | None]:
        """Also return the recorded steps, in the first call."""
        found, returns = super().fresh(names, with_returns)
        recorded, more = self.recorded.fresh(names, with_returns)
        both = {name: torch.cat([recorded[name], x]) for name, x in found.items()}
        return both, None if returns is None or more is None else torch.cat([more, returns])

    def schedule(self, progress: float) -> None:
        super().schedule(progress)
        self.recorded.schedule(progress)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"replay/recorded": float(self.recorded.size)}

    def state_dict(self) -> State:
        return super().state_dict() | {"recorded": self.recorded.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.recorded.load_state_dict(state["recorded"])
        super().load_state_dict(state)


def recorded_part(batch_size: int, share: float) -> int:
    """Return how many transitions of a batch are recorded, at least one and not all."""
    if batch_size < 2:
        raise UserError(
            f"agent.batch_size is {batch_size}, so a batch cannot have new and recorded transitions; raise it to 2 or "
            "more."
        )
    return min(max(1, round(batch_size * share)), batch_size - 1)


def concatenate(one: Batch, other: Batch) -> Batch:
    """Join the columns of two batches of transitions that were read from replays."""

    def join(a: Tensors, b: Tensors) -> Tensors:
        return {name: torch.cat([x, b[name]], 1) for name, x in a.items()}

    flat = ("first", "reward", "terminated", "truncated", "discount", "real", "weight")
    joined: dict[str, Any] = {name: torch.cat([getattr(one, name), getattr(other, name)], 1) for name in flat}
    assert one.index is not None
    assert other.index is not None
    return replace(
        one,
        observation=join(one.observation, other.observation),
        action=join(one.action, other.action),
        window=join(one.window, other.window),
        index=torch.cat([one.index, other.index]),
        **joined,
    )


def _divide(episodes: Sequence[RecordedEpisode], steps: int) -> Iterator[tuple[RecordedEpisode, ...]]:
    """Yield consecutive episodes that together have at least this number of steps, but for the last ones."""
    part, count = list[RecordedEpisode](), 0
    for episode in episodes:
        part.append(episode)
        count += episode.length
        if count >= steps:
            yield tuple(part)
            part, count = [], 0
    if part:
        yield tuple(part)


def unroll_tensors(
    dataset: Dataset, observation: Specs, action: Specs, to_policy: Callable[[Actions], Actions]
) -> Tensors:
    """Return recorded episodes as the tensors of an unroll of one row, ``[T or T+1, 1, …]``."""
    tensors = recorded_stream(dataset, to_policy, torch.device("cpu"))
    for name, spec in action.items():
        x = tensors[f"action/{name}"]
        x = x.float() if spec.kind == "continuous" else x.long()
        x[~tensors["real"]] = 0  # at the last observation of an episode
        tensors[f"action/{name}"] = x
    states = [name for name in tensors if name.startswith("observation/")] + ["first"]
    return {name: x if name in states else x[:-1] for name, x in tensors.items()}


def _padding(tensors: Tensors, steps: int) -> Tensors:
    """Return steps that never happened, with tensors like those of an episode."""
    states = [name for name in tensors if name.startswith("observation/")] + ["first"]
    counts = {name: steps + (name in states) for name in tensors}
    padding = {name: x[-1:].expand(counts[name], *x.shape[1:]) for name, x in tensors.items()}
    return padding | {
        name: torch.full_like(padding[name], name == "first") for name in ("first", "real", "terminated", "truncated")
    }
