from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from containers_setup import COUNTING
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.agent import Agent
from ludus.core.config import AgentConfig
from ludus.core.errors import UserError
from ludus.networks.config import NetworkConfig
from ludus.settings.config_file import read_config, write_config
from ludus.settings.parse import parse_value
from ludus.settings.settings import (
    adapt_defaults,
    find_preset,
    from_flat,
    presets,
    resolve_settings,
    setting_types,
    to_flat,
)


@dataclass(frozen=True)
class OwnConfig(AgentConfig):
    sizes: tuple[int, ...] = (1, 2)
    target: float | None = 0.5


class OwnAgent(Agent):
    Config = OwnConfig


class NoConfig(Agent):
    pass


@dataclass(frozen=True)
class NeedyConfig(AgentConfig):
    needed: int


class NeedyAgent(Agent):
    Config = NeedyConfig


def own(name: str) -> str:
    return f"{__name__}:{name}"


def settings_file(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


def test_later_layers_override_earlier_ones_and_origins_are_kept(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "seed = 7\n[agent]\ngamma = 0.5\nclip = 0.3\n")
    settings, origins = resolve_settings("CartPole-v1", file=file, overrides={"agent.clip": 0.4})
    assert (settings.agent.gae_lambda, origins["agent.gae_lambda"]) == (0.8, "preset cartpole/ppo")
    assert (settings.agent.gamma, origins["agent.gamma"]) == (0.5, f"file {file}")  # the preset says 0.98
    assert (settings.agent.clip, origins["agent.clip"]) == (0.4, "flag")  # the file says 0.3, the preset 0.2
    assert (settings.keep, origins["keep"]) == (3, "default")
    assert (settings.env.id, origins["env.id"]) == ("CartPole-v1", "flag")
    assert origins.keys() == to_flat(settings).keys()


def test_a_preset_is_used_if_environment_and_agent_match() -> None:
    assert find_preset("CartPole-v1", "ppo") == "cartpole/ppo"
    assert find_preset("CartPole-v0", "ppo") == "none"
    assert find_preset("Pong-v5", "a2c") == "none"
    assert find_preset("ALE/Pong-v5", "ppo") == find_preset("ALE/Breakout", "ppo") == "atari/ppo"
    assert find_preset("ALE/Pong-v5", "dqn") == find_preset("Breakout-v5", "ppo") == "none"
    assert resolve_settings("CartPole-v1", preset="none").settings.agent.epochs != 20
    assert set(resolve_settings("CartPole-v1", preset="none").origins.values()) == {
        "default",
        "flag",
        "default for this run",
    }


def test_a_named_preset_sets_the_agent_but_not_the_environment() -> None:
    settings, origins = resolve_settings("Acrobot-v1", preset="cartpole/a2c")
    assert (settings.agent_name, settings.env.id) == ("a2c", "Acrobot-v1")
    assert origins["agent.name"] == "preset cartpole/a2c"


def test_overrides_may_be_nested() -> None:
    settings = resolve_settings("CartPole-v1", overrides={"network": {"hidden": [3, 4]}, "env.num": 2}).settings
    assert (settings.network.hidden, settings.env.num) == ((3, 4), 2)


def test_the_environment_and_the_agent_may_come_from_the_file(tmp_path: Path) -> None:
    file = settings_file(tmp_path, '[env]\nid = "CartPole-v1"\n[agent]\nname = "a2c"\n')
    settings, origins = resolve_settings(file=file)
    assert (settings.env.id, settings.agent_name) == ("CartPole-v1", "a2c")
    assert origins["agent.rollout"] == "preset cartpole/a2c"


@pytest.mark.parametrize("name", presets())
def test_every_preset_resolves(name: str) -> None:
    environment, values = presets()[name]
    settings, origins = resolve_settings(environment.replace("*", "Pong-v5"), name.rpartition("/")[2])
    flat = to_flat(settings)
    assert {key: flat[key] for key in values} == {k: tuple(x) if isinstance(x, list) else x for k, x in values.items()}
    assert {origins[key] for key in values} == {f"preset {name}"}


OFF = {"normalize_observation": False, "normalize_reward": False}
TUNED: dict[str, dict[str, Any]] = {  # what each preset was tuned with, where the agent's defaults may differ from it
    "acrobot/ppo": {
        "rollout": 256,
        "epochs": 4,
        "learning_rate": 3e-4,
        "learning_rate_schedule": "constant",
        "normalize_observation": True,
        "normalize_reward": True,
    },
    "atari/ppo": {
        "rollout": 128,
        "epochs": 4,
        "learning_rate": 2.5e-4,
        "learning_rate_schedule": "linear",
        "normalize_observation": False,
        "normalize_reward": True,
    },
    "cartpole/a2c": OFF
    | {
        "rollout": 5,
        "learning_rate": 7e-4,
        "learning_rate_schedule": "linear",
        "optimizer": "rmsprop_tf",
        "optimizer_eps": 1e-5,
    },
    "cartpole/ppo": OFF | {"rollout": 32, "epochs": 20, "learning_rate": 1e-3, "learning_rate_schedule": "linear"},
    "lunarlander/ppo": OFF
    | {"rollout": 1024, "epochs": 4, "learning_rate": 3e-4, "learning_rate_schedule": "constant"},
    "novelocity/ppo": {
        "rollout": 128,
        "epochs": 10,
        "learning_rate": 1e-3,
        "learning_rate_schedule": "linear",
        "normalize_observation": True,
        "normalize_reward": False,
    },
    "pendulum/ppo": OFF | {"rollout": 1024, "epochs": 10, "learning_rate": 1e-3, "learning_rate_schedule": "constant"},
    "pong/ppo": OFF | {"rollout": 128, "epochs": 4, "learning_rate": 2.5e-4, "learning_rate_schedule": "linear"},
    "tictactoe/ppo": OFF | {"rollout": 8, "epochs": 8, "learning_rate": 2e-3, "learning_rate_schedule": "linear"},
}


def test_every_preset_of_ppo_and_a2c_is_in_the_table() -> None:
    assert {name for name in presets() if name.endswith(("/ppo", "/a2c"))} == TUNED.keys()


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("nb_step", [None, 3_000])
def test_presets_fix_the_settings_they_were_tuned_with(name: str, nb_step: int | None) -> None:
    """Whatever the defaults are and however short the run is."""
    given = {} if nb_step is None else {"nb_step": nb_step}
    environment = presets()[name][0].replace("*", "Pong-v5")
    settings, origins = resolve_settings(environment, name.rpartition("/")[2], overrides=given)
    assert {key: getattr(settings.agent, key) for key in TUNED[name]} == TUNED[name]
    assert {origins[f"agent.{key}"] for key in TUNED[name]} == {f"preset {name}"}


def test_short_runs_have_more_updates_and_larger_steps() -> None:
    def agent(name: str, nb_step: int, **given: Any) -> Any:
        return resolve_settings(COUNTING, name, overrides={"nb_step": nb_step} | given).settings.agent

    long, short = agent("ppo", 1_000_000), agent("ppo", 3_000)
    assert (long.rollout, long.epochs, long.learning_rate) == (128, 4, 3e-4)
    assert (short.rollout, short.epochs, short.learning_rate) == (8, 8, 1.5e-3)
    usual = agent("ppo", 100_000)
    assert (usual.rollout, usual.epochs, usual.learning_rate) == (128, 8, 6.5e-4)
    assert agent("ppo", 30_000).rollout == 75
    assert agent("ppo", 3_000, **{"env.num": 1}).rollout == 64  # 16 rows for each of 4 minibatches
    assert agent("ppo", 3_000, **{"agent.minibatches": 64}).rollout == 128
    long, short = agent("a2c", 1_000_000), agent("a2c", 3_000)
    assert (long.rollout, long.learning_rate_schedule, long.learning_rate) == (8, "linear", 7e-4)
    assert (short.rollout, short.learning_rate_schedule, short.learning_rate) == (1, "constant", 2e-3)
    assert agent("a2c", 10_000).rollout == 2
    # the horizon 1/(1−γ): 1/320 of the steps, 10 at least, whatever the number of environments
    assert [agent("a2c", steps).gamma for steps in (1_000, 3_500, 16_000, 32_000, 500_000)] == [
        0.9,
        0.909,
        0.98,
        0.99,
        0.99,
    ]
    assert (agent("a2c", 3_500, **{"env.num": 1}).gamma, agent("ppo", 3_500).gamma) == (0.909, 0.99)
    lstm = {"network.body": "lstm"}  # backpropagation goes over a rollout
    assert (agent("a2c", 3_000, **lstm).rollout, agent("ppo", 3_000, **lstm).rollout) == (8, 32)
    assert agent("a2c", 3_000, **{"network.name": "my_module:MyNetwork"}).rollout == 8
    assert (agent("a2c", 3_000).optimizer_eps, agent("a2c", 3_000, **{"agent.optimizer": "adam"}).optimizer_eps) == (
        3e-3,
        1e-5,
    )


def test_given_settings_are_not_adapted_to_a_short_run() -> None:
    given = {"nb_step": 3_000, "agent.rollout": 128, "agent.learning_rate": 3e-4}  # these are the defaults, but said
    settings, origins = resolve_settings(COUNTING, "ppo", overrides=given)
    assert (settings.agent.rollout, settings.agent.learning_rate, settings.agent.epochs) == (128, 3e-4, 8)
    assert (origins["agent.rollout"], origins["agent.epochs"]) == ("flag", "default for this run")
    assert from_flat(to_flat(settings)) == settings
    assert from_flat(to_flat(settings) | {"nb_step": 1_000_000}).agent == settings.agent  # as a resume to a new end


@pytest.mark.parametrize(
    ("environments", "nb_step", "given", "expected"),
    [
        (8, 10_000_000, {}, (25_000, 50_000)),
        (512, 100_000_000, {}, (655_360, 655_360)),
        (512, 2_000_000, {}, (100_000, 100_000)),  # a 20th of the run
        (32, 100_000_000, {}, (40_960, 50_000)),
        (512, 100_000_000, {"evaluation.every": 30_000, "checkpoint_every": 0}, (30_000, 0)),
    ],
)
def test_evaluations_and_checkpoints_are_rollouts_apart(
    environments: int, nb_step: int, given: dict[str, Any], expected: tuple[int, int]
) -> None:
    overrides = {"env.num": environments, "nb_step": nb_step} | given
    resolved = resolve_settings(COUNTING, "ppo", overrides=overrides)
    settings, origins = resolved
    assert (settings.evaluation.every, settings.checkpoint_every) == expected
    changed = {key for key in ("evaluation.every", "checkpoint_every") if origins[key] == "default for this run"}
    usual = {"evaluation.every": 25_000, "checkpoint_every": 50_000}
    assert changed == {key for key, value in zip(usual, expected, strict=True) if value > usual[key] and not given}
    assert adapt_defaults(resolved) == resolved


def test_short_runs_with_images_keep_the_learning_rate_of_ppo() -> None:
    """The environment tells whether there are images, after the settings are resolved."""

    def rate(agent: str, **given: Any) -> tuple[float, str]:
        resolved = resolve_settings(COUNTING, agent, overrides={"nb_step": 40_000} | given)
        again = adapt_defaults(resolved, images=True)
        assert adapt_defaults(again) == resolved == adapt_defaults(resolved)  # adapts the defaults, not adapted ones
        return again.settings.agent.learning_rate, again.origins["agent.learning_rate"]

    assert rate("ppo") == (3e-4, "default")
    assert rate("ppo", **{"agent.learning_rate": 8e-4}) == (8e-4, "flag")
    assert rate("a2c") == (2e-3, "default for this run")


@given(
    rate=st.floats(1e-12, 1e3),
    hidden=st.lists(st.integers(1, 9999), max_size=4),
    runs=st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1).filter(lambda s: s != "None"),
    stop=st.none() | st.floats(allow_nan=False),
    seed=st.integers(0, 2**62),
)
def test_a_config_file_rebuilds_the_same_settings(
    tmp_path_factory: Any, rate: float, hidden: list[int], runs: str, stop: float | None, seed: int
) -> None:
    given = {
        "agent.learning_rate": rate,
        "network.hidden": hidden,
        "runs": runs,
        "evaluation.stop_at": stop,
        "seed": seed,
    }
    settings, origins = resolve_settings("CartPole-v1", overrides=given)
    path = tmp_path_factory.mktemp("run") / "config.toml"
    write_config(path, to_flat(settings), origins)
    assert from_flat(read_config(path)) == settings


