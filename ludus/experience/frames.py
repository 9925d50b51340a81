"""Storage of stacked frames: each frame is stored once as long as every stack is the previous one shifted by one."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.spec import Spec
from ludus.core.types import State
from ludus.experience.storage import Integers, Ring, as_numpy

SPARE = 8  # one more frame per this many steps, for the older frames of an episode's first stack


class FrameStorage:
    """Stores one stacked observation as a stream of frames per row; each stack is a consecutive part of it.

    The first stack of an episode is appended whole. Of a later one only the newest frame is appended if the stream
    ends with the others, else the whole stack. So every stack is read as it was written, and none crosses an episode
    boundary. Where episodes are so short that the spare frames do not suffice, the oldest steps expire earlier. A
    stack within an episode that is not the previous one shifted sets ``irregular``; ``store_whole_stacks`` then makes
    room for a whole stack at every step.
    """

    def __init__(self, spec: Spec, length: int, batch: int, span: int, device: torch.device, folder: str) -> None:
        self.stack, self._length, self.count = spec.stack, length, frames_needed(spec, length, span)
        self._whole_count = frames_needed(spec, length, span, whole=True)
        self._frame_bytes = batch * spec.size * np.dtype(spec.dtype).itemsize // spec.stack  # one frame of all rows
        self.irregular = self.whole = False
        self._stream = Ring(self.count, batch, device, folder)
        self._newest_ring = Ring(length, batch, device)
        self._newest_ring.add("newest", (), torch.int64)  # number of each step's newest frame in the stream of its row
        column = self._newest_ring.columns["newest"]
        self._newest = column.numpy() if device.type == "cpu" else np.zeros((batch, length), np.int64)
        self._written = np.zeros(batch, np.int64)  # frames written to each stream
        self._appended = np.ones(batch, np.int64)  # frames appended by the last write
        self._offsets = torch.arange(spec.stack - 1, -1, -1, device=device)
        self._out: dict[str, Tensor] = {}

    def write(self, rows: Integers, time: int, x: Tensor, first: NDArray[np.bool_]) -> None:
        """Write the stacks ``[b, stack * channels, …]`` of a time step."""
        frames = x.reshape(len(x), self.stack, x.shape[1] // self.stack, *x.shape[2:])
        self._stream.add("frame", tuple(frames.shape[2:]), x.dtype)
        whole = first | ~self._is_shifted(rows, frames, first)
        self.irregular = self.irregular or bool((whole & ~first).any())
        self._appended[rows] = np.where(whole, self.stack, 1)
        if len(begins := np.flatnonzero(whole)):
            numbers = self._written[rows[begins], None] + np.arange(self.stack - 1)
            older = frames[torch.from_numpy(begins).to(x.device), :-1].flatten(0, 1)
            self._put(rows[begins].repeat(self.stack - 1), numbers.reshape(-1), older)
            self._written[rows[begins]] += self.stack - 1
        newest = self._written[rows]
        self._put(rows, newest, frames[:, -1])
        self._written[rows] += 1
        slot = time % self._length
        self._newest[rows, slot] = newest
        if x.device.type != "cpu":
            index = torch.from_numpy(rows).to(x.device)
            self._newest_ring.columns["newest"][index, slot] = torch.from_numpy(newest).to(x.device)

    def newest(self, x: Tensor) -> Tensor:
        """Return the newest frames ``[b, channels, …]`` of stacks ``[b, stack * channels, …]``."""
        return x[:, x.shape[1] - x.shape[1] // self.stack :]

    def amend(
        self, rows: Integers, time: int, x: Tensor, first: NDArray[np.bool_], was_first: NDArray[np.bool_]
    ) -> None:
        """Overwrite the stacks of the last time step."""
        self._written[rows] -= np.maximum(self._appended[rows], np.where(was_first, self.stack, 1))
        self.write(rows, time, x, first)

    @property
    def bytes(self) -> int:
        """Bytes of the frames."""
        return self.count * self._frame_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes of all frames that were ever written."""
        return int(self._written.sum()) * self._frame_bytes // len(self._written)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the frames if a whole stack is stored at every step."""
        return self._whole_count * self._frame_bytes

    def store_whole_stacks(self) -> None:
        """Make room for a whole stack at every step; frames written so far stay."""
        old, self.whole = self._stream, True
        self._stream = Ring(self._whole_count, old.batch, old.device, old.folder)
        for row, written in enumerate(self._written.tolist()):
            if written:
                low, high, here = max(0, written - self.count), written - 1, slice(row, row + 1)
                self._stream.load(here, high, old.save(here, low, high))
        self.count = self._whole_count

    def _is_shifted(self, rows: Integers, frames: Tensor, first: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether the stream of each row ends with all frames of its new stack but the newest; true where ``first``."""
        going = np.flatnonzero(~first)
        shifted = np.ones(len(rows), np.bool_)
        if len(going):
            numbers = self._written[rows[going], None] + np.arange(1 - self.stack, 0)
            index = (rows[going, None] * self.count + numbers % self.count).reshape(-1)
            every = len(going) == len(rows)
            older = (frames if every else frames[torch.from_numpy(going).to(frames.device)])[:, :-1]
            source, new = as_numpy(self._stream.flat["frame"]), as_numpy(older)
            if isinstance(source, np.ndarray):  # ten times faster than torch
                shifted[going] = (source.take(index, 0).reshape(new.shape) == new).reshape(len(going), -1).all(1)
            else:
                stored = source.index_select(0, torch.from_numpy(index).to(source.device)).view(new.shape)
                shifted[going] = (stored == new).flatten(1).all(1).cpu().numpy()
        return shifted

    def oldest(self, rows: slice, low: int, high: int) -> int:
        """Return the first time from ``low`` to ``high`` whose stacks are complete in all rows."""
        bound = self._written[rows] - self.count + self.stack - 1
        while low < high and (self._newest[rows, low % self._length] < bound).any():
            low += 1
        return low

    def read(self, slots: Tensor, purpose: str = "") -> Tensor:
        """Return the stacks ``[steps, M, stack * channels, …]`` at slots ``[steps, M]``.

        The result is valid until the next read with the same ``purpose``.
        """
        source = self._stream.flat["frame"]
        newest = self._newest_ring.flat["newest"].index_select(0, slots.flatten()).view(slots.shape)
        index = (newest.unsqueeze(-1) - self._offsets).remainder_(self.count)  # [steps, M, stack]
        index = index.add_((slots // self._length * self.count).unsqueeze(-1)).flatten()
        out = self._out.get(purpose)
        if out is None or len(out) != len(index):
            out = torch.empty((len(index), *source.shape[1:]), dtype=source.dtype, device=source.device)
            self._out[purpose] = out
        torch.index_select(source, 0, index, out=out)
        return out.view(*slots.shape, self.stack * source.shape[1], *source.shape[2:])

    def save(self, rows: slice, low: int, high: int) -> State:
        """Return the frames of the steps from time ``low`` to ``high``."""
        lows = self._newest[rows, low % self._length] - self.stack + 1
        highs = self._written[rows] - 1
        streams = enumerate(zip(lows.tolist(), highs.tolist(), strict=True), rows.start)
        return {
            "newest": self._newest_ring.save(rows, low, high),
            "written": (highs + 1).tolist(),
            "appended": self._appended[rows].tolist(),
            "whole": self.whole,
            "frame": [self._stream.save(slice(row, row + 1), *span) for row, span in streams],
        }

    def load(self, rows: slice, high: int, state: State) -> None:
        """Load what ``save`` returned."""
        self._newest_ring.load(rows, high, state["newest"])
        if self._newest_ring.device.type != "cpu":
            self._newest[rows] = self._newest_ring.columns["newest"][rows].cpu().numpy()
        self._written[rows], self._appended[rows] = state["written"], state["appended"]
        for row, pieces in enumerate(state["frame"], rows.start):
            self._stream.load(slice(row, row + 1), int(self._written[row]) - 1, pieces)

    def _put(self, rows: Integers, numbers: Integers, frames: Tensor) -> None:
        index = torch.from_numpy(rows * self.count + numbers % self.count)
        self._stream.flat["frame"].index_copy_(0, index.to(frames.device), frames)


def frames_needed(spec: Spec, length: int, span: int, whole: bool = False) -> int:
    """Return how many frames of a row are stored for ``length`` steps: one per step and some spare, or whole stacks."""
    steps = length * spec.stack if whole else length + length // SPARE
    return steps + (span + 1) * spec.stack
