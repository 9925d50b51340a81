"""Noise on the parameters of agents' acting networks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import team_worlds
import torch
from agents_setup import make_worker

from ludus.agents.parameter_noise import adapt_to_distance
from ludus.containers.loop import begin, collect, improve
from ludus.core.errors import UserError
from ludus.exploration.parameter_noise import epsilon_kl, softmax_kl

TARGET = "ludus.environments.toy:TargetEnv"
REPLAY = {"agent__warmup": 32, "agent__batch_size": 16, "agent__replay": 500, "agent__updates_per_step": 1.0}
SEQUENCES = {"network__q__body": "gru", "agent__sequence": 4, "agent__burn_in": 2, "agent__overlap": 2}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {}),
    "ppo, shared lstm": ("CartPole-v1", {"network__shared": "yes", "network__body": "lstm"}),
    "appo": (TARGET, {"agent__rollout": 16}),
    "vtrace": ("CartPole-v1", {}),
    "trpo": (TARGET, {"agent__minibatches": 2}),
    "acer": ("CartPole-v1", {"agent__rollout": 16, "agent__warmup": 32}),
    "acer_vtrace": (TARGET, {"agent__rollout": 16, "agent__warmup": 32}),
    "pqn": ("CartPole-v1", {}),
    "dqn": ("CartPole-v1", REPLAY),
    "iqn": ("CartPole-v1", REPLAY | {"agent__dueling": True}),
    "r2d2": ("CartPole-v1", REPLAY | {"agent__sequence": 8, "agent__burn_in": 2, "agent__overlap": 4}),
    "sac": (TARGET, REPLAY),
    "discrete_sac": ("CartPole-v1", REPLAY),
    "vdn": ("team_worlds:Chooser", {}),
    "qmix, gru": ("team_worlds:Chooser", SEQUENCES | {"env__global_state": True}),
    "maddpg": ("team_worlds:Mixed", {"agent__updates_per_step": 1.0}),
    "maddpg, policies": ("team_worlds:Speech", {"agent__updates_per_step": 1.0, "agent__policies": 2}),
}


def make(case: str, **changes: Any) -> Any:
    (environment, own), agent = AGENTS[case], case.partition(",")[0]
    given = {"agent__parameter_noise": 0.1} | own | changes
    module, _, world = environment.partition(":")
    return (
        team_worlds.make_worker(world, agent, **given)
        if module == "team_worlds"
        else make_worker(environment, agent, **given)
    )


def parameters(module: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("case", AGENTS)
def test_a_perturbed_network_acts_and_its_noise_adapts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.agents.parameter_noise.ADAPT_EVERY", 5)
    worker = make(case, agent__epochs=1) if case.startswith(("ppo", "appo", "pqn")) else make(case)
    agent, noise = worker.agent, worker.agent.parameter_noise
    assert not agent.use_numpy()
    learned = {name for name, p in agent.named_parameters() if p.requires_grad}
    assert not any(name.startswith("parameter_noise") for name in learned)
    if case != "pqn":  # which has no workers
        assert not any(name.startswith("parameter_noise.perturbed") for name in agent.acting_state())
    assert "parameter_noise.sigma" in agent.acting_state()
    begin(worker, 0)
    before, seen = float(noise.sigma), set()
    (network,) = noise._module
    for _ in range(60 if worker.settings.agent.plan(4).rollout == 0 else 3):
        agent.schedule(0.5)
        collect(worker)
        improve(worker)
        seen.add(float(noise.sigma))
    acting = parameters(noise.perturbed)
    assert not same(acting, parameters(network))
    assert len(seen) > 1
    for sigma in seen:  # by a factor at a time
        steps = math.log(sigma / before) / math.log(noise.rate)
        assert steps == pytest.approx(round(steps), abs=1e-6)
    assert agent.schedule(0.5)["parameter_noise_sigma"] == float(noise.sigma)
    # without noise nothing is drawn, and an evaluation is by the network itself, also where it samples actions
    step, state, numbers = worker.seat.env_step, worker.seat.hidden_state, worker.seat.noise.next()
    step, ran = step._replace(first=torch.ones_like(step.first)), []
    noise.perturbed.register_forward_hook(lambda *_: ran.append(1))
    agent.act(step, state, None)
    agent.training = False
    sampled = agent.act(step, state, numbers).action
    assert same(acting, parameters(noise.perturbed))
    assert not ran
    agent.training = True
    agent.act(step, state, numbers)
    assert not same(acting, parameters(noise.perturbed))
    assert ran
    agent.parameter_noise = None
    assert same([*sampled.values()], [*agent.act(step, state, numbers).action.values()])
    worker.close()


@pytest.mark.parametrize("case", ["pqn", "r2d2", "sac", "discrete_sac", "qmix, gru"])
def test_padding_does_not_count_for_the_distance(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = AGENTS["r2d2"][1] | {"network__body": "lstm"}
    worker = make(case, **({} if case.startswith(("pqn", "qmix")) else sequences))
    agent, noise = worker.agent, worker.agent.parameter_noise
    begin(worker, 0)
    while not worker.cache.ready():
        collect(worker)
    batch = worker.cache.read()
    batch = batch.without_last_observation() if case == "pqn" else agent.prepare(batch)
    time = len(batch.real) - 1
    batch.real[time:, 0] = False
    found: list[float] = []
    monkeypatch.setattr(noise, "adapt", lambda distance: found.append(float(distance)))
    for _ in range(2):
        agent.generator.manual_seed(0)
        if case == "pqn":
            agent._adapt(noise, batch, worker.updater)
        else:
            adapt_to_distance(agent, batch, worker.updater)
        for x in filter(torch.is_floating_point, batch.observation.values()):
            x[time:, 0] += 5
    assert found[0] == found[1] > 0
    worker.close()


def test_the_log_probability_is_that_of_the_policy_that_acted() -> None:
    """So that PPO's ratio corrects for the noise; the value stays that of the network itself."""
    worker = make("ppo, shared lstm", network__body="auto")
    agent = worker.agent
    begin(worker, 0)
    collect(worker)
    batch = worker.cache.read()
    seen = {name: x[:-1] for name, x in batch.observation.items()}
    own = agent.outputs(seen, batch.state, batch.first[:-1])[0]
    plain = agent.policy.evaluate(own, batch.action, seen)["log_prob"]
    torch.testing.assert_close(batch.experience["value"], own["value"].squeeze(-1))
    assert not torch.allclose(batch.experience["log_prob"], plain, atol=1e-4)
    ready = agent.preprocess(seen) if agent.normalizer is None else agent.normalizer(agent.preprocess(seen))
    perturbed = agent.parameter_noise.perturbed(ready, batch.state, batch.first[:-1])[0]
    same_policy = agent.policy.evaluate(perturbed, batch.action, seen)["log_prob"]
    drawn_last = batch.first[:-1, 0].nonzero()[-1, 0]  # row 0 draws a new perturbation where it begins an episode
    torch.testing.assert_close(batch.experience["log_prob"][drawn_last:], same_policy[drawn_last:], atol=1e-5, rtol=0)
    worker.close()


