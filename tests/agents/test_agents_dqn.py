"""DQN and its kin: the same loss and gradient as Stable-Baselines3, and each addition does what its paper says."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from agents_setup import make_worker
from stable_baselines3 import DQN as Theirs
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.errors import UserError

TOY = "ludus.environments.toy:"
FAMILY = ("dqn", "double_dqn", "dueling_dqn", "c51", "qr_dqn", "iqn", "munchausen_dqn", "rainbow")
QUICK: dict[str, Any] = {"agent__replay": 500, "agent__warmup": 40, "agent__batch_size": 16}
SEQUENCES = {"agent__sequence": 6, "agent__burn_in": 3, "agent__overlap": 3}
LSTM: dict[str, Any] = {"network__body": "lstm"} | QUICK | SEQUENCES


def worker_of(environment: str = "CartPole-v1", agent: str = "dqn", **changes: Any) -> Any:
    defaults = {} if agent == "r2d2" else QUICK
    worker = make_worker(environment, agent, **defaults | changes)
    begin(worker, 0)
    return worker


def batch_of(worker: Any) -> Batch:
    while not worker.cache.ready():
        collect(worker)
    batch: Batch = worker.cache.read()
    return batch


def spread(module: nn.Module, seed: int = 0) -> None:
    """Give parameters values of their own, so that a target differs from its network."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))


def test_loss_and_gradient_are_those_of_stable_baselines3() -> None:
    worker = worker_of(network__hidden=(16, 8), network__activation="relu")
    agent, batch = worker.agent, batch_of(worker)
    spread(agent.networks, 1)
    spread(agent.target, 2)
    theirs = Theirs(
        "MlpPolicy",
        gymnasium.make("CartPole-v1"),
        gamma=0.99,
        max_grad_norm=1e9,
        target_update_interval=10**9,
        policy_kwargs={"net_arch": [16, 8]},
        device="cpu",
    )
    for own, other in ((agent.networks["q"], theirs.q_net), (agent.target.networks["q"], theirs.q_net_target)):
        for p, q in zip(own.parameters(), other.parameters(), strict=True):
            q.data.copy_(p.data)
    observation = batch.observation["observation"]
    samples = ReplayBufferSamples(
        observation[0], batch.action["action"].T, observation[1], batch.terminated.float().T, batch.reward.T
    )
    theirs.replay_buffer.sample = lambda *_, **__: samples
    theirs.policy.optimizer.step = lambda: None
    theirs._setup_learn(1)
    theirs.train(1, 16)
    losses, _ = agent.compute_loss(agent.with_shares(batch))
    gradients = torch.autograd.grad(losses["value"], list(agent.networks.parameters()))
    assert float(losses["value"].detach()) == pytest.approx(theirs.logger.name_to_value["train/loss"], rel=1e-5)
    for mine, p in zip(gradients, theirs.q_net.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-5, atol=1e-6)
    worker.close()


