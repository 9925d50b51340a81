"""All pieces with small arguments, for tests that every piece must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ludus.networks.config import NetworkConfig
from ludus.networks.pieces import make_piece

CONFIG = NetworkConfig(hidden=(5, 4), lstm_size=3, orthogonal=False)  # orthogonalizing large matrices takes seconds


class Case(NamedTuple):
    """A piece, and the output shape that it must have for an input shape."""

    piece: str
    output: Callable[..., tuple[int, ...]]
    smallest: int = 1  # side of an image
    order: str = ""  # of a list: "equivariant", "invariant" or "" if it matters


CASES = {
    1: [
        Case("identity1d", lambda f: (f,)),
        Case("mlp", lambda f: (4,)),
        Case("mlp(hidden=[7], activation='elu', norm='layer')", lambda f: (7,)),
        Case("mlp(hidden=[])", lambda f: (f,)),
        Case("residual_mlp(size=6, blocks=1)", lambda f: (6,)),
        Case("noisy_linear(size=6)", lambda f: (6,)),
        Case("lstm", lambda f: (3,)),
        Case("lstm(size=4, layers=2)", lambda f: (4,)),
        Case("layer_norm_lstm(size=4)", lambda f: (4,)),
        Case("gru", lambda f: (3,)),
        Case("gru(size=4, layers=2)", lambda f: (4,)),
        Case("min_gru(size=4, layers=2)", lambda f: (4,)),
        Case("gtrxl(width=6, heads=2, layers=2, memory=3)", lambda f: (6,)),
    ],
    2: [
        Case("identity2d", lambda f, s: (f, s)),
        Case("flat_mlp", lambda f, s: (4,)),
        Case("entity_mlp", lambda f, s: (4, s), order="equivariant"),
        Case("deep_sets", lambda f, s: (4,), order="invariant"),
        Case("deep_sets(hidden=[6], pool='sum', activation='silu')", lambda f, s: (6,), order="invariant"),
        Case("deep_sets(hidden=[6], pool='max')", lambda f, s: (6,), order="invariant"),
        Case("attention_pool(width=6, heads=2)", lambda f, s: (6,), order="invariant"),
        Case("transformer_enc(width=6, heads=2, layers=2)", lambda f, s: (6, s), order="equivariant"),
        Case("transformer_enc(width=6, heads=1, layers=1, positions=true)", lambda f, s: (6, s)),
        Case("transformer_dec(width=6, heads=2, layers=2, queries=3)", lambda f, s: (6, 3), order="invariant"),
        Case("conv1d(channels=[3, 4])", lambda f, s: (4, s)),
    ],
    3: [
        Case("identity3d", lambda f, h, w: (f, h, w)),
        Case("small_cnn", lambda f, h, w: (256,)),
        Case("mnih2013", lambda f, h, w: (256,), smallest=20),
        Case("nature_cnn", lambda f, h, w: (512,), smallest=36),
        Case("four_conv(channels=4, norm='group')", lambda f, h, w: (4, -(-h // 16), -(-w // 16))),
        Case("impala_cnn(channels=[2, 3], size=5)", lambda f, h, w: (5,)),
        Case("resnet18", lambda f, h, w: (512,)),
        Case("resnet50(norm='none')", lambda f, h, w: (2048,)),
        Case("sc2le_encoder(channels=4)", lambda f, h, w: (4, h, w)),
        Case("sc2le_decoder(channels=3)", lambda f, h, w: (3, h, w)),
        Case("conv_lstm(channels=3)", lambda f, h, w: (3, h, w)),
        Case("spatial_attention(width=4, heads=2)", lambda f, h, w: (4, h, w)),
    ],
    4: [
        Case("identity4d", lambda f, d, h, w: (f, d, h, w)),
        Case("conv3d(channels=[2, 3], size=5)", lambda f, d, h, w: (5,)),
    ],
}
ALL = [(rank, case) for rank, cases in CASES.items() for case in cases]


def make(case: Case, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Make the piece of a case with seed 0."""
    torch.manual_seed(0)
    return make_piece(case.piece, "network.body", shape, CONFIG).to(dtype).eval()


def name(case: Any) -> str:
    """Return the name of a test."""
    return case.piece if isinstance(case, Case) else str(case)
