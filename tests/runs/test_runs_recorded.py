"""Agents with a replay learn from recorded episodes, alone and beside their own; stopped and resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from containers_setup import make_worker, saved, train
from demonstrations import record_to
from test_runs_resume import assert_same_run
from test_runs_resume_replay import stop_after

import ludus
from ludus.cli.main import main
from ludus.containers.build import build_cache
from ludus.containers.datasets import give_dataset
from ludus.core.errors import UserError
from ludus.data.npz import load_npz, save_npz
from ludus.experience.recorded_replay import MixedReplay, RecordedReplay
from ludus.experience.replay import ExperienceReplay
from ludus.runs.record import record_episodes

BOX, CHOICE, POINT = "Pendulum-v1", "CartPole-v1", "ludus.environments.goal_toy:PointGoalEnv"
SMALL: dict[str, Any] = {"agent__batch_size": 16, "evaluation__every": 40, "log_every": 20, "checkpoint_every": 40}
ONLINE: dict[str, Any] = SMALL | {
    "nb_step": 200,
    "agent__replay": 100,  # it wraps
    "agent__warmup": 40,
    "agent__updates_per_step": 0.5,
}
OFFLINE: dict[str, Any] = SMALL | {"nb_step": 100, "container": "offline"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "td3_bc": (BOX, "td3_bc", OFFLINE | {"agent__prioritized": True}),
    "cql": (BOX, "cql", OFFLINE | {"agent__conservative_samples": 2, "agent__n_step": 2}),
    "iql": (CHOICE, "iql", OFFLINE | {"agent__normalize_reward": True}),
    "discrete_cql": (CHOICE, "discrete_cql", OFFLINE | {"agent__values": "implicit", "agent__atoms": 4}),
    "dqn with demonstrations": (CHOICE, "dqn", ONLINE | {"agent__prioritized": True, "agent__n_step": 3}),
    "sac with demonstrations": (BOX, "sac", ONLINE | {"agent__normalize_observation": True, "agent__n_step": 2}),
    "iql with demonstrations": (BOX, "iql", ONLINE | {"container": "local"}),
}
ALIKE = ("discrete_cql", "iql with demonstrations")  # their state is that of other cases together


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random episodes of both environments."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    random = {
        BOX: lambda seen: {"action": rng.uniform(-2, 2, (1, 1)).astype(np.float32)},
        CHOICE: lambda seen: {"action": rng.integers(0, 2, 1)},
    }
    return {name: record_to(folder / f"{name}.npz", name, act, 2 if name == BOX else 8) for name, act in random.items()}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in ALIKE else []) for c in CASES])
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(
    case: str, data: dict[str, str], tmp_path: Path
) -> None:
    environment, agent, settings = CASES[case]
    settings = settings | {"data__path": data[environment]}
    straight = train(tmp_path / "straight", environment, agent, **settings).run
    stopped = train(tmp_path / "stopped", environment, agent, stop_after("updates", 34), **settings)
    assert stopped.reason.startswith("SIG")
    assert_same_run(straight, ludus.resume(stopped.run).run)


def cache_of(agent: str, path: str, **changes: Any) -> ExperienceReplay:
    """The cache that a run would learn from."""
    environment = BOX if agent in ("sac", "td3", "ddpg", "td3_bc", "cql") else CHOICE
    worker: Any = make_worker(environment, agent, data__path=path, **ONLINE | changes)
    worker.close()
    cache: ExperienceReplay = worker.cache
    return cache


@pytest.mark.parametrize("agent", ["dqn", "rainbow", "ddpg", "td3", "sac", "discrete_sac", "iql"])
def test_every_replay_agent_mixes_demonstrations(agent: str, data: dict[str, str]) -> None:
    path = data[BOX if agent in ("sac", "td3", "ddpg") else CHOICE]
    changes = {"container": "local", "data__share": 0.25}
    cache: Any = cache_of(agent, path, **changes)
    assert isinstance(cache, MixedReplay)
    assert (cache.config.batch_size, cache.recorded.config.batch_size) == (12, 4)


def test_actions_are_recorded_in_the_units_of_the_environment(data: dict[str, str]) -> None:
    """Pendulum's torque is in [−2, 2]; SAC stores u with 2 tanh(u) equal to it, TD3 half of it."""
    with np.load(data[BOX]) as file:
        torques = file["action"]
    for agent, back in (("sac", lambda u: 2 * np.tanh(u)), ("td3", lambda a: 2 * a)):
        cache: Any = cache_of(agent, data[BOX])
        stored = cache.recorded._ring.columns["action/action"][0, :200].numpy()
        np.testing.assert_allclose(back(stored), torques[:200], atol=1e-4)


def test_rewards_are_preprocessed_as_those_of_the_environment(data: dict[str, str]) -> None:
    cache: Any = cache_of("sac", data[BOX], preprocess__reward=("scale(by=0.1)",))
    with np.load(data[BOX]) as file:
        expected = 0.1 * file["reward"]
    np.testing.assert_allclose(cache.recorded._flags.reward[0, 1:201].numpy(), expected[:200], rtol=1e-5)


