"""Event files that TensorBoard reads, written without it: importing it takes longer than a thousand lines of metrics.

A file is a row of records ``length, check, data, check``, each datum an ``Event`` of TensorBoard's event.proto, encoded
here by hand: a field is its number and kind in one byte, then its value.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from ludus.core.files import append, make_folder, open_folder, open_regular_file, write_error

WALL_TIME, STEP, VERSION, SUMMARY, SESSION = b"\x09", b"\x10", b"\x1a", b"\x2a", b"\x3a"  # the fields of an Event
VALUE, TAG, SIMPLE_VALUE = b"\x0a", b"\x0a", b"\x15"  # of a Summary: its values; of a Value: name and number
START = b"\x08\x01"  # a SessionLog that tells TensorBoard to forget what an earlier file has from this step on


class EventFile:
    """Writes the scalars of a run to a new file in ``folder``, which is made at the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: FileIO | None = None
        self._forget: int | None = None

    def write(self, step: int, now: float, numbers: Mapping[str, float]) -> None:
        """Append the numbers of one step, taken at ``now`` (seconds since 1970)."""
        if self._file is None:
            self._file = self._open(now)
        if self._forget is not None:
            self._append(self._file, _event(now, self._forget, SESSION, START))
            self._forget = None
        self._append(self._file, _event(now, step, SUMMARY, b"".join(map(_value, numbers, numbers.values()))))

    def forget_after(self, step: int) -> None:
        """Let TensorBoard forget what earlier files have of later steps."""
        self._forget = step + 1

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, now: float) -> FileIO:
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"  # TensorBoard reads them in order
        try:
            make_folder(self._folder)
            with open_folder(self._folder) as folder:
                file = open_regular_file(self._folder / name, "ab+", folder)
        except OSError as error:
            raise write_error(self._folder, error) from error
        self._append(file, WALL_TIME + struct.pack("<d", now) + _field(VERSION, b"brain.Event:2"))
        return file

    @staticmethod
    def _append(file: FileIO, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        append(file, length + _check(length) + data + _check(data))


def _event(now: float, step: int, field: bytes, content: bytes) -> bytes:
    return WALL_TIME + struct.pack("<d", now) + STEP + _varint(step) + _field(field, content)


def _value(name: str, number: float) -> bytes:
    try:
        single = struct.pack("<f", number)
    except OverflowError:  # beyond what 32 bits hold
        single = struct.pack("<f", math.copysign(math.inf, number))
    return _field(VALUE, _field(TAG, name.encode()) + SIMPLE_VALUE + single)


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    more = bytearray()
    while number > 127:
        more.append(number & 127 | 128)
        number >>= 7
    return bytes([*more, number])


def _check(data: bytes) -> bytes:
    """CRC-32C (Castagnoli), rotated and shifted as TensorFlow's records have it."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _row(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc


_TABLE = [_row(i) for i in range(256)]
