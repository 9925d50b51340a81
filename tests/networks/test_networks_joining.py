"""Padding, categories, shared sources, branches, and heads of every rank of a ModularNetwork."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, Shape, Shapes, SubModule
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.critic import ACTION
from ludus.networks.slots import Recurrence

T, B = 3, 2
FIRST = torch.tensor([[True, True], [False, True], [False, False]])
HERE = __name__
PADDED: Shapes = {"units": (3, 5), "speed": (2,), "image": (1, 2, 3)}
MASKS = {"units": "units/mask"}


class Scaled(SubModule):
    """Multiplies the entries of a list by a parameter, where they are present."""

    dim = 2

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__(input_shape)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def output_shape(self, dim: int | None = None) -> Shape:
        return self.input_shape

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        assert mask is not None
        assert mask.shape == (x.shape[0], x.shape[2])
        return self.scale * x + 7.0 * ~mask.unsqueeze(1), state


class Pooled(Scaled):
    """The mean of the entries that are present."""

    def output_shape(self, dim: int | None = None) -> Shape:
        return self.input_shape[:1]

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        present = torch.ones_like(x[:, 0]) if mask is None else mask.to(x.dtype)
        total = (x * present.unsqueeze(1)).sum(2)
        return self.scale * total / present.sum(1, keepdim=True).clamp(min=1), state


class Accumulated(Scaled):
    """A recurrent piece that keeps the list: adds the entries up over time."""

    recurrent = True

    def initial_state(self, batch: int) -> HiddenState:
        return HiddenState(sum=self.scale.new_zeros(batch, *self.input_shape))

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        if mask is not None:
            assert mask.shape == (*first.shape, x.shape[-1])
            x = x * mask.unsqueeze(2)
        outputs = []
        for now, begins in zip(x, first, strict=True):
            state = HiddenState(sum=state.reset(begins)["sum"] + self.scale * now)
            outputs.append(state["sum"])
        return torch.stack(outputs), state


def rows(shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(T, B, *shape, generator=generator) for name, shape in shapes.items()}


def padded_rows(garbage: float) -> dict[str, Tensor]:
    """Lists of different length with ``garbage`` in the padding; one is empty."""
    x = rows(PADDED)
    mask = torch.arange(5) < torch.tensor([[3, 5], [0, 1], [2, 4]]).unsqueeze(-1)
    return x | {"units": torch.where(mask.unsqueeze(2), x["units"], garbage), "units/mask": mask}


@pytest.mark.parametrize(
    "pieces",
    [
        *({"body": f"identity{rank}d"} for rank in (1, 2, 3, 4)),
        {"body": "mlp"},
        {"body": "lstm"},
        {"net2d": f"{HERE}:Scaled", "body": "identity2d"},
        {"net2d": f"{HERE}:Scaled"},
        {"net2d": f"{HERE}:Pooled"},
        {"body": f"{HERE}:Scaled"},
        {"body": f"{HERE}:Pooled"},
        {"body": f"{HERE}:Accumulated"},
        {"net2d": f"{HERE}:Accumulated", "body": f"{HERE}:Accumulated"},
        {"body": "identity2d", "head1d": f"{HERE}:Pooled"},
        {"body": "identity2d", "head1d": "lstm"},
    ],
)
def test_padding_changes_neither_outputs_nor_gradients(pieces: dict[str, str]) -> None:
    inputs = {name: shape for name, shape in PADDED.items() if name != "image" or "Scaled" not in str(pieces)}
    if pieces.get("body", "").endswith(("2d", "Scaled", "Pooled", "Accumulated")):
        inputs.pop("image", None)  # a map of 6 and a list of 5 have different features
    config = NetworkConfig(**({"net2d": "identity2d", "net3d": "identity3d", "body": "mlp"} | pieces))
    network = build_network(config, NetworkSpec(inputs, {"policy": (2,), "value": (1,)}, masks=MASKS))
    results = []
    for garbage in (0.0, 1e3):
        network.zero_grad()
        outputs, state = network(padded_rows(garbage), network.initial_state(B), FIRST)
        sum(y.square().sum() for y in outputs.values()).backward()
        results.append((outputs, dict(state), {name: p.grad.clone() for name, p in network.named_parameters()}))
        assert all(p.grad.any() for p in network.parameters())
    torch.testing.assert_close(results[0], results[1])


def test_outputs_for_a_list_are_zero_in_its_padding() -> None:
    config = NetworkConfig(net1d="identity1d", net2d="identity2d", body="identity2d", head2d=f"{HERE}:Scaled")
    inputs: Shapes = {"units": (3, 5), "speed": (2,)}
    network = build_network(config, NetworkSpec(inputs, {"pick": (1, 5), "value": (1,)}, masks=MASKS))
    x = padded_rows(9.0)
    outputs, _ = network(x, HiddenState(), FIRST)
    assert outputs["pick"].shape == (T, B, 1, 5)
    assert torch.equal(outputs["pick"].squeeze(2) != 0, x["units/mask"])
    joined = torch.cat([x["units"], x["speed"].unsqueeze(-1).expand(T, B, 2, 5)], 2).flatten(0, 1)
    expected = network.projections["pick"](2.0 * joined).view(T, B, 5) * x["units/mask"]
    torch.testing.assert_close(outputs["pick"].squeeze(2), expected)


def test_lists_of_different_length_are_joined_on_the_sequence() -> None:
    inputs: Shapes = {"units": (3, 5), "speed": (2,), "items": (3, 4)}
    config = NetworkConfig(net1d="identity1d", net2d="identity2d", body=f"{HERE}:Pooled")
    network = build_network(config, NetworkSpec(inputs, {"value": (1,)}, masks=MASKS))
    x = padded_rows(3.0) | {"items": rows(inputs)["items"]}
    present = torch.cat([x["units/mask"], torch.ones(T, B, 4, dtype=torch.bool)], -1).float()
    lists = torch.cat([x["units"], x["items"]], -1) * present.unsqueeze(2)
    mean = lists.sum(-1) / present.sum(-1, keepdim=True)
    expected = network.projections["value"](2.0 * torch.cat([mean, x["speed"]], -1))
    torch.testing.assert_close(network(x, HiddenState(), FIRST)[0]["value"], expected)


def test_lists_with_masks_of_their_own_are_joined_on_the_sequence() -> None:
    inputs: Shapes = {"a": (3, 5), "b": (3, 5)}
    config = NetworkConfig(net2d="identity2d", body="identity2d")
    assert build_network(config, NetworkSpec(inputs, {"v": (1,)}))._join.shape == (6, 5)
    assert build_network(config, NetworkSpec(inputs, {"v": (1,)}, masks={"a": "m", "b": "m"}))._join.shape == (6, 5)
    one = build_network(config, NetworkSpec(inputs, {"v": (1,)}, masks={"a": "m"}))
    assert one._join.shape == (3, 10)  # the padding of one list must not hide entries of the other
    apart = build_network(config, NetworkSpec(inputs, {"v": (1,)}, masks={"a": "m", "b": "n"}))
    assert apart._join.shape == (3, 10)


def test_lists_of_at_most_one_entry_keep_masks_of_their_own() -> None:
    """Joined on features, one mask would hide both entries or show padding."""
    inputs: Shapes = {"a": (3, 1), "b": (3, 1)}
    spec = NetworkSpec(inputs, {"v": (1,)}, masks={"a": "m", "b": "n"})
    network = build_network(NetworkConfig(net2d="identity2d", body=f"{HERE}:Pooled"), spec)
    assert network._join.shape == (3, 2)
    x = rows(inputs)
    for only, other in (("a", "b"), ("b", "a")):
        present = {name: torch.full((T, B, 1), name == only) for name in inputs}
        masks = {"m": present["a"], "n": present["b"]}
        y, _ = network(x | masks | {other: torch.full((T, B, 3, 1), 9.0)}, HiddenState(), FIRST)
        torch.testing.assert_close(y["v"], network.projections["v"](2.0 * x[only].squeeze(-1)))
    with pytest.raises(UserError, match="lists need equal features to become one"):
        build_network(
            NetworkConfig(net2d="identity2d", body="identity2d"), spec._replace(inputs=inputs | {"b": (2, 1)})
        )


def test_pooled_lists_have_no_padding() -> None:
    inputs: Shapes = {"a": (3, 5), "b": (3, 4)}
    spec = NetworkSpec(inputs, {"v": (1,)}, masks={"a": "m", "b": "n"})
    config = NetworkConfig(net2d="transformer_dec(queries=1, width=4, heads=1, layers=1)", body="identity2d")
    assert build_network(config, spec)._join.shape == (8, 1)  # one query of each list, side by side


@given(st.data())
@settings(max_examples=60)
def test_any_observations_join_in_a_body_of_any_rank_or_are_refused(data: st.DataObject) -> None:
    size = st.integers(1, 3)
    shape = st.integers(1, 4).flatmap(lambda rank: st.tuples(*[size] * rank))
    inputs = data.draw(st.dictionaries(st.sampled_from("abcd"), shape, min_size=1))
    lists = [name for name, of in inputs.items() if len(of) == 2]
    masks = {name: f"{name}/mask" for name in lists if data.draw(st.booleans())}
    sources = {f"net{rank}d": f"identity{rank}d" for rank in (1, 2, 3, 4)}
    config = NetworkConfig(**sources, body=f"identity{data.draw(st.integers(1, 4))}d")
    x = rows(inputs) | {mask: torch.rand(T, B, inputs[name][1]) < 0.5 for name, mask in masks.items()}
    try:
        network = build_network(config, NetworkSpec(inputs, {"v": (2,)}, masks=masks))
    except UserError:
        with pytest.raises(UserError, match=r"cannot be joined for the body identity[234]d"):
            build_network(config, NetworkSpec(inputs, {"v": (2,)}, masks=masks))
        return
    recurrence = Recurrence(HiddenState(), FIRST, HiddenState())
    joined, mask = network._join([source.run(x, recurrence) for source in network._sources])
    assert joined.shape == (T * B, *network._join.shape)
    assert mask is None or mask.shape == (T * B, joined.shape[2])
    assert network(x, HiddenState(), FIRST)[0]["v"].shape == (T, B, 2)


ALL_RANKS: Shapes = {"place": (1, 2, 3), "target": (2, 5), "policy": (4,), "value": (1,)}


@pytest.mark.parametrize("body", ["mlp", "lstm", "identity3d", "identity2d"])
def test_outputs_of_every_rank_at_once(body: str) -> None:
    inputs: Shapes = {"units": (3, 5), "speed": (2,), "image": (4, 2, 3)}
    if body == "identity2d":
        inputs["image"] = (3, 2, 3)
    config = NetworkConfig(net2d="identity2d", net3d="identity3d", body=body, head1d="mlp", hidden=(6,), lstm_size=7)
    network = build_network(config, NetworkSpec(inputs, ALL_RANKS, masks=MASKS))
    x = padded_rows(5.0) | {"image": rows(inputs)["image"]}
    outputs, _ = network(x, network.initial_state(B), FIRST)
    assert {name: y.shape[2:] for name, y in outputs.items()} == ALL_RANKS
    assert torch.equal((outputs["target"] != 0).any(2), x["units/mask"])
    sum(y.square().sum() for y in outputs.values()).backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())
    changed, _ = network(x | {"speed": x["speed"] + 1}, network.initial_state(B), FIRST)
    assert all((changed[name] - y).abs().max() > 1e-6 for name, y in outputs.items())  # all depend on the whole


def test_a_head_on_sources_gets_the_map_and_the_body() -> None:
    config = NetworkConfig(net1d="identity1d", net3d="identity3d", body="identity1d")
    network = build_network(config, NetworkSpec({"image": (1, 2, 2), "speed": (3,)}, {"place": (1, 2, 2)}))
    x = rows({"image": (1, 2, 2), "speed": (3,)})
    body = torch.cat([x["image"].flatten(2), x["speed"]], -1)  # [T, B, 7]
    joined = torch.cat([x["image"], body[..., None, None].expand(T, B, 7, 2, 2)], 2)
    weight = network.projections["place"].weight
    expected = (joined * weight.view(1, 1, 8, 1, 1)).sum(2, keepdim=True)
    torch.testing.assert_close(network(x, HiddenState(), FIRST)[0]["place"], expected)


def test_outputs_over_two_lists_have_heads_of_their_own() -> None:
    inputs: Shapes = {"units": (3, 5), "items": (4, 5)}
    outputs: Shapes = {"attack": (1, 5), "use": (1, 5), "value": (1,)}
    config = NetworkConfig(net2d="identity2d", body="mlp", hidden=(6,))
    over, masks = {"attack": "units", "use": "items"}, {"units": "units/mask", "items": "items/mask"}
    network = build_network(config, NetworkSpec(inputs, outputs, masks=masks, over=over))
    assert network.projections["attack"].in_channels == 9
    assert network.projections["use"].in_channels == 10
    x = padded_rows(5.0)
    x |= {"items": rows(inputs)["items"], "items/mask": ~x["units/mask"]}
    y, _ = network(x, HiddenState(), FIRST)
    assert torch.equal(y["attack"].squeeze(2) != 0, x["units/mask"])
    assert torch.equal(y["use"].squeeze(2) != 0, x["items/mask"])


@pytest.mark.parametrize(
    ("config", "outputs", "message"),
    [
        (
            {"net2d": "flat_mlp"},
            {"pick": (1, 5)},
            r'"pick" of shape \(1, 5\) needs a list .* gives \(64,\).*"units" \(64,\)',
        ),
        ({"net2d": "identity2d"}, {"pick": (1, 4)}, r'"pick".*"units" \(3, 5\).*network.net2d entity_mlp'),
        ({"head1d": "identity3d"}, {"v": (1,)}, "network.head1d.*rank 3: choose a piece of rank 1"),
    ],
)
def test_outputs_that_no_piece_can_give_are_refused(config: dict[str, Any], outputs: Shapes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_network(NetworkConfig(**config), NetworkSpec({"units": (3, 5)}, outputs))


CATEGORIES = {"land": 7, "kinds": 4}
CATEGORICAL: Shapes = {"land": (2, 3), "kinds": (5,), "speed": (2,)}


def test_categories_are_embedded() -> None:
    config = NetworkConfig(net1d="identity1d", net2d="identity2d", net3d="identity3d", body="identity1d", embedding=3)
    masks = {"kinds": "kinds/mask"}
    spec = NetworkSpec(CATEGORICAL, {"v": (1,)}, categories=CATEGORIES, masks=masks)
    network = build_network(config, spec)
    mask = torch.rand(T, B, 5) < 0.5
    x = rows(CATEGORICAL) | {"land": torch.randint(7, (T, B, 2, 3)), "kinds": torch.randint(4, (T, B, 5))}
    outputs, _ = network(x | {"kinds/mask": mask}, HiddenState(), FIRST)
    land = network.embeddings["land"].weight[x["land"]].permute(0, 1, 4, 2, 3)  # [T, B, E, H, W]
    kinds = (network.embeddings["kinds"].weight[x["kinds"]] * mask.unsqueeze(-1)).transpose(2, 3)
    joined = torch.cat([land.flatten(2), kinds.flatten(2), x["speed"]], -1)
    torch.testing.assert_close(outputs["v"], network.projections["v"](joined))
    default = build_network(NetworkConfig(), spec)
    assert set(default.pieces) == {"source/land", "body"}
    assert default.embeddings["land"].weight.shape == (7, 8)
    assert default.plain_mlp() is None


def test_observations_share_a_source() -> None:
    inputs: Shapes = {"camera/left": (3,), "camera/right": (3,), "speed": (3,)}
    config = NetworkConfig(net1d="lstm", body="identity1d", share=("camera/*",), lstm_size=4)
    network = build_network(config, NetworkSpec(inputs, {"v": (1,)}))
    assert list(network.pieces) == ["source/camera/left", "source/speed"]
    state = network.initial_state(B)
    assert {name.rpartition("/")[0] for name in state} == {f"source/{name}" for name in inputs}
    x = rows(inputs)
    _, after = network(x, state, FIRST)
    swapped = x | {"camera/left": x["camera/right"], "camera/right": x["camera/left"]}
    _, other = network(swapped, state, FIRST)
    torch.testing.assert_close(after["source/camera/left/h"], other["source/camera/right/h"])
    assert not torch.equal(after["source/camera/left/h"], after["source/camera/right/h"])


@pytest.mark.parametrize(
    ("inputs", "categories", "message"),
    [
        ({"a": (3,), "b": (4,)}, {}, r'"a" and "b" share a source, but their shapes are \(3,\) and \(4,\)'),
        ({"a": (3,), "b": (3,)}, {"a": 2, "b": 5}, "differ in their categories"),
    ],
)
def test_only_equal_observations_share_a_source(inputs: Shapes, categories: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_network(NetworkConfig(share=("*",)), NetworkSpec(inputs, {"v": (1,)}, categories=categories))


def test_sources_of_single_observations() -> None:
    inputs: Shapes = {"units": (3, 5), "items": (3, 4), "a": (2,), "b": (2,)}
    sources = ("un*=identity2d", "b = mlp")
    config = NetworkConfig(net1d="identity1d", sources=sources, body="identity1d", hidden=(6,))
    network = build_network(config, NetworkSpec(inputs, {"v": (1,)}))
    assert set(network.pieces) == {"source/items", "source/b"}
    assert network._join.shape == (15 + 6 + 2 + 6,)
    with pytest.raises(UserError, match=r'network.sources b is "flat_mlp".*rank 1'):
        build_network(NetworkConfig(sources=("b=flat_mlp",)), NetworkSpec(inputs, {"v": (1,)}))
    with pytest.raises(UserError, match=r'network.sources has "flat_mlp"; write'):
        build_network(NetworkConfig(sources=("flat_mlp",)), NetworkSpec(inputs, {"v": (1,)}))


@pytest.mark.parametrize("shared", ["sources", "body"])
def test_partly_shared_networks(shared: Any) -> None:
    outputs: Shapes = {"policy": (2,), "value": (1,)}
    branches = {"actor": ("policy",), "critic": ("value",)}
    config = NetworkConfig(net1d="lstm", body="mlp", head1d="lstm", shared=shared, hidden=(5,), lstm_size=4)
    network = build_network(config, NetworkSpec({"o": (3,)}, outputs, branches=branches))
    bodies = ["actor/body", "critic/body"] if shared == "sources" else ["body"]
    assert sorted(network.pieces) == sorted(["source/o", *bodies, "actor/head1d", "critic/head1d"])
    state = network.initial_state(B)
    assert {name.rpartition("/")[0] for name in state} == {"source/o", "actor/head1d", "critic/head1d"}
    runs = []
    for name, piece in network.pieces.items():
        piece.register_forward_hook(lambda *_, name=name: runs.append(name))
    y, _ = network(rows({"o": (3,)}), state, FIRST)
    assert sorted(runs) == sorted(network.pieces)  # each runs once
    touched = {}
    for output in outputs:
        network.zero_grad()
        y[output].sum().backward(retain_graph=True)
        touched[output] = {name.split(".")[1] for name, p in network.named_parameters() if p.grad is not None}
    both = {"source/o"} | ({"body"} if shared == "body" else set())
    assert touched["policy"] & touched["value"] == both


def test_sharing_sources_without_parameters_is_refused() -> None:
    config = NetworkConfig(net1d="identity1d", body="mlp", shared="sources")
    with pytest.raises(UserError, match="no source has parameters"):
        build_network(config, NetworkSpec({"o": (3,)}, {"p": (1,), "v": (1,)}, branches={"a": ("p",), "c": ("v",)}))


@pytest.mark.parametrize("body", ["auto", "lstm", "identity2d"])
@pytest.mark.parametrize("members", [1, 2])
def test_critics_take_lists_and_categories(body: str, members: int) -> None:
    inputs: Shapes = {"units": (3, 5), "land": (2, 3), ACTION: (2,)}
    spec = NetworkSpec(inputs, {"q": (1,)}, concatenate=True, members=members, masks=MASKS, categories={"land": 7})
    config = NetworkConfig(net2d="identity2d", net3d="small_cnn", body=body, lstm_size=4, hidden=(6,))
    network = build_network(config, spec)
    shape = (T, B, members, 1) if members > 1 else (T, B, 1)
    results = []
    for garbage in (0.0, 1e3):
        x = padded_rows(garbage) | {"land": torch.ones(T, B, 2, 3, dtype=torch.int64), ACTION: torch.ones(T, B, 2)}
        results.append(network(x, network.initial_state(B), FIRST)[0]["q"])
    assert results[0].shape == shape
    torch.testing.assert_close(*results)


def test_default_pieces_keep_the_lists_and_maps_that_outputs_are_about() -> None:
    inputs: Shapes = {"units": (3, 5), "speed": (2,), "image": (4, 6, 6)}
    network = build_network(NetworkConfig(), NetworkSpec(inputs, {"place": (1, 6, 6), "value": (1,)}, masks=MASKS))
    kinds = {part.name: part.kind for part in network.parts}
    assert kinds["source/image"] == "sc2le_encoder"
    assert kinds["source/units"] == "identity2d"
    assert kinds["body"] == "mlp"
    network = build_network(NetworkConfig(), NetworkSpec(inputs, {"target": (1, 5)}, masks=MASKS))
    kinds = {part.name: part.kind for part in network.parts}
    assert (kinds["source/image"], kinds["source/units"], kinds["body"]) == ("small_cnn", "entity_mlp", "mlp")
    network = build_network(NetworkConfig(), NetworkSpec({"units": (3, 5)}, {"target": (1, 5)}, masks=MASKS))
    assert list(network.pieces) == ["source/units", "body"]


class Named(nn.Module):
    """A user's module that asks for the mask of a list and gets categories as integers."""

    def forward(self, units: Tensor, land: Tensor, units_mask: Tensor) -> Tensor:
        assert land.dtype == torch.int64
        assert units_mask.dtype == torch.bool
        return (units * units_mask.unsqueeze(1)).flatten(1)


