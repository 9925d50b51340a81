"""Files and functions that a person can hold in mind."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "ludus").rglob("*.py"))
FUNCTION, FILE, AGENT, RUN = 60, 400, 250, 10_350  # lines, at most


def length(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def test_no_file_is_too_long():
    assert {str(path.relative_to(ROOT)): length(path) for path in FILES if length(path) > FILE} == {}


def test_agents_are_short():
    agents = (ROOT / "ludus" / "agents").glob("*.py")
    assert {path.name: length(path) for path in agents if length(path) >= AGENT} == {}


def test_functions_fit_on_a_screen():
    lengths = dict(pair for path in FILES for pair in functions(path))
    assert {name: n for name, n in lengths.items() if n > FUNCTION} == {}
    assert statistics.median(lengths.values()) < 10


def test_there_is_no_hotchpotch():
    assert [path for path in FILES if path.stem in {"utils", "util", "misc", "helpers", "common"}] == []


@pytest.mark.parametrize("path", sorted((ROOT / "ludus").rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_packages_import_nothing_when_imported(path):
    imports = [
        n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    names = {alias.name if isinstance(n, ast.Import) else n.module for n in imports for alias in n.names}
    assert names <= {"__future__", "importlib", "typing"}


RUN_AND_COUNT = """
import sys, ludus, torch
torch.set_num_threads(1)
ludus.train("CartPole-v1", nb_step=256, settings={"quiet": True, "evaluation.episodes": 1})
print(*(m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "ludus"), sep="\\n")
"""


def test_what_a_cartpole_run_imports_reads_in_an_afternoon(tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{RUN_AND_COUNT}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.splitlines() if line.endswith(".py")]
    assert len(files) > 20
    assert sum(map(length, files)) <= RUN
