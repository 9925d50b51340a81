"""ACER: its gradient is the paper's, replays begin as acting did, and the trust region binds when it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agents_setup import make_worker
from containers_setup import train
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ludus.agents.acer import ACER, ACERConfig, ACERVTraceConfig
from ludus.containers.loop import begin, collect, improve
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network
from ludus.core.spec import Spec
from ludus.core.types import Tensors
from ludus.settings.config_file import read_config, read_origins
from ludus.settings.settings import adapt_defaults, resolve_settings

NAME = "ludus.agents.acer:ACER"
TOY = "ludus.environments.toy:"
T, B, A = 6, 3, 4
KINDS = ["retrace", "vtrace"]
SMALL = {"agent__rollout": 8, "agent__warmup": 32, "agent__replay": 800}


class Table(Network):
    """Gives its parameters as outputs, whatever it sees: their gradients are those at a network's outputs."""

    def __init__(self, outputs: Tensors) -> None:
        super().__init__()
        self.table = nn.ParameterDict({name.replace("/", "_"): nn.Parameter(x) for name, x in outputs.items()})

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        return {name.replace("_", "/"): x for name, x in self.table.items()}, HiddenState()


def make_batch() -> Batch:
    """Random experience of another policy, float64, with a mask and with every way in which a trace can end."""
    torch.manual_seed(0)
    mask = torch.ones(T + 1, B, A, dtype=torch.bool)
    mask[:, 1, 3] = False
    terminated, truncated, first = (torch.zeros(T + i, B, dtype=torch.bool) for i in (0, 0, 1))
    terminated[1, 0] = truncated[2, 1] = True
    first[3, 0] = first[4, 1] = True  # the resets that follow; column 2 loses an episode without an ending
    first[2, 2] = True
    log_mu = torch.where(mask, 2 * torch.randn(T + 1, B, A, dtype=torch.float64), -1e9).log_softmax(-1)[:-1]
    action = torch.distributions.Categorical(logits=torch.where(mask[:-1], 0.0, -1e9)).sample()
    return Batch(
        observation={"x": torch.zeros(T + 1, B, 1), "action_mask": mask},
        first=first,
        action={"action": action},
        reward=torch.randn(T, B, dtype=torch.float64),
        terminated=terminated,
        truncated=truncated,
        discount=0.9 * (~terminated).double(),
        real=~first[1:],
        weight=torch.ones(T, B, dtype=torch.float64),
        experience={"log_policy": log_mu},
    )


def make_agent(config: ACERConfig) -> ACER:
    """A policy and values from tables, and an average policy of another table."""
    torch.manual_seed(1)
    values = {"q": torch.randn(T + 1, B, A)} if config.targets == "retrace" else {"value": torch.randn(T + 1, B, 1)}
    observation = {"x": Spec((1,), "float32"), "action_mask": Spec((A,), "int8", "binary")}
    action = {"action": Spec((), "int64", "categorical", sizes=(A,))}
    table = Table({"policy/action": 2 * torch.randn(T + 1, B, A)} | values)
    agent = ACER(observation, action, config, {"actor_critic": table}, B).double()
    if config.trust_region:
        average: Any = agent.average.networks["actor_critic"]
        average.table["policy_action"].add_(torch.randn(T + 1, B, A, dtype=torch.float64))
    return agent