class Single(nn.Module):
    """One observation under any name, and its mask."""

    def forward(self, x: Tensor, units_mask: Tensor) -> Tensor:
        return (x * units_mask.unsqueeze(1)).flatten(1)


class Everything(nn.Module):
    """All observations, but no masks."""

    def forward(self, **observation: Tensor) -> Tensor:
        assert list(observation) == ["units"]
        return observation["units"].flatten(1)


@pytest.mark.parametrize(("name", "land"), [("Named", True), ("Single", False), ("Everything", False)])
def test_custom_networks_get_masks_that_they_name(name: str, land: bool) -> None:
    inputs: Shapes = {"units": (3, 5)} | ({"land": (2, 3)} if land else {})
    spec = NetworkSpec(inputs, {"v": (1,)}, masks=MASKS, categories={"land": 7} if land else {})
    network = build_network(NetworkConfig(name=f"{HERE}:{name}"), spec)
    x = padded_rows(4.0) | {"land": torch.ones(T, B, 2, 3, dtype=torch.int64)}
    assert network(x, HiddenState(), FIRST)[0]["v"].shape == (T, B, 1)


def test_default_body_keeps_the_only_map_that_an_output_is_about() -> None:
    """A linear head would add the same to all places for a vector, so that no choice of a place depended on it."""
    inputs: Shapes = {"screen": (3, 24, 24), "speed": (2,)}
    outputs: Shapes = {"place": (1, 24, 24), "function": (4,)}
    network = build_network(NetworkConfig(), NetworkSpec(inputs, outputs))
    kinds = {part.name: part.kind for part in network.parts}
    assert (kinds["body"], kinds["head1d"], kinds["head3d"]) == ("sc2le_decoder", "small_cnn", "identity3d")
    assert sum(p.numel() for p in network.parameters()) < 120_000
    x = rows(inputs)
    one, other = (network(x | {"speed": x["speed"] + more}, HiddenState(), FIRST)[0]["place"] for more in (0, 1))
    change = (other - one).flatten(2)
    assert (change - change.mean(2, keepdim=True)).abs().max() > 1e-5
    for more in ({"units": (2, 5)}, {"minimap": (3, 8, 8)}):  # what a convolution over the map cannot join well
        several = build_network(NetworkConfig(), NetworkSpec({**inputs, **more}, outputs))
        assert [part.kind for part in several.parts if part.name == "body"] == ["mlp"]
    alone = build_network(NetworkConfig(), NetworkSpec({"screen": (3, 24, 24)}, {"value": (1,)}))
    assert set(alone.pieces) == {"source/screen"}
