"""The folder of a run, ``runs/<environment>/<time>-<agent>/``, and the paths in it."""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Self

from ludus.core.errors import UserError, did_you_mean
from ludus.core.files import link_error, open_append, open_folder, open_regular_file, sync

LATEST = "latest"
REPLACED = ".old-"  # prefix of a checkpoint that is being replaced, until the new one is in place
_LOCK = ".lock"  # locked by the writer; its time is when training in the run last began or ended
_LOCK_ATTEMPTS = 5
_STEP = re.compile(rf"(?:{re.escape(REPLACED)})?step_(\d+)")


class RunDirectory:
    """The paths in the folder of a run; a folder is a run if it holds ``config.toml``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.pool = path / "pool"  # self-play: frozen older selves
        self.videos = path / "videos"
        self.tensorboard = path / "tensorboard"
        # exists once a checkpoint was saved, to tell a new run from one with deleted checkpoints
        self.saved_once = path / ".saved"
        self._lock_file: FileIO | None = None  # while this process holds the lock
        self._used = False  # since it was locked

    @classmethod
    def create(cls, root: str | Path, env_id: str, agent_name: str, run_name: str = "") -> Self:
        """Create the folder of a new run; it becomes ``latest`` once its ``config.toml`` is written."""
        parent = Path(root) / _safe(env_id)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_safe(agent_name)}"
        name += f"-{_safe(run_name)}" if run_name else ""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for count in itertools.count(1):
                path = parent / (name if count == 1 else f"{name}-{count}")
                try:
                    path.mkdir()
                except FileExistsError:  # another run started in the same second
                    continue
                sync(parent, parent.parent)
                return cls(path)
        except OSError as error:
            raise UserError(
                f'The run folder "{parent}" cannot be created ({error.strerror}): choose another folder with --runs.'
            ) from error
        raise AssertionError("count never ends")

    @classmethod
    def open(cls, path: str | Path, root: str | Path = "runs") -> Self:
        """Open an existing run, given as a path, a path below ``root``, or ``latest``, the most recently used run.

        For a folder with several runs, the most recently used one is opened.
        """
        runs = find_runs(Path(root))
        if str(path) == LATEST:
            if not runs:
                raise UserError(f'There is no run in "{root}" yet: start one with `ludus train CartPole-v1`.')
            return cls(runs[-1])
        for candidate in (Path(path), Path(root) / path):
            if (candidate / "config.toml").is_file():
                return cls(candidate.resolve() if candidate.is_symlink() else candidate)
            if within := find_runs(candidate, "*/config.toml") or find_runs(candidate):
                return cls(within[-1])
        hint = _nearest_run(Path(path), list(reversed(runs)))
        fix = 'give "latest" or the folder of a run' if runs else "start one with `ludus train CartPole-v1`"
        what = "has no config.toml, so it is not a run folder" if Path(path).exists() else "does not exist"
        raise UserError(f'The run "{path}" {what}: {fix}.{hint}')

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run against other writers; the operating system releases the lock of a process that dies.

        It becomes ``latest`` only with ``mark_used``.
        """
        import fcntl  # not available on every system

        before = last_used(self.path)
        with open_append(self.path / _LOCK) as file:
            try:
                for attempt in range(_LOCK_ATTEMPTS):
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:  # held by a writer, or briefly by `ludus list runs`
                        if attempt == _LOCK_ATTEMPTS - 1:
                            raise
                        time.sleep(0.02)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    file.seek(0)
                    holder = file.read(20).decode("ascii", "replace").strip()
                    raise UserError(
                        f'The run "{self.path}" is being written by process {holder or "unknown"}: '
                        "wait until it ends, or stop it."
                    ) from error
                # any other error: a file system without locks
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
            _set_time(file, before)
            self._lock_file, self._used = file, False
            try:
                yield
            finally:
                if self._used:
                    self.mark_used()
                self._lock_file = None

    def mark_used(self) -> None:
        """Make this locked run ``latest``, now and when its lock is released."""
        assert self._lock_file is not None
        self._used = True
        _set_time(self._lock_file, time.time_ns())

    def latest_checkpoint(self) -> Path | None:
        """Return the checkpoint with the highest step."""
        found = step_folders(self.checkpoints)
        return found[-1] if found else None

    def best_checkpoint(self) -> Path | None:
        """Return the checkpoint with the best evaluation so far."""
        return self.best if current_path(self.best) else None

    def resolve_checkpoint(self, name: str) -> str:
        """Return ``name``, or latest in place of best if there was no evaluation yet."""
        return "latest" if name == "best" and self.best_checkpoint() is None else name

    def step_checkpoint(self, name: str) -> Path:
        """Return the checkpoint called ``step_<n>``, or the frozen self of that step."""
        saved = {path.name: path for folder in (self.pool, self.checkpoints) for path in step_folders(folder)}
        if not saved and self.best_checkpoint() is None:
            raise self.no_checkpoint()
        if name not in saved:
            known = ", ".join(["best", "latest", *saved])
            raise UserError(f'The run "{self.path}" has no checkpoint "{name}": choose one of {known}.')
        return saved[name]

    def no_checkpoint(self) -> UserError:
        """Return the error for a run that has no checkpoint: it runs or was killed, or they were deleted."""
        other = "or choose another run of `ludus list runs`"
        if self.saved_once.exists():
            return UserError(f'The checkpoints of the run "{self.path}" were deleted: restore them, {other}.')
        resume = f"continue it with `ludus resume {shlex.quote(str(self.path))}`"
        fix = "let it train until its first save" if is_locked(self.path) else resume
        return UserError(f'The run "{self.path}" has no checkpoint yet: {fix}, {other}.')


