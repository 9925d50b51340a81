"""Refuse settings that do not exist, or would do nothing with this agent, network and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from ludus.agents import AGENTS
from ludus.core.errors import UserError, did_you_mean
from ludus.core.network import NetworkSpec
from ludus.core.spec import Specs
from ludus.networks.config import NetworkConfig
from ludus.settings.networks import plan_networks
from ludus.settings.parse import format_value
from ludus.settings.settings import Resolved, Settings, network_defaults, setting_types, to_flat

OFF = ("agent.burn_in", "agent.overlap")  # 0 says that they should do nothing
KINDS = {1: "vector", 2: "matrix", 3: "image", 4: "volume or clip"}
SIZES = {"hidden": "mlp", "activation": "mlp", "lstm_size": "lstm"}  # setting of a network → the piece that reads it
READS = {"mlp": {"mlp", "flat_mlp"}, "lstm": {"lstm"}}


def refuse_ineffective(resolved: Resolved, observation: Specs, action: Specs) -> None:
    """Refuse a flag that would do nothing; in a file, only where the value differs from the default.

    Defaults and presets may hold such settings, and so may a dict in Python that serves runs of several kinds.
    """
    settings, origins = resolved
    flat = to_flat(settings)
    for key, why in find_ineffective(settings, observation, action):
        origin = origins.get(key, "default")
        if key in OFF and not flat[key]:
            continue
        if origin == "flag" or (origin.startswith("file") and flat[key] != _default(settings, key)):
            raise UserError(
                f"{key} is {format_value(flat[key])} ({origin}), but would do nothing: {why}; leave it out."
            )


def find_ineffective(settings: Settings[Any], observation: Specs, action: Specs) -> Iterator[tuple[str, str]]:
    """Every setting that nothing reads, with the reason."""
    apart = plan_networks(settings, observation, action, settings.network.shared == "yes")
    specs = [plan.spec for plan in apart.values()]
    common = [plan.spec for name, plan in apart.items() if name not in settings.per_network]
    yield from _of_network(settings.network, common or specs, "network")
    for name, changes in settings.per_network.items():
        found = dict(_of_network(settings.network_for(name), [apart[name].spec], f"network.{name}"))
        yield from ((key, why) for key, why in found.items() if key.rpartition(".")[2] in changes)
    plain = replace(settings, per_network={})
    alone, together = (plan_networks(plain, observation, action, shared) for shared in (False, True))
    if alone and alone == together:
        yield "network.shared", f"agent {settings.agent_name} has nothing to share between networks"
    if ":" in settings.agent_name:  # who knows what an agent of the user's own reads
        return
    for name, why in settings.agent.unused(observation, action, settings.env.num):
        yield f"agent.{name}", why


def _of_network(config: NetworkConfig, needs: list[NetworkSpec], table: str) -> Iterator[tuple[str, str]]:
    if ":" in config.name:
        for name in (field.name for field in fields(config) if field.name not in ("name", "shared", "sees")):
            yield f"{table}.{name}", f"the network {config.name} does not read it"
        return
    ranks = {len(shape) for need in needs for shape in need.inputs.values()}
    for rank in KINDS.keys() - ranks if needs else ():
        yield f"{table}.net{rank}d", f"the environment has no {KINDS[rank]} observation"
    pieces = {piece for need in needs for piece in _pieces(config, need)}
    if not needs or any(":" in piece for piece in pieces):  # a piece of the user's own may read everything
        return
    for name, piece in SIZES.items():
        if not READS[piece] & pieces and not (name == "activation" and any(need.streams for need in needs)):
            yield f"{table}.{name}", f"no piece of the network is an {piece}"


def _pieces(config: NetworkConfig, need: NetworkSpec) -> set[str]:
    """The names of the pieces that a network has."""
    if need.concatenate:
        from ludus.networks.critic import concatenate_inputs

        config = concatenate_inputs(config)
    config = config.resolved(len(need.inputs))
    return {config.body, config.head, *(getattr(config, f"net{len(shape)}d") for shape in need.inputs.values())}


def _default(settings: Settings[Any], key: str) -> Any:
    if key in (own := network_defaults(type(settings.agent))):
        return own[key]
    table, _, name = key.partition(".")
    if "." in name:  # of one network: over that of all
        return getattr(settings.network, name.rpartition(".")[2])
    (field,) = (field for field in fields(getattr(settings, table)) if field.name == name)
    return field.default if field.default is not MISSING else None


def agents_with_setting(key: str, agent: str) -> str:
    """Name the agents that have a setting which ``agent`` lacks; empty if none has."""
    if not key.startswith("agent."):
        return ""
    first = {kind: name for name, kind in reversed(AGENTS.items())}  # of the names of one algorithm
    having = [name for name in AGENTS if name in first.values() and key in setting_types(name)]
    if not having:
        return ""
    return f"{agent} has no such setting; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it"


def unknown_setting(key: str, origin: str, agent: str, types: Mapping[str, Any]) -> UserError:
    """The error for a key that is none of the settings in ``types``, with what was likely meant."""
    who = agents_with_setting(key, agent)
    return UserError(f'There is no setting "{key}" ({origin}){f": {who}." if who else f".{did_you_mean(key, types)}"}')
