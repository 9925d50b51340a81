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
from ludus.managers.make import make_manager

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


def test_a_resume_restores_stacks_the_previous_step_and_the_reward_scale(tmp_path: Any) -> None:
    settings = SMALL | IN_THE_ENVIRONMENT | {"agent__normalize_observation": True, "agent__learning_rate": 1e-2}
    settings |= {"agent__normalize_reward": True}
    straight = train(tmp_path / "straight", TOY + "TargetEnv", "sac", **settings).run
    stopped = train(tmp_path / "stopped", TOY + "TargetEnv", "sac", stop_after("updates", 34), **settings)
    assert 60 < stopped.steps < 360
    assert_same_run(straight, ludus.resume(stopped.run).run)


def test_a_loaded_policy_takes_raw_images_and_those_of_the_runs_environment(tmp_path: Any) -> None:
    catch = "ludus.environments.image_toy:CatchEnv"
    pipeline = ("grayscale, resize(height=18, width=18), stack(n=3)",)
    done = train(tmp_path, catch, nb_step=300, preprocess__observation=pipeline)
    player, raw = ludus.load(done.run), CatchEnv()
    world: Any = player.environment()
    step = world.reset(0)
    image, _ = raw.reset(seed=int(world._memory.seed[0]))
    first = True
    for _ in range(12):
        stacked = step.observation["observation"]
        expected = player.distribution(stacked)["probabilities"]
        np.testing.assert_array_equal(player.distribution(image, first=first)["probabilities"], expected[0])
        three = player.distribution(np.stack([image] * 3), first=True)["probabilities"]  # a batch, not one stack
        assert three.shape == (3, 3)
        action = player.act(image, first=first)
        first = False
        step, image = world.step({"action": torch.tensor([action])}), raw.step(action)[0]
    player.reset()
    begun = player.distribution(image)["probabilities"]
    np.testing.assert_array_equal(begun, player.distribution(image, first=True)["probabilities"])
    with pytest.raises(UserError, match="has shape"):
        player.act(image[:, :-1])
    with pytest.raises(UserError, match="give the whole stack"):
        player.act(image, state=player.initial_state())
    kept = player.distribution(image)["probabilities"]
    player.act(stacked, state=player.initial_state())
    player.act(stacked[0], state=player.initial_state())
    np.testing.assert_array_equal(player.distribution(image)["probabilities"], kept)  # nothing was kept
    player.close()
    world.close()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_loaded_policy_keeps_its_previous_step_and_its_frames(tmp_path: Any, rows: int) -> None:
    pipeline = ("observation: stack(n=2)", "previous_action, previous_reward")
    done = train(tmp_path, "CartPole-v1", nb_step=200, preprocess__observation=pipeline, env__max_episode_steps=6)
    player, settings = ludus.load(done.run), ludus.load(done.run).settings
    world = make_manager(settings.env, rows, preprocess=settings.preprocess)
    step = world.reset(0)
    for _ in range(15):  # several episodes
        ours = {name: x.numpy().copy() for name, x in step.observation.items()}
        expected = player.distribution(ours)["probabilities"]
        raw = ours["observation"][:, -1]  # what the environment returned
        given = {"first": step.first.numpy().copy(), "reward": step.reward.numpy().copy()}
        if rows == 1:
            raw, given = raw[0], {"first": bool(given["first"][0]), "reward": float(given["reward"][0])}
        found = np.reshape(player.distribution(raw, **given)["probabilities"], expected.shape)
        np.testing.assert_array_equal(found, expected)
        action = np.reshape(player.act(raw, **given), rows)
        step = world.step({"action": torch.from_numpy(action)})
    with pytest.raises(UserError, match=r"observes the previous reward; give it, as in policy\.act\(observation, rew"):
        player.act(raw)
    with pytest.raises(UserError, match="with state=…, give previous_action, previous_reward by name too"):
        player.act(raw, state=player.initial_state(rows))
    player.act(ours, state=player.initial_state(rows))
    player.reset()
    player.act(raw)  # an episode begins
    player.close()
    world.close()
