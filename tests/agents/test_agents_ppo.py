"""PPO's own parts: early stop, step size by KL, schedules, minibatches, what may not be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agents_setup import make_worker
from torch import Tensor

from ludus.agents.actor_critic import ActorCritic
from ludus.agents.ppo import PPO
from ludus.containers.loop import begin, collect, improve
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.types import Tensors
from ludus.ops.optimizers import KL_CAP, KL_FLOOR, kl_adaptive_lr


def test_the_step_size_follows_the_kl() -> None:
    assert kl_adaptive_lr(1e-3, 0.03, 0.01) == pytest.approx(1e-3 / 1.5)
    assert kl_adaptive_lr(1e-3, 0.004, 0.01) == pytest.approx(1.5e-3)
    assert kl_adaptive_lr(1e-3, 0.01, 0.01) == 1e-3
    assert kl_adaptive_lr(KL_FLOOR, 1.0, 0.01) == KL_FLOOR
    assert kl_adaptive_lr(KL_CAP, 0.001, 0.01) == KL_CAP


def test_kl_schedule_moves_the_learning_rate_in_training() -> None:
    worker = make_worker("CartPole-v1", agent__learning_rate_schedule="kl", agent__target_kl=0.01)
    worker.run(200)
    assert worker.updater.learning_rate != worker.settings.agent.learning_rate
    worker.close()


class Rounded(PPO):
    """Its KL is off by a rounding error above 0, as that of large layers may be."""

    def _kl(self, outputs: Tensors, log_ratio: Tensor, batch: Batch) -> Tensor:
        return super()._kl(outputs, log_ratio, batch) + 1e-9


def test_the_kl_of_a_policy_that_has_not_moved_yet_does_not_raise_the_learning_rate() -> None:
    """The KL of a rollout's first minibatch is 0 by construction, but for rounding."""
    worker = make_worker(
        "CartPole-v1", f"{__name__}:Rounded", agent__learning_rate_schedule="kl", agent__target_kl=0.01
    )
    rates: list[float] = []
    step = worker.updater.step
    worker.updater.step = lambda *given: (rates.append(worker.updater.learning_rate), step(*given))[1]  # type: ignore[method-assign]
    begin(worker, 0)
    for rollout in range(4):
        collect(worker)
        rates.clear()
        improve(worker)
        assert rates[0] == rates[1]
        if rollout == 0:
            assert rates[2] == pytest.approx(1.5 * rates[1])  # the second counts: the policy has moved
    worker.close()


def test_a_kl_schedule_with_one_step_per_rollout_is_refused() -> None:
    """There would be no minibatch to measure a KL on that is not 0."""
    with pytest.raises(UserError, match=r"agent\.epochs and agent\.minibatches are 1"):
        make_worker(
            "CartPole-v1",
            agent__learning_rate_schedule="kl",
            agent__target_kl=0.01,
            agent__epochs=1,
            agent__minibatches=1,
        )


def test_a_policy_that_moved_too_far_stops_learning_from_the_rollout() -> None:
    worker = make_worker("CartPole-v1", agent__target_kl=1e-6, agent__epochs=50, agent__learning_rate=1e-2)
    begin(worker, 0)
    collect(worker)
    learned = worker.agent.learn(worker.cache.read(), worker.updater)
    assert learned.metrics["optimizer_steps"] < 50 * 4
    worker.close()


def test_linear_schedules_end_at_zero() -> None:
    worker = make_worker("CartPole-v1", agent__learning_rate_schedule="linear", agent__clip_schedule="linear")
    assert worker.agent.schedule(0.25)["learning_rate"] == pytest.approx(0.75 * worker.settings.agent.learning_rate)
    assert float(worker.agent.clip) == pytest.approx(0.75 * 0.2)  # type: ignore[arg-type]
    worker.agent.schedule(1.5)
    assert float(worker.agent.clip) == 0  # type: ignore[arg-type]
    worker.close()


def test_more_minibatches_than_rows_is_refused() -> None:
    with pytest.raises(UserError, match=r"agent\.minibatches is 5, more than the 4 environments"):
        make_worker("CartPole-v1", network__body="lstm", agent__minibatches=5)
    with pytest.raises(UserError, match=r"agent\.minibatches"):
        make_worker("CartPole-v1", agent__minibatches=65)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", 1.5),
        ("learning_rate", 0.0),
        ("rollout", 0),
        ("epochs", 0),
        ("clip", -0.1),
        ("minibatches", 0),
        ("value_clip", -1.0),
    ],
)
def test_values_that_cannot_train_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"agent.{key} is"):
        make_worker("CartPole-v1", **{f"agent__{key}": value})


