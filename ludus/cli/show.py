"""``ludus show``: print or draw the networks of an agent; preprocessing and gradients have files of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ludus.cli.arguments import wants_help
from ludus.cli.help import show_help
from ludus.cli.output import say
from ludus.cli.train import parse
from ludus.core.errors import UserError
from ludus.networks.config import NetworkConfig

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.networks.summary import NetworkSummary, PartSummary
    from ludus.settings.settings import Resolved

NETWORK, PREPROCESS, GRADIENTS = "network", "preprocess", "gradients"  # what can be shown
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print the networks that training would build, with shapes, parameters and floating-point operations.

    Takes all flags of `ludus train`. Operations (FLOPs) are those of a forward pass for one observation.
    """

    # a Gymnasium id such as CartPole-v1, or your own environment as package.module:Class
    environment: Annotated[str, "ENV"]
    svg: Annotated[str, "FILE"] = ""  # draw the networks into this file too
    network: NetworkConfig = field(default_factory=NetworkConfig)


def run(argv: list[str]) -> int:
    """Print the networks or the preprocessing, or draw the gradients of a run."""
    if argv[:1] == [GRADIENTS]:
        from ludus.cli import gradients

        return gradients.run(argv[1:])
    if argv[:1] == [PREPROCESS]:
        from ludus.cli import preprocess

        return preprocess.run(argv[1:])
    if wants_help(argv):
        show_help(Arguments, f"show {NETWORK}")
    words, svg = _take_svg(argv)
    if words[:1] != [NETWORK]:
        raise UserError(
            "`ludus show` shows networks, preprocessing and gradients: write `ludus show network ENV`, `ludus show "
            "preprocess ENV` or `ludus show gradients RUN`."
        )
    resolved = parse(words[1:], f"show {NETWORK}")
    networks = find_networks(resolved)
    say(describe(networks))
    if svg:
        from ludus.cli.drawing import draw

        try:
            Path(svg).write_text(draw({name: summary for name, (summary, _) in networks.items()}), encoding="utf-8")
        except OSError as error:
            raise UserError(f'--svg is "{svg}", which cannot be written: {error.strerror}.') from error
        say(f"Drawn to {svg}.")
    return 0


def _take_svg(argv: list[str]) -> tuple[list[str], str]:
    """Separate ``--svg FILE`` from the flags of training."""
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag == "--svg":
            rest = argv[i + 1 :] if equals else argv[i + 2 :]
            file = value if equals else next(iter(argv[i + 1 :]), "")
            if not file or file.startswith("-"):
                raise UserError("--svg needs a value: the file to draw into, such as network.svg.")
            return [*argv[:i], *rest], file
    return argv, ""


def find_networks(resolved: Resolved) -> dict[str, tuple[NetworkSummary, int]]:
    """Build the networks of the agent, without the agent; return a summary and the number of members of each."""
    from ludus.containers.build import (
        adapt_to_environment,
        agents_per_environment,
        divide_environments,
        planned_networks,
    )
    from ludus.managers.make import make_manager
    from ludus.networks.build import build_network
    from ludus.networks.summary import summarize
    from ludus.settings.ineffective import refuse_ineffective

    settings = resolved.settings
    manager = divide_environments(make_manager(settings.env, 1, preprocess=settings.preprocess), settings)
    try:
        observation, action = manager.observation, manager.action
    finally:
        manager.close()
    resolved = adapt_to_environment(resolved, observation, action, agents_per_environment(manager))
    refuse_ineffective(resolved, observation, action)
    found: dict[str, tuple[NetworkSummary, int]] = {}
    for name, (config, spec) in planned_networks(resolved.settings, observation, action).items():
        summaries = summarize(name, build_network(config, spec._replace(members=1)), spec._replace(members=1))
        found |= {key: (summary, spec.members) for key, summary in summaries.items()}
    return found


def describe(networks: dict[str, tuple[NetworkSummary, int]]) -> str:
    """Return the networks as trees with a column for each number."""
    table: list[tuple[str, str, str, str]] = [("", "", "parameters", "FLOPs")]
    for name, (summary, members) in networks.items():
        title = (
            f"{name}{', recurrent' if summary.recurrent else ''}{f', an ensemble of {members}' if members > 1 else ''}"
        )
        table.append((title, "", f"{summary.parameters:,}", count(summary.flops)))
        for i, part in enumerate(summary.parts):
            branch = "└─ " if i == len(summary.parts) - 1 else "├─ "
            sizes = f"{part.parameters:,}" if part.parameters else "", count(part.flops) if part.flops else ""
            table.append((f"{branch}{label(part)}", shapes(part, summary.inputs), *sizes))
    if len(networks) > 1 or any(members > 1 for _, members in networks.values()):
        parameters = sum(summary.parameters * members for summary, members in networks.values())
        flops = sum(summary.flops * members for summary, members in networks.values())
        table.append(("total", "", f"{parameters:,}", count(flops)))
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in table
    )


def label(part: PartSummary) -> str:
    """Return the place of a part and its piece."""
    identity = "identity" if part.name.startswith("source/") else "joined"
    kind = identity if part.kind.startswith("identity") else part.kind
    return f"{part.name}: {kind}" if kind else part.name


def shapes(part: PartSummary, inputs: dict[str, Any]) -> str:
    """Return the shapes of a part's input and output."""
    given = [str(inputs[name]) for name in part.inputs if name in inputs and not part.input_shape]
    before = ", ".join(given) or (str(part.input_shape) if part.input_shape else "")
    after = str(part.output_shape) if part.output_shape else ""
    return f"{before} → {after}" if before and after else before or after


def count(number: int) -> str:
    """Shorten a number: 12.3k."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
