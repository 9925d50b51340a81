"""What a run says of itself: its settings' origins, its numbers, and a replay that has taught nothing."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from containers_setup import COUNTING, make_worker, train

import ludus
from ludus.cli.main import main
from ludus.containers.evaluate import Evaluation
from ludus.core.errors import UserError
from ludus.environments.toy import CountingEnv
from ludus.experience import native
from ludus.logging.hints import hints, why_no_update
from ludus.runs.report import where_from
from ludus.settings.settings import resolve_settings

QUICK: dict[str, Any] = {"agent__warmup": 30, "agent__batch_size": 8, "agent__updates_per_step": 0.25, "log_every": 10}


@pytest.mark.parametrize(
    ("environment", "agent", "shown", "hidden"),
    [
        ("CartPole-v1", "ppo", ["policy loss", "value loss", "entropy", "kl"], ["  q "]),
        ("CartPole-v1", "c51", ["value loss", "q"], ["  value \\d"]),
        ("Pendulum-v1", "sac", ["actor loss", "critic loss", "q", "entropy"], []),
        ("Pendulum-v1", "td3", ["actor loss", "critic loss", "q"], []),
    ],
)
def test_losses_are_called_losses_and_q_is_shown(
    environment: str, agent: str, shown: list[str], hidden: list[str], tmp_path: Path, capsys: Any
) -> None:
    settings = {"quiet": False, "evaluation__episodes": 1} | (QUICK if agent != "ppo" else {"log_every": 10})
    train(tmp_path, environment, agent, **settings)
    line = next(line for line in capsys.readouterr().out.splitlines() if " steps (100%) " in line)
    for label in shown:
        assert re.search(rf"  {label} -?\d", line), (label, line)
    assert not [label for label in hidden if re.search(label, line)]


def test_the_origins_of_settings_are_summed_up(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 3\n[agent]\ngamma = 0.9\n")
    flags = {"nb_step": 5000, "env.num": 2}

    def said(*arguments: Any) -> str:
        return where_from(*resolve_settings(*arguments))

    assert said("CartPole-v1", None, None, file, flags) == f"preset cartpole/ppo, file {file}, 2 flags"
    adapted = "for this run agent.learning_rate 0.00065, agent.epochs 8"
    assert said("CartPole-v1", None, "none", file) == f"defaults (no preset), {adapted}, file {file}"
    one = said(COUNTING, None, None, None, {"seed": 1}, "argument")
    assert one == f"defaults (no matching preset), {adapted}, 1 argument"
    assert said(COUNTING) == f"defaults (no matching preset), {adapted}"
    assert said(COUNTING, None, None, None, {"nb_step": 1_000_000}) == "defaults (no matching preset), 1 flag"


def test_a_setting_of_another_agent_in_a_file_is_told_from_a_slip(tmp_path: Path) -> None:
    slip, other = tmp_path / "slip.toml", tmp_path / "other.toml"
    slip.write_text("[agent]\ngamma_ = 0.9\n")
    other.write_text("[agent]\nclip = 0.9\n")
    with pytest.raises(UserError, match=r'"agent.gamma_" \(file .*Did you mean "agent.gamma"'):
        resolve_settings("CartPole-v1", file=slip)
    with pytest.raises(
        UserError, match=r'"agent.clip" \(file .*\): dqn has no such setting; ppo, gail, mappo have it\.$'
    ):
        resolve_settings("CartPole-v1", "dqn", file=other)


SEQUENCES = {"network__body": "lstm", "agent__sequence": 10, "agent__batch_size": 64}
IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "warm-up": ({"agent__warmup": 900}, r"2\d\d steps are fewer than agent.warmup = 900; "),
    "batch": (
        {"agent__batch_size": 300},
        r"the replay buffer held \d+ transitions, fewer than .* 300; .* agent.n_step\.",
    ),
    "sequences": (SEQUENCES, r"the replay buffer held \d+ sequences, fewer than .* = 64; .* or agent.sequence\."),
    "rare": (
        {"agent__updates_per_step": 0.001},
        r"too few steps followed the warm-up and the first 8 transitions .* 0.001; raise",
    ),
}


@pytest.mark.parametrize("case", IDLE)
def test_no_update_is_explained(case: str) -> None:
    changes, why = IDLE[case]
    worker = make_worker(COUNTING, "dqn", **{"nb_step": 2_000} | QUICK | changes)
    worker.run(200)
    (said,) = why_no_update(worker)
    assert re.fullmatch(f"There was no update: {why}.*", said), said
    worker.close()


def test_a_run_without_an_update_says_so_at_its_end(tmp_path: Path, capsys: Any) -> None:
    settings = QUICK | {"agent__updates_per_step": 0.001, "quiet": False}
    run = train(tmp_path, COUNTING, "dqn", **settings).run
    said = "There was no update: too few steps followed the warm-up"
    assert said in capsys.readouterr().out
    assert said in (run / "log.txt").read_text()


@pytest.mark.parametrize("agent", ["reinforce", "ars"])
def test_a_run_whose_episodes_are_longer_than_it_says_so_at_its_end(tmp_path: Path, agent: str, capsys: Any) -> None:
    run = train(tmp_path, "Pendulum-v1", agent, quiet=False, evaluation__episodes=1).run
    said = "There was no update: 63 steps of each environment were too few for agent.episodes = 1 whole episodes; raise"
    assert said in capsys.readouterr().out
    assert said in (run / "log.txt").read_text()


def test_a_run_says_that_priorities_were_drawn_without_compiled_code(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    said = "priorities were sampled without compiled code"
    settings = QUICK | {"agent__prioritized": True, "quiet": False}
    for library in (native.LIBRARY, None):
        monkeypatch.setattr(native, "LIBRARY", library)
        train(tmp_path, COUNTING, "dqn", **settings)
        assert (said in capsys.readouterr().out) == (library is None)


def test_a_resume_without_its_replay_says_what_that_means(tmp_path: Path) -> None:
    run = train(tmp_path, COUNTING, "dqn", **QUICK | {"agent__save_replay": False, "agent__warmup": 70}).run
    steps = ludus.resume(run, nb_step=125).steps
    log = (run / "log.txt").read_text()
    assert "were restored exactly. The replay buffer was not saved: there is no update before another agent" in log
    assert re.search(r"The \d+ steps left are too few for an update: the warm-up takes 70 and a batch about 8;", log)
    assert re.search(r"There was no update since the resume: \d\d steps are fewer", log)
    ludus.resume(run, nb_step=steps + 100)
    later = (run / "log.txt").read_text().removeprefix(log)
    assert "The replay buffer was not saved" in later
    assert "too few" not in later
    assert "There was no update" not in later


def test_a_resume_with_its_replay_says_nothing_of_it(tmp_path: Path) -> None:
    run = train(tmp_path, COUNTING, "dqn", **QUICK).run
    ludus.resume(run, nb_step=125)
    log = (run / "log.txt").read_text()
    assert "Environments were restored exactly." in log
    assert "The replay buffer was not saved" not in log
    assert "There was no update" not in log


def test_a_resume_to_fewer_steps_than_are_done_says_that_they_are(tmp_path: Path) -> None:
    result = train(tmp_path, COUNTING)
    said = ludus.resume(result.run, nb_step=50).reason
    assert said == (
        f"complete: it has done {result.steps} steps and nb_step is 50; to train further, resume it with --nb-step "
        f"above {result.steps}"
    )
    assert ludus.load(result.run).settings.nb_step == 100  # as it was


def test_the_chosen_backend_is_shown(tmp_path: Path, capsys: Any) -> None:
    for settings, shown in (
        ({}, "CartPole-v1 x 4, simple"),
        ({"env__num": 6}, "CartPole-v1 x 6, vector"),
        ({"env__backend": "subproc", "env__workers": 2}, "CartPole-v1 x 4, subproc, 2 processes"),
    ):
        run = train(tmp_path, "CartPole-v1", quiet=False, **settings).run  # type: ignore[arg-type]
        assert f"environment  {shown}\n" in capsys.readouterr().out
        assert f"environment: {shown}\n" in (run / "log.txt").read_text()


def test_evaluation_has_its_own_share_of_the_time_and_as_many_environments_as_training() -> None:
    worker = make_worker(COUNTING, evaluation__episodes=20)
    worker.run(100)
    assert worker.clock.nanoseconds["evaluation"] == 0
    before = dict(worker.clock.nanoseconds)
    assert worker.evaluate() is not None
    moved = {phase for phase, x in worker.clock.nanoseconds.items() if x > before[phase]}
    assert moved == {"evaluation", "other"}  # what came before it is other
    assert worker.evaluator.manager.batch == 4
    assert make_worker(COUNTING, evaluation__episodes=3).evaluator.manager.batch == 3
    own = make_worker(COUNTING, evaluation__episodes=20, evaluation__environments=7)
    assert own.evaluator.manager.batch == 7
    evaluation = own.evaluate()
    assert evaluation is not None
    assert len(evaluation.returns) == 20


SPENT = {"environment": 0.9, "acting": 0.05, "learning": 0.05, "evaluation": 0.0, "other": 0.0}
TARGET: dict[str, Any] = {"evaluation__stop_at": 16.0, "evaluation__every": 10**9}
RAW: dict[str, Any] = {"agent__normalize_reward": False}


@pytest.mark.parametrize(
    ("environment", "step", "best", "explained", "settings", "hinted"),
    [
        (COUNTING, 2e-3, 15.0, 1.0, {}, ["--env.backend subproc, which uses 2 processes"]),
        (COUNTING, 2e-3, 15.0, 1.0, TARGET, ["--env.backend subproc, which uses 2 processes"]),
        (COUNTING, 2e-3, 16.0, 1.0, TARGET, []),  # solved
        (COUNTING, 5e-4, 15.0, 1.0, {}, []),  # processes would cost more than such a step
        (COUNTING, 2e-3, 15.0, 1.0, {"env__num": 1, "agent__minibatches": 1}, []),  # one environment needs no more
        ("CartPole-v1", 1e-4, 474.0, -1.0, RAW, ["value function explains only 0% of the returns"]),
        ("CartPole-v1", 1e-4, 475.0, -1.0, RAW, []),  # what Gymnasium counts as solved
        ("CartPole-v1", 1e-4, 474.0, -1.0, {"agent__normalize_reward": True}, []),
    ],
)
def test_a_hint_comes_only_where_it_helps(
    environment: str,
    step: float,
    best: float,
    explained: float,
    settings: dict[str, Any],
    hinted: list[str],
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("ludus.logging.hints.cores", lambda: 2)
    worker = make_worker(environment, env__backend="simple", **settings)
    assert hints(worker, explained) == []  # nothing is known yet
    worker.run(400)
    batches = worker.local_step_count / worker.manager.batch
    seconds = step * batches / SPENT["environment"]
    worker.clock.nanoseconds = {phase: int(share * seconds * 1e9) for phase, share in SPENT.items()}
    worker.best = best
    found = hints(worker, explained)
    assert len(found) == len(hinted)
    assert all(word in text for word, text in zip(hinted, found, strict=True))


@pytest.mark.parametrize(("returns", "hinted"), [([10.0, 10.0], 0), ([0.0, 0.0], 0), ([9.0, 10.0], 1), ([10.0], 1)])
def test_the_value_function_is_not_blamed_where_all_returns_are_equal(returns: list[float], hinted: int) -> None:
    worker = make_worker("CartPole-v1", env__backend="simple", **RAW)
    worker.run(400)
    worker.last_evaluation, worker.best = Evaluation(returns, [5] * len(returns)), max(returns)
    assert sum("value function explains" in text for text in hints(worker, 0.0)) == hinted


class Stumbles(CountingEnv):
    """Gives a reward that is none, late in its life."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 60

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        self.left -= 1
        return observation, math.nan if self.left == 0 else reward, *rest


