"""Pages that point at what exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\bmake ([a-z][a-z-]*)")


def prose(page):
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    assert list(broken(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_of_make_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    quoted = re.findall(r"`([^`\n]+)`", prose(page)) + FENCE.findall(page.read_text(encoding="utf-8"))
    assert {name for text in quoted for name in COMMAND.findall(text)} <= targets


def test_every_page_can_be_reached_from_the_readme():
    found, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        found.add(page)
        targets = (target.partition("#")[0] for target in LINK.findall(prose(page)))
        pages = {(page.parent / t).resolve() for t in targets if t.endswith(".md") and ":" not in t}
        queue += [p for p in pages - found if p.exists()]
    assert [page.name for page in PAGES if page not in found] == []


def test_the_reading_order_has_true_line_counts():
    command = [sys.executable, ROOT / "docs" / "line_counts.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_named_in_commands_exist(page):
    for module, name in re.findall(r"\b(examples\.\w+):(\w+)", page.read_text(encoding="utf-8")):
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"{module} has no {name}"
