"""Run folders that were damaged or tampered with: a sentence or a valid load, nothing else happens."""

import hashlib
import json
import math
import os
import random
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from faults_setup import digest

from ludus.core.errors import UserError
from ludus.logging.logfile import LogFile
from ludus.logging.metrics import Metrics, read_metrics
from ludus.runs.checkpoint import CheckpointManager, load, load_newest
from ludus.runs.folder import RunDirectory
from ludus.settings.config_file import read_config, read_origins, write_config

TRIES = 200  # of each seed
TERABYTE = 1 << 40
PARTS = ("manifest.json", "state.json", "tensors.safetensors")
CONFIG = {"agent_name": "ppo", "seed": 1, "agent.learning_rate": 3e-4, "network.hidden": (64, 64), "init_from": None}

# What no reader may do; every open of a file is looked at too.
FORBIDDEN = {
    "exec", "compile", "marshal.loads", "pickle.find_class", "import", "ctypes.dlopen", "code.__new__", "os.system",
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.bind",
    "socket.connect", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod",
    "os.truncate", "shutil.rmtree", "shutil.move",
}  # fmt: skip
_watched: list[str] | None = None  # what happened, while someone watches
_allowed: set[str] = set()  # files that may be opened for writing


def _audit(event, args):
    if _watched is None:
        return
    if event == "open":
        path, _, flags = args
        if (
            isinstance(path, str)
            and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            and str(path) not in _allowed
        ):
            _watched.append(f"open {path} to write")
    elif event in FORBIDDEN:
        _watched.append(f"{event} {str(args)[:200]}")


sys.addaudithook(_audit)


def state_of(step):
    return {
        "agent": {"w": torch.full((40, 3), float(step)), "b": torch.arange(6, dtype=torch.uint8), "x": torch.tensor(1)},
        "generator": {"state": 2**127 + step, "array": np.arange(5) + step},
        "best": -math.inf,
        "counters": [step, None, "text", {"0": 1, 0: 2}],
        "metrics": {"offset": 40, "step": step},
    }  # fmt: skip


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    run = RunDirectory(tmp_path_factory.mktemp("pristine") / "run")
    run.path.mkdir()
    write_config(run.config, CONFIG, {"seed": "flag"})
    metrics = Metrics(run.metrics)
    for step in range(1, 21):
        metrics.write(step, {"loss/policy": step / 7, "kl": math.nan})
    metrics.close()
    LogFile(run.log).note("began")
    manager = CheckpointManager(run, keep=2)
    for step in (10, 20):
        manager.save(step, state_of(step))
    manager.save_best(10, state_of(10), 1.5)
    return run.path


@pytest.fixture
def memory():
    """Little more memory than is taken now: who believes a size of a terabyte gets a MemoryError."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def sign(folder, body):
    body = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(body, indent=1)
    (folder / "manifest.json").write_text(
        json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=1)
    )


def resign(folder):
    """Make the manifest true again, as someone who wants to do harm would."""
    body = json.loads((folder / "manifest.json").read_text())
    for name, entry in body["files"].items():
        data = (folder / name).read_bytes()
        entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    sign(folder, body)


# Harms to any file: its bytes, or what it is. They return whether the checkpoint may be another one afterwards.


def harm_bytes(rng, path):
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 5])):
        start = rng.randrange(len(data) + 1)
        kind = rng.choice(["flip", "flip", "cut", "extend", "replace", "insert", "delete", "zero", "repeat"])
        if kind == "flip" and data:
            data[min(start, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[start:]
        elif kind == "extend":
            data += rng.choice([b"\n", b"\0", b" ", rng.randbytes(9), bytes(4096), bytes(data)])
        elif kind == "replace":
            data[start : start + 8] = rng.randbytes(8)
        elif kind == "insert":
            data[start:start] = rng.choice([b'"', b"{", b"]", b"\xff\xfe", b"\xed\xa0\x80", b"\0", rng.randbytes(3)])
        elif kind == "delete":
            del data[start : start + rng.choice([1, 4, 64])]
        elif kind == "zero":
            data[start : start + 64] = bytes(len(data[start : start + 64]))
        elif kind == "repeat":
            data[start:start] = data[start : start + 40]
    path.write_bytes(data)


def harm_kind(rng, path):
    home = next(folder for folder in path.parents if folder.name == "home")
    outside, moved = home / "outside", home / "moved"
    path.rename(moved)
    kind = rng.choice(["gone", "link", "loop", "away", "folder", "pipe", "device", "hole", "dangling", "empty"])
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "away":
        path.symlink_to(rng.choice([outside, outside / "secret", Path("/etc/passwd"), Path("/proc/self/environ")]))
    elif kind == "folder":
        (path / "inner").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/dev/full"]))
    elif kind == "hole":
        path.touch()
        os.truncate(path, TERABYTE)
    elif kind == "dangling":
        path.symlink_to(outside / "new")
    elif kind == "empty":
        path.touch()


# Harms to a checkpoint by someone who knows the format and signs what he did.

ODD = [
    None, True, [], {}, "", "x", "..", -1, 0, 1.5, 1e308, 2**63, 2**64, TERABYTE, 10**4000, [[]],
    {"$tensor": "agent/w"}, {"$tensor": "gone"}, {"$array": {}}, {"$float": "nan"}, {"$float": "x"}, {"$x": 1},
    {"$$": 1}, "\ud800", "\x1b[2J\n",
]  # fmt: skip
RAW = ["NaN", "Infinity", "-Infinity", "9" * 5000, "1e999", "[" * 50_000, '{"a":' * 50_000, "'", '"\\ud800"', "\x00"]
NAMES = [
    "..",
    "../state.json",
    "../../../outside/secret",
    "/etc/passwd",
    "a/b",
    ".x",
    "",
    "a\0b",
    "\ud800",
    "x" * 300,
    "~",
]


def places(node):
    """Every (container, key) in a tree of JSON."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        yield node, key
        yield from places(value)


