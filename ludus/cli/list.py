"""``ludus list``: list agents, networks, environments, presets and runs."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.markup import escape
from rich.table import Table

from ludus.agents import AGENTS, CONFIGS
from ludus.cli.arguments import parse
from ludus.cli.output import say
from ludus.core.errors import UserError
from ludus.core.text import printable
from ludus.logging.status import number
from ludus.logging.terminal import Console
from ludus.networks import NETWORKS, SUBMODULES
from ludus.runs.summary import ListedRun, list_runs
from ludus.settings.settings import presets

# packages that parts of Gymnasium need
NEEDS = {"box2d": "Box2D", "mujoco": "mujoco", "phys2d": "jax", "tabular": "jax"}
RUN_COLUMNS = ("environment", "agent", "seed", "best", "steps", "state", "age", "run", "tags")
RIGHT_ALIGNED = (2, 3, 4, 6)  # columns with numbers
NEXT = {
    "all": "See also `ludus list environments` and `ludus list runs`.",
    "agents": "Use your own with --agent package.module:Class, as in examples/my_agent.py.",
    "networks": "Use your own with --network package.module:Class, as in examples/my_network.py.",
    "presets": "`ludus train ENV --agent NAME --help` shows the settings of a preset.",
    "runs": "Evaluate one with `ludus evaluate RUN`, or go on with `ludus resume RUN --nb-step N` (or --stop-at).",
    "environments": "Use your own as package.module:Class, as in examples/my_environment.py; `ludus check` tests it.",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """List agents, networks, environments, presets or runs."""

    # agents, networks, environments, presets or runs; all: agents, networks and presets
    what: Annotated[
        Literal["all", "agents", "networks", "environments", "presets", "runs"],
        "WHAT",
    ] = "all"
    tags: tuple[str, ...] = ()  # runs: only those with all of these tags; --tag WORD adds one
    name: str = ""  # runs: only those with this text in their name
    runs: Annotated[str, "FOLDER"] = "runs"  # folder of the runs


def run(argv: list[str]) -> int:
    """Print the tables."""
    given = parse(Arguments, argv, "list")
    what = given.what
    if what == "runs":
        return show_runs(given)
    if given.tags or given.name:
        raise UserError("--tags and --name are for `ludus list runs`.")
    makers = {"agents": agents, "networks": networks, "presets": preset_table, "environments": environments}
    shown = ["agents", "networks", "presets"] if what == "all" else [what]
    console = Console()
    for name in shown:
        console.print(makers[name](), "")
    if what == "environments":
        console.print(*_atari(), sep="\n", highlight=False, soft_wrap=True)
        console.print()
        console.print(_envpool(), highlight=False, soft_wrap=True)  # last, because importing it takes a second
    console.print(NEXT[what], highlight=False, soft_wrap=True)
    return 0


def show_runs(given: Arguments) -> int:
    """Print a line for each run, the most recently used last."""
    found = [
        run
        for run in list_runs(given.runs)
        if set(given.tags) <= set(run.summary.tags) and given.name in run.summary.name
    ]
    if not found:
        which = " with that name and those tags" if given.tags or given.name else " yet"
        say(f'There is no run in "{given.runs}"{which}: start one with `ludus train ENV --name NAME --tag WORD`.')
        return 0
    rows: list[tuple[str, ...]] = [RUN_COLUMNS]
    rows += [_run_row(run, given.runs) for run in found]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(w) if i in RIGHT_ALIGNED else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print(f"\n{NEXT['runs']}")
    return 0


def _run_row(run: ListedRun, root: str) -> tuple[str, ...]:
    about = run.summary
    best = "" if about.best is None else number(about.best)
    cells = (about.environment, about.agent, str(about.seed), best, f"{about.steps:,}", about.state, age(run.used))
    path = run.path.relative_to(root) if root == "runs" else run.path  # commands look below runs by themselves
    return tuple(printable(" ".join(cell.split())) for cell in (*cells, str(path), ", ".join(about.tags)))


def age(since: float) -> str:
    """Format how long ago a time was: 40s, 12m, 3h, 5d."""
    seconds = max(time.time() - since, 0)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def agents() -> Table:
    """List agents with the first sentence of their docstring."""
    table = _table("Agents (--agent NAME)", "name", "description")
    for name, path in AGENTS.items():
        table.add_row(name, describe(CONFIGS[name]) if name in CONFIGS else _first_line(_source(path)))
    return table


def networks() -> Table:
    """List networks and the pieces of a modular one."""
    table = _table(
        "Networks (--network NAME) and pieces of a modular network (--network.body NAME, ...)", "name", "description"
    )
    for name, path in NETWORKS.items():
        table.add_row(name, describe(path))
    for name, path in SUBMODULES.items():
        table.add_row(name, escape(f"piece: {describe(path)}"))  # shapes in brackets are not markup
    return table


def preset_table() -> Table:
    """List presets with their environment, training steps and number of environments."""
    title = "Presets (used by default for their environment and agent)"
    table = _table(title, "name", "environment", "nb_step", "env.num")
    table.columns[1].overflow = "fold"  # do not truncate a path
    for column in table.columns[2:]:
        column.justify = "right"
    for name, (environment, settings) in presets().items():
        table.add_row(name, environment, f"{settings['nb_step']:,}", str(settings["env.num"]))
    return table


def environments() -> Table:
    """List the newest version of Gymnasium's environments and the packages that they need."""
    import gymnasium

    table = _table("Environments (Gymnasium)", "id", "time limit", "native vector", "needs")
    newest: dict[str, int] = {}
    for spec in gymnasium.registry.values():
        newest[spec.name] = max(newest.get(spec.name, 0), spec.version or 0)
    for id, spec in sorted(gymnasium.registry.items()):
        if not isinstance(spec.entry_point, str) or (spec.version or 0) < newest[spec.name]:
            continue
        package = ""
        if spec.entry_point.startswith("gymnasium.envs."):
            package = NEEDS.get(spec.entry_point.split(".")[2], "")
        missing = package if package and importlib.util.find_spec(package) is None else ""
        table.add_row(id, str(spec.max_episode_steps or "none"), "yes" if spec.vector_entry_point else "", missing)
    return table


def describe(path: str) -> str:
    """Return the first line of a class's docstring."""
    name = path.partition(":")[2]
    classes = (node for node in _source(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    return next(map(_first_line, classes), "")


def _source(path: str) -> ast.Module:
    """Parse the module of a class without importing it, which would import torch."""
    spec = importlib.util.find_spec(path.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _first_line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0].replace("``", "").removesuffix(".")


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.columns[0].no_wrap, table.columns[0].style = True, "cyan"
    return table


def _atari() -> list[str]:
    """Return the Atari games as lines of several ids."""
    if importlib.util.find_spec("ale_py") is None:
        return ["Atari games are not installed: `pip install ale-py opencv-python-headless` adds about 100."]
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
        return "EnvPool is not installed: `pip install envpool` adds Atari and many more, stepped by C++ threads."
    import envpool

    count = len(envpool.list_all_envs())
    return f"EnvPool: {count:,} more with --env.backend envpool, such as Pong-v5 and LunarLander-v3."
