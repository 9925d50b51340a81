"""Refuse settings that do not exist or have no effect with this agent, network and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from ludus.agents import AGENTS
from ludus.core.errors import UserError, did_you_mean
from ludus.core.network import NetworkSpec
from ludus.core.spec import Specs
from ludus.networks.build import network_spec
from ludus.networks.config import NetworkConfig
from ludus.networks.pieces import piece_class, settings_read
from ludus.settings.networks import plan_networks
from ludus.settings.parse import format_value
from ludus.settings.settings import Resolved, Settings, network_defaults, setting_types, to_flat

ZERO_IS_OFF = ("agent.burn_in", "agent.overlap")  # settings that 0 turns off
KINDS = {1: "vector", 2: "matrix", 3: "image", 4: "volume or clip"}
READ_BY_PIECES = {"hidden": "an mlp", "activation": "an mlp", "lstm_size": "an lstm or gru"}  # settings of a network


def refuse_ineffective(resolved: Resolved, observation: Specs, action: Specs) -> None:
    """Refuse a flag without effect, and a setting in a file without effect that differs from its default.

    Defaults, presets and Python arguments may have such settings.
    """
    settings, origins = resolved
    flat = to_flat(settings)
    for key, why in find_ineffective(settings, observation, action):
        origin = origins.get(key, "default")
        if key in ZERO_IS_OFF and not flat[key]:
            continue
        if origin == "flag" or (origin.startswith("file") and flat[key] != _default(settings, key)):
            raise UserError(
                f"{key} is {format_value(flat[key])} ({origin}), but would do nothing: {why}; leave it out."
            )


def find_ineffective(settings: Settings[Any], observation: Specs, action: Specs) -> Iterator[tuple[str, str]]:
    """Return all settings without effect, each with the reason."""
    plans = plan_networks(settings, observation, action, settings.network.shared not in ("auto", "no"))
    specs = [plan.spec for plan in plans.values()]
    common = [plan.spec for name, plan in plans.items() if name not in settings.per_network]
    yield from _find_in_network(settings.network, common or specs, "network")
    for name, changes in settings.per_network.items():
        found = dict(_find_in_network(settings.network_for(name), [plans[name].spec], f"network.{name}"))
        if not set(plans[name].spec.inputs) & set(network_spec(observation, {}).inputs):
            found[f"network.{name}.sees"] = "each agent gets its own observations"
        yield from ((key, why) for key, why in found.items() if key.rpartition(".")[2] in changes)
    plain = replace(settings, per_network={})
    separate, together = (plan_networks(plain, observation, action, shared) for shared in (False, True))
    if separate and separate == together:
        yield "network.shared", f"the networks of agent {settings.agent_name} cannot share a trunk"
    if ":" in settings.agent_name:  # the user's agent may read any setting
        return
    for name, why in settings.agent.unused(observation, action, settings.rows):
        yield f"agent.{name}", why
    if not settings.may_be_recurrent:
        for name in settings.agent.UNUSED_FEED_FORWARD:
            yield f"agent.{name}", "no network is recurrent, so single steps are drawn"
    if settings.container == "offline":
        for name in settings.agent.UNUSED_OFFLINE:
            yield f"agent.{name}", "container is offline, which does not act or store new steps"


def _find_in_network(config: NetworkConfig, specs: list[NetworkSpec], table: str) -> Iterator[tuple[str, str]]:
    if ":" in config.name:
        for name in (field.name for field in fields(config) if field.name not in ("name", "shared", "sees")):
            yield f"{table}.{name}", f"the network {config.name} does not read it"
        return
    sources = [
        (len(shape), config.source_for(name, shape)[1])
        for spec in specs
        for name, shape in config.feature_shapes(spec.inputs, spec.categories).items()
        if len(shape) in KINDS
    ]
    for rank in KINDS if specs else ():
        if rank not in {of for of, _ in sources}:
            yield f"{table}.net{rank}d", f"the environment has no {KINDS[rank]} observation"
        elif f"network.net{rank}d" not in {setting for _, setting in sources}:
            yield f"{table}.net{rank}d", f"{table}.sources names the source of every {KINDS[rank]} observation"
    for name, given in _for_vectors(config).items():
        used = [_for_vectors(_with_auto_body(config, spec))[name] for spec in specs if _has_vectors(spec, name)]
        if used and given not in used:
            yield f"{table}.{name}", f"{table}.body is auto, which replaces it by {used[0]} (name a body to keep it)"
    if not any(spec.categories for spec in specs):
        yield f"{table}.embedding", "the environment has no map or list of categories"
    pieces = {piece for spec in specs for piece in _pieces(config, spec)}
    if not specs or any(":" in piece for piece, _ in pieces):  # the user's piece may read any setting
        return
    read = {name for spec in specs for name in _settings_read(config, spec)}
    for name, reader in READ_BY_PIECES.items():
        if name not in read:
            own = sorted(piece for piece, setting in pieces if name in piece_class(piece, setting).network_settings)
            why = f"{own[0]} has a value of its own" if own else f"no piece of the network is {reader}"
            yield f"{table}.{name}", why


def _pieces(config: NetworkConfig, spec: NetworkSpec) -> set[tuple[str, str]]:
    """Return the pieces of a network and the settings that name them."""
    if spec.concatenate:
        from ludus.networks.critic import concatenate_inputs

        config = concatenate_inputs(config)
    return config.used_pieces(config.feature_shapes(spec.inputs, spec.categories), spec.outputs)


def _settings_read(config: NetworkConfig, spec: NetworkSpec) -> set[str]:
    """Return those of the settings ``READ_BY_PIECES`` that a network reads."""
    from ludus.networks.critic import has_memory

    if has_memory(config, spec):  # its output has lstm_size features and goes through an mlp
        return set(READ_BY_PIECES)
    read = {name for piece in _pieces(config, spec) for name in settings_read(*piece)}
    return read | {"activation"} if spec.streams else read


def _for_vectors(config: NetworkConfig) -> dict[str, str]:
    """Return the pieces for vectors, which ``network.body auto`` may replace."""
    return {"net1d": config.net1d, "head1d": config.head1d}


def _has_vectors(spec: NetworkSpec, setting: str) -> bool:
    shapes = spec.inputs if setting == "net1d" else spec.outputs
    return any(len(shape) < 2 and name not in spec.categories for name, shape in shapes.items())


def _with_auto_body(config: NetworkConfig, spec: NetworkSpec) -> NetworkConfig:
    """Return the settings of a network with ``network.body auto`` decided; critics of actions have their own body."""
    if spec.concatenate:
        return config
    return config.resolved(config.feature_shapes(spec.inputs, spec.categories), spec.outputs)


def _default(settings: Settings[Any], key: str) -> Any:
    if key in (own := network_defaults(type(settings.agent))):
        return own[key]
    table, _, name = key.partition(".")
    if "." in name:  # of a single network: the default is that of all networks
        return getattr(settings.network, name.rpartition(".")[2])
    (field,) = (field for field in fields(getattr(settings, table)) if field.name == name)
    return field.default if field.default is not MISSING else None


def agents_with_setting(key: str, agent: str) -> str:
    """Return a sentence that names the agents with a setting that ``agent`` lacks; "" if there are none."""
    if not key.startswith("agent."):
        return ""
    first = {path: name for name, path in reversed(AGENTS.items())}  # one name per algorithm
    having = [name for name in AGENTS if name in first.values() and key in setting_types(name)]
    if not having:
        return ""
    return f"{agent} has no such setting; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it"


def unknown_setting(key: str, origin: str, agent: str, types: Mapping[str, Any]) -> UserError:
    """Return the error for an unknown key, with a suggestion."""
    who = agents_with_setting(key, agent)
    return UserError(f'There is no setting "{key}" ({origin}){f": {who}." if who else f".{did_you_mean(key, types)}"}')
