"""Create the manager for the settings of environments."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from ludus.core.errors import TOO_MANY_FILES, UserError
from ludus.core.imports import import_path, is_importable, is_importable_elsewhere
from ludus.core.rows import Rows
from ludus.environments.config import EnvConfig, parse_options, parse_wrappers, validate
from ludus.environments.errors import environment_error
from ludus.environments.gym import accepts_argument, find_spec, is_path, make, make_environment, resolve_environment
from ludus.environments.preprocess import refuse_masked_repeats, with_wrappers
from ludus.managers.base import BatchManager
from ludus.preprocess.config import PreprocessConfig
from ludus.preprocess.pipeline import with_device_ops

TENSOR_NEEDS = ("num_envs", "observation_space", "action_space", "reset", "step")
MIN_VECTOR = 6  # fewer environments are faster in a loop: 10 µs each for CartPole, against 60 to 90 µs for a vector


def make_manager(
    config: EnvConfig,
    num: int | Rows | None = None,
    render_mode: str | None = None,
    environment: Callable[..., Any] | None = None,
    branch: int = 0,
    preprocess: PreprocessConfig | None = None,
) -> BatchManager:
    """Create the manager for ``config``.

    ``num`` overrides ``config.num``, or gives the rows of a run. ``environment`` creates an environment in place of
    ``config.id``. Managers with another ``branch`` (training 0, evaluation 1, …) have other seeds.
    """
    given = config
    if preprocess is not None:
        config = with_wrappers(config, preprocess)
    validate(config)
    alone = num == 1
    first_row, num = (num.start, num.size) if isinstance(num, Rows) else (0, num)
    num = config.num if num is None else num
    if num < 1:
        raise UserError(f"There must be at least 1 environment, not {num}.")
    options = parse_options(config.options)
    backend = _choose_backend(config, num, options, render_mode, environment)
    if backend == "subproc" and (render_mode is not None or alone):
        backend = "simple"  # rendering and single environments stay in this process
    if branch:  # evaluation has one group, and as many different episodes as rows
        config = replace(config, alternate=False, repeat_seeds=1)
    manager: BatchManager
    if backend == "tensor":
        manager = _make_tensor(config, num, options, render_mode, environment, branch)
    elif backend == "vector":
        from ludus.managers.vector import VectorEnvManager

        manager = VectorEnvManager(_make_vector(config, options, num), config.id, config, branch)
    elif backend == "subproc":
        from ludus.managers.subproc import SubProcEnvManager

        try:
            manager = SubProcEnvManager(config, num, _path(config, environment), branch)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise UserError(TOO_MANY_FILES) from error
            raise
    elif backend == "envpool":
        from ludus.managers.envpool import EnvPoolManager

        if branch:  # in evaluation a lost life does not end an episode
            options.pop("episodic_life", None)
        manager = EnvPoolManager(config.id, num, options, config, branch, render_mode)
    else:
        from ludus.managers.simple import SimpleEnvManager

        make_one = partial(make_environment, config, environment, render_mode)
        name = config.id if environment is None else getattr(environment, "__name__", type(environment).__name__)
        manager = SimpleEnvManager(make_one, num, name, config, branch)
    if preprocess is not None:
        try:
            _preprocess(manager, preprocess, [axes for axes in given.axes if axes not in config.axes])
        except BaseException:
            manager.close()
            raise
    manager.first_row = first_row
    return manager


def can_divide(
    config: EnvConfig, num: int, environment: Callable[..., Any] | None, preprocess: PreprocessConfig
) -> bool:
    """Return whether several managers can have a part of ``num`` rows each, with the episodes that one would have.

    Environments that step as a batch cannot, since one generator is behind all their rows.
    """
    config = with_wrappers(config, preprocess)
    backend = _choose_backend(config, num, parse_options(config.options), None, environment)
    return backend not in ("vector", "tensor")


def _preprocess(manager: BatchManager, preprocess: PreprocessConfig, stack_axes: Iterable[str]) -> None:
    """Add what the manager and the agent do of preprocessing; ``stack_axes`` is ``env.axes`` of stacks."""
    refuse_masked_repeats(preprocess.action, manager.observation, manager.name)
    manager.stack_frames(preprocess.observation, stack_axes)
    manager.observation = with_device_ops(manager.observation, preprocess.observation)


def _make_tensor(
    config: EnvConfig,
    num: int,
    options: dict[str, Any],
    render_mode: str | None,
    environment: Callable[..., Any] | None,
    branch: int,
) -> BatchManager:
    from ludus.managers.tensor import TensorEnvManager

    if environment is None and not is_path(config.id):
        raise UserError(
            f'env.backend is tensor, but env.id "{config.id}" is not a class; give one as package.module:Class.'
        )
    if render_mode is not None:
        raise UserError("env.backend is tensor, which cannot render; turn videos off.")
    if config.max_episode_steps:
        raise UserError(
            f"env.max_episode_steps is {config.max_episode_steps}, but with env.backend tensor the environment has "
            "its own limit; set it in env.options."
        )
    maker = resolve_environment(config.id) if environment is None else environment
    try:
        env = maker(num, **options)
    except Exception as error:
        raise environment_error(config.id, "its constructor", error) from error
    missing = [name for name in TENSOR_NEEDS if not hasattr(env, name)]
    if missing:
        raise UserError(
            f"env.backend is tensor, but {config.id} has no {missing[0]}; it needs {', '.join(TENSOR_NEEDS)}."
        )
    return TensorEnvManager(env, config.id, config, branch)


def _path(config: EnvConfig, environment: Callable[..., Any] | None) -> str:
    """Return the id or import path from which another process creates the environment."""
    wrappers = [path for path, _ in parse_wrappers(config.wrappers)]
    local = [f"the wrapper {path}" for path in wrappers if not is_importable_elsewhere(path)]
    path = config.id if environment is None else import_path(environment)
    if environment is not None and not (is_importable_elsewhere(path) and is_importable(path, environment)):
        local.append(getattr(environment, "__qualname__", repr(environment)))
    if local:
        raise UserError(
            f"env.backend is subproc, but {local[0]} cannot be imported by another process; define it at the top of a "
            "module, or set env.backend to simple."
        )
    return path


def _choose_backend(
    config: EnvConfig,
    num: int,
    options: dict[str, Any],
    render_mode: str | None,
    environment: Callable[..., Any] | None,
) -> str:
    if environment is not None or is_path(config.id):
        if config.backend in ("vector", "envpool"):
            raise UserError(
                f"env.backend is {config.backend}, but your own environment runs in simple or subproc; "
                "leave it at auto."
            )
        return "simple" if config.backend == "auto" else config.backend
    if render_mode is not None and config.backend == "vector":
        return "simple"  # native vector environments cannot render
    if config.backend != "auto":
        return config.backend
    spec = find_spec(config.id)
    in_a_loop = render_mode is not None or config.wrappers or config.repeat_seeds > 1 or num < MIN_VECTOR
    if in_a_loop or _vector_maker(spec, config, options) is None:
        return "simple"
    return "vector" if _same_spaces(config, options) else "simple"


def _same_spaces(config: EnvConfig, options: dict[str, Any]) -> bool:
    """Whether the native vector environment has the spaces of the single one; Atari's does not."""
    single, vector = make(config.id, options), _make_vector(config, options, 1)
    same = (
        single.observation_space == vector.single_observation_space
        and single.action_space == vector.single_action_space
    )
    single.close()
    vector.close()
    return same


def _vector_maker(spec: EnvSpec, config: EnvConfig, options: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the constructor of the native vector environment, if there is one that accepts all settings."""
    if spec.vector_entry_point is None or spec.additional_wrappers:
        return None
    entry = spec.vector_entry_point
    try:
        maker: Callable[..., Any] = load_env_creator(entry) if isinstance(entry, str) else entry
    except ImportError:
        return None
    arguments = [*options, *(["max_episode_steps"] if config.max_episode_steps else [])]
    return maker if all(accepts_argument(maker, key) for key in arguments) else None


def _make_vector(config: EnvConfig, options: dict[str, Any], num: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    spec = find_spec(config.id)
    if _vector_maker(spec, config, options) is None:
        raise UserError(
            f'Environment "{config.id}" has no native vector environment that accepts these settings; set env.backend '
            "to auto or simple."
        )
    limit: dict[str, Any] = {"max_episode_steps": config.max_episode_steps} if config.max_episode_steps else {}
    try:
        return gymnasium.make_vec(spec, num, vectorization_mode="vector_entry_point", **limit, **options)
    except Exception as error:
        raise environment_error(config.id, "its constructor", error) from error
