"""Queues between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ludus.core.errors import UserError
from ludus.parallel.process import Launcher, WorkerError
from ludus.parallel.shared_queue import SharedQueue

PATIENCE = 120.0  # seconds: far more than a test takes


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher(preload=["ludus.parallel.shared_queue"])
    yield launcher
    launcher.close()


@pytest.fixture
def queue() -> Iterator[SharedQueue]:
    queue = SharedQueue(3)
    yield queue
    queue.close()


def test_messages_of_several_processes_arrive_whole_and_each_sender_s_in_order(launcher, queue):
    count, names = 200, ["a", "b", "c"]
    fds = queue.fds("out")
    senders = [launcher.start("queue_jobs:put", {"name": name, "count": count}, fds, name) for name in names]
    seen = {name: [] for name in names}
    for _ in range(count * len(names)):
        message = queue.get(PATIENCE, senders)
        assert message["x"].tolist() == [message["number"]] * (1 + 500 * (message["number"] % 7))
        seen[message["from"]].append(message["number"])
    assert seen == {name: list(range(count)) for name in names}
    assert len(queue) == 0
    for sender in senders:
        sender.end()


def test_several_takers_share_the_messages(launcher, queue):
    answers = SharedQueue(32)
    fds = queue.fds("in") | answers.fds("out")
    takers = [launcher.start("queue_jobs:answer", {}, fds, str(i)) for i in range(3)]
    found = []
    for i in range(100):
        queue.put(i, PATIENCE, takers)
        while len(answers):
            found.append(answers.get(PATIENCE))
    while len(found) < 100:
        found.append(answers.get(PATIENCE, takers))
    for _ in takers:
        queue.put(None, PATIENCE, takers)
    assert sorted(found) == list(range(0, 200, 2))
    for taker in takers:
        assert taker.wait(PATIENCE)
        assert taker.code == 0
        taker.end()
    answers.close()


def test_a_process_that_is_killed_while_it_puts_leaves_the_queue_usable(launcher, queue):
    process = launcher.start("queue_jobs:die_within", {}, queue.fds("out"), "sender")
    assert process.wait(PATIENCE)
    process.end()
    queue.put("after", PATIENCE)
    assert [queue.get(PATIENCE), queue.get(PATIENCE)] == ["whole", "after"]
    with pytest.raises(TimeoutError, match="stayed empty"):
        queue.get(0.01)


def test_a_failure_is_raised_after_the_last_message(launcher, queue):
    process = launcher.start("queue_jobs:fail", {}, queue.fds("out"), "sender")
    assert queue.get(PATIENCE, [process]) == "last"
    with pytest.raises(WorkerError, match=r"(?s)raised ValueError: the pump is broken.*Remote traceback") as caught:
        queue.get(PATIENCE, [process])
    assert "queue_jobs.py" in caught.value.traceback
    process.end()


def test_nobody_left_to_put_is_an_error_and_not_a_wait(launcher, queue):
    process = launcher.start("queue_jobs:put", {"name": "a", "count": 1}, queue.fds("out"), "sender")
    assert queue.get(PATIENCE, [process])["number"] == 0
    with pytest.raises(WorkerError, match="ended with exit code 0"):
        queue.get(PATIENCE, [process])
    process.end()


def test_a_full_queue_waits_and_keeps_no_memory_of_taken_messages(queue):
    for i in range(3):
        queue.put("x" * 100_000 + str(i), PATIENCE)
    with pytest.raises(TimeoutError, match="stayed full"):
        queue.put("more", 0.01)
    assert [queue.get()[-1] for _ in range(3)] == ["0", "1", "2"]
    assert sum(os.fstat(fd).st_size for fd in queue._slots) == 0


def test_a_closed_queue_leaves_no_file_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    queue = SharedQueue(2)
    queue.put(1)
    assert queue.get() == 1
    queue.close()
    queue.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_queue_without_slots_is_refused():
    with pytest.raises(UserError, match="1 to 32 slots, not 0"):
        SharedQueue(0)
