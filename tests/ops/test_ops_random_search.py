"""The weights of directions in ARS, against numpy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ludus.ops.random_search import ars_weights


def reference(positive: NDArray[np.float64], negative: NDArray[np.float64], top: int) -> NDArray[np.float64]:
    """Mania et al. 2018, algorithm 2: sort by max(r⁺, r⁻), keep b, divide by b and the deviation of 2b returns."""
    order = sorted(range(len(positive)), key=lambda k: max(positive[k], negative[k]), reverse=True)[:top]
    deviation = np.std([r[k] for k in order for r in (positive, negative)])
    weights = np.zeros(len(positive))
    for k in order:
        weights[k] = (positive[k] - negative[k]) / (top * deviation)
    return weights


@given(seed=st.integers(0, 10_000), directions=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_weights_are_those_of_the_algorithm(seed: int, directions: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    positive, negative = rng.normal(size=(2, directions)) * 100
    top = data.draw(st.integers(1, directions))
    found = ars_weights(torch.tensor(positive), torch.tensor(negative), top)
    np.testing.assert_allclose(found.numpy(), reference(positive, negative, top), rtol=1e-9, atol=1e-12)


def test_equal_returns_give_no_step() -> None:
    assert ars_weights(torch.full((3,), 5.0), torch.full((3,), 5.0), 2).tolist() == [0, 0, 0]
