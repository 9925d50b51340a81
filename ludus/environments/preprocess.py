"""Wrappers for the ops of ``preprocess.*`` that run in the environment's process. Needs no torch.

What they keep between steps is in attributes of plain types, so that snapshots have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.calls import Call, argument_defaults, check_arguments
from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs, is_mask
from ludus.environments.config import EnvConfig
from ludus.environments.spaces import Layout
from ludus.preprocess.config import (
    ENVIRONMENT_OPS,
    PREVIOUS,
    SETTING,
    STACK_OPS,
    PreprocessConfig,
    action_ops,
    observation_ops,
)
from ludus.preprocess.pipeline import make_op

Array = NDArray[Any]
Wrapper = gymnasium.Wrapper[Any, Any, Any, Any]
PATH = __name__
REWARD = "previous_reward"
NO_WRAPPERS = ("vector", "envpool", "tensor")  # backends


def with_wrappers(config: EnvConfig, preprocess: PreprocessConfig) -> EnvConfig:
    """Add the wrappers of the ops that run in the environment's process; refuse backends that have none.

    ``env.axes`` of observations that are stacked later is left out: it is that of the stacks.
    """
    observed = observation_ops(preprocess.observation)
    images = [f"{op.pattern}: {op.text}" for op in observed if op.call.name in ENVIRONMENT_OPS]
    previous = [op.call.name for op in observed if op.call.name in PREVIOUS]
    wrappers = [_action_wrapper(call) for call in action_ops(preprocess.action)]
    wrappers.reverse()  # the first op of preprocess.action is next to the policy, so its wrapper is the outermost
    if images:
        wrappers.append(f"{PATH}:PreprocessObservation({_arguments({'ops': images})})")
    if previous:
        wrappers.append(f"{PATH}:PreviousStep({_arguments({'names': previous})})")
    if wrappers and config.backend in NO_WRAPPERS:
        key, text = (
            ("preprocess.action", preprocess.action[0]) if preprocess.action else (SETTING, (images or previous)[0])
        )
        raise UserError(
            f'{key} has "{text}", which runs in the process of each environment, but env.backend is {config.backend}; '
            "set it to simple or subproc."
        )
    stacked = [op for op in observed if op.call.name in STACK_OPS]
    axes = [x for x in config.axes if not any(fnmatchcase(x.rpartition("=")[0].strip(), op.pattern) for op in stacked)]
    return replace(config, wrappers=(*config.wrappers, *wrappers), axes=tuple(axes))


def refuse_masked_repeats(pipeline: Sequence[str], observation: Specs, environment: str) -> None:
    """Refuse actions that are repeated where masks may forbid them meanwhile."""
    if pipeline and any(map(is_mask, observation)):
        raise UserError(
            f'preprocess.action has "{pipeline[0]}", but {environment} has action masks, which may forbid an action '
            "when it is repeated; remove it, or repeat allowed actions in the environment."
        )


def _action_wrapper(call: Call) -> str:
    kind = ACTION_WRAPPERS[call.name]
    check_arguments(kind, call, 1, f"preprocess.action {call.name}")
    if missing := [name for name in argument_defaults(kind, 1) if name not in call.arguments]:
        raise UserError(
            f"preprocess.action has {call.name} without {missing[0]}; give it, as in {EXAMPLES[call.name]}."
        )
    return f"{PATH}:{kind.__name__}({_arguments(call.arguments)})"


def _arguments(arguments: dict[str, Any]) -> str:
    """Return arguments as ``core.calls`` parses them; TOML has the strings, numbers and lists of JSON."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())