def test_distances_are_those_of_the_paper() -> None:
    """Plappert et al. 2018, appendix C: KL of softmax policies; ε-greedy is −log(1 − ε + ε/|A|) from greedy."""
    generator = np.random.default_rng(0)
    q, other = generator.normal(size=(2, 5, 4))
    p, r = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (q, other))
    expected = (p * np.log(p / r)).sum(-1).mean()
    found = softmax_kl(torch.tensor(q), torch.tensor(other), torch.ones(5, dtype=torch.bool))
    assert float(found) == pytest.approx(expected, rel=1e-12)
    greedy, exploring = np.array([1.0, 0, 0, 0]), np.array([1 - 0.2 + 0.05, 0.05, 0.05, 0.05])
    assert epsilon_kl(0.2, 4) == pytest.approx(float((greedy[:1] * np.log(greedy[:1] / exploring[:1])).sum()))


@pytest.mark.parametrize("case", ["vdn", "maddpg"])
def test_the_distance_of_a_team_is_that_of_the_agents_in_the_world(case: str) -> None:
    """By hand: KL of choices over allowed ones, and for MADDPG relative to the level, as is the RMS of numbers."""
    worker = make(case, agent__batch_size=64, agent__warmup=100)
    agent, generator = worker.agent, np.random.default_rng(0)
    begin(worker, 0)
    batch = agent.prepare(team_worlds.batch_of(worker))
    sizes, names = {"masked": 4, "leaver": 2, "mover": 3}, agent.joint.agents
    plain, other = generator.normal(size=(2, *batch.reward.shape, len(names), 4))
    found: dict[str, list[float]] = {name: [] for name in names}
    for row in range(batch.reward.shape[1]):
        for i, name in enumerate(names):
            if int(batch.observation[f"status/{name}"][0, row]):
                continue  # it has left
            a, b = (x[0, row, i, : sizes[name]] for x in (plain, other))
            if name == "mover":
                found[name].append(np.mean((np.tanh(a) - np.tanh(b)) ** 2))
                continue
            kept = batch.observation["action_mask/masked"][0, row].bool().numpy() if name == "masked" else slice(None)
            p, q = (np.exp(x[kept]) / np.exp(x[kept]).sum() for x in (a, b))
            found[name].append(float((p * np.log(p / q)).sum()))
    assert 0 < len(found["leaver"]) < len(found["masked"])
    if case == "vdn":
        expected = np.mean(found["masked"] + found["leaver"])
        agent.schedule(0.5)
        assert agent.parameter_noise.target == pytest.approx(-np.log([0.9 + 0.1 / 4, 0.9 + 0.1 / 2]).mean())
    else:
        ratios = [np.mean(found[name]) / -np.log(0.9 + 0.1 / sizes[name]) for name in ("masked", "leaver")]
        expected = np.mean([*ratios, np.sqrt(np.mean(found["mover"])) / 0.1])
        assert agent.parameter_noise.target == 1
    key = "q" if case == "vdn" else "policy"
    given = [{key: torch.tensor(x)} for x in (plain, other)]
    assert float(agent.perturbed_distance(batch, *given)) == pytest.approx(expected, rel=1e-6)
    worker.close()


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UserError, match=r"agent\.noisy and agent\.parameter_noise both perturb"):
        make_worker("CartPole-v1", "rainbow", agent__parameter_noise=0.1)
    with pytest.raises(UserError, match=r"agent\.target_kl is 0\.01, but with agent\.parameter_noise"):
        make_worker("CartPole-v1", "ppo", agent__parameter_noise=0.1, agent__target_kl=0.01)
    with pytest.raises(UserError, match=r"agent\.noise is parameter, which maddpg has as agent\.parameter_noise"):
        team_worlds.make_worker("Meeting", "maddpg", agent__noise="parameter")
    # their gradients hold for the actions of their own policy
    for agent in ("a2c", "a3c", "reinforce", "ars"):
        with pytest.raises(UserError, match=rf"{agent} has no such setting; .*ppo.* have it"):
            make_worker("CartPole-v1", agent, agent__parameter_noise=0.1)


def test_pqn_goes_on_from_the_hidden_state_of_the_network_itself() -> None:
    worker = make("pqn", network__body="lstm", agent__minibatches=1)
    agent = worker.agent
    agent.parameter_noise.sigma.fill_(1.0)
    begin(worker, 0)
    collect(worker)
    batch = worker.cache.read()
    with torch.no_grad():
        _, after = agent.q({name: x[:-1] for name, x in batch.observation.items()}, batch.state, batch.first[:-1])
    for name, x in after.items():
        torch.testing.assert_close(x, batch.last_state[name], rtol=1e-4, atol=1e-5)
    worker.close()
