"""Behaviour cloning: what it maximizes, the value it learns beside, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import make_worker, train
from demonstrations import TOY, Recall, aim, balance, mix, obey, record, record_to
from gymnasium import spaces

import ludus
from ludus.core.dataset import Dataset, RecordedEpisode
from ludus.core.errors import UserError
from ludus.core.types import Tensors
from ludus.data.npz import save_npz
from ludus.experience.recorded import returns_to_go
from ludus.preprocess.observation import ObsPreprocessor

CPU = torch.device("cpu")
TARGET, MASKED, MIXED = TOY + "TargetEnv", TOY + "MaskedEnv", TOY + "MixedActionEnv"
QUICK: dict[str, Any] = {
    "network__hidden": (32, 32),
    "agent__learning_rate": 5e-3,
    "agent__batch_size": 128,
    "evaluation__episodes": 20,
    "compile": "off",
}


def clone(folder: Path, environment: str, data: str, updates: int, **changes: Any) -> Any:
    return train(folder, environment, "bc", data=data, nb_step=updates, **(QUICK | changes))


@pytest.mark.parametrize(
    "distribution", ["gaussian", "tanh", *(pytest.param(x, marks=pytest.mark.slow) for x in ("beta", "discretized"))]
)
def test_continuous_actions(distribution: str, tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 100)
    result = clone(tmp_path, TARGET, data, 300, agent__distribution=distribution)
    assert result.evaluation.mean > -0.3  # of 0; untrained: −2.7, and 11 values per element: about −0.1


def test_masked_actions(tmp_path: Path) -> None:
    assert clone(tmp_path, MASKED, record_to(tmp_path / "x.npz", MASKED, obey, 60), 200).evaluation.mean > 7.5


@pytest.mark.slow
def test_mixed_actions(tmp_path: Path) -> None:
    options = ("more=true",)
    data = record_to(tmp_path / "x.npz", MIXED, mix, 150, *options)
    assert clone(tmp_path, MIXED, data, 500, env__options=options).evaluation.mean > 6.5  # of 8; a constant policy: 1


def test_the_loss_is_the_negative_log_likelihood(tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    agent: Any = clone(tmp_path, TARGET, data, 20).load("latest").agent
    seen = torch.rand(1, 7, 2)
    action = torch.rand(1, 7, 2) * 2 - 1
    from ludus.experience.recorded import make_batch

    batch = make_batch({"observation": seen[0]}, {"action": action[0]}, {"return": torch.zeros(7)}, torch.arange(7), {})
    batch.share = torch.full((1, 7), 1 / 7)
    losses, _ = agent.compute_loss(batch)
    outputs, _ = agent.outputs({"observation": seen}, agent.initial_state(7), batch.first)
    normal = torch.distributions.Normal(outputs["policy/action"], agent.policy.heads["policy/action"].log_std.exp())
    torch.testing.assert_close(losses["policy"], -normal.log_prob(action).sum(-1).mean())


MEMORY = TOY + "MemoryEnv"
LSTM: dict[str, Any] = {
    "network__body": "lstm",
    "network__lstm_size": 16,
    "network__hidden": (16,),
    "agent__sequence": 12,
    "agent__burn_in": 6,
    "agent__learning_rate": 1e-2,
}


@pytest.mark.parametrize("body", ["lstm", "mlp"])
def test_what_was_seen_before_is_cloned_with_memory_alone(body: str, tmp_path: Path) -> None:
    """The cue of MemoryEnv is in the first of 6 observations; without memory the expected return is 0."""
    data = record_to(tmp_path / "x.npz", MEMORY, Recall(), 60)
    changes = LSTM if body == "lstm" else {}
    found = clone(tmp_path, MEMORY, data, 150, **changes, evaluation__episodes=100).evaluation.mean
    assert found >= 0.95 if body == "lstm" else found < 0.5


def recurrent_worker(tmp_path: Path, environment: str = TARGET, **changes: Any) -> Any:
    """A worker of an LSTM clone, with 6 steps of burn-in, which is as long as an episode of TargetEnv or longer."""
    expert, options = {TARGET: (aim, ()), MASKED: (obey, ()), MIXED: (mix, ("more=true",))}[environment]
    data = record_to(tmp_path / "x.npz", environment, expert, 10, *options)
    given = {"data": data, "env__options": options, "agent__batch_size": 40, **LSTM}
    return make_worker(environment, "bc", **(given | {"agent__sequence": 5, "container": "offline"} | changes))


@pytest.mark.parametrize("shared", ["yes", "no"])
def test_learning_from_sequences_sees_the_states_of_acting(shared: str, tmp_path: Path) -> None:
    """The outputs at every step that counts are those of the whole episode from its beginning."""
    worker = recurrent_worker(tmp_path, network__shared=shared)
    agent = worker.agent
    batch = agent.with_zero_state(worker.cache.draw())
    with torch.no_grad():
        found, _ = agent.outputs(batch.observation, batch.state, batch.first)
    assert batch.real.float().mean() > 0.3
    expected = {}  # by the observation
    for episode in agent.dataset.episodes:
        seen = torch.from_numpy(episode.observation["observation"]).unsqueeze(1)
        first = torch.zeros(len(seen), 1, dtype=torch.bool)
        first[0] = True
        with torch.no_grad():
            outputs, _ = agent.outputs({"observation": seen}, agent.initial_state(1), first)
        for t in range(episode.length):
            expected[tuple(seen[t, 0].tolist())] = {name: x[t, 0] for name, x in outputs.items()}
    for t, column in batch.real.nonzero().tolist():
        one = expected[tuple(batch.observation["observation"][t, column].tolist())]
        for name, x in one.items():
            torch.testing.assert_close(found[name][t, column], x, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("terminated", [False, True])
def test_values_of_sequences_bootstrap_at_their_end(terminated: bool, tmp_path: Path) -> None:
    rewards = [[1.0, 2, 3], [4.0, 5, 6, 7, 8, 9, 10]]
    save_npz(tmp_path / "y.npz", [episode(x, terminated) for x in rewards])
    worker = recurrent_worker(tmp_path, data=str(tmp_path / "y.npz"), agent__gamma=0.9)
    agent = worker.agent
    batch = agent.with_zero_state(worker.cache.draw())
    with torch.no_grad():
        value = agent.outputs(batch.observation, batch.state, batch.first)[0]["value"].squeeze(-1)
    scale = agent.reward_scaler.statistics.scale
    prepared = agent.with_targets(batch)
    assert prepared.observation["observation"].shape[0] == len(batch.reward)
    time = len(batch.reward)
    for t, column in batch.real.nonzero().tolist():
        total, discount, at = 0.0, 1.0, t
        while True:
            total += discount * float(batch.reward[at, column] * scale)
            discount *= 0.9
            at += 1
            if batch.terminated[at - 1, column]:
                break
            if batch.truncated[at - 1, column] or at == time or not batch.real[at, column]:
                total += discount * float(value[at, column])
                break
        assert float(prepared.experience["return"][t, column]) == pytest.approx(total, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("environment", [MASKED, MIXED])
@pytest.mark.parametrize("changes", [{}, {"agent__value_coef": 0.0}, {"network__critic__body": "mlp"}])
def test_recurrent_clones_of_masked_and_mixed_actions(
    environment: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    worker = recurrent_worker(tmp_path, environment, **changes)
    for _ in range(2):
        learned = worker.agent.learn(worker.cache.draw(), worker.updater)
        assert all(torch.isfinite(x) for x in learned.metrics.values())


def test_the_statistics_of_sequences_are_those_of_steps(tmp_path: Path) -> None:
    worker = recurrent_worker(tmp_path)
    seen = np.concatenate([x.observation["observation"][:-1] for x in worker.agent.dataset.episodes])
    statistics = worker.agent.normalizer.statistics["observation/observation"]
    assert float(statistics.count) == 40
    np.testing.assert_allclose(statistics.mean.numpy(), seen.mean(0), atol=1e-6)


def episode(rewards: list[float], terminated: bool) -> RecordedEpisode:
    steps = len(rewards)
    seen = {"observation": np.zeros((steps + 1, 2), np.float32)}
    done = {"action": np.zeros((steps, 2), np.float32)}
    return RecordedEpisode(seen, done, np.array(rewards, np.float32), terminated, not terminated)


def test_returns_to_go() -> None:
    dataset = Dataset((episode([1, 2, 3], terminated=True), episode([4, 5], terminated=False)), "")
    found = returns_to_go(dataset, 0.5, CPU)
    assert found.total.tolist() == [1 + 1 + 0.75, 2 + 1.5, 3, 4 + 2.5, 5]
    assert found.discount.tolist() == [0, 0, 0, 0.25, 0.5]
    assert found.so_far.tolist() == [1, 2.5, 4.25, 4, 7]
    assert found.episode.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("terminated", "value"), [(False, 1 / (1 - 0.9)), (True, (1 + 1.9 + 2.71 + 3.439) / 4)])
def test_the_value_bootstraps_where_the_recording_was_cut(terminated: bool, value: float, tmp_path: Path) -> None:
    """Steps that pay 1 and look the same: an episode that was cut goes on, one that terminated does not."""
    save_npz(tmp_path / "x.npz", [episode([1] * 4, terminated)] * 20)
    changes = {"agent__gamma": 0.9, "agent__normalize_reward": False, "agent__learning_rate": 3e-2}
    agent: Any = clone(tmp_path, TARGET, str(tmp_path / "x.npz"), 300, **changes).load("latest").agent
    with torch.no_grad():
        start = torch.ones(1, 1, dtype=torch.bool)
        outputs, _ = agent.outputs({"observation": torch.zeros(1, 1, 2)}, agent.initial_state(1), start)
    assert float(outputs["value"]) == pytest.approx(value, rel=0.05)


def test_ppo_continues_with_policy_value_and_statistics(tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", "CartPole-v1", balance, 4)
    cloned = clone(tmp_path / "bc", "CartPole-v1", data, 300)
    assert cloned.evaluation.mean > 300
    tuned = train(
        tmp_path / "ppo", "CartPole-v1", "ppo", init_from=str(cloned.run), nb_step=64, network__hidden=(32, 32)
    )
    assert "Loaded" in (tuned.run / "log.txt").read_text()
    theirs, ours = (ludus.load(x.run, "best").agent.state_dict() for x in (cloned, tuned))
    assert {name for name in ours if name not in theirs} <= {"clip"}
    assert float(ours["reward_scaler.statistics.count"]) > float(theirs["reward_scaler.statistics.count"]) == 2_000
    scale = "normalizer.statistics.observation/observation.count"
    assert float(ours[scale]) > float(theirs[scale]) == 2_000


def test_statistics_are_those_of_the_recordings(tmp_path: Path) -> None:
    episodes = record(TARGET, aim, 10)
    save_npz(tmp_path / "x.npz", episodes)
    agent: Any = clone(tmp_path, TARGET, str(tmp_path / "x.npz"), 20).load("latest").agent
    seen = np.concatenate([x.observation["observation"][:-1] for x in episodes])
    statistics = agent.normalizer.statistics["observation/observation"]
    np.testing.assert_allclose(statistics.mean.numpy(), seen.mean(0), atol=1e-6)
    np.testing.assert_allclose(statistics.variance.numpy(), seen.var(0), atol=1e-6)


class CameraAndSpeed(gymnasium.Env[Any, np.int64]):
    """Observes an image and a vector."""

    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (16, 16, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,), np.float32)}
    )
    action_space = spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return {"camera": np.zeros((16, 16, 3), np.uint8), "speed": np.zeros(2, np.float32)}, {}


def test_statistics_are_computed_in_parts_and_without_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    seen = {"camera": np.zeros((26, 16, 16, 3), np.uint8), "speed": random.uniform(-1, 1, (26, 2)).astype(np.float32)}
    recorded = RecordedEpisode(seen, {"action": np.zeros(25, np.int64)}, np.ones(25, np.float32), True, False)
    save_npz(tmp_path / "x.npz", [recorded])
    rows: list[dict[str, int]] = []
    forward = ObsPreprocessor.forward

    def count(self: ObsPreprocessor, observation: Tensors) -> Tensors:
        rows.append({name: x.shape[1] for name, x in observation.items()})
        return forward(self, observation)

    monkeypatch.setattr(ObsPreprocessor, "forward", count)
    monkeypatch.setattr("ludus.agents.bc.STATISTICS_ROWS", 10)
    worker = make_worker(f"{__name__}:CameraAndSpeed", "bc", data=str(tmp_path / "x.npz"), container="offline")
    assert [x for x in rows if any(x.values())] == [{"speed": 10}, {"speed": 10}, {"speed": 5}]
    statistics = worker.agent.normalizer.statistics["observation/speed"]
    np.testing.assert_allclose(statistics.mean.numpy(), seen["speed"][:-1].mean(0), atol=1e-6)
    np.testing.assert_allclose(statistics.variance.numpy(), seen["speed"][:-1].var(0), atol=1e-6)


def refused(folder: Path, environment: str, agent: str = "bc", **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        train(folder / "runs", environment, agent, **changes)
    assert "\n" not in str(error.value)
    assert not (folder / "runs").exists()  # before training starts
    return str(error.value)


def test_refusals(tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    assert "name them with --data" in refused(tmp_path, TARGET)
    assert "set container to offline" in refused(tmp_path, TARGET, container="local", data=data)
    assert "name them with data.path" in refused(tmp_path, TARGET, container="offline")
    assert "does not learn from recorded episodes" in refused(tmp_path, TARGET, "ppo", data=data)
    assert "ppo learns by acting" in refused(tmp_path, TARGET, "ppo", data=data, container="offline")
    assert "does not exist" in refused(tmp_path, TARGET, data=str(tmp_path / "y.npz"))
    assert "has shape (2,)" in refused(tmp_path, "CartPole-v1", data=data)
    assert "data.share is 0.25" in refused(tmp_path, TARGET, data=data, data__share=0.25)


@pytest.mark.parametrize("agent", ["bc", "iql", "discrete_cql", "gail", "dqn"])
def test_recorded_actions_that_a_mask_forbids_are_refused(agent: str, tmp_path: Path) -> None:
    first, *rest = record(MASKED, obey, 3)
    mask = first.observation["action_mask"].copy()
    mask[2, first.action["action"][2]] = 0
    save_npz(tmp_path / "x.npz", [*rest, first._replace(observation={**first.observation, "action_mask": mask})])
    given: dict[str, Any] = {"data": str(tmp_path / "x.npz"), "nb_step": 2_000}
    assert "an action in episode 2 (from 0) that the action mask" in refused(tmp_path, MASKED, agent, **given)
