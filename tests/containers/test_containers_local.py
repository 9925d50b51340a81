"""One process: what is counted, when it stops, evaluates, logs and saves, and what it leaves on disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import COUNTING, UNSCALED, make_worker, saved, train
from gymnasium import spaces

import ludus
from ludus.containers.hook import UpdateNumbers
from ludus.containers.loop import begin, collect, improve
from ludus.core.errors import UserError
from ludus.environments.toy import CountingEnv
from ludus.logging.metrics import read_metrics
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory, step_folders
from ludus.settings.config_file import read_config, read_origins

CALLS: Counter[str] = Counter()


class Tallied(CountingEnv):
    """Counts its own steps and resets."""

    def reset(self, **options: Any) -> Any:
        CALLS["reset"] += 1
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        CALLS["step"] += 1
        return super().step(action)


class Exploding(CountingEnv):
    """Rewards that no value can follow, after ``calm`` steps of one environment."""

    def __init__(self, calm: int = 40) -> None:
        super().__init__()
        self.left = calm

    def step(self, action: Any) -> Any:
        self.left -= 1
        observation, reward, *rest = super().step(action)
        return observation, reward if self.left >= 0 else 1e30, *rest


def own(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


@pytest.mark.parametrize("agent", ["ppo", "a2c"])
def test_steps_are_the_decisions_that_environments_saw(agent: str) -> None:
    worker = make_worker(own(Tallied), agent, nb_step=200)
    CALLS.clear()
    worker.run(200)
    assert worker.local_step_count == CALLS["step"]
    assert CALLS["reset"] > 4  # rows of resets there were, and none of them was counted
    assert (
        worker.updates * 8 * 4 == CALLS["step"] + CALLS["reset"] - 4
    )  # the first reset of a row is no step of a rollout
    worker.close()


def test_a_run_stops_at_the_first_update_at_or_past_its_steps() -> None:
    steps: list[float] = []
    worker = make_worker(COUNTING, on_update=lambda values: steps.append(values["step"]), nb_step=100)
    worker.run(100)
    assert steps[-2] < 100 <= steps[-1] == worker.local_step_count
    assert len(steps) == worker.updates
    worker.close()


def test_a_run_of_exactly_its_steps_makes_no_further_update() -> None:
    worker = make_worker(COUNTING, env__options=("length=1000",), nb_step=64)
    worker.run(64)  # 2 × 8 × 4, without an ending
    assert (worker.local_step_count, worker.updates) == (64, 2)
    worker.run(64, initial_step=64)
    assert worker.updates == 2
    worker.close()


def test_a_run_goes_on_from_an_initial_step() -> None:
    worker = make_worker(own(Tallied), nb_step=400)
    worker.run(60)
    before = worker.local_step_count
    CALLS.clear()
    worker.run(200, initial_step=before)
    assert worker.local_step_count - before == CALLS["step"]
    assert worker.local_step_count >= 200 > before
    worker.close()


@pytest.mark.parametrize("start", [0, 500])
def test_schedules_follow_the_configured_total(start: int) -> None:
    """Whatever ``run`` is asked for, and wherever it starts."""
    seen: list[dict[str, float]] = []
    schedules = {"agent__learning_rate_schedule": "linear", "agent__clip_schedule": "linear"}
    worker = make_worker(COUNTING, on_update=seen.append, nb_step=1000, **schedules)
    worker.run(start + 100, initial_step=start)
    rate, before = worker.settings.agent.learning_rate, start
    for values in seen:
        assert values["learning_rate"] == pytest.approx(rate * (1 - before / 1000))
        last, before = before, int(values["step"])
    assert float(worker.agent.clip) == pytest.approx(0.2 * (1 - last / 1000))  # type: ignore[arg-type]
    worker.close()


def test_every_update_reports_finite_numbers(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    result = train(tmp_path, COUNTING, on_update=seen.append, log_every=1)
    assert [values["updates"] for values in seen] == list(range(1, len(seen) + 1))
    for values in seen:
        assert all(type(x) is float and math.isfinite(x) for x in values.values())
        assert values.keys() >= {"step", "learning_rate", "loss/policy", "loss/value", "loss/entropy", "gradient_norm"}
    assert seen[-1]["step"] == result.steps
    assert (seen[-1]["return"], seen[-1]["length"]) == (15, 5)
    lines = [line for line in read_metrics(result.run / "metrics.jsonl") if "loss/policy" in line]
    assert [{key: x for key, x in line.items() if not key.startswith("time")} for line in lines] == seen


class Counted(torch.Tensor):
    """A metric that counts how often it is made a number."""

    def __float__(self) -> float:
        CALLS["metric"] += 1
        return super().__float__()


@pytest.mark.parametrize(
    ("name", "metric", "progress"), [("", 0, 0), ("step", 0, 0), ("q", 1, 0), ("return", 2, 1), ("none", 2, 1)]
)
def test_an_updates_numbers_are_computed_when_they_are_read(name: str, metric: int, progress: int) -> None:
    def count() -> dict[str, float]:
        CALLS["progress"] += 1
        return {"return": 2.0}

    CALLS.clear()
    metrics = {key: torch.tensor(value).as_subclass(Counted) for key, value in (("q", 1.0), ("loss/value", 3.0))}
    values = UpdateNumbers(5, metrics, count)
    for _ in range(2):
        assert values.get(name) == {"step": 5, "q": 1, "return": 2}.get(name) if name else True
    assert (CALLS["metric"], CALLS["progress"]) == (metric, progress)
    assert values == {"step": 5, "q": 1, "loss/value": 3, "return": 2}


def test_a_hook_that_reads_nothing_has_nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[float] = []
    settings: dict[str, Any] = {"nb_step": 100, "agent__warmup": 20, "agent__batch_size": 8, "log_every": 0}
    worker = make_worker("CartPole-v1", "dqn", lambda values: steps.append(values["step"]), **settings)
    monkeypatch.setattr(worker, "progress", lambda: pytest.fail("nothing was read"))
    worker.run(100)
    assert steps[-1] >= 100
    assert worker.updates
    worker.close()


def test_numbers_that_on_update_keeps_stay_those_of_their_update() -> None:
    kept: list[Mapping[str, float]] = []
    copies: list[dict[str, float]] = []

    def hook(values: Mapping[str, float]) -> None:
        kept.append(values)

    def copy(values: Mapping[str, float]) -> None:
        copies.append(dict(values))

    for on_update in (hook, copy):
        worker = make_worker("CartPole-v1", "dqn", on_update, nb_step=200, agent__warmup=20, agent__batch_size=8)
        worker.run(200)
        worker.close()
    assert kept == copies
    assert len({values["replay/size"] for values in kept}) > 10
    assert repr(kept[-1]) == repr(dict(kept[-1]))


def test_numbers_in_infos_at_an_episodes_end_are_logged(tmp_path: Path) -> None:
    result = train(tmp_path, COUNTING, log_every=1)
    logged = [line["episode/step"] for line in read_metrics(result.run / "metrics.jsonl") if "episode/step" in line]
    assert logged
    assert set(logged) == {5.0}


def test_no_episode_is_left_out_between_two_logs(tmp_path: Path) -> None:
    """Each line has the mean over the episodes since the line before; here every one numbers itself."""
    result = train(
        tmp_path, COUNTING, env__num=1, agent__minibatches=1, log_every=100, nb_step=300, env__options=("length=10",)
    )
    lines = [line for line in read_metrics(result.run / "metrics.jsonl") if "loss/policy" in line]
    means = [line["episode/episode"] for line in lines]  # episodes 1 to 10, then 11 to 20, then 21 to 30
    assert means == [pytest.approx(x, abs=1) for x in (5.5, 15.5, 25.5)]


def test_metrics_are_logged_once_per_interval(tmp_path: Path) -> None:
    steps: list[int] = []
    result = train(tmp_path, COUNTING, on_update=lambda x: steps.append(int(x["step"])), nb_step=400, log_every=100)
    lines = [line["step"] for line in read_metrics(result.run / "metrics.jsonl") if "loss/policy" in line]
    assert lines == sorted({*first_past(steps, 100), steps[-1]})  # and once at the end, so that nothing is lost
    silent = train(tmp_path, COUNTING, log_every=0)
    assert [line.keys() & {"loss/policy"} for line in read_metrics(silent.run / "metrics.jsonl")] == [set()]


def first_past(steps: list[int], every: int) -> list[int]:
    """The first of ``steps`` at or past each multiple of ``every``."""
    return sorted({next(s for s in steps if s >= due) for due in range(every, steps[-1] + 1, every)})


def test_evaluations_come_every_so_many_steps_and_once_at_the_end(tmp_path: Path) -> None:
    steps: list[int] = []
    result = train(
        tmp_path, COUNTING, on_update=lambda x: steps.append(int(x["step"])), nb_step=400, evaluation__every=90
    )
    lines = [line for line in read_metrics(result.run / "metrics.jsonl") if "evaluation/mean" in line]
    expected = first_past(steps, 90)
    assert [line["step"] for line in lines] == expected + [result.steps] * (expected[-1] != result.steps)
    assert {(line["evaluation/mean"], line["evaluation/std"], line["evaluation/length"]) for line in lines} == {
        (15, 0, 5)
    }
    assert result.best == 15
    assert result.evaluation is not None
    assert result.evaluation.returns == [15.0] * 4
    assert result.reason == "all steps done"


def test_a_reached_target_ends_the_run(tmp_path: Path) -> None:
    steps: list[int] = []
    reached = train(
        tmp_path,
        COUNTING,
        on_update=lambda x: steps.append(int(x["step"])),
        nb_step=1000,
        evaluation__every=50,
        evaluation__stop_at=15.0,
    )
    assert reached.steps == first_past(steps, 50)[0] < 100
    assert reached.reason == "the evaluation reached 15"
    missed = train(tmp_path, COUNTING, nb_step=200, evaluation__every=50, evaluation__stop_at=15.1)
    assert missed.steps >= 200


def test_an_evaluation_counts_each_row_equally_often() -> None:
    """Short episodes are over before long ones: without a quota per row they would be counted too often."""
    worker = make_worker(own(Unequal), evaluation__episodes=6)
    evaluation = worker.evaluator.run(worker.agent, worker.device)
    assert sorted(evaluation.lengths) == [2, 2, 2, 40, 40, 40]
    worker.close()


class Unequal(CountingEnv):
    """Every other one made is twenty times as long."""

    made = 0

    def __init__(self) -> None:
        Unequal.made += 1
        super().__init__(2 if Unequal.made % 2 else 40)


def test_checkpoints_and_the_best_policy_are_kept(tmp_path: Path) -> None:
    steps: list[int] = []
    result = train(
        tmp_path,
        COUNTING,
        on_update=lambda x: steps.append(int(x["step"])),
        nb_step=400,
        checkpoint_every=70,
        evaluation__every=100,
        keep=2,
    )
    kept = [int(folder.name.removeprefix("step_")) for folder in step_folders(RunDirectory(result.run).checkpoints)]
    assert kept == sorted({*first_past(steps, 70), result.steps})[-2:]
    assert saved(result.run)["counters"]["step"] == result.steps
    best = checkpoints.load(RunDirectory(result.run).best)[1]
    assert best["step"] == result.steps  # every evaluation gives 15: the last of equals is kept
    assert best["score"] == 15
    assert saved(result.run)["counters"]["best"] == 15


def test_what_was_chosen_for_network_shared_is_written_where_the_agent_has_something_to_share(tmp_path: Path) -> None:
    catch = "ludus.environments.image_toy:CatchEnv"
    run = train(tmp_path, catch, nb_step=32).run
    assert read_config(run / "config.toml")["network.shared"] == "no"
    assert read_origins(run / "config.toml")["network.shared"] == "chosen"
    given = train(tmp_path, catch, nb_step=32, network__shared="yes").run
    assert read_config(given / "config.toml")["network.shared"] == "yes"
    assert read_origins(given / "config.toml")["network.shared"] == "argument"
    settings = {"runs": str(tmp_path), "quiet": True, "agent.warmup": 8, "agent.replay": 100, "agent.batch_size": 4}
    run = ludus.train(COUNTING, "dqn", nb_step=32, preset="none", settings=settings).run
    assert read_config(run / "config.toml")["network.shared"] == "auto"  # a file with yes or no would be refused
    ludus.train(COUNTING, config=run / "config.toml")


def test_a_run_with_images_writes_the_defaults_for_images(tmp_path: Path) -> None:
    given = {"runs": str(tmp_path), "quiet": True, "env.num": 2, "agent.epochs": 1, "evaluation.episodes": 1}
    run = ludus.train("ludus.environments.image_toy:CatchEnv", "ppo", nb_step=64, settings=given).run
    config, origins = read_config(run / "config.toml"), read_origins(run / "config.toml")
    assert (config["agent.learning_rate"], origins["agent.learning_rate"]) == (3e-4, "default")
    assert (config["agent.rollout"], origins["agent.rollout"]) == (32, "default for this run")


def test_the_log_and_the_settings_tell_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = train(tmp_path, COUNTING, threads=0, evaluation__every=50)
    log = (result.run / "log.txt").read_text()
    assert f"environment: {COUNTING} x 4" in log
    assert "1 thread, numpy acting, eager update" in log
    assert f"ended at step {result.steps}: all steps done" in log
    assert log.count("evaluation at step") == len(
        [line for line in read_metrics(result.run / "metrics.jsonl") if "evaluation/mean" in line]
    )
    origins = read_origins(result.run / "config.toml")
    assert (origins["agent.rollout"], origins["env.id"], origins["agent.clip"]) == ("argument", "argument", "default")
    assert origins["threads"] == origins["network.shared"] == "chosen"
    assert read_config(result.run / "config.toml")["network.shared"] == "no"
    presets = ludus.train("CartPole-v1", nb_step=32, settings={"runs": str(tmp_path), "quiet": True})
    origins = read_origins(presets.run / "config.toml")
    assert (origins["agent.gae_lambda"], origins["nb_step"]) == ("preset cartpole/ppo", "argument")


DIVERGING: dict[str, Any] = UNSCALED | {"checkpoint_every": 32, "nb_step": 2_000, "keep": 100}


def test_a_loss_that_is_no_number_ends_the_run_and_earlier_checkpoints_are_whole(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Training diverged: loss/(policy|value) is (inf|nan) at step \d+; [^\n]*$"):
        train(tmp_path, own(Exploding), log_every=1, **DIVERGING)
    assert_whole(tmp_path)


@pytest.mark.parametrize("log_every", [0, 2_000])
def test_no_checkpoint_of_a_diverged_policy_is_written_between_two_logs(tmp_path: Path, log_every: int) -> None:
    with pytest.raises(UserError, match="Training diverged"):
        train(tmp_path, own(Exploding), log_every=log_every, evaluation__every=48, **DIVERGING)
    assert_whole(tmp_path)


def test_a_run_that_never_looked_still_refuses_to_end_with_a_diverged_policy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Training diverged"):
        train(tmp_path, own(Exploding), log_every=0, **DIVERGING | {"checkpoint_every": 0, "nb_step": 400})
    assert not step_folders(RunDirectory.open("latest", tmp_path).checkpoints)


def assert_whole(runs: Path) -> None:
    run = RunDirectory.open("latest", runs)
    assert step_folders(run.checkpoints)
    for folder in step_folders(run.checkpoints):
        state = ludus.runs.checkpoint.load(folder)[0]["agent"]
        assert all(torch.isfinite(x).all() for x in state.values()), folder
    ludus.load(run.path, "latest").act(np.zeros(2, np.float32))


class Broken(CountingEnv):
    """Says something that is no number, some steps into training."""

    def __init__(self, what: str = "reward") -> None:
        super().__init__()
        self.what, self.left = what, 60

    def step(self, action: Any) -> Any:
        self.left -= 1
        observation, reward, *rest = super().step(action)
        if self.left < 0 and self.what == "reward":
            reward = math.nan
        if self.left < 0 and self.what == "observation":
            observation[1] = math.inf
        return observation, reward, *rest


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_what_is_no_number_never_reaches_the_parameters(tmp_path: Path, what: str) -> None:
    with pytest.raises(UserError, match=rf"\(row 0\): [^\n]*{what}[^\n]*not[^\n]*finite"):
        train(tmp_path, own(Broken), nb_step=2_000, checkpoint_every=32, env__options=(f"what='{what}'",))
    assert_whole(tmp_path)


class Shut(CountingEnv):
    """An action mask in the observation that allows nothing at the third step of an episode."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.observation_space
        self.observation_space = spaces.Dict({"observation": inner, "action_mask": spaces.MultiBinary(2)})  # type: ignore[assignment]

    def _observe(self) -> Any:
        mask = np.full(2, self._step != 3, np.int8)
        return {"observation": super()._observe(), "action_mask": mask}


def test_a_mask_that_allows_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mask of action \"action\" allows nothing \(environment 0\)"):
        train(tmp_path, own(Shut))


def test_a_hook_that_fails_loses_nothing_that_was_learned(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    def hook(values: dict[str, float]) -> None:
        seen.append(values)
        if len(seen) == 3:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(tmp_path, COUNTING, on_update=hook)
    run = RunDirectory.open("latest", tmp_path)
    assert saved(run.path)["counters"]["step"] == seen[-1]["step"]


def test_the_loop_is_two_functions() -> None:
    """A container of one's own needs no more than ``begin``, ``collect`` and ``improve``."""
    worker = make_worker(COUNTING)
    begin(worker, 0)
    total = 0
    for _ in range(3):
        total += collect(worker)
        assert all(torch.isfinite(x) for x in improve(worker)[0].values())
    assert total == 3 * 8 * 4 - sum(24 // 6 for _ in range(4))  # of 6 rows of a column, one begins an episode
    worker.close()
