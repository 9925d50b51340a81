"""Find problems in the values that an environment returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

Severity = Literal["error", "warning"]
FIX_NAN = "Look for a division by zero or an overflow."


@dataclass(frozen=True)
class Problem:
    """A problem with an environment, and how to fix it."""

    what: str
    fix: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.what.rstrip('.')}; {self.fix[:1].lower()}{self.fix[1:]}"


def problem_from_error(error: Exception) -> Problem:
    """Split the message of a UserError into problem and fix."""
    message = " ".join(str(error).split())
    what, raised, _ = message.partition("; fix it there")
    if raised:
        return Problem(f"{what}.", "Correct it there.")
    for separator in (". ", "; ", ": pip "):
        what, found, fix = message.partition(separator)
        if found:
            return Problem(f"{what}.", f"pip {fix}" if "pip" in separator else fix[:1].upper() + fix[1:])
    return Problem(message, "Change the settings.")


def reset_problems(result: Any) -> Iterator[Problem]:
    """Check what ``reset`` returned, except for the observation."""
    if not isinstance(result, tuple) or len(result) != 2:
        what = f"reset returned {describe_result(result)}, not the two values observation and info."
        yield Problem(what, "Return observation, info.")
    elif not isinstance(result[1], dict):
        yield Problem(f"reset returned an info of type {_type(result[1])}.", "Return a dict as info; it may be empty.")


def step_problems(result: Any) -> Iterator[Problem]:
    """Check what ``step`` returned, except for the observation."""
    if not isinstance(result, tuple) or len(result) != 5:
        fix = "Return the five values observation, reward, terminated, truncated, info (Gymnasium 0.26 and later)."
        yield Problem(f"step returned {describe_result(result)}, not five values.", fix)
    values = parse_step(result)
    if values is None:
        return
    _, reward, terminated, truncated, info = values
    number = to_float(reward)
    if number is None:
        several = " For rewards by agent, add possible_agents, a list of their names." if type(reward) is dict else ""
        what = f"The reward is of type {_type(reward)}, which is not a number."
        yield Problem(what, f"Return the reward as a float.{several}")
    elif not isinstance(reward, Real | np.bool_):
        what = f"The reward is of type {_type(reward)}, an array without dimensions, and is converted to a number."
        yield Problem(what, "Return float(reward).", "warning")
    if number is not None and not np.isfinite(number):
        yield Problem("The reward is NaN or infinite.", FIX_NAN)
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            severity: Severity = "warning" if _converts_to_bool(value) else "error"  # training converts it too
            yield Problem(f"{name} is of type {_type(value)}, not bool.", f"Return bool({name}).", severity)
    if not isinstance(info, dict):
        yield Problem(f"step returned an info of type {_type(info)}.", "Return a dict as info; it may be empty.")


def parse_reset(result: Any) -> tuple[Any, Any] | None:
    """Return observation and info of a reset, also of the old API without info; None if there is no observation."""
    pair = isinstance(result, tuple | list) and len(result) == 2
    if pair and (isinstance(result, tuple) or isinstance(result[1], dict)):
        return result[0], result[1]
    return None if result is None or isinstance(result, tuple) else (result, {})


def parse_step(result: Any) -> tuple[Any, ...] | None:
    """Return the five values of a step; in the old API with four, ``done`` counts as ``terminated``."""
    if not isinstance(result, tuple | list) or len(result) not in (4, 5):
        return None
    return tuple(result) if len(result) == 5 else (*result[:3], False, result[3])


def render_problems(rendered: Any) -> Iterator[Problem]:
    """Check what ``render`` returned in render_mode rgb_array."""
    array = np.asarray(rendered)
    if array.ndim != 3 or array.shape[-1] != 3 or array.dtype != np.uint8:
        found = _type(rendered) if array.dtype == object else f"{array.dtype} of shape {array.shape}"
        fix = "Return an image as uint8 of shape (height, width, 3); only `ludus play` needs it."
        yield Problem(f"render returned {found} in render_mode rgb_array.", fix, "warning")


def observation_problems(
    space: spaces.Space[Any], value: Any, name: str = "observation", prefix: str = ""
) -> Iterator[Problem]:
    """Check an observation against its space, part by part."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        yield from _nested_problems(space, value, name, prefix)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        array = np.asarray(value)
        if array.shape != space.shape or not (np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_):
            yield _mismatch(name, array, f"integers of shape {space.shape}")
        elif not space.contains(value if array.dtype != np.bool_ else array.astype(np.int8)):
            yield Problem(f'Observation "{name}" lies outside its space {space}.', "Widen the space or fix the value.")
    elif isinstance(space, spaces.Box):
        yield from _box_problems(space, value, name)
    elif isinstance(space, spaces.Sequence):
        yield from _list_problems(space.feature_space, value, name, space.stack)
    elif isinstance(space, spaces.Graph) and isinstance(value, spaces.GraphInstance):  # else an error when it is read
        yield from _list_problems(space.node_space, value.nodes, f"{name}/nodes", stacked=True)
        if space.edge_space is not None and value.edges is not None:
            yield from _list_problems(space.edge_space, value.edges, f"{name}/edges", stacked=True)
    elif isinstance(space, spaces.OneOf) and isinstance(value, tuple) and len(value) == 2:
        number = int(value[0])
        if 0 <= number < len(space.spaces):
            yield from observation_problems(space.spaces[number], value[1], f"{name}/{number}", f"{name}/{number}/")


