"""Settings: unknown names, wrong types, sizes of nothing, files that are none."""

import os
from pathlib import Path

import pytest
from faults_setup import TINY, flags
from hypothesis import given
from hypothesis import strategies as st

import ludus
from ludus.cli.arguments import flag_of
from ludus.core.errors import UserError
from ludus.settings.parse import union_members
from ludus.settings.settings import resolve_settings, setting_types

TRAIN = ["train", "CartPole-v1", "--preset", "none", *flags(TINY | {"agent.minibatches": 2})]


def numeric(agent):
    types = setting_types(agent)
    return [k for k, t in types.items() if t in (int, float) or float in union_members(t)] + ["network.hidden"]


NUMBERS = {(agent, key) for agent in ("ppo", "a2c") for key in numeric(agent)}
MAY_BE_NEGATIVE = {"evaluation.stop_at", "agent.log_std_init"}
MAY_BE_ZERO = {
    *("seed", "threads", "log_every", "checkpoint_every", "env.max_episode_steps", "env.workers", "evaluation.every"),
    *("evaluation.environments", "network_check.every", "distrib.ranks", "impala.unrolls", "impala.gpus_per_worker"),
    *("agent.gamma", "agent.gae_lambda", "agent.n_step", "agent.entropy_coef", "agent.value_coef"),
    *("agent.weight_decay", "agent.max_grad_norm", "agent.value_clip", "agent.target_kl"),
    *("agent.parameter_noise", "self_play.every", "self_play.latest", "impala.host_cpus", "impala.host_gpus"),
}


@pytest.mark.parametrize(("agent", "key"), sorted(NUMBERS))
def test_negative_sizes(refused, agent, key):
    if key in MAY_BE_NEGATIVE:
        resolve_settings("CartPole-v1", agent, overrides={key: -1})
    else:
        assert "-1" in refused(["train", "CartPole-v1", "--agent", agent, flag_of(key), "-1"], key)


@pytest.mark.parametrize(("agent", "key"), sorted(NUMBERS))
def test_sizes_of_zero_are_refused_or_mean_something(agent, key):
    if key in MAY_BE_ZERO | MAY_BE_NEGATIVE:
        resolve_settings("CartPole-v1", agent, overrides={key: 0})
    else:
        with pytest.raises(UserError, match=f"^{key} (is|has a layer of) 0"):
            resolve_settings("CartPole-v1", agent, overrides={key: 0})


@pytest.mark.parametrize("agent", ["ppo", "a2c"])
def test_zeros_that_mean_something_train(here, agent):
    zeros = {key: 0 for of, key in NUMBERS if of == agent and key in MAY_BE_ZERO}
    minibatches = {"agent.minibatches": 2} if agent == "ppo" else {}
    assert ludus.train("CartPole-v1", agent, preset="none", settings=TINY | minibatches | zeros).steps >= 90


@given(st.sampled_from(sorted(NUMBERS)), st.integers(max_value=-1) | st.floats(max_value=-1e-9))
def test_no_negative_number_slips_through(place, value):
    agent, key = place
    if key not in MAY_BE_NEGATIVE:
        with pytest.raises(UserError, match=key):
            resolve_settings("CartPole-v1", agent, overrides={key: value})


@pytest.mark.parametrize("key", [k for k, t in setting_types("ppo").items() if t is int])
@pytest.mark.parametrize("value", ["1e30", "1.5", "inf", "nan", "many", "", "0x10"])
def test_whole_numbers_are_whole_and_of_64_bits(key, value):
    with pytest.raises(UserError, match=rf"^{key} is .*a whole number"):
        resolve_settings("CartPole-v1", overrides={key: value})