def test_a_custom_agent_has_its_own_settings() -> None:
    settings = resolve_settings(
        "CartPole-v1", own("OwnAgent"), overrides={"agent.sizes": ["5"], "agent.target": "None"}
    ).settings
    assert settings.agent == OwnConfig((5,), None)
    assert from_flat(to_flat(settings)) == settings


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1e6", int, 1_000_000),
        ("1_000", int, 1000),
        ("9007199254740993", int, 9007199254740993),  # a float would lose the last digit
        (3, float, 3.0),
        ("true", bool, True),
        ("None", float | None, None),
        ("none", float | None, None),
        (["1", 2], tuple[int, ...], (1, 2)),
        (7, tuple[int, ...], (7,)),
        ("-inf", float, float("-inf")),
    ],
)
def test_values_are_parsed(value: Any, annotation: Any, expected: Any) -> None:
    result = parse_value("key", value, annotation, "flag")
    assert (result, type(result)) == (expected, type(expected))


BAD_VALUES = {
    ("nb_step", "1.5", "whole number"),
    ("nb_step", True, "whole number"),
    ("nb_step", "inf", "whole number"),
    ("agent.gamma", "fast", "a number"),
    ("agent.gamma", float("nan"), "a number"),
    ("agent.gamma", None, "a number"),
    ("quiet", "yes", "true or false"),
    ("quiet", 1, "true or false"),
    ("compile", "onn", 'Did you mean "on"'),
    ("device", 3, "a text"),
    ("network.hidden", "64 x", "whole number"),
    ("evaluation.stop_at", "high", "a number or None"),
    ("nb_step", 0, "at least 1"),
    ("seed", -1, "at least 0"),
    ("keep", 0, "at least 1"),
    ("evaluation.episodes", 0, "at least 1"),
    ("env.num", 0, "1 or more"),
    ("agent.rollout", 0, "greater than 0"),
    ("network.hidden", (64, -1), "1 or more"),
    ("agent.lerning_rate", 1, 'Did you mean "agent.learning_rate"'),
    ("nbstep", 1, 'Did you mean "nb_step"'),
}