def change(rng, tree):
    container, key = rng.choice(list(places(tree)))
    value = container[key]
    kind = rng.choice(["odd", "odd", "drop", "rename", "deep"])
    if kind == "odd":
        container[key] = rng.choice(ODD)
    elif kind == "deep":
        for _ in range(rng.choice([2, 300, 900])):
            value = rng.choice([[value], {"a": value}])
        container[key] = value
    elif isinstance(container, dict):
        del container[key]
        if kind == "rename":
            container[rng.choice(NAMES)] = value
    else:
        container.pop(key)


def harm_manifest(rng, folder):
    body = json.loads((folder / "manifest.json").read_text())
    kind = rng.choice(["change", "size", "name", "hole"])
    entry = body["files"][rng.choice(list(body["files"]))]
    if kind == "change":
        change(rng, body)
    elif kind == "size":
        entry["bytes"] = rng.choice([TERABYTE, 2**63, 10**4000, -1, 0, 1.0, True, entry["bytes"] + 1])
    elif kind == "name":
        body["files"][rng.choice([*NAMES, "extra"])] = entry
    else:
        os.truncate(folder / "tensors.safetensors", TERABYTE)
        body["files"]["tensors.safetensors"]["bytes"] = TERABYTE
    sign(folder, body)


def harm_state(rng, folder):
    path = folder / "state.json"
    tree = json.loads(path.read_text())
    if rng.random() < 0.5:
        change(rng, tree)
        path.write_text(json.dumps(tree))
    else:
        text = path.read_text()
        at = text.index(":", rng.randrange(len(text) - 20)) + 1 if rng.random() < 0.8 else 0
        path.write_bytes(
            (text[:at] + rng.choice(RAW) + rng.choice([",", ""]) + text[at:]).encode("utf-8", "surrogatepass")
        )
    resign(folder)


def harm_tensors(rng, folder):
    path = folder / "tensors.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = rng.choice(["change", "dtype", "shape", "offsets", "size", "raw"])
    entry = header[rng.choice(list(header))]
    if kind == "change":
        change(rng, header)
    elif kind == "dtype":
        entry["dtype"] = rng.choice(
            ["F64", "F32", "BF16", "I8", "U64", "BOOL", "F8_E4M3", "F4", "F6_E2M3", "C64", "X", 3]
        )
    elif kind == "shape":
        entry["shape"] = rng.choice(
            [[], [0], [-1], [2**62, 4], [0, 2**63], [2**32, 2**32], [1.5], [1] * 5000, "3", [TERABYTE]]
        )
    elif kind == "offsets":
        entry["data_offsets"] = rng.choice(
            [[0, TERABYTE], [8, 4], [-1, 3], [0, 2**64], [0, 0], [1, 2, 3], [len(rest)] * 2]
        )
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    if kind == "raw":
        text = rng.choice([b"{" * 50_000, b"[]", b"", b"\xff" * 8, b'{"a":' + b"9" * 5000 + b"}", text + text])
    claimed = rng.choice([0, TERABYTE, 2**63, 2**64 - 1, len(text) + 1, len(text) - 1]) if kind == "size" else len(text)
    path.write_bytes((claimed % 2**64).to_bytes(8, "little") + text + rest)
    resign(folder)


