"""Refuse settings that do not exist, or would do nothing with this agent, network and environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from inspect import isabstract
from operator import not_
from typing import Any, NamedTuple

import torch

from ludus.agents import AGENTS
from ludus.core.agent import Agent
from ludus.core.errors import UserError, nearest
from ludus.core.names import resolve
from ludus.core.network import NetworkSpec
from ludus.core.spec import Specs
from ludus.networks.config import NetworkConfig
from ludus.preprocess.observation import ObsPreprocessor
from ludus.preprocess.running import is_normalized
from ludus.settings.parse import typed
from ludus.settings.settings import Resolved, Settings, agent_config, network_of, setting_types, to_flat

OFF = ("agent.burn_in", "agent.overlap")  # 0 says that they should do nothing
KINDS = {1: "vector", 2: "matrix", 3: "image", 4: "volume or clip"}
SIZES = {"hidden": "mlp", "activation": "mlp", "lstm_size": "lstm"}  # setting of a network → the piece that reads it
READS = {"mlp": {"mlp", "flat_mlp"}, "lstm": {"lstm"}}


def refuse_ineffective(resolved: Resolved, observation: Specs, action: Specs) -> None:
    """Refuse a flag that would do nothing, and the same in a file unless it says the default, as a run's own file does.

    Defaults and presets may hold such settings, and so may a dict in Python that serves runs of several kinds.
    """
    settings, origins = resolved
    flat = to_flat(settings)
    for key, why in unused(settings, observation, action):
        origin = origins.get(key, "default")
        if key in OFF and not flat[key]:
            continue
        if origin == "flag" or (origin.startswith("file") and flat[key] != _default(settings, key)):
            raise UserError(f"{key} is {typed(flat[key])} ({origin}), but would do nothing: {why}; leave it out.")


def unused(settings: Settings[Any], observation: Specs, action: Specs) -> Iterator[tuple[str, str]]:
    """Every setting that nothing reads, with the reason."""
    apart, together = (_needs(settings, observation, action, shared) for shared in (False, True))
    yield from _of_network(settings.network, apart)
    if apart and apart == together:
        yield "network.shared", f"agent {settings.agent_name} has nothing to share between networks"
    if ":" in settings.agent_name:  # who knows what an agent of the user's own reads
        return
    config = settings.agent
    continuous = any(spec.kind == "continuous" for spec in action.values())
    for name in ("distribution", "log_std_init"):
        if hasattr(config, name) and not continuous:
            yield f"agent.{name}", "the environment has no continuous actions"
    if getattr(config, "distribution", "") == "beta":
        yield "agent.log_std_init", "agent.distribution is beta, which has no such deviation"
    shapes = ObsPreprocessor(observation).shapes
    numbers = any(is_normalized(observation[name], shape) for name, shape in shapes.items())
    if getattr(config, "normalize_observation", False) and not numbers:
        yield "agent.normalize_observation", "the environment has no vector of numbers among its observations"
    if getattr(config, "n_step", 0) and hasattr(config, "gae_lambda"):
        yield "agent.gae_lambda", f"agent.n_step is {config.n_step}, and n-step returns take the place of GAE"
    if hasattr(config, "replay"):
        yield from ineffective_replay(settings)


def _needs(settings: Settings[Any], observation: Specs, action: Specs, shared: bool) -> list[NetworkSpec]:
    """The networks that the agent asks for; none for what is no agent, which is refused when it is made."""
    kind = resolve(settings.agent_name, AGENTS, "agent")
    if not (isinstance(kind, type) and issubclass(kind, Agent)) or isabstract(kind):
        return []
    with torch.random.fork_rng(devices=[]):  # what an agent makes to find out may draw first weights
        return [NetworkSpec(*need) for need in kind.requirements(observation, action, settings.agent, shared).values()]


def _of_network(config: NetworkConfig, needs: list[NetworkSpec]) -> Iterator[tuple[str, str]]:
    if ":" in config.name:
        for name in (field.name for field in fields(config) if field.name not in ("name", "shared")):
            yield f"network.{name}", f"the network {config.name} does not read it"
        return
    ranks = {len(shape) for need in needs for shape in need.inputs.values()}
    for rank in KINDS.keys() - ranks if needs else ():
        yield f"network.net{rank}d", f"the environment has no {KINDS[rank]} observation"
    pieces = {piece for need in needs for piece in _pieces(config, need)}
    if not needs or any(":" in piece for piece in pieces):  # a piece of the user's own may read everything
        return
    for name, piece in SIZES.items():
        if not READS[piece] & pieces and not (name == "activation" and any(need.streams for need in needs)):
            yield f"network.{name}", f"no piece of the network is an {piece}"


def _pieces(config: NetworkConfig, need: NetworkSpec) -> set[str]:
    """The names of the pieces that a network has."""
    if need.concatenate:
        from ludus.networks.critic import concatenate_inputs

        config = concatenate_inputs(config)
    config = config.settled(len(need.inputs))
    return {config.body, config.head, *(getattr(config, f"net{len(shape)}d") for shape in need.inputs.values())}


def _default(settings: Settings[Any], key: str) -> Any:
    if key in (own := network_of(type(settings.agent))):
        return own[key]
    table, _, name = key.partition(".")
    (field,) = (field for field in fields(getattr(settings, table)) if field.name == name)
    return field.default if field.default is not MISSING else None


class Idle(NamedTuple):
    """Settings (those that an agent has) which nothing reads while another has such a value."""

    names: str
    by: str
    idle: Callable[[Any], Any]  # of the value of ``by``: whether they do nothing
    why: str  # may name that value: {}


IDLE = (
    Idle("priority_exponent importance_exponent priority_mix", "prioritized", not_, "agent.prioritized is off"),
    Idle("importance_exponent", "priority_exponent", not_, "agent.priority_exponent is 0, so there is no bias"),
    Idle("burn_in overlap priority_mix", "sequence", not_, "agent.sequence is 0, and single transitions are drawn"),
    Idle("atoms", "values", "expected".__eq__, "agent.values is expected, one number for each choice"),
    Idle("v_min v_max", "values", "categorical".__ne__, "agent.values is {}, which has no bounds"),
    Idle("temperature", "munchausen", not_, "agent.munchausen is 0"),
    Idle(
        "epsilon_schedule epsilon_start epsilon_end epsilon_share epsilon_ladder",
        "noisy",
        bool,
        "agent.noisy is on, and noisy layers explore in place of ε",
    ),
    Idle("epsilon_end epsilon_share", "epsilon_schedule", "constant".__eq__, "agent.epsilon_schedule is constant"),
    Idle("target_noise_clip", "target_noise", not_, "agent.target_noise is 0"),
    Idle("noise_clip", "noise", "clipped_normal".__ne__, "agent.noise is {}, and only clipped_normal has a clip"),
    Idle("noise_theta", "noise", "ornstein_uhlenbeck".__ne__, "agent.noise is {}, and only ornstein_uhlenbeck has it"),
    Idle("alpha_learning_rate target_entropy", "learn_alpha", not_, "agent.learn_alpha is off, so alpha stays"),
    Idle("average_decay", "trust_region", not_, "agent.trust_region is 0, which needs no average"),
    Idle("replay warmup save_replay", "replay_ratio", not_, "agent.replay_ratio is 0, so nothing is replayed"),
)
RATES = ("actor_learning_rate", "critic_learning_rate", "alpha_learning_rate")


def ineffective_replay(settings: Settings[Any]) -> Iterator[tuple[str, str]]:
    """Every setting of the agent that nothing reads, with the reason."""
    config = settings.agent
    for names, by, idle, why in IDLE:
        if hasattr(config, by) and idle(getattr(config, by)):
            said = why.format(getattr(config, by))
            yield from ((f"agent.{name}", said) for name in names.split() if hasattr(config, name))
    if hasattr(config, "epsilon_ladder") and settings.env.num == 1:
        yield "agent.epsilon_ladder", "env.num is 1, and a ladder is over environments"
    if hasattr(config, RATES[0]):
        used = RATES if getattr(config, "learn_alpha", False) else RATES[:2]
        if all(getattr(config, name) for name in used):
            yield "agent.learning_rate", f"{', '.join(f'agent.{name}' for name in used)} take its place"


def agents_with_setting(key: str, agent: str) -> str:
    """Say that ``agent`` lacks a setting, and who has it, one name for each algorithm; nothing where nobody has."""
    if not key.startswith("agent."):
        return ""
    first = {kind: name for name, kind in reversed(AGENTS.items())}  # of the names of one algorithm
    having = [name for name in AGENTS if name in first.values() and key in setting_types(agent_config(name))]
    if not having:
        return ""
    return f"{agent} has no such setting; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it"


def unknown(key: str, origin: str, agent: str, types: Mapping[str, Any]) -> UserError:
    """The error for a key that is none of the settings in ``types``, with what was likely meant."""
    who = agents_with_setting(key, agent)
    return UserError(f'There is no setting "{key}" ({origin}){f": {who}." if who else f".{nearest(key, types)}"}')
