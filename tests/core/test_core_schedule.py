"""Schedules: their values against PyTorch's, how they are written, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ludus.core.schedule import Schedule, read_schedule, value_at

STEPS = 100


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("constant(0.3)", {0.0: 0.3, 0.7: 0.3}),
        ("linear(0.2, 0.05)", {0.0: 0.2, 0.5: 0.125, 1.0: 0.05, 2.0: 0.05}),
        ("linear(1, 0.1, share=0.5)", {0.25: 0.55, 0.5: 0.1, 0.9: 0.1}),
        ("cosine(1, 0)", {0.0: 1.0, 1 / 3: 0.75, 0.5: 0.5, 1.0: 0.0}),
        ("exponential(1, 0.01)", {0.0: 1.0, 0.5: 0.1, 1.0: 0.01}),
        ("piecewise(0: 1.0, 0.5: 0.1, 0.75: 0.3)", {0.0: 1.0, 0.25: 0.55, 0.5: 0.1, 0.625: 0.2, 0.9: 0.3}),
        ("piecewise(0.2: 1, 0.4: 2)", {0.0: 1.0, 0.3: 1.5, 1.0: 2.0}),
        # the warm-up rises from 0, and the rest of the run is the schedule
        ("linear(1, 0, warmup=0.2)", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
    ],
)
def test_values(text: str, values: dict[float, float]) -> None:
    schedule = read_schedule(text)
    for progress, value in values.items():
        assert schedule.at(progress) == pytest.approx(value, abs=1e-12), progress


TORCH: dict[str, Any] = {
    "StepLR(0.5, 0.3, gamma=0.2)": lambda o: lr_scheduler.StepLR(o, 30, 0.2),
    "StepLR(0.5, 0.1)": lambda o: lr_scheduler.StepLR(o, 10),
    "MultiStepLR(0.5, [0.3, 0.75], gamma=0.5)": lambda o: lr_scheduler.MultiStepLR(o, [30, 75], 0.5),
    "ExponentialLR(0.5, 0.04)": lambda o: lr_scheduler.ExponentialLR(o, 0.04 ** (1 / STEPS)),
    "ConstantLR(0.5, factor=0.25, total_iters=0.2)": lambda o: lr_scheduler.ConstantLR(o, 0.25, 20),
    "LinearLR(0.5, start_factor=0.1, end_factor=0.9, total_iters=0.4)": lambda o: lr_scheduler.LinearLR(
        o, 0.1, 0.9, 40
    ),
    "PolynomialLR(0.5, total_iters=0.8, power=2)": lambda o: lr_scheduler.PolynomialLR(o, 80, 2),
    "CosineAnnealingLR(0.5, T_max=0.5, eta_min=0.1)": lambda o: lr_scheduler.CosineAnnealingLR(o, 50, 0.1),
    "CosineAnnealingWarmRestarts(0.5, 0.25)": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 25),
    "CosineAnnealingWarmRestarts(0.5, 0.1, T_mult=2, eta_min=0.01)": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 10, 2, 0.01
    ),
    "CyclicLR(0.1, 0.5, 0.2)": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 20, cycle_momentum=False),
}


def rates(make: Any, steps: int = STEPS) -> list[float]:
    """The learning rates that a scheduler of PyTorch gives."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("text", TORCH)
def test_schedules_of_torch_are_those_of_torch(text: str) -> None:
    """One step is a hundredth of the run."""
    schedule = read_schedule(text)
    assert [schedule.at(i / STEPS) for i in range(STEPS)] == pytest.approx(rates(TORCH[text]), rel=1e-9)


def test_one_cycle_is_that_of_torch() -> None:
    """PyTorch's ends one step before the end, so the number of steps has to be large."""
    steps, schedule = 2_000, read_schedule("OneCycleLR(0.5, pct_start=0.4)")
    expected = rates(lambda o: lr_scheduler.OneCycleLR(o, 0.5, steps, pct_start=0.4, cycle_momentum=False), steps)
    assert [schedule.at(i / steps) for i in range(steps)] == pytest.approx(expected, abs=2e-3)


def test_a_plateau_reduces_as_in_torch() -> None:
    returns = torch.randn(60, generator=torch.Generator().manual_seed(0)).cumsum(0).tolist()
    schedule = read_schedule("ReduceLROnPlateau(0.5, factor=0.5, patience=3, threshold=0.2, min_lr=0.01)")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    settings: Any = {"mode": "max", "factor": 0.5, "patience": 3, "threshold": 0.2, "threshold_mode": "abs"}
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=0.01, eps=0.0, **settings)
    seen = set()
    for i, found in enumerate(returns):
        scheduler.step(found)
        seen.add(rate := optimizer.param_groups[0]["lr"])
        assert schedule.at(0.1, returns[: i + 1]) == pytest.approx(rate)
    assert len(seen) > 3