def gradients(agent: ACER, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
    agent.zero_grad()
    losses, _ = agent.compute_loss(agent.prepare(batch))
    coefficients = agent.loss_coefficients()
    sum(coefficients.get(name, 1.0) * x for name, x in losses.items()).backward()  # type: ignore[union-attr]
    table: Any = agent.networks["actor_critic"]
    return {name: p.grad.numpy().copy() for name, p in table.table.items()}


def softmax(x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e = np.where(mask, np.exp(x - x.max(-1, keepdims=True)), 0.0)
    return e / e.sum(-1, keepdims=True)


class Reference:
    """The paper's equations, one transition after another, in float64."""

    def __init__(self, agent: ACER, batch: Batch) -> None:
        table: Any = agent.networks["actor_critic"]
        outputs = {name: p.detach().numpy() for name, p in table.table.items()}
        self.config, self.batch = agent.config, batch
        mask = batch.observation["action_mask"].numpy()
        self.p = softmax(outputs["policy_action"], mask)
        self.mu = np.exp(batch.experience["log_policy"].numpy())
        self.action, self.reward = batch.action["action"].numpy(), batch.reward.numpy()
        self.discount, self.real = batch.discount.numpy(), batch.real.numpy()
        self.ended = (batch.terminated | batch.truncated).numpy()
        self.values = outputs.get("q", outputs.get("value"))
        self.average = None
        if agent.config.trust_region:
            average: Any = agent.average.networks["actor_critic"]
            self.average = softmax(average.table["policy_action"].numpy(), mask)

    def passes(self, t: int, b: int) -> bool:
        """Whether what was learned of t+1 tells of t: the same episode, and t+1 a real transition of this rollout."""
        return t + 1 < T and bool(self.real[t, b] and self.real[t + 1, b] and not self.ended[t, b])

    def retrace(self, t: int, b: int) -> float:
        """Q^ret of a real transition."""
        v = (self.p[t + 1, b] * self.values[t + 1, b]).sum()
        later = 0.0
        if self.passes(t, b):
            a = self.action[t + 1, b]
            rho = min(1.0, self.p[t + 1, b, a] / self.mu[t + 1, b, a])
            later = self.config.trace_lambda * rho * (self.retrace(t + 1, b) - self.values[t + 1, b, a])
        return float(self.reward[t, b] + self.discount[t, b] * (v + later))

    def vtrace(self, t: int, b: int) -> float:
        """v_s of a real transition."""
        a, v, c = self.action[t, b], self.values[:, b, 0], self.config.importance_clip
        rho = self.p[t, b, a] / self.mu[t, b, a]
        total = v[t] + min(c, rho) * (self.reward[t, b] + self.discount[t, b] * v[t + 1] - v[t])
        if self.passes(t, b):
            trace = self.config.trace_lambda * min(1.0, rho)
            total += self.discount[t, b] * trace * (self.vtrace(t + 1, b) - v[t + 1])
        return float(total)

    def ascent(self, t: int, b: int) -> np.ndarray[Any, Any]:
        """The policy gradient in the logits, before the trust region: a sum over actions of weight · ∇log π."""
        p, mu, a, c = self.p[t, b], self.mu[t, b], self.action[t, b], self.config.importance_clip
        g = np.zeros(A)
        if self.config.targets == "vtrace":
            later = self.values[t + 1, b, 0]
            if self.passes(t, b):
                later += self.config.trace_lambda * (self.vtrace(t + 1, b) - later)
            advantage = self.reward[t, b] + self.discount[t, b] * later - self.values[t, b, 0]
            return min(c, p[a] / mu[a]) * advantage * (np.eye(A)[a] - p)
        q, v = self.values[t, b], (p * self.values[t, b]).sum()
        g += min(c, p[a] / mu[a]) * (self.retrace(t, b) - v) * (np.eye(A)[a] - p)
        for other in np.flatnonzero(p):
            beyond = max(0.0, 1 - c / (p[other] / mu[other]))
            g += beyond * p[other] * (q[other] - v) * (np.eye(A)[other] - p)
        return g

    def overshoot(self, t: int, b: int) -> float:
        """How much faster than δ the KL from the average would grow."""
        assert self.average is not None
        return float((self.p[t, b] - self.average[t, b]) @ self.ascent(t, b) - self.config.trust_region)

    def gradients(self) -> dict[str, np.ndarray[Any, Any]]:
        """Those of the loss, in logits and values."""
        count, config = self.real.sum(), self.config
        policy, value = np.zeros((T + 1, B, A)), np.zeros_like(self.values)
        for t, b in zip(*np.nonzero(self.real), strict=True):
            p, z = self.p[t, b], self.ascent(t, b)
            if self.average is not None and (over := self.overshoot(t, b)) > 0:
                k = p - self.average[t, b]
                z -= over / (k @ k) * k
            log_p = np.log(np.where(p > 0, p, 1.0))
            policy[t, b] = (-z + config.entropy_coef * p * (log_p - (p * log_p).sum())) / count
            retrace = config.targets == "retrace"
            at = self.action[t, b] if retrace else 0
            target = self.retrace(t, b) if retrace else self.vtrace(t, b)
            value[t, b, at] = config.value_coef * 2 * (self.values[t, b, at] - target) / count
        return {"policy_action": policy, "q" if config.targets == "retrace" else "value": value}


@pytest.mark.parametrize("trust_region", [0.0, 0.3, 1e9])
@pytest.mark.parametrize("targets", KINDS)
def test_the_gradient_is_that_of_the_equations(targets: Any, trust_region: float) -> None:
    config = ACERConfig(
        targets=targets, trust_region=trust_region, trace_lambda=0.8, importance_clip=1.5, entropy_coef=0.1
    )
    agent, batch = make_agent(config), make_batch()
    expected = Reference(agent, batch).gradients()
    found = gradients(agent, batch)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("targets", KINDS)
def test_the_trust_region_changes_what_it_must_and_nothing_else(targets: Any) -> None:
    """Row by row: the gradient differs from that without a bound where the bound is passed, and only there."""
    config = ACERConfig(targets=targets, trust_region=0.2)
    agent, batch = make_agent(config), make_batch()
    reference = Reference(agent, batch)
    bound = np.array([[reference.real[t, b] and reference.overshoot(t, b) > 0 for b in range(B)] for t in range(T)])
    assert bound.any()
    assert not bound[reference.real].all()
    free = gradients(make_agent(replace(config, trust_region=0.0)), batch)["policy_action"][:-1]
    held = gradients(agent, batch)["policy_action"][:-1]
    differs = np.abs(held - free).max(-1) > 1e-12
    assert (differs == bound).all()
    _, metrics = agent.compute_loss(agent.prepare(batch))
    assert float(metrics["held_back"]) == pytest.approx(bound.sum() / reference.real.sum())


def test_a_policy_that_is_its_own_average_is_free() -> None:
    """The KL has no slope there, so that not even the narrowest bound holds it back."""
    narrow = make_agent(ACERConfig(trust_region=1e-6))
    narrow.average.update(1.0)
    free = make_agent(ACERConfig(trust_region=0.0))
    one, other = (gradients(agent, make_batch())["policy_action"] for agent in (narrow, free))
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("targets", KINDS)
def test_rows_that_never_were_do_not_teach(targets: Any) -> None:
    agent, batch = make_agent(ACERConfig(targets=targets)), make_batch()
    before = gradients(agent, batch)
    dead = ~batch.real
    batch.reward[dead] = 1e3
    batch.experience["log_policy"][dead] = -3.0
    after = gradients(agent, batch)
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x)


@pytest.mark.parametrize("targets", KINDS)
def test_the_loss_can_be_traced(targets: Any) -> None:
    """The compiled update needs a loss that is a function of tensors alone."""
    agent, batch = make_agent(ACERConfig(targets=targets)), make_batch()
    prepared = agent.prepare(batch)

    def loss(reward: Tensor, log_policy: Tensor) -> Tensor:
        given = replace(prepared, reward=reward, experience=prepared.experience | {"log_policy": log_policy})
        return torch.stack(list(agent.compute_loss(given)[0].values()))

    traced = make_fx(loss)(torch.zeros_like(batch.reward), torch.zeros_like(batch.experience["log_policy"]))
    inputs = batch.reward, batch.experience["log_policy"]
    torch.testing.assert_close(traced(*inputs), loss(*inputs))


ENVIRONMENTS = {"discrete": "CartPole-v1", "memory": TOY + "MemoryEnv", "masked": TOY + "MaskedEnv"}
NETWORKS: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared": {"network__shared": "yes"},
    "lstm": {"network__body": "lstm"},
    "shared lstm": {"network__body": "lstm", "network__shared": "yes"},
    "normalized": {"agent__normalize_observation": True, "agent__normalize_reward": True},
}


