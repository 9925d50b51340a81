"""Settings that would do nothing with the environment and network at hand: refused, so that nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from ludus.containers.coerce import typed
from ludus.containers.settings import Resolved, Settings, to_flat
from ludus.core.errors import UserError
from ludus.core.spec import Specs, network_inputs
from ludus.networks.config import NetworkConfig
from ludus.preprocess.observation import ObsPreprocessor

KINDS = {1: "vector", 2: "sequence", 3: "image", 4: "volume or clip"}
SIZES = {"hidden": "mlp", "activation": "mlp", "lstm_size": "lstm"}  # setting of a network → the piece that reads it


def refuse_unused(resolved: Resolved, observation: Specs, action: Specs) -> None:
    """Refuse a flag that would do nothing, and the same in a file unless it says the default, as a run's own file does.

    Defaults and presets may hold such settings, and so may a dict in Python that serves runs of several kinds.
    """
    settings, origins = resolved
    flat = to_flat(settings)
    for key, why in unused(settings, observation, action):
        origin = origins.get(key, "default")
        if origin == "flag" or (origin.startswith("file") and flat[key] != _default(settings, key)):
            raise UserError(f"{key} is {typed(flat[key])} ({origin}), but would do nothing: {why}; leave it out.")


def unused(settings: Settings[Any], observation: Specs, action: Specs) -> Iterator[tuple[str, str]]:
    """Every setting that nothing reads, with the reason."""
    yield from _of_network(settings.network, observation)
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
    vectors = [name for name, shape in shapes.items() if observation[name].kind == "continuous" and len(shape) == 1]
    if getattr(config, "normalize_observation", False) and not vectors:
        yield "agent.normalize_observation", "the environment has no vector of numbers among its observations"
    if getattr(config, "n_step", 0):
        yield "agent.gae_lambda", f"agent.n_step is {config.n_step}, and n-step returns take the place of GAE"


def _of_network(config: NetworkConfig, observation: Specs) -> Iterator[tuple[str, str]]:
    if ":" in config.name:
        for name in (field.name for field in fields(config) if field.name not in ("name", "shared")):
            yield f"network.{name}", f"the network {config.name} does not read it"
        return
    shapes = ObsPreprocessor(network_inputs(observation)).shapes
    ranks, config = {len(shape) for shape in shapes.values()}, config.settled(len(shapes))
    sources = {rank: getattr(config, f"net{rank}d") for rank in KINDS}
    for rank in KINDS.keys() - ranks:
        yield f"network.net{rank}d", f"the environment has no {KINDS[rank]} observation"
    pieces = {config.body, config.head, *(sources[rank] for rank in ranks)}
    if any(":" in piece for piece in pieces):  # a piece of the user's own may read everything
        return
    for name, piece in SIZES.items():
        if piece not in pieces:
            yield f"network.{name}", f"no piece of the network is an {piece}"


def _default(settings: Settings[Any], key: str) -> Any:
    table, _, name = key.partition(".")
    (field,) = (field for field in fields(getattr(settings, table)) if field.name == name)
    return field.default if field.default is not MISSING else None
