from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.agents.ppo import PPOConfig
from ludus.containers.build import build_manager
from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.settings.config_file import write_config
from ludus.settings.ineffective import find_ineffective, refuse_ineffective
from ludus.settings.settings import Resolved, presets, resolve_settings, to_flat

VECTOR, IMAGE = Spec((4,), "float32"), Spec((4, 84, 84), "uint8", low=0, high=255)
CHOICE, AMOUNT = Spec((), "int64", "categorical", sizes=(2,)), Spec((1,), "float32", low=-1, high=1)
OWN = "my.module:Net"


def named(agent="ppo", observation=VECTOR, action=CHOICE, **changes) -> set[str]:
    """Return the ineffective settings without those of the two tests below."""
    return everything(agent, observation, action, **changes) - POLICY - CLIPS


def everything(agent="ppo", observation=VECTOR, action=CHOICE, **changes) -> set[str]:
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    settings = resolve_settings("CartPole-v1", agent, "none", None, overrides).settings
    return {key for key, _ in find_ineffective(settings, {"observation": observation}, {"action": action})}


POLICY = {f"agent.{name}" for name in ("bins", "ordinal", "gsde_interval", "head_width")}
CLIPS = {"agent.rho_clip", "agent.c_clip"}


def test_settings_of_a_policy() -> None:
    def unused(**changes):
        return {key.removeprefix("agent.") for key in everything(action=AMOUNT, **changes) & POLICY}

    assert unused() == {"bins", "ordinal", "gsde_interval", "head_width"}
    assert unused(agent__distribution="discretized") == {"gsde_interval", "head_width"}
    assert unused(agent__distribution="gsde") == {"bins", "ordinal"}
    config = PPOConfig(autoregressive=("a", "b"))
    assert "head_width" not in dict(config.unused_distribution({"a": AMOUNT, "b": CHOICE}))
    assert "agent.log_std_init" in everything(action=AMOUNT, agent__distribution="discretized")
    assert everything(action=CHOICE, agent__distribution="gsde") >= {"agent.distribution", "agent.gsde_interval"}


def test_settings_of_vtrace() -> None:
    assert everything() >= CLIPS
    assert not everything("appo") & (CLIPS | {"agent.gae_lambda"})
    assert "agent.n_step" in everything("appo", agent__n_step=3)


GAUSSIAN = {"agent.distribution", "agent.log_std_init"}  # for a Discrete
OTHER_RANKS = {"network.net2d", "network.net3d", "network.net4d", "network.embedding"}


def test_ineffective_settings_depend_on_the_environment_and_on_other_settings() -> None:
    memory = {"network.lstm_size"}
    assert named() == OTHER_RANKS | GAUSSIAN | memory
    assert named(action=AMOUNT) == OTHER_RANKS | memory
    assert named(action=AMOUNT, agent__distribution="beta") == OTHER_RANKS | memory | {"agent.log_std_init"}
    assert named(network__body="lstm", action=AMOUNT) == OTHER_RANKS
    assert named(network__net1d="lstm", action=AMOUNT) == OTHER_RANKS | {"network.hidden", "network.activation"}
    assert named("a2c", action=AMOUNT, agent__n_step=3) == OTHER_RANKS | memory | {"agent.gae_lambda"}
    pieces = {
        "network.net1d",
        "network.net2d",
        "network.net4d",
        "network.hidden",
        "network.activation",
        "network.embedding",
    }
    assert named(observation=IMAGE, action=AMOUNT, agent__normalize_observation=False) == pieces | memory
    normalized = {"agent.normalize_observation"}
    assert named(observation=IMAGE, action=AMOUNT) == pieces | memory | normalized
    assert named(observation=CHOICE, action=AMOUNT) >= normalized
    assert not named(action=AMOUNT) & normalized


def test_a_custom_network_or_piece() -> None:
    own = named(network__name=OWN, action=AMOUNT)
    assert own >= {"network.hidden", "network.body", "network.orthogonal"}
    assert not own & {"network.name", "network.shared"}
    assert named(network__body="my.module:Piece", action=AMOUNT) == OTHER_RANKS  # it may read any size


def test_sequences_of_imitation_need_memory() -> None:
    sequences = {"agent.sequence", "agent.burn_in"}
    for agent in ("bc", "dagger"):
        assert everything(agent) >= sequences
        for setting in ("network__body", "network__critic__body"):
            assert not everything(agent, **{setting: "lstm"}) & sequences
        assert not everything(agent, network__name=OWN) & sequences  # it may be recurrent


