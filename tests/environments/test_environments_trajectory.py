"""Numbers about whole episodes, which are logged with their last info."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

import ludus
from ludus.environments.trajectory import TrajectoryInfo
from ludus.settings.trust import find_imports

PATH = "ludus.environments.trajectory:TrajectoryInfo"


class Steps(gymnasium.Env[Any, Any]):
    """Rewards 1, 0, 2 and then the end, with an info at every other step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.observation_space.sample() * 0, {"cost": 100.0}

    def step(self, action: Any) -> Any:
        self.count += 1
        info = {"cost": 3.0} if self.count % 2 else {}
        return self.observation_space.sample() * 0, (1.0, 0.0, 2.0)[self.count - 1], self.count == 3, False, info


@pytest.mark.parametrize("episode", [1, 2])
def test_the_last_info_has_discounted_return_nonzero_rewards_and_sums(episode: int) -> None:
    env = TrajectoryInfo(Steps(), discount=0.5, sums=("cost",))
    for _ in range(episode):
        env.reset()
        infos = [env.step(0)[4] for _ in range(3)]
    assert infos[:2] == [{"cost": 3.0}, {}]
    assert infos[2] == {"cost": 3.0, "discounted_return": 1.5, "nonzero_rewards": 2, "sum/cost": 6.0}


def test_it_is_a_wrapper_of_the_settings_that_is_trusted_and_logged(tmp_path: Any) -> None:
    wrapper = f"{PATH}(discount=0.5)"
    assert dict(find_imports({"env.wrappers": [wrapper]})) == {}
    seen: list[dict[str, float]] = []
    settings = {"env.wrappers": [wrapper], "env.num": 2, "runs": str(tmp_path), "quiet": True, "evaluation.every": 0}
    ludus.train("CartPole-v1", nb_step=400, preset="none", settings=settings | {"log_every": 1}, on_update=seen.append)
    found = [values["episode/discounted_return"] for values in seen if "episode/discounted_return" in values]
    assert found
    assert all(1.9 < x <= 2 for x in found)  # of rewards of 1
