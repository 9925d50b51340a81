"""A run that is stopped, or killed, and resumed is the run that was never stopped: to the bit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import COUNTING, TOY, make_worker, saved, small, train
from test_containers_determinism import assert_same
from torch import nn

import ludus
from ludus.cli.main import main
from ludus.containers.guard import Guard
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.managers.vector import VectorEnvManager
from ludus.runs.folder import RunDirectory, step_folders

pytestmark = pytest.mark.usefixtures("shared_fork_server")
EVERYTHING: dict[str, Any] = {
    "nb_step": 400,
    "agent__normalize_observation": True,
    "agent__normalize_reward": True,
    "evaluation__every": 100,
    "log_every": 50,
    "checkpoint_every": 100,
}
NETWORKS: dict[str, dict[str, Any]] = {"mlp": {}, "lstm": {"network__body": "lstm"}}
MANAGERS: dict[str, dict[str, Any]] = {
    "simple": {"env__backend": "simple"},
    "vector": {"env__backend": "vector"},
    "subproc": {"env__backend": "subproc", "env__workers": 2},
    "alternate": {"env__backend": "subproc", "env__workers": 2, "env__alternate": True},
}


def metrics(run: Path) -> list[dict[str, Any]]:
    """What was logged, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in line.items() if k != "time" and not k.startswith("time/")} for line in lines]


def all_but_offset(run: Path) -> State:
    """The last checkpoint; lines of metrics hold times, so their bytes differ."""
    return {key: x for key, x in saved(run).items() if key != "metrics"}


def stop_at(update: int) -> Callable[[dict[str, float]], None]:
    """A hook that asks this process to stop, as Ctrl-C does, in its n-th update."""

    def hook(values: dict[str, float]) -> None:
        if values["updates"] == update:
            signal.raise_signal(signal.SIGTERM)

    return hook


def assert_same_run(straight: Path, resumed: Path) -> None:
    assert_same(all_but_offset(straight), all_but_offset(resumed))
    assert metrics(straight) == metrics(resumed)
    assert_same(saved(straight, "best"), saved(resumed, "best"))


FAST = {  # every pair of manager, network and agent is among them; the others run with the slow tests
    ("ppo", "mlp", "vector"), ("ppo", "mlp", "subproc"), ("ppo", "lstm", "simple"), ("ppo", "lstm", "alternate"),
    ("a2c", "mlp", "simple"), ("a2c", "mlp", "alternate"), ("a2c", "lstm", "vector"), ("a2c", "lstm", "subproc"),
}  # fmt: skip
COMBINATIONS = [
    pytest.param(*names, marks=[] if names in FAST else [pytest.mark.slow], id="-".join(names))
    for names in product(["ppo", "a2c"], NETWORKS, MANAGERS)
]


@pytest.mark.parametrize(("agent", "network", "manager"), COMBINATIONS)
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(
    agent: str, network: str, manager: str, tmp_path: Path
) -> None:
    settings = EVERYTHING | NETWORKS[network] | MANAGERS[manager]
    straight = train(tmp_path / "straight", "CartPole-v1", agent, **settings).run
    stopped = train(tmp_path / "stopped", "CartPole-v1", agent, stop_at(4), **settings)
    assert stopped.reason.startswith("SIG")
    assert 0 < stopped.steps < 400
    again = ludus.resume(stopped.run, on_update=stop_at(9))  # in an update after which an evaluation is due
    resumed = ludus.resume(again.run)
    assert resumed.run == stopped.run
    assert_same_run(straight, resumed.run)
    assert "were restored exactly" in (resumed.run / "log.txt").read_text()


