"""Values that change over a run, written as ``linear(0.2, 0.05)`` or ``cosine(3e-4, 0, warmup=0.05)``."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

Points = tuple[tuple[float, float], ...]
ROUNDING = 1e-9  # of shares of the run: 0.3 / 0.1 is a little less than 3
SAMPLES = 200  # points of the run at which the range of a schedule is measured
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_COMMA = re.compile(r",(?![^\[]*\])")  # but not within a list


def constant(progress: float, value: float) -> float:
    """Return ``value``."""
    return value


def linear(progress: float, start: float, end: float, share: float = 1.0) -> float:
    """Go from ``start`` to ``end`` over the first ``share`` of the run."""
    done = min(progress / share, 1.0)
    return start * (1 - done) + end * done  # exact at both ends


def cosine(progress: float, start: float, end: float, share: float = 1.0) -> float:
    """Go from ``start`` to ``end`` along half a cosine: slowly at both ends."""
    return end + (start - end) * (1 + math.cos(math.pi * min(progress / share, 1.0))) / 2


def exponential(progress: float, start: float, end: float, share: float = 1.0) -> float:
    """Go from ``start`` to ``end`` by the same factor at every step."""
    done = min(progress / share, 1.0)
    return float(start ** (1 - done) * end**done)


def piecewise(progress: float, points: Points) -> float:
    """Go through points ``share of the run: value``, linearly between them."""
    for (before, start), (after, end) in pairwise(points):
        if before <= progress < after:
            return linear(progress - before, start, end, after - before)
    return points[0][1] if progress < points[0][0] else points[-1][1]


def step_lr(progress: float, value: float, step_size: float, gamma: float = 0.1) -> float:
    """Multiply by ``gamma`` after every ``step_size`` of the run."""
    return value * gamma ** math.floor(progress / step_size + ROUNDING)


def multi_step_lr(progress: float, value: float, milestones: tuple[float, ...], gamma: float = 0.1) -> float:
    """Multiply by ``gamma`` at each of the ``milestones``."""
    return value * gamma ** sum(at <= progress + ROUNDING for at in milestones)


def exponential_lr(progress: float, value: float, gamma: float) -> float:
    """Fall to ``gamma`` times ``value`` at the end of the run, by the same factor at every step."""
    return float(value * gamma**progress)


def constant_lr(progress: float, value: float, factor: float = 1 / 3, total_iters: float = 0.05) -> float:
    """Return ``factor`` times ``value`` for the first ``total_iters`` of the run, then ``value``."""
    return value * factor if progress + ROUNDING < total_iters else value


def linear_lr(
    progress: float, value: float, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: float = 0.05
) -> float:
    """Go from ``start_factor`` to ``end_factor`` times ``value`` over the first ``total_iters`` of the run."""
    return value * linear(progress, start_factor, end_factor, total_iters)


def polynomial_lr(progress: float, value: float, total_iters: float = 1.0, power: float = 1.0) -> float:
    """Fall to 0 at ``total_iters`` of the run as a power of what is left."""
    return float(value * (1 - min(progress / total_iters, 1.0)) ** power)


def cosine_annealing_lr(progress: float, value: float, T_max: float = 1.0, eta_min: float = 0.0) -> float:
    """Follow a cosine from ``value`` to ``eta_min`` at ``T_max`` of the run, and back after it."""
    return eta_min + (value - eta_min) * (1 + math.cos(math.pi * progress / T_max)) / 2


def cosine_annealing_warm_restarts(
    progress: float, value: float, T_0: float, T_mult: float = 1.0, eta_min: float = 0.0
) -> float:
    """Follow half a cosine to ``eta_min`` over ``T_0`` of the run, then again, each ``T_mult`` times as long."""
    length = T_0
    if T_mult == 1:
        progress %= length
    while progress + ROUNDING >= length:
        progress, length = progress - length, length * T_mult
    return eta_min + (value - eta_min) * (1 + math.cos(math.pi * max(progress, 0.0) / length)) / 2


def one_cycle_lr(
    progress: float, max_lr: float, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> float:
    """Rise from ``max_lr / div_factor`` to ``max_lr`` over ``pct_start`` of the run, then fall, along cosines."""
    first = max_lr / div_factor
    if progress < pct_start:
        return cosine(progress, first, max_lr, pct_start)
    return cosine(progress - pct_start, max_lr, first / final_div_factor, 1 - pct_start) if pct_start < 1 else max_lr


def cyclic_lr(progress: float, base_lr: float, max_lr: float, step_size_up: float) -> float:
    """Go from ``base_lr`` to ``max_lr`` in ``step_size_up`` of the run and back, again and again."""
    within = (progress / step_size_up) % 2
    return base_lr + (max_lr - base_lr) * (within if within <= 1 else 2 - within)


def reduce_on_plateau(
    returns: Sequence[float],
    value: float,
    factor: float = 0.1,
    patience: float = 10.0,
    threshold: float = 0.0,
    min_lr: float = 0.0,
) -> float:
    """Multiply by ``factor`` whenever more than ``patience`` evaluations have not improved on the best return."""
    best, bad = -math.inf, 0
    for found in returns:
        bad = 0 if found > best + threshold else bad + 1
        best = max(best, found) if bad == 0 else best
        if bad > patience:
            value, bad = min(value, max(value * factor, min_lr)), 0
    return value


def by_return(returns: Sequence[float], points: Points) -> float:
    """Return the value of the highest return among the points ``return: value`` that an evaluation has reached."""
    best = max(returns, default=-math.inf)
    return next((value for reached, value in reversed(points) if reached <= best), points[0][1])


KINDS: dict[str, Callable[..., float]] = {  # of the share of the run that is done
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "exponential": exponential,
    "piecewise": piecewise,
    "StepLR": step_lr,
    "MultiStepLR": multi_step_lr,
    "ExponentialLR": exponential_lr,
    "ConstantLR": constant_lr,
    "LinearLR": linear_lr,
    "PolynomialLR": polynomial_lr,
    "CosineAnnealingLR": cosine_annealing_lr,
    "CosineAnnealingWarmRestarts": cosine_annealing_warm_restarts,
    "OneCycleLR": one_cycle_lr,
    "CyclicLR": cyclic_lr,
}
RETURN_KINDS: dict[str, Callable[..., float]] = {  # of the mean returns of all evaluations so far
    "ReduceLROnPlateau": reduce_on_plateau,
    "by_return": by_return,
}
SHARES = ("share", "step_size", "total_iters", "T_max", "T_0", "pct_start", "step_size_up")  # of the run
POSITIVE = ("div_factor", "final_div_factor")


class Schedule(float):
    """A setting that changes over a run: a function of the share that is done, or of the returns of evaluations.

    As a number it is its value of largest magnitude, so that it counts as 0, which turns many settings off, only if it
    always is 0. It equals only a schedule of the same kind and arguments.
    """

    kind: str
    arguments: dict[str, Any]
    warmup: float
    low: float  # smallest and largest value
    high: float

    def __new__(cls, kind: str, *arguments: Any, warmup: float = 0.0, **more: Any) -> Schedule:
        """Make a schedule; wrong arguments raise a ValueError."""
        function = KINDS.get(kind) or RETURN_KINDS[kind]
        try:
            bound = inspect.signature(function).bind((), *arguments, **more)
        except TypeError as error:
            raise ValueError(f"its arguments are wrong ({error})") from None
        _, *names = bound.arguments
        given = {name: bound.arguments[name] for name in names}
        _check(kind, given | {"warmup": warmup})
        try:
            values = [_evaluate(kind, given, i / SAMPLES) for i in range(SAMPLES + 1)]
        except (OverflowError, ZeroDivisionError, TypeError):  # TypeError: of a complex number
            raise ValueError("it does not give finite numbers") from None
        if kind == "by_return":
            values = [value for _, value in given["points"]]
        elif kind == "ReduceLROnPlateau":
            values.append(given.get("min_lr", 0.0))
        elif kind == "piecewise":
            values += [value for _, value in given["points"]]
        if warmup:
            values.append(0.0)
        self = super().__new__(cls, max(values, key=abs))
        self.kind, self.arguments, self.warmup = kind, given, warmup
        self.low, self.high = min(values), max(values)
        return self

    @property
    def needs_returns(self) -> bool:
        """Whether it depends on the returns of evaluations, not on the share of the run that is done."""
        return self.kind in RETURN_KINDS

    def at(self, progress: float, returns: Sequence[float] = ()) -> float:
        """Return the value when ``progress`` of the run (0 to 1) is done; ``returns`` are those of evaluations so far.

        During the warm-up it rises linearly from 0 to its first value, and then takes its course over the rest.
        """
        progress = min(max(progress, 0.0), 1.0)
        if not self.warmup:
            return _evaluate(self.kind, self.arguments, progress, returns)
        if progress < self.warmup:
            return _evaluate(self.kind, self.arguments, 0.0, returns) * progress / self.warmup
        return _evaluate(self.kind, self.arguments, (progress - self.warmup) / (1 - self.warmup), returns)

    def __str__(self) -> str:
        """Return the schedule as ``read_schedule`` reads it."""
        function = KINDS.get(self.kind) or RETURN_KINDS[self.kind]
        required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        parts = []
        for name, value in self.arguments.items():
            if name == "points":
                parts += [f"{_text(at)}: {_text(x)}" for at, x in value]
            else:
                parts.append(_text(value) if name in required else f"{name}={_text(value)}")
        if self.warmup:
            parts.append(f"warmup={_text(self.warmup)}")
        return f"{self.kind}({', '.join(parts)})"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and str(self) == str(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Callable[[str], Schedule], tuple[str]]:
        return read_schedule, (str(self),)


def value_at(value: float, progress: float) -> float:
    """Return the current value of a setting that may be a schedule."""
    return value.at(progress) if isinstance(value, Schedule) else value


def value_range(value: float) -> tuple[float, float]:
    """Return the smallest and the largest value of a setting that may be a schedule."""
    return (value.low, value.high) if isinstance(value, Schedule) else (value, value)


def read_schedule(text: str) -> Schedule:
    """Read ``kind(value, …, name=value)``; a ValueError says what is wrong."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise ValueError("brackets are missing")
    positional: list[Any] = []
    named: dict[str, Any] = {}
    points: list[tuple[float, float]] = []
    for part in _COMMA.split(match[2]) if match[2].strip() else ():
        before, equals, after = part.partition("=")
        at, colon, value = part.partition(":")
        if equals:
            if before.strip() in named:
                raise ValueError(f'it has "{before.strip()}" twice')
            named[before.strip()] = _number(after)
        elif colon:
            points.append((_number(at), _number(value)))
        else:
            positional.append(_number(part))
    if points:
        named["points"] = tuple(points)
    return Schedule(match[1], *positional, **named)


