"""SAC: the same numbers as Stable-Baselines3, what it draws and stores, what may not be; the same for one choice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from actor_setup import (
    POINT,
    TOY,
    Peer,
    assert_same,
    copy_layers,
    layers_of,
    make_worker,
    random_batch,
    scalars,
)

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import EnvStep


def standard_normal(rows: int, size: int) -> torch.Tensor:
    """As torch.distributions draws it."""
    return torch.normal(torch.zeros(rows, size), torch.ones(rows, size))


@pytest.mark.parametrize("learned", [True, False])
def test_updates_equal_those_of_stable_baselines3(learned: bool) -> None:
    """Three updates with copied weights and the same random numbers: losses, gradients, weights, targets."""
    from stable_baselines3 import SAC

    peer = Peer(SAC, ent_coef="auto_0.3" if learned else 0.3)
    peer.model.actor.action_dist.epsilon = 0.0  # it adds 1e-6 inside a logarithm, where ours is exact
    worker = make_worker(POINT, "sac", agent__alpha=0.3, agent__learn_alpha=learned)
    agent: Any = worker.agent
    for name in ("actor", "critic"):
        copy_layers(layers_of(agent.networks[name]), peer.layers(name == "critic"))
    agent.target.update(1.0)
    (observed,) = agent.observation
    for update in range(3):
        batch = random_batch(observed, 16, seed=update)
        squashed = batch.action["action"][0]
        torch.manual_seed(update)
        drawn = [standard_normal(16, 3).unsqueeze(0) for _ in range(2)]
        agent.draw = lambda batch, *shape, drawn=drawn: drawn.pop(0)
        ours = agent.learn(replace(batch, action={"action": squashed.atanh().unsqueeze(0)}), worker.updater).metrics
        torch.manual_seed(update)
        theirs = peer.learn(batch, squashed)
        names = {"loss/critic": "critic_loss", "loss/actor": "actor_loss", "alpha": "ent_coef"}
        names |= {"loss/alpha": "ent_coef_loss"} if learned else {}
        for name, other in names.items():
            assert float(ours[name]) == pytest.approx(theirs[other], rel=1e-5, abs=1e-5), name
        for name in ("actor", "critic"):
            assert_same(layers_of(agent.networks[name], "grad"), peer.layers(name == "critic", "grad"))
            assert_same(layers_of(agent.networks[name]), peer.layers(name == "critic"))
        assert_same(layers_of(agent.target.networks["critic"]), peer.layers(True, target=True))
    worker.close()


def env_step(agent: Any, rows: int = 4) -> EnvStep:
    g = torch.Generator().manual_seed(0)
    observation = {name: torch.randn(rows, *spec.shape, generator=g) for name, spec in agent.observation.items()}
    return EnvStep(observation, torch.zeros(rows), *[torch.zeros(rows, dtype=torch.bool)] * 4)


def test_random_at_first_then_samples_and_greedy_without_noise() -> None:
    """Actions are stored before tanh; the first ones fill the box evenly."""
    agent: Any = make_worker(POINT, "sac").agent
    source = agent.make_noise(Rows.all(500), torch.Generator().manual_seed(0))
    step, state = env_step(agent, 500), HiddenState()
    played = torch.stack([agent.act(step, state, source.next()).action["action"].tanh() for _ in range(20)])
    assert played.abs().max() < 1
    assert abs(float(played.mean())) < 4 * (1 / 3 / played.numel()) ** 0.5
    assert abs(float(played.square().mean()) - 1 / 3) < 4 * (4 / 45 / played.numel()) ** 0.5
    agent.updates = 1
    mean, log_std, _ = agent.policy(
        agent.preprocess({k: x[None] for k, x in step.observation.items()}), state, step.first[None]
    )
    noise = source.next()
    sampled = agent.act(step, state, noise).action["action"]
    torch.testing.assert_close(sampled, (mean + log_std.exp() * noise["normal"]).squeeze(0).detach())
    torch.testing.assert_close(agent.act(step, state).action["action"], mean.squeeze(0).detach())


def test_numpy_acts_as_torch_does() -> None:
    agent: Any = make_worker(POINT, "sac").agent
    agent.updates = 1
    for noise in (None, agent.make_noise(Rows.all(4), torch.Generator().manual_seed(0)).next()):
        agent._numpy = None
        by_torch = agent.act(env_step(agent), HiddenState(), noise).action
        assert agent.use_numpy()
        torch.testing.assert_close(
            agent.act(env_step(agent), HiddenState(), noise).action, by_torch, rtol=1e-5, atol=1e-6
        )
    recurrent: Any = make_worker(POINT, "sac", network__body="lstm", agent__sequence=4).agent
    assert not recurrent.use_numpy()


def test_random_actions_at_the_very_bound_are_finite() -> None:
    agent: Any = make_worker(POINT, "sac").agent
    source = agent.make_noise(Rows.all(4), torch.Generator().manual_seed(0))
    for edge in (0.0, 1.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *shape, edge=edge, **_: torch.full(shape, edge))
            assert torch.isfinite(source._draw(1, torch.Generator())["random"]).all()


def test_the_deviation_keeps_to_its_bounds() -> None:
    agent: Any = make_worker(POINT, "sac").agent
    last = agent.networks["actor"].projections["policy"]
    last.bias.data[3:] = torch.tensor([-100.0, 100.0, 0.5])
    last.weight.data[3:] = 0
    seen, first = {"observation": torch.randn(1, 4, 5)}, torch.zeros(1, 4, dtype=torch.bool)
    _, log_std, _ = agent.policy(seen, HiddenState(), first)
    torch.testing.assert_close(log_std[0, 0], torch.tensor([-20.0, 2.0, 0.5]))


def test_the_entropy_to_keep() -> None:
    agents: list[Any] = [
        make_worker(POINT, "sac").agent,
        make_worker(POINT, "sac", agent__target_entropy=-1.5).agent,
        make_worker(POINT, "sac", agent__learn_alpha=False).agent,
    ]
    assert [agent.target_entropy for agent in agents[:2]] == [-3.0, -1.5]
    assert "alpha" not in agents[2].parameter_groups()


@pytest.mark.parametrize("n", [1, 3, 9])
def test_sequences_teach_what_their_transitions_teach(n: int) -> None:
    from test_agents_ddpg import transitions_of

    kept = []
    for sequence in (5, 0):
        agent: Any = make_worker(POINT, "sac", agent__sequence=sequence, agent__n_step=n).agent
        agent.draw = lambda batch, *shape: torch.full(shape, 0.3)
        batch = random_batch("observation", 8, 5, seed=2)
        batch = agent.prepare(batch if sequence else transitions_of(batch, n))
        kept.append(scalars(agent.compute_loss(batch)[0]))
    assert kept[0] == pytest.approx(kept[1], rel=1e-5)


@pytest.mark.parametrize("name", ["sac", "discrete_sac"])
def test_a_memory_learns_from_sequences_without_the_steps_that_never_were(name: str) -> None:
    kept = []
    for spoil in (0.0, 50.0):
        environment = POINT if name == "sac" else "CartPole-v1"
        changes = {"network__body": "lstm", "agent__sequence": 6, "agent__burn_in": 2, "agent__prioritized": True}
        worker = make_worker(environment, name, **changes)
        agent: Any = worker.agent
        batch = random_batch("observation", 8, 8, 5 if name == "sac" else 4, seed=2)
        if name == "discrete_sac":
            batch = replace(batch, action={"action": (batch.action["action"][..., 0] > 0).long()})
        batch.first[5, :4] = True
        batch.real[4, :4] = False
        batch.reward[4, :4] = spoil
        learned = agent.learn(replace(batch, state=agent.zeros(("actor",), 8)), worker.updater)
        kept.append((learned.priority, torch.cat([p.flatten() for p in agent.networks.parameters()])))
        assert all(torch.isfinite(x) for x in learned.metrics.values())
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=0)


def choices(rows: int, size: int = 4, options: int = 10) -> Batch:
    """A batch of MaskedEnv's shapes: an observation of 10 numbers, a mask, a choice of 10."""
    batch = random_batch("observation", rows, 1, size)
    mask = torch.rand(2, rows, options, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[..., 0] = True
    action = mask[:1].float().argmax(-1)
    return replace(batch, observation=batch.observation | {"action_mask": mask}, action={"action": action})


def test_discrete_losses_are_those_of_the_equations() -> None:
    """Christodoulou 2019, eq. 10 to 12, in float64, with masks; twin critics."""
    worker = make_worker(TOY + "MaskedEnv", "discrete_sac", agent__alpha=0.3, agent__prioritized=True)
    agent: Any = worker.agent
    for p in agent.target.parameters():
        p.add_(0.1)
    agent.networks["actor"].projections["policy"].weight.data.mul_(100)  # a policy that is not uniform
    batch = choices(32, 10)
    with torch.no_grad():
        seen = {"observation": batch.observation["observation"]}
        q, q_target = (agent.q(seen, HiddenState(), batch.first, target).double().numpy() for target in (False, True))
        logits = agent.run("actor", seen, HiddenState(), batch.first)[0]["policy"].double().numpy()
    mask = batch.observation["action_mask"].numpy()
    p = np.where(mask, np.exp(logits), 0.0)
    p /= p.sum(-1, keepdims=True)
    plogp = np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    value = (p[1] * q_target[1].min(1)).sum(-1) - 0.3 * plogp[1]
    y = batch.reward[0].numpy() + batch.discount[0].numpy() * value
    chosen = q[0][np.arange(32), :, batch.action["action"][0].numpy()]
    wanted = {
        "critic": 0.5 * np.square(chosen - y[:, None]).sum(1).mean(),
        "actor": (0.3 * plogp[0] - (p[0] * q[0].min(1)).sum(-1)).mean(),
        "alpha": (math.log(0.3) * (-plogp[0] - 0.98 * np.log(mask[0].sum(-1)))).mean(),
    }
    losses, metrics = agent.compute_loss(agent.prepare(batch))
    assert scalars(losses) == pytest.approx(wanted, rel=1e-4)
    np.testing.assert_allclose(metrics["priority"].numpy(), np.abs(chosen - y[:, None]).mean(1), rtol=1e-4, atol=1e-5)
    worker.close()


def test_discrete_actions_heed_the_mask_before_and_after_the_first_update() -> None:
    agent: Any = make_worker(TOY + "MaskedEnv", "discrete_sac").agent
    batch = choices(200, 10)
    step = env_step(agent, 200)._replace(observation={k: x[0] for k, x in batch.observation.items()})
    mask = step.observation["action_mask"]
    source = agent.make_noise(Rows.all(200), torch.Generator().manual_seed(0))
    for updates in (0, 1):
        agent.updates = updates
        for noise in (None, source.next(), source.next()):
            action = agent.act(step, HiddenState(), noise).action["action"]
            assert mask.gather(1, action.unsqueeze(1)).all()


def test_wrong_actions_are_refused() -> None:
    with pytest.raises(
        UserError, match=r'^sac needs continuous actions, but "action" is a choice of 2: use discrete_sac'
    ):
        make_worker("CartPole-v1", "sac")
    with pytest.raises(UserError, match=r"^sac needs continuous .* is a choice of 3"):
        make_worker(TOY + "MixedActionEnv", "sac")
    with pytest.raises(UserError, match=r"takes one Discrete action"):
        make_worker(POINT, "discrete_sac")


@pytest.mark.parametrize(("name", "key", "value"), [("sac", "alpha", 0.0), ("discrete_sac", "target_entropy", 1.2)])
def test_values_that_cannot_train_are_refused_by_name(name: str, key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"agent.{key} is"):
        make_worker(POINT, name, **{f"agent__{key}": value})