@pytest.mark.parametrize("targets", KINDS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_what_acting_saw_is_what_learning_replays(kind: str, network: str, targets: str) -> None:
    """Ratios are 1 for fresh rollouts, and for kept ones too as long as the policy did not change."""
    worker = make_worker(ENVIRONMENTS[kind], NAME, agent__targets=targets, **SMALL, **NETWORKS[network])
    try:
        begin(worker, 3)
        for _ in range(2):  # two rollouts without learning: then whatever is replayed is on-policy
            collect(worker)
            while worker.cache.ready():
                assert_ratio_one(worker.agent, worker.cache.read())
        for _ in range(3):
            collect(worker)
            fresh = worker.cache.read()
            assert_ratio_one(worker.agent, fresh)
            assert_remembered(worker.agent, fresh)
            worker.agent.learn(fresh, worker.updater)
            metrics, _ = improve(worker)
            assert all(torch.isfinite(x) for x in metrics.values())
        worker.evaluator.run(worker.agent, worker.device)
    finally:
        worker.close()


def assert_ratio_one(agent: Any, batch: Batch) -> None:
    with torch.no_grad():
        outputs, _ = agent.outputs(batch.observation, batch.state, batch.first)
        log_p = agent.policy.distribution(outputs, {}, batch.observation)["policy/action"].log_softmax(-1)
    allowed = batch.experience["log_policy"] > -1e8
    ratio = (log_p[:-1] - batch.experience["log_policy"]).exp()[allowed]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


def assert_remembered(agent: Any, batch: Batch) -> None:
    """Every network with a memory has seen every step, the critic too, though it does not choose."""
    seen = {name: x[:-1] for name, x in batch.observation.items()}
    with torch.no_grad():
        _, state = agent.outputs(seen, batch.state, batch.first[:-1])
    torch.testing.assert_close(state, batch.last_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("trust_region", [0.0, 0.1])
def test_losses_of_any_policy_are_those_of_logits(trust_region: float) -> None:
    """Gradients by the parameters of distributions are computed where they have no closed form here."""
    agent, batch = make_agent(ACERVTraceConfig(trust_region=trust_region)), make_batch()
    taken = batch.experience["log_policy"].gather(-1, batch.action["action"].unsqueeze(-1)).squeeze(-1)
    expected, (_, metrics) = gradients(agent, batch), agent.compute_loss(agent.prepare(batch))
    agent._one_discrete = False
    batch = replace(batch, experience={"log_prob": taken})
    found, (_, others) = gradients(agent, batch), agent.compute_loss(agent.prepare(batch))
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-12)
    torch.testing.assert_close(others, metrics)
    assert not trust_region or 0 < float(metrics["held_back"]) < 1


def test_the_average_follows_by_its_decay() -> None:
    worker = make_worker("CartPole-v1", NAME, agent__average_decay=0.75, **SMALL)
    begin(worker, 0)
    collect(worker)
    own: Any = worker.agent.average.networks["actor"]  # type: ignore[union-attr]
    before = [p.clone() for p in own.parameters()]
    worker.agent.learn(worker.cache.read(), worker.updater)
    online: Any = worker.agent.networks["actor"]  # type: ignore[index]
    for old, new, p in zip(before, own.parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * p)
    worker.close()


def test_normalizers_take_each_step_once() -> None:
    worker = make_worker("CartPole-v1", NAME, agent__normalize_observation=True, agent__replay_ratio=8.0, **SMALL)
    worker.run(200)
    (statistics,) = worker.agent.normalizer.statistics.values()  # type: ignore[union-attr]
    assert float(statistics.count) == worker.local_step_count
    assert worker.updates > 2 * worker.local_step_count / (4 * 8)
    worker.close()


@pytest.mark.parametrize("network", ["separate", "lstm", "normalized"])
def test_a_resume_goes_on_to_the_bit(network: str) -> None:
    workers = [make_worker("CartPole-v1", NAME, **SMALL, **NETWORKS[network]) for _ in range(2)]
    workers[0].run(200)
    state = copy(workers[0].state_dict())
    workers[1].load_state_dict(state)
    for worker in workers:
        worker.run(400, worker.local_step_count)
    assert workers[0].updates == workers[1].updates
    torch.testing.assert_close(workers[0].agent.state_dict(), workers[1].agent.state_dict(), rtol=0, atol=0)
    for worker in workers:
        worker.close()


def copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: copy(x) for k, x in value.items()}
    return [copy(x) for x in value] if isinstance(value, list) else value


