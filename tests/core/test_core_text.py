import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.core.text import printable

HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@given(st.text())
def test_control_characters_are_escaped(text):
    shown = printable(text)
    assert not HARMFUL.search(shown)
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe ± 3\n\tat line 2\n", "größe ± 3\n\tat line 2\n"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x9b2J", "a\\rb\\x9b2J"),
        ("abc\u202egnp.exe", "abc\\u202egnp.exe"),
        ("\udcff", "\\udcff"),
    ],
)
def test_escapes(text, shown):
    assert printable(text) == shown
    assert str(UserError(text)) == shown
