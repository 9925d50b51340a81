"""The settings of an environment, and their check."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ludus.core.errors import UserError, did_you_mean

Backend = Literal["auto", "simple", "vector", "envpool", "subproc", "tensor"]
Start = Literal["forkserver", "spawn"]
Wrapper = tuple[str, dict[str, Any]]  # where it is (package.module:Class), and its arguments
_WRAPPER = re.compile(r"([\w.]+:[\w.<>]+)(?:\((.*)\))?", re.DOTALL)


@dataclass(frozen=True)
class EnvConfig:
    """Which environment, how many of them, and what steps them."""

    # A Gymnasium id (CartPole-v1), an EnvPool id with that backend (Pong-v5), or your own as package.module:Class.
    id: str = "CartPole-v1"
    # How many run at once: more give more varied batches and fewer, larger forward passes; fewer learn sooner per step.
    num: int = 8
    # What steps them: simple (a loop in this process), vector (Gymnasium's native), envpool (C++ threads), subproc (own
    # processes, which pays where a step takes long), tensor (your own, of torch tensors that may live on a GPU); auto
    # picks vector for 6 or more where there is one, else simple.
    backend: Backend = "auto"
    # Arguments of the environment's constructor as key=value, the value as in TOML (gravity=-5.0 name='"x"' slow=true).
    options: tuple[str, ...] = ()
    # Steps after which an episode is truncated; 0 keeps the environment's own limit.
    max_episode_steps: int = 0
    # The key of the action mask in the observation dict or in info; empty if that key is no mask.
    mask: str = "action_mask"
    # Gymnasium wrappers around each environment, the innermost first, as package.module:Wrapper or with arguments as
    # in TOML: 'gymnasium.wrappers:FrameStackObservation(stack_size=4)'. They run where the environment runs.
    wrappers: tuple[str, ...] = ()
    # subproc: how many processes share the environments; 0 is one per core. More than cores only helps those that wait.
    workers: int = 0
    # subproc: step half of the environments while actions are computed for the other half.
    alternate: bool = False
    # subproc: how often processes that die or hang are replaced before the run ends; 0 ends it at the first.
    max_restarts: int = 10
    # subproc: seconds that one step or reset of one environment may take before its process counts as hung.
    timeout: float = 60.0
    # subproc: how processes start: forkserver (faster), or spawn (where a library does not survive a fork).
    start: Start = "forkserver"


WORKERS = ("workers", "alternate", "max_restarts", "timeout", "start")  # fields that mean nothing without processes


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
    for key, choices in (("backend", get_args(Backend)), ("start", get_args(Start))):
        value = getattr(config, key)
        if value not in choices:
            raise UserError(
                f'env.{key} is "{value}", which does not exist; choose one of {", ".join(choices)}.'
                f"{did_you_mean(value, choices)}"
            )
    parse_options(config.options)
    parse_wrappers(config.wrappers)
    if config.wrappers and config.backend in ("vector", "envpool", "tensor"):
        raise UserError(
            f"env.wrappers has {config.wrappers[0]}, but env.backend {config.backend} steps all environments as one, "
            "which takes no wrapper; set env.backend to simple or subproc."
        )
    _validate_workers(config)


def _validate_workers(config: EnvConfig) -> None:
    if config.backend != "subproc":
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name in WORKERS and value != field.default:
                raise UserError(
                    f"env.{field.name} is {value}, but env.backend {config.backend} has no processes of its own; set "
                    f"env.backend to subproc, or drop env.{field.name}."
                )
    if config.workers < 0:
        raise UserError(f"env.workers is {config.workers}; give a number of processes, or 0 for one per core.")
    if config.max_restarts < 0:
        raise UserError(f"env.max_restarts is {config.max_restarts}; give 0 or more.")
    if not 0 < config.timeout < math.inf:
        raise UserError(f"env.timeout is {config.timeout}; give the seconds that a step may take, more than 0.")
    if config.alternate and config.num < 2:
        raise UserError("env.alternate needs two halves of the environments; set env.num to 2 or more.")


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


def parse_wrappers(wrappers: Iterable[str]) -> list[Wrapper]:
    """Return path and arguments of each ``package.module:Wrapper(key=value, …)``; lists become tuples."""
    parsed: list[Wrapper] = []
    for text in wrappers:
        match = _WRAPPER.fullmatch(text.strip())
        if match is None:
            raise UserError(
                f'env.wrappers has "{text}", which is not package.module:Wrapper; write it like '
                "gymnasium.wrappers:FrameStackObservation(stack_size=4)."
            )
        try:
            arguments = _toml(f"{{{match[2] or ''}}}")
        except ValueError as error:
            raise UserError(
                f'env.wrappers has "{text}", whose arguments cannot be read as TOML; write them as key=value with '
                "commas between, true or false in lower case, and quotes around text."
            ) from error
        parsed.append((match[1], {key: _tuples(value) for key, value in arguments.items()}))
    return parsed


def _toml_value(option: str, text: str) -> Any:
    try:
        return _toml(text)
    except ValueError as error:
        raise UserError(
            f'env.options has "{option}", whose value cannot be read as TOML; use true or false in lower case and '
            "quotes around text, like name='\"small\"'."
        ) from error


def _toml(text: str) -> Any:
    document = tomllib.loads(f"value = {text}")
    if set(document) != {"value"}:  # a line break smuggled a second line in
        raise ValueError(text)
    return document["value"]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
