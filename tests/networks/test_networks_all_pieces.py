"""What every piece must satisfy: shapes, gradients, padding, resets, arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_cases import ALL, CASES, CONFIG, Case, make, name
from torch.autograd import gradcheck
from torch.func import functional_call

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.networks import SUBMODULES
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.module_checks import depends_on_training_mode
from ludus.networks.pieces import make_piece, piece_class

NO_FIRST = torch.zeros(2, 1, dtype=torch.bool)
HEAVY = ("resnet18", "resnet50(norm='none')", "nature_cnn")
RECURRENT = [(rank, case) for rank, case in ALL if piece_class(case.piece, "piece").recurrent]
LISTS = [case for case in CASES[2] if case.piece != "identity2d"]  # a network skips identities


def forward(piece, x, mask=None):
    """Run a piece on two rows, of two time steps if it is recurrent."""
    if piece.recurrent:
        y, _ = piece(x.unsqueeze(1), piece.initial_state(1), NO_FIRST)
        return y.squeeze(1)
    return piece(x, HiddenState(), NO_FIRST, mask)[0]


def test_every_piece_has_a_case():
    assert {case.piece.partition("(")[0] for _, case in ALL} == set(SUBMODULES)
    assert all(piece_class(case.piece, "piece").dim == rank for rank, case in ALL)


@pytest.mark.parametrize(("rank", "case"), ALL, ids=name)
def test_output_has_the_declared_shape(rank: int, case: Case) -> None:
    @settings(deadline=None, max_examples=2 if case.piece in HEAVY else 8, database=None)
    @given(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=rank - 1, max_size=rank - 1))
    def check(features: int, larger: list[int]) -> None:
        shape = (features, *(case.smallest + n for n in larger))
        piece = make(case, shape)
        expected = case.output(*shape)
        assert piece.output_shape() == expected
        assert [piece.output_shape(dim) for dim in (1, 2, 3, 4)] == [cast_shape(expected, dim) for dim in (1, 2, 3, 4)]
        with torch.no_grad():
            y = forward(piece, torch.randn(2, *shape))
        assert y.shape == (2, *expected)
        assert y.isfinite().all()

    check()


@pytest.mark.parametrize(("rank", "case"), ALL, ids=name)
def test_gradients_match_finite_differences(rank: int, case: Case) -> None:
    shape = (2, *[max(case.smallest, 3)] * (rank - 1))
    piece = make(case, shape, torch.float64)
    names, parameters = zip(*piece.named_parameters(), strict=True) if list(piece.parameters()) else ((), ())
    if case.piece in HEAVY:  # their many parameters go through the same layers as the input
        names, parameters = (), ()

    def function(x, *values):
        given = dict(zip(names, values, strict=True))
        return functional_call(_Call(piece), {f"piece.{key}": value for key, value in given.items()}, (x,))

    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    assert gradcheck(function, (x, *copies), fast_mode=True, atol=1e-4)
    if rank == 2:
        mask = torch.tensor([[True, False, True], [True, True, False]])
        assert gradcheck(lambda x: forward(piece, x, mask), (x,), fast_mode=True, atol=1e-4)


class _Call(torch.nn.Module):
    def __init__(self, piece):
        super().__init__()
        self.piece = piece

    def forward(self, x):
        return forward(self.piece, x)


@pytest.mark.parametrize("case", LISTS, ids=name)
def test_padding_cannot_change_the_output(case: Case) -> None:
    piece = make(case, (3, 5))
    x = torch.randn(4, 3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    y = forward(piece, x, mask)
    assert y.isfinite().all()  # of the empty list too
    for junk in (torch.full_like(x, torch.nan), 1e6 * torch.randn_like(x)):
        changed = torch.where(mask.unsqueeze(1), x, junk).requires_grad_()
        z = forward(piece, changed, mask)
        assert torch.equal(y, z)
        z.square().sum().backward()
        assert changed.grad.isfinite().all()
        assert not changed.grad.masked_select(~mask.unsqueeze(1)).any()
    out = piece.output_mask(mask)
    if y.dim() == 3 and out is not None:
        assert out.shape == (4, y.shape[2])
        assert not y.masked_select(~out.unsqueeze(1)).any()
    torch.testing.assert_close(y[2:3], forward(piece, x[2:3]))  # without padding, the mask has no effect


@pytest.mark.parametrize("case", [case for case in LISTS if case.order], ids=name)
def test_padded_list_equals_the_shorter_list_in_any_order(case: Case) -> None:
    piece, short = make(case, (3, 5)), make(case, (3, 3))
    x = torch.randn(2, 3, 5)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    present = torch.tensor([4, 0, 2])
    mask[:, present] = True
    y, z = forward(piece, x, mask), forward(short, x[:, :, present])
    torch.testing.assert_close(y[:, :, present] if case.order == "equivariant" else y, z)
    order = torch.randperm(5)
    w = forward(piece, x[:, :, order], mask[:, order])
    torch.testing.assert_close(w, y[:, :, order] if case.order == "equivariant" else y)


@pytest.mark.parametrize("case", [case for case in LISTS if not case.order], ids=name)
def test_order_matters_to_the_other_pieces(case: Case) -> None:
    piece, x = make(case, (3, 4)), torch.randn(1, 3, 4)
    y, z = forward(piece, x), forward(piece, x.flip(2))
    assert not torch.allclose(y, z.flip(2) if z.dim() == 3 else z)


def run(piece, x, state, first, loop):
    """Return outputs, last state and all gradients, in one call or in one call per step."""
    x = x.clone().requires_grad_()
    start = HiddenState({key: s.clone().requires_grad_(key != "length") for key, s in state.items()})
    piece.zero_grad()
    if loop:
        after, outputs = start, []
        for t in range(len(x)):
            y, after = piece(x[t : t + 1], after, first[t : t + 1])
            outputs.append(y)
        output = torch.cat(outputs)
    else:
        output, after = piece(x, start, first)
    (output.square().sum() + sum(s.pow(3).sum() for key, s in after.items() if key != "length")).backward()
    gradients = [s.grad for s in (x, *start.values(), *piece.parameters())]
    return [output, *after.values(), *gradients]


def random_state(piece, batch):
    """Return a state as it could be; slots of a memory before its length are zero."""
    state = piece.initial_state(batch).map(torch.randn_like)
    if "length" in state:
        slots = state["memory"].shape[2]
        state["length"] = torch.randint(slots + 1, (batch, 1)).to(state["memory"])
        empty = torch.arange(slots).view(1, 1, -1, 1) < slots - state["length"].view(-1, 1, 1, 1)
        state["memory"] = state["memory"].masked_fill(empty, 0)
    return state


@pytest.mark.parametrize(("rank", "case"), RECURRENT, ids=name)
def test_sequence_equals_a_loop_of_steps(rank: int, case: Case) -> None:
    shape = (2, 3, 2, 2)[:rank]
    piece = make(case, shape, torch.float64)

    @settings(deadline=None, max_examples=15, database=None)
    @given(st.integers(1, 9), st.integers(1, 3), st.sampled_from([0.0, 0.2, 0.6, 1.0]), st.integers(0, 99))
    def check(time: int, batch: int, chance: float, seed: int) -> None:
        torch.manual_seed(seed)
        x, state = torch.randn(time, batch, *shape, dtype=torch.float64), random_state(piece, batch)
        first = torch.rand(time, batch) < chance
        assert all(len(s) == batch for s in state.values())
        for one_call, looped in zip(*(run(piece, x, state, first, loop) for loop in (False, True)), strict=True):
            if looped is not None:
                torch.testing.assert_close(one_call, looped, atol=1e-10, rtol=1e-8)

    check()


@pytest.mark.parametrize(("rank", "case"), RECURRENT, ids=name)
def test_float32_sequence_equals_a_loop_of_steps(rank: int, case: Case) -> None:
    shape = (2, 3, 2, 2)[:rank]
    piece, first = make(case, shape), torch.rand(40, 3) < 0.1
    x, state = torch.randn(40, 3, *shape), random_state(piece, 3)
    with torch.no_grad():
        together, last = piece(x, state, first)
        for t in range(40):
            y, state = piece(x[t : t + 1], state, first[t : t + 1])
            torch.testing.assert_close(y[0], together[t], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dict(state), dict(last), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rank", "case"), RECURRENT, ids=name)
@pytest.mark.parametrize("time", [1, 4])
def test_episode_starts_without_the_state_of_the_last(rank: int, case: Case, time: int) -> None:
    shape = (2, 3, 2, 2)[:rank]
    piece = make(case, shape)
    x, first = torch.randn(time, 2, *shape), torch.zeros(time, 2, dtype=torch.bool)
    first[0, 0] = True
    start = piece.initial_state(2)
    clean, _ = piece(x, start, first)
    dirty, _ = piece(x, start.map(lambda s: torch.full_like(s, torch.nan)), first)
    assert torch.equal(clean[:, 0], dirty[:, 0])
    assert dirty[:, 1].isnan().all()
    other, _ = piece(x, random_state(piece, 2), first)
    assert torch.equal(clean[:, 0], other[:, 0])


MODES = {
    "mlp": False,
    "mlp(norm='layer')": False,
    "mlp(norm='group')": False,
    "mlp(norm='batch')": True,
    "mlp(norm='batch_renorm')": True,
    "mlp(dropout=0.1)": True,
    "resnet18(norm='batch')": True,
    "four_conv(norm='batch')": True,
    "transformer_enc(dropout=0.1)": True,
    "transformer_dec(dropout=0.1)": True,
}


@pytest.mark.parametrize("piece", MODES)
def test_batch_norm_and_dropout_are_noticed(piece: str) -> None:
    shape = (4, 4, 20, 20)[: piece_class(piece, "piece").dim]
    made = make_piece(piece, "piece", shape, NetworkConfig(orthogonal=False))
    assert depends_on_training_mode(made) == MODES[piece]
    x = torch.randn(8, *shape)
    outputs = [made.train(mode)(x, HiddenState(), NO_FIRST)[0] for mode in (False, True)]
    assert torch.equal(*outputs) == (not MODES[piece])


@pytest.mark.parametrize(("rank", "case"), ALL, ids=name)
def test_pieces_do_not_depend_on_the_training_mode_by_default(rank: int, case: Case) -> None:
    assert not depends_on_training_mode(make(case, (2, *[case.smallest] * (rank - 1))))


REFUSED = {
    "lstm(size=0)": "size is .*, but must be a whole number of 1 or more",
    "lstm(size=1.5)": "size is .*, but must be a whole number of 1 or more",
    "lstm(size=true)": "size is .*, but must be a whole number of 1 or more",
    "lstm(sizes=3)": 'no argument "sizes": its arguments are size, layers. Did you mean',
    "mlp(norm='bach')": "norm is .*, but must be one of none, layer, batch, batch_renorm, group",
    "mlp(activation=3)": "activation is .*, but must be one of tanh, relu, elu, gelu, silu",
    "mlp(hidden=64)": r"hidden is .*, but must be a list such as \[64, 64\]",
    "mlp(hidden=[64, 0])": r"hidden is .*, but must be a list such as \[64, 64\], each a whole number of 1 or more",
    "mlp(dropout=1.0)": "dropout is .*, but must be 0 or more and less than 1",
    "mlp(dropout='x')": "dropout is .*, but must be 0 or more and less than 1",
    "transformer_enc(width=10)": r'network.body "transformer_enc\(width=10\)": width is 10 and heads is 4',
    "transformer_enc(positions=1)": "positions is .*, but must be true or false",
    "transformer_dec(queries=0)": "queries is .*, but must be a whole number of 1 or more or given",
    "attention_pool(heads=5)": "heads must divide width",
    "gtrxl(heads=7)": "heads must divide width",
    "conv1d(kernel=2)": "kernel is 2; it must be odd",
    "conv_lstm(kernel=4)": "kernel is 4; it must be odd",
    "resnet18(norm='layer')": "norm is .*, but must be one of batch, group, none",
    "identity1d(size=3)": "it has no arguments",
}


@pytest.mark.parametrize("piece", REFUSED)
def test_illegal_arguments_are_refused(piece: str) -> None:
    shape = (4, 40, 40, 40)[: piece_class(piece, "piece").dim]
    with pytest.raises(UserError, match=REFUSED[piece]):
        make_piece(piece, "network.body", shape, CONFIG)


@pytest.mark.parametrize(
    ("piece", "shape", "message"),
    [
        ("nature_cnn", (1, 35, 40), r'"nature_cnn": images must be at least 36×36, but one is 35×40'),
        ("mnih2013", (1, 40, 19), r'"mnih2013": images must be at least 20×20, but one is 40×19'),
        ("spatial_attention", (1, 65, 64), r"a map of 65×64 has more than 4096 pixels"),
    ],
)
def test_illegal_inputs_are_refused(piece: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_piece(piece, "network.net3d", shape, CONFIG)
