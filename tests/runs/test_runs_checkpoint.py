import json
import os
import shutil
import tracemalloc
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.runs.checkpoint import CheckpointManager, load, load_newest, save
from ludus.runs.folder import RunDirectory

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.complex64,
]  # fmt: skip


def some_state(step: int = 0) -> dict:
    return {"agent": {"w": torch.full((50,), float(step)), "b": torch.arange(6)}, "step": step, "score": float("-inf")}


def resign(folder: Path) -> None:
    """Make the manifest true again, as someone who wants to do harm would."""
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("sha256", None)
    for name, entry in body["files"].items():
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            entry.update(bytes=len(data), sha256=sha256(data).hexdigest())
    sign(folder, body)


def sign(folder: Path, body: dict) -> None:
    digest = sha256(json.dumps(body, indent=1).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": digest}, indent=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_every_dtype_and_shape(tmp_path, dtype, shape):
    x = torch.randint(0, 2, shape).to(dtype)
    save(tmp_path / "c", {"x": x}, {})
    back = load(tmp_path / "c")[0]["x"]
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert torch.equal(
        back.view(torch.uint8) if shape and shape[-1] else back, x.view(torch.uint8) if shape and shape[-1] else x
    )


def test_views_shared_memory_parameters_and_arrays(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    array = np.arange(10, dtype=np.uint64) + np.uint64(2**63)
    state = {
        "base": base, "transposed": base.T, "slice": base[1:3, ::2], "again": base, "expanded": base[:1].expand(5, 6),
        "parameter": torch.nn.Parameter(base), "array": array[::-2], "scalar": np.array(3.5), "big": 2**127 + 1,
        "numpy": np.float32(0.1), "pair": (1, torch.tensor(2)),
    }  # fmt: skip
    save(tmp_path / "c", state, {"step": 5, "score": float("nan")})
    back, meta = load(tmp_path / "c")
    for name in ("base", "transposed", "slice", "again", "expanded", "parameter"):
        assert torch.equal(back[name], state[name])
    assert isinstance(back["array"], np.ndarray)
    assert (back["array"] == array[::-2]).all()
    assert back["array"].dtype == np.uint64
    assert back["scalar"].shape == ()
    assert (back["big"], back["numpy"], back["pair"][1].item()) == (2**127 + 1, float(np.float32(0.1)), 2)
    assert meta["step"] == 5
    assert meta["score"] != meta["score"]
    back["base"].add_(1)  # what was loaded is memory of its own
    assert not torch.equal(back["base"], back["again"])


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 3), max_size=5))
@settings(max_examples=30, deadline=None)
def test_any_string_can_name_a_tensor(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("c") / "c"
    save(folder, {name: {name: torch.full((n,), n)} for name, n in names.items()}, {})
    back, _ = load(folder)
    assert {name: len(item[name]) for name, item in back.items()} == names


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    (tmp_path / ".tmp-best-99").mkdir()
    for step in (1, 2):
        save(tmp_path / "best", some_state(step), {"step": step})
    assert load(tmp_path / "best")[0]["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_writer_killed_between_the_two_renames_loses_nothing(tmp_path):
    run = RunDirectory(tmp_path)
    manager = CheckpointManager(run)
    manager.save_best(1, some_state(1), 5.0)
    os.rename(run.best, tmp_path / ".old-best")
    assert run.best_checkpoint() == run.best
    assert load(run.best)[0]["step"] == 1
    manager.save_best(2, some_state(2), 6.0)
    assert load(run.best)[0]["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_step_killed_between_the_two_renames_is_still_the_newest(tmp_path):
    run = RunDirectory(tmp_path)
    manager = CheckpointManager(run, keep=1)
    manager.save(5, some_state(5))
    os.rename(run.checkpoints / "step_5", run.checkpoints / ".old-step_5")
    assert load_newest(run, print)[0]["step"] == 5
    manager.save(6, some_state(6))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_6"]


def test_half_of_what_was_replaced_is_never_taken_for_a_checkpoint(tmp_path):
    run = RunDirectory(tmp_path)
    manager = CheckpointManager(run, keep=1)
    manager.save(5, some_state(5))
    (run.checkpoints / ".old-step_5").mkdir()  # killed while it was deleted
    assert load_newest(run, print)[0]["step"] == 5
    manager.save(6, some_state(6))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_6"]


def test_the_last_ones_are_kept_and_later_ones_deleted(tmp_path):
    run = RunDirectory(tmp_path)
    manager = CheckpointManager(run, keep=2)
    assert run.latest_checkpoint() is None
    for step in (900, 1000, 10000):
        manager.save(step, some_state(step))
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_1000", "step_10000"]
    assert load_newest(run, print)[1:] == ({"step": 10000}, run.checkpoints / "step_10000")
    manager.save(2000, some_state(2000))  # resumed from step 1000
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_1000", "step_2000"]
    assert run.latest_checkpoint() == run.checkpoints / "step_2000"
    manager.save_best(2000, some_state(2000), float("inf"))
    assert load(run.best)[1] == {"step": 2000, "score": float("inf")}


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match=r"There is no checkpoint .*nope"):
        load(tmp_path / "nope")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="manifest"):
        load(tmp_path / "empty")
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_newest(RunDirectory(tmp_path), print)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
@pytest.mark.parametrize("harm", ["gone", "cut", "longer", "flip", "empty", "link", "folder", "pipe"])
def test_each_harm_to_each_file_is_one_sentence(tmp_path, name, harm):
    folder = tmp_path / "step_5"
    save(folder, some_state(), {})
    path = folder / name
    data = bytearray(path.read_bytes())
    path.rename(tmp_path / "moved")
    data[len(data) // 2] ^= 1
    if harm in ("cut", "empty"):
        path.write_bytes(data[: len(data) // 2] if harm == "cut" else b"")
    elif harm in ("longer", "flip"):
        path.write_bytes(data + b"!" if harm == "longer" else data)
    elif harm == "link":
        path.symlink_to(tmp_path / "moved")
    elif harm == "folder":
        path.mkdir()
    elif harm == "pipe":
        os.mkfifo(path)
    with pytest.raises(UserError) as caught:
        load(folder)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert "delete" in message


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", "a/b", "..", ".hidden", "", "a\0b", "state.json\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    folder = tmp_path / "c"
    save(folder, some_state(), {})
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("sha256")
    body["files"][name] = body["files"]["state.json"]
    sign(folder, body)
    with pytest.raises(UserError, match="not the manifest"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("schema", 1, "schema 1"),
        ("schema", None, "schema None"),
        ("files", {}, "not the manifest"),
        ("files", [], "not the manifest"),
        ("files", {"state.json": {"bytes": "7", "sha256": ""}}, "not the manifest"),
        ("files", {n: {"bytes": 10**40, "sha256": ""} for n in ("state.json", "tensors.safetensors")}, "truncated"),
        ("files", {n: {"bytes": -1, "sha256": ""} for n in ("state.json", "tensors.safetensors")}, "too long"),
        ("meta", [], "not the manifest"),
        ("meta", {"x": {"$tensor": "a"}}, "not the manifest"),
    ],
)
def test_a_signed_manifest_that_lies(tmp_path, key, value, says):
    save(tmp_path / "c", some_state(), {})
    body = json.loads((tmp_path / "c" / "manifest.json").read_text())
    body.pop("sha256")
    sign(tmp_path / "c", {**body, key: value})
    with pytest.raises(UserError, match=says):
        load(tmp_path / "c")


BAD_STATES = [
    "[" * 100_000, '{"a": {"$tensor": "gone"}}', '{"a": {"$tensor": []}}', '{"a": {"$float": "x"}}', "[]", '{"$x": 1}',
    '{"a": ' + "9" * 5000 + "}", "\xff",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_STATES, ids=range(len(BAD_STATES)))
def test_a_signed_state_that_is_none(tmp_path, text):
    save(tmp_path / "c", some_state(), {})
    (tmp_path / "c" / "state.json").write_text(text, encoding="latin-1")
    resign(tmp_path / "c")
    with pytest.raises(UserError, match="is not the state of a checkpoint"):
        load(tmp_path / "c")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_one_falls_back_to_the_one_before(tmp_path):
    run, warnings = RunDirectory(tmp_path), []
    for step in (10, 20, 30, 40):
        CheckpointManager(run, keep=4).save(step, some_state(step))
    flip(run.checkpoints / "step_40" / "tensors.safetensors")
    (run.checkpoints / "step_30" / "manifest.json").unlink()
    state, meta, folder = load_newest(run, warnings.append)
    assert (state["step"], meta["step"], folder.name) == (20, 20, "step_20")
    assert [w.split(" is damaged")[0] for w in warnings] == ["Checkpoint step_40", "Checkpoint step_30"]
    assert all("step_20 is used" in w and "\n" not in w for w in warnings)
    for step in (10, 20):
        flip(run.checkpoints / f"step_{step}" / "state.json")
    warnings.clear()
    with pytest.raises(UserError, match=r"no intact checkpoint\. .*step_40/tensors.* was modified"):
        load_newest(run, warnings.append)
    assert warnings == []  # the error says it all


def test_all_is_on_disk_before_it_gets_its_name_and_that_before_the_old_goes(tmp_path, monkeypatch):
    events = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree
    monkeypatch.setattr(
        os, "fsync", lambda fd: (fsync(fd), events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))))
    )
    monkeypatch.setattr(os, "rename", lambda a, b, **k: (rename(a, b, **k), events.append(("rename", b))))
    monkeypatch.setattr(shutil, "rmtree", lambda p, **k: (rmtree(p, **k), events.append(("delete", str(p)))))
    save(tmp_path / "best", some_state(1), {})
    events.clear()
    save(tmp_path / "best", some_state(2), {})
    names = ("tensors.safetensors", "state.json", "manifest.json")
    temporary = min((place for _, place in events[:4]), key=len)
    assert Path(temporary).name.startswith(".tmp-")
    assert Path(temporary).parent == tmp_path
    assert sorted(events[:4]) == sorted([("sync", temporary), *(("sync", f"{temporary}/{name}") for name in names)])
    assert events[4:] == [("rename", ".old-best"), ("rename", "best"), ("sync", str(tmp_path)), ("delete", ".old-best")]


def test_a_state_is_never_in_memory_twice(tmp_path):
    state = {"a": torch.zeros(1 << 22), "b": torch.ones(1 << 22)}  # 16 MB each
    tracemalloc.start()
    save(tmp_path / "c", state, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6
    assert torch.equal(load(tmp_path / "c")[0]["b"], state["b"])


def test_a_file_larger_than_memory_is_refused_unread(tmp_path):
    save(tmp_path / "c", some_state(), {})
    os.truncate(tmp_path / "c" / "tensors.safetensors", 1 << 40)  # a hole: it takes no place
    body = json.loads((tmp_path / "c" / "manifest.json").read_text())
    body.pop("sha256")
    body["files"]["tensors.safetensors"]["bytes"] = 1 << 40
    sign(tmp_path / "c", body)
    with pytest.raises(UserError, match="more than the memory of this machine"):
        load(tmp_path / "c")


def test_a_disk_that_refuses_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path / "file" / "c", some_state(), {})
