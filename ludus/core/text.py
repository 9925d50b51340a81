"""Escape control characters in text from elsewhere (paths, exceptions, stderr of workers) for terminals and logs."""

from __future__ import annotations

import re

# control characters except tab and newline, direction marks, line separators and lone surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return the text with control characters escaped, such as ``\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
