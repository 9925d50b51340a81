"""GAIL: the discriminator's own parameters, the pairs that it sees, its rewards, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_setup import make_worker
from demonstrations import TOY, aim, mix, obey, record_to

from ludus.agents.gail import DISCRIMINATOR
from ludus.containers.updater import LocalUpdater
from ludus.core.batch import Batch
from ludus.core.errors import UserError

TARGET, MASKED, MIXED = TOY + "TargetEnv", TOY + "MaskedEnv", TOY + "MixedActionEnv"
ROLLOUT = {"agent__rollout": 16, "agent__minibatches": 2}


def make(tmp_path: Path, agent: str = "gail", environment: str = TARGET, **changes: Any) -> Any:
    """A worker and a rollout of 16 steps of 4 environments, whose episodes have 4 steps."""
    expert, options = {TARGET: (aim, ()), MASKED: (obey, ()), MIXED: (mix, ("more=true",))}[environment]
    data = record_to(tmp_path / "x.npz", environment, expert, 10, *options)
    worker: Any = make_worker(environment, agent, data=data, env__options=options, **(ROLLOUT | changes))
    worker._begin()
    worker._collect()
    return worker, worker.cache.read()


def parameters(worker: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in worker.agent.named_parameters()}


@pytest.mark.parametrize("agent", ["gail", "gail_trpo"])
def test_each_optimizer_steps_its_own_parameters(agent: str, tmp_path: Path) -> None:
    """In Machin the discriminator's optimizer holds the actor's parameters, so the discriminator never learns."""
    worker, batch = make(tmp_path, agent)
    groups = worker.agent.parameter_groups()
    own = set(worker.agent.discriminator.parameters())
    assert set(groups[DISCRIMINATOR].parameters) == own
    others = {p for name, group in groups.items() if name != DISCRIMINATOR for p in group.parameters}
    assert not others & own
    assert others | own == set(worker.agent.parameters())
    before = parameters(worker)
    worker.agent.learn_discriminator(batch, worker.updater)
    after = parameters(worker)
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed
    assert all(name.startswith("discriminator.") for name in changed)
    worker.agent.learn_discriminator = lambda batch, updater: {}
    worker.agent.learn(batch, worker.updater)
    last = parameters(worker)
    assert all(torch.equal(x, after[name]) for name, x in last.items() if name.startswith("discriminator."))
    assert any(not torch.equal(x, after[name]) for name, x in last.items() if name.startswith("networks.actor"))


def test_padding_has_no_weight(tmp_path: Path) -> None:
    worker, batch = make(tmp_path)
    agent = worker.agent
    assert 0 < int((~batch.real).sum()) < batch.real.numel()

    def gradient(given: Batch) -> torch.Tensor:
        agent.generator.manual_seed(3)
        pairs = agent.draw_pairs(given, worker.updater)
        assert float(pairs.share.sum()) == pytest.approx(1)
        flat: torch.Tensor = worker.updater.gradient(agent.discriminator_loss, pairs, DISCRIMINATOR)[0]
        return flat

    x = batch.observation["observation"].clone()
    x[:-1][~batch.real] = 7.0
    torch.testing.assert_close(gradient(replace(batch, observation={"observation": x})), gradient(batch))
    x[:-1][batch.real] = 7.0
    assert not torch.allclose(gradient(replace(batch, observation={"observation": x})), gradient(batch))


def test_pairs_are_of_one_step(tmp_path: Path) -> None:
    """Observation and action of a pair belong to the same step of the same environment."""
    worker, batch = make(tmp_path)
    number = torch.arange(batch.reward.numel()).view_as(batch.reward)
    seen = torch.zeros_like(batch.observation["observation"])
    seen[:-1] = number.unsqueeze(-1)
    marked = replace(
        batch, observation={"observation": seen}, action={"action": number.unsqueeze(-1).expand(-1, -1, 2).float()}
    )
    pairs = worker.agent.draw_pairs(marked, worker.updater)
    own = pairs.experience["expert"][0] == 0
    assert torch.equal(pairs.observation["observation"][0, own], pairs.action["action"][0, own])
    assert len(pairs.action["action"][0, own].unique()) > 30
    real = batch.real.flatten()[pairs.action["action"][0, own, 0].long()]
    assert torch.equal(pairs.share[0, own] > 0, real)
    expert_seen, expert_done = pairs.observation["observation"][0, ~own], pairs.action["action"][0, ~own]
    torch.testing.assert_close(expert_done * 2, expert_seen.flip(-1))  # the Box has bounds ±2


def test_the_discriminator_sees_what_the_environment_gets(tmp_path: Path) -> None:
    agent = make(tmp_path)[0].agent
    actions = {"action": torch.tensor([[[0.5, 3.0], [0.5, 1.0], [-9.0, -1.0]]])}
    assert agent.action_features(actions, agent.policy).tolist() == [[[0.5, 1.0], [0.5, 1.0], [-1.0, -1.0]]]


def test_mixed_actions_become_numbers_and_one_hot_choices(tmp_path: Path) -> None:
    agent = make(tmp_path, environment=MIXED)[0].agent
    actions = {
        "choice": torch.tensor([[2]]),
        "amount": torch.tensor([[[0.5, -2.0]]]),
        "switches": torch.tensor([[[1, 0]]]),
        "dials": torch.tensor([[[1, 1]]]),
    }
    expected = {
        "choice": [0, 0, 1],
        "amount": [0.5, -1],
        "switches": [1, 0],
        "dials": [0, 1, 0, 0, 1],
    }
    wanted = [x for name in actions for x in expected[name]]
    assert agent.action_features(actions, agent.policy).flatten().tolist() == wanted


def test_the_gradient_penalty_of_a_linear_discriminator_is_that_of_its_weights(tmp_path: Path) -> None:
    worker, batch = make(tmp_path, network__discriminator__hidden=())
    agent = worker.agent
    weights = [p for p in agent.discriminator.parameters() if p.dim() == 2]
    norm = torch.linalg.vector_norm(torch.linalg.multi_dot([*reversed(weights)]) if len(weights) > 1 else weights[0])
    losses, _ = agent.discriminator_loss(agent.draw_pairs(batch, worker.updater))
    torch.testing.assert_close(losses["gradient_penalty"], norm**2)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_rewards_are_the_discriminators_and_the_environments(share: float, tmp_path: Path) -> None:
    worker, batch = make(tmp_path, agent__environment_reward=share, agent__normalize_reward=True)
    agent = worker.agent
    changed = agent.with_imitation_reward(batch)
    seen = {"observation": batch.observation["observation"][:-1]}
    with torch.no_grad():
        logit = agent.logit(agent.discriminator_inputs(seen, batch.action))
    expected = (1 - share) * logit + share * batch.reward
    torch.testing.assert_close(changed.reward[batch.real], expected[batch.real])
    assert not changed.reward[~batch.real].any()
    carried = torch.zeros(4, dtype=torch.float64)
    for t in range(16):  # the running return of the new rewards
        carried = torch.where(batch.real[t], changed.reward[t] + agent.config.gamma * carried, 0)
        torch.testing.assert_close(changed.row_state["return"][t], carried)
        carried = torch.where(batch.terminated[t] | batch.truncated[t], 0, carried)


@pytest.mark.parametrize("agent", ["gail", "gail_trpo"])
def test_the_running_return_is_carried_over_rollouts(agent: str, tmp_path: Path) -> None:
    """Episodes of 4 steps and their padding do not fit into rollouts of 7."""
    worker, batch = make(tmp_path, agent, agent__normalize_reward=True, agent__rollout=7, agent__minibatches=1)
    learner = worker.agent
    carried, crossed = torch.zeros(4, dtype=torch.float64), 0
    for number in range(5):
        batch = worker.cache.read() if number else batch
        changed = learner.with_imitation_reward(batch)
        crossed += int((carried != 0).sum())
        for t in range(7):
            carried = torch.where(batch.real[t], changed.reward[t] + learner.config.gamma * carried, 0)
            torch.testing.assert_close(changed.row_state["return"][t], carried)
            carried = torch.where(batch.terminated[t] | batch.truncated[t], 0, carried)
        if number == 2:  # as if a resumed run had lost the episodes
            step = worker.manager.last_step()
            worker.cache.amend(step._replace(first=torch.ones_like(step.first), real=torch.zeros_like(step.real)))
            carried = torch.zeros_like(carried)
        worker._collect()
    assert crossed > 4


@pytest.mark.parametrize(("penalty", "expected"), [({"agent__gradient_penalty_coef": 0.0}, 0.3), ({}, 0.05)])
def test_the_discriminator_learns_to_tell_the_policy_from_the_expert(
    penalty: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    changes = {"agent__discriminator_updates": 100, "agent__discriminator_learning_rate": 1e-2}
    worker, batch = make(tmp_path, **changes, **penalty)
    metrics = worker.agent.learn_discriminator(batch, worker.updater)
    assert float(metrics["discriminator/expert"] - metrics["discriminator/policy"]) > expected  # untrained: 0


def test_its_normalizer_has_raw_states_of_both(tmp_path: Path) -> None:
    worker, batch = make(tmp_path)
    agent = worker.agent
    agent.generator.manual_seed(5)
    pairs = agent.draw_pairs(batch, worker.updater)
    agent.generator.manual_seed(5)
    agent.learn_discriminator(batch, worker.updater)
    statistics: Any = agent.discriminator_normalizer.statistics["observation/observation"]
    kept = pairs.observation["observation"][pairs.share > 0].double()
    assert float(statistics.count) == len(kept)
    torch.testing.assert_close(statistics.mean, kept.mean(0))
    assert not agent.normalizer or float(agent.normalizer.statistics["observation/observation"].count) == 0


def test_an_lstm_policy_with_a_discriminator_of_single_steps(tmp_path: Path) -> None:
    changes = {"network__body": "lstm", "network__discriminator__body": "mlp"}
    worker, batch = make(tmp_path, **changes)
    worker.agent.learn(batch, worker.updater)
    with pytest.raises(UserError, match=r"network.discriminator.body"):
        make(tmp_path, network__body="lstm")


@pytest.mark.parametrize("environment", [MASKED, MIXED])
@pytest.mark.parametrize("agent", ["gail", "gail_trpo"])
def test_masked_and_mixed_actions(agent: str, environment: str, tmp_path: Path) -> None:
    worker, batch = make(tmp_path, agent, environment)
    assert all(torch.isfinite(x) for x in worker.agent.learn(batch, worker.updater).metrics.values())


def test_a_shared_trunk_leaves_the_discriminator_apart(tmp_path: Path) -> None:
    for shared in ("yes", "sources"):
        worker, batch = make(tmp_path, network__shared=shared)
        assert list(worker.agent.networks) == ["actor_critic"]
        worker.agent.learn(batch, worker.updater)


def test_an_optimizer_of_its_own(tmp_path: Path) -> None:
    agent = make(tmp_path, agent__discriminator_learning_rate=0.123)[0].agent
    groups = LocalUpdater(agent).parts
    assert list(groups) == ["all", DISCRIMINATOR]
    assert groups[DISCRIMINATOR].group.learning_rate == 0.123


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name them with --data"):
        make_worker(TARGET, "gail", **ROLLOUT)
    with pytest.raises(UserError, match="would change the rate of the discriminator"):
        make_worker(TARGET, "gail", agent__learning_rate_schedule="kl", agent__target_kl=0.01, **ROLLOUT)
