from typing import Any

import numpy as np
import pytest
from containers_setup import TOY, train
from test_runs_resume import assert_same_run
from test_runs_resume_replay import SMALL, stop_after

import ludus
from ludus.core.errors import UserError

PIPELINE = ("observation: symlog, scale(by=2)",)


def test_a_loaded_policy_applies_the_pipeline_of_its_run(tmp_path: Any) -> None:
    done = train(tmp_path, "CartPole-v1", nb_step=300, preprocess__observation=PIPELINE)
    player = ludus.load(done.run)
    assert player.settings.preprocess.observation == PIPELINE
    x = np.random.default_rng(0).normal(0, 3, (5, 4)).astype(np.float32)
    ready = player.agent.preprocess({"observation": player._read(x, None, None)[0].observation["observation"][None]})
    np.testing.assert_allclose(ready["observation"][0], 2 * np.sign(x) * np.log1p(np.abs(x)), rtol=1e-6)
    plain = player.agent.preprocess
    before = player.distribution(x)["probabilities"]
    player.agent.preprocess.ops[0] = type(plain.ops[0])()  # without the ops
    assert np.abs(player.distribution(x)["probabilities"] - before).max() > 1e-4
    player.close()


def test_a_pipeline_that_does_not_fit_is_refused_before_the_run_exists(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r'"channels_first" cannot be applied to observation "observation"'):
        train(tmp_path, "CartPole-v1", preprocess__observation=("channels_first",))
    assert not list(tmp_path.glob("**/config.toml"))


IN_THE_ENVIRONMENT: dict[str, Any] = {
    "preprocess__observation": ("observation: stack(n=3)", "observation: flatten", "previous_action, previous_reward"),
    "preprocess__action": ("repeat(n=2), sticky(probability=0.5)",),
}


def test_a_resume_restores_stacks_and_the_previous_step(tmp_path: Any) -> None:
    settings = SMALL | IN_THE_ENVIRONMENT | {"agent__normalize_observation": True, "agent__learning_rate": 1e-2}
    straight = train(tmp_path / "straight", TOY + "TargetEnv", "sac", **settings).run
    stopped = train(tmp_path / "stopped", TOY + "TargetEnv", "sac", stop_after("updates", 34), **settings)
    assert 60 < stopped.steps < 360
    assert_same_run(straight, ludus.resume(stopped.run).run)
