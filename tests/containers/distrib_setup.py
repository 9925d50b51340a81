"""An updater over several processes, the processes, and batches for them: a harness for tests, no container."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch import multiprocessing as processes

from ludus.containers.updater import LocalUpdater, ParameterBlock
from ludus.core.batch import Batch
from ludus.core.types import State, Tensors
from ludus.core.updater import LossFunction
from ludus.ops.returns import running_returns
from ludus.runs import checkpoint as checkpoints

RANKS, TIME, ROWS = 2, 12, 4


class DistribUpdater(LocalUpdater):
    """One all-reduce of the flat gradient, with the metrics behind it."""

    ranks = RANKS

    def sum(self, x: Tensor) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total

    def agree(self, flag: bool) -> bool:
        return int(self.sum(torch.tensor(int(flag)))) == self.ranks

    def _gradient(self, loss: LossFunction, batch: Batch, part: ParameterBlock) -> tuple[Tensor, Tensors]:
        gradient, metrics = super()._gradient(loss, batch, part)
        scalars = [name for name, x in metrics.items() if not x.dim()]
        total = self.sum(torch.cat([gradient, torch.stack([metrics[name] for name in scalars])]))
        gradient.copy_(total[: len(gradient)])
        return gradient, metrics | dict(zip(scalars, total[len(gradient) :].unbind(), strict=True))


def on_ranks(function: Callable[..., State], folder: Path, *given: Any) -> list[State]:
    """Call ``function(rank, *given)`` in two processes that are joined over gloo; return what they returned.

    Each process imports torch, so a function should do all that several tests look at.
    """
    processes.spawn(_run, (function, str(folder), given), nprocs=RANKS)  # type: ignore[no-untyped-call, attr-defined]
    return [checkpoints.load(folder / str(rank) / "result")[0] for rank in range(RANKS)]


def _run(rank: int, function: Callable[..., State], folder: str, given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    own = Path(folder, str(rank))  # a save deletes leftovers of others beside it
    own.mkdir()
    checkpoints.save(own / "result", function(rank, *given), {})
    distributed.destroy_process_group()


def made_up_batch(seed: int, rows: slice) -> Batch:
    """Some columns of a rollout of CartPole's shapes whose last rows are padding twice as often as the first."""
    total = RANKS * ROWS
    g = torch.Generator().manual_seed(seed)
    ended = torch.rand(TIME, total, generator=g) < torch.linspace(0.1, 0.5, total)
    first = torch.zeros(TIME + 1, total, dtype=torch.bool)
    for t in range(TIME):  # the step after an ending is a reset
        first[t + 1] = ended[t] & ~first[t]
        ended[t] &= ~first[t]
    real = ~first[:-1]
    terminated = ended & (torch.rand(TIME, total, generator=g) < 0.5)
    scale = torch.linspace(0.5, 2.0, total)
    batch = Batch(
        observation={"observation": torch.randn(TIME + 1, total, 4, generator=g) * scale[:, None] + scale[:, None]},
        first=first,
        action={"action": torch.randint(2, (TIME, total), generator=g)},
        reward=torch.randn(TIME, total, generator=g) * 5 * scale + 1,
        terminated=terminated,
        truncated=ended & ~terminated,
        discount=0.99 * (~terminated).float(),
        real=real,
        weight=torch.ones(TIME, total),
        experience={
            "log_prob": torch.rand(TIME, total, generator=g).add_(0.1).log_().clamp_(max=0),
            "value": torch.randn(TIME, total, generator=g),
        },
    )
    returns, _ = running_returns(batch.reward, ended, real, 0.99, torch.zeros(total, dtype=torch.float64))
    part = replace(batch._map(lambda x: x[:, rows].clone()), row_state={"return": returns[:, rows].clone()})
    assert real[:, :ROWS].sum() != real[:, ROWS:].sum()  # ranks have unequal numbers of real rows
    return part
