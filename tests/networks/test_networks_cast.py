import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.networks.cast import cast, cast_shape

CELLS = {  # the table of ludus/networks/cast.py, with F=2 S=3; H=4 W=5; D=6
    (2,): {1: (2,), 2: (2, 1), 3: (2, 1, 1), 4: (2, 1, 1, 1)},
    (2, 3): {1: (6,), 2: (2, 3), 3: (6, 1, 1), 4: (2, 3, 1, 1)},
    (2, 4, 5): {1: (40,), 2: (2, 20), 3: (2, 4, 5), 4: (2, 1, 4, 5)},
    (2, 6, 4, 5): {1: (240,), 2: (2, 120), 3: (12, 4, 5), 4: (2, 6, 4, 5)},
}


@pytest.mark.parametrize(("shape", "dim"), [(shape, dim) for shape, row in CELLS.items() for dim in row])
def test_every_cell_of_the_table(shape, dim):
    assert cast_shape(shape, dim) == CELLS[shape][dim]
    x = torch.arange(7 * torch.Size(shape).numel()).reshape(7, *shape)
    y = cast(x, dim)
    assert y.shape == (7, *CELLS[shape][dim])
    assert torch.equal(y.flatten(), x.flatten())  # elements keep their order
    assert (y is x) == (len(shape) == dim)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_shape_and_tensor_agree(shape, dim, rows):
    assert cast(torch.zeros(rows, *shape), dim).shape[1:] == cast_shape(tuple(shape), dim)


def test_none_keeps_the_shape():
    assert cast_shape((3, 4), None) == (3, 4)
