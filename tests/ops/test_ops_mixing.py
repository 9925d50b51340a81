"""Mixing: the equation in numpy, and that no agent's value lowers the team's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.ops.mixing import monotonic_mixing

sizes = {"seed": st.integers(0, 10_000), "agents": st.integers(1, 5), "units": st.integers(1, 6)}


def draw(seed: int, agents: int, units: int, rows: int = 3) -> list[torch.Tensor]:
    """Values and parameters of both signs, some of them large."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, agents), (rows, agents, units), (rows, units), (rows, units), (rows,)]
    return [torch.from_numpy(rng.normal(size=shape) * rng.choice([0.1, 1, 10])) for shape in shapes]


@given(**sizes)
def test_mixing_is_the_equation(seed: int, agents: int, units: int) -> None:
    parts = draw(seed, agents, units)
    q, w1, b1, w2, b2 = (x.numpy() for x in parts)
    expected = []
    for row in range(len(q)):
        hidden: Any = q[row] @ np.abs(w1[row]) + b1[row]
        hidden = np.where(hidden > 0, hidden, np.exp(np.minimum(hidden, 0)) - 1)
        expected.append(hidden @ np.abs(w2[row]) + b2[row])
    np.testing.assert_allclose(monotonic_mixing(*parts).numpy(), expected, rtol=1e-9, atol=1e-9)


@given(**sizes, agent=st.integers(0, 4), rise=st.floats(0, 100))
def test_a_higher_value_of_an_agent_never_lowers_the_teams(
    seed: int, agents: int, units: int, agent: int, rise: float
) -> None:
    q, *parameters = draw(seed, agents, units)
    higher = q.clone()
    higher[:, agent % agents] += rise
    before, after = monotonic_mixing(q, *parameters), monotonic_mixing(higher, *parameters)
    assert (after >= before - 1e-9 * before.abs()).all()
    q.requires_grad_()
    (slope,) = torch.autograd.grad(monotonic_mixing(q, *parameters).sum(), q)
    assert (slope >= 0).all()
