"""Recorded episodes are what the policy and the environment did, and a replay buffer becomes episodes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from containers_setup import TOY, make_worker, saved, train

import ludus
from ludus.cli.main import main
from ludus.core.dataset import RecordedEpisode
from ludus.core.errors import UserError
from ludus.data.load import load_dataset
from ludus.runs.folder import RunDirectory
from ludus.runs.record import record_episodes, record_replay

TARGET, MIXED = TOY + "TargetEnv", TOY + "MixedActionEnv"


def check_targets(episode: RecordedEpisode) -> None:
    """In TargetEnv the reward follows from observation and action."""
    seen, done = episode.observation["observation"], episode.action["action"]
    np.testing.assert_allclose(episode.reward, -np.square(done - seen[:-1, ::-1]).sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distribution", ["gaussian", "tanh", "beta"])
@pytest.mark.parametrize("greedy", [True, False])
def test_actions_are_those_of_the_environment(distribution: str, greedy: bool, tmp_path: Path) -> None:
    player: Any = train(tmp_path, TARGET, agent__distribution=distribution).load("latest")
    episodes = record_episodes(player, 6, seed=3, greedy=greedy)
    assert [episode.length for episode in episodes] == [4] * 6
    assert all(episode.truncated and not episode.terminated for episode in episodes)
    for episode in episodes:
        check_targets(episode)
        if greedy:
            np.testing.assert_allclose(
                player.act(episode.observation["observation"][:-1]), episode.action["action"], atol=1e-5
            )
    again = record_episodes(player, 6, seed=3, greedy=greedy)
    assert all(np.array_equal(x.reward, y.reward) for x, y in zip(episodes, again, strict=True))
    other = record_episodes(player, 6, seed=4, greedy=greedy)
    assert not np.array_equal(episodes[0].reward, other[0].reward)


def test_episodes_can_be_played_again(tmp_path: Path) -> None:
    """The recorded actions lead to the recorded observations, rewards and endings."""
    player: Any = train(tmp_path, "CartPole-v1").load("latest")
    done: list[tuple[int, int]] = []
    episodes = record_episodes(player, 5, on_done=lambda *count: done.append(count))
    assert done[-1] == (5, 5)
    assert len(episodes) == 5
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    for episode in episodes:
        seen = episode.observation["observation"]
        env.reset(seed=0)
        env.state = seen[0].astype(np.float64)
        for t, action in enumerate(episode.action["action"]):
            observation, reward, terminated, _, _ = env.step(int(action))
            np.testing.assert_allclose(observation, seen[t + 1], atol=1e-4)
            assert reward == episode.reward[t]
        assert terminated == episode.terminated


def test_same_step_resets(tmp_path: Path) -> None:
    player: Any = train(tmp_path, "ludus.environments.tensor_toy:TensorCue", env__backend="tensor").load("latest")
    episodes = record_episodes(player, 6)
    assert len(episodes) == 6
    assert all(episode.terminated or episode.truncated for episode in episodes)


def test_a_replay_buffer_becomes_episodes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nb_step": 200, "agent__warmup": 50, "agent__batch_size": 16, "agent__replay": 1_000}
    result = train(tmp_path, TARGET, "sac", **settings)
    episodes = record_replay(result.load("latest"), RunDirectory(result.run))
    assert sum(episode.length for episode in episodes) == 200
    assert all(episode.length <= 4 for episode in episodes)
    assert sum(not episode.truncated for episode in episodes) <= 4  # the running episode of each environment
    for episode in episodes:
        check_targets(episode)


def test_a_replay_buffer_that_has_wrapped_around(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nb_step": 300, "agent__warmup": 50, "agent__batch_size": 16, "agent__replay": 120}
    result = train(tmp_path, "CartPole-v1", "dqn", **settings)
    episodes = record_replay(result.load("latest"), RunDirectory(result.run))
    steps = sum(episode.length for episode in episodes)
    assert 80 < steps <= 120
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    for episode in episodes:
        seen = episode.observation["observation"]
        env.reset(seed=0)
        for t, action in enumerate(episode.action["action"]):
            env.state = seen[t].astype(np.float64)
            np.testing.assert_allclose(env.step(int(action))[0], seen[t + 1], atol=1e-4)


def test_runs_without_a_replay_buffer_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nb_step": 200, "agent__warmup": 50, "agent__batch_size": 16, "agent__replay": 1_000}
    for name, agent, changes in (("ppo", "ppo", {}), ("unsaved", "dqn", settings | {"agent__save_replay": False})):
        result = train(tmp_path / name, "CartPole-v1", agent, **changes)
        with pytest.raises(UserError, match="no replay buffer of single steps"):
            record_replay(result.load("latest"), RunDirectory(result.run))
    clipped = train(
        tmp_path / "clipped", "CartPole-v1", "dqn", preprocess__reward=("clip(low=-1, high=1)",), **settings
    )
    with pytest.raises(UserError, match=r"after preprocess.reward"):
        record_replay(clipped.load("latest"), RunDirectory(clipped.run))


def test_rewards_are_preprocessed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded rewards are the environment's, and a replay buffer that has others is not written."""
    settings: dict[str, Any] = {"nb_step": 100, "agent__warmup": 50, "agent__batch_size": 16, "agent__replay": 1_000}
    half, out = {"preprocess__reward": ("scale(by=0.5)",)}, tmp_path / "x.npz"
    run = str(train(tmp_path / "runs", TARGET, "sac", **settings, **half).run)
    assert main(["record", run, "--replay", "--out", str(out)]) == 2
    assert "after preprocess.reward" in " ".join(capsys.readouterr().err.split())
    for flag in (["--episodes", "3"], ["--stochastic"], ["--seed", "1"], ["--checkpoint", "latest"]):
        assert main(["record", run, "--replay", "--out", str(out), *flag]) == 2
        assert f"so {flag[0]} has no effect" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
    assert main(["record", run, "--episodes", "3", "--out", str(out)]) == 0
    player: Any = ludus.load(run)
    dataset = load_dataset(str(out), player.observation, player.action)
    for episode in dataset.episodes:
        check_targets(episode)
    learner: Any = make_worker(TARGET, "iql", data=str(out), agent__batch_size=4, **half)
    learner.close()
    expected = np.concatenate([episode.reward for episode in dataset.episodes]) / 2
    found = np.concatenate([episode.reward for episode in learner.agent.dataset.episodes])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_empty_replay_buffer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a run that was stopped in its first step."""
    import ludus.runs.record as record

    settings: dict[str, Any] = {"nb_step": 100, "agent__warmup": 50, "agent__batch_size": 16, "agent__replay": 1_000}
    result = train(tmp_path, TARGET, "sac", **settings)
    monkeypatch.setattr(record, "cut_into_episodes", lambda steps: iter(()))
    with pytest.raises(UserError, match="is empty; train the run further"):
        record_replay(result.load("latest"), RunDirectory(result.run))


def test_the_command_writes_a_file_that_can_be_cloned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(train(tmp_path, TARGET).run), tmp_path / "demos.npz"
    assert main(["record", run, "--episodes", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 episodes, 12 steps, return -")
    assert f"`ludus train {TARGET} --agent bc --data {out}`" in printed
    player: Any = ludus.load(run)
    assert load_dataset(str(out), player.observation, player.action).transitions == 12
    quick = ["--nb-step", "40", "--evaluation.episodes", "2", "--runs", str(tmp_path / "bc"), "--quiet"]
    assert main(["train", TARGET, "--agent", "bc", "--data", str(out), *quick]) == 0


def test_the_command_writes_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    run = str(train(tmp_path, MIXED).run)
    assert main(["record", run, "--episodes", "2", "--minari", "toys/mixed-v0", "--stochastic"]) == 0
    player: Any = ludus.load(run)
    assert load_dataset("minari:toys/mixed-v0", player.observation, player.action).transitions == 16
    assert main(["record", run, "--episodes", "2", "--minari", "toys/mixed-v0"]) == 2
    assert "already" in capsys.readouterr().err


def test_the_command_writes_the_replay_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"nb_step": 200, "agent__warmup": 50, "agent__batch_size": 16, "agent__replay": 1_000}
    run = train(tmp_path, TARGET, "sac", **settings).run
    assert main(["record", str(run), "--replay"]) == 0
    assert "200 steps" in capsys.readouterr().out
    assert main(["record", str(run), "--episodes", "2"]) == 0
    assert f"Written to {run / 'episodes-1.npz'}." in capsys.readouterr().out
    assert main(["record", str(run), "--episodes", "1"]) == 0  # another file: a clone may need the first to be resumed
    sizes = [(run / name).stat().st_size for name in ("replay-1.npz", "episodes-1.npz", "episodes-2.npz")]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--out", "x.txt"], "must end in .npz"),
        (["--out", "no/folder/x.npz"], "its folder does not exist"),
        (["--out", "x.npz", "--episodes", "0"], "at least 1"),
        (["--minari", "../x-v0"], "no id of a Minari dataset"),
    ],
)
def test_bad_arguments(words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", str(tmp_path), *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_checkpoint_is_not_changed_by_recording(tmp_path: Path) -> None:
    result = train(tmp_path, TARGET)
    before = saved(result.run)["agent"]
    record_episodes(result.load("latest"), 3)
    assert all((x == saved(result.run)["agent"][name]).all() for name, x in before.items())


def test_the_replay_buffer_of_agents_that_share_a_policy_has_episodes_of_single_agents(tmp_path: Path) -> None:
    """Each agent's own rewards and endings; from the policy, worlds are recorded."""
    team = "ludus.environments.agents_toy:CueTeam"
    options = {"env__options": ("agents=2", "length=3")}
    small = {"nb_step": 60, "agent__warmup": 20, "agent__batch_size": 8}
    result = train(tmp_path, team, "dqn", **options, **small)
    episodes = record_replay(result.load("latest"), RunDirectory(result.run))
    assert {episode.length for episode in episodes if episode.terminated or episode.truncated} == {2, 3}
    assert all(episode.observation.keys() == {"observation"} for episode in episodes)
    assert all(episode.action.keys() == {"action"} for episode in episodes)
    for episode in episodes:  # the first agent stays to the end, where it is truncated; paid for answering the cue
        cue = episode.observation["observation"][:-1].argmax(-1)
        np.testing.assert_array_equal(episode.reward, (episode.action["action"] == cue).astype(np.float32))
    file = tmp_path / "replay.npz"
    assert main(["record", str(result.run), "--replay", "--out", str(file)]) == 0
    train(tmp_path, team, "discrete_cql", nb_step=5, agent__batch_size=8, data__path=str(file), **options)
    (world,) = record_episodes(result.load("latest"), 1)
    assert {"agent_0/observation", "agent_1/observation"} <= world.observation.keys()
