"""Stacked frames, each stored once where every stack is the one before it, shifted by one."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.spec import Spec
from ludus.core.types import State
from ludus.experience.ring import Ring
from ludus.experience.row_group import Integers, plain

SPARE = 8  # one frame more per so many steps, for the older frames that an episode begins with


class Frames:
    """One stacked observation: each row is a stream of frames, in which every stack is a piece.

    An episode's first stack enters the stream whole, and of every later one the newest frame, if the others are those
    that the stream ends with; else it enters whole too. So a stack never crosses an episode, and is as it was, whatever
    its frames were. Where episodes are so short that the spare room does not hold their first frames, the oldest steps
    expire earlier. A stack that is no shift within an episode sets ``broken``; ``keep_whole`` then makes room for
    whole stacks at every step.
    """

    def __init__(self, spec: Spec, length: int, batch: int, span: int, device: torch.device, folder: str) -> None:
        self.stack, self._length, self.count = spec.stack, length, frames_kept(spec, length, span)
        self._whole_count = frames_kept(spec, length, span, whole=True)
        self._row_bytes = batch * spec.size * np.dtype(spec.dtype).itemsize // spec.stack  # of one frame in all rows
        self.broken = self.whole = False
        self._stream = Ring(self.count, batch, device, folder)
        self._places = Ring(length, batch, device)
        self._places.add("place", (), torch.int64)  # of a step's newest frame: which of its stream it was
        column = self._places.columns["place"]
        self._place = column.numpy() if device.type == "cpu" else np.zeros((batch, length), np.int64)
        self._written = np.zeros(batch, np.int64)  # frames of each stream
        self._entered = np.ones(batch, np.int64)  # those of the last write
        self._older = torch.arange(spec.stack - 1, -1, -1, device=device)
        self._out: dict[str, Tensor] = {}

    def write(self, rows: Integers, time: int, x: Tensor, fresh: NDArray[np.bool_]) -> None:
        """Take the stacks ``[b, stack * channels, …]`` of a time; those that are ``fresh`` begin an episode."""
        frames = x.reshape(len(x), self.stack, x.shape[1] // self.stack, *x.shape[2:])
        self._stream.add("frame", tuple(frames.shape[2:]), x.dtype)
        enters_whole = fresh | ~self._shifted(rows, frames, fresh)
        self.broken = self.broken or bool((enters_whole & ~fresh).any())
        begins = np.flatnonzero(enters_whole)
        self._entered[rows] = np.where(enters_whole, self.stack, 1)
        if len(begins):
            places = self._written[rows[begins], None] + np.arange(self.stack - 1)
            older = frames[torch.from_numpy(begins).to(x.device), :-1].flatten(0, 1)
            self._put(rows[begins].repeat(self.stack - 1), places.reshape(-1), older)
            self._written[rows[begins]] += self.stack - 1
        newest = self._written[rows]
        self._put(rows, newest, frames[:, -1])
        self._written[rows] += 1
        slot = time % self._length
        self._place[rows, slot] = newest
        if x.device.type != "cpu":
            where = torch.from_numpy(rows).to(x.device)
            self._places.columns["place"][where, slot] = torch.from_numpy(newest).to(x.device)

    def amend(
        self, rows: Integers, time: int, x: Tensor, fresh: NDArray[np.bool_], was_fresh: NDArray[np.bool_]
    ) -> None:
        """Take the stacks of the last time step again, in place of what was written of it."""
        self._written[rows] -= np.maximum(self._entered[rows], np.where(was_fresh, self.stack, 1))
        self.write(rows, time, x, fresh)

    def bytes_to_keep_whole(self) -> int:
        """What a stream of whole stacks takes."""
        return self._whole_count * self._row_bytes

    def bytes(self) -> int:
        """What the stream takes."""
        return self.count * self._row_bytes

    def keep_whole(self) -> None:
        """Make room for a whole stack at every step; what is held stays."""
        old, self.whole = self._stream, True
        self._stream = Ring(self._whole_count, old.batch, old.device, old.folder)
        for row, written in enumerate(self._written.tolist()):
            if written:
                held = slice(row, row + 1), max(0, written - self.count), written - 1
                self._stream.load(held[0], held[2], old.save(*held))
        self.count = self._whole_count

    def _shifted(self, rows: Integers, frames: Tensor, fresh: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether the stream of each row ends with all frames of its new stack but the newest; true where ``fresh``."""
        going = np.flatnonzero(~fresh)
        shifted = np.ones(len(rows), np.bool_)
        if len(going):
            places = self._written[rows[going], None] + np.arange(1 - self.stack, 0)
            index = (rows[going, None] * self.count + places % self.count).reshape(-1)
            every = len(going) == len(rows)
            older = (frames if every else frames[torch.from_numpy(going).to(frames.device)])[:, :-1]
            source, new = plain(self._stream.flat["frame"]), plain(older)
            if isinstance(source, np.ndarray):  # torch takes ten times as long
                shifted[going] = (source.take(index, 0).reshape(new.shape) == new).reshape(len(going), -1).all(1)
            else:
                held = source.index_select(0, torch.from_numpy(index).to(source.device)).view(new.shape)
                shifted[going] = (held == new).flatten(1).all(1).cpu().numpy()
        return shifted

    def oldest(self, rows: slice, low: int, high: int) -> int:
        """The first time from ``low`` on whose stacks are whole in all rows."""
        bound = self._written[rows] - self.count + self.stack - 1
        while low < high and (self._place[rows, low % self._length] < bound).any():
            low += 1
        return low

    def read(self, slots: Tensor, purpose: str = "") -> Tensor:
        """The stacks ``[steps, M, stack * channels, …]`` at slots ``[steps, M]``, in memory of that purpose."""
        source = self._stream.flat["frame"]
        newest = self._places.flat["place"].index_select(0, slots.flatten()).view(slots.shape)
        behind = (newest.unsqueeze(-1) - self._older).remainder_(self.count)  # [steps, M, stack]
        index = behind.add_((slots // self._length * self.count).unsqueeze(-1)).flatten()
        out = self._out.get(purpose)
        if out is None or len(out) != len(index):
            out = torch.empty((len(index), *source.shape[1:]), dtype=source.dtype, device=source.device)
            self._out[purpose] = out
        torch.index_select(source, 0, index, out=out)
        return out.view(*slots.shape, self.stack * source.shape[1], *source.shape[2:])

    def save(self, rows: slice, low: int, high: int) -> State:
        """What the steps from time ``low`` to ``high`` need."""
        lows = self._place[rows, low % self._length] - self.stack + 1
        highs = self._written[rows] - 1
        streams = enumerate(zip(lows.tolist(), highs.tolist(), strict=True), rows.start)
        return {
            "place": self._places.save(rows, low, high),
            "written": (highs + 1).tolist(),
            "entered": self._entered[rows].tolist(),
            "whole": self.whole,
            "frame": [self._stream.save(slice(row, row + 1), *span) for row, span in streams],
        }

    def load(self, rows: slice, high: int, state: State) -> None:
        """Take back what ``save`` gave."""
        self._places.load(rows, high, state["place"])
        if self._places.device.type != "cpu":
            self._place[rows] = self._places.columns["place"][rows].cpu().numpy()
        self._written[rows] = state["written"]
        self._entered[rows] = state.get("entered", 1)  # checkpoints of before have none
        for row, parts in enumerate(state["frame"], rows.start):
            self._stream.load(slice(row, row + 1), int(self._written[row]) - 1, parts)

    def _put(self, rows: Integers, places: Integers, frames: Tensor) -> None:
        index = torch.from_numpy(rows * self.count + places % self.count)
        self._stream.flat["frame"].index_copy_(0, index.to(frames.device), frames)


def frames_kept(spec: Spec, length: int, span: int, whole: bool = False) -> int:
    """How many frames a row of a replay of ``length`` steps keeps: one a step and some to spare, or whole stacks."""
    steps = length * spec.stack if whole else length + length // SPARE
    return steps + (span + 1) * spec.stack
