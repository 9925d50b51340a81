"""A check of a user's environment that finds every problem at once, each with its fix."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig, validate
from ludus.environments.gym import Environment, env_metadata, is_path, make_environment
from ludus.environments.masks import ObservationReader
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

Trace = list[tuple[Any, ...]]  # what reset and step gave, in order
FAILED = object()  # what a call that raised gives
REPLAYED = 60  # steps that are played twice, to see whether the same seed gives the same episode


def check(
    config: EnvConfig,
    environment: Callable[..., Any] | None = None,
    steps: int = 300,
    seconds: float = 20.0,
    deadline: float = 30.0,
) -> list[Problem]:
    """Try the environment for ``steps`` random steps or ``seconds``; one call may take ``deadline`` seconds."""
    return inspect(config, environment, steps, seconds, deadline).problems


def inspect(
    config: EnvConfig,
    environment: Callable[..., Any] | None = None,
    steps: int = 300,
    seconds: float = 20.0,
    deadline: float = 30.0,
) -> Inspection:
    """As ``check``; return the problems with what was tried."""
    inspection = Inspection(config, environment, steps, seconds)
    # in a thread, as nothing else can give up on a call that never returns; it dies with the process
    thread = threading.Thread(target=inspection.run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if thread.is_alive() and inspection.overdue(deadline):
            inspection.stopped = True
            what = f"{inspection.call} did not return within {deadline:g} seconds."
            fix = "Look for an endless loop or a wait without a time limit in it."
            inspection.problems = [*inspection.problems, Problem(what, fix)]  # the thread may add to the old list
            return inspection
    return inspection


class Inspection:
    """One environment under inspection; ``problems`` grows as it goes on.

    ``tried`` is the number of random steps, ``episodes`` that of the episodes which they began.
    """

    def __init__(self, config: EnvConfig, environment: Callable[..., Any] | None, steps: int, seconds: float) -> None:
        self.problems: list[Problem] = []
        self.tried, self.episodes = 0, 0
        self.call, self.stopped = "the constructor", False
        self._config, self._environment = config, environment
        self._steps, self._until = steps, time.monotonic() + seconds
        self._since = time.monotonic()
        self._actions: Layout | None = None
        self._supported = True
        self._seeded = True  # whether reset takes a seed
        self._severity: Severity = "error"  # of what is raised from now on

    def overdue(self, deadline: float) -> bool:
        """Whether the running call has taken too long."""
        return time.monotonic() - self._since > deadline

    def run(self) -> None:
        """Inspect everything; what stops the inspection itself is a problem too, for else it would read as ready."""
        try:
            self._inspect()
        except BaseException as error:  # an environment that calls sys.exit would end this thread without a word
            what = f"The check ended in {self.call} with {type(error).__name__}: {error}."
            self._note([Problem(what, "Correct what it names, and check again: the rest was not looked at.")])

    def _inspect(self) -> None:
        env = self._make()
        if env is None:
            return
        self._look_at_spaces(env)
        trace = self._play(env, self._steps)
        self.episodes = sum(len(given) == 1 for given in trace)  # a reset gives the observation alone
        self.tried = len(trace) - self.episodes
        self._look_for_ends(env, trace)
        self._call("close", env.close)
        if trace and self._seeded:
            self._replay(trace)
        if "rgb_array" in _modes(env) and (self._environment is not None or is_path(self._config.id)):
            self._draw()

    def _note(self, found: Iterable[Problem]) -> bool:
        """Keep new problems (the same one with another example is not new); return whether there was no error."""
        found = list(found)
        known = {_essence(problem) for problem in self.problems}
        self.problems += [problem for problem in found if _essence(problem) not in known]
        return all(problem.severity == "warning" for problem in found)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the environment under the clock; what it raises is a problem, and gives FAILED."""
        self.call, self._since = name, time.monotonic()
        try:
            return function(*args, **kwargs)
        except UserError as error:
            self._note([replace(problem_from_error(error), severity=self._severity)])
        except Exception as error:
            fix = f"Correct {name}; it must work after any earlier call and for every action of the action space."
            if isinstance(error, TypeError) and "seed" in str(error):
                fix = "Declare it as reset(self, *, seed=None, options=None) and call super().reset(seed=seed) in it."
                self._seeded = False
            self._note([Problem(f"{name} raised {type(error).__name__}: {error}.", fix, self._severity)])
        return FAILED

    def _make(self, render_mode: str | None = None) -> Environment | None:
        def construct() -> Environment:
            validate(self._config)
            return make_environment(self._config, self._environment, render_mode)

        env = self._call("the constructor", construct)
        return None if env is FAILED else env

    def _look_at_spaces(self, env: Environment) -> None:
        for root in ("observation", "action"):
            space = getattr(env, f"{root}_space")
            if not isinstance(space, spaces.Space):
                fix = f"Set self.{root}_space to a Gymnasium space in __init__."
                self._supported = self._note([Problem(f"{root}_space is of type {type(space).__name__}.", fix)])
                continue
            try:
                layout = Layout(space, root)
            except UserError as error:
                self._supported = self._note([Problem(str(error), "Describe that part with a supported space.")])
                continue
            if root == "action":
                self._actions = layout
                self._note(action_space_problems(space))

    def _play(self, env: Environment, steps: int) -> Trace:
        """Step at random and look at all that comes back; return it, to compare."""
        trace: Trace = []
        episode = Masked(env, self._config.mask, self._actions) if self._supported and self._actions else None
        alive = self._reset(env, episode, trace)
        if not isinstance(env.action_space, spaces.Space):
            return trace
        env.action_space.seed(0)
        while alive and len(trace) < steps and not self.stopped and time.monotonic() < self._until:
            action = episode.sample() if episode else env.action_space.sample()
            given = self._call("step", env.step, action)
            if given is FAILED:
                break
            self._note(step_problems(given))
            result = parse_step(given)
            if result is None or any(np.ndim(x) for x in result[2:4]):  # whether the episode is over cannot be known
                break
            ended = bool(result[2]) or bool(result[3])
            self._look_at(env, episode, result[0], result[4], ended)
            trace.append(result[:4])
            alive = self._reset(env, episode, trace) if ended else True
        return trace

    def _reset(self, env: Environment, episode: Masked | None, trace: Trace) -> bool:
        """Begin an episode, in any way that the environment can; return whether it may be stepped now."""
        given = self._call("reset", env.reset, seed=len(trace)) if self._seeded else FAILED
        if given is FAILED and not self._seeded:
            given = self._call("reset", env.reset)
        if given is FAILED:
            return False
        self._note(reset_problems(given))
        if (result := parse_reset(given)) is not None:
            self._look_at(env, episode, result[0], result[1], False)
            trace.append(result[:1])
        return True

    def _look_at(self, env: Environment, episode: Masked | None, observation: Any, info: Any, ended: bool) -> None:
        fits = self._note(observation_problems(env.observation_space, observation))
        if episode is None or not fits:
            return
        try:
            episode.see(observation, info if isinstance(info, dict) else {}, ended)
        except UserError as error:
            self._note([Problem(str(error), "Correct the mask: one entry per choice, at least one of them allowed.")])

    def _look_for_ends(self, env: Environment, trace: Trace) -> None:
        """Warn of episodes that may never end: an evaluation plays whole ones."""
        limit = self._config.max_episode_steps or getattr(getattr(env, "spec", None), "max_episode_steps", None)
        begun = sum(len(given) == 1 for given in trace)
        sound = all(problem.severity == "warning" for problem in self.problems)
        if sound and begun == 1 and len(trace) >= self._steps and not limit:
            what = f"No episode ended in {len(trace) - 1} random steps, and nothing limits their length."
            fix = "If they may go on for ever, give --env.max-episode-steps, such as 1000: evaluation plays to the end."
            self._note([Problem(what, fix, "warning")])

    def _replay(self, trace: Trace) -> None:
        """Play the beginning again in a new environment with the same seeds and actions."""
        env = self._make()
        if env is None:
            return
        known = list(self.problems)
        again = self._play(env, min(len(trace), REPLAYED))
        self._call("close", env.close)
        self.problems = known  # the same once more, perhaps in other words
        differs = [i for i, (a, b) in enumerate(zip(trace, again, strict=False)) if not _same(a, b)]
        if not differs:
            return
        what = "Two episodes with the same seed and actions differ."
        fix = "Draw all random numbers from self.np_random, which reset(seed) seeds."
        if len(trace[differs[0]]) == 1:
            what, fix = "reset ignores its seed.", "Call super().reset(seed=seed) in it and draw from self.np_random."
        self._note([Problem(f"{what[:-1]}: runs will not be repeatable.", fix, "warning")])

    def _draw(self) -> None:
        """Ask for a picture, as ``ludus play`` does; what fails here is a warning, for training needs none."""
        self._severity = "warning"
        env = self._make("rgb_array")
        if env is None:
            return
        if self._call("reset", env.reset) is not FAILED:
            picture = self._call("render", env.render)
            if picture is not FAILED:
                self._note(render_problems(picture))
        self._call("close", env.close)