class PreprocessObservation(Wrapper):
    """Applies ops to parts of the observation."""

    def __init__(self, env: gymnasium.Env[Any, Any], ops: Iterable[str]) -> None:
        super().__init__(env)
        layout = Layout(env.observation_space, "observation", max_length=1)
        specs = {name: leaf.spec for name, leaf in layout.leaves.items()}
        self._chains: dict[str, list[Callable[[Array], Array]]] = {}
        for op in observation_ops(ops):
            for name in op.select(specs):
                made = make_op(op, name, specs[name], ENVIRONMENT_OPS)
                self._chains.setdefault(name, []).append(made.apply)
                specs[name] = made.output
        self.paths = {name: layout.leaves[name].path for name in self._chains}  # of the parts that change
        self.raw = {name: (layout.specs[name].shape, layout.specs[name].dtype) for name in self._chains}
        space = env.observation_space
        for name, path in self.paths.items():
            space = replace_part(space, path, _box(specs[name]))
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._apply(observation), info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._apply(observation), reward, terminated, truncated, info

    def _apply(self, observation: Any) -> Any:
        for name, path in self.paths.items():
            observation = replace_part(observation, path, self.process(name, part_of(observation, path)))
        return observation

    def process(self, name: str, x: Array) -> Array:
        """Apply the ops to one part."""
        for function in self._chains[name]:
            x = function(x)
        return x


class PreviousStep(Wrapper):
    """Adds the previous action and reward to the observation, zero at the start of an episode.

    Choices are one-hot vectors, which are zero there, too.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], names: Iterable[str]) -> None:
        super().__init__(env)
        layout = Layout(env.action_space, "action")
        self._flatten = layout.flatten
        specs = layout.specs if "previous_action" in names else {}
        many = len(specs) > 1
        self._names = {name: f"previous_action/{name}" if many else "previous_action" for name in specs}
        self._sizes = {name: spec.sizes for name, spec in specs.items()}
        self.with_reward = REWARD in names
        added: dict[str, spaces.Space[Any]] = {self._names[name]: _previous_space(spec) for name, spec in specs.items()}
        if self.with_reward:
            added[REWARD] = spaces.Box(-np.inf, np.inf, (), np.float32)
        self.zeros = {name: np.zeros(space.shape or (), space.dtype) for name, space in added.items()}
        parts = _parts(env.observation_space)
        if taken := [name for name in added if name in parts]:
            raise UserError(
                f"{SETTING} has {taken[0]}, but the environment has an observation of this name; remove it."
            )
        self.observation_space = spaces.Dict(parts | added)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return _parts(observation) | self.zeros, info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return _parts(observation) | self.encode(self._flatten(action), reward), reward, terminated, truncated, info

    def encode(self, action: Mapping[str, Array], reward: Any) -> dict[str, Array]:
        """Return the observations after a step; ``action`` has its parts by name, with choices counted from 0."""
        added = {self._names[name]: self._encode(name, x) for name, x in action.items() if name in self._names}
        if self.with_reward:
            added[REWARD] = np.asarray(reward, np.float32).reshape(())
        return added

    def split(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        """Separate an observation, or a batch, into that of the environment inside and what was added, if it was."""
        if not isinstance(observation, dict) or not self.zeros.keys() <= observation.keys():
            return observation, {}
        inner: Any = {name: x for name, x in observation.items() if name not in self.zeros}
        space = self.env.observation_space
        if inner.keys() == _parts(space).keys() and not isinstance(space, spaces.Dict):
            inner = tuple(inner[key] for key in _parts(space))
            inner = inner if isinstance(space, spaces.Tuple) else inner[0]
        return inner, {name: observation[name] for name in self.zeros}

    def join(self, observation: Any, added: Mapping[str, Any]) -> dict[str, Any]:
        """Return an observation of the environment inside, or a batch, with what is added."""
        nested = isinstance(self.env.observation_space, spaces.Dict | spaces.Tuple)
        return (_parts(observation) if nested else {"observation": observation}) | dict(added)

    def _encode(self, name: str, action: Array) -> Array:
        if sizes := self._sizes[name]:
            hot = [np.arange(n) == choice for n, choice in zip(sizes, action.ravel().tolist(), strict=True)]
            return np.concatenate(hot).astype(np.int8)
        zeros = self.zeros[self._names[name]]
        return action.astype(zeros.dtype).reshape(zeros.shape)


def find_wrappers(env: Any) -> tuple[PreviousStep | None, PreprocessObservation | None]:
    """Return the wrappers that ``with_wrappers`` put around an environment last, to apply them elsewhere."""
    previous = env if isinstance(env, PreviousStep) else None
    inner = env if previous is None else previous.env
    return previous, inner if isinstance(inner, PreprocessObservation) else None


class RepeatAction(Wrapper):
    """Takes each action ``n`` times, or until the episode ends, and adds up the rewards."""

    def __init__(self, env: gymnasium.Env[Any, Any], n: int) -> None:
        super().__init__(env)
        if isinstance(n, bool) or not isinstance(n, int) or n < 2:
            raise UserError(f"preprocess.action repeat(n={n}): n must be a whole number above 1.")
        self.n = n

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(self.n):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class StickyAction(Wrapper):
    """Repeats the previous action with some probability instead of taking the new one (Machado et al. 2018).

    Unlike Gymnasium's, it has a generator of its own, seeded by each reset, so that an environment whose ``reset``
    ignores the seed is repeatable too.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], probability: float) -> None:
        super().__init__(env)
        if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 < probability < 1:
            raise UserError(f"preprocess.action sticky(probability={probability}): it must be between 0 and 1.")
        self.probability = float(probability)
        self._generator = np.random.default_rng(0)
        self._previous: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._generator = np.random.default_rng([seed, 1])  # not the numbers of the environment itself
        self._previous = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        repeats = self._previous is not None and self._generator.random() < self.probability
        if not repeats:
            self._previous = action
        return self.env.step(self._previous)


