"""DDPG, TD3 and HDDPG: the same numbers as Stable-Baselines3, exploration, sequences, what may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from actor_setup import POINT, Peer, Point, assert_same, copy_layers, layers_of, make_worker, random_batch, scalars

from ludus.containers.loop import begin, collect, improve
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import EnvStep
from ludus.exploration.action_noise import OU
from ludus.networks.critic import ACTION


@pytest.mark.parametrize("name", ["ddpg", "td3"])
def test_updates_equal_those_of_stable_baselines3(name: str) -> None:
    """Four updates with copied weights and the same random numbers: losses, gradients, weights, targets."""
    import stable_baselines3

    peer = Peer({"ddpg": stable_baselines3.DDPG, "td3": stable_baselines3.TD3}[name])
    if name == "ddpg":
        peer.model.target_policy_noise = 0.0  # DDPG has none; there it is 0.1
    worker = make_worker(POINT, name)
    agent: Any = worker.agent
    for part in ("actor", "critic"):
        copy_layers(layers_of(agent.networks[part]), peer.layers(part == "critic"))
    agent.target.update(1.0)
    (observed,) = agent.observation
    for update in range(4):
        batch = random_batch(observed, 16, seed=update)
        action = batch.action["action"][0]
        torch.manual_seed(update)
        normal = action.clone().normal_(0, 1).unsqueeze(0)
        agent.draw = lambda batch, *shape, normal=normal: normal
        ours = agent.learn(batch, worker.updater).metrics
        torch.manual_seed(update)
        theirs = peer.learn(batch, action)
        assert float(ours["loss/critic"]) == pytest.approx(theirs["critic_loss"], rel=1e-5)
        stepped = ["critic"]
        if "actor_loss" in theirs:
            assert float(ours["loss/actor"]) == pytest.approx(theirs["actor_loss"], rel=1e-5, abs=1e-6)
            stepped.append("actor")
        for part in stepped:
            assert_same(layers_of(agent.networks[part], "grad"), peer.layers(part == "critic", "grad"))
        for part in ("actor", "critic"):
            assert_same(layers_of(agent.networks[part]), peer.layers(part == "critic"))
            assert_same(layers_of(agent.target.networks[part]), peer.layers(part == "critic", target=True))
    assert "actor_loss" in theirs
    worker.close()


def make(name: str = "td3", **changes: Any) -> tuple[Any, Any]:
    """An agent on ``Point`` and its updater; targets differ from what they follow."""
    worker = make_worker(POINT, name, **changes)
    agent: Any = worker.agent
    for p in agent.target.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=agent.generator))
    return agent, worker.updater


def env_step(agent: Any, rows: int = 4, first: bool = False, seed: int = 0) -> EnvStep:
    g = torch.Generator().manual_seed(seed)
    observation = {name: torch.randn(rows, *spec.shape, generator=g) for name, spec in agent.observation.items()}
    flags = [torch.full((rows,), value) for value in (False, False, first)]
    return EnvStep(observation, torch.zeros(rows), *flags, ~flags[-1])


def test_random_at_first_then_near_the_policy_and_greedy_without_noise() -> None:
    agent, _ = make(agent__noise="clipped_normal", agent__noise_sigma=0.02, agent__noise_clip=2.0)
    noise = agent.make_noise(Rows.all(4), torch.Generator().manual_seed(0)).next()
    step, state = env_step(agent), agent.initial_state(4)
    greedy = agent.act(step, state).action["action"]
    assert agent.act(step, state, noise).action["action"].equal(noise["random"])
    agent.updates = 1
    near = agent.act(step, state, noise).action["action"]
    assert 0 < (near - greedy).abs().max() <= 0.04 + 1e-6
    assert agent.act(step, state).action["action"].equal(greedy)


def test_random_actions_fill_the_box_evenly() -> None:
    agent, _ = make()
    drawn = torch.stack(
        [agent.make_noise(Rows.all(500), torch.Generator().manual_seed(s)).next()["random"] for s in range(20)]
    )
    assert drawn.abs().max() <= 1
    assert abs(float(drawn.mean())) < 4 * (1 / 3 / drawn.numel()) ** 0.5
    assert abs(float(drawn.square().mean()) - 1 / 3) < 4 * (4 / 45 / drawn.numel()) ** 0.5


def test_numpy_acts_as_torch_does() -> None:
    for name in ("ddpg", "td3"):
        agent, _ = make(name)
        agent.updates = 1
        step, state = env_step(agent), agent.initial_state(4)
        for noise in (None, agent.make_noise(Rows.all(4), torch.Generator().manual_seed(0)).next()):
            agent._numpy = None
            by_torch = agent.act(step, state, noise).action
            assert agent.use_numpy()
            torch.testing.assert_close(agent.act(step, state, noise).action, by_torch, rtol=1e-5, atol=1e-6)
    assert not make(agent__noise="parameter")[0].use_numpy()


def test_drifting_noise_lives_in_the_hidden_state_and_ends_with_the_episode() -> None:
    agent, _ = make(agent__noise="ornstein_uhlenbeck", agent__noise_sigma=0.3)
    agent.updates = 1
    source = agent.make_noise(Rows.all(4), torch.Generator().manual_seed(0))
    state = agent.initial_state(4)
    assert state[OU].equal(torch.zeros(4, 3))
    for _ in range(3):
        state = agent.act(env_step(agent), state, noise := source.next()).state
    begun = agent.act(env_step(agent, first=True), state, noise).state
    torch.testing.assert_close(begun[OU], 0.3 * noise["noise"])
    assert not state[OU].equal(begun[OU])


def test_noise_on_parameters_acts_and_adapts_but_not_in_an_evaluation() -> None:
    agent, updater = make(agent__noise="parameter", agent__noise_sigma=0.2)
    agent.updates = 1
    step, state = env_step(agent, first=True), HiddenState()
    drawn = agent.make_noise(Rows.all(4), torch.Generator().manual_seed(0))
    other, noise = drawn.next(), drawn.next()
    greedy, first, second = (agent.act(step, state, x).action["action"] for x in (None, other, noise))
    assert not first.equal(greedy)
    assert not first.equal(second)
    agent.eval()
    assert agent.act(step, state, noise).action["action"].equal(greedy)
    agent.train()
    acting = [p.clone() for p in agent.parameter_noise.perturbed.parameters()]
    for _ in range(50):
        agent.learn(random_batch("observation", 16), updater)
    assert float(agent.parameter_noise.sigma) in (pytest.approx(0.2 * 1.01), pytest.approx(0.2 / 1.01))
    assert all(a.equal(b) for a, b in zip(acting, agent.parameter_noise.perturbed.parameters(), strict=True))


def test_noise_falls_to_its_end() -> None:
    agent, _ = make(agent__noise="parameter", agent__noise_sigma=0.2, agent__noise_sigma_end=0.1)
    assert agent.schedule(0.5) == {"noise_sigma": pytest.approx(0.15)}
    assert agent.parameter_noise.target == agent.noise.sigma == pytest.approx(0.15)


def test_bad_news_count_less_in_hddpg() -> None:
    agent, _ = make("hddpg", agent__hysteretic=0.25, agent__prioritized=True)
    batch = random_batch("observation", 64)
    losses, metrics = agent.critic_loss(agent.prepare(batch))
    with torch.no_grad():
        value = agent.target_value(batch, batch.observation)
        q = agent.q(
            {"observation": batch.observation["observation"][:1]}, batch.action["action"], batch.state, batch.first[:1]
        )
    error = (batch.reward + batch.discount * value - q[..., 0]).double().numpy()[0]
    assert 0 < (error < 0).sum() < 64
    wanted = np.mean(np.where(error < 0, 0.25, 1.0) * error**2)
    assert scalars(losses)["critic"] == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(metrics["priority"].numpy(), np.abs(error), rtol=1e-4, atol=1e-6)


def transitions_of(batch: Batch, n: int) -> Batch:
    """Each step of sequences as a transition of its own, n-step sums and states included, by definition."""
    time, rows = batch.reward.shape
    found = []
    for t in range(time):
        for row in range(rows):
            total, discount, k = 0.0, 1.0, t
            while True:
                total += discount * float(batch.reward[k, row])
                discount *= float(batch.discount[k, row])
                k += 1
                if k == t + n or k == time or batch.terminated[k - 1, row] or batch.truncated[k - 1, row]:
                    break
            found.append((t, k, row, total, discount))
    t, k, row, total, discount = zip(*found, strict=True)
    seen = batch.observation["observation"]
    window = {}
    if n > 1:
        passed = torch.stack([seen[[min(x + i, time) for x in t], list(row)] for i in range(1, n)])
        powers = [[0.99**i * (x + i < y) for x, y in zip(t, k, strict=True)] for i in range(1, n)]
        window = {"observation/observation": passed, "discount": torch.tensor(powers)}
    flat = {"action": batch.action["action"].flatten(0, 1)[None]}
    return replace(
        batch,
        observation={"observation": torch.stack([seen[list(t), list(row)], seen[list(k), list(row)]])},
        first=torch.zeros(2, time * rows, dtype=torch.bool),
        action=flat,
        reward=torch.tensor([total]),
        discount=torch.tensor([discount]),
        real=torch.ones(1, time * rows, dtype=torch.bool),
        weight=torch.ones(1, time * rows),
        window=window,
    )


@pytest.mark.parametrize("name", ["td3", "ddpg"])
@pytest.mark.parametrize("n", [1, 3, 9])
def test_sequences_teach_what_their_transitions_teach(name: str, n: int) -> None:
    """With a network without memory both are the same; n-step sums are those of the definition."""
    kept = []
    for sequence in (5, 0):
        agent, _ = make(name, agent__sequence=sequence, agent__n_step=n, agent__target_noise=0.0)
        batch = random_batch("observation", 8, 5, seed=2)
        batch.truncated[2, 3] = True
        batch = agent.prepare(batch if sequence else transitions_of(batch, n))
        kept.append(scalars(agent.compute_loss(batch)[0]))
    assert kept[0] == pytest.approx(kept[1], rel=1e-5)


def test_importance_weights_weigh_and_do_not_cut_returns() -> None:
    """An n-step sum that is longer than the sequence passes over every step, whatever the weights are."""
    agent, _ = make(agent__sequence=5, agent__n_step=9, agent__target_noise=0.0)
    batch = random_batch("observation", 8, 5, seed=2)
    plain, weighed = (
        scalars(agent.compute_loss(agent.prepare(replace(batch, weight=w * batch.weight)))[0]) for w in (1.0, 0.5)
    )
    assert weighed == pytest.approx({name: 0.5 * loss for name, loss in plain.items()}, rel=1e-5)


@pytest.mark.parametrize("body", ["identity1d", "lstm"])
def test_steps_that_never_were_do_not_teach(body: str) -> None:
    changes = {"network__body": body, "agent__sequence": 6, "agent__burn_in": 2, "agent__prioritized": True}
    kept = []
    for spoil in (0.0, 50.0):
        agent, updater = make(**changes)
        batch = random_batch("observation", 8, 8, seed=2)
        batch.first[5, :4] = True  # the step from 4 to 5 is a reset's
        batch.real[4, :4] = False
        batch.reward[4, :4] = spoil
        batch.action["action"][4, :4] = 0.0 if body == "lstm" else spoil / 50
        batch = replace(batch, state=agent.zeros(("actor",), 8))
        learned = agent.learn(batch, updater)
        kept.append((learned.priority, torch.cat([p.flatten() for p in agent.networks.parameters()])))
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=0)


def test_a_memory_is_burned_in_to_where_acting_had_it() -> None:
    """The actor's state after the burn-in is what acting has after these steps, from the stored state on."""
    agent, _ = make(network__body="lstm", agent__sequence=4, agent__burn_in=3)
    batch = random_batch("observation", 4, 7)
    batch.first[1, 2] = True
    start = agent.zeros(("actor",), 4).map(lambda x: x + 0.3)
    state = start
    for t in range(3):
        step = EnvStep(
            {"observation": batch.observation["observation"][t]}, *[torch.zeros(4)] * 3, batch.first[t], ~batch.first[t]
        )
        state = agent.act(step, state).state
    ready = agent.prepare(replace(batch, state=start))
    assert state.keys() == {name for name in ready.state if name.startswith("actor/")}
    for name, x in state.items():
        torch.testing.assert_close(ready.state[name], x)
    assert len(ready.reward) == 4
    assert {name.split("/")[0] for name in ready.state} == {"actor", "critic", "target"}
    longer = agent.prepare(replace(batch, state=start, action={"action": -batch.action["action"]}))
    critic = next(name for name in ready.state if name.startswith("critic/"))
    assert longer.state[critic].equal(ready.state[critic])  # whatever was done: it remembers what was seen


