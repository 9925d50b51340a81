"""What a checkpoint holds of a rollout, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ludus.core.hidden_state import HiddenState
from ludus.core.types import State
from ludus.experience.lane import ENDING

if TYPE_CHECKING:
    from ludus.experience.rollout import RolloutCache


def save_rollout(cache: RolloutCache) -> State:
    """The open rollout; of one that was learned from, only the row that begins the next."""
    blocks = cache.blocks
    if cache.consumed:
        blocks = {name: x[cache.length :] for name, x in blocks.items() if _carried(name)}
    return {
        "consumed": cache.consumed,
        "blocks": dict(blocks),
        "lanes": [
            {"start": lane.rows.start, "stop": lane.rows.stop, "cursor": lane.cursor}
            | {"state": dict(lane.state), "last_state": dict(lane.last_state)}
            for lane in cache.lanes.values()
        ],
    }


def load_rollout(cache: RolloutCache, state: State) -> None:
    """Take over what ``save_rollout`` gave."""
    cache.consumed = state["consumed"]
    start = cache.length if cache.consumed else 0
    for name, x in state["blocks"].items():
        cache.allocate({name: x[0]}, cache.length + _carried(name))
        cache.blocks[name][start : start + len(x)].copy_(x)
    if cache.blocks:
        ending = (torch.zeros(1), *(torch.zeros(1, dtype=torch.bool) for _ in range(2)))
        cache.allocate(dict(zip(ENDING, ending, strict=True)), cache.length)
    cache.lanes, cache.covered = {}, 0
    for saved in state["lanes"]:
        lane = cache.add_lane(saved["start"], saved["stop"])
        lane.cursor = saved["cursor"]
        lane.state, lane.last_state = (
            HiddenState(saved[name]).map(lambda x: x.to(cache.device)) for name in ("state", "last_state")
        )


def _carried(name: str) -> bool:
    return name == "first" or name.startswith("observation/")
