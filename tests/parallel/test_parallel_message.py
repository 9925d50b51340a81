"""Serialization of messages."""

from __future__ import annotations

import math
import os

import numpy as np

from ludus.parallel.message import pack, read_message, unpack, write_message

TREE = {
    "plain": [1, -2.5, "ü", None, True, {"deep": []}],
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), {"x": np.zeros((0, 4)), "y": np.array(3.5)}],
    "mask": np.array([True, False]),
    "turned": np.arange(12.0).reshape(3, 4).T,
    "number": np.float32(0.25),
}


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return a == b


def test_pack_and_unpack():
    assert same(TREE, unpack(pack(TREE)))
    assert math.isnan(unpack(pack([math.nan]))[0])
    unpack(pack(TREE))["mask"][0] = False  # a writable copy


def test_write_message_replaces_the_previous_one():
    fd = os.memfd_create("letter")
    for tree in (TREE, {"short": 1}, [np.zeros(1 << 20)]):
        write_message(fd, tree)
        assert same(tree, read_message(fd))
    os.close(fd)
