"""Pools of processes and threads: results, progress, failures, deadlines and what is left behind."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from functools import partial

import numpy as np
import pool_jobs
import pytest

from ludus.core.errors import UserError
from ludus.parallel.orphans import running_processes, with_descendants
from ludus.parallel.pool import ProcessPool, ThreadPool
from ludus.parallel.process import WorkerError
from ludus.parallel.thread import Thread

JOBS = "pool_jobs"


@pytest.fixture(scope="module")
def pool():
    before = open_fds()
    with ProcessPool(2) as pool:
        yield pool
    pool.close()
    assert open_fds() == before
    assert with_descendants([os.getpid()], running_processes()) == [os.getpid()]


def open_fds():
    return sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))


def test_results_come_in_the_order_of_the_items(pool):
    items = [{"x": np.full((2, 3), i, np.int16), "name": f"item {i}"} for i in range(7)]
    seen = []
    results = pool.map(pool_jobs.double, items, on_done=lambda done, total: seen.append((done, total)))
    assert [result["name"] for result in results] == [item["name"] for item in items]
    for item, result in zip(items, results, strict=True):
        assert result["twice"].dtype == np.int16
        assert np.array_equal(result["twice"], item["x"] * 2)
    assert seen == [(i, 7) for i in range(1, 8)]
    assert len({result["worker"] for result in results}) <= 2
    assert pool.map(f"{JOBS}:pid", []) == []


def test_workers_are_kept_between_maps(pool):
    first, second = (set(pool.map(f"{JOBS}:pid", range(6))) for _ in range(2))
    assert first | second <= set(with_descendants([os.getpid()], running_processes()))
    assert len(first | second) <= 2


def test_an_exception_comes_with_item_traceback_and_stderr(pool):
    with pytest.raises(WorkerError, match="raised ValueError: this is wrong") as caught:
        pool.map(pool_jobs.fail_at_three, range(6))
    text = str(caught.value)
    assert text.startswith("pool_jobs:fail_at_three, called for item 3 in worker ")
    assert 'pool_jobs.py", line' in text
    assert "a last word" in text
    assert pool.map(pool_jobs.fail_at_three, [1, 2, 4]) == [1, 2, 4]  # with a new worker


def test_a_user_error_stays_one(pool):
    with pytest.raises(UserError, match=r"^Set x to 1\.$"):
        pool.map(pool_jobs.mistake, [1])


def test_a_killed_worker_is_told_and_replaced(pool):
    with pytest.raises(WorkerError, match=r"called for item 0 in worker .* was killed by SIGKILL"):
        pool.map(pool_jobs.kill_itself, [1])
    (number,) = pool.map(pool_jobs.pid, [0])
    os.kill(number, signal.SIGKILL)  # between two calls
    while number in running_processes():
        time.sleep(0.01)
    assert pool.map(pool_jobs.pid, [0]) != [number]


def test_a_late_call_is_ended(pool):
    with pytest.raises(WorkerError, match=r"hung: no answer within 0\.2 s"):
        pool.map(pool_jobs.sleep, [1000, 1000], timeout=0.2)
    assert pool.map(pool_jobs.sleep, [0], timeout=1e7) == [None]  # months: more than fits in one wait


def test_an_interrupt_ends_the_running_calls(pool):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.map(pool_jobs.sleep, [0, 1000], on_done=interrupt)
    assert len(with_descendants([os.getpid()], running_processes())) <= 3  # this process, the server, an idle worker


def test_what_cannot_be_sent_is_refused(pool):
    for item in (object(), {"x": np.array([None, 1])}):
        with pytest.raises(TypeError, match=r"a (object|ndarray) cannot be sent to another process; send numbers"):
            pool.map(pool_jobs.pid, [item])
    with pytest.raises(WorkerError, match="raised TypeError: a object cannot be sent"):
        pool.map(pool_jobs.return_object, [1])


def test_functions_without_an_import_path_need_threads(pool):
    def local(item):
        return item + 1

    for function in (local, lambda item: item, partial(pool_jobs.pid)):
        with pytest.raises(UserError, match=r"cannot be imported by another process.*use a ThreadPool"):
            pool.map(function, [1])
    with pytest.raises(UserError, match=r"package\.module:function"):
        pool.map("pid", [1])
    with pytest.raises(UserError, match="no module nowhere"):
        pool.map("nowhere:function", [1])
    assert ThreadPool(2).map(local, range(4)) == [1, 2, 3, 4]


def test_each_worker_makes_its_context_once():
    with ProcessPool(2, context=f"{JOBS}:Context") as pool:
        found = pool.map(pool_jobs.count_calls, range(9)) + pool.map(pool_jobs.count_calls, range(9, 12))
    assert [item for _, _, item in found] == list(range(12))
    for worker in (0, 1):
        calls = [call for number, call, _ in found if number == worker]
        assert sorted(calls) == list(range(1, len(calls) + 1))
    with (
        ProcessPool(1, context=pool_jobs.make_nothing) as pool,
        pytest.raises(WorkerError, match="raised ValueError: no context for worker 0"),
    ):
        pool.map(pool_jobs.count_calls, [1])


@pytest.mark.parametrize("kind", [ProcessPool, ThreadPool])
def test_a_pool_has_a_worker(kind):
    with pytest.raises(UserError, match="at least 1 worker, not 0"):
        kind(0)


def test_a_thread_carries_its_exception_and_result():
    def fail():
        raise ValueError("in the thread")

    thread = Thread(fail)
    thread.start()
    with pytest.raises(ValueError, match="in the thread") as caught:
        thread.join()
    assert caught.traceback[-1].name == "fail"
    thread = Thread(max, 3, 4)
    thread.start()
    thread.join()
    assert thread.result == 4


def test_threads_keep_the_order_and_tell_progress():
    both = threading.Barrier(2)  # only passed if two threads call at a time
    seen = []

    def meet(item):
        both.wait(60)
        return [item, object]

    results = ThreadPool(2).map(meet, range(6), on_done=lambda done, total: seen.append((done, total)))
    assert results == [[i, object] for i in range(6)]
    assert seen == [(i, 6) for i in range(1, 7)]
    assert ThreadPool(2).map(meet, []) == []


def test_threads_have_contexts():
    made = []

    def make(number):
        made.append(number)
        return number

    found = ThreadPool(3, context=make).map(lambda context, item: (context, item), range(10))
    assert sorted(made) == [0, 1, 2]
    assert [item for _, item in found] == list(range(10))
    assert {context for context, _ in found} <= {0, 1, 2}


@pytest.mark.parametrize("error", [ValueError, queue.Empty])
def test_an_exception_in_a_thread_stops_the_map(error):
    called = []

    def fail(item):
        called.append(item)
        if item == 1:
            raise error("wrong")

    with pytest.raises(error, match="wrong"):
        ThreadPool(1).map(fail, range(100))
    assert called == [0, 1]


def test_a_late_thread_raises():
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"more than 0\.1 s"):
        ThreadPool(2).map(lambda item: release.wait(60), range(3), timeout=0.1)
    release.set()