def harm_signed_bytes(rng, folder):
    harm_bytes(rng, folder / rng.choice(PARTS[1:]))
    resign(folder)


def harm_text(rng, path):
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    line = rng.randrange(len(lines))
    bad = [
        *RAW, "x = " + "[" * 5000, ".".join("a" * 1200) + " = 1", "x = " + "9" * 5000, "seed = 1", "x = 1979-05-27",
        "[seed]", "x = {}", '{"step": ' + "[" * 50_000, '{"step": null}', '{"step": 1e400}', '{"step": "nan"}', "[1]",
        '{"step": 1, "x": {}}', '{"step": ' + "9" * 400 + "}", "{}",
    ]  # fmt: skip
    lines[line] = rng.choice(bad) + "\n"
    path.write_text("".join(lines), encoding="utf-8", errors="surrogatepass")


def harm(rng, run):
    """Do one harm; return the files whose content may be another afterwards."""
    checkpoint = rng.choice([run / "best", run / "checkpoints" / "step_20"])
    part = checkpoint / rng.choice(PARTS)
    loose = rng.choice([run / "config.toml", run / "metrics.jsonl", run / "log.txt"])
    kind = rng.choice([*["bytes"] * 5, *["kind"] * 3, *["signed"] * 8, *["loose"] * 4])
    if kind == "bytes":
        harm_bytes(rng, part)
    elif kind == "kind":
        harm_kind(rng, rng.choice([part, part, checkpoint, run / "checkpoints", loose]))
    elif kind == "loose":
        rng.choice([harm_bytes, harm_text])(rng, loose)
    else:
        rng.choice([harm_manifest, harm_state, harm_tensors, harm_signed_bytes])(rng, checkpoint)
        return {checkpoint.name}
    return {loose.name}


def told(reader, *args):
    """What a reader returns, or the sentence it says; any other exception fails the test."""
    try:
        return reader(*args)
    except UserError as error:
        sentence = str(error)
    assert 20 < len(sentence) < 2000
    assert not {"\n", "\x1b"} & set(sentence)
    return None


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b


def examine(path, loose):
    """Read all of a run as evaluate, play and resume do; return how many parts were refused or passed over."""
    run, warnings = RunDirectory(path), []
    best, newest = told(load, run.best), told(load_newest, run, warnings.append)
    if "best" not in loose and best is not None:
        assert same(best[0], state_of(10))
        assert best[1] == {"step": 10, "score": 1.5}
    if "step_20" not in loose and newest is not None:
        step = newest[1]["step"]
        assert same(newest[0], state_of(step))
        assert len(warnings) == (step == 10 and os.path.lexists(run.checkpoints / "step_20"))
        assert newest[2].name == f"step_{step}"
    config = told(read_config, run.config) if run.config.is_file() else None
    if config is not None:
        read_origins(run.config)
    lines = told(read_metrics, run.metrics)
    assert lines is None or all(isinstance(x, int | float) for line in lines for x in line.values())
    metrics = told(Metrics, run.metrics)
    if metrics is not None:
        state = newest[0].get("metrics") if newest else None
        told(metrics.load_state_dict, state if isinstance(state, dict) else {"offset": 40, "step": 10})
        metrics.close()
    told(LogFile(run.log).note, "resumed")
    return len(warnings) + sum(x is None for x in (best, newest, config, lines, metrics))


def tries(pristine, folder, seed):
    """Harm and examine copies; return how many of them had a part refused."""
    global _watched
    rng, refused = random.Random(seed), 0
    for _ in range(TRIES):
        home = folder / "home"
        run = home / "runs" / "run"
        shutil.copytree(pristine, run)
        (home / "outside").mkdir()
        for name in ("secret", *PARTS):
            (home / "outside" / name).write_text("secret")
        loose = harm(rng, run)
        before = digest(home / "outside")
        _allowed.update((str(run / "metrics.jsonl"), str(run / "log.txt")))
        _watched = []
        try:
            refused += examine(run, loose) > 0
        finally:
            happened, _watched = _watched, None
        assert happened == []
        assert digest(home / "outside") == before
        assert sorted(path.name for path in folder.iterdir()) == ["home"]
        shutil.rmtree(home)
    return refused


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_a_damaged_run_is_a_sentence_or_a_valid_load(pristine, ground, tmp_path, memory, seed):
    assert examine(shutil.copytree(pristine, tmp_path / "run"), set()) == 0  # and late imports are done
    refused = tries(pristine, ground, seed)
    assert TRIES * 0.6 < refused < TRIES
