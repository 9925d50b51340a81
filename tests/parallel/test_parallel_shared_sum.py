"""Sums over processes in shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from sum_jobs import never, terms

from ludus.parallel.process import Launcher
from ludus.parallel.shared_sum import SharedSum

COUNT, NBYTES = 20, 16_000


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_processes_get_the_same_sum_in_the_order_of_ranks(ranks: int) -> None:
    shared = SharedSum(0, ranks, NBYTES)
    launcher = Launcher(preload=["numpy"])
    settings = {"ranks": ranks, "count": COUNT, "nbytes": NBYTES}
    others = [
        launcher.start("sum_jobs:add", settings | {"rank": rank}, {"sum": shared.fd}, str(rank))
        for rank in range(1, ranks)
    ]

    def check(waited: float) -> None:
        for other in others:
            if other.wait(0) and other.code:
                raise other.failure()
        never(waited)

    try:
        for i, parts in enumerate(zip(*(terms(rank, COUNT) for rank in range(ranks)), strict=True)):
            expected = parts[0]
            for part in parts[1:]:
                expected = np.add(expected, part, dtype=part.dtype)
            total = shared.sum(parts[0], check)
            assert (total.dtype, total.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(total, expected)
            if i % 5 == 0:
                shared.sum(total, check)
        assert [other.wait(60) for other in others] == [True] * (ranks - 1)
        assert [other.code for other in others] == [0] * (ranks - 1)
    finally:
        launcher.close()
        shared.close()
        shared.close()


def test_a_process_that_does_not_come_is_noticed() -> None:
    shared, seen = SharedSum(0, 2, 64), []

    def check(waited: float) -> None:
        seen.append(waited)
        if len(seen) == 2:
            raise TimeoutError("rank 1 did not come")

    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        shared.sum(np.ones(3), check)
    assert seen[1] > seen[0] > 0
    shared.close()
