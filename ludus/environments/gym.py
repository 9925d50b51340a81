"""Make one environment from a Gymnasium id, from ``package.module:Class``, or from a callable."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import gymnasium
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from ludus.core.errors import UserError, did_you_mean
from ludus.core.imports import resolve
from ludus.environments.config import EnvConfig, parse_options, parse_wrappers
from ludus.environments.errors import environment_error
from ludus.environments.multiagent import JointEnv, has_agents
from ludus.environments.preprocess import PreprocessObservation, PreviousStep

Environment = gymnasium.Env[Any, Any]
ENVPOOL_TOO = ("box2d", "mujoco")  # extras of Gymnasium whose environments EnvPool has under the same ids
REQUIRED = ("reset", "step", "observation_space", "action_space")


class JointOptions(NamedTuple):
    """The settings of environments with several agents."""

    mask: str = "action_mask"
    global_state: bool = False


def make_environment(
    config: EnvConfig, source: Callable[..., Any] | None = None, render_mode: str | None = None
) -> Environment:
    """Make one environment with its wrappers; ``source`` is called in place of ``config.id``."""
    id = config.id if source is None else source
    joint = JointOptions(config.mask, config.global_state)
    env = make(id, parse_options(config.options), config.max_episode_steps, render_mode, joint)
    for path, arguments in parse_wrappers(config.wrappers):
        env = _wrap(env, path, arguments)
    return env


def make(
    id: str | Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    max_episode_steps: int = 0,
    render_mode: str | None = None,
    joint: JointOptions | None = None,
) -> Environment:
    """Make an environment from an id, a path or a callable; ``max_episode_steps`` 0 keeps its time limit."""
    options, joint = dict(options or {}), joint or JointOptions()
    if not isinstance(id, str):
        name = getattr(id, "__name__", type(id).__name__)
        return _construct(id, name, options, max_episode_steps, render_mode, joint)
    if is_path(id):
        return _construct(resolve_environment(id), id, options, max_episode_steps, render_mode, joint)
    if joint.global_state:
        raise _one_agent(id)
    limit: dict[str, Any] = {"max_episode_steps": max_episode_steps} if max_episode_steps else {}
    spec = find_spec(id)
    mode: dict[str, Any] = {"render_mode": render_mode} if render_mode else {}
    try:  # Gymnasium's checker would slow down every step; `ludus check` checks once
        return gymnasium.make(spec, disable_env_checker=True, **limit, **mode, **options)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise UserError(_missing_package(id, spec, error)) from error
    except TypeError as error:
        if not options:
            raise environment_error(id, "its constructor", error) from error
        raise UserError(f'Environment "{id}" did not accept its options {sorted(options)}: {error}.') from error
    except Exception as error:
        raise environment_error(id, "its constructor", error) from error


def resolve_environment(path: str) -> Any:
    """Return the class or function behind ``package.module:Class``; a class without reset and step is refused."""
    if path.startswith("pettingzoo.") and importlib.util.find_spec("pettingzoo") is None:
        raise UserError(f"Environment \"{path}\" needs PettingZoo: pip install 'ludus[multiagent]'.")
    maker = resolve(path, {}, "environment")
    if isinstance(maker, type) and not (hasattr(maker, "reset") and hasattr(maker, "step")):
        raise UserError(f'Environment "{path}" is a class without reset and step; derive it from gymnasium.Env.')
    return maker


def is_path(id: str) -> bool:
    """Return whether ``id`` is ``package.module:Class``, unlike Gymnasium's ``module:Name-v0``."""
    return ":" in id and all(part.isidentifier() for part in id.rpartition(":")[2].split("."))


def find_spec(id: str) -> gymnasium.envs.registration.EnvSpec:
    """Return the spec of a registered id; without a version, the newest; an error suggests similar ids."""
    module, _, name = id.rpartition(":")
    if registers := module or ("ale_py" if name.startswith("ALE/") else ""):
        try:
            importlib.import_module(registers)
        except ImportError as error:
            extra = 'pip install "gymnasium[atari]"' if registers == "ale_py" else "install the package that has it"
            raise UserError(
                f'Environment "{id}" needs the module {registers}, which cannot be imported: {extra}.'
            ) from error
    known = gymnasium.registry
    if name in known:
        return known[name]
    versions = [key for key in known if key.rpartition("-v")[0] == name]
    if versions:
        return known[max(versions, key=lambda key: int(key.rpartition("-v")[2]))]
    raise UserError(
        f'There is no environment "{id}".{did_you_mean(name, known) or did_you_mean(name.rpartition("-v")[0], known)} '
        "`ludus list environments` shows all; give your own environment as package.module:Class."
    )


def _missing_package(id: str, spec: gymnasium.envs.registration.EnvSpec, error: Exception) -> str:
    entry = spec.entry_point if isinstance(spec.entry_point, str) else ""
    if entry.startswith("gymnasium.envs."):
        extra = {"phys2d": "jax", "tabular": "jax"}.get(entry.split(".")[2], entry.split(".")[2].replace("_", "-"))
        other = ", or use --env.backend envpool" if extra in ENVPOOL_TOO else ""
        return f'Environment "{id}" needs a package that is not installed: pip install "gymnasium[{extra}]"{other}.'
    return f'Environment "{id}" needs a package that is not installed: {error}.'


def _one_agent(name: str) -> UserError:
    return UserError(
        f'env.global_state is on (mappo and qmix turn it on), but environment "{name}" has a single agent; leave it '
        "out, or use another agent."
    )


