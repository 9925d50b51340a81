"""Count the lines of the functions that run between an environment's step and the optimizer's step.

``python -m benchmarks.reading`` trains PPO and SAC for a few updates in Ludus and in Stable-Baselines3, records every
function of the library that is called while experience is collected and learned from, and counts the lines of these
functions, docstrings and comments included: what a reader must read to follow one run. Nobody chooses files.
``--list`` prints the functions. ``--tree DIR`` counts the package ``ludus`` of another checkout.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class Recorder:
    """Records the functions of a package that are called while it is active."""

    def __init__(self, package: Path) -> None:
        self.package = str(package) + "/"
        self.codes: set[CodeType] = set()

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self.package):
            self.codes.add(frame.f_code)

    def during(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that is recorded with everything that it calls."""

        def recorded(*arguments: Any, **named: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self._call)
            try:
                return method(*arguments, **named)
            finally:
                sys.setprofile(before)

        return recorded

    def lines(self) -> set[tuple[str, int]]:
        """Return the file and number of every line of the recorded functions."""
        return {(code.co_filename, number) for code in self.codes for number in range(*_span(code))}

    def functions(self) -> Iterator[tuple[str, str, int]]:
        """Return file, name and number of lines of each function, in order of files."""
        for code in sorted(self.codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
            start, stop = _span(code)
            yield code.co_filename.removeprefix(self.package), code.co_qualname, stop - start


def _span(code: CodeType) -> tuple[int, int]:
    """Return the first line of a function, and the one after its last."""
    last = max([line for _, _, line in code.co_lines() if line is not None], default=code.co_firstlineno)
    inner = [_span(constant)[1] for constant in code.co_consts if isinstance(constant, CodeType)]
    return code.co_firstlineno, max([last + 1, *inner])


@contextmanager
def patched(owner: Any, name: str, recorder: Recorder) -> Iterator[None]:
    """Record what a method calls."""
    before = getattr(owner, name)
    setattr(owner, name, recorder.during(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def record_ludus(agent: str, environment: str, nb_step: int, settings: dict[str, Any]) -> Recorder:
    """Train with Ludus."""
    import ludus
    from ludus.containers.local import LocalWorker

    recorder = Recorder(Path(ludus.__file__).parent)
    quiet = {"quiet": True, "threads": 1, "compile": "off", "evaluation.every": 0, "checkpoint_every": 0}
    with (
        tempfile.TemporaryDirectory() as runs,
        patched(LocalWorker, "_collect", recorder),
        patched(LocalWorker, "_improve", recorder),
    ):
        given = quiet | {"runs": runs, "log_every": 0} | settings
        ludus.train(environment, agent, nb_step=nb_step, seed=0, settings=given)
    return recorder


def record_sb3(agent: str, environment: str) -> Recorder:
    """Train with Stable-Baselines3."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env

    recorder = Recorder(Path(sb3.__file__).parent)
    kind = {"ppo": sb3.PPO, "sac": sb3.SAC}[agent]
    more = {"n_steps": 128, "batch_size": 256} if agent == "ppo" else {"learning_starts": 200}
    model = kind("MlpPolicy", make_vec_env(environment, 8 if agent == "ppo" else 1), seed=0, device="cpu", **more)
    with patched(kind, "collect_rollouts", recorder), patched(kind, "train", recorder):
        model.learn(1_100 if agent == "ppo" else 300)
    return recorder


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions")
    parser.add_argument("--tree", type=Path, help="a checkout whose ludus/ is counted")
    arguments = parser.parse_args()
    if arguments.tree is not None:
        sys.path.insert(0, str(arguments.tree))
    found = {
        "PPO on CartPole-v1, Ludus": record_ludus("ppo", "CartPole-v1", 1_000, {}),
        "PPO on CartPole-v1, Stable-Baselines3": record_sb3("ppo", "CartPole-v1"),
        "SAC on Pendulum-v1, Ludus": record_ludus("sac", "Pendulum-v1", 300, {"agent.warmup": 200}),
        "SAC on Pendulum-v1, Stable-Baselines3": record_sb3("sac", "Pendulum-v1"),
    }
    for name, recorder in found.items():
        lines = recorder.lines()
        files = len({file for file, _ in lines})
        print(f"{name}: {len(lines):,} lines in {len(recorder.codes)} functions of {files} files")
        if arguments.list:
            for file, function, count in recorder.functions():
                print(f"  {count:4} {file} {function}")


if __name__ == "__main__":
    main()
