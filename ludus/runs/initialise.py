"""Initialize an agent from another run: all of its tensors, or some of them by name (``--init-from``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ludus.core.agent import Agent
from ludus.core.errors import UserError
from ludus.networks.target import TargetNetworks
from ludus.runs.folder import RunDirectory
from ludus.runs.policy import agent_of_checkpoint, load_tensors, mismatch, open_by_name
from ludus.settings.parse import format_value
from ludus.settings.settings import Settings, from_flat, to_flat
from ludus.settings.trust import read_run_settings

COUNTERS = "_extra_state"  # of that run, such as the number of updates: never loaded
NOT_SELECTED = "not selected by init_load"
SHAPE_SETTINGS = (  # settings that change the shapes of parameters, the most likely cause of a mismatch first
    *(f"network.{name}" for name in ("name", "net1d", "net2d", "net3d", "net4d", "body", "hidden")),
    *(f"network.head{rank}d" for rank in (1, 2, 3, 4)),
    *(f"network.{name}" for name in ("sources", "share", "embedding")),
    *("network.lstm_size", "network.shared", "agent.normalize_observation", "agent.distribution"),
    *(f"agent.{name}" for name in ("heads", "autoregressive", "head_width", "bins")),
    *("env.id", "env.options", "env.backend", "env.mask", "env.axes", "env.max_length", "env.lengths", "agent.name"),
)


class Transfer(NamedTuple):
    """Which tensors of another run an agent took over, and why it did not take others."""

    run: str
    loaded: list[str]
    skipped: dict[str, str]  # name in this agent → reason
    unused: list[str]  # names of that run, after renaming, that this agent does not have

    def summary(self) -> str:
        """Return one line for the console."""
        total = len(self.loaded) + len(self.skipped)
        text = f"Loaded {len(self.loaded)} of {total} tensors from {self.run}."
        reasons = Counter(why.partition(":")[0] for why in self.skipped.values())
        if reasons:
            text += f" Not loaded: {', '.join(f'{count} {reason}' for reason, count in reasons.items())}."
        if self.unused:
            text += f" {len(self.unused)} are only in that run ({', '.join(_places(self.unused))})."
        return text + " log.txt lists them." * bool(reasons or self.unused)

    def details(self) -> str:
        """Return a line per tensor for the log."""
        lines = [f"loaded {name}" for name in self.loaded]
        lines += [f"not loaded {name}: {why}" for name, why in self.skipped.items()]
        lines += [f"only in that run {name}" for name in self.unused]
        return "\n".join([f"initialized from {self.run}", *lines])

    @property
    def complete(self) -> bool:
        """Whether nothing was left out that the user asked for."""
        return all(why == NOT_SELECTED for why in self.skipped.values())


def initialise_from(agent: Agent, settings: Settings[Any], trust: bool = False) -> Transfer:
    """Load parameters and normalizers of the run ``settings.init_from``, renamed by ``init_rename``.

    Without ``init_load``, everything is loaded and must fit. With it, what its patterns match is loaded where that run
    has a tensor of the same name and shape; target networks start as copies of the networks after that.
    """
    directory = RunDirectory.open(settings.init_from, settings.runs)
    flat = read_run_settings(directory.path, directory.config, trust, unused=("env.", "network_check.")).flat
    with open_by_name(directory, "best") as found:
        saved = {name: x for name, x in agent_of_checkpoint(found).items() if not name.endswith(COUNTERS)}
        source = rename(saved, settings.init_rename)  # name here → name there
        outlines = {name: saved[there] for name, there in source.items()}
        if settings.init_load:
            transfer = _select(agent, outlines, settings.init_load, str(directory.path))
        elif tensor := mismatch(agent, outlines):
            difference = _difference(from_flat(flat), settings)
            raise UserError(
                f'init_from is "{settings.init_from}", but {difference} ({tensor}); or load a part of it by init_load.'
            )
        else:
            transfer = Transfer(str(directory.path), [name for name in agent.state_dict() if name in source], {}, [])
        state = found.read("agent")["agent"]
    load_tensors(agent, {name: state[source[name]] for name in transfer.loaded})
    if settings.init_load:
        for targets in _targets(agent).values():
            targets.update(1)
    return transfer


def rename(names: Iterable[str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the names of that run by their new names; in ``old.*=new.*`` each ``*`` stands for the same text."""
    source = {name: name for name in names}
    for pattern in patterns:
        old, equals, new = pattern.partition("=")
        if not equals or not old or old.count("*") != new.count("*"):
            raise UserError(
                f'init_rename has "{pattern}", but must be OLD=NEW with the same number of * on both sides, such as '
                "networks.actor.*=networks.critic.*."
            )
        expression = re.compile("(.*)".join(map(re.escape, old.split("*"))))
        found = {name: match for name in source if (match := expression.fullmatch(name))}
        if not found:
            raise UserError(
                f'init_rename has "{pattern}", but the run has no tensor {old}: its tensors are in '
                f"{', '.join(_places(source))}."
            )
        renamed = {name: _fill(new, match.groups()) for name, match in found.items()}
        result: dict[str, str] = {}
        for name, there in source.items():
            here = renamed.get(name, name)
            if here in result:
                raise UserError(f'init_rename has "{pattern}", which gives two tensors the name {here}; change it.')
            result[here] = there
        source = result
    return source


