import io
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.logging.console import Console
from ludus.logging.curve import curve, short
from ludus.logging.live import render
from ludus.logging.status import Evaluation, Status, duration, number, percent

SHARES = {"environment": 0.34, "acting": 0.17, "learning": 0.28, "evaluation": 0.2, "other": 0.01}
LOSSES = {"policy": -0.0123, "value": 1.5, "entropy": 0.5, "kl": 0.006, "clip share": 0.1, "learning rate": 3e-4}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(console: Console) -> None:
    with console:
        console.start({"environment": "CartPole-v1", "run": "runs/x"}, total_steps=1000)
        console.update(250, 20.5, 21.0, LOSSES, SHARES)
        console.evaluated(500, 99.5, 3.25, 100)
        console.note("[red]a note")
        console.update(1000, 30.5, 31.0, LOSSES, SHARES)
        console.finish()


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    run(Console(stream))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["environment  CartPole-v1", "run          runs/x"]
    assert lines[2:4] == ["evaluation: 99.5 +- 3.25 at 500 steps (100 episodes)", "[red]a note"]
    assert "1,000/1,000 steps (100%)" in lines[4]
    assert "return 30.5" in lines[4]
    assert "learning 28% evaluation 20%" in lines[4]
    assert len(lines) == 5
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().isascii()


def test_workers_have_a_row_of_their_own():
    facts = ["waiting 71% of the time", "queue 50% full", "lag 1.5", "2 replaced"]
    status = Status(total=1000, step=250, losses=LOSSES, workers=facts)
    assert "  workers: waiting 71% of the time, queue 50% full, lag 1.5, 2 replaced" in status.line()
    assert status.rows()["workers"] == facts
    assert "workers" not in Status(total=1000, losses=LOSSES).rows()


class FakeTime:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_a_plain_line_every_so_often_only(monkeypatch):
    clock, stream = FakeTime(monkeypatch), io.StringIO()
    console = Console(stream, every=50 / 1024)  # exact as a float, like the sums of its parts
    console.start({}, 10**6)
    for step in range(300):
        clock.now += 1 / 1024
        assert console.due() == (step % 50 == 49)
        console.update(step)
    assert len(stream.getvalue().splitlines()) == 6


def test_the_live_region_shows_everything_and_gives_the_terminal_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    run(Console(stream))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    for expected in (
        "CartPole-v1",
        "1,000 of 1,000 steps",
        "99.5 ± 3.25 at 500 steps",
        "[red]a note",
        "policy -0.0123",
    ):
        assert expected in text
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # the cursor is back


