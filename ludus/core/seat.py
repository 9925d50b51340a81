"""Which agent acts in which rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ludus.core.agent import Agent
from ludus.core.cache import CacheWriter
from ludus.core.environment import DEFAULT_ROLE
from ludus.core.hidden_state import HiddenState
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.step import EnvStep


@dataclass
class Seat:
    """An agent in one role of the environments, with the cache it writes to."""

    agent: Agent
    cache: CacheWriter
    noise: Noise
    rows: Rows
    device: torch.device  # where the agent is
    env_step: EnvStep | None = None  # the last step, already written to the cache; None before the first
    hidden_state: HiddenState = field(default_factory=HiddenState)  # before acting on ``env_step``
    role: str = DEFAULT_ROLE
    preprocess_reward: Callable[[Tensor], Tensor] | None = None  # of the rewards in the cache
