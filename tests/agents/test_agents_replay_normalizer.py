"""Running normalization of replay agents: every environment step counts once, and only for learning."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from agents_setup import make_worker
from gymnasium import spaces

from ludus.containers.loop import begin, collect, improve

SCALE = 1000.0


class Recorded(gymnasium.Env[Any, Any]):
    """Random vectors of another scale per element, in episodes of 1 to 4 steps, and a choice; keeps what was seen."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, box: bool = True) -> None:
        numbers = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = spaces.Dict({"x": numbers, "level": spaces.Discrete(3)})
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(2)

    def _observe(self) -> Any:
        self.last = (self.np_random.normal(5, 1, 3) * [1, 30, SCALE]).astype(np.float32)
        return {"x": self.last, "level": int(self.np_random.integers(3))}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 5))
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.seen.append(self.last)
        self.left -= 1
        ends = self.left == 0
        return self._observe(), 1.0, ends and bool(self.np_random.integers(2)), ends, {}


class RecordedChoice(Recorded):
    """With a Discrete action."""

    def __init__(self) -> None:
        super().__init__(box=False)


SMALL: dict[str, Any] = {"agent__warmup": 40, "agent__batch_size": 8, "agent__normalize_observation": True}
AGENTS = {"dqn": RecordedChoice, "discrete_sac": RecordedChoice, "sac": Recorded, "td3": Recorded}


def trained(agent: str, **changes: Any) -> Any:
    Recorded.seen.clear()
    worker = make_worker(f"{__name__}:{AGENTS[agent].__name__}", agent, **(SMALL | changes))
    begin(worker, 0)
    for _ in range(40):
        collect(worker)
        improve(worker)
    return worker


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("per_step", [0.25, 3.0])
def test_every_step_counts_once(agent: str, per_step: float) -> None:
    worker = trained(agent, agent__updates_per_step=per_step)
    (statistics,) = worker.agent.normalizer.statistics.values()
    while not worker.cache.ready():  # statistics are as of the last update
        collect(worker)
    improve(worker)
    seen = np.asarray(Recorded.seen, np.float64)
    assert int(statistics.count) == len(seen) > 100
    np.testing.assert_allclose(statistics.mean, seen.mean(0), rtol=1e-9)
    np.testing.assert_allclose(statistics.variance, seen.var(0), rtol=1e-9)
    assert list(worker.agent.normalizer.names) == ["x"]
    worker.close()


def test_the_replay_holds_raw_observations_and_networks_get_normalized_ones() -> None:
    worker = trained("sac")
    assert worker.cache.ready() or collect(worker)
    raw = worker.cache.read().observation
    assert raw["x"][..., 2].mean() > SCALE
    ready = worker.agent.inputs(raw)
    assert ready["x"].abs().mean() < 2
    assert set(ready["level"].unique().tolist()) <= {0.0, 1.0}
    worker.close()


def test_acting_and_evaluating_change_nothing() -> None:
    worker = trained("dqn")
    before = {name: x.clone() for name, x in worker.agent.normalizer.state_dict().items()}
    worker.evaluate()
    worker.agent.act(worker.manager.last_step(), worker.agent.initial_state(4))
    for name, x in worker.agent.normalizer.state_dict().items():
        assert torch.equal(x, before[name])
    worker.close()


@pytest.mark.parametrize(
    ("agent", "environment"), [("dqn", "CartPole-v1"), ("sac", "Pendulum-v1"), ("td3", "Pendulum-v1")]
)
def test_numpy_acts_on_normalized_observations(agent: str, environment: str) -> None:
    worker: Any = make_worker(environment, agent, **SMALL)
    begin(worker, 0)
    for _ in range(20):
        collect(worker)
        improve(worker)
    made, step = worker.agent, worker.manager.last_step()
    plain = made.act(step, made.initial_state(4)).action
    assert made.use_numpy()
    for name, x in made.act(step, made.initial_state(4)).action.items():
        torch.testing.assert_close(x, plain[name])
    made.normalizer.statistics["observation/observation"].shift += 1
    if agent != "dqn":
        assert any(
            not torch.allclose(x, plain[name]) for name, x in made.act(step, made.initial_state(4)).action.items()
        )
    worker.close()


def test_a_row_with_nan_is_left_out() -> None:
    worker = trained("sac")
    (statistics,) = worker.agent.normalizer.statistics.values()
    column = worker.cache._ring.columns["observation/x"]
    while not worker.cache.ready():
        collect(worker)
    group = next(iter(worker.cache._groups.values()))
    before, new = (
        int(statistics.count),
        int(worker.cache._flags.real[:, [(t + 1) % worker.cache.length for t in range(group.fresh, group.time)]].sum()),
    )
    column[0, group.fresh % worker.cache.length] = torch.nan
    counted = bool(worker.cache._flags.real[0, (group.fresh + 1) % worker.cache.length])
    worker.agent.observe(worker.cache, worker.updater)
    assert int(statistics.count) == before + new - counted
    assert statistics.mean.isfinite().all()
    worker.close()


def test_padding_of_a_list_does_not_count() -> None:
    small = SMALL | {"network__net2d": "flat_mlp", "agent__updates_per_step": 1.0}
    worker: Any = make_worker("ludus.environments.entity_toy:MatchEnv", "dqn", env__max_length=8, **small)
    begin(worker, 0)
    for _ in range(40):
        collect(worker)
        improve(worker)
    (statistics,) = worker.agent.normalizer.statistics.values()
    (name,) = worker.agent.preprocess.masks.values()
    group, cache = next(iter(worker.cache._groups.values())), worker.cache
    real = cache._flags.real[:, 1 : group.fresh + 1]
    assert int(statistics.count) == int(cache._ring.columns[f"observation/{name}"][:, : group.fresh][real].sum()) > 0
    worker.close()