PRIORITIES = {"agent.priority_exponent", "agent.importance_exponent"}
SEQUENCES = {"agent.burn_in", "agent.overlap"}
MIX, LADDER, LEVELS, BOUNDS = ({f"agent.{name}"} for name in ("priority_mix", "epsilon_ladder", "atoms", "v_min"))
BOUNDS |= {"agent.v_max"}
EPSILON = {f"agent.epsilon_{name}" for name in ("schedule", "start", "end", "share")} | LADDER
VALUES, SOFTNESS = LEVELS | BOUNDS, {"agent.temperature"}
TRANSITIONS = PRIORITIES | SEQUENCES
NOISE = {"agent.noise_clip", "agent.noise_theta"}
LEARNED_ALPHA = {"agent.alpha_learning_rate", "agent.target_entropy"}
QUANTILES, SAMPLES = {"agent.dropped_quantiles"}, {"agent.conservative_samples"}
MEMORY = {"agent.sequence": 3}
RATES = {"agent.actor_learning_rate": 1e-3, "agent.critic_learning_rate": 2e-3}
REPLAYS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("dqn", {}, TRANSITIONS | MIX | VALUES | SOFTNESS),
    ("dqn", {"agent.prioritized": True}, SEQUENCES | MIX | VALUES | SOFTNESS),
    (
        "dqn",
        {"agent.prioritized": True, "agent.priority_exponent": 0},
        SEQUENCES | MIX | VALUES | SOFTNESS | {"agent.importance_exponent"},
    ),
    ("dqn", MEMORY, PRIORITIES | MIX | VALUES | SOFTNESS),
    ("dqn", {"agent.noisy": True}, TRANSITIONS | MIX | VALUES | SOFTNESS | EPSILON),
    ("dqn", {"env.num": 1}, TRANSITIONS | MIX | VALUES | SOFTNESS | LADDER),
    ("c51", {}, TRANSITIONS | MIX | SOFTNESS),
    ("qr_dqn", {}, TRANSITIONS | MIX | SOFTNESS | BOUNDS),
    ("iqn", {}, TRANSITIONS | MIX | SOFTNESS | BOUNDS),
    ("munchausen_dqn", {}, TRANSITIONS | MIX | VALUES),
    ("rainbow", {}, SEQUENCES | MIX | SOFTNESS | EPSILON),
    ("r2d2", {}, VALUES | SOFTNESS | {"agent.epsilon_end", "agent.epsilon_share"}),
    ("ddpg", {}, TRANSITIONS | NOISE | {"agent.target_noise_clip"}),
    ("ddpg", RATES, TRANSITIONS | NOISE | {"agent.target_noise_clip", "agent.learning_rate"}),
    ("td3", {"agent.noise": "clipped_normal"}, TRANSITIONS | {"agent.noise_theta"}),
    ("td3", {"agent.noise": "ornstein_uhlenbeck"}, TRANSITIONS | {"agent.noise_clip"}),
    ("td3", {"agent.noise": "parameter"}, TRANSITIONS | NOISE),
    ("sac", RATES, TRANSITIONS | QUANTILES | SAMPLES),
    (
        "sac",
        {"agent.learn_alpha": False} | RATES,
        TRANSITIONS | QUANTILES | SAMPLES | LEARNED_ALPHA | {"agent.learning_rate"},
    ),
    ("sac", {"agent.critics": 1}, TRANSITIONS | QUANTILES | SAMPLES | {"agent.pessimistic_actor"}),
    ("cql", {}, TRANSITIONS | QUANTILES),
    ("tqc", {}, TRANSITIONS | SAMPLES),
    ("crossq", {}, TRANSITIONS | QUANTILES | SAMPLES | {"agent.tau"}),
    ("td3_bc", {}, TRANSITIONS | NOISE),
    ("iql", {}, TRANSITIONS | GAUSSIAN),
    ("discrete_cql", {}, TRANSITIONS | MIX | VALUES | SOFTNESS),
    ("discrete_sac", {"agent.learn_alpha": False}, TRANSITIONS | LEARNED_ALPHA),
    ("acer", {}, GAUSSIAN),
    ("acer_vtrace", {"agent.trust_region": 0}, GAUSSIAN | {"agent.average_decay"}),
    ("acer", {"agent.replay_ratio": 0}, GAUSSIAN | {"agent.replay", "agent.warmup", "agent.save_replay"}),
]
CONTINUOUS = ("ddpg", "td3", "sac", "tqc", "crossq", "cql", "td3_bc")


@pytest.mark.parametrize(("agent", "changes", "expected"), REPLAYS)
def test_ineffective_settings_of_replay_agents(agent: str, changes: Mapping[str, Any], expected: set[str]) -> None:
    found = named(agent, action=AMOUNT if agent in CONTINUOUS else CHOICE, **changes)
    assert {key for key in found if key.startswith("agent.")} == expected
    assert ("network.shared" in found) == (not agent.startswith("acer"))


