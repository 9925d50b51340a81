import time

import pytest

from ludus.logging.clock import Clock
from ludus.logging.rate import Rate


def test_each_lap_gives_its_time_to_the_phase_it_names(monkeypatch):
    moments = iter([0, 20_000_000, 20_100_000, 20_200_000])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(moments))
    clock = Clock()
    assert clock.shares() == {"environment": 0, "acting": 0, "learning": 0, "evaluation": 0, "other": 0}
    clock.lap("learning")
    clock.lap("acting")
    shares = clock.shares()
    assert shares["learning"] > 0.9
    assert sum(shares.values()) == pytest.approx(1)
    assert clock.nanoseconds["learning"] == 20_000_000
    assert clock.nanoseconds["acting"] == 100_000
    with pytest.raises(KeyError):
        clock.lap("lerning")


def test_the_rate_is_the_recent_one():
    rate = Rate(window=10)
    assert rate.per_second() == 0
    for second in range(100):
        rate.update(
            second * (100 if second < 50 else 0) + (5000 + (second - 50) * 7 if second >= 50 else 0), float(second)
        )
    assert rate.per_second() == pytest.approx(7)


def test_the_rate_is_exact_however_often_it_is_told():
    rate = Rate(window=10)
    for i in range(50_000):
        rate.update(i * 3, i / 1000)
    assert rate.per_second() == pytest.approx(3000, rel=1e-6)
    assert len(rate._marks) < 210


def test_two_updates_at_one_moment_do_not_divide_by_zero():
    rate = Rate()
    rate.update(0, 5.0)
    rate.update(10, 5.0)
    assert rate.per_second() == 0
