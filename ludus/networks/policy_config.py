"""Settings of a policy: its distributions, and how the parts of an action depend on each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ludus.core.errors import UserError, check_ranges, did_you_mean
from ludus.core.network import Shape
from ludus.core.spec import Spec, Specs

Distribution = Literal["gaussian", "state_gaussian", "tanh", "beta", "discretized", "gsde"]
KINDS = ("spatial", "pointer", "select")
_HEAD = re.compile(r"\s*(.+?)\s*=\s*(\w+)\s*(?:\(\s*(.*?)\s*\))?\s*")
_CHOICE = re.compile(r"\s*(\d+)\s*=\s*(.*?)\s*")


@dataclass(frozen=True)
class HeadsConfig:
    """Settings of the kinds of discrete actions."""

    # actions that are a place on a map, an entity or several entities of a list: place=spatial, place=spatial(screen),
    # target=pointer(units), group=select(units); the network must give maps or lists for them
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyConfig(HeadsConfig):
    """Settings of a policy, which agents inherit."""

    # of continuous actions; gaussian: one learned standard deviation per element; state_gaussian: it depends on the
    # observation; tanh: the same, squashed to the bounds; beta: within the bounds; discretized: agent.bins values per
    # element; gsde: exploration that is smooth over time, for robots
    distribution: Distribution = "gaussian"
    # initial log standard deviation of Gaussians, for actions scaled to [-1, 1]; at 0 a third of them is clipped
    log_std_init: float = -0.5
    bins: int = 11  # values per element of a discretized action; more are finer and slower to learn
    ordinal: bool = False  # discretized actions: neighbouring values share parameters
    gsde_interval: int = 16  # steps until gsde draws a new exploration matrix: longer explores more smoothly
    # parts of the action that are sampled in this order, each given those before it, such as function place target
    autoregressive: tuple[str, ...] = ()
    # which choices of a Discrete use which other parts: "function: 1=place, 2=place+target"; unused parts are 0 and are
    # not learned from
    arguments: tuple[str, ...] = ()
    head_width: int = 64  # features of each autoregressive part, and of gsde

    def validate(self) -> None:
        """Refuse values that cannot train; those that depend on the environment are refused by ``Policy``."""
        check_ranges(self, finite=("log_std_init",), positive=("head_width", "gsde_interval"))
        if self.bins < 2:
            raise UserError(f"agent.bins is {self.bins}; a discretized action needs 2 values or more.")

    def unused_distribution(self, action: Specs) -> Iterator[tuple[str, str]]:
        """Yield settings of distributions that do nothing, with the reason."""
        chosen = self.distribution
        settings = {
            "log_std_init": chosen not in ("beta", "discretized"),
            "bins": chosen == "discretized",
            "ordinal": chosen == "discretized",
            "gsde_interval": chosen == "gsde",
        }
        if not any(spec.kind == "continuous" for spec in action.values()):
            names = ("distribution", *settings)
            yield from ((name, "the environment has no continuous actions") for name in names)
        else:
            yield from (
                (name, f"agent.distribution is {chosen}, which does not use it")
                for name, used in settings.items()
                if not used
            )
        if not self.autoregressive and chosen != "gsde":
            yield "head_width", "agent.autoregressive is empty"


class HeadSetting(NamedTuple):
    """One entry of ``agent.heads``."""

    kind: str  # one of KINDS
    observation: str  # the list, or the map if one is named
    height: int = 0  # of a spatial head
    width: int = 0


def parse_heads(heads: Iterable[str], action: Specs, inputs: Mapping[str, Shape]) -> dict[str, HeadSetting]:
    """Read ``agent.heads`` by action name; ``inputs`` are the shapes of the observations as networks get them."""
    found: dict[str, HeadSetting] = {}
    for text in heads:
        match = _HEAD.fullmatch(text)
        if match is None or match[2] not in KINDS:
            raise UserError(
                f'agent.heads has "{text}"; write <action>=<kind> with the kind spatial, pointer(<list>) or '
                "select(<list>)."
            )
        name, kind, observation = match[1], match[2], match[3] or ""
        _check_action("agent.heads", name, action)
        if name in found:
            raise UserError(f'agent.heads names action "{name}" twice; keep one.')
        if observation and observation not in inputs:
            raise UserError(
                f'agent.heads has "{text}", but the observations are {", ".join(inputs)}.'
                f"{did_you_mean(observation, inputs)}"
            )
        found[name] = (_spatial if kind == "spatial" else _entities)(text, kind, observation, action[name], inputs)
    return found


def _spatial(text: str, kind: str, observation: str, spec: Spec, inputs: Mapping[str, Shape]) -> HeadSetting:
    if spec.kind == "categorical" and spec.shape == (2,) and not observation:
        height, width = spec.sizes
        return HeadSetting(kind, observation, height, width)
    if spec.kind != "categorical" or spec.shape not in ((), (2,)):
        raise UserError(
            f'agent.heads has "{text}", but a spatial action must be a MultiDiscrete([H, W]) of row and column or a '
            f"Discrete(H·W), and this one is {spec.kind} with shape {spec.shape}."
        )
    shape = inputs.get(observation, ())
    if len(shape) < 2:
        raise UserError(
            f'agent.heads has "{text}", but a Discrete needs the observation that gives its height and width, such as '
            "spatial(screen)."
        )
    height, width = shape[-2:]
    if spec.sizes not in ((height * width,), (height, width)):
        raise UserError(
            f'agent.heads has "{text}": "{observation}" has {height} × {width} = {height * width} places, but the '
            f"action has {' × '.join(map(str, spec.sizes))} choices."
        )
    return HeadSetting(kind, observation, height, width)


def _entities(text: str, kind: str, observation: str, spec: Spec, inputs: Mapping[str, Shape]) -> HeadSetting:
    wanted, space = {"pointer": ("categorical", "Discrete(N)"), "select": ("binary", "MultiBinary(N)")}[kind]
    shape = inputs.get(observation, ())
    if len(shape) != 2:
        lists = [name for name, other in inputs.items() if len(other) == 2]
        raise UserError(
            f'agent.heads has "{text}", but {kind} needs the name of a list of entities in brackets; the lists are '
            f"{', '.join(lists) or 'none: the environment has no observation [N, F]'}."
        )
    if spec.kind != wanted or len(spec.shape) != (kind == "select"):
        raise UserError(
            f'agent.heads has "{text}", but a {kind} action must be a {space}, and this one is {spec.kind} with shape '
            f"{spec.shape}."
        )
    if sum(spec.sizes or spec.shape) != shape[1]:
        raise UserError(
            f'agent.heads has "{text}": "{observation}" has {shape[1]} entities, but the action has '
            f"{sum(spec.sizes or spec.shape)}; both must be equal (env.max_length pads a list)."
        )
    return HeadSetting(kind, observation)


Table = Mapping[str, tuple[bool, ...]]  # argument → whether each choice uses it


def parse_arguments(tables: Iterable[str], action: Specs) -> dict[str, Table]:
    """Read ``agent.arguments`` by the name of the Discrete that chooses; an action in no table is used always."""
    parsed: dict[str, Table] = {}
    for text in tables:
        function, used = _parse_table(text, action)
        if function in parsed:
            raise UserError(f'agent.arguments has two tables of "{function}"; join them.')
        for name in used:
            if others := [other for other, table in parsed.items() if name in table]:
                raise UserError(
                    f'agent.arguments has "{name}" as an argument of "{others[0]}" and of "{function}"; keep one.'
                )
        parsed[function] = used
    return parsed


def _parse_table(text: str, action: Specs) -> tuple[str, Table]:
    function, colon, rest = (part.strip() for part in text.partition(":"))
    if not colon or not rest:
        raise UserError(f'agent.arguments has "{text}"; write it like "function: 1=place, 2=place+target".')
    _check_action("agent.arguments", function, action)
    spec = action[function]
    if spec.kind != "categorical" or spec.shape:
        raise UserError(f'agent.arguments has "{text}", but "{function}" is not a Discrete, which alone has choices.')
    (count,) = spec.sizes
    used: dict[str, list[bool]] = {}
    for part in rest.split(","):
        match = _CHOICE.fullmatch(part)
        if match is None:
            raise UserError(f'agent.arguments has "{part.strip()}" in "{text}"; write <choice>=<action>+<action>.')
        choice = int(match[1])
        if choice >= count:
            raise UserError(f'agent.arguments has choice {choice} in "{text}", but "{function}" has 0 to {count - 1}.')
        for name in (name.strip() for name in match[2].split("+") if name.strip()):
            _check_action("agent.arguments", name, action)
            if name == function:
                raise UserError(f'agent.arguments has "{text}", but "{function}" cannot be its own argument.')
            used.setdefault(name, [False] * count)[choice] = True
    return function, {name: tuple(choices) for name, choices in used.items()}


def sampling_order(action: Specs, autoregressive: tuple[str, ...], tables: Mapping[str, Table]) -> list[str]:
    """Return the action names in an order in which each comes after all that it depends on."""
    for i, name in enumerate(autoregressive):
        _check_action("agent.autoregressive", name, action)
        if name in autoregressive[:i]:
            raise UserError(f'agent.autoregressive names "{name}" twice; keep one.')
    if len(autoregressive) == 1:
        raise UserError(f'agent.autoregressive is "{autoregressive[0]}" alone; name two actions or more, or none.')
    before = {name: set(autoregressive[:i]) for i, name in enumerate(autoregressive)}
    for function, used in tables.items():
        for name in used:
            before[name] = before.get(name, set()) | {function}
    order: list[str] = []
    while len(order) < len(action):
        ready = [name for name in action if name not in order and before.get(name, set()) <= set(order)]
        if not ready:
            left = ", ".join(name for name in action if name not in order)
            raise UserError(
                f"agent.autoregressive and agent.arguments need {left} before each other; name an action before its "
                "arguments."
            )
        order.append(ready[0])
    return order


def check_bounds(name: str, spec: Spec, distribution: Distribution) -> None:
    """Refuse a distribution that needs finite bounds for a Box without them."""
    if distribution == "discretized" and not spec.bounded.all():
        raise UserError(
            f'agent.distribution is discretized, but action "{name}" has infinite bounds; give the Box finite bounds '
            "or use gaussian."
        )


def _check_action(setting: str, name: str, action: Specs) -> None:
    if name not in action:
        raise UserError(
            f'{setting} names "{name}", but the actions are {", ".join(action)}.{did_you_mean(name, action)}'
        )