OTHERS: dict[str, Any] = {  # values that no agent has by default
    "agent.priority_exponent": 0.3,
    "agent.importance_exponent": 0.9,
    "agent.priority_mix": 0.1,
    "agent.atoms": 7,
    "agent.v_min": -3,
    "agent.v_max": 3,
    "agent.temperature": 0.5,
    "agent.epsilon_schedule": "exponential",
    "agent.epsilon_start": 0.31,
    "agent.epsilon_end": 0.32,
    "agent.epsilon_share": 0.9,
    "agent.epsilon_ladder": 3,
    "agent.target_noise_clip": 0.01,
    "agent.noise_clip": 0.02,
    "agent.noise_theta": 0.9,
    "agent.learning_rate": 0.3,
    "agent.alpha_learning_rate": 0.3,
    "agent.target_entropy": 0.5,
    "agent.average_decay": 0.5,
    "agent.replay": 1234,
    "agent.warmup": 7,
    "agent.save_replay": False,
    "agent.dropped_quantiles": 7,
    "agent.conservative_samples": 7,
    "agent.pessimistic_actor": False,
    "agent.distribution": "beta",
    "agent.log_std_init": 0.5,
    "agent.tau": 0.5,
}


@pytest.mark.parametrize(("agent", "changes", "idle"), [row for row in REPLAYS if row[2]])
def test_ineffective_settings_have_no_effect(
    agent: str, changes: Mapping[str, Any], idle: set[str], tmp_path: Path
) -> None:
    """Two short runs have the same losses, whatever these settings are."""
    small = {"agent.batch_size": 4, "agent.warmup": 20, "agent.burn_in": 1, "agent.overlap": 0, "agent.sequence": 3}
    fast: dict[str, Any] = {"quiet": True, "runs": str(tmp_path), "evaluation.episodes": 1, "network.hidden": (8,)}
    fast |= {"env.num": 2, "env.max_episode_steps": 9, "threads": 1, "agent.updates_per_step": 0.5}
    if agent == "r2d2" or "agent.sequence" in changes:
        fast |= small | {"network.body": "lstm", "network.lstm_size": 4}
    elif agent.startswith("acer"):
        fast |= {"agent.rollout": 4, "agent.warmup": 20}
        del fast["agent.updates_per_step"]
    else:
        fast |= {"agent.batch_size": 4, "agent.warmup": 20}
    environment = "Pendulum-v1" if agent in CONTINUOUS else "CartPole-v1"

    def losses(more: dict[str, Any]) -> list[dict[str, float]]:
        heard: list[dict[str, float]] = []
        settings = fast | dict(changes) | more
        ludus.train(environment, agent, nb_step=60, preset="none", settings=settings, on_update=heard.append)
        assert len(heard) > 2
        hidden = ("seconds", "learning_rate", "replay/importance_exponent")  # of the log alone
        return [{key: x for key, x in said.items() if not key.startswith(hidden)} for said in heard]

    one, other = losses({}), losses({key: OTHERS[key] for key in idle - SEQUENCES})
    assert one == other
    assert any("loss/" in key for said in one for key in said)


def test_critics_of_images_and_actions_use_mlp_settings() -> None:
    kept = {"network.hidden", "network.activation", "network.net1d"}
    assert not named("sac", IMAGE, AMOUNT) & kept  # the critics' own, which see an action
    assert named("dqn", IMAGE) >= kept
    assert kept - named("dueling_dqn", IMAGE) == {"network.activation"}  # of the streams
    assert "network.shared" not in named("ppo", IMAGE)


def test_an_argument_of_a_piece_replaces_the_setting() -> None:
    assert "network.hidden" in named(network__net1d="mlp(hidden=[8])")
    assert "network.hidden" not in named(network__net1d="mlp(hidden=[8])", network__body="mlp")
    assert "network.activation" in named(network__net1d="mlp(activation='relu')")
    assert "network.hidden" not in named(network__net1d="mlp(activation='relu')")
    assert "network.lstm_size" in named(network__body="lstm(size=8)")
    assert "network.lstm_size" not in named(network__body="lstm(layers=2)")
    memory: dict[str, Any] = MEMORY | {"network.body": "lstm(size=8)"}
    assert "network.lstm_size" in named("dqn", **memory)
    assert "network.lstm_size" not in named("sac", action=AMOUNT, **memory)  # what the critics' mlp gets
    given = {"network.body": "lstm(size=8)", "network.lstm_size": 4}
    refused(resolve_settings("CartPole-v1", overrides=given), r"network\.lstm_size is 4", r"lstm\(size=8\) has a value")


