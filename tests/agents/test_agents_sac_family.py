"""TQC, DroQ and CrossQ: losses against the equations in float64, and what their critics are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from actor_setup import POINT, make_worker, random_batch, scalars
from torch import nn

from ludus.containers.loop import begin, collect
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.networks.critic import ACTION
from ludus.networks.norm import BatchRenorm


def prepared(agent: Any, rows: int = 16) -> Any:
    agent.draw = lambda batch, *shape: torch.full(shape, 0.3)
    return agent.prepare(random_batch("observation", rows, seed=4))


def policy_sample(agent: Any, batch: Any, time: int) -> tuple[Any, Any]:
    with torch.no_grad():
        seen, first = {"observation": batch.observation["observation"][time : time + 1]}, batch.first[:1]
        return agent.sample(seen, HiddenState(), first, torch.full((1, batch.reward.shape[1], 3), 0.3))


@pytest.mark.parametrize("critics", [1, 3])
def test_tqc_losses_are_those_of_the_equations(critics: int) -> None:
    """Kuznetsov et al. 2020: all target quantiles sorted, the largest dropped; quantile Huber loss of every pair."""
    more = {"agent__quantiles": 5, "agent__dropped_quantiles": 2, "agent__critics": critics, "agent__alpha": 0.3}
    agent: Any = make_worker(POINT, "tqc", **more).agent
    for p in agent.target.parameters():
        p.add_(0.05)
    batch = prepared(agent)
    action, log_prob = policy_sample(agent, batch, 1)
    with torch.no_grad():
        x, first = batch.observation["observation"], batch.first[:1]
        now, later = ({"observation": x[i : i + 1]} for i in (0, 1))
        taken = agent.critic_inputs(batch)[ACTION]
        theta = agent.critic_values(now, taken, HiddenState(), first)[0].double().numpy()  # [B, E, N]
        z = agent.critic_values(later, action, HiddenState(), first, target=True)[0].double().numpy()
    reward, discount = batch.reward[0].numpy(), batch.discount[0].numpy()
    losses = []
    for b in range(16):
        kept = np.sort(z[b].ravel())[: critics * 3]
        y = reward[b] + discount[b] * (kept - 0.3 * float(log_prob[0, b]))
        total = 0.0
        for e in range(critics):
            for i in range(5):
                u = y - theta[b, e, i]
                huber = np.where(np.abs(u) <= 1, 0.5 * u**2, np.abs(u) - 0.5)
                total += np.mean(np.abs((2 * i + 1) / 10 - (u < 0)) * huber) / 5
        losses.append(total)
    found, metrics = agent.critic_loss(batch)
    assert scalars(found)["critic"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert float(metrics["q"]) == pytest.approx(theta.mean(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("name", "reduce"), [("tqc", np.mean), ("droq", np.mean), ("sac", np.min)])
def test_the_policy_maximizes_the_mean_or_the_minimum_of_the_critics(name: str, reduce: Any) -> None:
    agent: Any = make_worker(POINT, name, agent__alpha=0.2).agent
    batch = prepared(agent)
    action, log_prob = policy_sample(agent, batch, 0)
    with torch.no_grad():
        seen = {"observation": batch.observation["observation"][:1]}
        q = agent.q(seen, action, HiddenState(), batch.first[:1])[0].double().numpy()
    expected = np.mean(0.2 * log_prob[0].double().numpy() - reduce(q, axis=-1))
    assert scalars(agent.actor_loss(batch)[0])["actor"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("n", [1, 3, 9])
def test_sequences_teach_what_their_transitions_teach(n: int) -> None:
    from test_agents_ddpg import transitions_of

    kept = []
    for sequence in (5, 0):
        agent: Any = make_worker(POINT, "tqc", agent__quantiles=4, agent__sequence=sequence, agent__n_step=n).agent
        agent.draw = lambda batch, *shape: torch.full(shape, 0.3)
        batch = random_batch("observation", 8, 5, seed=2)
        batch = agent.prepare(batch if sequence else transitions_of(batch, n))
        kept.append(scalars(agent.compute_loss(batch)[0]))
    assert kept[0] == pytest.approx(kept[1], rel=1e-4)


def test_the_critics_of_droq_have_dropout_and_layer_norms_and_the_actor_has_neither() -> None:
    worker = make_worker(POINT, "droq")
    networks: Any = worker.agent.networks
    kinds = {type(module) for module in networks["critic"].modules()}
    assert kinds >= {nn.Dropout, nn.LayerNorm}
    assert not {type(module) for module in networks["actor"].modules()} & {nn.Dropout, nn.LayerNorm}
    layers = [module for module in networks["critic"].members[0].modules() if isinstance(module, nn.Linear)]
    assert [layer.out_features for layer in layers] == [32, 32, 1]  # nothing follows the mlp
    assert worker.settings.agent.updates_per_step == 20


def test_droq_updates_its_critics_20_times_and_its_actor_once_per_step() -> None:
    worker: Any = make_worker(POINT, "droq", agent__warmup=8, agent__batch_size=4)
    begin(worker, 0)
    steps = {"critic": 0, "actor": 0, "alpha": 0}
    step = worker.updater.step

    def count(loss: Any, batch: Any, group: str) -> Any:
        steps[group] += 1
        return step(loss, batch, group)

    worker.updater.step = count
    while not steps["critic"]:
        collect(worker)
        while worker.cache.ready():
            worker.agent.learn(worker.cache.read(), worker.updater)
    assert steps["critic"] == 20 * steps["actor"] == 20 * steps["alpha"] > 0


def test_a_critic_of_droq_drops_units_before_the_layer_norm_and_so_does_its_target() -> None:
    """Hiraoka et al. 2022, figure 1: a linear layer, dropout, layer norm and relu, in online and target critics."""
    agent: Any = make_worker(POINT, "droq").agent
    (mlp,) = agent.networks["critic"].members[0].pieces.values()
    x, first = torch.randn(64, 8), torch.zeros(1, 64, dtype=torch.bool)
    mlp.dropout.p = 0.5
    torch.manual_seed(0)
    found = mlp.train()(x, HiddenState(), first)[0]
    torch.manual_seed(0)
    h = x
    for layer in mlp.layers:
        kept = torch.nn.functional.dropout(layer(h), 0.5).double()
        h = ((kept - kept.mean(-1, keepdim=True)) / (kept.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()).relu()
        h = h.float()
    torch.testing.assert_close(found, h, atol=1e-5, rtol=1e-4)
    batch = prepared(agent)
    for module in agent.target.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    drawn = [agent.target_value(batch, agent.inputs(batch.observation))[0] for _ in range(2)]
    assert not torch.equal(*drawn)
    assert not any(module.training for module in agent.target.modules())


def renormalized(x: Any, norm: BatchRenorm | None = None) -> Any:
    """A batch norm, as a batch renorm is at first, or by running statistics."""
    mean, variance = (
        (x.mean(0), x.var(0)) if norm is None else (norm.mean.double().numpy(), norm.variance.double().numpy())
    )
    return (x - mean) / np.sqrt(variance + 1e-3)


def test_crossq_has_no_target_and_normalizes_both_pairs_together() -> None:
    """The targets come from the same forward pass, by the statistics of current and next pairs in one batch."""
    worker = make_worker(POINT, "crossq", network__critic__hidden=(8,), agent__alpha=0.3)
    agent: Any = worker.agent
    assert not list(agent.target.parameters())
    assert {group.beta1 for group in agent.parameter_groups().values()} == {0.5}
    batch = prepared(agent)
    action, log_prob = policy_sample(agent, batch, 1)
    x = batch.observation["observation"]
    pairs = torch.cat([torch.cat([x[0], agent.critic_inputs(batch)[ACTION][0]], 1), torch.cat([x[1], action[0]], 1)])
    q = []
    for member in agent.networks["critic"].members:
        (mlp,) = member.pieces.values()
        weight, bias = (p.detach().double().numpy() for p in mlp.layers[0].parameters())
        h = renormalized(pairs.double().numpy())  # Bhatt et al. 2024: the input, and what every layer gives
        h = renormalized(np.maximum(h @ weight.T + bias, 0))
        last = member.projections["value"]
        q.append(h @ last.weight.detach().double().numpy().T + last.bias.detach().double().numpy())
    both = np.concatenate(q, 1)
    y = batch.reward[0].numpy() + batch.discount[0].numpy() * (both[16:].min(1) - 0.3 * log_prob[0].numpy())
    expected = 0.5 * np.square(both[:16] - y[:, None]).sum(1).mean()
    agent.networks.train()
    assert scalars(agent.critic_loss(batch)[0])["critic"] == pytest.approx(expected, rel=1e-4)


def test_the_actor_of_crossq_has_norms_that_its_own_loss_alone_updates() -> None:
    worker = make_worker(POINT, "crossq", network__critic__hidden=(8,), agent__alpha=0.3)
    agent: Any = worker.agent
    norms = [module for module in agent.networks["actor"].modules() if isinstance(module, BatchRenorm)]
    assert [len(norm.mean) for norm in norms] == [5, 32, 32]  # the input, and after each activation
    for norm in norms:
        norm.mean.normal_(generator=torch.Generator().manual_seed(0))
    batch = prepared(agent)
    agent.networks.train()
    agent.critic_loss(batch)
    assert [float(norm.steps) for norm in norms] == [0, 0, 0]  # next actions are by running statistics
    x = batch.observation["observation"][0].double().numpy()
    (mlp,) = agent.networks["actor"].pieces.values()
    for running in (True, False):
        h = renormalized(x, norms[0] if running else None)
        for layer, norm in zip(mlp.layers, norms[1:], strict=True):
            weight, bias = (p.detach().double().numpy() for p in layer.parameters())
            h = renormalized(np.maximum(h @ weight.T + bias, 0), norm if running else None)
        agent.networks["actor"].train(not running)
        found = mlp(batch.observation["observation"][0], HiddenState(), batch.first[:1])[0]
        np.testing.assert_allclose(found.detach().numpy(), h, rtol=1e-3, atol=1e-4)
    assert [float(norm.steps) for norm in norms] == [1, 1, 1]


def test_the_policy_of_crossq_waits_its_turn_and_leaves_the_statistics_of_critics_alone() -> None:
    worker = make_worker(POINT, "crossq", network__critic__hidden=(8,))
    agent: Any = worker.agent
    norm = next(module for module in agent.networks["critic"].modules() if isinstance(module, BatchRenorm))
    for update in range(1, 7):
        actor = [p.clone() for p in agent.networks["actor"].parameters()]
        metrics = agent.learn(random_batch("observation", 16, seed=update), worker.updater).metrics
        moved = not all(map(torch.equal, actor, agent.networks["actor"].parameters()))
        assert moved == (update % 3 == 0)
        assert bool(metrics["loss/actor"]) == (update >= 3)  # that of the last step
        assert float(norm.steps) == update
        assert not norm.training


def test_a_memory_without_target_networks_is_refused() -> None:
    with pytest.raises(UserError, match=r"agent.target_networks is off, which needs feed-forward networks"):
        make_worker(POINT, "crossq", network__body="lstm", agent__sequence=4)


def test_metrics_of_the_policy_are_those_of_its_last_step() -> None:
    changes = {"agent__policy_delay": 2, "agent__warmup": 8, "agent__batch_size": 4, "agent__updates_per_step": 1.0}
    worker: Any = make_worker(POINT, "sac", **changes)
    begin(worker, 0)
    seen = []
    while len(seen) < 6:
        collect(worker)
        while worker.cache.ready():
            seen.append(scalars(worker.agent.learn(worker.cache.read(), worker.updater).metrics))
    names = ("loss/actor", "entropy", "alpha", "loss/alpha")
    policy = [tuple(metrics[name] for name in names) for metrics in seen]
    assert policy[0] == (0.0, 0.0, worker.agent.config.alpha, 0.0)
    assert policy[1] == policy[2] != policy[3] == policy[4]