ACTION_WRAPPERS: dict[str, type[Wrapper]] = {"repeat": RepeatAction, "sticky": StickyAction}
EXAMPLES = {"repeat": "repeat(n=4)", "sticky": "sticky(probability=0.25)"}


def _previous_space(spec: Spec) -> spaces.Space[Any]:
    if spec.kind == "categorical":
        return spaces.MultiBinary(sum(spec.sizes))
    if spec.kind == "binary":
        return spaces.MultiBinary(spec.size)
    low, high = (np.where(np.isfinite(x), x, s * np.inf) for x, s in zip(spec.bounds, (-1, 1), strict=True))
    return spaces.Box(np.minimum(low, 0).ravel(), np.maximum(high, 0).ravel(), (spec.size,), np.float32)


def _box(spec: Spec) -> spaces.Box:
    low, high = spec.bounds
    dtype: Any = np.dtype(spec.dtype)
    return spaces.Box(low.astype(dtype), high.astype(dtype), spec.shape, dtype)


def _parts(value: Any) -> dict[str, Any]:
    """Return the parts of an observation, or of its space, as a dict: the only part is called ``observation``."""
    if isinstance(value, spaces.Dict | spaces.Tuple):
        value = value.spaces
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple):
        return {str(i): x for i, x in enumerate(value)}
    return {"observation": value}


def part_of(tree: Any, path: tuple[str | int, ...]) -> Any:
    """Return the part of a nested value at ``path``."""
    return reduce(getitem, path, tree)


def replace_part(tree: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a nested value, or a nested space, with another part at ``path``."""
    if not path:
        return value
    key, *rest = path
    if isinstance(tree, spaces.Dict):
        return spaces.Dict({k: replace_part(x, tuple(rest), value) if k == key else x for k, x in tree.spaces.items()})
    if isinstance(tree, dict):
        return {k: replace_part(x, tuple(rest), value) if k == key else x for k, x in tree.items()}
    parts = [replace_part(x, tuple(rest), value) if i == key else x for i, x in enumerate(tree)]
    return spaces.Tuple(parts) if isinstance(tree, spaces.Tuple) else tuple(parts)
