import math
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from ludus.core.errors import UserError
from ludus.logging.tensorboard import EventFile, _checksum

NUMBERS = {
    "loss/policy": 0.1,
    "größe": -3.5,
    "nan": math.nan,
    "inf": math.inf,
    "too large": -1e300,
    "tiny": 1e-300,
    "x" * 200: 1.0,
}


def test_the_check_is_crc_32c_masked():
    crc = 0xE3069283  # of these nine digits, in every list of CRCs
    assert _checksum(b"123456789") == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_tensorboards_own_reader_finds_every_event_as_it_was_written(tmp_path):
    file = EventFile(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    steps = [0, 1, 127, 128, 2**31, 2**62]
    for step in steps:
        file.write(step, 1.7e9 + 0.25, NUMBERS)
    file.close()
    file.close()
    (path,) = (tmp_path / "a" / "b").iterdir()
    first, *events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    assert first.file_version == "brain.Event:2"
    assert [event.step for event in events] == steps
    for event in events:
        assert event.wall_time == 1.7e9 + 0.25
        found = {value.tag: value.simple_value for value in event.summary.value}
        assert list(found) == list(NUMBERS)
        assert found["loss/policy"] == pytest.approx(0.1, rel=1e-7)
        assert math.isnan(found["nan"])
        assert (found["größe"], found["inf"], found["too large"], found["tiny"]) == (-3.5, math.inf, -math.inf, 0)


def test_a_later_file_makes_tensorboard_forget_the_steps_after_a_resume(tmp_path):
    for now, forget, steps in ((1.0e9, None, [1, 2, 3]), (1.0e9 + 1e-3, 1, [2, 4])):
        file = EventFile(tmp_path)
        if forget is not None:
            file.purge_after(forget)
        for step in steps:
            file.write(step, now, {"x": step + now})
        file.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("x")
    assert [event.step for event in events] == [1, 2, 4]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        EventFile(tmp_path / "file" / "tensorboard").write(1, 0.0, {})
