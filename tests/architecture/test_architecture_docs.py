"""Pages that point at what exists."""

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ludus
from ludus.containers.loop import collect, improve

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


def files_that_run(train):
    """The files of ludus with code that runs inside of ``collect`` and ``improve``."""
    loop, found, depth = {collect.__code__, improve.__code__}, set(), 0

    def profile(frame, event, argument):
        nonlocal depth
        if frame.f_code in loop:
            depth += {"call": 1, "return": -1}.get(event, 0)
        if depth and event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        train()
    finally:
        sys.setprofile(None)
    return {Path(name) for name in found if Path(name).is_relative_to(ROOT / "ludus")}


@pytest.mark.parametrize(("agent", "environment"), [("ppo", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_the_reading_order_leaves_nothing_out(agent, environment, tmp_path):
    spec = spec_from_file_location("line_counts", ROOT / "docs" / "line_counts.py")
    line_counts = module_from_spec(spec)
    spec.loader.exec_module(line_counts)
    listed = {(ROOT / "docs" / path).resolve() for path in line_counts.files(agent)}
    short = {"agent.warmup": 64, "agent.batch_size": 16} if agent == "sac" else {"agent.rollout": 16}
    settings = {"quiet": True, "runs": str(tmp_path), "evaluation.episodes": 1, "compile": "off"} | short
    found = files_that_run(lambda: ludus.train(environment, agent, nb_step=128, settings=settings))
    assert sorted(path.relative_to(ROOT) for path in found - listed) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_named_in_commands_exist(page):
    for module, name in re.findall(r"\b(examples\.\w+):(\w+)", page.read_text(encoding="utf-8")):
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"{module} has no {name}"