def test_a_value_by_return_is_that_of_the_highest_return_reached() -> None:
    schedule = read_schedule("by_return(0: 1e-3, 200: 5e-4, 400: 1e-4)")
    for returns, value in (([], 1e-3), ([-5.0], 1e-3), ([150.0, 20.0], 1e-3), ([250.0, 20.0], 5e-4), ([400.0], 1e-4)):
        assert schedule.at(0.5, returns) == value
    assert schedule.needs_returns
    assert not read_schedule("linear(1, 0)").needs_returns


@pytest.mark.parametrize("text", [*TORCH, "linear(0.2, 0.05, share=0.5, warmup=0.1)", "piecewise(0: 1, 0.5: 1e-05)"])
def test_what_is_written_is_read_again(text: str) -> None:
    schedule = read_schedule(text)
    again = read_schedule(str(schedule))
    assert again == schedule == pickle.loads(pickle.dumps(schedule)) == copy.deepcopy(schedule)
    assert hash(again) == hash(schedule)
    assert (str(again), f"{again:g}", f"{again}") == (str(schedule),) * 3
    for i in range(11):
        assert again.at(i / 10) == schedule.at(i / 10)


def test_a_schedule_is_a_number_that_is_0_only_if_it_always_is() -> None:
    assert float(read_schedule("linear(0, 0.9)")) == 0.9
    assert not read_schedule("constant(0)")
    assert float(read_schedule("linear(-2, 1)")) == -2
    schedule = read_schedule("piecewise(0: 0.1, 0.333: 4, 1: 0.2)")
    assert (schedule.low, schedule.high) == (0.1, 4)
    assert read_schedule("linear(2, 1, warmup=0.1)").low == 0
    assert math.isclose(read_schedule("OneCycleLR(0.5)").high, 0.5, rel_tol=1e-3)


def test_a_schedule_equals_no_number() -> None:
    schedule = Schedule("linear", 0.2, 0.1)
    assert schedule != 0.2
    assert schedule == read_schedule("linear( 0.2,0.1 )")
    assert schedule != read_schedule("linear(0.2, 0.1, share=0.5)")
    assert value_at(schedule, 1.0) == 0.1
    assert value_at(0.3, 1.0) == 0.3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("linear(0.2)", "missing a required argument: 'end'"),
        ("linear(0.2, 0.1, 0.5, 0.6)", "too many positional arguments"),
        ("linear(0.2, x)", '"x" is not a number'),
        ("linear(0.2, nan)", "nan is not finite"),
        ("linear(0.2, 0.1, share=0)", "share is 0; it is a share of the run"),
        ("linear(0.2, 0.1, share=0.1, share=0.2)", 'it has "share" twice'),
        ("linear(0.2, 0.1, warmup=1)", "warmup is 1; it is a share of the run, 0 or greater and less than 1"),
        ("linear(0.2, 0.1, speed=3)", "unexpected keyword argument 'speed'"),
        ("linear(0: 1, 1: 2)", "argument: 'start'"),
        ("exponential(1, 0)", "both ends must be greater than 0"),
        ("piecewise(0.5: 1, 0.2: 2)", "its points must be in ascending order"),
        ("piecewise(0: 1, 5000: 2)", "its points are at shares of the run"),
        ("piecewise(1, 2)", "too many positional arguments"),
        ("StepLR(0.5, 1000)", "step_size is 1000; it is a share of the run"),
        ("StepLR(0.5, 0.0001, gamma=1e300)", "it does not give finite numbers"),
        ("ExponentialLR(0.5, -0.5)", "it does not give finite numbers"),
        ("MultiStepLR(0.5, [30, 80])", "milestones is [30, 80]; each is a share of the run"),
        ("ReduceLROnPlateau(0.5, factor=-1)", "factor is -1; it must be between 0 and 1"),
        ("ReduceLROnPlateau(0.5, patience=-1)", "patience is -1; it must be 0 or greater"),
        ("linear(0.2,, 0.1)", '"" is not a number'),
        ("linear", "brackets are missing"),
        ("MultiStepLR(0.5, 0.3)", "milestones is a list of shares of the run"),
        ("CosineAnnealingWarmRestarts(0.5, 0.1, T_mult=0.5)", "T_mult is 0.5; it must be a whole number"),
        ("linear 0.2, 0.1", "brackets are missing"),
        ("linear([0.2], 1)", "start must be a number"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^.*" + reason.replace("(", r"\(").replace("[", r"\[")):
        read_schedule(text)
