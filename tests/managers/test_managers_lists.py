"""Observations of variable size in every manager: batches, resets, endings and resumed episodes."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from list_worlds import Lists

from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig
from ludus.managers.make import make_manager
from ludus.managers.simple import SimpleEnvManager
from ludus.managers.vector import VectorEnvManager

LENGTHS, MOST = (1, 2, 5, 5), 4
CONFIG = EnvConfig("list_worlds:Lists", len(LENGTHS), max_length=MOST)


def simple():
    lengths = iter(LENGTHS)
    return SimpleEnvManager(lambda: Lists(next(lengths)), len(LENGTHS), "lists", CONFIG)


def vector():
    return VectorEnvManager(SyncVectorEnv([lambda n=n: Lists(n) for n in LENGTHS]), "lists", CONFIG)


def draw(manager, generator):
    return {"action": torch.randint(2, (manager.batch,), generator=generator)}


def expected(t):
    """Return the padded observation of step ``t`` of an episode."""
    words, count = t % 4, t % 3 + 1
    edges = 0 if count == 1 else count
    nodes = [[t, i] for i in range(count)]
    chosen = [] if t % 2 else (np.array(nodes) + 5).tolist()
    return {
        "words": [t + i for i in range(words)] + [0] * (MOST - words),
        "words/mask": [i < words for i in range(MOST)],
        "graph/nodes": nodes + [[0, 0]] * (MOST - count),
        "graph/nodes/mask": [i < count for i in range(MOST)],
        "graph/edges": [i + t % 4 for i in range(edges)] + [0] * (MOST - edges),
        "graph/edges/mask": [i < edges for i in range(MOST)],
        "graph/edge_links": [[i, (i + 1) % count] for i in range(edges)] + [[0, 0]] * (MOST - edges),
        "graph/edge_links/mask": [i < edges for i in range(MOST)],
        "event/choice": 0 if t % 2 else 1,
        "event/0": t % 3 if t % 2 else 0,
        "event/1": chosen + [[0, 0]] * (MOST - len(chosen)),
        "event/1/mask": [i < len(chosen) for i in range(MOST)],
        "action_mask": [True, t % 2 == 1],
    }


@pytest.mark.parametrize("make", [simple, vector])
def test_masks_are_right_at_resets_and_endings(make):
    manager, generator = make(), torch.Generator().manual_seed(0)
    for time in range(20):
        step = manager.reset(7) if time == 0 else manager.step(draw(manager, generator))
        for row, length in enumerate(LENGTHS):
            position = time % (length + 1)  # an episode is its reset row and `length` steps
            assert step.first[row].item() == (position == 0)
            assert {name: x[row].tolist() for name, x in step.observation.items()} == expected(position)
    manager.close()


def test_workers_give_the_batches_of_a_loop():
    managers = [
        make_manager(EnvConfig(CONFIG.id, 5, backend, max_length=MOST, **more))
        for backend, more in (("simple", {}), ("subproc", {"workers": 2}))
    ]
    one, two = (manager.reset(3) for manager in managers)
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        for name, x in one.observation.items():
            assert torch.equal(x, two.observation[name])
            assert x.dtype == two.observation[name].dtype
        actions = draw(managers[0], generator)
        one, two = (manager.step(actions) for manager in managers)
    state = managers[1].state_dict()
    managers[0].load_state_dict(state)  # replays the actions, and compares the padded observations
    assert managers[0].restored == "exactly"
    for manager in managers:
        manager.close()


@pytest.mark.parametrize("more", [{"backend": "simple"}, {"backend": "subproc", "max_restarts": 0, "workers": 1}])
@pytest.mark.filterwarnings("ignore")  # that a worker failed
def test_a_list_that_is_too_long_names_the_setting(more):
    with closing(make_manager(EnvConfig(CONFIG.id, 2, max_length=2, **more))) as manager:
        manager.reset(0)
        manager.step(draw(manager, torch.Generator()))
        with pytest.raises(UserError, match=r'observation "event/1" has 3 elements, but env.max_length is 2; raise it'):
            manager.step(draw(manager, torch.Generator()))
