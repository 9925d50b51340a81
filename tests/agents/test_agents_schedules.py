"""Settings that are schedules: they take effect where they are used, eager and compiled, and are refused elsewhere."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_setup import make_worker
from demonstrations import balance, record_to

from ludus.agents import AGENTS
from ludus.containers.impala_worker import SeatUnrolls
from ludus.containers.updater import LocalUpdater
from ludus.core.config import FIXED, OF_OPTIMIZER
from ludus.core.environment import DEFAULT_ROLE
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.schedule import Schedule, read_schedule
from ludus.settings.config_file import read_config, write_config
from ludus.settings.settings import agent_config, from_flat, resolve_settings, to_flat

TARGET = "ludus.environments.toy:TargetEnv"
QUICK = {"agent__warmup": 32, "agent__batch_size": 16, "agent__replay": 500}


def settings_of(agent: str = "ppo", origin: str = "flag", **changes: Any) -> Any:
    dotted = {f"agent.{key}": value for key, value in changes.items()}
    return resolve_settings("CartPole-v1", agent, "none", None, dotted, origin=origin).settings


def test_a_schedule_is_a_setting_like_any_other(tmp_path: Path) -> None:
    settings = settings_of(clip="linear(0.2, 0.05)", learning_rate="piecewise(0: 1e-3, 0.5: 1e-4)")
    assert settings.agent.clip == read_schedule("linear(0.2, 0.05)")
    flat = to_flat(settings)
    assert flat["agent.clip"] == "linear(0.2, 0.05)"
    write_config(tmp_path / "config.toml", flat, {})
    assert from_flat(read_config(tmp_path / "config.toml")) == settings


# of each agent, a value for every setting that may be a schedule
APART = [
    ("appo", "target_kl"),
    ("r2d2", "hindsight"),
    ("crossq", "conservative_coef"),
]  # refused together with other settings, whatever they are
STARTS = {"target_entropy": 0.5, "priority_mix": 0.5, "hysteretic": 0.5}


@pytest.mark.parametrize("agent", AGENTS)
def test_every_number_is_schedulable_or_refused_with_a_reason(agent: str) -> None:
    config = agent_config(agent)
    numbers = [field.name for field in fields(config) if "float" in str(field.type)]
    assert set(config.SCHEDULABLE) <= set(numbers)
    for name in numbers:
        value = STARTS.get(name, 0.1)
        changes = {name: f"linear({value}, {value / 2})"}
        may = name in (*config.SCHEDULABLE, *OF_OPTIMIZER) or name.endswith(("learning_rate", "_coef"))
        if name == "alpha":
            changes["learn_alpha"] = False
        if name == "parameter_noise" and getattr(config(), "noisy", False):
            changes["noisy"] = False
        if (agent, name) in APART or (name == "munchausen" and not agent.startswith(("dqn", "munchausen"))):
            continue
        if may:
            assert isinstance(getattr(settings_of(agent, **changes).agent, name), Schedule), name
        else:
            with pytest.raises(UserError, match=rf"^agent\.{name} is linear.*cannot change during a run, since "):
                settings_of(agent, **changes)


def test_refusals() -> None:
    def refuse(match: str, agent: str = "ppo", **changes: Any) -> None:
        with pytest.raises(UserError, match=match):
            settings_of(agent, **changes)

    refuse(r"^agent\.gamma is linear.*, since the returns of recorded", "bc", gamma="linear(0.9, 0.99)")
    refuse(r"^agent\.optimizer_eps is linear.*, since the optimizer is made", optimizer_eps="linear(0.1, 0.2)")
    refuse(r"^agent\.gamma is linear.*, which reaches 1\.2; it must be between 0 and 1", gamma="linear(0.9, 1.2)")
    refuse(r"reaches -1; it must be greater than 0", clip="linear(0.2, -1)")
    refuse(r"max_grad_norm is linear.*reaches 0; a schedule of it must stay above 0", max_grad_norm="linear(1, 0)")
    refuse(r"reaches 2; it must be between 0 and 1", gae_lambda="linear(0.2, 2)")
    refuse(r'there is no schedule "liner".*Did you mean "linear"\?', clip="liner(0.2, 0.1)")
    refuse(r'agent\.clip is "linear\(0\.2\)", but .*; write it like linear\(start, end, share=1\)', clip="linear(0.2)")
    refuse(r'agent\.clip is "linear", but brackets are missing; write it like linear\(start, end', clip="linear")
    refuse(r"agent\.expectile is linear.*must be between 0 and 1", "iql", expectile="linear(0.7, 1.2)")
    refuse(r"agent\.rollout is .*but must be a whole number", rollout="linear(8, 16)")
    refuse(r"only learning rates can follow the returns", entropy_coef="ReduceLROnPlateau(0.1)")
    refuse(r"agent\.learn_alpha is on, so it is only the initial value", "sac", alpha="linear(1, 0.1)")
    refuse(
        r"^agent\.learning_rate_schedule is kl \(flag\), but agent\.learning_rate is cosine\(0\.001, 0\)",
        learning_rate="cosine(1e-3, 0)",
        learning_rate_schedule="kl",
        target_kl=0.01,
    )
    refuse(r"noise_sigma_end is 0\.1", "td3", noise_sigma="linear(1, 0.5)", noise_sigma_end=0.1)
    assert not FIXED.keys() - {"gamma"} & {name for agent in AGENTS for name in agent_config(agent).SCHEDULABLE}


def test_the_schedules_of_roles_are_checked() -> None:
    def of_predator(**changes: Any) -> None:
        given = {f"roles.predator.agent.{key}": value for key, value in changes.items()}
        roles = {"roles.agents": "predator=ppo, prey=dqn", "evaluation.every": 0} | given
        resolve_settings("CartPole-v1", "ppo", "none", None, roles, origin="flag")

    of_predator(clip="linear(0.2, 0.05)")
    with pytest.raises(UserError, match=r"optimizer_eps is linear\(0\.1, 0\.2\), but it cannot change during a run"):
        of_predator(optimizer_eps="linear(0.1, 0.2)")
    with pytest.raises(UserError, match=r"follows the returns of evaluations, but evaluation\.every is 0"):
        of_predator(learning_rate="by_return(0: 1e-3, 5: 1e-4)")


def test_a_schedule_takes_the_place_of_the_agents_own() -> None:
    """A2C's learning rate falls linearly by default, and so does that of presets."""
    long = resolve_settings("CartPole-v1", "a2c", "none", None, {"nb_step": 2_000_000}).settings.agent
    assert long.learning_rate_schedule == "linear"
    changes = {"nb_step": 2_000_000, "agent.learning_rate": "cosine(1e-3, 1e-4)"}
    assert resolve_settings("CartPole-v1", "a2c", "none", None, changes).settings.agent.learning_rate_schedule == (
        "constant"
    )
    preset = resolve_settings("CartPole-v1", "ppo", None, None, {"agent.clip": "linear(0.3, 0.1)"}).settings.agent
    assert (preset.clip_schedule, preset.learning_rate_schedule) == ("constant", "linear")
    ladder = settings_of("dqn", epsilon_start="cosine(1, 0.05)").agent
    assert ladder.epsilon_schedule == "constant"


