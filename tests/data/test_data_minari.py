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


@pytest.mark.parametrize("id", ["../evil-v0", "/etc/x-v0", "a//b-v0", "x", "x-v0/..", ""])
def test_ids_stay_in_the_folder(id: str) -> None:
    with pytest.raises(UserError, match="no id of a Minari dataset"):
        load_dataset(f"minari:{id}", *specs_of(TOY + "TargetEnv"))


def test_a_dataset_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"not on this machine \(there: none\)"):
        load_dataset("minari:nothing-v0", *specs_of(TOY + "TargetEnv"))


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
