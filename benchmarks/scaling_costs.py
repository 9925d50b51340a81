"""What the parts of asynchronous training cost on this machine, measured by small loops on one core."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ludus.containers.build import build_agent, build_manager
from ludus.containers.guard import Guard
from ludus.containers.loop import begin, collect, improve
from ludus.containers.updater import LocalUpdater
from ludus.core.cache import Unroll
from ludus.core.rows import Rows
from ludus.core.seat import Seat
from ludus.logging.clock import Clock
from ludus.parallel.message import pack, unpack
from ludus.preprocess.rewards import make_reward_ops
from ludus.settings.settings import resolve_settings

ROUNDS = 10  # of measuring a worker; the fastest counts
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Costs:
    """Seconds on one core, and bytes."""

    env_step: float  # worker: a step of one environment
    inference: float  # worker: the actions for one step of all its environments
    pack_fixed: float  # worker: writing an unroll into a message, between machines, besides ...
    pack_byte: float  # worker: ... this for each byte
    unpack_fixed: float  # host: reading it
    unpack_byte: float
    copy_fixed: float  # host: copying an unroll into the batch
    copy_byte: float
    update_fixed: float  # host: an update, besides ...
    update_step: float  # host: ... this for each environment step that it learns from
    publish: float  # host: copying the weights out, once per version
    load: float  # worker: copying new weights in
    unroll_bytes: float  # of one environment step in an unroll
    weight_bytes: float  # of a version
    compressed: float  # size of an unroll after zlib (level 1), as a fraction
    compress_byte: float  # worker: compressing a byte
    decompress_byte: float  # host: decompressing it


def measure(
    environment: str,
    agent_name: str,
    rows: int,
    length: int,
    batch: int,
    settings_of_run: Mapping[str, Any] | None = None,
    budget: float = 0.5,
) -> Costs:
    """Measure all costs with ``rows`` environments per worker, unrolls of ``length`` steps, ``batch`` per update."""
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"env.num": rows, "agent.rollout": length, "device": "cpu", "threads": 1}
    settings = resolve_settings(environment, agent_name, None, None, {**(settings_of_run or {}), **changes}).settings
    manager = build_manager(settings)
    agent = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(agent.action_transform)
    agent.use_numpy()
    rewards = make_reward_ops(settings.preprocess.reward)
    held = Rows.all(rows)
    writer = agent.make_unroll(held)
    noise = agent.make_noise(held, torch.Generator().manual_seed(0))
    seat = Seat(agent, writer, noise, held, torch.device("cpu"), preprocess_reward=rewards)
    worker = SimpleNamespace(seats=[seat], manager=manager, clock=Clock())

    def unroll() -> Unroll:
        collect(worker)
        return writer.submit()

    begin(worker, 0)
    for _ in range(3):
        unroll()
    rounds = []
    for _ in range(ROUNDS):
        worker.clock = Clock()
        submitted = unroll()
        rounds.append(worker.clock.nanoseconds)
    spent = {phase: min(times[phase] for times in rounds) / 1e9 for phase in rounds[0]}
    manager.close()

    size = sum(x.nbytes for x in submitted.tensors.values())
    arrays = {name: x.numpy().copy() for name, x in submitted.tensors.items()}
    message = pack(arrays)
    small = zlib.compress(message, 1)
    state = [x for x in agent.state_dict().values() if isinstance(x, torch.Tensor)]
    copies = [torch.empty_like(x) for x in state]
    weight_bytes = sum(x.nbytes for x in state)
    caches = [agent.make_cache(Rows.all(rows * count)) for count in (batch, 2 * batch)]
    guard = Guard(agent, LocalUpdater(agent), manager)

    def receive(cache: Any, count: int) -> None:
        for _ in range(count):
            cache.receive(submitted)

    def update(cache: Any, count: int) -> None:
        receive(cache, count)
        improve(SimpleNamespace(cache=cache, guard=guard, clock=Clock()))

    once, twice = (fastest(lambda n=n: update(caches[n - 1], n * batch), budget) for n in (1, 2))

    def copy(given: Arrays) -> None:
        for name, x in given.items():
            np.copyto(into[name][: len(x)], x)

    def publish() -> None:
        for copied, x in zip(copies, state, strict=True):
            copied.copy_(x)

    into = {name: np.empty_like(x) for name, x in arrays.items()}
    parts = [{name: x[:1] for name, x in arrays.items()}, arrays]  # a part of the unroll, and all of it
    packing, copying = (fit(function, parts, budget) for function in (pack, copy))
    unpacking = fit(unpack, [pack(part) for part in parts], budget)
    receiving = copying[0] + copying[1] * size
    steps = rows * length
    per_step = max(0.0, (twice - once) / (steps * batch) - receiving / steps)
    publishing = fastest(publish, budget)
    return Costs(
        env_step=spent["environment"] / steps,
        inference=(spent["acting"] + spent["other"]) / length,
        pack_fixed=packing[0],
        pack_byte=packing[1],
        unpack_fixed=unpacking[0],
        unpack_byte=unpacking[1],
        copy_fixed=copying[0],
        copy_byte=copying[1],
        update_fixed=max(0.0, once - (per_step * steps + receiving) * batch),
        update_step=per_step,
        publish=publishing,
        load=publishing,
        unroll_bytes=size / steps,
        weight_bytes=weight_bytes,
        compressed=len(small) / len(message),
        compress_byte=fastest(lambda: zlib.compress(message, 1), budget) / size,
        decompress_byte=fastest(lambda: zlib.decompress(small), budget) / size,
    )


def fit(function: Callable[[Any], object], inputs: Sequence[Any], budget: float) -> tuple[float, float]:
    """Return seconds per call and per byte, from a call with a small and one with a large input."""
    small, large = (fastest(partial(function, given), budget) for given in inputs)
    sizes = [len(x) if isinstance(x, bytes) else sum(array.nbytes for array in x.values()) for x in inputs]
    per_byte = max(0.0, (large - small) / (sizes[1] - sizes[0]))
    return max(0.0, small - per_byte * sizes[0]), per_byte


def fastest(function: Callable[[], object], budget: float) -> float:
    """Return the seconds of the fastest call within the budget; other processes may share the machine."""
    function()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
