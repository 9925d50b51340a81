"""Settings of single networks: ``network.critic.hidden``, ``network.actor.sees``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import TOY, make_worker, train

import ludus
from ludus.agents import AGENTS
from ludus.containers.build import build_agent
from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.spec import Spec, Specs
from ludus.settings.ineffective import refuse_ineffective
from ludus.settings.settings import from_flat, resolve_settings, to_flat

LUCK = TOY + "LuckEnv"
OBSERVATION: Specs = {"a": Spec((3,), "float32"), "b": Spec((2,), "float32")}
ACTIONS: dict[str, Specs] = {
    "choice": {"action": Spec((), "int64", "categorical", sizes=(3,))},
    "amount": {"action": Spec((2,), "float32", low=-1.0, high=1.0)},
}


def first_layers(worker: Any) -> dict[str, tuple[int, ...]]:
    """The shape of the first layer of each network."""
    networks = worker.agent.networks.items()
    return {name: tuple(next(p for p in network.parameters() if p.dim() > 1).shape) for name, network in networks}


def test_settings_of_a_single_network() -> None:
    worker = make_worker("CartPole-v1", network__critic__hidden=(16, 4))
    assert first_layers(worker) == {"actor": (8, 4), "critic": (16, 4)}
    assert worker.settings.network_for("critic").hidden == (16, 4)
    worker.close()


def test_sees_selects_observations() -> None:
    worker = make_worker(LUCK, network__actor__sees=("sig*",))
    assert list(worker.agent.networks["actor"].inputs) == ["signal"]
    assert set(worker.agent.networks["critic"].inputs) == {"signal", "luck"}
    worker.close()
    worker = make_worker(LUCK, "discrete_sac", network__actor__sees=("signal",))
    assert list(worker.agent.networks["actor"].inputs) == ["signal"]
    worker.close()


def test_settings_of_single_networks_are_saved(tmp_path: Path) -> None:
    own: dict[str, Any] = {"network__actor__sees": ("signal",), "network__critic__hidden": (16,)}
    result = train(tmp_path, LUCK, **own)
    policy = ludus.load(result.run, "latest")
    assert policy.settings.per_network == {"actor": {"sees": ("signal",)}, "critic": {"hidden": (16,)}}
    assert from_flat(to_flat(policy.settings)) == policy.settings
    torch.testing.assert_close(
        policy.agent.networks["critic"].state_dict(),
        ludus.load(result.run, "latest").agent.networks["critic"].state_dict(),
    )
    assert ludus.resume(result.run, nb_step=150).steps >= 150


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"network.critc.hidden": (8,)}, r"network.critic.hidden"),
        ({"network.critic.shared": "yes"}, "network.critic.shared"),
        ({"network.actor.sees": ("sgnal",)}, r'network.actor.sees has "sgnal".*Did you mean "?signal'),
        ({"network.actor.sees": ()}, "network.actor.sees is empty"),
        ({"network.shared": "yes", "network.critic.hidden": (8,)}, "network.critic is set, but .* actor_critic"),
        ({"network.critic.hidden": (0,)}, "network.critic.hidden has a layer of 0"),
    ],
)
def test_mistakes_are_user_errors(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        ludus.train(LUCK, "ppo", preset="none", nb_step=100, settings={"runs": str(tmp_path), "quiet": True, **given})


def test_an_ineffective_flag_of_a_single_network_is_refused() -> None:
    resolved = resolve_settings("CartPole-v1", "ppo", "none", overrides={"network.critic.lstm_size": 8})
    with pytest.raises(UserError, match=r"network.critic.lstm_size is 8 \(flag\), but would do nothing"):
        refuse_ineffective(resolved, OBSERVATION, ACTIONS["choice"])
    fits = {"network.critic.lstm_size": 8, "network.critic.body": "lstm"}
    refuse_ineffective(resolve_settings("CartPole-v1", "ppo", "none", overrides=fits), OBSERVATION, ACTIONS["choice"])


def test_trunks_with_different_settings_are_not_shared() -> None:
    image: Specs = {"image": Spec((3, 64, 64), "uint8", low=0, high=255)}
    for own, names in (({}, {"actor_critic"}), ({"network.critic.hidden": (8,)}, {"actor", "critic"})):
        settings = resolve_settings("CartPole-v1", "ppo", "none", overrides=own).settings
        agent: Any = build_agent(settings, image, ACTIONS["choice"], torch.device("cpu"))
        assert set(agent.networks) == names


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_names_its_networks(name: str) -> None:
    kind = resolve(name, AGENTS, "agent")
    config = resolve_settings("CartPole-v1", name, "none").settings.agent
    asked: set[str] = set()
    for action in ACTIONS.values():
        for shared in (False, True):
            try:
                asked |= set(kind.requirements(OBSERVATION, action, config, shared))
            except UserError:  # not for this kind of action
                continue
    assert asked
    assert asked <= set(kind.network_names)
