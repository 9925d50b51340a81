"""Runs that are none, are damaged, or are of another network: nothing is lost, and one line says why."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults_setup import TINY, digest, flags

import ludus
from ludus.core.errors import UserError

TRAIN = ["--preset", "none", *flags(TINY | {"agent.minibatches": 2})]
ROOT = Path(__file__).parents[2]


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def cut_short(run):
    path = run / "best" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(run):
    path = run / "best" / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def other_schema(run):
    path = run / "best" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))


def edited_manifest(run):
    edit(run / "best" / "manifest.json", '"score"', '"scare"')


def empty_manifest(run):
    (run / "best" / "manifest.json").write_text("")


def no_state(run):
    (run / "best" / "state.json").unlink()


def other_hidden(run):
    edit(run / "config.toml", "hidden = [64, 64]", "hidden = [32, 64]")


def other_depth(run):
    edit(run / "config.toml", "hidden = [64, 64]", "hidden = [64]")


def other_environment(run):
    edit(run / "config.toml", '"CartPole-v1"', '"Acrobot-v1"')


def gone_environment(run):
    edit(run / "config.toml", '"CartPole-v1"', '"gone_module:World"')


def gone_agent(run):
    edit(run / "config.toml", '"ppo"', '"gone_module:Agent"')


def gone_network(run):
    edit(run / "config.toml", '"modular"', '"gone_module:Net"')


def damaged_config(run):
    edit(run / "config.toml", "nb_step = ", "nb_step = [")


def wrong_config(run):
    edit(run / "config.toml", "nb_step = 96", 'nb_step = "many"')


def binary_config(run):
    (run / "config.toml").write_bytes(b"\xff\xfe\x00")


def unknown_key(run):
    edit(run / "config.toml", "nb_step", "nbstep")


def no_checkpoints(run):
    for folder in (run / "best", *run.glob("checkpoints/step_*")):
        folder.rename(run / f"moved-{folder.name}")


DAMAGES = {
    cut_short: "is truncated",
    flip_a_bit: "was modified",
    other_schema: "has schema 99",
    edited_manifest: "was modified",
    empty_manifest: "is not the manifest",
    no_state: "cannot be read",
    other_hidden: "another network",
    other_depth: "another network",
    other_environment: "another network",
    gone_environment: "would import gone_module:World (env.id)",
    gone_agent: "would import gone_module:Agent (agent.name)",
    gone_network: "would import gone_module:Net (network.name)",
    damaged_config: "not valid TOML",
    wrong_config: 'nb_step is "many"',
    binary_config: "not valid TOML",
    unknown_key: 'Did you mean "nb_step"?',
    no_checkpoints: "were deleted: restore them, or choose another run",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_run(refused, run, damage):
    damage(run)
    said = DAMAGES[damage]
    refused(["evaluate", str(run), "--episodes", "1"], said)
    refused(["play", "latest", "--out", "film.gif"], said)
    before = digest(run)
    with pytest.raises(UserError) as caught:
        ludus.load(run)
    assert said in str(caught.value)
    assert digest(run) == before


CHECKPOINT_ONLY = [cut_short, flip_a_bit, other_schema, edited_manifest, no_checkpoints, damaged_config]


@pytest.mark.parametrize("damage", CHECKPOINT_ONLY, ids=lambda damage: damage.__name__)
def test_fine_tuning_from_a_damaged_run(refused, run, damage):
    damage(run)
    refused(["train", "CartPole-v1", *TRAIN, "--init-from", str(run)], DAMAGES[damage])


def test_fine_tuning_from_a_run_of_something_else(refused, run, refused_by_train):
    refused(["train", "Acrobot-v1", *TRAIN, "--init-from", "latest"], "env.id is CartPole-v1 in that run", "init_from")
    refused(["train", "CartPole-v1", *TRAIN, "--init-from", "latest", "--network.hidden", "9"], "network.hidden is")
    refused(["train", "CartPole-v1", "--agent", "a2c", *flags(TINY), "--init-from", "nowhere"], "does not exist")
    refused_by_train("Acrobot-v1", "env.id is CartPole-v1 in that run", init_from=str(run))


def test_a_damaged_best_leaves_the_latest_usable(run):
    cut_short(run)
    assert ludus.load(run, "latest").act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_folders_that_are_no_runs(refused, here, run):
    (here / "empty").mkdir()
    refused(["evaluate", "empty"], "has no config.toml, so it is not a run folder")
    refused(["play", "nowhere"], 'The run "nowhere" does not exist')
    refused(["evaluate", str(run / "config.toml")], "not a run folder")
    refused(["evaluate", str(run)[:-1]], f'Did you mean "{run}"?')
    refused(["evaluate", run.name[:-1]], f'Did you mean "{run}"?')
    refused(["evaluate", f"runs/{run.parent.name[:-1]}"], f'Did you mean "{run.parent}"?')
    refused(["evaluate", "latest", "--runs", "empty"], 'There is no run in "empty" yet')
    refused(["evaluate"], "needs a run")
    with pytest.raises(UserError, match="does not exist"):
        ludus.load("nowhere")
    with pytest.raises(UserError, match="best, latest or a step such as step_50000"):
        ludus.load(run, "newest")
    with pytest.raises(UserError, match='"warp"'):
        ludus.load(run, device="warp")


def test_an_observation_of_another_environment(run):
    player = ludus.load(run)
    for wrong in ([0.0] * 3, [[0.0] * 3], "hello"):
        with pytest.raises(UserError, match="observation"):
            player.act(wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate latest --episodes 0", "--episodes is 0"),
        ("evaluate latest --episodes few", "a whole number"),
        ("evaluate latest --seed -1", "--seed is -1"),
        ("evaluate latest --episods 3", 'Did you mean "--episodes"?'),
        ("evaluate latest --checkpoint bst", 'Did you mean "best"?'),
        ("play latest --fps 0", "--fps is 0"),
        ("play latest --fps inf", "--fps is inf"),
        ("play latest --out film.avi", ".mp4 or .gif"),
        ("play latest --out no_folder/film.gif --episodes 0", "--episodes is 0"),
        ("lits", 'Did you mean "list"?'),
        ("list agent", 'Did you mean "agents"?'),
        ("check", "No environment was given"),
    ],
)
def test_other_commands(refused, words, said):
    refused(words.split(), said)


SUBPROCESSES = {
    "train CartPole-v1 --preset cartpol/ppo": 'Did you mean "cartpole/ppo"?',
    "train fault_worlds:RaisesInStep --env.num 2 --evaluation.episodes 1 --quiet": "the wheel fell off",
    "evaluate latest": "is truncated",
}


def test_the_installed_command(run):
    cut_short(run)
    command = Path(sys.executable).with_name("ludus")
    start = [str(command)] if command.exists() else [sys.executable, "-m", "ludus.cli.main"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    started = {
        words: subprocess.Popen([*start, *words.split()], env=environment, stderr=subprocess.PIPE, text=True)
        for words in SUBPROCESSES
    }
    for words, process in started.items():
        _, error = process.communicate()
        assert process.returncode == 2, error
        assert SUBPROCESSES[words] in error
        *stack, sentence = error.splitlines()
        assert (sentence.startswith("ludus: "), bool(stack)) == (True, "RaisesInStep" in words), error


def test_a_run_folder_removed_during_training_ends_it_with_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def remove(values):
        if values["updates"] == 2:
            (folder,) = tmp_path.glob("runs/*/*")
            shutil.rmtree(folder)

    for every in (1, 10_000):  # found by the next line of metrics, or at the end
        with pytest.raises(UserError, match="was deleted or moved during training, so nothing more can be saved"):
            ludus.train("CartPole-v1", preset="none", settings=TINY | {"log_every": every}, on_update=remove)
        assert not list(tmp_path.glob("runs/*/*"))
