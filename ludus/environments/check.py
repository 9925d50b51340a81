"""Check a user's environment and report all problems at once, each with its fix."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from ludus.core.errors import UserError
from ludus.core.spec import Specs, mask_condition, mask_name
from ludus.environments.config import EnvConfig, validate
from ludus.environments.gym import Environment, env_metadata, frame_stack, is_path, make_environment
from ludus.environments.observations import ObservationReader
from ludus.environments.problems import (
    Problem,
    Severity,
    action_space_problems,
    observation_problems,
    parse_reset,
    parse_step,
    problem_from_error,
    render_problems,
    reset_problems,
    step_problems,
)
from ludus.environments.spaces import Arrays, Layout

Trace = list[tuple[Any, ...]]  # the results of reset and step, in order
FAILED = object()  # the result of a call that raised
REPLAYED_STEPS = 60  # steps that are played twice, to see whether the same seed gives the same episode


def check_environment(
    config: EnvConfig,
    environment: Callable[..., Any] | None = None,
    steps: int = 300,
    seconds: float = 20.0,
    deadline: float = 30.0,
) -> EnvironmentCheck:
    """Try an environment for ``steps`` random steps or ``seconds``; a single call may take ``deadline`` seconds."""
    check = EnvironmentCheck(config, environment, steps, seconds)
    # a call that never returns can only be abandoned in another thread, which ends with the process
    thread = threading.Thread(target=check.run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if thread.is_alive() and time.monotonic() - check.call_start > deadline:
            check.stopped = True
            what = f"{check.call} did not return within {deadline:g} seconds."
            fix = "Look for an endless loop or a wait without a time limit in it."
            check.problems = [*check.problems, Problem(what, fix)]  # the thread may still append to the old list
            break
    return check


class EnvironmentCheck:
    """Check one environment; ``problems``, ``tried`` (random steps) and ``episodes`` are the results."""

    def __init__(self, config: EnvConfig, environment: Callable[..., Any] | None, steps: int, seconds: float) -> None:
        self.problems: list[Problem] = []
        self.tried, self.episodes = 0, 0
        self.call, self.stopped = "the constructor", False
        self._config, self._environment = config, environment
        self._steps, self._until = steps, time.monotonic() + seconds
        self.call_start = time.monotonic()
        self._actions: Layout | None = None
        self._spaces_supported = True
        self._accepts_seed = True
        self._severity: Severity = "error"  # of exceptions in the calls that follow

    def run(self) -> None:
        """Run all checks; an exception that stops them is reported as a problem."""
        try:
            self._check()
        except BaseException as error:  # sys.exit in an environment would end this thread silently
            what = f"The check ended in {self.call} with {type(error).__name__}: {error}."
            self._add([Problem(what, "Fix this and check again; what follows was not checked.")])

    def _check(self) -> None:
        env = self._make()
        if env is None:
            return
        self._check_spaces(env)
        trace = self._play(env, self._steps)
        self.episodes = sum(len(result) == 1 for result in trace)  # of a reset, the trace has the observation alone
        self.tried = len(trace) - self.episodes
        self._check_episode_length(env)
        self._call("close", env.close)
        if trace and self._accepts_seed:
            self._check_seeding(trace)
        modes = env_metadata(env).get("render_modes") or ()
        if "rgb_array" in modes and (self._environment is not None or is_path(self._config.id)):
            self._check_render()

    def _add(self, found: Iterable[Problem]) -> bool:
        """Add problems that are new except for their example; return whether none of them is an error."""
        found = list(found)
        known = {_without_example(problem) for problem in self.problems}
        self.problems += [problem for problem in found if _without_example(problem) not in known]
        return all(problem.severity == "warning" for problem in found)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the environment; an exception becomes a problem, and FAILED is returned."""
        self.call, self.call_start = name, time.monotonic()
        try:
            return function(*args, **kwargs)
        except UserError as error:
            self._add([replace(problem_from_error(error), severity=self._severity)])
        except Exception as error:
            fix = f"Correct {name}; it must work after any earlier call and for every action of the action space."
            if isinstance(error, TypeError) and "seed" in str(error):
                fix = "Declare it as reset(self, *, seed=None, options=None) and call super().reset(seed=seed) in it."
                self._accepts_seed = False
            self._add([Problem(f"{name} raised {type(error).__name__}: {error}.", fix, self._severity)])
        return FAILED

    def _make(self, render_mode: str | None = None) -> Environment | None:
        if self._call("the constructor", validate, self._config) is FAILED:
            return None
        env = self._call("the constructor", make_environment, self._config, self._environment, render_mode)
        return None if env is FAILED else env

    def _check_spaces(self, env: Environment) -> None:
        for root in ("observation", "action"):
            space = getattr(env, f"{root}_space")
            if not isinstance(space, spaces.Space):
                fix = f"Set self.{root}_space to a Gymnasium space in __init__."
                self._spaces_supported = self._add([Problem(f"{root}_space is of type {type(space).__name__}.", fix)])
                continue
            try:
                layout = Layout(space, root, max_length=self._config.max_length if root == "observation" else 0)
            except UserError as error:
                self._spaces_supported = self._add([Problem(str(error), "Describe that part with a supported space.")])
                continue
            if root == "action":
                self._actions = layout
                self._add(action_space_problems(space))

    def _play(self, env: Environment, steps: int) -> Trace:
        """Take random steps and check their results; return these for comparison."""
        trace: Trace = []
        sampler = MaskedSampler(env, self._config, self._actions) if self._spaces_supported and self._actions else None
        running = self._reset(env, sampler, trace)
        if not isinstance(env.action_space, spaces.Space):
            return trace
        env.action_space.seed(0)
        while running and len(trace) < steps and not self.stopped and time.monotonic() < self._until:
            action = sampler.sample() if sampler else env.action_space.sample()
            result = self._call("step", env.step, action)
            if result is FAILED:
                break
            self._add(step_problems(result))
            values = parse_step(result)
            if values is None or any(np.ndim(x) for x in values[2:4]):  # unknown whether the episode has ended
                break
            ended = bool(values[2]) or bool(values[3])
            self._check_observation(env, sampler, values[0], values[4], ended)
            trace.append(values[:4])
            running = self._reset(env, sampler, trace) if ended else True
        return trace

    def _reset(self, env: Environment, sampler: MaskedSampler | None, trace: Trace) -> bool:
        """Reset with a seed, or without one if that fails; return whether the environment can be stepped."""
        result = self._call("reset", env.reset, seed=len(trace)) if self._accepts_seed else FAILED
        if result is FAILED and not self._accepts_seed:
            result = self._call("reset", env.reset)
        if result is FAILED:
            return False
        self._add(reset_problems(result))
        if (values := parse_reset(result)) is not None:
            self._check_observation(env, sampler, *values, ended=False)
            trace.append(values[:1])
        return True

    def _check_observation(
        self, env: Environment, sampler: MaskedSampler | None, observation: Any, info: Any, ended: bool
    ) -> None:
        fits = self._add(observation_problems(env.observation_space, observation))
        if sampler is None or not fits:
            return
        try:
            sampler.observe(observation, info if isinstance(info, dict) else {}, ended)
        except UserError as error:
            self._add([problem_from_error(error)])

    def _check_episode_length(self, env: Environment) -> None:
        """Warn if episodes may never end, as an evaluation plays whole ones."""
        limit = self._config.max_episode_steps or getattr(getattr(env, "spec", None), "max_episode_steps", None)
        no_errors = all(problem.severity == "warning" for problem in self.problems)
        if no_errors and self.episodes == 1 and self.tried + 1 >= self._steps and not limit:
            what = f"No episode ended in {self.tried} random steps, and nothing limits their length."
            fix = "If they may go on for ever, give --env.max-episode-steps, such as 1000: evaluation plays to the end."
            self._add([Problem(what, fix, "warning")])

    def _check_seeding(self, trace: Trace) -> None:
        """Play the beginning again in a new environment with the same seeds and actions."""
        env = self._make()
        if env is None:
            return
        known = list(self.problems)
        again = self._play(env, min(len(trace), REPLAYED_STEPS))
        self._call("close", env.close)
        self.problems = known  # those of the second time are the same
        different = [a for a, b in zip(trace, again, strict=False) if not _same(a, b)]
        if not different:
            return
        what = "Two episodes with the same seed and actions differ"
        fix = "Draw all random numbers from self.np_random, which reset(seed) seeds."
        if len(different[0]) == 1:
            what, fix = "reset ignores its seed", "Call super().reset(seed=seed) in it and draw from self.np_random."
        self._add([Problem(f"{what}: runs will not be repeatable.", fix, "warning")])

    def _check_render(self) -> None:
        """Render an image, as ``ludus play`` does; failures are warnings, as training does not render."""
        self._severity = "warning"
        env = self._make("rgb_array")
        if env is None:
            return
        if self._call("reset", env.reset) is not FAILED:
            image = self._call("render", env.render)
            if image is not FAILED:
                self._add(render_problems(image))
        self._call("close", env.close)


