"""Several ranks learn what one rank learns from all of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from containers_setup import dotted, make_worker, small
from demonstrations import record_to
from distrib_setup import CPU, RANKS, ROWS, made_up_batch, on_ranks
from torch import Tensor

import ludus
import ludus.containers.compiled as compiled
from ludus.agents.ars import ENVIRONMENT
from ludus.containers.build import build_evaluator, build_manager, make_actor
from ludus.containers.distrib import (
    DistribUpdater,
    DistribWorker,
    decide_ranks,
    more_ranks_than_cores,
    rank_device,
)
from ludus.containers.local import LocalWorker
from ludus.containers.loop import begin, collect, improve
from ludus.containers.ranks import SHARED_BYTES, RankGroup
from ludus.containers.roles import adapt_to_manager, build_agents
from ludus.containers.team import members
from ludus.containers.updater import LocalUpdater
from ludus.core.batch import Batch
from ludus.core.encoding import from_bytes, to_bytes
from ludus.core.errors import UserError
from ludus.core.types import Tensors
from ludus.experience.config import ReplayConfig
from ludus.settings.settings import Resolved, agent_config, resolve_settings

NORMALIZED: dict[str, Any] = {
    "agent__normalize_advantage": True,
    "agent__normalize_observation": True,
    "agent__normalize_reward": True,
    "network__hidden": (16,),
    "agent__rollout": 12,
}
REPLAYED: dict[str, Any] = {"network__hidden": (16,), "agent__replay": 1000, "agent__target_every": 2}
AGENTS_TOY = "ludus.environments.agents_toy:"
TEAM, NIM = AGENTS_TOY + "CueTeam", AGENTS_TOY + "Nim"
ROLES: dict[str, Any] = {"env__options": ("agents=2", "guides=1", "length=3"), "network__hidden": (16,)}
CLONED: dict[str, Any] = {
    "network__hidden": (16,),
    "agent__replay": 1000,
    "agent__target_noise": 0.0,
    "agent__policy_delay": 1,
    "agent__learning_rate": 1e-2,
}
# what equals one rank with all rows: agent and settings
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", NORMALIZED | {"agent__minibatches": 1, "agent__epochs": 3}),
    "a2c": ("a2c", NORMALIZED),
    "a2c n-step": ("a2c", NORMALIZED | {"agent__n_step": 3}),
    "vtrace": ("vtrace", NORMALIZED),
    "trpo": (
        "trpo",
        NORMALIZED
        | {"agent__minibatches": 1, "agent__value_epochs": 3, "agent__cg_iterations": 4, "agent__entropy_coef": 0.1},
    ),
    "ars": ("ars", {}),
    "dqn": ("dqn", REPLAYED | {"agent__prioritized": True}),
    "td3_bc": ("td3_bc", CLONED | {"agent__prioritized": True, "container": "local"}),
}
# what has the same parameters on all ranks, although these play other episodes: environment, agent and settings
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", "ppo", {"agent__minibatches": 3, "agent__epochs": 4, "agent__target_kl": 0.02}),
    "ppo kl": ("CartPole-v1", "ppo", {"agent__learning_rate_schedule": "kl", "agent__target_kl": 0.01}),
    "ppo by return": (
        "CartPole-v1",
        "ppo",
        {
            "agent__learning_rate": "by_return(0: 1e-3, 5: 1e-4)",
            "agent__clip": "linear(0.3, 0.1)",
            "evaluation__every": 32,
        },
    ),
    "ppo lstm": ("CartPole-v1", "ppo", {"network__body": "lstm", "agent__minibatches": 2}),
    "dqn": ("CartPole-v1", "dqn", {"agent__normalize_observation": True, "agent__updates_per_step": 0.2}),
    "rainbow": ("CartPole-v1", "rainbow", {}),
    "r2d2": ("CartPole-v1", "r2d2", {"agent__sequence": 4, "agent__burn_in": 2, "agent__overlap": 0}),
    "reinforce": ("CartPole-v1", "reinforce", {}),
    "pqn": ("CartPole-v1", "pqn", {"agent__rollout": 8}),
    "trpo lstm": ("CartPole-v1", "trpo", {"network__body": "lstm", "agent__minibatches": 2}),
    "ars": ("CartPole-v1", "ars", {"agent__normalize_observation": True}),
    "ars in pairs": ("Pendulum-v1", "ars", {"env__repeat_seeds": 2, "env__max_episode_steps": 20}),
    "acer": ("CartPole-v1", "acer", {"agent__rollout": 8, "agent__replay_ratio": 2.0}),
    "discrete_sac": ("CartPole-v1", "discrete_sac", {}),
    "sac": ("Pendulum-v1", "sac", {"agent__normalize_observation": True}),
    "crossq": ("Pendulum-v1", "crossq", {}),
    "td3": ("Pendulum-v1", "td3", {}),
    "ddpg": ("Pendulum-v1", "ddpg", {"agent__noise": "parameter"}),
    "roles": (
        TEAM,
        "ppo",
        ROLES
        | {
            "roles__agents": "agent=ppo, guide=dqn",
            "roles__guide__agent__warmup": 32,
            "roles__guide__agent__batch_size": 8,
        },
    ),
    "self-play": (NIM, "ppo", {"self_play__every": 30, "self_play__size": 2}),
    "gail": ("Pendulum-v1", "gail", {"agent__rollout": 7, "agent__minibatches": 1, "agent__discriminator_updates": 2}),
}
OVER_GLOO = ("ppo", "acer", "dqn")
STEPS = 128
RESUMED = ("ppo lstm", "dqn", "acer", "ddpg", "roles", "self-play", "gail")
DATA: dict[str, str] = {}  # the path of the demonstrations of this process
OFF_POLICY = {"agent__warmup": 32, "agent__batch_size": 8, "agent__replay": 1000}


def cases(group: RankGroup) -> dict[str, Tensors]:
    with demonstrations(group):
        return _cases(group)


def _cases(group: RankGroup) -> dict[str, Tensors]:
    found = {f"equal {name}": learn(name, group) for name in EQUAL}
    found |= {f"run {name}": run(name, group) for name in RUNS}
    with without_memory(group):
        found |= {f"gloo {name}": run(name, group) for name in OVER_GLOO}
        found["gloo sums"] = sums(group)
    found["sums"] = sums(group)
    found["two roles"] = two_roles(group)
    return found | {f"resume {name}": resume(name, group) for name in RESUMED}


@contextmanager
def without_memory(group: RankGroup) -> Iterator[None]:
    """Let ranks sum by gloo, as across machines."""
    memory, group._shared = group._shared, None
    assert memory is not None
    yield
    group._shared = memory


def sums(group: RankGroup) -> Tensors:
    """Sums of several sizes and types; the last is too large for the shared memory."""
    large = torch.rand(SHARED_BYTES // 4 + 5, generator=torch.Generator().manual_seed(group.rank))
    terms = [torch.arange(3.0) + group.rank, torch.tensor(2**40 + group.rank), large[:5], large]
    found = {str(i): group.sum(x) for i, x in enumerate(terms)}
    gathered = group.gather(b"ab" if group.rank else b"", [0, 2])
    return found | {"gathered": torch.tensor([list(part) == [97, 98] * i for i, part in enumerate(gathered)])}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """What ``cases`` returns on both ranks; one process is started for all."""
    return on_ranks("test_containers_distrib:cases", tmp_path_factory.mktemp("ranks"))


def learn(name: str, group: RankGroup | None) -> Tensors:
    """What an agent is after some updates: its tensors, and the last metrics; without a group: alone, with all rows."""
    agent, changes = EQUAL[name]
    rows = slice(0, RANKS * ROWS) if group is None else slice(group.rank * ROWS, (group.rank + 1) * ROWS)
    environment = "Pendulum-v1" if agent == "td3_bc" else "CartPole-v1"
    worker: Any = make_worker(environment, agent, **changes, env__num=rows.stop - rows.start)
    updater = LocalUpdater(worker.agent) if group is None else DistribUpdater(worker.agent, group)
    for seed in range(4):
        batch = made_up_batch(seed, rows)
        batch = transitions(batch, seed) if agent in ("dqn", "td3_bc") else batch
        batch = with_torques(batch) if agent == "td3_bc" else batch
        batch.experience[ENVIRONMENT] = torch.arange(rows.start, rows.stop).expand_as(batch.reward)  # for ARS
        metrics = worker.agent.learn(batch, updater).metrics
    worker.close()
    state = {
        name: x for name, x in worker.agent.state_dict().items() if isinstance(x, Tensor) and "carried" not in name
    }
    return state | {f"metrics/{name}": x for name, x in metrics.items()} | {"rate": torch.tensor(updater.learning_rate)}


def transitions(batch: Batch, time: int) -> Batch:
    """One step of a rollout as a batch of a replay, with importance weights."""
    one = {"observation": slice(time, time + 2), "action": slice(time, time + 1)}
    named: dict[str, Any] = {key: {k: x[at] for k, x in getattr(batch, key).items()} for key, at in one.items()}
    plain = {
        key: getattr(batch, key)[one["action"]] for key in ("reward", "terminated", "truncated", "discount", "real")
    }
    weight = 1 / (1 + batch.reward[one["action"]].abs())
    return replace(batch, **named, **plain, first=batch.first[time : time + 2], weight=weight, experience={})


def with_torques(batch: Batch) -> Batch:
    """A batch of CartPole's shapes with those of Pendulum: three numbers, of which one gives an action."""
    seen = batch.observation["observation"]
    return replace(batch, observation={"observation": seen[..., :3]}, action={"action": seen[:1, :, 3:].tanh()})


