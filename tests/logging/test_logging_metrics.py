import errno
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from ludus.core.errors import UserError
from ludus.logging.metrics import Metrics, read_metrics


def strict(line: str) -> dict:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_every_line_is_strict_json_and_reads_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write(8, {"loss/policy": math.nan, "kl": -math.inf, "x": torch.tensor(2.5)})
    assert strict(path.read_text())["loss/policy"] == "nan"  # on disk before the file is closed
    metrics.write(16, {"x": 1})
    metrics.close()
    first, second = read_metrics(path)
    assert math.isnan(first["loss/policy"])
    assert (first["kl"], first["x"], first["step"], second["step"]) == (-math.inf, 2.5, 8, 16)
    assert 0 <= second["time"] - first["time"] < 60


def test_a_resume_cuts_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write(1, {"x": 1})
    state = metrics.state_dict()
    metrics.write(2, {"x": 2})
    metrics.write(3, {"x": 3})
    metrics.close()
    resumed = Metrics(path)
    resumed.load_state_dict(state)
    resumed.write(2, {"x": 20})
    assert [(line["step"], line["x"]) for line in read_metrics(path)] == [(1, 1), (2, 20)]
    assert resumed.state_dict()["offset"] == path.stat().st_size


@pytest.mark.parametrize("change", [0, 3, -3, 10**6, 10**40, -(10**6)])
def test_an_offset_that_fits_no_line_still_leaves_whole_lines(tmp_path, change):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in range(4):
        metrics.write(step, {"x": step})
    metrics.load_state_dict({"offset": max(metrics.state_dict()["offset"] + change, 0), "step": 3})
    metrics.write(9, {"x": 9})
    assert [line["step"] for line in read_metrics(path)] == [*range({-3: 3, -(10**6): 0}.get(change, 4)), 9]


def test_a_line_cut_short_by_a_kill_is_left_out_and_mended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0}\n{"step": 2, "ti')
    assert [line["step"] for line in read_metrics(path)] == [1]
    Metrics(path).write(2, {})
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_the_lines_are_on_disk_before_a_save_can_name_their_end(tmp_path, monkeypatch):
    metrics, synced = Metrics(tmp_path / "metrics.jsonl"), []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    metrics.write(1, {"x": 1})
    assert synced == []
    assert metrics.state_dict() == {"offset": synced[0], "step": 1}
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_size]


@pytest.mark.parametrize(
    "state", [{}, {"offset": -1, "step": 0}, {"offset": 1.0, "step": 0}, {"offset": 1, "step": None}]
)
def test_a_state_that_says_no_place_is_refused_and_nothing_cut(tmp_path, state):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(1, {})
    with pytest.raises(UserError, match="does not hold the length"):
        metrics.load_state_dict(state)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(1, {})

    def half(file, data):
        file.write(data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ludus.core.files.write_all", half)
    with pytest.raises(UserError, match=r"metrics\.jsonl.* cannot be written \(No space left"):
        metrics.write(2, {})
    monkeypatch.undo()
    metrics.write(3, {})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]


def test_what_is_no_file_of_metrics_is_refused_unread(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 40)
    for name in ("link", "pipe", "hole"):
        for reader in (Metrics, read_metrics):
            with pytest.raises(UserError, match=name):
                reader(tmp_path / name)
    assert (tmp_path / "target").read_text() == "precious"
    assert (tmp_path / "hole").stat().st_size == 1 << 40


def test_bad_files_and_names(tmp_path):
    with pytest.raises(UserError, match="none"):
        read_metrics(tmp_path / "none.jsonl")
    (tmp_path / "m").write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(UserError, match="Line 2"):
        read_metrics(tmp_path / "m")
    with pytest.raises(ValueError, match="step"):
        Metrics(tmp_path / "n").write(1, {"step": 2})


def test_tensorboard_shows_the_same_and_forgets_what_a_resume_cut(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, board = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    metrics = Metrics(path, board)
    metrics.write(1, {"loss/policy": 0.5})
    state = metrics.state_dict()
    metrics.write(2, {"loss/policy": 0.7})
    metrics.close()
    metrics.close()
    resumed = Metrics(path, board)
    resumed.load_state_dict(state)
    resumed.write(3, {"loss/policy": 0.25})
    resumed.close()
    events = EventAccumulator(str(board)).Reload().Scalars("loss/policy")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (3, 0.25)]


def test_tensorboard_is_not_imported():
    code = (
        "import sys, pathlib, tempfile; from ludus.logging.metrics import Metrics\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "Metrics(folder / 'm', folder / 'tb').write(1, {'x': 1.0}); assert 'tensorboard' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
