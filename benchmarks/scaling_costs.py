"""What the parts of asynchronous training cost on this machine, measured by small loops on one core."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.limit import seconds_per_call
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

MEASURED_UNROLLS = 30


@dataclass(frozen=True)
class Costs:
    """Seconds on one core, and bytes."""

    env_step: float  # worker: a step of one environment
    inference: float  # worker: the actions for one step of all its environments
    pack_byte: float  # worker: writing a byte of an unroll into a message, between machines
    unpack_byte: float  # host: reading it
    copy_byte: float  # host: copying a byte of an unroll into the batch
    update_fixed: float  # host: an update, besides ...
    update_step: float  # host: ... this for each environment step that it learns from
    publish: float  # host: copying the weights out, once per version
    load: float  # worker: copying new weights in
    unroll_bytes: float  # of one environment step in an unroll
    weight_bytes: float  # of a version
    compressed: float  # size of an unroll after zlib (level 1), as a fraction
    compress_byte: float  # worker: compressing a byte
    decompress_byte: float  # host: decompressing it


def measure(environment: str, agent_name: str, rows: int, length: int, batch: int, budget: float = 0.5) -> Costs:
    """Measure all costs with ``rows`` environments per worker, unrolls of ``length`` steps, ``batch`` per update."""
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"env.num": rows, "agent.rollout": length, "device": "cpu", "threads": 1}
    settings = resolve_settings(environment, agent_name, None, None, changes).settings
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
    worker.clock = Clock()
    for _ in range(MEASURED_UNROLLS):
        submitted = unroll()
    spent = {phase: nanoseconds / 1e9 / MEASURED_UNROLLS for phase, nanoseconds in worker.clock.nanoseconds.items()}
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

    once, twice = (seconds_per_call(lambda n=n: update(caches[n - 1], n * batch), budget) for n in (1, 2))
    into = {name: np.empty_like(x) for name, x in arrays.items()}

    def copy_unroll() -> None:
        for name, x in arrays.items():
            np.copyto(into[name], x)

    def publish() -> None:
        for copied, x in zip(copies, state, strict=True):
            copied.copy_(x)

    copying = seconds_per_call(copy_unroll, budget)
    steps = rows * length
    per_step = max(0.0, (twice - once) / (steps * batch) - copying / steps)
    publishing = seconds_per_call(publish, budget)
    return Costs(
        env_step=spent["environment"] / steps,
        inference=(spent["acting"] + spent["other"]) / length,
        pack_byte=seconds_per_call(lambda: pack(arrays), budget) / size,
        unpack_byte=seconds_per_call(lambda: unpack(message), budget) / size,
        copy_byte=copying / size,
        update_fixed=max(0.0, once - (per_step * steps + copying) * batch),
        update_step=per_step,
        publish=publishing,
        load=publishing,
        unroll_bytes=size / steps,
        weight_bytes=weight_bytes,
        compressed=len(small) / len(message),
        compress_byte=seconds_per_call(lambda: zlib.compress(message, 1), budget) / size,
        decompress_byte=seconds_per_call(lambda: zlib.decompress(small), budget) / size,
    )
