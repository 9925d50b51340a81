"""Local Minari datasets: written and read, and never made to run code."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from demonstrations import TOY, aim, mix, obey, record, specs_of
from test_data_npz import CASES, assert_equal

from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.data.load import load_dataset
from ludus.data.minari import check_new, save_minari

minari: Any = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def own_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read(name: str) -> None:
    expert, options = CASES[name]
    episodes, specs = record(TOY + name, expert, 3, *options), specs_of(TOY + name, *options)
    save_minari("toys/x-v0", episodes, *specs, TOY + name, "hand")
    assert_equal(load_dataset("minari:toys/x-v0", *specs).episodes, episodes)


def test_others_read_what_we_write() -> None:
    save_minari("masked-v0", record(TOY + "MaskedEnv", obey, 2), *specs_of(TOY + "MaskedEnv"), "Masked", "hand")
    found = minari.load_dataset("masked-v0")
    assert (found.total_episodes, found.total_steps) == (2, 16)
    episode = next(found.iterate_episodes())
    assert episode.observations["action_mask"].shape == (9, 10)
    assert episode.terminations.tolist() == [False] * 7 + [True]
    assert found.action_space == gymnasium.spaces.Discrete(10)


def test_images_are_stored_without_loss() -> None:
    from ludus.core.dataset import RecordedEpisode

    image, choice = Spec((8, 8, 3), "uint8", low=0, high=255), Spec((), "int64", "categorical", sizes=(2,))
    seen = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    episode = RecordedEpisode({"observation": seen}, {"action": np.zeros(3, np.int64)}, np.zeros(3), True, False)
    specs = {"observation": image}, {"action": choice}
    save_minari("image-v0", [episode], *specs, "Image", "hand")
    np.testing.assert_array_equal(load_dataset("minari:image-v0", *specs).episodes[0].observation["observation"], seen)


def test_a_dataset_that_minari_itself_collected(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="Minari's collector needs it")
    collector = minari.DataCollector(gymnasium.make("CartPole-v1"))
    for seed in range(2):
        collector.reset(seed=seed)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = collector.step(collector.action_space.sample())
            ended = terminated or truncated
    made = collector.create_dataset("cartpole/random-v0", algorithm_name="random")
    dataset = load_dataset("minari:cartpole/random-v0", *specs_of("CartPole-v1"))
    assert len(dataset.episodes) == 2
    assert dataset.transitions == made.total_steps
    assert all(episode.terminated and not episode.truncated for episode in dataset.episodes)


@pytest.mark.parametrize("id", ["../evil-v0", "/etc/x-v0", "a//b-v0", "x", "x-v0/..", "", "t/x-v0"])
def test_ids_stay_in_the_folder(id: str) -> None:
    with pytest.raises(UserError, match="no id of a Minari dataset"):
        load_dataset(f"minari:{id}", *specs_of(TOY + "TargetEnv"))


def test_a_dataset_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"not on this machine \(there: none\)"):
        load_dataset("minari:nothing-v0", *specs_of(TOY + "TargetEnv"))


def refused(id: str, environment: str, capsys: pytest.CaptureFixture[str], runs: Path) -> str:
    """The sentence with which training is refused before it starts, for every kind of agent that reads datasets."""
    told = set()
    for agent in ("bc", "gail", "iql"):
        words = [environment, "--agent", agent, "--data", f"minari:{id}", "--runs", str(runs), "--quiet"]
        assert main(["train", *words]) == 2
        told.add(capsys.readouterr().err.strip())
        assert not runs.exists()
    (sentence,) = told
    assert "Traceback" not in sentence
    return " ".join(sentence.split())


def make_empty(folder: Path) -> None:
    from minari.dataset.minari_storage import MinariStorage

    (folder / "data").mkdir(parents=True)
    box = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    MinariStorage.new(folder / "data", box, gymnasium.spaces.Discrete(2))


def test_an_empty_dataset(own_datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_empty(own_datasets / "toys" / "empty-v0")
    told = refused("toys/empty-v0", "CartPole-v1", capsys, tmp_path / "runs")
    assert 'data.path is "minari:toys/empty-v0", which has no steps' in told


def test_a_dataset_of_other_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, masked = TOY + "TargetEnv", TOY + "MaskedEnv"
    save_minari("toys/x-v0", record(target, aim, 2), *specs_of(target), target, "hand")
    told = refused("toys/x-v0", "CartPole-v1", capsys, tmp_path / "runs")
    assert 'The dataset "minari:toys/x-v0": observation "observation" has shape (2,)' in told
    save_minari("toys/y-v0", record(masked, obey, 2), *specs_of(masked), masked, "hand")
    assert "has the observations action_mask, observation" in refused("toys/y-v0", target, capsys, tmp_path / "runs")


@pytest.mark.parametrize("damage", ["no metadata", "no data", "cut", "bad heap", "bad space"])
def test_a_damaged_dataset(damage: str, own_datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = TOY + "TargetEnv"
    save_minari("toys/x-v0", record(target, aim, 2), *specs_of(target), target, "hand")
    folder = own_datasets / "toys" / "x-v0" / "data"
    metadata, data = folder / "metadata.json", folder / "main_data.hdf5"
    if damage == "no metadata":
        metadata.unlink()
    elif damage == "no data":
        data.unlink()
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:500])
    elif damage == "bad heap":  # h5py raises a RuntimeError
        start, _, end = data.read_bytes().rpartition(b"HEAP")
        data.write_bytes(start + b"PAEH" + end)
    else:
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"action_space": '{"type": "None"}'}))
    told = refused("toys/x-v0", target, capsys, tmp_path / "runs")
    assert 'The Minari dataset "toys/x-v0" cannot be read' in told


def test_an_id_that_exists_is_not_overwritten() -> None:
    save_minari("x-v0", record(TOY + "TargetEnv", aim, 1), *specs_of(TOY + "TargetEnv"), "Target", "hand")
    with pytest.raises(UserError, match="already"):
        check_new("x-v0")


def test_the_environment_that_a_dataset_names_is_not_made(
    own_datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('imported').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_minari("x-v0", record(TOY + "TargetEnv", aim, 1), *specs_of(TOY + "TargetEnv"), "Target", "hand")
    path = own_datasets / "x-v0" / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    evil = gymnasium.envs.registration.EnvSpec("Evil-v0", entry_point="evil:Env")
    path.write_text(json.dumps(metadata | {"env_spec": evil.to_json()}))
    load_dataset("minari:x-v0", *specs_of(TOY + "TargetEnv"))
    del metadata["observation_space"]
    path.write_text(json.dumps(metadata | {"env_spec": evil.to_json()}))
    with pytest.raises(UserError, match="does not name its spaces"):
        load_dataset("minari:x-v0", *specs_of(TOY + "TargetEnv"))
    assert not Path("imported").exists()


def test_without_minari_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "minari":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r'needs Minari, which is not installed: run `pip install "ludus\[offline\]"`'):
        load_dataset("minari:x-v0", *specs_of(TOY + "TargetEnv"))


def test_mixed_actions_are_nested_as_hdf5_needs() -> None:
    specs = specs_of(TOY + "MixedActionEnv", "more=true")
    save_minari("mixed-v0", record(TOY + "MixedActionEnv", mix, 1, "more=true"), *specs, "Mixed", "hand")
    assert set(minari.load_dataset("mixed-v0").action_space.spaces) == {"choice", "amount", "switches", "dials"}