def test_a_state_dict_keeps_the_turn_of_the_policy() -> None:
    """After an odd number of updates the next one moves the policy, in a copy as well."""
    agent, updater = make()
    agent.learn(random_batch("observation", 16), updater)
    copy, its_updater = make()
    copy.load_state_dict(agent.state_dict())
    its_updater.load_state_dict(updater.state_dict())
    copy.generator.set_state(agent.generator.get_state())
    before = agent.networks["actor"].projections["policy"].weight.clone()
    for one, by in ((agent, updater), (copy, its_updater)):
        one.learn(random_batch("observation", 16, seed=1), by)
    assert not agent.networks["actor"].projections["policy"].weight.equal(before)
    for ours, other in zip(agent.parameters(), copy.parameters(), strict=True):
        assert ours.equal(other)


class Limbs(Point):
    """Several actions, one of them a matrix."""

    def __init__(self) -> None:
        super().__init__()
        box = gymnasium.spaces.Box
        self.action_space = gymnasium.spaces.Dict(
            {"arm": box(-2, 3, (2, 2), np.float32), "leg": box(0, 1, (3,), np.float32)}
        )


@pytest.mark.parametrize("name", ["td3", "sac"])
def test_several_actions_of_any_shape_are_one_vector(name: str) -> None:
    worker = make_worker(f"{__name__}:Limbs", name)
    agent: Any = worker.agent
    assert agent.flat.size == 7
    flat = torch.arange(14.0).reshape(2, 7)
    parts = agent.flat.split(flat)
    assert {key: x.shape for key, x in parts.items()} == {"arm": (2, 2, 2), "leg": (2, 3)}
    assert agent.flat.join({key: x.unsqueeze(0) for key, x in parts.items()}).equal(flat.unsqueeze(0))
    begin(worker, 0)
    for _ in range(3):
        collect(worker)
        metrics, _ = improve(worker)
    assert all(torch.isfinite(x) for x in metrics.values())
    worker.close()


