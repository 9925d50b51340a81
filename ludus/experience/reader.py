"""From the numbers of what was drawn to a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors
from ludus.experience import native
from ludus.experience.config import ReplayConfig
from ludus.experience.frames import Frames
from ludus.experience.hindsight import REACHED, WANTED, Hindsight
from ludus.experience.ring import Ring
from ludus.experience.row_group import ARRIVAL, FINAL, Arrival, Integers
from ludus.experience.slot_index import SlotIndex
from ludus.experience.windows import n_step


class Output:
    """A column, and memory for what is read of it."""

    def __init__(self, name: str, source: Tensor, steps: int, drawn: int) -> None:
        self.name, self.source = name, source  # [slots, …]
        self.out = torch.empty((steps * drawn, *source.shape[1:]), dtype=source.dtype, device=source.device)
        self.view = self.out.view(steps, drawn, *source.shape[1:])
        # On the CPU numpy looks at the same memory, and gathers small rows in half of torch's time.
        shared = source.device.type == "cpu" and source.dtype != torch.bfloat16
        self._arrays = (source.numpy(), self.out.numpy()) if shared else None

    def take(self, slots: Tensor) -> None:
        """Read the rows at the first of ``slots``, as many as there is memory for."""
        slots = slots[: len(self.out)]
        if self._arrays is not None:
            source, out = self._arrays
            source.take(slots.numpy(), 0, out=out, mode="clip")  # the one mode that does not buffer; all are inside
        else:
            torch.index_select(self.source, 0, slots, out=self.out)


class Outputs:
    """Columns that are read together: by compiled code where there is some, else one after the other."""

    def __init__(self, outputs: list[Output]) -> None:
        self._outputs, self._library = outputs, native.LIBRARY
        self._columns = native.columns([(output.source, output.out) for output in outputs])

    def take(self, slots: Tensor) -> None:
        """Read all rows at ``slots``; a column that has memory for fewer reads the first of them."""
        if self._library is not None and self._columns is not None:
            if self._library.ludus_gather(self._columns, len(self._columns), slots.data_ptr()):
                raise IndexError("A replay was read outside of its memory.")
            return
        for output in self._outputs:
            output.take(slots)


class Where(NamedTuple):
    """The slots of what was drawn, on the device."""

    slots: Tensor  # [W, M]: of all states
    states: Tensor  # [W * M]: the same
    acts: Tensor  # of the states that an action is read of


class Reader:
    """Reads transitions or sequences from a replay's memory into a batch's, which is made once."""

    def __init__(
        self,
        config: ReplayConfig,
        gamma: float,
        names: list[str],
        places: SlotIndex,
        ring: Ring,
        hidden: Ring,
        frames: dict[str, Frames],
        hindsight: Hindsight | None,
        window: bool,
    ) -> None:
        self._names, self._places, self._ring, self._hidden = names, places, ring, hidden
        self._frames, self._hindsight, self._device = frames, hindsight, ring.device
        self._sequence, self._stride = config.sequence > 0, config.sequence - config.overlap
        self._span = config.burn_in + config.sequence if config.sequence else config.n_step
        self._window = window and self._span > 1 and not self._sequence
        states, drawn = self._span + 1, config.batch_size
        self._slots = torch.zeros((states, drawn), dtype=torch.int64)  # [W, M]: where each of an item's states is
        self._where = self._on_device() if self._device.type == "cpu" else None
        self._arrived = Output(ARRIVAL, ring.flat[ARRIVAL], states, drawn)
        arrival = Arrival(self._arrived.view)
        self._first, self._reward = arrival.first, arrival.reward[1:]  # [W, M] and [W - 1, M]
        self._terminated, self._truncated, self._real = arrival.terminated[1:], arrival.truncated[1:], arrival.real[1:]
        self._all_real = torch.ones_like(self._reward[:1], dtype=torch.bool)  # no other transition can be drawn
        self._weight, self._discount = torch.zeros_like(self._reward[:1]), torch.zeros_like(self._reward)
        self._discounts = torch.tensor([0.0, gamma], device=self._device).unbind()
        powers = gamma ** torch.arange(states, dtype=torch.float64)
        self._powers = powers.to(self._device, torch.float32)
        self._at_once, self._later, self._inside = (
            Outputs([]),
            Outputs([]),
            Outputs([]),
        )  # known when an agent has spoken
        self._passed: Tensors = {}
        self._seen: Tensors = {}
        self._acted: Tensors = {}
        self._learned: Tensors = {}

    def read(self, numbers: Tensor, weight: Tensor | None, generator: torch.Generator) -> Batch:
        """The batch of these items; ``weight``: of priorities."""
        if not self._acted:
            self._make_memory()
        self._places.slots(numbers, len(self._slots), self._slots)
        where = self._where or self._on_device()
        weight = self._weight.fill_(1) if weight is None else weight.to(self._device)[None]
        self._at_once.take(where.states)
        if self._sequence:
            read = self._batch(where.states, self._usable(), weight.expand_as(self._reward))
            read.state = self._states(*self._places.split(numbers.numpy()))
        elif self._hindsight is not None:
            time, row = self._places.split(numbers.numpy())
            drawn = self._hindsight.draw(time, row, self._places.now[row], generator)
            read = self._relabelled(where, weight, row, *drawn)
        else:
            read = self._transitions(where, weight)
        read.index = numbers
        return read

    def _on_device(self) -> Where:
        slots = self._slots.to(self._device)
        return Where(slots, slots.flatten(), slots[: self._span if self._sequence else 1].flatten())

    def _make_memory(self) -> None:
        """Make what reads are written to; where n-step windows end is known only when arrivals have been read."""
        states, acts = (self._span + 1, self._span) if self._sequence else (2, 1)
        names = [f"observation/{name}" for name in self._names if name not in self._frames]
        seen = [self._output(name, states) for name in names]
        acted, learned = (
            [self._output(name, acts) for name in self._ring.columns if name.startswith(kind)]
            for kind in ("action/", "experience/")
        )
        self._seen, self._acted, self._learned = ({x.name: x.view for x in part} for part in (seen, acted, learned))
        others = [*seen, *acted, *learned]
        windows = self._span > 1 and not self._sequence
        self._at_once, self._later = Outputs([self._arrived, *([] if windows else others)]), Outputs(others)
        if self._window:
            names += [name for name in self._ring.columns if name.startswith("action/")]
            drawn = self._slots.shape[1]
            inside = [Output(name, self._ring.flat[name], self._span - 1, drawn) for name in names]
            self._inside, self._passed = Outputs(inside), {x.name: x.view for x in inside}

    def _output(self, name: str, steps: int) -> Output:
        return Output(name.partition("/")[2], self._ring.flat[name], steps, self._slots.shape[1])

    def _transitions(self, where: Where, weight: Tensor) -> Batch:
        """One-step transitions, or n-step ones as one."""
        if self._span == 1:
            read = self._batch(where.states, self._all_real, weight)
            return self._with_final(read, where.slots[1], self._first[1]) if self._finals else read
        window = n_step(self._reward, self._terminated, self._truncated, self._usable(), self._powers)
        ends = where.slots.gather(0, window.steps[None])
        states = torch.cat([where.acts, ends[0]])
        self._later.take(states)
        read = replace(
            self._batch(states, self._all_real, weight),
            first=torch.cat([self._first[:1], torch.zeros_like(self._first[:1])]),
            reward=window.reward[None],
            terminated=window.terminated[None],
            truncated=window.truncated[None],
            discount=window.discount[None],
            window=self._states_passed(where.slots[1 : self._span], window.steps) if self._window else {},
        )
        if not self._finals:
            return read
        return self._with_final(read, ends[0], self._first.gather(0, window.steps[None])[0])

    def _usable(self) -> Tensor:
        """Which transitions are real and lead to a state that is known ``[W − 1, M]``."""
        if self._finals:
            return self._real
        return self._real & ~(self._first[1:] & ~self._terminated)

    def _with_final(self, read: Batch, slots: Tensor, reset: Tensor) -> Batch:
        """Put last observations in the place of successors that were ``reset`` in the same step ``[M]``."""
        for name, x in read.observation.items():
            final = self._ring.flat[FINAL + name].index_select(0, slots)
            x[1] = torch.where(reset.view(-1, *[1] * (final.dim() - 1)), final, x[1])
        return replace(read, first=torch.cat([self._first[:1], torch.zeros_like(self._first[:1])]))

    def _states_passed(self, slots: Tensor, steps: Tensor) -> Tensors:
        """What is at the slots ``[n − 1, M]`` inside of windows that reached so many ``steps`` ``[M]``."""
        self._inside.take(slots.flatten())
        passed = dict(self._passed)
        for name, frames in self._frames.items():
            passed[f"observation/{name}"] = frames.read(slots, "window")
        reached = torch.arange(1, self._span, device=self._device)[:, None] < steps
        passed["discount"] = self._powers[1 : self._span, None] * reached
        return passed

    def _relabelled(self, where: Where, weight: Tensor, row: Integers, chosen: Integers, times: Integers) -> Batch:
        """Transitions; the ``chosen`` ones want what was reached at ``times``, with the rewards and endings of that."""
        assert self._hindsight is not None
        length = self._ring.length
        which = torch.from_numpy(chosen).to(self._device)
        at = torch.from_numpy(row[chosen] * length + times % length).to(self._device)
        goal = self._reached(at)
        if len(chosen):
            later = where.slots[1:, which]  # [n, m]: what counts is the state that each transition led to
            reached = self._reached(later.flatten())
            wanted = goal.expand(len(later), *goal.shape).flatten(0, 1)
            reward, ends = self._hindsight.judge(reached, wanted)
            self._reward[:, which] = reward.view(later.shape).to(self._reward)
            if ends is not None:  # before the window is cut at endings
                self._terminated[:, which] = ends.view(later.shape)
            else:
                self._hindsight.keep(self._terminated[:, which])
        read = self._transitions(where, weight)
        read.observation[WANTED][:, which] = goal
        if self._window:
            read.window[f"observation/{WANTED}"][:, which] = goal
        return read

    def _reached(self, slots: Tensor) -> Tensor:
        """The goals that were reached ``[len(slots), …]``, in memory of their own."""
        if REACHED in self._frames:
            return self._frames[REACHED].read(slots[None])[0].clone()
        return self._ring.flat[f"observation/{REACHED}"].index_select(0, slots)

    def _states(self, time: Integers, row: Integers) -> HiddenState:
        """The hidden states with which sequences start."""
        starts = row * self._hidden.length + time // self._stride % self._hidden.length
        index = torch.from_numpy(starts).to(self._device)
        return HiddenState({name: x.index_select(0, index) for name, x in self._hidden.flat.items()})

    @property
    def _finals(self) -> bool:
        """Whether the replay keeps last observations of episodes."""
        return FINAL + self._names[0] in self._ring.columns

    def _batch(self, states: Tensor, real: Tensor, weight: Tensor) -> Batch:
        """What was read of the slots of ``states``."""
        observation = dict(self._seen)
        for name, frames in self._frames.items():
            observation[name] = frames.read(states.view(-1, self._slots.shape[1]))
        return Batch(
            observation=observation,
            first=self._first,
            action=dict(self._acted),
            reward=self._reward,
            terminated=self._terminated,
            truncated=self._truncated,
            discount=torch.where(self._terminated, *self._discounts, out=self._discount),
            real=real,
            weight=weight,
            experience=dict(self._learned),
        )
