"""Shared memory between processes."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

from ludus.parallel.process import Launcher
from ludus.parallel.shared_memory import ALIGNED, Block

FIELDS = {"x": ((3, 5), "float32"), "flag": ((3,), "bool"), "scalar": ((), "int64"), "frame": ((3, 7, 7), "uint8")}


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_arrays_do_not_overlap_and_are_aligned():
    block = Block(FIELDS)
    for number, (name, array) in enumerate(block.arrays.items()):
        assert array.shape == FIELDS[name][0]
        assert array.dtype == FIELDS[name][1]
        assert not array.any()
        assert array.ctypes.data % ALIGNED == 0
        array[...] = number % 2
    for number, array in enumerate(block.arrays.values()):
        assert (array == number % 2).all()
    block.close()


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_another_process_writes_the_same_memory(start):
    block = Block(FIELDS)
    view = torch.from_numpy(block["x"])
    launcher = Launcher(start)
    for count in (1, 2):
        process = launcher.start("parallel_jobs:write", {"fields": FIELDS}, {"block": block.fd}, "job")
        assert process.wait(120)
        assert process.code == 0, process.failure()
        assert (view == count).all()
    launcher.close()
    block.close()


def test_closing_twice_with_views_alive():
    gc.collect()
    before = open_fds()
    block = Block(FIELDS)
    view, tensor = block["x"], torch.from_numpy(block["frame"])
    block.close()
    block.close()
    view[...] = 4.0
    tensor[...] = 5
    assert view.sum() == 60
    del view, tensor
    gc.collect()
    assert open_fds() == before


def test_no_files_in_dev_shm():
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    block = Block({"x": ((1 << 20,), "uint8")})
    block["x"][...] = 1
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert {name for name in after - before if "ludus" in name} == set()
    block.close()


def test_block_too_small_for_its_fields_raises():
    small = Block({"x": ((2,), "float32")})
    with pytest.raises(ValueError, match="64 bytes, the fields need"):
        Block({"x": ((1000,), np.dtype("float32").str)}, os.dup(small.fd))
    small.close()