def test_value_clipping_bounds_the_step_of_the_value() -> None:
    """With a tiny clip the value loss has no gradient once the value has moved; the loss still is finite."""
    worker = make_worker("CartPole-v1", agent__value_clip=0.1)
    worker.run(200)
    assert all(torch.isfinite(p).all() for p in worker.agent.parameters())
    worker.close()


def test_rows_that_never_were_do_not_teach() -> None:
    """Whatever lies in the padding rows (a reset's transition), the gradient is the same."""
    worker = make_worker("ludus.environments.toy:CountingEnv", agent__normalize_advantage=True)
    begin(worker, 0)
    collect(worker)
    batch = worker.cache.read()
    prepared = worker.agent.prepare(batch).without_last_observation()  # type: ignore[operator]
    assert (~prepared.real).any()
    gradients = []
    for spoil in (0.0, 1e3):
        dead = ~prepared.real
        prepared.experience["advantage"][dead] = spoil
        prepared.experience["return"][dead] = spoil
        worker.agent.zero_grad()
        losses, _ = worker.agent.compute_loss(worker.agent.with_shares(prepared))
        sum(losses.values()).backward()  # type: ignore[union-attr]
        gradients.append(torch.cat([p.grad.flatten() for p in worker.agent.parameters() if p.grad is not None]).clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    worker.close()


class Nosy(PPO):
    """Notes what its loss is given."""

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        losses, metrics = super().compute_loss(batch)
        return losses | {"extra": losses["value"]}, metrics | {"extra": batch.experience["advantage"].sum()}


@pytest.mark.parametrize("minibatches", [1, 4])
def test_a_loss_of_a_subclass_counts(minibatches: int) -> None:
    own = {"agent__minibatches": minibatches, "agent__epochs": 1, "agent__normalize_reward": False}
    own["agent__normalize_advantage"] = False
    worker = make_worker("CartPole-v1", f"{__name__}:Nosy", **own)
    begin(worker, 0)
    collect(worker)
    batch = worker.agent.prepare(worker.cache.read())
    learned = worker.agent.learn(batch, worker.updater).metrics
    assert learned["loss/extra"] == learned["loss/value"]
    assert learned["extra"] * minibatches == pytest.approx(float(batch.experience["advantage"].sum()), abs=1e-3)
    worker.close()


def test_one_step_returns_are_gae_with_lambda_0() -> None:
    advantages = []
    for changes in ({"agent__n_step": 1}, {"agent__gae_lambda": 0.0}):
        worker = make_worker("CartPole-v1", **changes)
        begin(worker, 0)
        collect(worker)
        advantages.append(worker.agent.prepare(worker.cache.read()).experience["advantage"])  # type: ignore[operator]
        worker.close()
    torch.testing.assert_close(*advantages)


def test_advantages_by_vtrace_are_those_of_gae_on_policy_and_have_no_weight_off_policy() -> None:
    worker = make_worker("CartPole-v1", "appo")
    begin(worker, 0)
    collect(worker)
    batch, agent = worker.cache.read(), worker.agent
    assert isinstance(agent, PPO)
    assert agent.corrects_old_unrolls
    by_vtrace, by_gae = agent.prepare(batch), ActorCritic.prepare(agent, batch)
    for name in ("value", "advantage", "return"):
        assert torch.allclose(by_vtrace.experience[name], by_gae.experience[name], atol=1e-5), name
    older = batch.experience | {"log_prob": batch.experience["log_prob"] - 1}  # the ratio is e, the clips are 1
    assert torch.allclose(
        agent.prepare(replace(batch, experience=older)).experience["advantage"],
        by_gae.experience["advantage"],
        atol=1e-5,
    )
    worker.close()


def test_the_kl_to_older_policies_is_no_measure_of_a_step() -> None:
    with pytest.raises(
        UserError, match=r"agent\.target_kl is 0\.01, but with agent\.vtrace .*set agent\.target_kl to 0"
    ):
        make_worker("CartPole-v1", "appo", agent__target_kl=0.01)


@pytest.mark.parametrize("agent", ["ppo", "a2c", "trpo", "acer"])
def test_the_perplexity_is_that_of_the_policy(agent: str) -> None:
    """Nearly 2, the number of choices, before anything is learned."""
    worker = make_worker("CartPole-v1", agent, **({"agent__warmup": 32} if agent == "acer" else {}))
    begin(worker, 0)
    collect(worker)
    metrics = worker.agent.learn(worker.cache.read(), worker.updater).metrics
    assert float(metrics["perplexity"]) == pytest.approx(float(metrics["loss/entropy"].neg().exp()))
    assert 1.8 < float(metrics["perplexity"]) <= 2
    worker.close()