def _number(text: str) -> Any:
    """Read a number, or a list of numbers in square brackets."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return tuple(float(_number(item)) for item in filter(str.strip, text[1:-1].split(",")))
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a number') from None
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _check(kind: str, given: dict[str, Any]) -> None:
    """Refuse arguments out of range."""
    for name, value in given.items():
        if (name == "points") != isinstance(value, tuple) and name != "milestones":
            raise ValueError(f"{name} must be a number" if isinstance(value, tuple) else "points are written as a: b")
        if name == "milestones" and not isinstance(value, tuple):
            raise ValueError("milestones is a list of shares of the run, such as [0.5, 0.75]")
        if name == "milestones" and not all(0 < at <= 1 for at in value):
            raise ValueError(f"milestones is {_text(value)}; each is a share of the run, greater than 0 and at most 1")
        if name in SHARES and not 0 < value <= 1:
            raise ValueError(f"{name} is {_text(value)}; it is a share of the run, greater than 0 and at most 1")
        if name == "factor" and kind == "ReduceLROnPlateau" and not 0 < value < 1:
            raise ValueError(f"factor is {_text(value)}; it must be between 0 and 1")
        if name in ("patience", "threshold", "min_lr") and value < 0:
            raise ValueError(f"{name} is {_text(value)}; it must be 0 or greater")
        if name == "T_mult" and (value < 1 or value % 1):
            raise ValueError(f"T_mult is {_text(value)}; it must be a whole number of 1 or more")
        if name in POSITIVE and not value > 0:
            raise ValueError(f"{name} is {_text(value)}; it must be greater than 0")
    if not 0 <= given["warmup"] < 1:
        raise ValueError(f"warmup is {_text(given['warmup'])}; it is a share of the run, 0 or greater and less than 1")
    if kind == "exponential" and not (given["start"] > 0 and given["end"] > 0):
        raise ValueError("both ends must be greater than 0")
    if "points" in given:
        places = [at for at, _ in given["points"]]
        if places != sorted(set(places)):
            raise ValueError("its points must be in ascending order")
        if kind == "piecewise" and not 0 <= places[0] <= places[-1] <= 1:
            raise ValueError("its points are at shares of the run, from 0 to 1")


def _evaluate(kind: str, given: dict[str, Any], progress: float, returns: Sequence[float] = ()) -> float:
    function = KINDS.get(kind)
    return function(progress, **given) if function else RETURN_KINDS[kind](returns, **given)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(float(value)).removesuffix(".0")


def example(kind: str) -> str:
    """Return how to write a schedule of this kind, with the names of arguments in place of numbers."""
    if kind in ("piecewise", "by_return"):
        return f"{kind}({'0: 1.0, 0.5: 0.1' if kind == 'piecewise' else '0: 1e-3, 400: 1e-4'})"
    parameters = list(inspect.signature(KINDS.get(kind) or RETURN_KINDS[kind]).parameters.values())[1:]
    written = [p.name if p.default is p.empty else f"{p.name}={p.default:g}" for p in parameters]
    return f"{kind}({', '.join(written)})"