def test_current_values_are_in_config_and_logged() -> None:
    worker = make_worker("CartPole-v1", agent__clip="linear(0.2, 0.1)", agent__entropy_coef="linear(0, 0.02)")
    agent: Any = worker.agent
    assert (agent.config.clip, agent.config.entropy_coef) == (0.2, 0.0)
    assert agent.schedule(0.5) == {"clip": pytest.approx(0.15), "entropy_coef": pytest.approx(0.01)}
    assert agent.config.clip == pytest.approx(float(agent.clip)) == pytest.approx(0.15)
    assert agent.loss_coefficients()["entropy"] == pytest.approx(0.01)
    with agent.given_config():
        assert agent.config.clip == read_schedule("linear(0.2, 0.1)")
    worker.run(500)
    assert worker.progress()["clip"] < 0.16  # of the last update, after half of the run
    worker.close()


def test_every_group_has_its_own_learning_rate() -> None:
    rates = {
        "agent__learning_rate": 1e-3,
        "agent__actor_learning_rate": "linear(1e-3, 1e-4)",
        "agent__alpha_learning_rate": "cosine(1e-2, 0)",
    }
    worker = make_worker(TARGET, "sac", **QUICK, **rates)
    updater: Any = worker.updater
    worker.agent.schedule(0.5)
    assert updater.schedule(0.5) == {"learning_rate/actor": pytest.approx(5.5e-4), "learning_rate/alpha": 5e-3}
    assert {name: float(part.lr) for name, part in updater.parts.items()} == pytest.approx(
        {"critic": 1e-3, "actor": 5.5e-4, "alpha": 5e-3}
    )
    assert updater.learning_rate == 1e-3
    worker.close()


def test_a_learning_rate_follows_the_evaluations() -> None:
    worker = make_worker(
        "CartPole-v1", agent__learning_rate="by_return(0: 1e-3, 5: 2e-4)", evaluation__every=64, nb_step=400
    )
    worker.run(128)
    assert worker.updater.learning_rate == 2e-4  # any policy reaches 5
    state = worker.updater.state_dict()
    fresh: Any = LocalUpdater(worker.agent)
    fresh.load_state_dict(state)
    assert fresh.learning_rate == 2e-4
    fresh.schedule(0.0)
    assert fresh.learning_rate == 2e-4
    worker.close()
    with pytest.raises(UserError, match=r"follows the returns of evaluations, but evaluation\.every is 0"):
        make_worker("CartPole-v1", agent__learning_rate="by_return(0: 1e-3, 5: 2e-4)")