def test_the_named_combination_differs_by_its_targets() -> None:
    config = ACERVTraceConfig()
    assert config == replace(config, targets="vtrace", importance_clip=1.0)
    needs = ACER.requirements(
        {"x": Spec((2,), "float32")}, {"action": Spec((), "int64", "categorical", sizes=(A,))}, config, shared=True
    )
    assert needs["actor_critic"].outputs == {"policy/action": (A,), "value": (1,)}


@pytest.mark.parametrize("environment", ["Pendulum-v1", TOY + "MixedActionEnv"])
def test_other_actions_than_one_discrete_are_learned_by_vtrace(environment: str, tmp_path: Path) -> None:
    result = train(tmp_path, environment, "acer", nb_step=200, **SMALL)
    config, origins = read_config(result.run / "config.toml"), read_origins(result.run / "config.toml")
    chosen = {f"agent.{key}": getattr(ACERVTraceConfig(), key) for key in ("targets", "importance_clip")}
    assert {key: config[key] for key in chosen} == chosen
    assert {origins[key] for key in chosen} == {"default for this run"}
    with pytest.raises(UserError, match=r"agent.targets is retrace, which needs one Discrete .* set it to vtrace"):
        train(tmp_path, environment, "acer", **SMALL, agent__targets="retrace")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gamma", 1.5, "agent.gamma is 1.5"),
        ("rollout", 0, "agent.rollout is 0"),
        ("replay_ratio", -1.0, "agent.replay_ratio is -1"),
        ("importance_clip", 0.0, "agent.importance_clip is 0"),
        ("trace_lambda", 2.0, "agent.trace_lambda is 2"),
        ("average_decay", 1.0, "agent.average_decay is 1"),
        ("replay", 63, r"agent.replay is 63, less than one rollout of 64 transitions"),
    ],
)
def test_values_that_cannot_train_are_refused_by_name(key: str, value: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_worker("CartPole-v1", NAME, **SMALL | {"agent__rollout": 16, f"agent__{key}": value})


@pytest.mark.parametrize("given", [{}, {"agent.targets": "vtrace"}])
def test_the_clip_of_vtrace_is_1_whether_it_is_asked_for_or_not(given: dict[str, Any]) -> None:
    resolved = resolve_settings("Pendulum-v1", "acer", "none", None, given)
    agent = adapt_defaults(resolved, one_discrete=False).settings.agent
    assert (agent.targets, agent.importance_clip) == ("vtrace", 1.0)
