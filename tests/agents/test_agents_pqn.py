"""PQN: Q(λ) targets by hand, masks, and a network without a target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agents_setup import make_worker

from ludus.containers.loop import begin, collect
from ludus.core.hidden_state import HiddenState

TOY = "ludus.environments.toy:"


@pytest.mark.parametrize("network", ["mlp", "lstm"])
@pytest.mark.parametrize("environment", ["CartPole-v1", TOY + "MaskedEnv"])
def test_targets_are_those_of_the_equation(environment: str, network: str) -> None:
    """G_t = r_t + γ(λ G_{t+1} + (1 − λ) max_a Q(s_{t+1}, a)), in float64, up to an ending or the rollout's end."""
    more = {"network__body": "lstm"} if network == "lstm" else {}
    changes = {"agent__trace_lambda": 0.7, "agent__gamma": 0.9, "env__max_episode_steps": 9}
    worker: Any = make_worker(environment, "pqn", **changes, **more)
    agent = worker.agent
    begin(worker, 0)
    for _ in range(2):
        collect(worker)
        batch = worker.cache.read()
        with torch.no_grad():
            q = agent.q(batch.observation, batch.state, batch.first)[0].double().numpy()
        if agent.mask:
            q = np.where(batch.observation[agent.mask].numpy(), q, -np.inf)
        best = q.max(-1)
        expected, real = np.zeros(batch.reward.shape), batch.real.numpy()
        for t in reversed(range(len(expected))):
            for b in range(expected.shape[1]):
                over = bool(batch.terminated[t, b] or batch.truncated[t, b])
                later = best[t + 1, b]
                if not over and t + 1 < len(expected) and real[t + 1, b]:
                    later = 0.7 * expected[t + 1, b] + 0.3 * later
                expected[t, b] = float(batch.reward[t, b]) + (0 if batch.terminated[t, b] else 0.9 * later)
        target = agent.prepare(batch).experience["target"].numpy()
        np.testing.assert_allclose(target[real], expected[real], rtol=1e-4, atol=1e-5)
        assert (~real).any()
        learned = agent.learn(batch, worker.updater)
        assert all(torch.isfinite(x) for x in learned.metrics.values())
    worker.close()


@pytest.mark.parametrize("network", ["mlp", "lstm"])
@pytest.mark.parametrize("gives_final", [True, False])
def test_targets_of_same_step_resets_bootstrap_from_the_true_last_observation(gives_final: bool, network: str) -> None:
    """At a truncation r + γ max Q(final), with the hidden state before the reset; without a final, max Q(s_t)."""
    options = ("truncates=true", f"gives_final={str(gives_final).lower()}")
    changes: dict[str, Any] = {"agent__trace_lambda": 0.7, "agent__gamma": 0.9, "env__options": options}
    changes |= {"env__backend": "tensor", "network__body": "lstm" if network == "lstm" else "mlp"}
    worker: Any = make_worker("ludus.environments.tensor_toy:TensorCue", "pqn", **changes)
    agent = worker.agent
    begin(worker, 0)
    collect(worker)
    batch = worker.cache.read()

    def best(t: int, last: dict[str, torch.Tensor] | None) -> np.ndarray[Any, Any]:
        """Max Q at time t, or of ``last`` in its place as if the episode went on."""
        seen = {name: x[: t + 1].clone() for name, x in batch.observation.items()}
        first = batch.first[: t + 1].clone()
        if last is not None:
            first[t] = False
            for name, x in last.items():
                seen[name][t] = x
        with torch.no_grad():
            q = agent.q(seen, batch.state, first)[0]
        found: np.ndarray[Any, Any] = q[-1].max(-1).values.double().numpy()
        return found

    final = batch.experience.get("final_value")
    expected = np.zeros(batch.reward.shape)
    ended = batch.truncated.numpy()
    for t in reversed(range(len(expected))):
        later = best(t + 1, None)
        if t + 1 < len(expected):
            later = 0.7 * expected[t + 1] + 0.3 * later
        if ended[t].any():
            if not gives_final:
                at_end = best(t, None)
            elif final is not None:  # stored while acting
                at_end = final[t].double().numpy()
            else:
                at_end = best(t + 1, {name: x[t] for name, x in batch.final.items()})
            later = np.where(ended[t], at_end, later)
        expected[t] = batch.reward[t].double().numpy() + 0.9 * later
    assert ended.any()
    assert (final is not None) == (gives_final and network == "lstm")
    target = agent.prepare(batch).experience["target"].numpy()
    np.testing.assert_allclose(target, expected, rtol=1e-4, atol=1e-5)
    worker.close()


def test_the_default_network_has_layer_norms_and_no_copy() -> None:
    worker: Any = make_worker("CartPole-v1", "pqn")
    norms = [module for module in worker.agent.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(norms) == 1  # of the one hidden layer here
    assert not any("target" in name for name in worker.agent.state_dict())
    worker.close()


def test_padding_is_not_learned_from() -> None:
    losses = []
    for spoil in (0.0, 50.0):
        worker: Any = make_worker("CartPole-v1", "pqn", agent__minibatches=1, agent__epochs=1)
        begin(worker, 0)
        for _ in range(3):
            collect(worker)
            batch = worker.cache.read()
        batch.reward[~batch.real] = spoil
        assert (~batch.real).any()
        losses.append(float(worker.agent.learn(batch, worker.updater).metrics["loss/value"]))
        worker.close()
    assert losses[0] == losses[1]


def test_forbidden_choices_are_never_taken() -> None:
    worker: Any = make_worker(TOY + "MaskedEnv", "pqn", env__num=16, agent__epsilon_start=0.5)
    begin(worker, 0)
    step, state = worker.seat.env_step, HiddenState()
    mask = step.observation["action_mask"]
    for _ in range(20):
        for noise in (None, worker.seat.noise.next()):
            action = worker.agent.act(step, state, noise).action["action"]
            assert mask.gather(1, action.unsqueeze(1)).all()
    worker.close()


def test_a_loaded_policy_explores_as_far_as_it_was_trained() -> None:
    agents: list[Any] = [make_worker("CartPole-v1", "pqn").agent for _ in range(2)]
    agents[0].schedule(1.0)
    agents[1].load_state_dict(agents[0].state_dict())
    assert agents[1].epsilon.value == agents[0].epsilon.value < 1
