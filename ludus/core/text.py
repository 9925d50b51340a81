"""Text from elsewhere (names, paths, exceptions, the stderr of workers) made fit for a terminal and a log."""

from __future__ import annotations

import re

# control characters other than tab and newline, marks that change the direction of text, line separators, and halves of
# surrogate pairs, which no encoding has
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with what a terminal would obey written out: an escape character becomes ``\x1b``."""
    return _UNFIT.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