@pytest.mark.parametrize(
    "environment",
    [
        "MaskedEnv",
        "MixedActionEnv",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("MemoryEnv", "TargetEnv")),
    ],
)
def test_every_kind_of_observation_and_action_comes_back(environment: str, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", TOY + environment, **EVERYTHING).run
    stopped = train(tmp_path / "stopped", TOY + environment, "ppo", stop_at(5), **EVERYTHING)
    assert_same_run(straight, ludus.resume(stopped.run).run)


def test_environments_that_do_not_come_back_begin_new_episodes_and_the_log_says_it(tmp_path: Path) -> None:
    """This one counts its episodes, so that a new one, given an old seed, says another number."""
    stopped = train(tmp_path, COUNTING, "ppo", stop_at(5), **EVERYTHING)
    resumed = ludus.resume(stopped.run)
    assert resumed.steps >= 400
    assert "restarted at an episode boundary" in (resumed.run / "log.txt").read_text()


def test_a_run_that_is_killed_loses_nothing_but_time(tmp_path: Path) -> None:
    """What a SIGKILL leaves: a checkpoint, and metrics that went on after it."""
    settings = EVERYTHING | {"keep": 10}
    straight = train(tmp_path / "straight", "CartPole-v1", **settings).run
    for kept in range(len(step_folders(straight / "checkpoints"))):
        killed = tmp_path / f"killed{kept}"
        shutil.copytree(straight, killed)
        for folder in step_folders(killed / "checkpoints")[kept:]:
            shutil.rmtree(folder)
        if not kept:
            (killed / ".saved").unlink()
        assert_same_run(straight, ludus.resume(killed).run)


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", "CartPole-v1", **EVERYTHING).run
    damaged = tmp_path / "damaged"
    shutil.copytree(straight, damaged)
    newest = step_folders(damaged / "checkpoints")[-1]
    tensors = newest / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    assert_same_run(straight, ludus.resume(damaged).run)
    log = (damaged / "log.txt").read_text()
    assert "warning" in log
    assert newest.name in log


def test_resuming_a_complete_run_does_not_make_it_the_latest(tmp_path: Path) -> None:
    done = train(tmp_path, COUNTING, nb_step=100).run
    last = train(tmp_path, COUNTING, nb_step=100).run
    ludus.resume(done)
    with pytest.raises(UserError, match="nb_step is 0"):
        ludus.resume(done, nb_step=0)
    assert RunDirectory.open("latest", tmp_path).path == last
    ludus.resume(done, nb_step=300)
    assert RunDirectory.open("latest", tmp_path).path == done


def test_a_run_that_is_complete_says_so_and_goes_on_with_a_new_end(tmp_path: Path, capsys: Any) -> None:
    done = train(tmp_path, COUNTING, nb_step=100)
    before = saved(done.run)
    again = ludus.resume(done.run)
    assert (again.run, again.steps, again.evaluation, again.best) == done[:4]
    assert "complete: it has done 108 steps and nb_step is 100; to train further" in again.reason
    assert again.reason in (done.run / "log.txt").read_text()
    assert capsys.readouterr().out == ""  # the run is quiet
    assert ludus.resume(done.run, nb_step=105).reason.startswith("complete: ")
    assert str(saved(done.run)) == str(before)
    assert ludus.resume(done.run, nb_step=300).steps >= 300
    assert ludus.load(done.run, "latest").settings.nb_step == 300
    solved = train(tmp_path, COUNTING, nb_step=1000, evaluation__every=50, evaluation__stop_at=-1e9).run
    assert ludus.resume(solved).reason.startswith("complete: its evaluation reached -1e+09; to train further")
    assert ludus.resume(solved, stop_at=1e9).steps >= 1000


def test_a_loop_of_resumes_ends_for_a_run_killed_after_its_last_save(tmp_path: Path) -> None:
    """``until ludus resume RUN; do :; done``: what was left undone is done, and then the exit code is 0."""
    straight = train(tmp_path / "straight", COUNTING, checkpoint_every=1, keep=99)
    killed = tmp_path / "killed"
    shutil.copytree(straight.run, killed)
    last = train(tmp_path / "other", COUNTING, "ppo", stop_at(3), checkpoint_every=1, nb_step=10**6, compile="off")
    assert main(["resume", str(killed)]) == 0
    assert main(["resume", str(killed), "--nb-step", "100"]) == 0
    assert saved(last.run)["counters"]["evaluated_at"] < last.steps  # stopped before its evaluation
    assert main(["resume", str(last.run), "--nb-step", "10"]) == 0
    state = saved(last.run)["counters"]
    assert (state["evaluated_at"], state["step"]) == (last.steps, last.steps)
    assert main(["resume", str(last.run)]) == 0


def test_a_run_whose_checkpoints_were_removed_is_refused(tmp_path: Path) -> None:
    run = train(tmp_path, COUNTING, nb_step=100).run
    shutil.rmtree(run / "checkpoints")
    metrics = (run / "metrics.jsonl").read_bytes()
    for match in (r"were deleted, so it cannot be resumed: restore them, or .* --init-from", r"restore them\.$"):
        with pytest.raises(UserError, match=match):
            ludus.resume(run)
        shutil.rmtree(run / "best", ignore_errors=True)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert not (run / "checkpoints").exists()


def test_a_resume_under_another_version_says_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run = train(tmp_path, COUNTING, nb_step=100, quiet=False).run
    ludus.resume(run, nb_step=150)
    assert "written by Ludus" not in capsys.readouterr().out
    own = ludus.__version__
    monkeypatch.setattr(ludus, "__version__", "77.0")
    ludus.resume(run, nb_step=200)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Ludus 77.0" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"The checkpoint was written by Ludus {own}, and this is Ludus 77.0: results may")
    assert lines[0] in (run / "log.txt").read_text()


class Noisy(nn.Module):
    """A network with dropout and with random numbers of its own."""

    def __init__(self, inputs: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(*inputs["observation"], 8), nn.Tanh(), nn.Dropout(0.2))
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.body(observation)
        return x + 0.01 * torch.randn(x.shape, generator=self.noise)


def test_every_generator_comes_back(tmp_path: Path) -> None:
    """The ratios of PPO are not 1 with such a network, but a run is a run."""
    settings = EVERYTHING | {"network__name": f"{__name__}:Noisy"}
    straight = train(tmp_path / "straight", "CartPole-v1", **settings).run
    stopped = train(tmp_path / "stopped", "CartPole-v1", "ppo", stop_at(5), **settings)
    assert_same_run(straight, ludus.resume(stopped.run).run)


def test_a_run_killed_before_its_first_checkpoint_begins_anew_from_where_it_began(tmp_path: Path) -> None:
    other = train(tmp_path, "CartPole-v1", seed=7, **EVERYTHING).run
    straight = train(tmp_path / "straight", "CartPole-v1", **EVERYTHING | {"init_from": str(other)}).run
    killed = tmp_path / "killed"
    shutil.copytree(straight, killed)
    shutil.rmtree(killed / "checkpoints")
    (killed / ".saved").unlink()
    assert_same_run(straight, ludus.resume(killed).run)


def test_another_schedule_of_the_environments_is_refused(tmp_path: Path) -> None:
    stopped = train(tmp_path, "CartPole-v1", "ppo", stop_at(3), **MANAGERS["subproc"])
    config = stopped.run / "config.toml"
    config.write_text(config.read_text().replace("alternate = false", "alternate = true"))
    with pytest.raises(UserError, match=r"made with 1 groups of environments, and now there are 2; set env\.alternate"):
        ludus.resume(stopped.run)


def test_a_run_is_resumed_by_one_process_at_a_time(tmp_path: Path) -> None:
    def resume_too(values: dict[str, float]) -> None:
        with pytest.raises(UserError, match="is being written by process"):
            ludus.resume(next(iter(tmp_path.glob("*/*"))))

    train(tmp_path, COUNTING, "ppo", resume_too)


def test_the_state_of_another_network_is_refused_with_a_sentence() -> None:
    small, large = (make_worker(COUNTING, network__hidden=(n,)) for n in (8, 16))
    small.run(40)
    with pytest.raises(UserError, match="does not fit this run's settings and code"):
        large.load_state_dict(small.state_dict())


def test_a_run_that_broke_off_goes_on_with_other_episodes(tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def fail(values: dict[str, float]) -> None:
        if values["updates"] == 3:
            raise Broken

    settings = small("ppo") | {"runs": str(tmp_path), "quiet": True, "nb_step": 200}
    with pytest.raises(Broken):
        ludus.train(COUNTING, preset="none", settings=settings, on_update=fail)
    run = RunDirectory.open("latest", tmp_path).path
    result = ludus.resume(run)
    assert result.steps >= 200


def test_ctrl_c_then_resume_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real terminal's way: SIGINT, the sentence that says how to go on, `ludus resume`."""
    command = [sys.executable, "-m", "ludus.cli.main"]
    flags = ["--runs", str(tmp_path), "--nb-step", "100000000", "--checkpoint-every", "0"]
    flags += ["--compile", "off", "--evaluation.every", "2048", "--evaluation.episodes", "2"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    train_it = [*command, "train", "CartPole-v1", *flags]
    child = subprocess.Popen(train_it, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if line.startswith("evaluation"):
            child.send_signal(signal.SIGINT)
            break
    rest, _ = child.communicate()
    assert child.returncode == 130
    assert "Resume:" in rest
    run = RunDirectory.open("latest", tmp_path).path
    step = int(step_folders(run / "checkpoints")[-1].name.removeprefix("step_"))
    assert main(["resume", "latest", "--runs", str(tmp_path), "--nb-step", str(step + 500)]) == 0
    assert f"Resumed at step {step:,}. Environments were restored exactly." in capsys.readouterr().out


def test_a_second_ctrl_c_in_an_evaluation_plays_it_again_after_the_resume(tmp_path: Path) -> None:
    """The evaluation is broken off by an exception; its episodes are played again, and no others."""
    settings = EVERYTHING | MANAGERS["vector"]
    straight = train(tmp_path / "straight", "CartPole-v1", **settings).run
    step, steps = VectorEnvManager._step_rows, iter(range(10**6))

    def broken(self: VectorEnvManager, group: int) -> None:
        if self._branch and next(steps) == 25:
            raise KeyboardInterrupt
        step(self, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorEnvManager, "_step_rows", broken)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "broken", "CartPole-v1", **settings)
    assert_same_run(straight, ludus.resume(RunDirectory.open("latest", tmp_path / "broken").path).run)


def test_an_error_in_a_rollout_leaves_the_exact_checkpoint_of_its_beginning(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", "CartPole-v1", **EVERYTHING | {"checkpoint_every": 1}).run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "learn", _interrupt_at(6, Guard.learn))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "broken", "CartPole-v1", **EVERYTHING | {"checkpoint_every": 1})
    assert_same_run(straight, ludus.resume(RunDirectory.open("latest", tmp_path / "broken").path).run)


def _interrupt_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(1, 1000))

    def interrupting(*given: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*given)

    return interrupting
