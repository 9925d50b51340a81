"""Update the line counts of the reading orders in architecture.md: ``make docs``.

Between each pair of markers, a table row that links to a file gets that file's number of lines in its second column,
and the row that starts with "total" gets the sum. With ``--check`` nothing is written, and the exit code is 1 where a
count is out of date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "architecture.md"
SECTION = re.compile(r"<!-- reading order: (?P<name>\w+) -->\n(?P<table>.*?)<!-- end of reading order -->", re.DOTALL)
FILE_ROW = re.compile(r"^(\|[^|]*\]\((?P<path>[^)#]+)\)[^|]*\|)[^|]*\|")
TOTAL_ROW = re.compile(r"^(\|\s*\**total\**\s*\|)[^|]*\|", re.IGNORECASE)


def count(path: Path) -> int:
    """Return the lines of a file; of a folder, those of its Python files."""
    if path.is_dir():
        return sum(count(file) for file in path.glob("*.py"))
    return len(path.read_text(encoding="utf-8").splitlines())


def recount(table: str, folder: Path) -> tuple[str, int]:
    """Return the table with current counts, and their sum."""
    total, lines = 0, []
    for line in table.splitlines():
        if found := FILE_ROW.match(line):
            n = count(folder / found["path"])
            total += n
            line = FILE_ROW.sub(lambda m, n=n: f"{m[1]} {n} |", line)  # type: ignore[misc]
        elif TOTAL_ROW.match(line):
            line = TOTAL_ROW.sub(lambda m, total=total: f"{m[1]} {total:,} |", line)  # type: ignore[misc]
        lines.append(line)
    return "\n".join(lines) + "\n", total


def files(name: str) -> set[str]:
    """Return the paths, relative to the page, that a reading order links to."""
    table = next(section["table"] for section in SECTION.finditer(PAGE.read_text("utf-8")) if section["name"] == name)
    return {found["path"] for line in table.splitlines() if (found := FILE_ROW.match(line))}


def main() -> int:
    """Rewrite the page, or compare it with ``--check``."""
    text = new = PAGE.read_text(encoding="utf-8")
    sections = list(SECTION.finditer(text))
    if not sections:
        print(f"{PAGE.name} has no reading order between markers.")
        return 1
    for section in sections:
        table, total = recount(section["table"], PAGE.parent)
        new = new.replace(section["table"], table)
        print(f"reading order of {section['name']}: {total:,} lines")
    if "--check" in sys.argv[1:]:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
