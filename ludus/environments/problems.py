"""What can be wrong with the values that an environment gives: pure functions from a value to problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

Severity = Literal["error", "warning"]
FIVE = "Return the five values observation, reward, terminated, truncated, info, as Gymnasium does since version 0.26."


@dataclass(frozen=True)
class Problem:
    """Something wrong with an environment, and its fix in one sentence."""

    what: str
    fix: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.what.rstrip('.')}; {self.fix[:1].lower()}{self.fix[1:]}"


def problem_from_error(error: Exception) -> Problem:
    """What cannot be made at all: the sentence of a user's mistake, taken apart into problem and fix."""
    said = " ".join(str(error).split())
    what, raised, _ = said.partition("; fix it there")
    if raised:
        return Problem(f"{what}.", "Correct it there.")
    for mark in (". ", "; ", ": pip "):
        what, found, fix = said.partition(mark)
        if found:
            return Problem(f"{what}.", f"pip {fix}" if "pip" in mark else fix[:1].upper() + fix[1:])
    return Problem(said, "Give it other settings.")


def reset_problems(result: Any) -> Iterator[Problem]:
    """Problems of what ``reset`` returned, its observation apart."""
    if not isinstance(result, tuple) or len(result) != 2:
        yield Problem(
            f"reset returned {_count(result)}, not the two values observation and info.", "Return observation, info."
        )
    elif not isinstance(result[1], dict):
        yield Problem(f"reset returned an info of type {_type(result[1])}.", "Return a dict as info; it may be empty.")


def step_problems(result: Any) -> Iterator[Problem]:
    """Problems of what ``step`` returned, its observation apart."""
    if not isinstance(result, tuple) or len(result) != 5:
        yield Problem(f"step returned {_count(result)}, not five values.", FIVE)
    if (five := parse_step(result)) is None:
        return
    _, reward, terminated, truncated, info = five
    number = _number(reward)
    if number is None:
        yield Problem(f"The reward is of type {_type(reward)}, which is not a number.", "Return the reward as a float.")
    elif not isinstance(reward, Real | np.bool_):
        what = f"The reward is of type {_type(reward)}, an array without dimensions, and is taken as a number."
        yield Problem(what, "Return float(reward).", "warning")
    if number is not None and not np.isfinite(number):
        yield Problem("The reward is NaN or infinite.", "Find the division by zero or the overflow that made it so.")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            severity: Severity = "warning" if _is_true_or_false(value) else "error"  # which training takes too
            yield Problem(f"{name} is of type {_type(value)}, not bool.", f"Return bool({name}).", severity)
    if not isinstance(info, dict):
        yield Problem(f"step returned an info of type {_type(info)}.", "Return a dict as info; it may be empty.")


def parse_reset(result: Any) -> tuple[Any, Any] | None:
    """Observation and info of what ``reset`` returned, so that the rest can be looked at; an old one gives no info."""
    if isinstance(result, tuple | list) and len(result) == 2 and (isinstance(result, tuple) or _is_info(result[1])):
        return result[0], result[1]
    return None if result is None or isinstance(result, tuple) else (result, {})


def parse_step(result: Any) -> tuple[Any, ...] | None:
    """The five values of what ``step`` returned; of an old one's four, ``done`` is taken as ``terminated``."""
    if not isinstance(result, tuple | list) or len(result) not in (4, 5):
        return None
    return tuple(result) if len(result) == 5 else (*result[:3], False, result[3])


def render_problems(rendered: Any) -> Iterator[Problem]:
    """Problems of what ``render`` returned in the mode rgb_array."""
    array = np.asarray(rendered)
    if array.ndim != 3 or array.shape[-1] != 3 or array.dtype != np.uint8:
        found = _type(rendered) if array.dtype == object else f"{array.dtype} of shape {array.shape}"
        fix = "Return a picture as uint8 of shape (height, width, 3); only `ludus play` needs it."
        yield Problem(f"render returned {found} in render_mode rgb_array.", fix, "warning")


def observation_problems(
    space: spaces.Space[Any], value: Any, name: str = "observation", prefix: str = ""
) -> Iterator[Problem]:
    """Problems of an observation against its space, part by part."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        yield from _in_nest(space, value, name, prefix)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        yield from _in_choices(space, value, name)
    elif isinstance(space, spaces.Box):
        yield from _in_box(space, value, name)


def _in_nest(space: spaces.Dict | spaces.Tuple[Any], value: Any, name: str, prefix: str) -> Iterator[Problem]:
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


def _in_choices(space: spaces.Space[Any], value: Any, name: str) -> Iterator[Problem]:
    array = np.asarray(value)
    if array.shape != space.shape or not (np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_):
        yield _mismatch(name, array, f"integers of shape {space.shape}")
    elif not space.contains(value if array.dtype != np.bool_ else array.astype(np.int8)):
        yield Problem(f'Observation "{name}" lies outside its space {space}.', "Widen the space or fix the value.")


def _in_box(space: spaces.Box, value: Any, name: str) -> Iterator[Problem]:
    array = np.asarray(value)
    is_number = np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_
    typed = not isinstance(value, list | int | float)  # plain Python values have no dtype of their own
    if array.shape != space.shape or not is_number or (typed and not np.can_cast(array.dtype, space.dtype, "safe")):
        if array.shape != space.shape or not is_float_cast(array.dtype, np.dtype(space.dtype)):
            yield _mismatch(name, array, f"{space.dtype} of shape {space.shape}")
            return
        fix = "Return what the space says (.astype), or change the space."
        yield Problem(
            f'Observation "{name}" is {array.dtype}, and is cast to {space.dtype} of its space.', fix, "warning"
        )
        array = array.astype(space.dtype)
    if not np.isfinite(array).all():
        yield Problem(
            f'Observation "{name}" has NaN or infinite values.',
            "Find the division by zero or the overflow that made it so.",
        )
    elif (array < space.low).any() or (array > space.high).any():
        yield out_of_bounds(name, array[(array < space.low) | (array > space.high)].flat[0])


def out_of_bounds(name: str, value: float) -> Problem:
    """An observation with a value outside the bounds of its Box; training takes it as it is, and warns too."""
    return Problem(
        f'Observation "{name}" lies outside the bounds of its Box (for example {value:g}).',
        "Widen low and high of the space, or clip the values.",
        "warning",
    )


def action_space_problems(space: spaces.Space[Any], name: str = "action", prefix: str = "") -> Iterator[Problem]:
    """Problems of an action space that is otherwise supported."""
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
    """Whether a cast loses precision alone: from one float type to a narrower one."""
    return np.issubdtype(found, np.floating) and np.issubdtype(wanted, np.floating)


def _number(reward: Any) -> float | None:
    """A reward as a number, an array without dimensions too; None if it is none."""
    if getattr(reward, "shape", ()) != ():
        return None
    try:
        return reward.__float__()  # type: ignore[no-any-return] # float() would read a text
    except (AttributeError, TypeError, ValueError):
        return None


def _mismatch(name: str, array: Any, wanted: str) -> Problem:
    found = f"{array.dtype} of shape {array.shape}"
    return Problem(
        f'Observation "{name}" is {found}, but its space says {wanted}.',
        "Return what the space says (.astype or .reshape), or change the space.",
    )


def _is_true_or_false(value: Any) -> bool:
    try:
        bool(value)
    except (TypeError, ValueError):  # an array of several
        return False
    return True


def _type(value: Any) -> str:
    return type(value).__name__


def _is_info(value: Any) -> bool:
    return isinstance(value, dict)


def _count(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"one {_type(result)}"
