"""The command line. Each command is a module with ``run(argv) -> int``, imported only when it is typed."""

from ludus.core.text import printable

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes


def say(text: object) -> None:
    """Print a line for a person, with control characters of names and paths written out."""
    print(printable(str(text)), flush=True)