class MaskedSampler:
    """Samples random actions that the last action masks allow."""

    def __init__(self, env: Environment, config: EnvConfig, actions: Layout) -> None:
        self._env, self._config, self._layout = env, config, actions
        self._reader: ObservationReader | None = None
        self._masks: Arrays = {}
        self._random = np.random.default_rng(0)

    def observe(self, observation: Any, info: dict[str, Any], ended: bool) -> None:
        """Read an observation with its masks; the first one shows where they are."""
        if self._reader is None:
            space, frames = self._env.observation_space, partial(frame_stack, self._env)
            self._reader = ObservationReader(space, self._layout.specs, self._config, info, "environment", frames)
        self._masks = {}
        arrays = self._reader.read(observation, info)
        if self._reader.masks is None:
            return
        masks = {name: arrays[name][None] for name in self._reader.masks.specs}
        self._reader.masks.resolve_empty(masks, np.array([ended]))
        self._masks = masks

    def sample(self) -> Any:
        """Sample an allowed action."""
        action = self._env.action_space.sample()
        if not self._masks:
            return action
        arrays = {name: x[None] for name, x in self._layout.flatten(action).items()}
        arrays.update(sample_allowed(self._layout.specs, self._masks, self._random))
        return self._layout.unflatten_row(arrays, 0)


