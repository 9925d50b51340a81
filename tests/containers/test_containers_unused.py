from pathlib import Path

import pytest

from ludus.containers.build import build_manager
from ludus.containers.settings import Resolved, presets, resolve_settings, to_flat
from ludus.containers.unused import refuse_unused, unused
from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.track.config_file import write_config

VECTOR, IMAGE = Spec((4,), "float32"), Spec((4, 84, 84), "uint8", low=0, high=255)
CHOICE, AMOUNT = Spec((), "int64", "categorical", sizes=(2,)), Spec((1,), "float32", low=-1, high=1)
OWN = "my.module:Net"


def named(agent="ppo", observation=VECTOR, action=CHOICE, **changes) -> set[str]:
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    settings = resolve_settings("CartPole-v1", agent, "none", None, overrides).settings
    return {key for key, _ in unused(settings, {"observation": observation}, {"action": action})}


OTHER_RANKS = {"network.net2d", "network.net3d", "network.net4d"}


def test_what_nothing_reads_depends_on_the_environment_and_on_other_settings() -> None:
    gaussian = {"agent.distribution", "agent.log_std_init"}
    memory = {"network.lstm_size"}
    assert named() == OTHER_RANKS | gaussian | memory
    assert named(action=AMOUNT) == OTHER_RANKS | memory
    assert named(action=AMOUNT, agent__distribution="beta") == OTHER_RANKS | memory | {"agent.log_std_init"}
    assert named(network__body="lstm", action=AMOUNT) == OTHER_RANKS
    assert named(network__net1d="lstm", action=AMOUNT) == OTHER_RANKS | {"network.hidden", "network.activation"}
    assert named("a2c", action=AMOUNT, agent__n_step=3) == OTHER_RANKS | memory | {"agent.gae_lambda"}
    pieces = {"network.net1d", "network.net2d", "network.net4d", "network.hidden", "network.activation"}
    assert named(observation=IMAGE, action=AMOUNT) == pieces | memory
    normalized = {"agent.normalize_observation"}
    assert named(observation=IMAGE, action=AMOUNT, agent__normalize_observation=True) == pieces | memory | normalized
    assert named(observation=CHOICE, action=AMOUNT, agent__normalize_observation=True) >= normalized
    assert not named(action=AMOUNT, agent__normalize_observation=True) & normalized


def test_a_network_or_a_piece_of_ones_own() -> None:
    own = named(network__name=OWN, action=AMOUNT)
    assert own >= {"network.hidden", "network.body", "network.orthogonal"}
    assert not own & {"network.name", "network.shared"}
    assert named(network__body="my.module:Piece", action=AMOUNT) == OTHER_RANKS  # it may read any size


def refused(resolved: Resolved, said: str) -> None:
    with pytest.raises(UserError, match=rf"^{said}[^\n]*would do nothing[^\n]*leave it out\.$"):
        refuse_unused(resolved, {"observation": VECTOR}, {"action": CHOICE})


def accepted(resolved: Resolved) -> None:
    refuse_unused(resolved, {"observation": VECTOR}, {"action": CHOICE})


def test_flags_and_files_are_refused_but_no_default_preset_or_run_file(tmp_path: Path) -> None:
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
def test_no_preset_holds_what_its_own_environment_does_not_use(name: str) -> None:
    environment, values = presets()[name]
    settings = resolve_settings(environment, name.rpartition("/")[2]).settings
    manager = build_manager(settings)
    assert not values.keys() & {key for key, _ in unused(settings, manager.observation, manager.action)}
    manager.close()