def make_rank(group: RankGroup | None, environment: str, agent: str, **changes: Any) -> LocalWorker:
    """A rank, or without a group a worker with all rows."""
    chosen = changes if group is None else {"container": "distrib", "distrib__ranks": RANKS} | changes
    resolved = resolve_settings(environment, agent, "none", None, small(agent) | dotted(chosen))
    manager = build_manager(resolved.settings, rank=0 if group is None else group.rank)
    settings = (adapt_to_manager(resolved, manager) if resolved.settings.roles.agents else resolved).settings
    made: Any = build_agents(settings, manager, CPU)
    manager.set_action_transform(made.action_transform)
    evaluator = build_evaluator(settings, make_actor(made, manager))
    agents = members(made).items()
    if group is None:
        return LocalWorker(settings, made, manager, {role: LocalUpdater(own) for role, own in agents}, evaluator)
    updaters = {role: DistribUpdater(own, group) for role, own in agents}
    return DistribWorker(settings, made, manager, updaters, evaluator)


def two_roles(group: RankGroup | None) -> Tensors:
    """What two roles are after some updates, and the metrics of both."""
    own = {"agent__rollout": 8, "agent__minibatches": 1, "roles__agents": "agent=ppo, guide=vtrace"}
    own["roles__guide__agent__rollout"] = 4
    worker = make_rank(group, TEAM, "ppo", **ROLES | own, env__num=8, nb_step=10_000)
    worker.run(STEPS)
    worker.close()
    assert worker.updates >= 6
    metrics = {name: x for learner in worker.learners for name, x in learner.metrics.items()}
    return dict(worker.agent.state_dict()) | metrics | {"steps": torch.tensor(worker.local_step_count)}


