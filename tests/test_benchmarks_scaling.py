"""The simulation behind docs/scaling.md, on cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scaling import GIGABIT, Result, Setup, Simulation, Times, limits
from benchmarks.scaling_costs import Costs, measure

STEPS = 8 * 32  # of an unroll, as set up by default
PLAIN = {"network": 0.0, "variation": 0.0}


def run(times: Times, setup: Setup) -> Result:
    return Simulation(times, setup).run()


def test_one_worker_and_an_idle_host() -> None:
    """The worker never waits; while it plays an unroll, the host learns from the one before."""
    times = Times(worker=0.1, load=0.0, arrival=0.0, update=0.01, fetch=0.0)
    result = run(times, Setup(workers=1, batch=1, **PLAIN))
    assert result.steps_per_second == pytest.approx(STEPS / 0.1)
    assert result.workers == pytest.approx(1.0)
    assert result.host == pytest.approx(0.1)
    assert (result.lag, result.lag_95) == (1.0, 1.0)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_saturated_host(slots: int) -> None:
    """Every slot is full, so an unroll waits for as many updates as it takes to learn from all slots."""
    times = Times(worker=0.001, load=0.0, arrival=0.0, update=0.1, fetch=0.0)
    setup = Setup(workers=64, batch=8, slots=slots, **PLAIN)
    result = run(times, setup)
    assert result.steps_per_second == pytest.approx(8 * STEPS / 0.1)
    assert result.steps_per_second == pytest.approx(limits(times, setup)["host"])
    assert result.host == pytest.approx(1.0)
    assert result.lag == pytest.approx(slots * 64 / 8)
    assert result.workers == pytest.approx(0.001 * 8 / 0.1 / 64)


def test_saturated_links() -> None:
    times = Times(worker=0.01, load=0.0, arrival=0.01, update=0.001, fetch=0.0)
    setup = Setup(workers=100, batch=4, variation=0.0)
    result = run(times, setup)
    assert result.steps_per_second == pytest.approx(STEPS / 0.01)
    assert result.incoming == pytest.approx(1.0)
    times = Times(worker=0.01, load=0.0, arrival=0.0, update=0.001, fetch=0.05)
    setup = Setup(workers=100, batch=100, per_machine=1, variation=0.0)
    result = run(times, setup)
    assert result.outgoing == pytest.approx(1.0, rel=0.02)


def test_old_unrolls_are_dropped() -> None:
    times = Times(worker=0.01, load=0.0, arrival=0.0, update=0.1, fetch=0.0)
    result = run(times, Setup(workers=64, batch=8, max_lag=4, network=0.0))
    assert result.dropped > 0
    assert result.lag <= 4
    assert result.host == pytest.approx(1.0, rel=0.02)


def test_several_hosts_share_the_workers() -> None:
    times = Times(worker=0.1, load=0.0, arrival=0.0, update=0.01, fetch=0.0)
    one, four = (run(times, Setup(workers=1000, hosts=hosts, variation=0.0)) for hosts in (1, 4))
    assert four.steps_per_second == pytest.approx(4 * one.steps_per_second)
    assert four.lag == pytest.approx(one.lag / 4, rel=0.05)


def test_no_part_is_occupied_more_than_all_the_time() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        worker, load, arrival, update, fetch = 10 ** random.uniform(-4, -1, 5)
        setup = Setup(workers=int(random.integers(1, 300)), batch=int(random.integers(1, 20)), per_machine=8)
        times = Times(worker, load * 0.1, arrival * 0.1, update, fetch * 0.1)
        result = run(times, setup)
        assert max(result[3:7]) < 1.05  # events at the edges, and random times of unrolls
        assert result.steps_per_second <= 1.05 * min(limits(times, setup).values())
        assert result.lag >= 0


def test_costs_add_up() -> None:
    costs = Costs(**{name: 0.0 for name in Costs.__dataclass_fields__})
    costs = Costs(**{**vars(costs), "env_step": 1e-3, "inference": 2e-3, "update_fixed": 0.5, "update_step": 1e-4})
    costs = Costs(**{**vars(costs), "unroll_bytes": 100.0, "weight_bytes": 1e6, "publish": 0.25, "compressed": 0.5})
    times = Times.of(costs, Setup(workers=1, rows=2, length=10, batch=4, network=8.0))
    assert times.worker == pytest.approx(10 * (2 * 1e-3 + 2e-3))
    assert times.update == pytest.approx(0.5 + 4 * 20 * 1e-4 + 0.25)
    assert times.arrival == pytest.approx(2000 / (8 * GIGABIT))
    assert times.fetch == pytest.approx(1e6 / (8 * GIGABIT))
    half = Times.of(costs, Setup(workers=1, rows=2, length=10, batch=4, network=8.0, compress=True))
    assert half.arrival == pytest.approx(times.arrival / 2)


def test_costs_are_measured() -> None:
    costs = measure("CartPole-v1", "vtrace", rows=2, length=8, batch=2, budget=0.01)
    assert all(value >= 0 for value in vars(costs).values())
    assert min(costs.env_step, costs.inference, costs.publish, costs.weight_bytes) > 0
    assert 20 < costs.unroll_bytes < 200  # 4 floats, an action, a reward and flags
