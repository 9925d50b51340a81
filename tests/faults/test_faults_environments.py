"""Environments that lie, break or say nothing: through the command line and through Python."""

import sys
from importlib.util import find_spec

import fault_worlds
import gymnasium
import numpy as np
import pytest
from faults_setup import TINY, flags

import ludus
from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.runs.folder import RunDirectory

TRAIN = flags(TINY | {"agent.minibatches": 2})

# found before training: nothing is written
AT_ONCE = {
    "NaNFromTheStart": "NaN or infinite",
    "WrongType": "is int64 of shape (2,), but its space is float32",
    "WrongShape": "of shape (3,), but its space is float32 of shape (2,)",
    "Text": "but its space is float32",
    "OutsideDiscrete": "has the choice 7",
    "BelowDiscrete": "has the choice -5",
    "LacksPart": "has the parts ['camera'], but its space has",
    "NoDict": "is of type ndarray, but its space is a Dict",
    "NotASpace": 'observation space "observation" is a int',
    "NoActionSpace": 'action space "action" is a NoneType',
    "Unsupported": "is a Text, which is not supported; use Box",
    "EmptyDict": "is empty",
    "OldReset": "reset returned a ndarray",
    "ResetWithoutSeed": "reset(self, *, seed=None, options=None)",
    "RaisesInReset": "reset raised OSError: no such robot (fault_worlds.py, line ",
    "RaisesWhenMade": "its constructor raised RuntimeError: the licence has run out (fault_worlds.py, line ",
    "NeedsArgument": "--env.options map_name=VALUE",
    "EmptyMask": "allows nothing",
    "MaskInObservation": "allows nothing",
    "LongMask": "4 entries, but the action has 3 choices",
    "LongMaskInObservation": "4 entries, but the action has 3 choices",
    "MaskOfContinuous": "no discrete action",
    "NOT_CALLABLE": "is a int; give its class",
    "gives_nothing": "without reset, step",
    "Sond": 'Did you mean "Sound"?',
}
# found by a step: earlier runs are untouched
BY_A_STEP = {
    "NaNLater": "is not finite",
    "InfiniteReward": "a reward is not a finite number",
    "TextReward": "The reward is of type str, which is not a number",
    "WrongShapeLater": "of shape (3,)",
    "OutsideMultiDiscrete": "has the choice 3",
    "OldStep": "step returned 4 values, not five",
    "NoInfoDict": "step returned an info of type NoneType",
    "NoBools": "not bool; return bool(",
    "RaisesInStep": "step raised ZeroDivisionError: the wheel fell off (fault_worlds.py, line ",
    "EmptyMaskLater": "allows nothing",
    "MaskGoesAway": "lacks it now",
}

# found after an update: what was learned until then is kept
LATER = {"NaNLater", "InfiniteReward", "WrongShapeLater", "OutsideMultiDiscrete", "EmptyMaskLater", "MaskGoesAway"}


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_a_reset_shows_is_told_before_training(refused, name):
    error = refused(["train", f"fault_worlds:{name}", *TRAIN], AT_ONCE[name])
    assert name in error


@pytest.mark.parametrize("name", BY_A_STEP)
def test_what_a_step_shows_is_told_and_earlier_runs_are_whole(refused, name):
    refused(["train", f"fault_worlds:{name}", *TRAIN], BY_A_STEP[name], adds=name in LATER)


@pytest.mark.parametrize("name", [n for n in AT_ONCE if hasattr(fault_worlds, n) and n != "NOT_CALLABLE"])
def test_python_says_the_same_before_training(refused_by_train, name):
    said = "VALUE" if name == "NeedsArgument" else AT_ONCE[name]
    refused_by_train(getattr(fault_worlds, name), said)


@pytest.mark.parametrize("name", BY_A_STEP)
def test_python_says_the_same_of_a_step(refused_by_train, name):
    refused_by_train(getattr(fault_worlds, name), BY_A_STEP[name], adds=name in LATER)