# agent, environment, settings, and the share of the run at which a step with another value is taken
LOSSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clips": ("ppo", "CartPole-v1", {"clip": "linear(0.001, 0.2)", "value_clip": "linear(0.01, 1)"}),
    "weights": ("ppo", "CartPole-v1", {"entropy_coef": "linear(0, 10)", "value_coef": "linear(1, 3)"}),
    "trust region": ("acer", "CartPole-v1", {"trust_region": "linear(0.001, 1)", "importance_clip": "linear(1, 5)"}),
    "munchausen": ("munchausen_dqn", "CartPole-v1", {"munchausen": "linear(0, 0.9)", "temperature": "linear(1, 0.03)"}),
    "target noise": (
        "td3",
        TARGET,
        {"target_noise": "linear(0, 1)", "hysteretic": "linear(0.1, 1)", "policy_delay": 1},
    ),
    "imitation": ("td3_bc", TARGET, {"bc_alpha": "linear(0.1, 5)", "policy_delay": 1}),
    "expectile": ("iql", TARGET, {"expectile": "linear(0.5, 0.9)", "temperature": "linear(0.1, 3)"}),
    "target entropy": ("sac", TARGET, {"target_entropy": "linear(5, -5)"}),
    "optimizer": ("ppo", "CartPole-v1", {"max_grad_norm": "linear(0.0625, 0.5)", "weight_decay": "linear(0, 0.5)"}),
    "alpha": ("sac", TARGET, {"alpha": "linear(1, 0.01)", "learn_alpha": False}),
}


# of agents whose updates are not one compiled loss
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "TRPO's entropy": ("trpo", "CartPole-v1", {"entropy_coef": "linear(0, 10)"}),
    "KL bound": ("trpo", "CartPole-v1", {"target_kl": "linear(0.0001, 0.05)"}),
    "damping": ("trpo", "CartPole-v1", {"cg_damping": "linear(0.01, 1)"}),
    "line search": ("trpo", TARGET, {"line_search_shrink": "linear(0.9, 0.1)", "target_kl": 50.0}),
    "Q(λ)": ("pqn", "CartPole-v1", {"trace_lambda": "linear(0, 1)"}),
    "GAE": ("ppo", "CartPole-v1", {"gae_lambda": "linear(0, 1)"}),
    "Polyak": ("sac", TARGET, {"tau": "linear(0.001, 1)"}),
    "alive bonus": ("ars", "CartPole-v1", {"alive_bonus": "linear(0, 100)"}),
}

FAST = [("traced", case) for case in ("clips", "weights", "optimizer", "munchausen", "target noise", "expectile")]


