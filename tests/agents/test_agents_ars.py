"""ARS: what each row plays, the step against numpy, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agents_setup import make_worker

from ludus.agents.ars import ENVIRONMENT
from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows

TOY = "ludus.environments.toy:"


def flat(parameters: Any) -> Any:
    """Parameters as one float64 vector."""
    return np.concatenate([x.detach().double().numpy().ravel() for x in parameters])


def next_batch(worker: Any) -> Batch:
    """Collect until the episodes of all rows are over."""
    while not worker.cache.ready():
        collect(worker)
    batch: Batch = worker.cache.read()
    return batch


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("bonus", [0.0, 0.25])
def test_a_step_is_that_of_the_algorithm(top: int, bonus: float) -> None:
    """Mania et al. 2018, algorithm 2, in float64: θ + α / (b σ_R) Σ (r⁺ − r⁻) δ over the best b directions."""
    more = {"agent__top": top, "agent__alive_bonus": bonus, "agent__learning_rate": 0.3, "env__num": 8}
    worker: Any = make_worker("CartPole-v1", "ars", **more)
    agent = worker.agent
    begin(worker, 0)
    for _ in range(2):
        batch = next_batch(worker)
        theta = flat(agent.trainable().values())
        deltas = [agent.direction(k).astype(np.float64) for k in range(4)]
        returns = (np.where(batch.real, batch.reward.double() - bonus, 0)).sum(0)
        positive, negative = returns[0::2], returns[1::2]
        best = np.argsort(-np.maximum(positive, negative), kind="stable")[: top or 4]
        deviation = np.std(np.concatenate([positive[best], negative[best]]))
        step = sum((positive[k] - negative[k]) * deltas[k] for k in best) * 0.3 / (len(best) * deviation)
        metrics = agent.learn(batch, worker.updater).metrics
        np.testing.assert_allclose(flat(agent.trainable().values()), theta + step, rtol=1e-4, atol=1e-5)
        assert float(metrics["perturbed_return"]) == pytest.approx(returns.mean())
    worker.close()


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_rows_play_the_policy_moved_along_a_direction_and_against_it(hidden: tuple[int, ...]) -> None:
    worker: Any = make_worker(TOY + "TargetEnv", "ars", network__hidden=hidden, agent__perturbation=0.4, env__num=6)
    agent, network = worker.agent, worker.agent.networks["actor"]
    begin(worker, 0)
    step, theta = worker.seat.env_step, flat(agent.trainable().values())
    noise = agent.make_noise(Rows.all(6), torch.Generator()).next()
    acted = agent.act(step, HiddenState(), noise)
    part = agent.act(
        step.rows(slice(2, 5)), HiddenState(), {ENVIRONMENT: noise[ENVIRONMENT][2:5]}
    )  # an alternating group
    mean = agent.act(step, HiddenState(), None).action
    agent.training = False  # a policy that is played, and not learned
    torch.testing.assert_close(agent.act(step, HiddenState(), noise).action, mean)
    torch.testing.assert_close(part.action["action"], acted.action["action"][2:5])
    assert acted.experience[ENVIRONMENT].tolist() == [0, 1, 2, 3, 4, 5]
    for row in range(6):
        moved = theta + (0.4 if row % 2 == 0 else -0.4) * agent.direction(row // 2).astype(np.float64)
        torch.nn.utils.vector_to_parameters(torch.tensor(moved, dtype=torch.float32), network.parameters())
        expected = agent.act(step, HiddenState(), None).action["action"][row]
        torch.testing.assert_close(acted.action["action"][row], expected, rtol=1e-4, atol=1e-5)
    worker.close()


def test_agents_of_one_environment_play_the_same_policy_and_share_a_return() -> None:
    """CueTeam with two agents, of which the second leaves a step early: its row is padding then."""
    team = "ludus.environments.agents_toy:CueTeam"
    more: dict[str, Any] = {"env__num": 4, "env__options": ("agents=2", "length=3"), "agent__learning_rate": 0.3}
    worker: Any = make_worker(team, "ars", **more)
    agent = worker.agent
    begin(worker, 0)
    batch, theta = next_batch(worker), flat(agent.trainable().values())
    environments = batch.experience[ENVIRONMENT][0]
    assert environments.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.real.sum(0).tolist() == [3, 2] * 4
    moved = agent.candidates(environments)
    for parameters in moved.values():
        torch.testing.assert_close(parameters[0::2], parameters[1::2])
        assert len(torch.unique(parameters.flatten(1), dim=0)) == 4
    returns = np.where(batch.real, batch.reward, 0).sum(0, dtype=np.float64).reshape(4, 2).mean(1)
    assert len(set(returns)) > 1
    weights = (returns[0::2] - returns[1::2]) / returns.std()
    step = 0.3 / 2 * sum(weight * agent.direction(k).astype(np.float64) for k, weight in enumerate(weights))
    agent.learn(batch, worker.updater)
    np.testing.assert_allclose(flat(agent.trainable().values()), theta + step, rtol=1e-4, atol=1e-5)
    worker.close()


def test_a_schedule_of_the_perturbation_takes_effect_at_an_update() -> None:
    """Rows of one update are compared with each other, so all play policies that were moved equally far."""
    worker: Any = make_worker(TOY + "TargetEnv", "ars", agent__perturbation="linear(0.4, 0.1)", env__num=4)
    agent = worker.agent
    begin(worker, 0)
    noise = agent.make_noise(Rows.all(4), torch.Generator()).next()[ENVIRONMENT]
    agent.schedule(0.0)
    before = agent.candidates(noise[:2])
    agent.schedule(0.5)
    torch.testing.assert_close(agent.candidates(noise[:2]), before)
    agent.learn(next_batch(worker), worker.updater)
    agent.candidates(noise)
    assert agent.perturbation == pytest.approx(0.25)
    worker.close()


@pytest.mark.parametrize("environment", ["CartPole-v1", TOY + "TargetEnv"])
@pytest.mark.parametrize("hidden", [(), (5,)])
def test_the_numpy_engine_acts_as_torch_does(environment: str, hidden: tuple[int, ...]) -> None:
    worker: Any = make_worker(environment, "ars", network__hidden=hidden, agent__perturbation=0.4)
    agent = worker.agent
    assert agent.use_numpy()
    begin(worker, 0)
    for _ in range(2):
        step, drawn = worker.seat.env_step, worker.seat.noise.next()
        for noise in (drawn, None):
            by_numpy = agent.act(step, HiddenState(), noise)
            engine, agent._numpy = agent._numpy, None
            by_torch = agent.act(step, HiddenState(), noise)
            agent._numpy = engine
            torch.testing.assert_close(by_numpy.action, by_torch.action, rtol=1e-5, atol=1e-6)
            assert list(by_numpy.experience) == list(by_torch.experience)
        agent.learn(next_batch(worker), worker.updater)
    worker.close()


def test_directions_are_normal_and_differ_by_update_and_number() -> None:
    worker: Any = make_worker("CartPole-v1", "ars", network__hidden=(64, 64))
    agent = worker.agent
    first, second = agent.direction(0), agent.direction(1)
    agent.updates += 1
    assert len({x.tobytes() for x in (first, second, agent.direction(0))}) == 3
    assert abs(first.mean()) < 0.1
    assert first.std() == pytest.approx(1, abs=0.05)
    worker.close()


def test_the_filter_is_fixed_while_rows_play_and_sees_their_observations_once() -> None:
    worker: Any = make_worker("CartPole-v1", "ars")
    statistics = worker.agent.normalizer.statistics["observation/observation"]
    begin(worker, 0)
    batch = next_batch(worker)
    assert float(statistics.count) == 0
    worker.agent.learn(batch, worker.updater)
    seen = batch.observation["observation"][:-1][batch.real].double()
    assert float(statistics.count) == len(seen)
    torch.testing.assert_close(statistics.mean, seen.mean(0))
    worker.close()


def test_what_it_cannot_search_is_refused_with_a_sentence() -> None:
    with pytest.raises(UserError, match=r"this one is recurrent; set network.net1d, network.body and network.head1d"):
        make_worker("CartPole-v1", "ars", network__net1d="gru")
    with pytest.raises(UserError, match=r"env.num is 3, but ars plays each direction forwards and backwards"):
        make_worker("CartPole-v1", "ars", env__num=3).settings.check_run_length()
    with pytest.raises(UserError, match=r"agent.top is 3, more than the 2 directions \(env.num / 2\)"):
        make_worker("CartPole-v1", "ars", agent__top=3).settings.check_run_length()