def make_run(name: str, group: RankGroup) -> Any:
    environment, agent, changes = RUNS[name]
    own = (
        OFF_POLICY
        if issubclass(agent_config(agent), ReplayConfig)
        else {"agent__warmup": 32}
        if agent == "acer"
        else {}
    )
    if agent == "gail":
        own = {"data": DATA["path"], "agent__normalize_reward": True}
    return make_rank(group, environment, agent, **own | changes, nb_step=STEPS)


@contextmanager
def demonstrations(group: RankGroup) -> Iterator[None]:
    """A file of episodes for all ranks, which rank 0 writes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.npz"
        if group.rank == 0:
            record_to(path, "Pendulum-v1", lambda seen: {"action": -seen["observation"][:, 1:2]}, 1)
            group.exchange({1: str(path).encode()})
        DATA["path"] = str(path) if group.rank == 0 else group.exchange({})[0].decode()
        yield


def run(name: str, group: RankGroup) -> Tensors:
    """What a rank is at the end of a short run."""
    worker = make_run(name, group)
    worker.run(STEPS)
    worker.close()
    return of_rank(worker)


def of_rank(worker: Any) -> Tensors:
    learned = {name: p.detach() for name, p in worker.agent.named_parameters() if p.requires_grad}
    learned["rating"] = torch.tensor(0.0 if worker.pool is None else worker.pool.rating)
    if worker.pool is not None:
        for member in worker.pool.members:
            learned |= {f"{member.step}/{name}": p.detach() for name, p in member.agent.named_parameters()}
    state = {
        k: x
        for k, x in worker.agent.state_dict().items()
        if k.startswith("normalizer.") or k.endswith("sigma") or ".norms." in k
    }
    counts = {"updates": worker.updates, "steps": worker.local_step_count, "episodes": len(worker.episodes.returns)}
    observed = next(iter(worker.manager.last_roles().values())).observation
    return (
        learned | state | {name: torch.tensor(x) for name, x in counts.items()} | {"own": next(iter(observed.values()))}
    )


def resume(name: str, group: RankGroup) -> Tensors:
    """What differs between a run that was saved in its middle and loaded again, and the run that went on."""
    straight, resumed = (make_run(name, group) for _ in range(2))
    state = straight.run(STEPS // 2).state_dict()
    if group.rank == 0:
        resumed.load_state_dict(from_bytes(to_bytes(state)))
        resumed._send_states()
    else:
        resumed._receive_state()
    first, other = (of_rank(worker.run(STEPS, worker.local_step_count)) for worker in (straight, resumed))
    for worker in (straight, resumed):
        worker.close()
    if group.rank:
        del first["episodes"], first["rating"]  # those of all ranks are counted by rank 0
    return {key: x for key, x in first.items() if not torch.equal(x, other[key])} | {"updates": first["updates"]}


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_are_one_rank_with_all_rows(ranks: Any, name: str) -> None:
    (one, other), alone = (found[f"equal {name}"] for found in ranks), learn(name, None)
    assert sorted(one) == sorted(alone)
    for key, x in alone.items():
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
        torch.testing.assert_close(one[key], x, rtol=1e-5, atol=1e-5, msg=lambda told, key=key: f"{key}: {told}")


def test_two_ranks_with_two_roles_are_one_rank_with_all_environments(ranks: Any) -> None:
    (one, other), alone = (found["two roles"] for found in ranks), two_roles(None)
    assert {"agent/loss/policy", "guide/loss/value"} <= alone.keys() == one.keys()
    for key, x in alone.items():
        torch.testing.assert_close(one[key], x, rtol=1e-4, atol=1e-5, msg=lambda told, key=key: f"{key}: {told}")
        if "carried" not in key:
            torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_with_other_episodes_stay_equal(ranks: Any, name: str) -> None:
    one, other = (found[f"run {name}"] for found in ranks)
    assert not torch.equal(one.pop("own"), other.pop("own"))
    assert one.pop("episodes") >= other.pop("episodes") == 0  # rank 0 reports those of all
    assert (float(one.pop("rating")) != 0) == (name == "self-play")  # and rates games of all
    assert other.pop("rating") == 0
    assert one["updates"] > 0
    assert one["steps"] >= STEPS
    assert all(torch.equal(x, other[key]) for key, x in one.items())


@pytest.mark.parametrize("name", RESUMED)
def test_every_rank_goes_on_from_its_part_of_a_checkpoint(ranks: Any, name: str) -> None:
    assert [list(found[f"resume {name}"]) for found in ranks] == [["updates"], ["updates"]]


@pytest.mark.parametrize("name", OVER_GLOO)
def test_ranks_without_shared_memory_learn_the_same(ranks: Any, name: str) -> None:
    for found in ranks:
        for key, x in found[f"gloo {name}"].items():
            assert torch.equal(x, found[f"run {name}"].get(key, x)), key


def test_sums_in_shared_memory_are_those_of_gloo(ranks: Any) -> None:
    one, other = (found["sums"] for found in ranks)
    assert one["0"].tolist() == [1, 3, 5]
    assert int(one["1"]) == 2**41 + 1
    assert one["gathered"].tolist() == [True, True]
    for key, x in one.items():
        for found in (other, ranks[0]["gloo sums"], ranks[1]["gloo sums"]):
            assert found[key].dtype == x.dtype
            assert torch.equal(found[key], x)


def test_updates_follow_the_steps_of_all_ranks(ranks: Any) -> None:
    """Two ranks that each had a credit of their own would make half of the updates, or those of the slower one."""
    done = ranks[0]["run dqn"]
    assert float(done["updates"]) == pytest.approx(0.2 * (float(done["steps"]) - 32), abs=2)


class Counting(LocalUpdater):
    """Counts sums over two ranks that have the same rows; those of gradients are not among them."""

    ranks, sums = 2, 0

    def sum(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.sums += 1
        return x + x


ACER = {"agent__warmup": 8, "agent__normalize_observation": False, "agent__normalize_reward": False}
# agent, settings, and how many sums there are beside those of gradients, given the number of updates
SUMS: dict[str, tuple[str, dict[str, Any], Callable[[int], int]]] = {
    "ppo": ("ppo", NORMALIZED | {"agent__epochs": 4}, lambda _: 4 + 3),  # an epoch each, reward, observation, variance
    "a2c": ("a2c", NORMALIZED, lambda _: 1 + 3),
    "pqn": ("pqn", {"agent__epochs": 2, "agent__normalize_observation": False}, lambda _: 2),
    "acer": ("acer", ACER, lambda updates: 1 + updates),  # the number of replayed batches
    "dqn": ("dqn", OFF_POLICY, lambda _: 2),  # the credit, and the number of rows, which does not change
    "prioritized dqn": ("dqn", OFF_POLICY | {"agent__prioritized": True}, lambda updates: 1 + updates),
}


@pytest.mark.parametrize("name", SUMS)
def test_statistics_of_all_minibatches_are_summed_at_once(name: str) -> None:
    agent, changes, expected = SUMS[name]
    worker: Any = make_worker("CartPole-v1", agent, **changes)
    updater = worker.guard.updater = Counting(worker.agent)
    begin(worker, 0)
    updates = 0
    while not updates:
        updater.sums = 0
        collect(worker)
        _, updates = improve(worker)
    assert updater.sums == expected(updates)
    worker.close()


def test_tracing_an_update_runs_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = make_worker("CartPole-v1", "ppo", **NORMALIZED, env__num=ROWS, agent__minibatches=1)
    updater, traced = DistribUpdater(worker.agent, RankGroup(0, RANKS, 60)), []  # not connected: a sum would fail

    def keep(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        raise RuntimeError("not compiled")

    monkeypatch.setattr(compiled, "compile_graph", keep)
    batch = worker.agent.prepare(made_up_batch(0, slice(0, ROWS)))
    rows = worker.agent.with_shares(batch.without_last_observation())
    part = updater.parts["all"]
    step = compiled.CompiledStep(updater, worker.agent.compute_loss, part, lambda build: build())
    with pytest.raises(RuntimeError, match="not compiled"):
        step.prepare(rows)
    assert sum("sum_over_ranks" in str(node.target) for node in traced[0].graph.nodes) == 1
    worker.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"env.num": 5}, "env.num is 5, which 2 ranks cannot share equally; set env.num to 6"),
    "pairs": (
        {"agent.name": "ars", "distrib.ranks": 3, "env.num": 8},
        "env.num is 8, .*; set env.num to 12",
    ),  # 9 is odd
    "ranks": ({"distrib.ranks": -1}, "distrib.ranks is -1"),
    "timeout": ({"distrib.timeout": 0.0}, "distrib.timeout is 0"),
    "local": ({"container": "local"}, "distrib.ranks is 2, but container is local"),
    "name": ({"container": "ditrib"}, "container"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_ranks_cannot_share_are_refused(name: str) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(UserError, match=said):
        resolve_settings("CartPole-v1", overrides={"container": "distrib", "ranks": 2} | changes)


def settings_with(**changes: Any) -> Resolved:
    return resolve_settings("CartPole-v1", overrides={"container": "distrib"} | dotted(changes))


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"agent.batch_size is 33, which 2 ranks cannot share equally; set it to 34"):
        make_rank(RankGroup(0, RANKS, 60), "CartPole-v1", "dqn", agent__batch_size=33, agent__warmup=10)


def test_ranks_are_decided_by_torchrun_the_setting_or_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.containers.distrib.cores", lambda: 4)
    assert decide_ranks(settings_with(device="cpu")).settings.ranks == 4
    assert decide_ranks(settings_with(ranks=8)).settings.ranks == 8
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert decide_ranks(settings_with()).settings.ranks == 2
    with pytest.raises(UserError, match=r"distrib.ranks is 8, but torchrun started 2 processes"):
        decide_ranks(settings_with(ranks=8))
    with pytest.raises(UserError, match="torchrun started 2 processes, but container is local"):
        ludus.train("CartPole-v1")


def test_more_ranks_than_cores_are_told_with_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.containers.distrib.cores", lambda: 2)
    assert more_ranks_than_cores(settings_with(ranks=2).settings) == ""
    assert "8 ranks on 2 cores" in more_ranks_than_cores(settings_with(ranks=8).settings)


def test_each_rank_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [rank_device(settings_with(ranks=2).settings, rank) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert rank_device(settings_with(ranks=4).settings) == "cpu"  # auto: there are too few
    with pytest.raises(UserError, match="this machine has 2 GPUs for 4 ranks"):
        rank_device(settings_with(ranks=4, device="cuda").settings)
    with pytest.raises(UserError, match="device is cuda:1, but each of 2 ranks needs its own"):
        rank_device(settings_with(ranks=2, device="cuda:1").settings)


def test_code_that_only_this_process_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"container is distrib, but .*lambda.* cannot be imported by another process"):
        ludus.train(lambda: None, container="distrib", ranks=2)
