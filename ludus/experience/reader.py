"""Read the items drawn from a replay into a batch, with n-step returns and hindsight goals."""

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
from ludus.experience.frames import FrameStorage
from ludus.experience.hindsight import Hindsight
from ludus.experience.storage import FINAL, FLAGS, PackedFlags, Ring, SlotIndex


class NStep(NamedTuple):
    """n-step transitions, each ``[M]``."""

    reward: Tensor  # Σ_{i<k} γ^i r_i
    discount: Tensor  # γ^k, or 0 if the last transition terminated
    terminated: Tensor
    truncated: Tensor
    steps: Tensor  # k ≤ n: number of transitions


def n_step(reward: Tensor, terminated: Tensor, truncated: Tensor, real: Tensor, powers: Tensor) -> NStep:
    """Sum up to n rewards ``[n, M]`` (Sutton 1988); ``powers`` are γ^0 to γ^n.

    The sum stops after a transition that terminated or truncated, and before padding (not ``real`` ``[n, M]``); the
    first transition must be real. Values after the stop may be NaN.
    """
    n = len(reward)
    stopped = torch.zeros(reward.shape, dtype=torch.bool, device=reward.device)  # before this transition
    torch.logical_or((terminated | truncated)[:-1], ~real[1:], out=stopped[1:])
    for i in range(2, n):
        stopped[i] |= stopped[i - 1]
    steps = n - stopped.sum(0)
    last = (steps - 1).unsqueeze(0)
    terminates = terminated.gather(0, last)[0]
    return NStep(
        reward=(reward * powers[:n, None]).masked_fill_(stopped, 0).sum(0),
        discount=powers.index_select(0, steps).masked_fill_(terminates, 0),
        terminated=terminates,
        truncated=truncated.gather(0, last)[0],
        steps=steps,
    )


