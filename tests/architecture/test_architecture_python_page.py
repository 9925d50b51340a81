"""docs/python.md: its snippets run from top to bottom as one script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ludus

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_snippet_runs(tmp_path: Path) -> None:
    snippets = SNIPPET.findall(PAGE)
    assert len(snippets) >= 8
    (tmp_path / "page.py").write_text("\n".join(snippets), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"print\([^\n]*\)  # (.+)", PAGE):  # what the page says that a line prints
        assert said in done.stdout


def test_the_page_names_all_public_names() -> None:
    for name in ludus.__all__:
        assert re.search(rf"\b{name}\b", PAGE), name
