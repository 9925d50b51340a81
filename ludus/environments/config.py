"""The settings of an environment, and their check."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ludus.core.errors import UserError, nearest

Backend = Literal["auto", "simple", "vector", "envpool"]


@dataclass(frozen=True)
class EnvConfig:
    """Which environment, how many of them, and what steps them."""

    # A Gymnasium id (CartPole-v1), an EnvPool id with that backend (Pong-v5), or your own as package.module:Class.
    id: str = "CartPole-v1"
    # How many run at once: more give more varied batches and fewer, larger forward passes; fewer learn sooner per step.
    num: int = 8
    # What steps them: simple (a loop in this process), vector (Gymnasium's native), envpool (C++ threads); auto picks
    # vector where the environment has it, else simple.
    backend: Backend = "auto"
    # Arguments of the environment's constructor as key=value, the value as in TOML (gravity=-5.0 name='"x"' slow=true).
    options: tuple[str, ...] = ()
    # Steps after which an episode is truncated; 0 keeps the environment's own limit.
    max_episode_steps: int = 0
    # The key of the action mask in the observation dict or in info; empty if that key is no mask.
    mask: str = "action_mask"


def validate(config: EnvConfig) -> None:
    """Refuse settings that cannot work."""
    if not config.id.strip():
        raise UserError("env.id is empty; give a Gymnasium id such as CartPole-v1 or package.module:Class.")
    if config.num < 1:
        raise UserError(f"env.num is {config.num}, but at least 1 environment must run; set it to 1 or more.")
    if config.max_episode_steps < 0:
        raise UserError(
            f"env.max_episode_steps is {config.max_episode_steps}; give the steps of an episode, or 0 for the "
            "environment's own limit."
        )
    if config.backend not in get_args(Backend):
        known = ", ".join(get_args(Backend))
        raise UserError(
            f'env.backend is "{config.backend}", which does not exist; choose one of {known}.'
            f"{nearest(config.backend, get_args(Backend))}"
        )
    parse_options(config.options)


def parse_options(options: Iterable[str]) -> dict[str, Any]:
    """Return the constructor's arguments behind ``key=value`` texts."""
    parsed: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise UserError(f'env.options has "{option}", which is not key=value; write it like gravity=-5.0.')
        if key in parsed:
            raise UserError(f'env.options gives "{key}" twice; keep one of them.')
        parsed[key] = _toml_value(option, value.strip())
    return parsed


def _toml_value(option: str, text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        document = {}
    if set(document) != {"value"}:  # more keys: a line break smuggled a second line in
        raise UserError(
            f'env.options has "{option}", whose value cannot be read as TOML; use true or false in lower case and '
            "quotes around text, like name='\"small\"'."
        )
    return document["value"]
