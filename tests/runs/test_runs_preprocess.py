from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import TOY, train
from test_runs_resume import assert_same_run
from test_runs_resume_replay import SMALL, stop_after

import ludus
from ludus.core.errors import UserError
from ludus.environments.image_toy import CatchEnv

PIPELINE = ("observation: symlog, scale(by=2)",)


def test_a_loaded_policy_applies_the_pipeline_of_its_run(tmp_path: Any) -> None:
    done = train(tmp_path, "CartPole-v1", nb_step=300, preprocess__observation=PIPELINE)
    player = ludus.load(done.run)
    assert player.settings.preprocess.observation == PIPELINE
    x = np.random.default_rng(0).normal(0, 3, (5, 4)).astype(np.float32)
    expected = torch.from_numpy(2 * np.sign(x) * np.log1p(np.abs(x)))
    seen: list[torch.Tensor] = []
    network: Any = player.agent.networks["actor"]
    network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]["observation"]))
    player.act(x)
    player.distribution(x)
    normalizer: Any = player.agent.normalizer
    for given in seen:
        torch.testing.assert_close(given, normalizer({"observation": expected[None]})["observation"])
    assert len(seen) == 2
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


def test_a_loaded_policy_takes_raw_images_and_those_of_the_runs_environment(tmp_path: Any) -> None:
    catch = "ludus.environments.image_toy:CatchEnv"
    pipeline = ("grayscale, resize(height=18, width=18), stack(n=3)",)
    done = train(tmp_path, catch, nb_step=300, preprocess__observation=pipeline)
    player, raw, world = ludus.load(done.run), CatchEnv(), ludus.load(done.run).environment()
    image, _ = raw.reset(seed=0)
    wrapped = world._rows.env  # type: ignore[attr-defined]
    stacked, _ = wrapped.reset(seed=0)
    first = True
    for _ in range(12):
        expected = player.distribution(stacked)["probabilities"]
        np.testing.assert_array_equal(player.distribution(image, first=first)["probabilities"], expected)
        both = player.distribution(np.stack([image, image]), first=True)["probabilities"]
        assert both.shape == (2, 3)
        action = player.act(image, first=first)
        first = False
        stacked, image = wrapped.step(action)[0], raw.step(action)[0]
    player.reset()
    begun = player.distribution(image)["probabilities"]
    np.testing.assert_array_equal(begun, player.distribution(image, first=True)["probabilities"])
    with pytest.raises(UserError, match="has shape"):
        player.act(image[:, :-1])
    with pytest.raises(UserError, match="give the whole stack"):
        player.act(image, state=player.initial_state())
    player.act(stacked, state=player.initial_state())
    player.close()
    world.close()