def screen(text: str, width: int) -> list[str]:
    """What a terminal of this width shows of a stream: lines that wrap, cursor up, erase a line."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|.", text):
        if token == "\n":
            row, column = row + 1, 0
        elif token == "\r":
            column = 0
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            rows[row] = ""
        elif not token.startswith("\x1b"):
            if column == width:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = (rows[row].ljust(column) + token)[: column + 1] + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    return rows


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("busy", [False, True], ids=["between drawings", "while drawing"])
def test_a_signal_leaves_no_stale_lines(monkeypatch, width, busy):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    console = Console(stream)
    console.start({"environment": "CartPole-v1"}, 1000)
    console.update(250, 20.5, 21.0, LOSSES, SHARES)
    stream.write("^C")  # what the terminal itself shows
    if busy:
        whole = stream.write

        def interrupted(text: str) -> int:
            stream.write = whole
            console.urgent("Stopping after this update.")
            return whole(text)

        stream.write = interrupted
        console.evaluated(300, 1.0, 1.0, 5)
    else:
        console.urgent("Stopping after this update.")
    console.evaluated(500, 99.5, 3.25, 100)
    console.finish()
    rows = screen(stream.getvalue(), width)
    assert sum("1,000" in row for row in rows) == 1
    assert sum("time" in row for row in rows) == 1
    assert sum("Stopping after this update." in row for row in rows) == 1
    assert any(re.search("500(/| of )1,000", row) for row in rows)  # those of the evaluation
    assert not any("^C" in row for row in rows)


def test_an_exception_gives_the_terminal_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()

    def interrupted() -> None:
        with Console(stream) as console:
            console.start({}, 10)
            console.update(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    run(Console(stream))
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("width", [40, 60, 78, 79, 80, 81, 82, 100])
def test_the_live_region_fits_the_width(width):
    best = Evaluation(250_000, 480.0, 30.0, 100)
    status = Status(
        10**9, 999_999_999, 123_456.0, 1e6, 1234.5, 999.0, LOSSES, SHARES, Evaluation(500_000, 470.0, 10, 9), best
    )
    lines = render(status, width).plain.split("\n")
    assert max(map(len, lines)) <= width  # spaces at the end count: a line that is too long is cut
    words = " ".join("".join(lines[1:]).split())
    assert "470 ± 10 at 500,000 steps best 480 at 250,000" in words
    assert lines[0].endswith("999,999,999/1,000,000,000" if width < 60 else "999,999,999 of 1,000,000,000 steps")
    assert "99%" in lines[0]  # not done yet
    assert len("".join(lines).split("█")) > 8


@pytest.mark.parametrize("cost", [0.001, 0.02])
def test_drawing_costs_less_than_a_hundredth_of_the_time(monkeypatch, cost):
    """A terminal that takes ``cost`` seconds for each picture is drawn so much less often."""
    monkeypatch.setenv("TERM", "xterm")
    console, clock, pictures = Console(Terminal()), FakeTime(monkeypatch), 0
    console.start({"environment": "CartPole-v1"}, 10**6)
    draw = console._live.draw

    def slow(status):
        nonlocal pictures
        pictures += 1
        clock.now += cost
        draw(status)

    monkeypatch.setattr(console._live, "draw", slow)
    begun = clock.now
    while clock.now < begun + 60:
        clock.now += 0.005
        console.update(5, 1.0, 1.0, LOSSES, SHARES)
    assert pictures >= 3
    assert pictures * cost < 0.01 * 60
    console.finish()


def test_an_old_locale_loses_characters_not_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream).note("± fine")
    assert raw.getvalue() == b"? fine\n"


def test_numbers():
    assert [duration(s) for s in (0, 59.6, 3599, 3600, 90061)] == ["0:00", "1:00", "59:59", "1:00:00", "1d 1:01:01"]
    assert [number(x) for x in (0.0, 1234567.8, -0.012345, float("nan"), float("inf"))] == [
        "0", "1,234,568", "-0.01235", "nan", "inf",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 0.014, 0.999, 1)] == ["0%", "1%", "99%", "100%"]
    assert [short(x) for x in (0, 950, 9999, 50_000, 1_500_000, 2e9, 0.25)] == [
        "0",
        "950",
        "9999",
        "50k",
        "1.5M",
        "2G",
        "0.25",
    ]


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=30),
    st.none() | st.floats(-1e6, 1e6),
    st.integers(30, 120),
    st.integers(3, 20),
)
def test_a_curve_fits_and_never_fails(values, target, width, height):
    text = curve(range(len(values)), values, target, width, height)
    lines = text.split("\n")
    assert max(map(len, lines)) <= width
    assert len(lines) in (1, height + 2)


def test_a_rising_curve_rises():
    rows = curve(range(0, 100_001, 1000), range(101), target=75.0, width=70, height=10).split("\n")
    assert "target 75" in rows[2]
    assert "╌" in rows[2]
    starts = [re.search("[\u2801-\u28ff]", row).start() for row in rows[:10]]
    assert starts == sorted(starts, reverse=True)
    assert rows[-1].split() == ["0", "100k", "steps"]
    assert curve([], []) == "(nothing to plot yet)"


def test_the_last_numbers_are_printed_once() -> None:
    stream = io.StringIO()
    console = Console(stream, live=False, every=0.0)
    console.start({}, 100)
    console.update(50)
    console.finish()
    assert stream.getvalue().count("50/100") == 1
    console = Console(stream := io.StringIO(), live=False, every=1000.0)
    console.start({}, 100)
    console.update(50)
    assert not stream.getvalue()
    console.finish()
    assert stream.getvalue().count("\n") == 1