class Masked:
    """Random actions that respect the masks seen last."""

    def __init__(self, env: Environment, mask: str, actions: Layout) -> None:
        self._env, self._mask, self._layout = env, mask, actions
        self._reader: ObservationReader | None = None
        self._seen: Arrays = {}
        self._random = np.random.default_rng(0)

    def see(self, observation: Any, info: dict[str, Any], ended: bool) -> None:
        """Take in an observation; the first one shows where the masks are."""
        if self._reader is None:
            space = self._env.observation_space
            self._reader = ObservationReader(space, self._layout.specs, self._mask, info, "environment")
        if self._reader.masks is None:
            return
        self._seen = {}
        arrays = self._reader.read(observation, info)
        masks = {name: arrays[name][None] for name in self._reader.masks.specs}
        self._reader.masks.resolve_empty(masks, np.array([ended]))
        self._seen = masks

    def sample(self) -> Any:
        """Draw an action that is allowed."""
        drawn = self._env.action_space.sample()
        if not self._seen or self._reader is None or self._reader.masks is None:
            return drawn
        arrays = {name: x[None] for name, x in self._layout.flatten(drawn).items()}
        arrays.update(self._reader.masks.sample(self._seen, self._random))
        return self._layout.unflatten_row(arrays, 0)


def _essence(problem: Problem) -> str:
    return problem.what.partition(" (for example")[0]


def _modes(env: Environment) -> Sequence[str]:
    """The render modes that an environment says it has."""
    return env_metadata(env).get("render_modes") or ()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == object or (a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b)))))  # NaN is NaN