def sample_allowed(actions: Specs, masks: Arrays, random: np.random.Generator) -> Arrays:
    """Sample allowed choices uniformly for every discrete action, ``[B, …]`` by name.

    ``masks`` are ``[B, choices]``. Of a conditional one, ``[B, n, choices]``, the row of the sampled choice is used.
    """
    batch = len(next(iter(masks.values())))
    drawn: Arrays = {}
    waiting = [name for name, spec in actions.items() if spec.choices]
    while waiting:
        name = waiting.pop(0)
        spec, other = actions[name], mask_condition(name, actions, masks)
        if other in waiting:
            waiting.append(name)
            continue
        mask = masks.get(mask_name(name, actions, other))
        if mask is None:
            mask = np.ones((batch, sum(spec.choices)), np.bool_)
        elif other:
            mask = mask[np.arange(batch), drawn[other]]
        parts = np.split(random.random(mask.shape) * mask, np.cumsum(spec.choices[:-1]), axis=1)
        drawn[name] = np.stack([part.argmax(axis=1) for part in parts], axis=1).reshape(batch, *spec.shape)
    return drawn


def _without_example(problem: Problem) -> str:
    return problem.what.partition(" (for example")[0]


def _same(a: Any, b: Any) -> bool:
    """Compare nested values; NaNs are equal, and objects are not compared."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == object or (a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b)))))