def test_python_gets_the_environments_own_traceback_as_the_cause(here):
    with pytest.raises(UserError) as caught:
        ludus.train(fault_worlds.RaisesInStep, preset="none", settings=TINY | {"agent.minibatches": 2})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_environments_own_stack_is_shown_and_the_log_has_all_of_it(here, capsys):
    capsys.readouterr()
    assert main(["train", "fault_worlds:RaisesInside", *TRAIN, "--runs", "inside"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert [line.split(", in ")[1] for line in shown if line.startswith("  File")] == ["step", "_turn"]
    assert shown[-2] == "ZeroDivisionError: the wheel fell off"
    assert shown[-1].startswith("ludus: fault_worlds:RaisesInside: step raised ZeroDivisionError: the wheel fell off")
    log = RunDirectory.open("latest", here / "inside").log.read_text()
    for part in ("rows.py", "in _turn", "ZeroDivisionError: the wheel fell off", "direct cause", "UserError"):
        assert part in log


def test_what_was_learned_before_the_fault_is_kept(refused, here):
    refused(["train", "fault_worlds:NaNLater", *TRAIN, "--runs", "later"], "not finite", adds=True)
    folder = RunDirectory.open("latest", here / "later")
    assert folder.latest_checkpoint() is not None
    policy = ludus.load(folder.path, "latest")
    assert policy.act(np.full(2, 0.5, np.float32)) in range(3)


def test_rendering_that_fails_is_named(refused, here):
    assert main(["train", "fault_worlds:RaisesInRender", *TRAIN, "--runs", "painted"]) == 0
    refused(["play", "latest", "--runs", "painted", "--out", "film.gif"], "render raised OSError: no paint")
    assert main(["train", "fault_worlds:Sound", *TRAIN, "--runs", "unpainted"]) == 0
    refused(["play", "latest", "--runs", "unpainted", "--out", "film.gif"], "cannot render", "render_mode")


@pytest.mark.parametrize("distribution", ["tanh", "beta"])
def test_a_box_without_bounds_cannot_be_squashed_to(refused, distribution):
    refused(
        ["train", "fault_worlds:Unbounded", *TRAIN, "--agent.distribution", distribution],
        'Action "action" has infinite bounds',
        "agent.distribution to gaussian",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("CartPol-v1", 'Did you mean "CartPole-v1"?'),
        ("cartpole", 'Did you mean "CartPole-v1"?'),
        ("CartPole-v7", 'Did you mean "CartPole-v1"?'),
        ("no_such_module:World", "there is no module no_such_module"),
        ("no_such_module:World-v0", "needs the module no_such_module"),
        ("CartPole-v1 --env.options gravity", "key=value"),
        ("CartPole-v1 --env.options gravty=1.0", "gravty"),
        ("fault_worlds:Sound --env.options gravity=1.0", 'has no option "gravity"'),
        ("CartPole-v1 --env.backend envpol", 'Did you mean "envpool"?'),
        ("fault_worlds:Sound --env.backend vector", "leave it at auto"),
        ("Acrobot-v1 --env.backend vector", "no native vector environment"),
    ],
)
def test_environments_that_cannot_be_made(refused, words, said):
    environment, *rest = words.split()
    refused(["train", environment, *TRAIN, *rest], said)


def test_envpool_names_the_nearest(refused):
    pytest.importorskip("envpool")
    refused(
        ["train", "Pongg-v5", "--env.backend", "envpool", *TRAIN], 'EnvPool has no environment "Pongg-v5"', "Pong-v5"
    )
    options = ["--env.backend", "envpool", "--env.options", "gravity=1"]
    refused(["train", "CartPole-v1", *options, *TRAIN], "EnvPool refused the options ['gravity']")


@pytest.mark.skipif(find_spec("Box2D") is not None, reason="Box2D is installed")
def test_a_missing_package_names_the_other_backend(refused):
    said = ('pip install "gymnasium[box2d]"', "--env.backend envpool")
    refused(["train", "LunarLander-v3", "--preset", "none", *TRAIN], *said)


class Leaves(fault_worlds.Sound):
    """Ends the whole program, as scripts do."""

    def step(self, action):
        sys.exit(3)


class StrangeSpace(gymnasium.spaces.Discrete):
    def sample(self, *args, **kwargs):
        raise KeyError("no dice")


class BreaksTheCheck(fault_worlds.Sound):
    action_space = StrangeSpace(3)


@pytest.mark.parametrize(("kind", "said"), [(Leaves, "SystemExit: 3"), (BreaksTheCheck, "no dice")])
def test_a_check_that_ends_early_is_not_a_pass(here, capsys, kind, said):
    assert main(["check", f"{__name__}:{kind.__name__}"]) == 2
    out = capsys.readouterr().out
    assert said in out
    assert "is ready" not in out


@pytest.mark.parametrize("name", ["NaNFromTheStart", "OldStep", "OldReset", "RaisesInStep", "EmptyMask", "NoInfoDict"])
def test_check_finds_what_training_refuses(here, capsys, name):
    assert main(["check", f"fault_worlds:{name}"]) == 2
    out = capsys.readouterr().out
    assert "fix: " in out
    assert ": 1 error; fix, then" in out


def test_check_knows_envpool(here, capsys):
    pytest.importorskip("envpool")
    assert main(["check", "Pong-v5", "--env.backend", "envpool"]) == 0
    assert "`ludus train Pong-v5 --env.backend envpool`" in capsys.readouterr().out
    assert main(["check", "Pongg-v5", "--env.backend", "envpool"]) == 2
    assert '"Pong-v5"?' in capsys.readouterr().out
