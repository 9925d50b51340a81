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
TEAM: tuple[Specs, Specs] = (
    {
        **{f"{agent}/observation": Spec((3,), "float32") for agent in ("one", "two")},
        **{f"reward/{agent}": Spec((), "float32", result_of=agent) for agent in ("one", "two")},
        "state": Spec((4,), "float32"),
    },
    {agent: Spec((), "int64", "categorical", sizes=(3,)) for agent in ("one", "two")},
)


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
        ({"network.actor.sees": ("*", "!*")}, "network.actor.sees .* leaves out every observation"),
        ({"network.actor.sees": ("*", "!luk")}, r'network.actor.sees has "!luk".*Did you mean "?luck'),
        ({"network.shared": "yes", "network.critic.hidden": (8,)}, "network.critic is set, but .* actor_critic"),
        ({"network.critic.hidden": (0,)}, "network.critic.hidden has a layer of 0"),
        ({"network.sources": ("sgnal=mlp",)}, r'network.sources has "sgnal", but .*Did you mean "?signal'),
        ({"network.sources": ("signal",)}, "network.sources has .* write an observation and its source"),
        ({"network.sources": ("signal=mpl",)}, r'network.sources signal "mpl".*Did you mean "mlp"'),
        ({"network.share": ("sg*",)}, r'network.share has "sg\*", but the observations are'),
        ({"network.share": ("sig*",)}, r'network.share has "sig\*", which matches only the observation signal'),
        ({"network.share": ("*",)}, r'"luck" and "signal" share a source, but their shapes are'),
        ({"network.embedding": 0}, "network.embedding is 0"),
        ({"network.head3d": "conv_lstm"}, r'network.head3d is "conv_lstm", but no output has rank 3'),
        ({"network.critic.head2d": "entity_mlp"}, r"network.critic.head2d .* the outputs are value \(1,\); leave"),
        ({"network.shared": "sources"}, 'network.shared is "sources", but no source has parameters'),
        (
            {"network.shared": "sources", "network.critic.hidden": (8,)},
            r"network.critic is set, but .* actor_critic \(network.shared is sources\)",
        ),
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


def test_sees_can_leave_observations_out() -> None:
    worker = make_worker(LUCK, network__actor__sees=("*", "!luck"))
    assert list(worker.agent.networks["actor"].inputs) == ["signal"]
    worker.close()


@pytest.mark.parametrize("sees", [("*",), ("one/*",)])
def test_networks_of_single_agents_have_no_say_in_what_they_see(sees: tuple[str, ...]) -> None:
    resolved = resolve_settings("CartPole-v1", "qmix", "none", overrides={"network.q.sees": sees})
    with pytest.raises(UserError, match=r"network.q.sees .* each agent gets its own observations"):
        refuse_ineffective(resolved, *TEAM)
    resolved = resolve_settings("CartPole-v1", "qmix", "none", overrides={"network.mixer.sees": sees})
    refuse_ineffective(resolved, *TEAM)


def test_trunks_with_different_settings_are_not_shared() -> None:
    image: Specs = {"image": Spec((3, 64, 64), "uint8", low=0, high=255)}
    for own, names in (({}, {"actor_critic"}), ({"network.critic.hidden": (8,)}, {"actor", "critic"})):
        settings = resolve_settings("CartPole-v1", "ppo", "none", overrides=own).settings
        agent: Any = build_agent(settings, image, ACTIONS["choice"], torch.device("cpu"))
        assert set(agent.networks) == names


@pytest.mark.parametrize("shared", ["sources", "body"])
def test_partly_shared_networks_are_one_network_with_branches(shared: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"network__shared": shared, "network__net1d": "gru", "network__body": "mlp"}
    result = train(tmp_path, LUCK, **own, network__head1d="mlp")
    pieces = set(ludus.load(result.run, "latest").agent.networks["actor_critic"].pieces)
    bodies = {"actor/body", "critic/body"} if shared == "sources" else {"body"}
    assert pieces == {"source/signal", "source/luck", "actor/head1d", "critic/head1d"} | bodies
    assert ludus.resume(result.run, nb_step=150).steps >= 150


@pytest.mark.parametrize("agent", ["dqn", "discrete_sac"])
def test_agents_that_cannot_share_a_part_say_so(agent: str) -> None:
    resolved = resolve_settings("CartPole-v1", agent, "none", overrides={"network.shared": "sources"})
    with pytest.raises(UserError, match="cannot share a trunk"):
        refuse_ineffective(resolved, OBSERVATION, ACTIONS["choice"])


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_names_its_networks(name: str) -> None:
    kind = resolve(name, AGENTS, "agent")
    config = resolve_settings("CartPole-v1", name, "none").settings.agent
    asked: set[str] = set()
    for observation, action in (*((OBSERVATION, action) for action in ACTIONS.values()), TEAM):
        for shared in (False, True):
            try:
                asked |= set(kind.requirements(observation, action, config, shared))
            except UserError:  # not for this kind of action, or not for one agent
                continue
    assert asked
    assert asked <= set(kind.network_names)
