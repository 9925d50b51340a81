"""``ludus list``: what can be named on the command line."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from ludus.agents import AGENTS, CONFIGS
from ludus.cli.arguments import parse
from ludus.containers.settings import presets
from ludus.networks import NETWORKS, SUBMODULES
from ludus.track.terminal import Console

# Packages that parts of Gymnasium need beside it.
NEEDS = {"box2d": "Box2D", "mujoco": "mujoco", "phys2d": "jax", "tabular": "jax"}
NEXT = {
    "all": "`ludus list environments` shows the environments.",
    "agents": "Your own: --agent package.module:Class, as in examples/my_agent.py.",
    "networks": "Your own: --network package.module:Class, as in examples/my_network.py.",
    "presets": "`ludus train ENV --agent NAME --help` shows all that a preset sets.",
    "environments": "Your own: package.module:Class, as in examples/my_environment.py; try it with `ludus check`.",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show what can be named on the command line."""

    # What to show: agents, networks, environments, presets, or all but the environments, for they are many.
    what: Annotated[
        Literal["all", "agents", "networks", "environments", "presets"],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="WHAT"),
    ] = "all"


def run(argv: list[str]) -> int:
    """Print the tables."""
    what = parse(Arguments, argv, "list").what
    makers = {"agents": agents, "networks": networks, "presets": preset_table, "environments": environments}
    shown = ["agents", "networks", "presets"] if what == "all" else [what]
    console = Console()
    for name in shown:
        console.print(makers[name](), "")
    if what == "environments":
        console.print(*_atari(), sep="\n", highlight=False, soft_wrap=True)
        console.print()
        console.print(_envpool(), highlight=False, soft_wrap=True)  # after the table: importing it takes a second
    console.print(NEXT[what], highlight=False, soft_wrap=True)
    return 0


def agents() -> Table:
    """Agents by name, each with what the first line of its file says."""
    table = _table("Agents (--agent NAME)", "name", "what it is")
    for name, path in AGENTS.items():
        told = describe(CONFIGS[name]) if name in CONFIGS else _first_line(_source(path)).partition(": ")[2]
        table.add_row(name, told)
    return table


def networks() -> Table:
    """Networks and the pieces that a modular one is made of."""
    table = _table("Networks (--network NAME) and their pieces (--network.body NAME, …)", "name", "what it is")
    for name, path in NETWORKS.items():
        table.add_row(name, describe(path))
    for name, path in SUBMODULES.items():
        table.add_row(name, f"piece: {describe(path)}")
    return table


def preset_table() -> Table:
    """Presets: for which environment, how long they train, and on how many environments at once."""
    title = "Presets (taken where environment and agent fit)"
    table = _table(title, "name", "environment", "nb_step", "env.num")
    table.columns[1].overflow = "fold"  # a path cannot be cut short
    for column in table.columns[2:]:
        column.justify = "right"
    for name, (environment, settings) in presets().items():
        table.add_row(name, environment, f"{settings['nb_step']:,}", str(settings["env.num"]))
    return table


def environments() -> Table:
    """Gymnasium's environments, each in its newest version, and the package that one would need beside it."""
    table = _table("Environments (Gymnasium)", "id", "time limit", "native vector", "needs")
    for name, limit, vector, needs in _gymnasium():
        table.add_row(name, limit, vector, needs)
    return table


def describe(path: str) -> str:
    """The first line of a class's docstring."""
    name = path.partition(":")[2]
    classes = (node for node in _source(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    return next(map(_first_line, classes), "")


def _source(path: str) -> ast.Module:
    """The source of the module that a class is in: importing it would import torch."""
    spec = importlib.util.find_spec(path.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _first_line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0].replace("``", "")


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.columns[0].no_wrap, table.columns[0].style = True, "cyan"
    return table


def _gymnasium() -> Iterator[tuple[str, str, str, str]]:
    import gymnasium

    newest: dict[str, int] = {}
    for spec in gymnasium.registry.values():
        newest[spec.name] = max(newest.get(spec.name, 0), spec.version or 0)
    for id, spec in sorted(gymnasium.registry.items()):
        if not isinstance(spec.entry_point, str) or (spec.version or 0) < newest[spec.name]:
            continue
        package = (
            NEEDS.get(spec.entry_point.split(".")[2], "") if spec.entry_point.startswith("gymnasium.envs.") else ""
        )
        missing = package if package and importlib.util.find_spec(package) is None else ""
        yield id, str(spec.max_episode_steps or "none"), "yes" if spec.vector_entry_point else "", missing


def _atari() -> list[str]:
    """The Atari games, as lines of several ids."""
    if importlib.util.find_spec("ale_py") is None:
        return ['Atari games: pip install "ludus[atari]" brings ALE/Pong-v5 and about a hundred more.']
    import ale_py  # registers them with Gymnasium
    import gymnasium

    assert ale_py is not None
    ids = sorted(id for id in gymnasium.registry if id.startswith("ALE/"))
    title = f"Atari games ({len(ids)}; preset atari/ppo: 84 x 84 grey frames, 4 stacked; other agents see raw frames)"
    width = max(map(len, ids)) + 2
    columns = max(shutil.get_terminal_size().columns // width, 1)
    rows = [ids[i : i + columns] for i in range(0, len(ids), columns)]
    return [title, *("".join(id.ljust(width) for id in row).rstrip() for row in rows)]


def _envpool() -> str:
    if importlib.util.find_spec("envpool") is None:
        return (
            'EnvPool is not installed: pip install "ludus[envpool]" brings Atari and many more, stepped by C++ threads.'
        )
    import envpool

    count = len(envpool.list_all_envs())
    return f"EnvPool: {count:,} more with --env.backend envpool, such as Pong-v5 and LunarLander-v3."