class Unbounded(Point):
    """An action without bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Named(Point):
    """An observation with a name that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Dict({ACTION: self.observation_space})


def test_what_it_cannot_act_in_is_refused() -> None:
    with pytest.raises(
        UserError, match=r'^td3 needs continuous actions, but "action" is a choice of 2: use discrete_sac'
    ):
        make_worker("CartPole-v1", "td3")
    with pytest.raises(UserError, match=r"^ddpg needs actions with two finite bounds"):
        make_worker(f"{__name__}:Unbounded", "ddpg")
    with pytest.raises(UserError, match=r'^An observation is called "taken_action"'):
        make_worker(f"{__name__}:Named", "td3")
    with pytest.raises(UserError, match=r"agent\.sequence"):
        make_worker(POINT, "td3", network__body="lstm")


@pytest.mark.parametrize(
    ("key", "value"), [("hysteretic", 1.5), ("policy_delay", 0), ("critics", 0), ("tau", 0.0), ("noise_sigma", -1.0)]
)
def test_values_that_cannot_train_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"agent.{key} is"):
        make_worker(POINT, "td3", **{f"agent__{key}": value})
    with pytest.raises(UserError, match=r"agent.noise_sigma is 0"):
        make_worker(POINT, "td3", agent__noise="parameter", agent__noise_sigma=0.0)


def test_workers_draw_the_perturbed_copy_themselves() -> None:
    agents: list[Any] = [make_worker("Pendulum-v1", "ddpg", agent__noise="parameter").agent for _ in range(2)]
    learner, worker = agents
    worker.parameter_noise.resample(torch.Generator().manual_seed(1))
    before = [p.clone() for p in worker.parameter_noise.perturbed.parameters()]
    with torch.no_grad():
        for p in learner.networks["actor"].parameters():
            p.add_(1)
    worker.load_acting_state(learner.acting_state())
    for ours, theirs in zip(worker.networks["actor"].parameters(), learner.networks["actor"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for p, was in zip(worker.parameter_noise.perturbed.parameters(), before, strict=True):
        assert torch.equal(p, was)
