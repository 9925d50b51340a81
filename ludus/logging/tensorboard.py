"""Write TensorBoard event files without importing TensorBoard, which is slow.

A file is a sequence of TFRecords (length, checksum, data, checksum), each with an ``Event`` message of event.proto.
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

WALL_TIME, STEP, VERSION, SUMMARY, SESSION = b"\x09", b"\x10", b"\x1a", b"\x2a", b"\x3a"  # fields of an Event
VALUE, TAG, SIMPLE_VALUE = b"\x0a", b"\x0a", b"\x15"  # fields of a Summary and its Values
START = b"\x08\x01"  # a SessionLog that hides later steps of earlier files


class EventFile:
    """Writes scalars to a new file in ``folder``, which is created at the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: FileIO | None = None
        self._purge_step: int | None = None

    def write(self, step: int, now: float, numbers: Mapping[str, float]) -> None:
        """Append the numbers of one step at the time ``now`` (seconds since 1970)."""
        if self._file is None:
            self._file = self._open(now)
        if self._purge_step is not None:
            self._append(self._file, _event(now, self._purge_step, SESSION, START))
            self._purge_step = None
        self._append(self._file, _event(now, step, SUMMARY, b"".join(map(_value, numbers, numbers.values()))))

    def purge_after(self, step: int) -> None:
        """Hide later steps of earlier files in TensorBoard."""
        self._purge_step = step + 1

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
        append(file, length + _checksum(length) + data + _checksum(data))


def _event(now: float, step: int, field: bytes, content: bytes) -> bytes:
    return WALL_TIME + struct.pack("<d", now) + STEP + _varint(step) + _field(field, content)


def _value(name: str, number: float) -> bytes:
    try:
        single = struct.pack("<f", number)
    except OverflowError:  # too large for 32 bits
        single = struct.pack("<f", math.copysign(math.inf, number))
    return _field(VALUE, _field(TAG, name.encode()) + SIMPLE_VALUE + single)


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Encode an integer as a protobuf varint."""
    more = bytearray()
    while number > 127:
        more.append(number & 127 | 128)
        number >>= 7
    return bytes([*more, number])


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of a TFRecord."""
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
