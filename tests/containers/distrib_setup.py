"""Two connected ranks, this process and another, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ludus.containers.rank_processes import SUM, open_store
from ludus.containers.ranks import RankGroup, make_shared_sum
from ludus.core.batch import Batch
from ludus.core.encoding import from_bytes, to_bytes
from ludus.core.imports import resolve
from ludus.core.types import Tensors
from ludus.ops.returns import running_returns
from ludus.parallel.process import Launcher

RANKS, TIME, ROWS = 2, 12, 4
CPU = torch.device("cpu")
Cases = Callable[[RankGroup], dict[str, Tensors]]


def on_ranks(cases: str, folder: Path) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Call ``cases`` (``module:function``) on both ranks; return what each returned."""
    launcher = Launcher("spawn")
    group, memory = RankGroup(0, RANKS, 60), make_shared_sum(0, RANKS)
    assert memory is not None
    given = {"cases": cases, "folder": str(folder)}
    other = launcher.start("distrib_setup:run_other", given, {SUM: memory.fd}, "rank 1")

    def check() -> None:
        if other.wait(0):
            raise other.failure()

    try:
        group.watch(check)
        group.connect(CPU, open_store(str(folder), RANKS), memory)
        mine = resolve(cases, {}, "function")(group)
        return mine, from_bytes(group.exchange({})[1])
    finally:
        launcher.close()
        group.close()
        memory.close()


def run_other(given: dict[str, Any], fds: dict[str, int]) -> None:
    """Be rank 1."""
    torch.set_num_threads(1)
    group = RankGroup(1, RANKS, 60)
    cases = resolve(given["cases"], {}, "function")
    group.connect(CPU, open_store(given["folder"], RANKS), make_shared_sum(1, RANKS, fds[SUM]))
    group.exchange({0: to_bytes(cases(group))})
    group.close()


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
