"""A run in another process shows what a run in this one shows."""

import io
import re
import threading
from pathlib import Path

import pytest
from test_logging_console import LOSSES, SHARES, run

from ludus.logging import remote
from ludus.logging.console import Console
from ludus.logging.remote import LIMIT, RemoteConsole, RemoteStream, RemoteTerminal, Terminal


def test_the_command_shows_what_a_local_console_shows(capsys: pytest.CaptureFixture[str]) -> None:
    expected, sent = io.StringIO(), RemoteTerminal()
    run(Console(expected))
    run(RemoteConsole(sent))
    assert capsys.readouterr().out == ""
    terminal = Terminal(quiet=False)
    terminal.show(sent.take(0.0))
    terminal.close()
    shown, local = (re.sub(r"[\d,]+/s", "", text) for text in (capsys.readouterr().out, expected.getvalue()))
    assert shown == local


def test_what_is_printed_comes_in_order_and_the_folder_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    sent, terminal = RemoteTerminal(), Terminal(quiet=True)
    console = RemoteConsole(sent)
    print("one", file=RemoteStream(sent, "stdout"))
    console.note("not shown: the run is quiet")
    sent.opened(Path("runs/x"), {"seed": 1}, {"seed": "flag"})
    print("two", file=RemoteStream(sent, "stderr"))
    print("three", file=RemoteStream(sent, "stdout"))
    terminal.show(sent.take(0.0))
    assert capsys.readouterr() == ("one\nthree\n", "two\n")
    assert terminal.run == ("runs/x", {"seed": 1}, {"seed": "flag"})
    assert sent.take(0.0) == []


def test_the_folder_is_told_however_much_is_printed() -> None:
    sent, terminal = RemoteTerminal(), Terminal(quiet=True)
    sent.opened(Path("runs/x"), {}, {})
    for _ in range(LIMIT + 1):
        sent.send("note", "again")
    terminal.show(sent.take(0.0))
    assert terminal.run is not None


def test_updates_are_not_due_while_nobody_takes_them() -> None:
    sent = RemoteTerminal()
    sent.every, sent.width = 0.0, 72
    console = RemoteConsole(sent)
    assert console.width == 72
    assert console.due()
    console.update(1, None, None, LOSSES, SHARES)
    assert not console.due()
    sent.take(0.0)
    assert console.due()


def test_a_command_that_is_suspended_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = RemoteTerminal()
    for number in range(remote.LIMIT + 5):
        sent.send("note", number)
    assert sent.take(0.0)[0] == ("note", (5,))


def test_a_message_ends_the_wait() -> None:
    sent, found = RemoteTerminal(), []
    thread = threading.Thread(target=lambda: found.extend(sent.take(60.0)))
    thread.start()
    sent.send("note", "here")
    thread.join()
    assert found == [("note", ("here",))]
