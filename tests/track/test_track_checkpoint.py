import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.track.checkpoint import CheckpointKeeper, load, load_latest, read_meta, save
from ludus.track.rundir import RunDirectory

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
    keeper = CheckpointKeeper(run)
    keeper.save_best(1, some_state(1), 5.0)
    os.rename(run.best, tmp_path / ".old-best")
    assert run.best_checkpoint() == run.best
    assert load(run.best)[0]["step"] == 1
    keeper.save_best(2, some_state(2), 6.0)
    assert load(run.best)[0]["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_the_keeper_keeps_the_last_ones_and_drops_an_abandoned_future(tmp_path):
    run = RunDirectory(tmp_path)
    keeper = CheckpointKeeper(run, keep=2)
    assert keeper.latest() is None
    for step in (900, 1000, 10000):
        keeper.save(step, some_state(step))
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_1000", "step_10000"]
    assert load_latest(run)[1]["step"] == 10000
    keeper.save(2000, some_state(2000))  # resumed from step 1000
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_1000", "step_2000"]
    assert keeper.latest() == run.checkpoints / "step_2000"
    keeper.save_best(2000, some_state(2000), float("inf"))
    assert read_meta(run.best) == {"step": 2000, "score": float("inf")}
    with pytest.raises(UserError, match="0"):
        CheckpointKeeper(run, keep=0)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match=r"There is no checkpoint .*nope"):
        load(tmp_path / "nope")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="manifest"):
        load(tmp_path / "empty")
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_latest(RunDirectory(tmp_path))


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
    with pytest.raises(UserError, match="not a plain file name"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("schema", 2, "schema 2"),
        ("schema", None, "schema None"),
        ("files", {}, "does not name"),
        ("files", [], "not the manifest"),
        ("files", {"state.json": {"bytes": "7", "sha256": ""}}, "not the manifest"),
        ("files", {n: {"bytes": 10**40, "sha256": ""} for n in ("state.json", "tensors.safetensors")}, "cut short"),
        ("files", {n: {"bytes": -1, "sha256": ""} for n in ("state.json", "tensors.safetensors")}, "expected"),
        ("meta", [], "edited"),
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
    with pytest.raises(UserError, match="does not hold a state"):
        load(tmp_path / "c")


def test_random_edits_are_refused_or_harmless(tmp_path):
    rng = random.Random(0)
    whole = tmp_path / "whole"
    save(whole, some_state(3), {"step": 3})
    for trial in range(240):
        folder = tmp_path / "c"
        shutil.copytree(whole, folder)
        path = folder / rng.choice(["manifest.json", "state.json", "tensors.safetensors"])
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(data) or 1)
            data[start : start + rng.choice([0, 1, 1, 8, 300])] = rng.randbytes(rng.choice([0, 1, 1, 8]))
        path.write_bytes(data)
        signed = trial % 2 == 0 and path.name != "manifest.json"
        if signed:
            resign(folder)
        with contextlib.suppress(UserError):  # and no other exception
            state, meta = load(folder)
            assert signed or (state["step"] == 3 and meta == {"step": 3} and state["agent"]["w"].sum() == 150)
        shutil.rmtree(folder)


def test_a_disk_that_refuses_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path / "file" / "c", some_state(), {})


KILLS = """
import os, random, signal, sys, time, torch
from pathlib import Path
from ludus.track.checkpoint import CheckpointKeeper, load, load_latest
from ludus.track.rundir import RunDirectory

def write_for_ever(run, step, pipe):
    keeper = CheckpointKeeper(run, keep=2)
    while True:
        step += 1
        state = {"step": step, "w": torch.full((20_000,), float(step))}
        keeper.save(step, state)
        keeper.save_best(step, state, float(step))
        os.write(pipe, b"%d " % step)

torch.set_num_threads(1)
run, last, rng = RunDirectory(Path(sys.argv[1])), 0, random.Random(1)
for _ in range(12):
    reader, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        write_for_ever(run, last, pipe)
    os.close(pipe)
    said = os.read(reader, 1000)
    time.sleep(rng.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said += os.read(reader, 100_000)
    os.close(reader)
    last = int(said.split()[-1])
    for state, meta in (load_latest(run), load(run.best)):
        assert last <= meta["step"] <= last + 1, (last, meta)
        assert (state["w"] == meta["step"]).all()
"""


def test_kill_in_the_middle_of_saves_loses_at_most_the_one_being_written(tmp_path):
    subprocess.run([sys.executable, "-c", KILLS, str(tmp_path)], check=True)
    CheckpointKeeper(RunDirectory(tmp_path)).save_best(1, some_state(), 1.0)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_reader_beside_a_running_training_always_finds_a_whole_one(tmp_path):
    stop = threading.Event()
    save(tmp_path / "best", some_state(0), {"step": 0})

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            save(tmp_path / "best", some_state(step), {"step": step})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        meta = {"step": 0}
        while meta["step"] < 40:
            state, meta = load(tmp_path / "best")
            assert (state["agent"]["w"] == meta["step"]).all()
    finally:
        stop.set()
        writer.join()
