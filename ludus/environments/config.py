"""The settings of environments, and their validation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ludus.core.calls import Call, parse_call, parse_toml
from ludus.core.errors import UserError, did_you_mean
from ludus.core.spec import Axes

Backend = Literal["auto", "simple", "vector", "envpool", "subproc", "tensor"]
Start = Literal["forkserver", "spawn"]


@dataclass(frozen=True)
class EnvConfig:
    """Which environment to train in, how many of them, and how they are stepped."""

    # Gymnasium id (CartPole-v1), EnvPool id with that backend (Pong-v5), or your own class as package.module:Class.
    id: str = "CartPole-v1"
    # Number of parallel environments. More give larger, less correlated batches and more steps per second; fewer give
    # more updates per env step.
    num: int = 8
    # How environments are stepped: simple (a loop in this process), vector (Gymnasium's native vector environment),
    # envpool (C++ threads), subproc (worker processes, for slow steps), tensor (your own environment of torch tensors,
    # which may be on a GPU); auto is vector for 6 or more environments if there is one, else simple.
    backend: Backend = "auto"
    # Arguments of the environment's constructor as key=value in TOML syntax (gravity=-5.0 name='"x"' slow=true).
    options: tuple[str, ...] = ()
    # Steps after which an episode is truncated; 0 keeps the environment's time limit.
    max_episode_steps: int = 0
    # Key of the action mask in the observation dict or in info; empty if there is none.
    mask: str = "action_mask"
    # Gymnasium wrappers for each environment, innermost first, as package.module:Wrapper, with arguments in TOML syntax
    # as in 'gymnasium.wrappers:ClipReward(max_reward=1.0)'.
    wrappers: tuple[str, ...] = ()
    # Several agents: how many of each environment share the policy, so that there are env.num times as many rows. It is
    # decided by the environment and recorded here.
    agents: int = 1
    # Several agents: also observe the state of the whole world, as state; agents with a central critic turn it on.
    global_state: bool = False
    # How networks get observations, as name=layout with a layout of vector, entities, image, grid or clip; the others
    # are laid out by shape and type. A Box is called observation, a part of a Dict by its key.
    axes: tuple[str, ...] = ()
    # Most elements of a list among the observations (Sequence; nodes or edges of a Graph), to which it is padded.
    max_length: int = 32
    # The same for single lists, as name=number, such as units=6 graph/nodes=10 graph/edges=40.
    lengths: tuple[str, ...] = ()
    # Training: how many consecutive environments begin their n-th episodes with the same seed. 2 suits ars where all
    # episodes have the same length: both policies of a direction then begin in the same state.
    repeat_seeds: int = 1
    # subproc: number of worker processes; 0 is one per core. More help only if environments wait rather than compute.
    workers: int = 0
    # subproc: step half of the environments while actions are computed for the other half.
    alternate: bool = False
    # subproc: how often crashed or hanging workers are restarted before the run stops; 0 stops at the first failure.
    max_restarts: int = 10
    # subproc: seconds that one step or reset may take before its worker counts as hanging. Raise it for slow resets.
    timeout: float = 60.0
    # subproc: start method of workers: forkserver (faster), or spawn (for libraries that do not work after a fork).
    start: Start = "forkserver"


DEFAULTS = EnvConfig()
SUBPROC_ONLY = ("workers", "alternate", "max_restarts", "timeout", "start")


def validate(config: EnvConfig) -> None:
    """Refuse invalid settings."""
    if not config.id.strip():
        raise UserError("env.id is empty; give a Gymnasium id such as CartPole-v1 or package.module:Class.")
    if config.num < 1:
        raise UserError(f"env.num is {config.num}, but must be 1 or more.")
    if config.agents < 1:
        raise UserError(f"env.agents is {config.agents}; leave it out, since the environment decides it.")
    if config.max_episode_steps < 0:
        raise UserError(
            f"env.max_episode_steps is {config.max_episode_steps}; give a number of steps, or 0 for the environment's "
            "time limit."
        )
    if config.repeat_seeds < 1 or config.num % config.repeat_seeds:
        raise UserError(
            f"env.repeat_seeds is {config.repeat_seeds}, but must be 1 or more and divide env.num, which is "
            f"{config.num}."
        )
    if config.repeat_seeds > 1 and config.backend in ("vector", "envpool", "tensor"):
        raise UserError(
            f"env.repeat_seeds is {config.repeat_seeds}, but with env.backend {config.backend} episodes have no seeds "
            "of their own; set env.backend to simple or subproc, or env.repeat_seeds to 1."
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
    parse_axes(config.axes)
    parse_lengths(config.lengths)
    if config.max_length < 1:
        raise UserError(f"env.max_length is {config.max_length}; give the most elements that a list can have.")
    if config.wrappers and config.backend in ("vector", "envpool", "tensor"):
        raise UserError(
            f"env.wrappers has {config.wrappers[0]}, but env.backend {config.backend} supports no wrappers; set "
            "env.backend to simple or subproc."
        )
    _validate_workers(config)


def _validate_workers(config: EnvConfig) -> None:
    if config.backend != "subproc":
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name in SUBPROC_ONLY and value != field.default:
                raise UserError(
                    f"env.{field.name} is {value}, but env.backend {config.backend} has no worker processes; set "
                    f"env.backend to subproc, or remove env.{field.name}."
                )
    if config.workers < 0:
        raise UserError(f"env.workers is {config.workers}; give a number of processes, or 0 for one per core.")
    if config.max_restarts < 0:
        raise UserError(f"env.max_restarts is {config.max_restarts}; give 0 or more.")
    if not 0 < config.timeout < math.inf:
        raise UserError(f"env.timeout is {config.timeout}; give the seconds that a step may take, more than 0.")
    if config.alternate and config.num < 2:
        raise UserError("env.alternate needs at least 2 environments; set env.num to 2 or more.")


def parse_options(options: Iterable[str]) -> dict[str, Any]:
    """Parse ``key=value`` strings to constructor arguments."""
    parsed: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise UserError(f'env.options has "{option}", which is not key=value, such as gravity=-5.0.')
        if key in parsed:
            raise UserError(f'env.options gives "{key}" twice; keep one of them.')
        try:
            parsed[key] = parse_toml(value.strip())
        except ValueError as error:
            raise UserError(
                f'env.options has "{option}", but its value cannot be read as TOML; write true or false in lower case, '
                "and quotes around text, as in name='\"small\"'."
            ) from error
    return parsed


def parse_axes(axes: Iterable[str]) -> dict[str, Axes]:
    """Parse ``name=layout`` strings."""
    parsed: dict[str, Axes] = {}
    for item in axes:
        name, _, layout = (part.strip() for part in item.rpartition("="))
        if not name or layout not in (known := get_args(Axes)):
            raise UserError(
                f'env.axes has "{item}", which is not name=layout with a layout of {", ".join(get_args(Axes))}.'
                f"{did_you_mean(layout, get_args(Axes))}"
            )
        if name in parsed:
            raise UserError(f'env.axes gives "{name}" twice; keep one of them.')
        parsed[name] = known[known.index(layout)]
    return parsed


def parse_lengths(lengths: Iterable[str]) -> dict[str, int]:
    """Parse ``name=number`` strings."""
    parsed: dict[str, int] = {}
    for item in lengths:
        name, _, number = (part.strip() for part in item.rpartition("="))
        if not name or not number.isdecimal() or int(number) < 1:
            raise UserError(f'env.lengths has "{item}", which is not name=number with 1 or more, such as units=6.')
        if name in parsed:
            raise UserError(f'env.lengths gives "{name}" twice; keep one of them.')
        parsed[name] = int(number)
    return parsed


def parse_wrappers(wrappers: Iterable[str]) -> list[Call]:
    """Parse ``package.module:Wrapper(key=value, …)`` to paths and arguments; lists become tuples."""
    example = "gymnasium.wrappers:FrameStackObservation(stack_size=4)"
    parsed = [parse_call(text, "env.wrappers", example) for text in wrappers]
    for call in parsed:
        if ":" not in call.name:
            raise UserError(
                f'env.wrappers has "{call.name}", which is not package.module:Wrapper; write it like {example}.'
            )
    return parsed