@pytest.mark.parametrize(("key", "value", "said"), sorted(BAD_VALUES, key=str))
def test_an_invalid_value_is_a_user_error_with_its_key(key: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_settings("CartPole-v1", overrides={key: value})
    message = str(caught.value)
    assert key in message
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"environment": None}, "ludus train CartPole-v1"),
        ({"agent": "pppo"}, 'Unknown agent "pppo". Did you mean "ppo"'),
        ({"agent": own("NoConfig")}, "Config"),
        ({"agent": own("NeedyAgent")}, "needed"),
        ({"agent": own("Missing")}, "Missing"),
        ({"agent": "no_such_module:Agent"}, "no_such_module"),
        ({"preset": "cartpol/ppo"}, 'Did you mean "cartpole/ppo"'),
        ({"preset": "cartpole/a2c", "agent": "ppo", "overrides": {"agent.trace_lambda": 0.5}}, "agent.trace_lambda"),
        ({"file": "nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_an_unknown_name_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        resolve_settings(**({"environment": "CartPole-v1"} | arguments))
    assert said in str(caught.value)


@pytest.mark.parametrize("agent", ["dqn", "r2d2", "sac", "acer"])
def test_a_run_shorter_than_its_warmup_is_refused(agent: str) -> None:
    aim = "replayed" if agent == "acer" else "learned"
    given = {"agent.warmup": 500, "nb_step": 500}
    with pytest.raises(UserError, match=rf"^agent\.warmup is 500, but nb_step is 500, so nothing .* be {aim}; lower"):
        resolve_settings("CartPole-v1", agent, overrides=given).settings.check_run_length()
    resolve_settings("CartPole-v1", agent, overrides=given | {"nb_step": 501}).settings.check_run_length()


def test_a_run_too_short_for_one_batch_is_refused() -> None:
    given = {"agent.sequence": 10, "agent.burn_in": 5, "agent.warmup": 100, "env.num": 8, "nb_step": 2_600}
    # 32 sequences of each of 8 environments: 15 steps for the first, 10 for each of the others
    with pytest.raises(UserError, match=r"^A batch of agent\.batch_size 256 takes 2,600 steps .* nb_step is 2,599, so"):
        resolve_settings("Pendulum-v1", "sac", "none", overrides=given | {"nb_step": 2_599}).settings.check_run_length()
    resolve_settings("Pendulum-v1", "sac", "none", overrides=given).settings.check_run_length()
    short = {"agent.n_step": 500, "nb_step": 4_000}
    with pytest.raises(UserError, match=r"^A batch of agent\.batch_size 128 takes 4,120 steps"):
        resolve_settings("CartPole-v1", "dqn", "none", overrides=short).settings.check_run_length()


def test_the_length_of_a_run_is_counted_in_steps_of_each_agent_that_learns() -> None:
    config = resolve_settings("CartPole-v1", "dqn", "none", overrides={"agent.warmup": 500}).settings.agent
    config.check_run_length(300, 4, agents=2)
    with pytest.raises(UserError, match=r"warmup is 500, but nb_step is 250 for each of 2 agents, so nothing"):
        config.check_run_length(250, 4, agents=2)


def test_agents_have_network_defaults_that_other_layers_override() -> None:
    for agent in ("sac", "td3", "ddpg", "hddpg"):
        resolved = resolve_settings("Pendulum-v1", agent, "none")
        assert resolved.settings.network.hidden == (256, 256)
        assert resolved.settings.network.activation == "relu"
        assert resolved.origins["network.hidden"] == "default"
    assert resolve_settings("Pendulum-v1", "sac").settings.network.hidden == (64, 64)  # the preset's
    wide = resolve_settings("Pendulum-v1", "sac", "none", overrides={"network.hidden": (7,)}).settings
    assert (wide.network.hidden, wide.network.activation) == ((7,), "relu")
    assert from_flat(to_flat(wide)) == wide
    assert resolve_settings("CartPole-v1", "r2d2", "none").settings.network.body == "lstm"
    assert resolve_settings("CartPole-v1", "dqn", "none").settings.network == NetworkConfig()


def test_a_resumed_run_may_be_shorter_than_its_warmup() -> None:
    resolve_settings("CartPole-v1", overrides={"nb_step": 10})
    resolve_settings("CartPole-v1", "acer", overrides={"nb_step": 10, "agent.replay_ratio": 0})
    settings = resolve_settings("CartPole-v1", "dqn", overrides={"nb_step": 2000}).settings
    shorter = replace(settings, nb_step=500)  # as a resume may ask for
    shorter.validate()
    assert from_flat(to_flat(shorter)) == shorter


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "[agent]\nlerning_rate = 3\n")
    with pytest.raises(UserError, match=r"my\.toml"):
        resolve_settings("CartPole-v1", file=file)
    file = settings_file(tmp_path, "[agent]\nname = 3\n")
    with pytest.raises(UserError, match=r"agent\.name"):
        resolve_settings("CartPole-v1", file=file)


def test_every_setting_has_a_dotted_key() -> None:
    types = setting_types(f"{__name__}:OwnAgent")
    assert types["agent.sizes"] == tuple[int, ...]
    assert types.keys() >= {"nb_step", "agent.name", "env.num", "network.hidden", "evaluation.stop_at"}
    assert "agent_name" not in types


def test_a_preset_matches_ids_without_version():
    assert find_preset("CartPole", "ppo") == find_preset("CartPole-v1", "ppo") == "cartpole/ppo"
    assert find_preset("Cart", "ppo") == "none"
    assert find_preset("", "ppo") == "none"
