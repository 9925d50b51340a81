"""Packages that import nothing by themselves, and have no room for leftovers."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ludus"


def test_there_is_no_module_for_leftovers():
    assert [path for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "util", "misc", "helpers", "common"}] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_packages_import_nothing_when_imported(path):
    imports = [
        n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    names = {alias.name if isinstance(n, ast.Import) else n.module for n in imports for alias in n.names}
    assert names <= {"__future__", "importlib", "types", "typing"}