def implicit_quantiles(head: nn.Module, features: np.ndarray, taus: np.ndarray, dueling: bool) -> np.ndarray:
    """IQN's head in float64: the quantiles ``[M, n, A]`` of all choices at the levels ``taus`` ``[M, n]``."""
    weights = {name: x.double().numpy() for name, x in head.state_dict().items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def stream(name: str) -> np.ndarray:
        return linear(linear(x, f"{name}.hidden").clip(0), f"{name}.last")

    cosines = np.cos(np.pi * np.arange(64) * taus[..., None])
    x = features.clip(0)[:, None] * linear(cosines, "embedding").clip(0)
    choices = stream("choices")
    return choices - choices.mean(-1, keepdims=True) + stream("value") if dueling else choices


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_iqn_chooses_and_values_with_the_head_of_the_same_network(double: bool, dueling: bool) -> None:
    """Against float64: without double, trunk and head of the target choose; with it, those of the network."""
    worker = worker_of(agent="iqn", agent__double=double, agent__dueling=dueling)
    agent, batch = worker.agent, batch_of(worker)
    for module, seed in ((agent.networks, 1), (agent.head, 2), (agent.target, 3)):
        spread(module, seed)
    taus = torch.rand(3, 1, 16, 8, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, experience=dict(zip(("taus", "selection_taus", "target_taus"), taus, strict=True)))
    observation = batch.observation["observation"].double()
    trunks = deepcopy(agent.networks["q"]).double(), deepcopy(agent.target.networks["q"]).double()
    online, target = (
        [trunk({"observation": x[None]}, {}, batch.first[:1])[0]["features"][0].detach().numpy() for x in observation]
        for trunk in trunks
    )
    levels = taus[:, 0].double().numpy()
    heads, rows = (agent.head, agent.target.networks["head"]), np.arange(16)
    chooser, seen = (heads[0], online[1]) if double else (heads[1], target[1])
    chosen = implicit_quantiles(chooser, seen, levels[1], dueling).mean(1).argmax(-1)
    after = implicit_quantiles(heads[1], target[1], levels[2], dueling)[rows, :, chosen]
    aim = batch.reward[0].numpy()[:, None] + batch.discount[0].numpy()[:, None] * after
    found = implicit_quantiles(heads[0], online[0], levels[0], dueling)[rows, :, batch.action["action"][0].numpy()]
    error = aim[:, None, :] - found[:, :, None]  # [M, n, n']
    huber = np.where(abs(error) <= 1, error**2 / 2, abs(error) - 0.5)
    expected = (abs(levels[0][:, :, None] - (error < 0)) * huber).mean(2).sum(1).mean()
    losses, _ = agent.compute_loss(agent.with_shares(batch))
    assert float(losses["value"].detach()) == pytest.approx(expected, rel=1e-5)
    worker.close()


@pytest.mark.parametrize("environment", ["CartPole-v1", TOY + "MaskedEnv"])
@pytest.mark.parametrize("agent", FAMILY)
def test_a_few_updates_move_the_network_and_the_target_follows(agent: str, environment: str) -> None:
    worker = worker_of(environment, agent, agent__target_every=2)
    network, target = worker.agent.networks["q"], worker.agent.target.networks["q"]
    start = [p.clone() for p in network.parameters()]
    for update in range(4):
        learned = worker.agent.learn(batch_of(worker), worker.updater)
        assert all(torch.isfinite(x).all() for x in learned.metrics.values())
        assert (learned.priority is not None) == worker.agent.config.prioritized
        same = all(torch.equal(p, q) for p, q in zip(network.parameters(), target.parameters(), strict=True))
        assert same == bool(update % 2)
    assert not any(torch.equal(p, q) for p, q in zip(start, network.parameters(), strict=True))
    worker.close()


@pytest.mark.parametrize("agent", FAMILY)
def test_padding_teaches_nothing(agent: str) -> None:
    worker = worker_of(agent=agent)
    batch = batch_of(worker)
    if worker.agent.head.needs_taus:
        taus = torch.rand(3, 1, 16, 8)
        batch = replace(batch, experience=dict(zip(("taus", "selection_taus", "target_taus"), taus, strict=True)))
    nothing = worker.agent.compute_loss(worker.agent.with_shares(replace(batch, real=torch.zeros_like(batch.real))))[0]
    assert float(nothing["value"].detach()) == 0
    worker.close()


@pytest.mark.parametrize("agent", ["dqn", "rainbow", "iqn"])
def test_forbidden_choices_are_never_taken(agent: str) -> None:
    worker = worker_of(TOY + "MaskedEnv", agent)  # it raises where a forbidden action comes
    for noise in (worker.seat.noise.next(), None):
        for _ in range(20):
            said = worker.agent.act(worker.seat.env_step, worker.seat.hidden_state, noise)
            mask = worker.seat.env_step.observation["action_mask"].bool()
            assert mask.gather(1, said.action["action"].unsqueeze(1)).all()
            worker.seat.env_step = worker.manager.step(said.action)
    worker.close()


def test_r2d2_learns_from_sequences_and_sees_what_acting_saw() -> None:
    worker = worker_of(TOY + "NoVelocityCartPole", "r2d2", **LSTM)
    agent = worker.agent
    batch = batch_of(worker)
    assert batch.reward.shape == (9, 16)
    learned = agent.learn(batch, worker.updater)
    assert learned.priority.shape == (16,)  # type: ignore[union-attr]
    worker.close()


def test_a_burn_in_gives_the_state_that_acting_had() -> None:
    """As long as no update has moved the network, running the burn-in from the stored state is what acting did."""
    worker = worker_of("CartPole-v1", "r2d2", **LSTM, agent__updates_per_step=1e-3)
    agent = worker.agent
    states = {}
    for time in range(60):
        states[time] = worker.seat.hidden_state
        said = agent.act(worker.seat.env_step, worker.seat.hidden_state, worker.seat.noise.next())
        worker.cache.agent_write(said)
        worker.seat.env_step, worker.seat.hidden_state = worker.manager.step(said.action), said.state
        worker.cache.env_write(worker.seat.env_step, said.state)
    batch = worker.cache.read()
    warm = agent.burn_in_state(batch, "q")
    time, row = (batch.index // 4).tolist(), (batch.index % 4).tolist()
    for column, (at, of) in enumerate(zip(time, row, strict=True)):
        for name, x in warm.items():
            torch.testing.assert_close(x[column], states[at + 3][name][of], rtol=1e-4, atol=1e-6)
    worker.close()


def test_acting_in_numpy_is_acting_in_torch() -> None:
    worker = worker_of()
    agent = worker.agent
    assert agent.use_numpy()
    engine = agent._numpy
    for noise in (None, *(worker.seat.noise.next() for _ in range(50))):
        agent.epsilon.value = 0.3
        agent._numpy = engine
        one = agent.act(worker.seat.env_step, worker.seat.hidden_state, noise).action["action"]
        agent._numpy = None
        assert torch.equal(one, agent.act(worker.seat.env_step, worker.seat.hidden_state, noise).action["action"])
    worker.close()


def test_noisy_layers_explore_in_training_and_not_in_evaluation() -> None:
    worker = worker_of(agent="rainbow")
    agent = worker.agent
    step, state = worker.seat.env_step, worker.seat.hidden_state
    with torch.no_grad():
        ready = agent.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()})

    def values(noise: Any) -> torch.Tensor:
        agent.act(step, state, noise)
        if noise is None:
            return agent.act(step, state, None).action["action"]
        return agent.run("q", ready, state, step.first.unsqueeze(0))[0]["advantage"].detach()

    one, other = values(worker.seat.noise.next()), values(worker.seat.noise.next())
    assert not torch.equal(one, other)
    assert torch.equal(values(None), values(None))
    assert agent.epsilon.value == 0
    worker.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agent__n_step": 0}, "agent.n_step is 0"),
        ({"agent__batch_size": 1000}, "agent.batch_size is 1000, more than agent.replay, 500"),
        ({"agent__sequence": 5, "agent__burn_in": 6}, "agent.burn_in is 6, longer than agent.sequence, 5"),
        ({"network__body": "lstm"}, "set agent.sequence"),
        ({"agent__values": "categorical", "agent__v_min": 3.0, "agent__v_max": 3.0}, "agent.v_min is 3"),
        ({"agent__values": "quantile", "agent__munchausen": 0.9}, "agent.munchausen works on expected values"),
        ({"agent__replay": 10**13, "agent__warmup": 10}, "GB"),
        ({"environment": "Pendulum-v1"}, "takes one Discrete action"),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, Any], words: str) -> None:
    given = dict(changes)
    with pytest.raises(UserError) as error:
        worker_of(given.pop("environment", "CartPole-v1"), **given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
