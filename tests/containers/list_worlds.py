"""An environment with observations of variable size, for tests of several folders."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Lists(gymnasium.Env):
    """A list, a graph and a choice whose sizes follow from episode and step, so that every entry is known.

    The step t of an episode has t % 4 words and t % 3 + 1 nodes, each with the numbers of the step and of its place.
    Action 1 is allowed where t is odd.
    """

    def __init__(self, length=5):
        node = spaces.Box(-1, 99, (2,), np.float32)
        self.observation_space = spaces.Dict(
            words=spaces.Sequence(spaces.Discrete(50, start=1)),
            graph=spaces.Graph(node, spaces.Discrete(7)),
            event=spaces.OneOf((spaces.Discrete(3), spaces.Sequence(node, stack=True))),
            action_mask=spaces.MultiBinary(2),
        )
        self.action_space = spaces.Discrete(2)
        self.length, self.t = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        return self._observe(), float(action), self.t >= self.length, False, {}

    def _observe(self):
        t, count = self.t, self.t % 3 + 1
        nodes = np.stack([np.full(count, t), np.arange(count)], 1).astype(np.float32)
        links = np.stack([np.arange(count), (np.arange(count) + 1) % count], 1)
        empty = count == 1
        graph = spaces.GraphInstance(nodes, None if empty else np.arange(count) + t % 4, None if empty else links)
        event = (0, t % 3) if t % 2 else (1, nodes + 5)
        words = tuple(t + i + 1 for i in range(t % 4))
        return {"words": words, "graph": graph, "event": event, "action_mask": np.array([1, t % 2], np.int8)}