def step_all(worker: Any, batch: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if worker.agent.generator is not None:
        worker.agent.generator.manual_seed(0)
    for _ in range(2):  # ACER's average policy differs from the second on
        worker.agent.learn(batch, worker.updater)
    return [p.detach().clone() for p in worker.agent.parameters()]


@pytest.mark.parametrize("case", [*LOSSES, *OTHERS])
def test_losses_follow_their_schedules(case: str) -> None:
    """A step at the end of the run is that of an agent with the value at the end, and differs from one at the start."""
    agent, environment, changes = (LOSSES | OTHERS)[case]
    ends = {name: read_schedule(x).at(1.0) if isinstance(x, str) else x for name, x in changes.items()}
    found = {}
    for name, given, progress in (("start", changes, 0.0), ("end", changes, 1.0), ("plain", ends, 1.0)):
        worker = scheduled_worker(agent, environment, given)
        batch = first_batch(worker)
        worker.agent.schedule(progress)
        worker.updater.schedule(progress)
        found[name] = step_all(worker, batch)
        worker.close()
    assert all(map(torch.equal, found["end"], found["plain"]))
    assert not all(map(torch.equal, found["start"], found["end"]))


def scheduled_worker(agent: str, environment: str, changes: dict[str, Any]) -> Any:
    own = {f"agent__{key}": value for key, value in changes.items()}
    quick: dict[str, Any] = QUICK if agent not in ("ppo", "acer", "trpo", "pqn") else {"agent__rollout": 16}
    quick = {"agent__warmup": 32} | quick if agent == "acer" else {} if agent == "ars" else quick
    return make_worker(environment, agent, **quick, **own)


def first_batch(worker: Any) -> Any:
    from ludus.containers.loop import begin, collect

    begin(worker, 0)
    while not worker.cache.ready():
        collect(worker)
    torch.manual_seed(0)
    if worker.cache.generator is not None:
        worker.cache.generator.manual_seed(0)
    return worker.cache.read()


@pytest.mark.parametrize(
    ("case", "how"),
    [
        pytest.param(case, how, marks=[] if (how, case) in FAST else [pytest.mark.slow])
        for case in LOSSES
        for how in ("traced", "compiled")
    ],
)
def test_compiled_losses_follow_their_schedules_without_compiling_again(
    case: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast test runs the graph that would be compiled: a number in it would stay what it was when it was traced."""
    if how == "traced":
        monkeypatch.setattr("ludus.containers.compiled.compile_graph", lambda traced, inputs: traced)
    agent, environment, changes = LOSSES[case]
    compiled, eager = (scheduled_worker(agent, environment, changes) for _ in range(2))
    failures: list[str] = []
    graphs: list[Any] = []

    def during(build: Any) -> Any:
        graphs.append(build())
        return graphs[-1]

    compiled.updater.compile(failures.append, during)
    batches = [first_batch(worker) for worker in (compiled, eager)]
    count = 0
    for progress in (0.0, 0.5, 1.0):
        for worker in (compiled, eager):
            worker.agent.schedule(progress)
            worker.updater.schedule(progress)
        stepped = [step_all(worker, batch) for worker, batch in zip((compiled, eager), batches, strict=True)]
        assert not failures
        for mine, other in zip(*stepped, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=2e-5)
        assert len(graphs) == (count or len(graphs))
        count = len(graphs)
    for worker in (compiled, eager):
        worker.close()


REPLAYED = {"warmup": 32, "batch_size": 16, "replay": 500}
DISCOUNTED: dict[str, tuple[str, dict[str, Any]]] = {  # an agent with each kind of cache
    "ppo": ("CartPole-v1", {"rollout": 16}),
    "reinforce": ("CartPole-v1", {}),
    "acer": ("CartPole-v1", {"rollout": 16, "warmup": 32}),
    "dqn": ("CartPole-v1", REPLAYED),
    "td3": (TARGET, REPLAYED | {"n_step": 3}),
    "r2d2": ("CartPole-v1", REPLAYED | {"sequence": 4, "burn_in": 2, "overlap": 2, "batch_size": 4}),
}


@pytest.mark.parametrize("agent", DISCOUNTED)
def test_discounts_follow_the_schedule_of_gamma(agent: str) -> None:
    """A batch read at the end of the run is that of an agent with the discount at the end."""
    environment, more = DISCOUNTED[agent]
    rising, found = "linear(0.5, 0.9)", {}
    for name, gamma, progress in (("start", rising, 0.0), ("end", rising, 1.0), ("0.9", 0.9, 1.0)):
        given = {"gamma": gamma, "normalize_reward": True} | more
        worker = make_worker(environment, agent, **{f"agent__{key}": value for key, value in given.items()})
        worker.learners[0].schedule(progress)
        batch = first_batch(worker)
        found[name] = [x.clone() for x in (batch.discount, batch.reward, *batch.row_state.values())]
        worker.close()
    assert all(map(torch.equal, found["end"], found["0.9"]))
    smallest = [float(found[name][0][found[name][0] > 0].min()) for name in ("start", "end")]
    steps = more.get("n_step", 1)
    assert smallest == pytest.approx([0.5**steps, 0.9**steps])


@pytest.mark.parametrize("agent", ["appo", "a3c", "dqn"])
def test_workers_discount_by_the_schedule_of_gamma(agent: str) -> None:
    """The running returns of a rollout, and the first priorities of a replay."""
    more = {"prioritized": True, "n_step": 2} | REPLAYED if agent == "dqn" else {"rollout": 8}
    given = {f"agent__{key}": value for key, value in more.items()}
    worker = make_worker("CartPole-v1", agent, agent__gamma="linear(0.5, 0.9)", **given)
    seat: Any = SeatUnrolls(worker.settings, worker.agent, DEFAULT_ROLE, Rows.all(4), 0)
    seat.use_memory([None, None])
    seat.schedule(1.0)
    assert worker.agent.config.gamma == 0.9
    for unroll in seat.unrolls:
        assert (unroll._items if agent == "dqn" else unroll).gamma == 0.9
        if agent == "dqn":
            assert unroll._items._reader._powers.tolist() == pytest.approx([1, 0.9, 0.81])
    worker.close()


def test_recorded_transitions_are_discounted_by_the_schedule_of_gamma(tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", "CartPole-v1", balance, 2)
    given = {f"agent__{key}": value for key, value in REPLAYED.items()}
    worker = make_worker("CartPole-v1", "dqn", agent__gamma="linear(0.5, 0.9)", data__path=data, **given)
    worker.learners[0].schedule(1.0)
    batch = first_batch(worker)
    assert torch.isin(batch.discount, torch.tensor([0.0, 0.9])).all()
    assert (batch.discount[:, -4:] > 0).any()  # the recorded half comes last
    worker.close()
