"""Stacked frames under Gymnasium's wrappers are read as they were written."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ludus.core.hidden_state import HiddenState
from ludus.core.step import AgentStep
from ludus.environments.config import EnvConfig
from ludus.experience.config import ReplayConfig
from ludus.experience.replay import ExperienceReplay
from ludus.managers.make import make_manager

STACK = "gymnasium.wrappers:FrameStackObservation(stack_size=4)"
REPEAT = "gymnasium.wrappers:RepeatAction(num_repeats=3)"
SKIP = "gymnasium.wrappers:MaxAndSkipObservation(skip=2)"
ROWS = 2


class Noise(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """Random images, so that all frames differ; episodes of 7 to 13 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (6, 6), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(7, 14))
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self._seen(), 1.0, self.left <= 0, False, {}

    def _seen(self) -> NDArray[np.uint8]:
        return self.np_random.integers(0, 256, (6, 6), np.uint8)


@pytest.mark.parametrize(
    ("wrappers", "whole"),
    [
        ((STACK,), False),
        ((REPEAT, STACK), False),
        ((SKIP, STACK), False),
        ((STACK, REPEAT), True),
        ((STACK, SKIP), True),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [{}, {"n_step": 3, "prioritized": True}, {"sequence": 4, "burn_in": 1, "overlap": 2, "batch_size": 16}],
    ids=["plain", "n-step", "sequences"],
)
def test_stacks_under_wrappers_are_read_as_written(
    kind: dict[str, Any], wrappers: tuple[str, ...], whole: bool
) -> None:
    config = EnvConfig(id=f"{__name__}:Noise", num=ROWS, wrappers=wrappers, backend="simple")
    manager, told = make_manager(config), []
    try:
        settings = ReplayConfig(**({"replay": 60 * ROWS, "warmup": 0, "batch_size": 64} | kind))
        replay = ExperienceReplay(settings, ROWS, 0.9, manager.observation, torch.device("cpu"))
        replay.on_warning = told.append
        assert manager.observation["observation"].stack == 4
        written: list[torch.Tensor] = []
        step = manager.reset(0)
        for time in range(150):
            written.append(step.observation["observation"].clone())
            replay.env_write(step, HiddenState())
            said = {"action": torch.zeros(ROWS, dtype=torch.int64)}
            replay.agent_write(AgentStep(said, {}, HiddenState()))
            step = manager.step(said)
            if time < 20 or time % 10:
                continue
            batch = replay.read()
            assert batch.index is not None
            for i, number in enumerate(batch.index.tolist()):
                begins, row = divmod(number, ROWS)
                stacks = batch.observation["observation"][:, i]
                assert torch.equal(stacks[0], written[begins][row])
                if "sequence" in kind:
                    for later in range(1, len(stacks)):
                        assert torch.equal(stacks[later], written[begins + later][row])
                else:
                    assert any(torch.equal(stacks[1], written[begins + n][row]) for n in range(1, settings.n_step + 1))
    finally:
        manager.close()
    assert replay._frames["observation"].whole == whole
    assert len(told) == whole
