"""Brings the line counts of the reading order in architecture.md up to date: ``make docs``.

Between the markers, a table row that links to a file gets that file's number of lines in its second column, and the row
that starts with "total" gets the sum. ``--check`` changes nothing and says whether something would change.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- reading order -->", "<!-- end of reading order -->"
FILE_ROW = re.compile(r"^(\|[^|]*\]\((?P<path>[^)#]+)\)[^|]*\|)[^|]*\|")
TOTAL_ROW = re.compile(r"^(\|\s*\**total\**\s*\|)[^|]*\|", re.IGNORECASE)


def count(path: Path) -> int:
    """The lines of a file; of a folder, those of its Python files."""
    if path.is_dir():
        return sum(count(file) for file in path.glob("*.py"))
    return len(path.read_text(encoding="utf-8").splitlines())


def recount(table: str, folder: Path) -> tuple[str, int]:
    """Return the table with its counts brought up to date, and their sum."""
    total, lines = 0, []
    for line in table.splitlines():
        if found := FILE_ROW.match(line):
            n = count(folder / found["path"])
            total += n
            line = FILE_ROW.sub(lambda m, n=n: f"{m[1]} {n} |", line)  # type: ignore[misc]
        elif TOTAL_ROW.match(line):
            line = TOTAL_ROW.sub(lambda m, total=total: f"{m[1]} {total:,} |", line)  # type: ignore[misc]
        lines.append(line)
    return "\n".join(lines), total


def main() -> int:
    """Rewrite the page, or with ``--check`` compare; the exit code says whether it was up to date."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{PAGE.name} has no table between {BEGIN} and {END}.")
        return 1
    new, total = recount(table, PAGE.parent)
    print(f"reading order: {total:,} lines")
    if "--check" in sys.argv[1:]:
        return int(new != table.removesuffix("\n"))
    PAGE.write_text(before + begin + new + "\n" + end + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
