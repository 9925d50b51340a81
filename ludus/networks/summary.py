"""Summaries of networks: their parts with shapes, parameters and floating-point operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ludus.core.network import Network, NetworkSpec, Shape, Shapes
from ludus.networks.assembly import Part
from ludus.networks.custom import example_inputs
from ludus.networks.modular import ModularNetwork


class PartSummary(NamedTuple):
    """A part of a network with its size."""

    name: str  # source/<observation>, body, head1d, output/<name>, …
    kind: str
    inputs: tuple[str, ...]  # the parts or inputs of the network that it gets
    input_shape: Shape  # () if unknown
    output_shape: Shape
    parameters: int
    flops: int  # for one observation


class NetworkSummary(NamedTuple):
    """The parts of a network in the order in which they run."""

    inputs: Shapes
    parts: list[PartSummary]
    parameters: int
    flops: int
    recurrent: bool


def summarize(name: str, network: Network, spec: NetworkSpec) -> dict[str, NetworkSummary]:
    """Run a network on one observation of zeros and summarize it, or the networks that it consists of, by name.

    Floating-point operations are those of matrix products, convolutions and attention in a forward pass; a
    multiplication and an addition count as two.
    """
    flops = _count_flops(network, spec)
    inner = {f"{name}/{key}": child for key, child in network.named_children() if isinstance(child, ModularNetwork)}
    if not inner:
        inner = {name: network}  # type: ignore[dict-item]
    summaries = {}
    for key, one in inner.items():
        parts = [
            PartSummary(*part[:5], _parameters(part.module), flops.get(part.module, 0)) for part in _parts(one, spec)
        ]
        inputs = {part: shape for part, shape in spec.inputs.items() if one is network}
        inputs = inputs or getattr(one, "inputs", {})
        summaries[key] = NetworkSummary(inputs, parts, _parameters(one), flops[one], one.recurrent)
    return summaries


def _parts(network: Network, spec: NetworkSpec) -> list[Part]:
    """Return the parts of a network, without identities except for sources; a custom network is one part."""
    if not isinstance(network, ModularNetwork):
        module = getattr(network, "module", network)
        outputs = [Part(f"output/{name}", "", ("network",), (), shape, None) for name, shape in spec.outputs.items()]
        return [Part("network", type(module).__name__, tuple(spec.inputs), (), (), network), *outputs]
    skipped: dict[str, tuple[str, ...]] = {}
    kept = []
    for part in network.parts:
        inputs = tuple(name for given in part.inputs for name in skipped.get(given, (given,)))
        source = part.name.startswith("source/") and len(network.inputs) > 1
        if part.kind.startswith("identity") and len(inputs) == 1 and not source:
            skipped[part.name] = inputs
        else:
            kept.append(part._replace(inputs=inputs))
    return kept


def _parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _count_flops(network: Network, spec: NetworkSpec) -> dict[nn.Module | None, int]:
    """Return the operations of each module that runs on one observation."""
    counted: dict[nn.Module | None, int] = {network: 0}
    counter = FlopCounterMode(display=False)
    started: list[int] = []

    def enter(module: nn.Module, *_: Any) -> None:
        started.append(counter.get_total_flops())

    def leave(module: nn.Module, *_: Any) -> None:
        counted[module] = counted.get(module, 0) + counter.get_total_flops() - started.pop()

    hooks = []
    for module in network.modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    training = network.training
    network.eval()
    try:
        with counter, torch.no_grad():
            first = torch.ones(1, 1, dtype=torch.bool)
            network(example_inputs(spec, (1, 1)), network.initial_state(1), first)
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    return counted
