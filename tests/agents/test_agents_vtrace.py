"""V-trace targets are those of A2C while the policy that acted is the learner's, and correct for it where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agents_setup import make_worker

from ludus.agents.actor_critic import ActorCritic
from ludus.containers.loop import begin, collect
from ludus.ops.vtrace import vtrace

TOY = "ludus.environments.toy:"
UNSCALED: dict[str, Any] = {"agent__normalize_observation": False, "agent__normalize_reward": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("CartPole-v1", {}),
    "lstm": (TOY + "MemoryEnv", {"network__body": "lstm"}),
    "mixed": (TOY + "MixedActionEnv", {"network__shared": "yes"}),
}


def collected(case: str) -> tuple[Any, Any]:
    environment, settings = CASES[case]
    worker: Any = make_worker(environment, "vtrace", agent__trace_lambda=0.8, **UNSCALED, **settings)
    begin(worker, 0)
    collect(worker)
    return worker, worker.cache.read()


@pytest.mark.parametrize("case", CASES)
def test_on_policy_the_targets_are_those_of_a2c(case: str) -> None:
    worker, batch = collected(case)
    found = worker.agent.prepare(batch).experience
    a2c: Any = make_worker(CASES[case][0], "a2c", agent__gae_lambda=0.8, **UNSCALED, **CASES[case][1])
    a2c.agent.load_state_dict(worker.agent.state_dict())
    expected = ActorCritic.prepare(a2c.agent, batch).experience
    for name in ("advantage", "return", "value"):
        torch.testing.assert_close(found[name][batch.real], expected[name][batch.real], atol=1e-5, rtol=1e-4)
    worker.close()
    a2c.close()


def test_a_policy_that_has_moved_on_is_corrected_for() -> None:
    worker, batch = collected("discrete")
    agent = worker.agent
    with torch.no_grad():
        for p in agent.networks["actor"].parameters():
            p += 0.3 * torch.randn_like(p)
    outputs, _ = agent.outputs(batch.observation, batch.state, batch.first)
    logits = outputs["policy/action"][:-1].log_softmax(-1)
    log_ratio = logits.gather(-1, batch.action["action"].unsqueeze(-1)).squeeze(-1) - batch.experience["log_prob"]
    assert log_ratio.abs().max() > 0.1
    value = outputs["value"].squeeze(-1).detach()
    expected = vtrace(
        log_ratio.detach(), batch.reward, batch.discount, batch.continues, value[:-1], value[1:], lambda_=0.8
    )
    found = agent.prepare(batch).experience
    torch.testing.assert_close(found["advantage"][batch.real], expected.advantage[batch.real], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["return"][batch.real], expected.target[batch.real], atol=1e-5, rtol=1e-4)
    worker.close()