def _fill(pattern: str, texts: Sequence[str]) -> str:
    parts = pattern.split("*")
    return parts[0] + "".join(text + part for text, part in zip(texts, parts[1:], strict=True))


def _select(agent: Agent, saved: Mapping[str, Any], patterns: Sequence[str], run: str) -> Transfer:
    """Decide what to load; refuse a pattern that would load nothing."""
    copies = tuple(f"{name}." for name in _targets(agent))
    own = {
        name: x for name, x in agent.state_dict().items() if not name.endswith(COUNTERS) and not name.startswith(copies)
    }
    loaded: list[str] = []
    skipped: dict[str, str] = {}
    for name, x in own.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            skipped[name] = NOT_SELECTED
        elif name not in saved:
            skipped[name] = "not in that run"
        elif (there := tuple(saved[name].shape)) != (here := tuple(x.shape)):
            skipped[name] = f"of another shape: {there} there and {here} here"
        else:
            loaded.append(name)
    for pattern in patterns:
        matched = [name for name in own if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f'init_load has "{pattern}", which matches no tensor of the agent: they are in '
                f"{', '.join(_places(own))}; see `ludus show network`."
            )
        if all(name in skipped for name in matched):
            raise UserError(
                f'init_load has "{pattern}", but nothing would be loaded ({matched[0]} is {skipped[matched[0]]}); '
                "change the pattern, init_rename or the network."
            )
    unused = [name for name in saved if name not in own and not name.startswith(copies)]
    return Transfer(run, loaded, skipped, unused)


def _targets(agent: Agent) -> dict[str, TargetNetworks]:
    return {name: module for name, module in agent.named_modules() if isinstance(module, TargetNetworks)}


def _places(names: Iterable[str]) -> list[str]:
    """Return the first two parts of names, such as networks.actor."""
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))


def _difference(theirs: Settings[Any], ours: Settings[Any]) -> str:
    """Describe which setting makes the networks of two runs differ, and how to fix it."""
    there, here = to_flat(theirs), to_flat(ours)
    if theirs.network.shared == "auto":  # runs before Ludus 0.2.0 did not store the choice
        here["network.shared"] = "auto"
    for key in SHAPE_SETTINGS:
        if there.get(key) != here.get(key):
            others, own = format_value(there.get(key)), format_value(here.get(key))
            return f"{key} is {others} in that run and {own} here: give both the same"
    return "its environment has other observations or actions: use the environment of that run"