def test_a_source_that_the_default_body_replaces() -> None:
    several = {"position": VECTOR, "speed": VECTOR}

    def is_idle(agent: str = "ppo", **changes: str) -> bool:
        overrides = {f"network.{key}": value for key, value in changes.items()}
        settings = resolve_settings("CartPole-v1", agent, "none", None, overrides).settings
        action = {"action": AMOUNT if agent == "sac" else CHOICE}
        return "network.net1d" in dict(find_ineffective(settings, several, action))

    assert is_idle()
    assert is_idle(net1d="mlp")
    assert not any(is_idle(net1d=net1d) for net1d in ("lstm", "identity1d", "mlp(hidden=[8])"))
    assert not is_idle(net1d="mlp", body="mlp")
    assert not is_idle("sac")  # becomes the body of the critics
    given = resolve_settings("CartPole-v1", overrides={"network.net1d": "mlp"})
    with pytest.raises(UserError, match=r"^network.net1d is mlp \(flag\), but .* replaces it by identity1d"):
        refuse_ineffective(given, several, {"action": CHOICE})
    accepted(given)  # with one observation


def test_a_head_that_the_default_body_replaces() -> None:
    observation, action = (
        {"screen": IMAGE},
        {"function": CHOICE, "place": Spec((), "int64", "categorical", sizes=(84**2,))},
    )

    def refuse(**changes: str) -> None:
        given = {"agent.heads": ("place=spatial(screen)",)} | {f"network.{key}": x for key, x in changes.items()}
        refuse_ineffective(resolve_settings("CartPole-v1", overrides=given), observation, action)

    refuse()
    refuse(head1d="mlp")
    refuse(head1d="identity1d", body="mlp")
    refuse(head1d="identity1d")  # of the critic, which is a network of its own
    with pytest.raises(UserError, match=r"^network.head1d is identity1d \(flag\), but .* replaces it by small_cnn"):
        refuse(head1d="identity1d", shared="yes")


def refused(resolved: Resolved, said: str, why: str = "") -> None:
    with pytest.raises(UserError, match=rf"^{said}[^\n]*, but would do nothing: {why}[^\n]*; leave it out\.$"):
        refuse_ineffective(resolved, {"observation": VECTOR}, {"action": CHOICE})


def test_the_error_names_the_reason() -> None:
    given = resolve_settings("CartPole-v1", "qr_dqn", overrides={"agent.v_min": -1})
    refused(given, r"agent\.v_min is -1\.0 \(flag\)", r"agent\.values is quantile")
    given = resolve_settings("CartPole-v1", "dqn", overrides={"network.shared": "yes"})
    refused(given, r"network\.shared is yes \(flag\)", "the networks of agent dqn cannot share a trunk")
    accepted(resolve_settings("CartPole-v1", "c51", overrides={"agent.v_min": -1}))
    accepted(resolve_settings("CartPole-v1", "acer", overrides={"network.shared": "yes"}))


def accepted(resolved: Resolved) -> None:
    refuse_ineffective(resolved, {"observation": VECTOR}, {"action": CHOICE})


def test_flags_and_files_are_refused_but_not_defaults_presets_and_arguments(tmp_path: Path) -> None:
    given = {"agent.distribution": "gaussian"}
    refused(resolve_settings("CartPole-v1", overrides=given), r"agent\.distribution is gaussian \(flag\)")
    accepted(resolve_settings("CartPole-v1", overrides=given, origin="argument"))
    accepted(resolve_settings("CartPole-v1", overrides={"network.hidden": (8,)}))
    accepted(resolve_settings("Acrobot-v1", preset="novelocity/ppo", overrides={"network.body": "identity1d"}))
    file = tmp_path / "my.toml"
    file.write_text("[network]\nlstm_size = 9\n")
    refused(resolve_settings("CartPole-v1", file=file), r"network\.lstm_size is 9 \(file .*my\.toml\)")
    whole = resolve_settings("CartPole-v1")
    write_config(file, to_flat(whole.settings), whole.origins)
    accepted(resolve_settings(file=file))


@pytest.mark.parametrize("name", [name for name, (_, values) in presets().items() if "env.backend" not in values])
def test_presets_have_no_ineffective_settings(name: str) -> None:
    environment, values = presets()[name]
    for start, package in (("ALE/", "ale_py"), ("mpe2.", "mpe2"), ("pettingzoo.", "pettingzoo")):
        if environment.startswith(start):
            pytest.importorskip(package)
    settings = resolve_settings(environment.replace("*", "Pong-v5"), name.rpartition("/")[2]).settings
    manager = build_manager(settings)
    assert not values.keys() & {key for key, _ in find_ineffective(settings, manager.observation, manager.action)}
    manager.close()


def test_zero_turns_sequence_settings_off() -> None:
    off = {"agent.sequence": 0, "agent.burn_in": 0, "agent.overlap": 0, "network.body": "identity1d"}
    refuse_ineffective(
        resolve_settings("CartPole-v1", "r2d2", "none", overrides=off), {"observation": VECTOR}, {"action": CHOICE}
    )