def test_a_bad_number_from_a_replay_is_that_of_an_item(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UserError, match=r"Stumbles \(item \d+ of the batch of 64\): a reward is not") as caught:
        train(tmp_path, f"{__name__}:Stumbles", "dqn", **QUICK | {"nb_step": 2_000, "agent__batch_size": 64})
    item = re.findall(r"item \d+ of the batch", str(caught.value))[0]
    (run,) = (path.parent for path in tmp_path.rglob("failure"))
    assert main(["diagnose", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{item} from the replay buffer, t=1 of 1: the reward is nan, returned by step(), action " in out


def test_a_network_without_a_hidden_layer_is_warned_of_at_the_start(tmp_path: Path) -> None:
    linear = train(tmp_path, "CartPole-v1", "ppo", network__hidden=())
    assert 'Networks "actor" and "critic" have no hidden layer' in (linear.run / "log.txt").read_text()
    board = train(tmp_path, COUNTING, "ppo", network__shared="yes", network__net1d="identity1d")
    assert 'Network "actor_critic" has no hidden layer' in (board.run / "log.txt").read_text()
    usual = train(tmp_path, "CartPole-v1", "ppo")
    assert "no hidden layer" not in (usual.run / "log.txt").read_text()


def test_a_low_explained_variance_is_a_hint_at_the_end(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("ludus.logging.hints.MIN_UPDATES", 0)
    monkeypatch.setattr("ludus.logging.hints.LOW_EXPLAINED_VARIANCE", 2.0)
    train(tmp_path, "CartPole-v1", quiet=False, **RAW)
    assert "Hint: the value function explains only" in capsys.readouterr().out
