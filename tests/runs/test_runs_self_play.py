"""Self-play against frozen older selves."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import saved, small, train
from test_runs_resume import assert_same, assert_same_run, metrics
from test_runs_resume_replay import stop_after

import ludus
from ludus.containers.build import build_agent, build_evaluator, build_manager, make_actor
from ludus.containers.local import LocalWorker
from ludus.containers.self_play import CURRENT, OPPONENT, SelfPlayManager
from ludus.containers.updater import LocalUpdater
from ludus.core.errors import UserError
from ludus.core.step import Episode
from ludus.environments.agents_toy import Nim
from ludus.environments.multiagent import JointEnv
from ludus.runs.folder import RunDirectory, step_folders
from ludus.settings.settings import resolve_settings

NIM = "ludus.environments.agents_toy:Nim"
TEAM = "ludus.environments.agents_toy:CueTeam"
TICTACTOE = "pettingzoo.classic.tictactoe_v3:env"
PLAY: dict[str, Any] = {"self_play__every": 100, "self_play__size": 2}
COMMON: dict[str, Any] = {"nb_step": 400, "evaluation__every": 100, "log_every": 50, "checkpoint_every": 100} | PLAY


def match(
    env: Any, players: dict[str, Any], games: int, random: np.random.Generator, sampling: Any = None
) -> list[dict[str, float]]:
    """Play games with a policy, or with a random player (None), for each agent; return the returns by agent.

    Policies are greedy, except for ``sampling``.
    """
    joint, results = JointEnv(env, "match"), []
    for game in range(games):
        observation, info = joint.reset(seed=game)
        over = False
        while not over:
            actions = {}
            for agent, policy in players.items():
                mask = info["action_mask"][agent]
                if policy is None:
                    actions[agent] = int(random.choice(np.flatnonzero(mask)))
                else:
                    seen = {**observation[agent], "action_mask": mask}
                    actions[agent] = policy.act({agent: seen}, greedy=policy is not sampling)[agent]
            observation, _, terminated, truncated, info = joint.step(actions)
            over = terminated or truncated
        results.append(info["return"])
    return results


@pytest.mark.parametrize("body", ["mlp", pytest.param("lstm", marks=pytest.mark.slow)])
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(body: str, tmp_path: Path) -> None:
    settings = COMMON | {"network__body": body}
    straight = train(tmp_path / "straight", NIM, **settings).run
    stopped = train(tmp_path / "stopped", NIM, "ppo", stop_after("step", 230), **settings)
    assert 0 < stopped.steps < 400
    assert_same_run(straight, ludus.resume(stopped.run).run)
    assert "were restored exactly" in (stopped.run / "log.txt").read_text()
    pools = [sorted(path.name for path in (run / "pool").iterdir()) for run in (straight, stopped.run)]
    assert pools[0] == pools[1]
    assert len(pools[0]) == 5  # at the start and four times later; the older ones are no opponents any more
    lines = [line for line in metrics(straight) if "elo" in line]
    assert lines[-1]["opponents"] == 2
    first, second = (ludus.load(straight, "latest").evaluate(episodes=6) for _ in range(2))
    assert first == second
    assert set(first.returns) <= {-1.0, 1.0}  # those of the policy, against its older selves
    older: Any = ludus.load(straight, pools[0][0])
    assert older.meta["step"] == int(pools[0][0].removeprefix("step_"))


class Unrepeatable(Nim):
    """Nim whose games do not follow from their seeds, so that a resume begins new ones."""

    games = itertools.count()

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(next(self.games), options)


def test_a_resume_with_new_games_forgets_the_copies_made_after_its_checkpoint(tmp_path: Path) -> None:
    """They are made again, at other steps if games have other lengths; evaluations play against the newest ones."""
    stopped = train(tmp_path, f"{__name__}:Unrepeatable", "ppo", stop_after("step", 230), **COMMON)
    run = RunDirectory(stopped.run)
    for folder in step_folders(run.checkpoints)[1:]:  # as if killed before they were saved
        shutil.rmtree(folder)
    (checkpoint,) = step_folders(run.checkpoints)
    assert step_of(step_folders(run.pool)[-1]) > step_of(checkpoint)
    members = list[int]()
    ludus.resume(stopped.run, on_update=lambda values, worker: members.extend(x.step for x in worker.pool.members))
    assert "restarted at an episode boundary" in (stopped.run / "log.txt").read_text()
    assert {step_of(folder) for folder in step_folders(run.pool)} == {0, *members}


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def test_the_policy_plays_both_sides_against_itself_and_older_selves() -> None:
    worker: Any = self_play_worker(latest=0.5)
    games: SelfPlayManager = worker.manager
    assert games.roles["agent"].agents == 1
    worker.pool.add(0)
    worker._begin()
    seen, players = set(), set()
    for step in range(30):
        if step == 10:
            worker.pool.add(1)
        worker._collect()
        worker.cache.read()
        seen |= set(games._opponent.tolist())
        players |= set(games._player.tolist())
        for episode in worker.pool.rate(games.episodes()):
            assert episode.reward == {1.0: 1, 0.0: -1}[episode.infos["score"]]  # that of the player shown
            assert OPPONENT not in episode.infos
    assert seen == {CURRENT, 0, 1}
    assert players == {0, 1}
    assert worker.pool.rating != 0


def test_a_game_against_a_copy_that_is_dropped_goes_on_against_the_oldest_one() -> None:
    worker: Any = self_play_worker(latest=0.0)
    games: SelfPlayManager = worker.manager
    worker.pool.add(0)
    worker._begin()
    assert set(games._opponent.tolist()) == {0}
    for step in range(1, 12):
        worker.pool.add(step)
    assert [member.step for member in worker.pool.members] == list(range(2, 12))  # the ten newest, and no more
    games.send({"action": torch.zeros(4, dtype=torch.int64)})
    assert set(games._opponent.tolist()) == {2}


def test_opponents_do_not_draw_parameter_noise_for_the_policy() -> None:
    worker: Any = self_play_worker(latest=1.0, agent="dqn", changes={"agent.parameter_noise": 0.1})
    drawn: list[int] = []
    noise = worker.agent.parameter_noise
    resample, noise.resample = noise.resample, lambda generator: (drawn.append(1), resample(generator))
    worker._begin()
    step = worker.manager.inner.last_step()
    assert step.first.all()
    worker.manager.send({"action": torch.zeros(4, dtype=torch.int64)})
    assert not drawn
    assert worker.agent.training
    worker.agent.act(worker.seat.env_step, worker.seat.hidden_state, worker.seat.noise.next())
    assert drawn


def test_a_game_that_the_player_shown_has_left_still_takes_steps() -> None:
    worker: Any = self_play_worker(latest=1.0, environment=TEAM)  # three players; the last of them leave first
    games: SelfPlayManager = worker.manager
    games.reset(0)
    games._player = torch.tensor([0, 1, 2, 2])
    seen = []
    for _ in range(5):
        games.send({"action": torch.zeros(4, dtype=torch.int64)})
        steps = games.recv_roles()
        seen.append((int(steps["agent"].real.sum()), games.count_real(steps)))
    assert seen == [(4, 4), (4, 4), (2, 4), (1, 4), (0, 0)]  # the last one is the reset


def self_play_worker(
    latest: float, agent: str = "ppo", changes: dict[str, Any] | None = None, environment: str = NIM
) -> Any:
    given = small(agent) | {"self_play.every": 100, "self_play.latest": latest} | (changes or {})
    settings = resolve_settings(environment, agent, "none", None, given).settings
    manager = build_manager(settings)
    made = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(made.action_transform)
    evaluator = build_evaluator(settings, make_actor(made, manager))
    return LocalWorker(settings, made, manager, LocalUpdater(made), evaluator)


def test_a_game_that_is_cut_off_counts_as_it_stands(tmp_path: Path) -> None:
    """With one move each, nobody has won unless few sticks were left."""
    result = train(tmp_path, NIM, "ppo", nb_step=100, env__max_episode_steps=2, env__options=("sticks=9",), **PLAY)
    assert result.evaluation is not None
    assert set(result.evaluation.returns) <= {-1.0, 0.0, 1.0}


def test_the_elo_rating_moves_towards_what_results_say() -> None:
    pool = self_play_worker(latest=0.0).pool
    pool.add(0)

    def count(opponent: int, *scores: float) -> None:
        pool.rate([Episode(0, 0.0, 1, None, {"score": score, OPPONENT: float(opponent)}) for score in scores])

    count(0, 1.0)
    assert pool.rating == 8  # 16 · (1 − ½)
    for _ in range(2000):
        count(0, 1.0, 1.0, 1.0, 0.0)
    assert pool.rating == pytest.approx(400 * np.log10(3), abs=20)  # three games of four: 191 points
    before = pool.rating
    count(CURRENT, 0.0)
    assert pool.rating == before


def test_a_game_is_learned_by_self_play(tmp_path: Path) -> None:
    """Who moves first in Nim wins unless the sticks are a multiple of 4; a perfect player loses only then."""
    result = train(
        tmp_path, NIM, "ppo", nb_step=8_000, env__num=16, network__hidden=(64,), agent__rollout=16,
        agent__learning_rate=0.004, agent__gamma=1.0, self_play__every=1_000, evaluation__every=0,
    )  # fmt: skip
    policy, random = result.load("latest"), np.random.default_rng(0)
    wins = [r["player_0"] for r in match(Nim(), {"player_0": policy, "player_1": None}, 40, random)]
    assert np.mean(wins) > 0.8
    perfect = 0
    for sticks in range(1, 10):
        if sticks % 4 == 0:
            continue
        seen = np.zeros(11, np.float32)
        seen[sticks] = seen[-1] = 1
        mask = (np.arange(1, 4) <= sticks).astype(np.int8)
        taken = int(policy.act({"player_0": {"observation": seen, "action_mask": mask}})["player_0"]) + 1
        perfect += taken == sticks % 4
    assert perfect >= 6  # of 7


@pytest.mark.slow
@pytest.mark.parametrize("container", ["distrib", "impala"])
def test_ranks_and_workers_play_and_resume_exactly(container: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"container": container, "network__body": "lstm"}
    ranks = {"distrib__ranks": 2, "agent__minibatches": 2}
    own |= ranks if container == "distrib" else {"impala__workers": 2, "impala__queue": 0}
    agent = "ppo" if container == "distrib" else "vtrace"
    straight = train(tmp_path / "straight", NIM, agent, **COMMON | own).run
    stopped = train(tmp_path / "stopped", NIM, agent, stop_after("step", 230), **COMMON | own)
    assert 0 < stopped.steps < 400
    ludus.resume(stopped.run)
    assert "were restored exactly" in (stopped.run / "log.txt").read_text()
    assert_same_game_run(straight, stopped.run)
    lines = [line for line in metrics(straight) if "elo" in line]
    assert lines[-1]["elo"] != 0
    assert lines[-1]["opponents"] == 2
    assert len(list((straight / "pool").iterdir())) == 5


def assert_same_game_run(straight: Path, resumed: Path) -> None:
    one, other = (saved(run) for run in (straight, resumed))
    for key in ("agent", "updater", "pool", "counters"):
        assert_same(one[key], other[key])
    lines = [[timeless(line) for line in metrics(run)] for run in (straight, resumed)]
    assert lines[0] == lines[1]


def timeless(line: dict[str, float]) -> dict[str, float]:
    """A line of metrics without what depends on the machine."""
    return {key: x for key, x in line.items() if not key.startswith("impala/")}


@pytest.mark.parametrize(
    ("environment", "changes", "message"),
    [
        ("CartPole-v1", {}, "CartPole-v1 has no players that share a policy"),
        (NIM, {"roles__agents": "each"}, "roles.agents is each, but self_play.every is 100"),
        (NIM, {"container": "offline", "data__path": "x"}, "container is offline, but self_play.every is 100"),
        (NIM, {"self_play__latest": 2.0}, "self_play.latest is 2; give a share from 0 to 1"),
    ],
)
def test_mistakes_get_a_sentence(environment: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, environment, "ppo", **PLAY | changes)


def losing_lines(game: Any, policy: Any, side: str, moves: tuple[int, ...] = ()) -> tuple[int, int]:
    """Let the greedy policy play one side against every choice of the other; return how many games there are and lost.

    ``game`` is PettingZoo's; it is replayed up to ``moves``, and from there all continuations are counted.
    """
    game.reset()
    for move in moves:
        game.step(move)
    if game.terminations[side]:
        return 1, int(game.rewards[side] < 0)
    agent = game.agent_selection
    seen = game.observe(agent)
    choices = [policy.act({side: seen})[side]] if agent == side else np.flatnonzero(seen["action_mask"])
    found = [losing_lines(game, policy, side, (*moves, int(move))) for move in choices]
    return sum(games for games, _ in found), sum(lost for _, lost in found)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(3))
def test_tic_tac_toe_never_loses_and_beats_an_older_self(seed: int, tmp_path: Path) -> None:
    """With the preset, the greedy policy loses none of the games that there are, whatever the opponent chooses."""
    tictactoe = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    settings = {"runs": str(tmp_path), "quiet": True, "threads": 1, "evaluation.every": 0}
    result = ludus.train(TICTACTOE, "ppo", seed=seed, settings=settings)
    policy, random = result.load("latest"), np.random.default_rng(0)
    steps = sorted(int(path.name.removeprefix("step_")) for path in (result.run / "pool").iterdir())
    assert steps[1] < 0.06 * result.steps
    older = ludus.load(result.run, f"step_{steps[1]}")
    for side, other in (("player_1", "player_2"), ("player_2", "player_1")):
        games, lost = losing_lines(tictactoe.raw_env(), policy, side)
        assert games > 50
        assert lost == 0
        results = match(tictactoe.env(), {side: policy, other: older}, 100, random, sampling=older)
        assert sum(r[side] > 0 for r in results) >= 60