def _construct(
    maker: Any,
    name: str,
    options: dict[str, Any],
    max_episode_steps: int,
    render_mode: str | None,
    joint: JointOptions,
) -> Environment:
    if not callable(maker):
        raise UserError(
            f'Environment "{name}" is a {type(maker).__name__}; give its class, or a function that returns a new '
            "environment each time."
        )
    if render_mode is not None:
        if not accepts_argument(maker, "render_mode"):
            raise UserError(
                f'Environment "{name}" cannot render: its constructor takes no render_mode; add that argument and a '
                "render method."
            )
        options = {**options, "render_mode": render_mode}
    _refuse_unknown(options, maker, f'Environment "{name}" has no option')
    try:
        env = maker(**options)
    except TypeError as error:
        if missing := [key for key in _required(maker) if key not in options]:
            raise UserError(
                f'Environment "{name}" cannot be made without {", ".join(missing)}; add --env.options '
                f"{missing[0]}=VALUE, or a default in its constructor."
            ) from error
        raise environment_error(name, "its constructor", error) from error
    except Exception as error:
        raise environment_error(name, "its constructor", error) from error
    if has_agents(env):
        env = JointEnv(env, name, *joint)
    elif joint.global_state:
        raise _one_agent(name)
    lacking = [part for part in REQUIRED if not hasattr(env, part)]
    if lacking:
        raise UserError(
            f'Environment "{name}" is a {type(env).__name__} without {", ".join(lacking)}; derive it from '
            "gymnasium.Env."
        )
    made = env if isinstance(env, gymnasium.Env) else GymAdapter(env)
    return TimeLimit(made, max_episode_steps) if max_episode_steps else made


def _wrap(env: Environment, path: str, arguments: dict[str, Any]) -> Environment:
    wrapper = resolve(path, {}, "wrapper")
    if not callable(wrapper):
        raise UserError(f'Wrapper "{path}" is a {type(wrapper).__name__}, not a class or function that wraps.')
    if isinstance(wrapper, type) and not issubclass(wrapper, gymnasium.Env):
        raise UserError(f'Wrapper "{path}" is a class but not a wrapper; derive it from gymnasium.Wrapper.')
    _refuse_unknown(arguments, wrapper, f'Wrapper "{path}" has no argument', skip=1)
    try:
        wrapped = wrapper(env, **arguments)
    except UserError:
        raise
    except Exception as error:
        missing = [key for key in _required(wrapper)[1:] if key not in arguments]
        if isinstance(error, TypeError) and missing:
            raise UserError(
                f'Wrapper "{path}" needs {", ".join(missing)}; write it like {path}({missing[0]}=VALUE).'
            ) from error
        raise UserError(
            f'Wrapper "{path}" raised {type(error).__name__}: {" ".join(str(error).split()) or "no message"}; fix its '
            "arguments, or the order of env.wrappers."
        ) from error
    if not isinstance(wrapped, gymnasium.Env):
        raise UserError(
            f'Wrapper "{path}" returned a {type(wrapped).__name__}, not an environment; derive it from Wrapper.'
        )
    return wrapped


def _refuse_unknown(given: Iterable[str], maker: Callable[..., Any], what: str, skip: int = 0) -> None:
    """Refuse arguments that ``maker`` does not have; its first ``skip`` parameters are not named."""
    for key in given:
        if not accepts_argument(maker, key):
            known = [name for name in inspect.signature(maker).parameters if name not in ("args", "kwargs")][skip:]
            raise UserError(f'{what} "{key}".{did_you_mean(key, known)} It takes {", ".join(known) or "none"}.')


def accepts_argument(maker: Callable[..., Any], argument: str) -> bool:
    """Return whether a constructor or function has an argument of this name."""
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):  # built in C, without a signature
        return True
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _required(maker: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


class GymAdapter(gymnasium.Env[Any, Any]):
    """Adapts an object with the methods of an environment that does not derive from gymnasium.Env."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.render_mode = getattr(env, "render_mode", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self.env.step(action)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def frame_stack(env: Any, name: str) -> int:
    """Return how many frames an observation stacks; 1 if another wrapper may change it after the stack."""
    while isinstance(env, gymnasium.Wrapper) and not isinstance(env, gymnasium.ObservationWrapper):
        if isinstance(env, FrameStackObservation):
            return env.stack_size
        passes = isinstance(env, PreviousStep) or (isinstance(env, PreprocessObservation) and name not in env.paths)
        if not (passes or type(env).__module__.startswith("gymnasium.wrappers")):
            return 1
        env = env.env
    return 1


def cannot_render(id: str) -> bool:
    """Return whether an environment is known to lack render mode rgb_array, without importing it."""
    path = id
    if not is_path(id):
        spec = gymnasium.registry.get(id.rpartition(":")[2])
        path = spec.entry_point if spec is not None and isinstance(spec.entry_point, str) else ""
    module, _, name = path.partition(":")
    found = getattr(getattr(sys.modules.get(module), name, None), "metadata", None)
    return isinstance(found, dict) and "rgb_array" not in (found.get("render_modes") or ())


def env_metadata(env: Environment) -> dict[str, Any]:
    """Return the metadata of an environment (render modes and fps), or an empty dict."""
    inner = env.unwrapped
    found = getattr(inner.env if isinstance(inner, GymAdapter) else inner, "metadata", None)
    return found if isinstance(found, dict) else {}
