"""The names that ``import ludus`` gives."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ludus

CODE = "import sys, ludus; print(*dir(ludus)); print('torch' in sys.modules)"


def test_dir_lists_all_public_names_before_any_is_loaded() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.splitlines()
    listed = said[0].split()
    assert {name for name in listed if not name.startswith("__")} == set(ludus.__all__)
    assert "__version__" in listed
    assert said[1] == "False"


@pytest.mark.parametrize("name", ludus.__all__)
def test_every_listed_name_is_there(name: str) -> None:
    assert getattr(ludus, name).__name__ == name


def test_editors_see_every_name() -> None:
    """Each name is imported under TYPE_CHECKING from the module that it is loaded from."""
    tree = ast.parse(Path(ludus.__file__).read_text(encoding="utf-8"))
    blocks = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    assert typed == ludus._MODULES
    assert sorted(typed) == sorted(ludus.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = ludus.trian  # type: ignore[attr-defined]