class Gather:
    """Copies rows of several columns ``[slots, …]`` into preallocated outputs, with native.c where it is compiled."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pairs, self._library = pairs, native.LIBRARY
        self._columns = native.columns(pairs)

    def __call__(self, slots: Tensor) -> None:
        """Copy the rows at ``slots`` (contiguous); an output with fewer rows takes the first of them."""
        if self._library is not None and self._columns is not None:
            if self._library.ludus_gather(self._columns, len(self._columns), slots.data_ptr()):
                raise IndexError("A replay was read at a slot outside of its memory.")
            return
        for source, out in self._pairs:
            torch.index_select(source, 0, slots.flatten()[: len(out)], out=out)


class Reader:
    """Reads transitions, n-step transitions or sequences from a replay's memory into batches.

    The batch's memory is allocated once and overwritten by the next read.
    """

    def __init__(
        self,
        config: ReplayConfig,
        gamma: float,
        names: list[str],
        slot_index: SlotIndex,
        ring: Ring,
        hidden: Ring,
        frames: dict[str, FrameStorage],
        hindsight: Hindsight | None,
        window: bool,
    ) -> None:
        self._names, self._slot_index, self._ring, self._hidden = names, slot_index, ring, hidden
        self._frames, self._hindsight, self._device = frames, hindsight, ring.device
        self._sequence, self._stride = config.sequence > 0, config.sequence - config.overlap
        self._span, self._drawn = config.span, config.batch_size  # transitions of an item; items of a batch
        self._n_step = self._span > 1 and not self._sequence
        self._window = window and self._n_step
        self._states = states = self._span + 1
        self._slots = torch.zeros((states, self._drawn), dtype=torch.int64)  # [states, M]
        self._flags, views = self._outputs([FLAGS], states)
        flags = PackedFlags(views[FLAGS])
        self._first, self._reward = flags.first, flags.reward[1:]  # [states, M] and [states - 1, M]
        self._terminated, self._truncated, self._real = flags.terminated[1:], flags.truncated[1:], flags.real[1:]
        self._all_real = torch.ones_like(self._reward[:1], dtype=torch.bool)  # padding is never drawn
        self._weight, self._discount = torch.ones_like(self._reward[:1]), torch.zeros_like(self._reward)
        self.set_gamma(gamma)
        # created at the first read, when the agent's columns are known
        self._gather, self._gather_ends, self._gather_window = Gather([]), Gather([]), Gather([])
        self._observation: Tensors = {}
        self._action: Tensors = {}
        self._experience: Tensors = {}
        self._window_out: Tensors = {}

    def set_gamma(self, gamma: float) -> None:
        """Discount by this from now on."""
        self._discounts = torch.tensor([0.0, gamma], device=self._device).unbind()
        self._powers = (gamma ** torch.arange(self._states, dtype=torch.float64)).to(self._device, torch.float32)

    def read(self, numbers: Tensor, weight: Tensor | None, generator: torch.Generator) -> Batch:
        """Return the batch of these items; ``weight`` are their importance weights."""
        if not self._action:
            self._allocate()
        slots = self._slot_index.slots(numbers, self._states, self._slots).to(self._device)
        weight = self._weight if weight is None else weight.to(self._device)[None]
        self._gather(slots)
        if self._sequence:
            batch = self._batch(slots, self._usable(), weight.expand_as(self._reward))
            time, row = self._slot_index.split(numbers.numpy())
            starts = row * self._hidden.length + time // self._stride % self._hidden.length
            index = torch.from_numpy(starts).to(self._device)
            batch.state = HiddenState({name: x.index_select(0, index) for name, x in self._hidden.flat.items()})
        elif self._hindsight is not None:
            # before n-step returns are cut at endings
            goals = self._hindsight.relabel(numbers, slots, self._reward, self._terminated, generator)
            batch = self._transitions(slots, weight)
            self._hindsight.set_goals(batch, *goals)
        else:
            batch = self._transitions(slots, weight)
        batch.index = numbers
        return batch

    def _allocate(self) -> None:
        """Allocate the outputs. Where n-step transitions end is known only after their flags have been read."""
        states, acts = (self._span + 1, self._span) if self._sequence else (2, 1)
        observations = [f"observation/{name}" for name in self._names if name not in self._frames]
        actions, experience = (
            [name for name in self._ring.columns if name.startswith(kind)] for kind in ("action/", "experience/")
        )
        pairs, views = self._outputs(observations, states)
        for names in (actions, experience):
            more = self._outputs(names, acts)
            pairs, views = pairs + more[0], views | more[1]
        self._observation, self._action, self._experience = (
            {name.partition("/")[2]: views[name] for name in names} for names in (observations, actions, experience)
        )
        self._gather = Gather(self._flags if self._n_step else [*self._flags, *pairs])
        self._gather_ends = Gather(pairs)
        if self._window:
            inside, self._window_out = self._outputs([*observations, *actions], self._span - 1)
            self._gather_window = Gather(inside)

    def _outputs(self, names: list[str], steps: int) -> tuple[list[tuple[Tensor, Tensor]], Tensors]:
        """Allocate memory for some columns; return pairs for ``Gather``, and views ``[steps, M, …]`` by name."""
        pairs, views = [], {}
        for name in names:
            source = self._ring.flat[name]
            out = torch.empty((steps * self._drawn, *source.shape[1:]), dtype=source.dtype, device=source.device)
            pairs.append((source, out))
            views[name] = out.view(steps, self._drawn, *source.shape[1:])
        return pairs, views

    def _transitions(self, slots: Tensor, weight: Tensor) -> Batch:
        """Return one-step or n-step transitions."""
        if not self._n_step:
            batch = self._batch(slots, self._all_real, weight)
            return self._with_final(batch, slots[1], self._first[1]) if self.has_finals else batch
        window = n_step(self._reward, self._terminated, self._truncated, self._usable(), self._powers)
        steps = window.steps[None]
        ends = torch.cat([slots[:1], slots.gather(0, steps)])  # [2, M]
        self._gather_ends(ends)
        batch = replace(
            self._batch(ends, self._all_real, weight),
            first=torch.cat([self._first[:1], torch.zeros_like(self._first[:1])]),
            reward=window.reward[None],
            terminated=window.terminated[None],
            truncated=window.truncated[None],
            discount=window.discount[None],
            window=self._read_window(slots[1 : self._span], window.steps) if self._window else {},
        )
        return self._with_final(batch, ends[1], self._first.gather(0, steps)[0]) if self.has_finals else batch

    def _usable(self) -> Tensor:
        """Which transitions are real and lead to a known state, ``[states - 1, M]``."""
        return self._real if self.has_finals else self._real & ~(self._first[1:] & ~self._terminated)

    def _with_final(self, batch: Batch, slots: Tensor, reset: Tensor) -> Batch:
        """Replace successors that were ``reset`` in the same step ``[M]`` by the final observations."""
        for name, x in batch.observation.items():
            final = self._ring.flat[FINAL + name].index_select(0, slots)
            if name in self._frames:  # the final stack is the one before it with one more frame
                length = self._ring.length
                before = slots + torch.where(slots % length == 0, length - 1, -1)
                older = self._frames[name].read(before[None], "final")[0, :, final.shape[1] :]
                final = torch.cat([older, final], 1)
            x[1] = torch.where(reset.view(-1, *[1] * (final.dim() - 1)), final, x[1])
        return replace(batch, first=torch.cat([self._first[:1], torch.zeros_like(self._first[:1])]))

    def _read_window(self, slots: Tensor, steps: Tensor) -> Tensors:
        """Return the states inside n-step transitions, at slots ``[n - 1, M]``, with a discount of 0 from ``steps``."""
        self._gather_window(slots.flatten())
        window = dict(self._window_out)
        for name, frames in self._frames.items():
            window[f"observation/{name}"] = frames.read(slots, "window")
        reached = torch.arange(1, self._span, device=self._device)[:, None] < steps
        window["discount"] = self._powers[1 : self._span, None] * reached
        return window

    @property
    def has_finals(self) -> bool:
        """Whether final observations are stored."""
        return FINAL + self._names[0] in self._ring.columns

    def _batch(self, slots: Tensor, real: Tensor, weight: Tensor) -> Batch:
        """Return what was read, with the stacked frames at ``slots`` ``[states, M]``."""
        observation = dict(self._observation)
        for name, frames in self._frames.items():
            observation[name] = frames.read(slots)
        return Batch(
            observation=observation,
            first=self._first,
            action=dict(self._action),
            reward=self._reward,
            terminated=self._terminated,
            truncated=self._truncated,
            discount=torch.where(self._terminated, *self._discounts, out=self._discount),
            real=real,
            weight=weight,
            experience=dict(self._experience),
        )