MISTAKES = {
    "--agent pppo": 'Unknown agent "pppo". Did you mean "ppo"?',
    "--agent fault_worlds:Sound": "not a subclass of ludus.core.agent.Agent",
    "--preset cartpol/ppo": 'Did you mean "cartpole/ppo"?',
    "--agent.lerning-rate 1": 'Did you mean "--agent.learning-rate"?',
    "--evaluation.stopat 1": 'Did you mean "--evaluation.stop-at"?',
    "--nbstep 1": 'Did you mean "--nb-step"?',
    "--agent.tau 0.5": "Unknown flag --agent.tau",  # SAC has it, PPO does not
    "--stop-at 475 --evaluation.every 0": "evaluation.every is 0",
    "--threads 100000": "threads is 100000, but must be at most 1024",
    "--device warp": 'device is "warp"',
    "--device cuda:99": 'device is "cuda:99"',
    "--device mps:7": "use cpu or auto",
    "--compile sometimes": "one of auto, on, off",
    "--agent.gamma 1.5": "between 0 and 1",
    "--agent.learning-rate-schedule kl": "agent.target_kl",
    "--agent.optimizer adm": 'Did you mean "adam"?',
    "--init-from nowhere": 'The run "nowhere" does not exist',
    "--quiet=yes": "takes no value",
    "Acrobot-v1": 'got "CartPole-v1" and "Acrobot-v1"',
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_at_the_prompt(refused, words):
    refused([*TRAIN, *words.split()], MISTAKES[words])


FILES = {
    "[agent\n": "not valid TOML",
    "\x00\x01": "not valid TOML",
    "[agent]\nlerning_rate = 3\n": 'Did you mean "agent.learning_rate"?',
    "[agnt]\ngamma = 0.9\n": 'Did you mean "agent.gamma"?',
    "learning_rate = 3\n": 'Did you mean "agent.learning_rate"?',
    "nb_step = 'many'\n": 'nb_step is "many"',
    "nb_step = 1.5\n": 'nb_step is "1.5"',
    "quiet = 'yes'\n": "true or false",
    "agent = 'ppo'\n": 'no setting "agent"',
    "[agent]\nname = 3\n": "agent.name",
    "[agent]\nname = 'pppo'\n": 'Did you mean "ppo"?',
    "[network]\nhidden = ['wide']\n": "network.hidden",
    "[network]\nhidden = [[64]]\n": "network.hidden",
    "[env]\nnum = 0\n": "env.num is 0",
    "seed = 2024-01-01\n": "seed",
}


@pytest.mark.parametrize("text", FILES)
def test_settings_files(refused, here, text):
    file = here / "my.toml"
    file.write_bytes(text.encode())
    words = ["train", "CartPole-v1", "--config", "my.toml", "--preset", "none", "--env.max-episode-steps", "10"]
    error = refused(words, FILES[text])
    assert "my.toml" in error or "agent" in error or "env.num" in error
    with pytest.raises(UserError):
        ludus.train("CartPole-v1", config="my.toml")


def test_settings_files_that_cannot_be_read(refused, here):
    refused([*TRAIN, "--config", "nowhere.toml"], '"nowhere.toml" cannot be read')
    refused([*TRAIN, "--config", str(here)], "cannot be read")
    (here / "latin.toml").write_bytes("runs = 'ü'".encode("latin-1"))
    refused([*TRAIN, "--config", "latin.toml"], "latin.toml", "not valid TOML")


def test_a_runs_folder_that_cannot_be_written(refused, here, refused_by_train):
    (here / "file").write_text("in the way")
    refused([*TRAIN, "--runs", "file"], 'The run folder "file/CartPole-v1" cannot be created')
    refused_by_train("CartPole-v1", "cannot be created", runs="file")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_runs_folder_without_permission(refused, here):
    locked = here / "locked"
    locked.mkdir(mode=0o500)
    refused([*TRAIN, "--runs", "locked"], "cannot be created")


def test_too_large_for_the_memory_is_one_sentence(refused):
    refused([*TRAIN, "--network.hidden", "10_000_000", "10_000_000"], "Learning with networks of", "network.hidden")


def test_python_refuses_what_the_prompt_refuses(refused_by_train):
    refused_by_train("CartPole-v1", "nb_step is 0", nb_step=0)
    refused_by_train("CartPole-v1", "seed is", seed=-1)
    refused_by_train("CartPole-v1", 'Did you mean "agent.learning_rate"', **{"agent.lerning_rate": 1})
    refused_by_train("CartPol-v1", 'Did you mean "CartPole-v1"')
    refused_by_train("CartPole-v1", 'device is "warp"', device="warp")
    refused_by_train("CartPole-v1", "more than the 32 transitions", **{"agent.minibatches": 33})
    refused_by_train("CartPole-v1", "must be a list", **{"network.hidden": [None]})
    assert not Path("None").exists()