def _list_problems(space: spaces.Space[Any], value: Any, name: str, stacked: bool) -> Iterator[Problem]:
    """Check the elements of a list up to the first with a problem."""
    if not stacked and not isinstance(value, tuple):
        yield Problem(f'Observation "{name}" is of type {_type(value)}, but a Sequence.', "Return a tuple of elements.")
        return
    for element in iterate(batch_space(space), value) if stacked else value:
        found = list(observation_problems(space, element, name, f"{name}/"))
        yield from found
        if found:
            return


def _nested_problems(space: spaces.Dict | spaces.Tuple[Any], value: Any, name: str, prefix: str) -> Iterator[Problem]:
    wanted = Mapping if isinstance(space, spaces.Dict) else tuple
    if not isinstance(value, wanted):
        yield Problem(
            f'Observation "{name}" is of type {_type(value)}, but its space is a {type(space).__name__}.',
            f"Return a {'dict' if wanted is Mapping else 'tuple'} with the parts of the space.",
        )
        return
    children: list[tuple[Any, spaces.Space[Any]]]
    children = list(space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces))
    keys = set(value) if isinstance(value, Mapping) else set(range(len(value)))
    if keys != {key for key, _ in children}:
        yield Problem(
            f'Observation "{name}" has the parts {sorted(map(str, keys))}, but its space has '
            f"{sorted(str(key) for key, _ in children)}.",
            "Return exactly the parts of the space.",
        )
    for key, child in children:
        if key in keys:
            yield from observation_problems(child, value[key], f"{prefix}{key}", f"{prefix}{key}/")


def _box_problems(space: spaces.Box, value: Any, name: str) -> Iterator[Problem]:
    array = np.asarray(value)
    is_number = np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_
    has_dtype = not isinstance(value, list | int | float)
    if array.shape != space.shape or not is_number or (has_dtype and not np.can_cast(array.dtype, space.dtype, "safe")):
        if array.shape != space.shape or not is_float_cast(array.dtype, np.dtype(space.dtype)):
            yield _mismatch(name, array, f"{space.dtype} of shape {space.shape}")
            return
        what = f'Observation "{name}" is {array.dtype}, and is cast to {space.dtype} of its space.'
        yield Problem(what, "Convert it (.astype), or change the space.", "warning")
        array = array.astype(space.dtype)
    if not np.isfinite(array).all():
        yield Problem(f'Observation "{name}" has NaN or infinite values.', FIX_NAN)
    elif (array < space.low).any() or (array > space.high).any():
        yield out_of_bounds(name, array[(array < space.low) | (array > space.high)].flat[0])


def out_of_bounds(name: str, value: float) -> Problem:
    """Return the warning for a value outside the bounds of its Box, which training uses unchanged."""
    return Problem(
        f'Observation "{name}" lies outside the bounds of its Box (for example {value:g}).',
        "Widen low and high of the space, or clip the values.",
        "warning",
    )


def action_space_problems(space: spaces.Space[Any], name: str = "action", prefix: str = "") -> Iterator[Problem]:
    """Check the bounds of an action space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, child in children:
            yield from action_space_problems(child, f"{prefix}{key}", f"{prefix}{key}/")
    if not isinstance(space, spaces.Box):
        return
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        yield Problem(
            f'The Box of action "{name}" has infinite bounds.',
            "Give it finite bounds (−1 to 1 is usual), so that actions can be scaled to it.",
            "warning",
        )
    if (space.low == space.high).any():
        yield Problem(
            f'The Box of action "{name}" has a low that is not below its high: nothing can be chosen there.',
            "Make low < high everywhere, or leave that number out.",
            "warning",
        )


def is_float_cast(found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether both types are floats, so that a cast loses no more than precision."""
    return np.issubdtype(found, np.floating) and np.issubdtype(wanted, np.floating)


def is_lossless(given: Any, found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether a cast loses nothing, or the value was a plain Python number or list, which has no dtype."""
    if np.can_cast(found, wanted, "safe"):
        return True
    if np.issubdtype(wanted, np.integer):
        return np.issubdtype(found, np.integer) and (wanted == np.int64 or isinstance(given, int | list))
    return isinstance(given, int | float | list) and np.issubdtype(found, np.number)


def to_float(reward: Any) -> float | None:
    """Convert a reward (a number or an array without dimensions) to a float; None if it is neither."""
    if getattr(reward, "shape", ()) != ():
        return None
    try:
        return reward.__float__()  # type: ignore[no-any-return] # float() would parse a string, numpy reads None as NaN
    except (AttributeError, TypeError, ValueError):
        return None


def describe_result(result: Any) -> str:
    """Describe what ``reset`` or ``step`` returned, as in "4 values" or "a ndarray"."""
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {_type(result)}"


def _mismatch(name: str, array: Any, wanted: str) -> Problem:
    return Problem(
        f'Observation "{name}" is {array.dtype} of shape {array.shape}, but its space is {wanted}.',
        "Convert it (.astype or .reshape), or change the space.",
    )


def _converts_to_bool(value: Any) -> bool:
    try:
        bool(value)
    except (TypeError, ValueError):  # an array of several
        return False
    return True


def _type(value: Any) -> str:
    return type(value).__name__