def test_the_container_is_offline_for_agents_made_for_it(data: dict[str, str], tmp_path: Path) -> None:
    more = {"data__path": data[BOX], "agent__batch_size": 16, "nb_step": 40}
    result = train(tmp_path, BOX, "td3_bc", **more)
    assert (result.steps, saved(result.run)["counters"]["updates"]) == (40, 40)


def test_the_normalizer_has_the_statistics_of_the_data(data: dict[str, str], tmp_path: Path) -> None:
    result = train(tmp_path, BOX, "td3_bc", **OFFLINE | {"data__path": data[BOX], "nb_step": 20})
    agent: Any = result.load("latest").agent
    with np.load(data[BOX]) as file:
        seen = file["observation"].reshape(2, 201, 3)[:, :-1].reshape(-1, 3).astype(np.float64)
    (statistics,) = agent.normalizer.statistics.values()
    assert float(statistics.count) == 400
    np.testing.assert_allclose(statistics.mean.numpy(), seen.mean(0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(statistics.variance.numpy(), seen.var(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("agent", "changes", "message"),
    [
        ("r2d2", {}, r"agent.sequence is 20, which does not work with recorded episodes \(data.path\); set it to 0"),
        ("dqn", {"data__share": 1.0}, r"data.share is 1, but must be between 0 and 1; to learn from data.path alone"),
        ("dqn", {"data__share": 0.0}, r"data.share is 0, but must be between 0 and 1"),
        ("dqn", {"agent__batch_size": 1}, r"agent.batch_size is 1, so a batch cannot have new and recorded trans"),
    ],
)
def test_what_is_refused(agent: str, changes: dict[str, Any], message: str, data: dict[str, str]) -> None:
    memory = {"network__body": "lstm", "agent__replay": 1_000, "agent__batch_size": 2}
    settings = memory if agent == "r2d2" else {}
    with pytest.raises(UserError, match=message):
        cache_of(agent, data[CHOICE], **settings | changes)


def test_hindsight_is_refused(tmp_path: Path) -> None:
    path = record_to(tmp_path / "goals.npz", POINT, lambda seen: {"action": np.zeros((1, 2), np.float32)}, 2)
    with pytest.raises(UserError, match=r"agent.hindsight is 0.8, which does not work with recorded episodes"):
        make_worker(POINT, "sac", agent__hindsight=0.8, data__path=path)


@pytest.mark.parametrize(
    ("agent", "flag"),
    [
        *(("td3_bc", name) for name in ("noise", "noise_sigma", "noise_sigma_end", "updates_per_step")),
        *(("discrete_cql", name) for name in ("epsilon_start", "epsilon_end", "parameter_noise")),
        *(("cql", name) for name in ("replay", "parameter_noise", "save_replay")),
        *(("iql", name) for name in ("warmup", "gsde_interval")),
        ("discrete_sac", "parameter_noise"),
        ("bc", "gsde_interval"),
    ],
)
def test_settings_of_acting_do_nothing_offline(agent: str, flag: str, data: dict[str, str]) -> None:
    from ludus.core.spec import Spec
    from ludus.settings.ineffective import find_ineffective
    from ludus.settings.settings import resolve_settings

    given = {"data.path": data[BOX], "container": "offline"}
    discrete = {"action": Spec((), "int64", "categorical", sizes=(2,))}
    box = {"action": Spec((1,), "float32", low=-1, high=1)}
    action = discrete if agent in ("discrete_cql", "discrete_sac", "iql") else box
    settings = resolve_settings(CHOICE, agent, "none", None, given).settings
    found = dict(find_ineffective(settings, {"observation": Spec((4,), "float32")}, action))
    assert found[f"agent.{flag}"] == "container is offline, which does not act or store new steps"


@pytest.mark.parametrize(
    ("agent", "flag", "value"),
    [
        ("td3_bc", "noise-sigma", "0.3"),
        ("cql", "parameter-noise", "0.1"),
        ("cql", "warmup", "10"),
        ("td3_bc", "updates-per-step", "2"),
    ],
)
def test_flags_of_acting_are_refused_offline(
    agent: str, flag: str, value: str, data: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    words = [BOX, "--agent", agent, "--data", data[BOX], "--runs", str(runs), f"--agent.{flag}", value]
    assert main(["train", *words]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"agent.{flag.replace('-', '_')} is {value}" in told
    assert "would do nothing: container is offline" in told
    assert not runs.exists()


def test_a_replay_alone_can_be_read_without_a_step(data: dict[str, str]) -> None:
    worker: Any = make_worker(CHOICE, "dqn", container="offline", data__path=data[CHOICE], nb_step=10)
    worker.close()
    assert isinstance(worker.cache, RecordedReplay)
    assert worker.cache.size == worker.agent.dataset.transitions


def test_sac_continues_the_networks_of_cql(data: dict[str, str], tmp_path: Path) -> None:
    more = {"data__path": data[BOX], "agent__batch_size": 16, "checkpoint_every": 0}
    offline = train(tmp_path, BOX, "cql", **more | {"nb_step": 20, "agent__conservative_samples": 2})
    more |= {"nb_step": 16, "agent__warmup": 15, "agent__actor_learning_rate": 1e-30, "init_from": str(offline.run)}
    online = train(tmp_path, BOX, "sac", **more)
    before, after = saved(offline.run, "best")["agent"], saved(online.run)["agent"]
    actor = [name for name in before if name.startswith("networks.actor.")]
    assert actor
    assert all(bool((before[name] == after[name]).all()) for name in actor)


def test_ranks_share_a_batch(data: dict[str, str]) -> None:
    from ludus.core.rows import Rows

    worker: Any = make_worker(CHOICE, "dqn", data__path=data[CHOICE], **ONLINE)
    give_dataset(worker.settings, worker.agent, worker.manager.observation, worker.manager.action)
    cache: Any = build_cache(worker.agent, worker.manager, Rows(0, 4, 8))
    worker.close()
    assert (cache.config.batch_size, cache.recorded.config.batch_size) == (4, 4)


def test_a_run_is_data_too(tmp_path: Path) -> None:
    """Its best policy plays the episodes into a file of the new run, from which a resume learns too."""
    expert = train(tmp_path, CHOICE, "ppo", nb_step=64, agent__rollout=8).run
    clone = {"agent__batch_size": 16, "nb_step": 40, "data__path": str(expert), "data__episodes": 3}
    stopped = train(tmp_path, CHOICE, "bc", stop_after("updates", 9), **clone)
    (file,) = (tmp_path / "recorded").iterdir()
    assert len(load_npz(file).episodes) == 3
    written = file.stat().st_mtime_ns
    assert ludus.resume(stopped.run).steps == 40
    assert [*(tmp_path / "recorded").iterdir()] == [file]
    train(tmp_path, CHOICE, "bc", **clone | {"data__path": "latest", "data__episodes": 2})
    train(tmp_path, CHOICE, "bc", **clone | {"data__path": str(expert.relative_to(tmp_path)), "data__episodes": 1})
    assert file.stat().st_mtime_ns == written
    counts = [len(load_npz(path).episodes) for path in (tmp_path / "recorded").iterdir()]
    assert sorted(counts) == [1, 2, 3]
    with pytest.raises(UserError, match=r"data\.episodes is 3, but data\.path is .*, not a run; leave it out"):
        train(tmp_path, CHOICE, "bc", **clone | {"data__path": str(file)})
    with pytest.raises(UserError, match=r'The run ".*" has no config\.toml'):
        train(tmp_path / "none", CHOICE, "bc", **clone | {"data__path": str(tmp_path / "recorded")})
    with pytest.raises(UserError, match=r"ppo does not learn from recorded episodes"):
        train(tmp_path, CHOICE, "ppo", data__path=str(expert))
    assert main(["check", CHOICE, "--agent", "bc", "--data", str(expert), "--runs", str(tmp_path)]) == 0
    assert len([*(tmp_path / "recorded").iterdir()]) == 3


def test_a_run_of_an_environment_that_only_the_caller_makes_is_data_too(tmp_path: Path) -> None:
    def make() -> Any:
        return gymnasium.make(CHOICE)

    expert = train(tmp_path, make, "ppo", nb_step=64, agent__rollout=8).run
    more: dict[str, Any] = {"data__path": str(expert), "data__episodes": 2, "nb_step": 5, "agent__batch_size": 8}
    assert train(tmp_path, make, "bc", **more).steps == 5


@pytest.mark.parametrize("agent", ["bc", "iql"])
def test_actions_with_parts_that_depend_on_each_other_are_checked_as_the_policy_takes_them(
    agent: str, tmp_path: Path
) -> None:
    """Masks that depend on a choice, and masks of arguments that a choice leaves unused."""
    command, head = "ludus.environments.command_toy:CommandEnv", {"agent__head_width": 8}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "conditional": ("masked_parts:Doors", head | {"agent__autoregressive": ("room", "door")}),
        "unused": (command, {"agent__arguments": ("function: 1=place, 2=place, 3=place+target",)}),
        "entities": (command, {"agent__heads": ("target=pointer(units)",), "network__net2d": "entity_mlp"}),
    }
    for environment, own in kinds.values():
        expert = train(tmp_path, environment, "ppo", nb_step=64, agent__rollout=8, **own)
        episodes = record_episodes(expert.load("latest"), 4)
        save_npz(file := tmp_path / "x.npz", episodes)
        offline = {"nb_step": 3, "agent__batch_size": 8, "container": "offline", "data__path": str(file)}
        assert train(tmp_path, environment, agent, **own | offline).steps == 3
