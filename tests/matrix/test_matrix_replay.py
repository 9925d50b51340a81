"""Agents with a replay, as ``test_matrix`` has the others: every combination trains and is played, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from matrix_parts import NETWORKS, OBSERVATIONS, Choice, MatrixEnv, pairwise, refusal
from replay_parts import (
    CHOOSING,
    CHOOSING_ACTIONS,
    LEARNING,
    STEERING,
    STEERING_ACTIONS,
    factors,
    possible,
    settings_of,
)
from test_matrix import play

import ludus
from ludus.agents.acer import ACER
from ludus.agents.ddpg import DDPG
from ludus.agents.dqn import DQN
from ludus.agents.iql import IQL
from ludus.agents.pqn import PQN
from ludus.agents.sac import SAC
from ludus.agents.sac_discrete import DiscreteSAC
from ludus.core.batch import Batch, Learned
from ludus.core.noise import Noise
from ludus.networks.critic import ACTION

MASK = "action_mask"
SMALLEST = 1e-30  # a learning rate that moves nothing
Check = Callable[[Any, Batch], None]


def check_before(monkeypatch: pytest.MonkeyPatch, check: Check) -> list[int]:
    """Call ``check`` with agent and batch before every learning, which must move the networks; counts them."""
    seen: list[int] = []
    for kind in (DQN, DiscreteSAC, DDPG, SAC, ACER, PQN, IQL):

        def checked(self: Any, batch: Batch, updater: Any, learn: Any = kind.learn) -> Learned:
            seen.append(1)
            check(self, batch)
            before = {name: [p.clone() for p in network.parameters()] for name, network in self.networks.items()}
            learned: Learned = learn(self, batch, updater)
            for name in before if updater.learning_rate > SMALLEST else ():
                # a policy may wait for its turn, and has nothing to learn where masks leave it no choice
                waits = name == "actor" and (MASK in batch.observation or getattr(self.config, "policy_delay", 1) > 1)
                now = self.networks[name].parameters()
                assert waits or not all(map(torch.equal, before[name], now)), f"{name} stays as it was"
            assert all(torch.isfinite(x) for x in learned.metrics.values()), learned.metrics
            if getattr(self.config, "prioritized", False):
                assert learned.priority is not None
                assert learned.priority.shape == batch.index.shape
                assert bool((torch.isfinite(learned.priority) & (learned.priority >= 0)).all())
            return learned

        monkeypatch.setattr(kind, "learn", checked)
    return seen


def masks_are_kept(agent: Any, batch: Batch) -> None:
    """What was done was allowed then; steered actions lie in the range that critics know."""
    real = batch.real
    if MASK in batch.observation:
        (action,) = batch.action.values()
        allowed = batch.observation[MASK][: len(action)].gather(-1, action.unsqueeze(-1)).squeeze(-1)
        assert bool((allowed[real] == 1).all())
    if isinstance(agent, DDPG):
        assert all(float(x.abs().max()) <= 1 for x in batch.action.values())


def train_and_play(choice: Choice, folder: Path, learned: list[int]) -> None:
    """Some updates, which move every network; an evaluation, a saved run; then its policy."""
    environment, agent, settings = settings_of(choice, folder)
    result = ludus.train(environment, agent, nb_step=36, preset="none", settings=settings)
    assert len(learned) >= 2
    assert result.evaluation is not None
    assert len(result.evaluation.returns) == 2
    play(result.load(), MatrixEnv(choice[1], choice[2]))


TOGETHER = ("simple", "vector")  # processes take their time


CORE = ("dqn", "rainbow", "r2d2", "discrete_sac", "acer", "pqn", "ddpg", "td3", "sac")


def soon(choice: Choice) -> bool:
    """Other agents than these see two kinds of observation with two networks; the slow tests show them all."""
    network, observation, _, learning, *_ = choice
    known = observation in ("vector", "nested dict") and network in ("separate", "lstm body")
    return possible(choice) and (learning in CORE or known)


SAMPLE = [
    *pairwise(0, factors(CHOOSING, CHOOSING_ACTIONS, TOGETHER), soon),
    *pairwise(0, factors(STEERING, STEERING_ACTIONS, TOGETHER), soon),
]


@pytest.mark.parametrize("choice", SAMPLE, ids=lambda choice: "-".join(map(str, choice)))
def test_every_pair_of_choices_trains_and_plays(
    choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_and_play(choice, tmp_path, check_before(monkeypatch, masks_are_kept))


STILL: dict[str, dict[str, Any]] = {  # agents that go on as they began; without noise, they act by observations alone
    "dqn": {"agent.epsilon_schedule": "constant", "agent.epsilon_start": 0.0},
    "discrete_sac": {},
    "ddpg": {},
    "sac": {},
    "acer": {"agent.normalize_observation": False},
}
FILLED = 12  # updates after which a replay holds nothing from before the first, when actions are random


def policy_is_replayed(agent: Any, batch: Batch) -> None:
    """What the policy says of the batch, from the hidden state that it starts with, is what acting did."""
    if isinstance(agent, DDPG | SAC | DiscreteSAC) and agent.updates < FILLED:
        return
    length, real = len(batch.reward), batch.real
    observation = {name: x[:length] for name, x in batch.observation.items()}
    seen, first = agent.preprocess(observation), batch.first[:length]
    with torch.no_grad():
        if isinstance(agent, ACER):
            outputs, _ = agent.outputs(observation, batch.state, first)
            said = agent.policy.distribution(outputs, {}, observation)[agent._logits].log_softmax(-1)
            torch.testing.assert_close(said[real], batch.experience["log_policy"][real], rtol=1e-4, atol=1e-5)
            return
        outputs, _ = agent.run(agent.acting[0], seen, batch.state, first)
    if isinstance(agent, DDPG | SAC):
        said = outputs["policy"].tanh() if isinstance(agent, DDPG) else outputs["policy"].chunk(2, -1)[0]
        torch.testing.assert_close(said[real], agent.flat.join(batch.action)[real], rtol=1e-4, atol=1e-5)
    else:
        scores = outputs["q" if isinstance(agent, DQN) else "policy"]
        if MASK in batch.observation:
            scores = scores.masked_fill(observation[MASK] == 0, -torch.inf)
        (action,) = batch.action.values()
        short = scores.amax(-1) - scores.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        assert float(short[real].max()) < 1e-5


STEADY = ("separate", "lstm body", "own network")
HALVED = [*itertools.product(STILL, STEADY, ["alternate"])]
SOON = [*itertools.product(STILL, STEADY, ["simple"]), HALVED[1]]
LATER = [
    pytest.param(*choice, marks=pytest.mark.slow) for choice in HALVED if choice not in SOON
]  # processes take their time


@pytest.mark.parametrize(("learning", "network", "backend"), [*SOON, *LATER])
def test_what_is_learned_from_is_what_acting_saw(
    learning: str, network: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = check_before(monkeypatch, policy_is_replayed)
    drawn = Noise.next
    monkeypatch.setattr(Noise, "next", lambda self: {name: torch.zeros_like(x) for name, x in drawn(self).items()})
    action = "boxes" if learning in ("ddpg", "sac") else "discrete masked"
    environment, agent, settings = settings_of((network, "tuple", action, learning, backend, False), tmp_path)
    settings |= STILL[learning] | {"agent.learning_rate": SMALLEST, "evaluation.episodes": 1}
    settings |= {} if learning == "acer" else {"agent.updates_per_step": 0.5}
    ludus.train(environment, agent, nb_step=60, preset="none", settings=settings)
    assert len(learned) > (4 if learning == "acer" else FILLED + 2)


NO_CHOICE = {
    "multidiscrete": "action (categorical",
    "multibinary": "action (binary",
    "tanh": "action (continuous",
    "mixed masked": "hand/0 (categorical",
}
NO_BOX = {
    "discrete": '"action" is a choice of 4',
    "multidiscrete": '"action" is 4 choices',
    "multibinary": '"action" is 3 switches',
    "mixed masked": '"hand/0" is 2 choices',
    "gaussian": 'two finite bounds, but "action"',
}
REFUSED_ACTIONS = [
    *((agent, kind, said) for agent in ("dqn", "r2d2", "discrete_sac", "acer") for kind, said in NO_CHOICE.items()),
    *((agent, kind, said) for agent in ("ddpg", "td3", "sac") for kind, said in NO_BOX.items()),
]


@pytest.mark.parametrize(("agent", "action", "said"), REFUSED_ACTIONS)
def test_actions_that_an_agent_does_not_have_are_refused(agent: str, action: str, said: str, tmp_path: Path) -> None:
    network = "lstm body" if agent == "r2d2" else "separate"
    changes = {"agent.targets": "retrace"} if agent == "acer" else {}
    assert_refused((network, "vector", action, agent, "simple", False), changes, said, tmp_path)


@pytest.mark.parametrize("action", NO_CHOICE)
@pytest.mark.parametrize("network", ["separate", "lstm body"])
def test_acer_learns_other_actions_than_one_discrete(
    action: str, network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = check_before(monkeypatch, lambda agent, batch: None)
    train_and_play((network, "nested dict", action, "acer", "simple", False), tmp_path, learned)


NO_WARMTH = {"agent.burn_in": 0, "agent.overlap": 0}
MEMORY = "A recurrent network learns from sequences: set agent.sequence"
EXPECTED = "agent.sequence works on expected values; set agent.values to expected"
NOISY = 'which custom networks ("matrix_parts:Joined") do not have'
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    **{
        f"{agent}, memory without sequences": (agent, "lstm body", {"agent.sequence": 0, **NO_WARMTH}, MEMORY)
        for agent in ("dqn", "discrete_sac", "td3", "sac")
    },
    **{f"{agent}, sequences": (agent, "lstm body", {}, EXPECTED) for agent in ("c51", "qr_dqn", "iqn", "rainbow")},
    **{
        f"{agent}, sequences without memory": (
            agent,
            "separate",
            {"agent.sequence": 4},
            "is not recurrent and needs no sequences",
        )
        for agent in ("discrete_sac", "ddpg", "sac")
    },
    "r2d2, sequences without memory": (
        "r2d2",
        "separate",
        {"agent.sequence": 4, "network.body": "identity1d"},
        "is not recurrent and needs no sequences",
    ),
    "noisy layers of one's own": ("rainbow", "own module", {}, NOISY),
    "burn-in without sequences": ("dqn", "separate", {"agent.burn_in": 2}, "agent.burn_in and agent.overlap apply to"),
    "munchausen and double": (
        "munchausen_dqn",
        "separate",
        {"agent.double": True},
        "agent.munchausen and agent.double",
    ),
    "short replay": ("sac", "lstm body", {"agent.replay": 23}, "too few for sequences of 6 steps; raise it to 24"),
    "large batch": ("dqn", "separate", {"agent.batch_size": 31}, "agent.batch_size is 31, more than agent.replay, 30"),
    "long warm-up": ("td3", "separate", {"agent.warmup": 31}, "agent.warmup is 31, more than agent.replay, 30"),
    "no goals": ("sac", "separate", {"agent.hindsight": 0.8}, 'no observation "achieved_goal"'),
    "short unrolls": ("acer", "separate", {"agent.replay": 11}, "agent.replay is 11, less than one rollout of 12"),
    "compiled lstm": ("sac", "lstm body", {"compile": "on"}, "compile is on"),
    "bounds of atoms": ("c51", "separate", {"agent.v_min": 10}, "agent.v_min is 10, but must be less"),
    "noise that overshoots": ("ddpg", "separate", {"agent.noise_theta": 1.5}, "the noise overshoots its mean"),
    "a memory without target networks": ("crossq", "lstm body", {}, "agent.target_networks is off, which needs"),
    "all quantiles dropped": (
        "tqc",
        "separate",
        {"agent.dropped_quantiles": 5},
        "agent.dropped_quantiles is 5, but must",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_together_are_refused(name: str, tmp_path: Path) -> None:
    agent, network, changes, said = REFUSED[name]
    action = "tanh" if agent in STEERING else "discrete"
    assert_refused((network, "vector", action, agent, "simple", False), changes, said, tmp_path)


def test_an_observation_called_as_what_critics_judge_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBSERVATIONS, "clash", spaces.Dict({ACTION: spaces.Box(-1, 1, (2,), np.float32)}))
    assert_refused(
        ("separate", "clash", "tanh", "sac", "simple", False), {}, f'observation is called "{ACTION}"', tmp_path
    )


def assert_refused(choice: Choice, changes: dict[str, Any], said: str, folder: Path) -> str:
    environment, agent, settings = settings_of(choice, folder)
    return refusal(environment, agent, settings | changes, said, folder)


@pytest.mark.slow
@pytest.mark.timeout(1_800)  # dozens of runs each
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("learning", LEARNING)
def test_the_whole_product_trains_and_plays(
    learning: str, observation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = check_before(monkeypatch, masks_are_kept)
    actions = CHOOSING_ACTIONS if learning in CHOOSING else STEERING_ACTIONS
    for choice in itertools.product(NETWORKS, [observation], actions, [learning], TOGETHER, (False, True)):
        if possible(choice):
            learned.clear()
            train_and_play(choice, tmp_path, learned)


HALVES = [
    *pairwise(1, factors(CHOOSING, CHOOSING_ACTIONS, ("alternate",)), possible),
    *pairwise(1, factors(STEERING, STEERING_ACTIONS, ("alternate",)), possible),
]


@pytest.mark.slow
@pytest.mark.parametrize("choice", HALVES, ids=lambda choice: "-".join(map(str, choice)))
def test_every_pair_trains_in_two_halves(choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_and_play(choice, tmp_path, check_before(monkeypatch, masks_are_kept))