def _nearest_run(path: Path, runs: list[Path]) -> str:
    """Return ``' Did you mean "x"?'`` for the run, or folder of runs, with the most similar path."""
    known = [*runs, *dict.fromkeys(run.parent for run in runs)]
    near = [str(run.absolute()) for run in known if did_you_mean(path.name, [run.name])]
    found = difflib.get_close_matches(str(path.absolute()), near, n=1, cutoff=0)
    return f' Did you mean "{found[0]}"?' if found else ""


def check_checkpoint_name(name: str) -> None:
    """Refuse a name that no checkpoint can have."""
    if name not in ("best", "latest") and not (_STEP.fullmatch(name) and not name.startswith(REPLACED)):
        raise UserError(
            f'"{name}" is not a checkpoint: choose best, latest or a step such as step_50000.'
            f"{did_you_mean(name, ('best', 'latest'))}"
        )


def step_folders(folder: Path) -> list[Path]:
    """Return the checkpoints ``step_<n>`` in ``folder``, sorted by n, including one that is being replaced."""
    try:
        with open_folder(folder) as here:
            names = os.listdir(here)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise link_error(folder) from error
        return []
    found = {
        (int(match[1]), folder / name.removeprefix(REPLACED)) for name in names if (match := _STEP.fullmatch(name))
    }
    return [path for _, path in sorted(found)]


def current_path(folder: Path) -> Path | None:
    """Return where the checkpoint ``folder`` is now, also while it is being replaced."""
    for _ in range(3):  # it may be renamed between the two checks
        for path in (folder, folder.with_name(REPLACED + folder.name)):
            if os.path.lexists(path):
                return path
    return None


def is_locked(run: Path) -> bool:
    """Whether a process is writing this run."""
    try:
        import fcntl  # not available on every system

        with open_regular_file(run / _LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # no lock file, or a file system without locks
        return False
    return False


def last_used(run: Path) -> int:
    """Return when training in a run last began or ended, in nanoseconds since 1970."""
    with suppress(OSError):
        return os.lstat(run / _LOCK).st_mtime_ns
    with suppress(OSError):
        return os.lstat(run / "config.toml").st_mtime_ns
    return 0


def find_runs(root: Path, pattern: str = "*/*/config.toml") -> list[Path]:
    """Return the runs below ``root``, the most recently used last."""
    found = (config.parent for config in root.glob(pattern))
    runs = (run.resolve() if run.is_symlink() else run for run in found)  # a link that the user made
    return sorted(runs, key=lambda run: (last_used(run), run.name))


def _set_time(file: FileIO, time_ns: int) -> None:
    """Set the time of a file, with a finer resolution than a write does."""
    with suppress(OSError):
        os.utime(file.fileno(), ns=(time_ns, time_ns))


def _safe(name: str) -> str:
    """Return a valid folder name: ``ALE/Pong-v5`` becomes ``ALE-Pong-v5``."""
    name = re.sub(r"[.]<locals>|[<>]", "", name)  # parts of the name of a lambda or a local class
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", name).strip("-.")[:100] or "unnamed"
