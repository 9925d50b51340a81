"""Files of recorded episodes: what is written is read again, and what does not fit is refused in one sentence."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demonstrations import TOY, aim, mix, obey, record, record_to, specs_of

from ludus.core.dataset import Dataset, RecordedEpisode
from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.data.load import load_dataset
from ludus.data.npz import load_npz, save_npz

CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "TargetEnv": (aim, ()),
    "MaskedEnv": (obey, ()),
    "MixedActionEnv": (mix, ("more=true",)),
}


def assert_equal(found: tuple[RecordedEpisode, ...], expected: list[RecordedEpisode]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.terminated, one.truncated) == (other.terminated, other.truncated)
        np.testing.assert_array_equal(one.reward, other.reward)
        for kind in ("observation", "action"):
            ours, theirs = getattr(one, kind), getattr(other, kind)
            assert ours.keys() == theirs.keys()
            for name, x in ours.items():
                np.testing.assert_array_equal(x, theirs[name])


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    expert, options = CASES[name]
    episodes = record(TOY + name, expert, 3, *options)
    save_npz(tmp_path / "x.npz", episodes)
    observation, action = specs_of(TOY + name, *options)
    dataset = load_dataset(str(tmp_path / "x.npz"), observation, action)
    assert_equal(dataset.episodes, episodes)
    assert dataset.transitions == sum(len(episode.reward) for episode in episodes)
    for specs, kind in ((observation, "observation"), (action, "action")):
        for key, spec in specs.items():
            assert getattr(dataset.episodes[0], kind)[key].dtype == spec.dtype


def test_experts_of_the_toys_are_experts() -> None:
    assert all(episode.reward.sum() == pytest.approx(0, abs=1e-6) for episode in record(TOY + "TargetEnv", aim, 3))
    assert all(episode.reward.sum() == 8 for episode in record(TOY + "MaskedEnv", obey, 3))
    mixed = record(TOY + "MixedActionEnv", mix, 3, "more=true")
    assert all(episode.reward.sum() == pytest.approx(8) for episode in mixed)


def rewritten(path: Path, **changes: Any) -> str:
    """The same file with other arrays; None removes one."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays |= {name.replace("__", "/"): x for name, x in changes.items()}
    other = path.with_name("other.npz")
    np.savez(other, **{name: x for name, x in arrays.items() if x is not None})
    return str(other)


def refused(path: str, environment: str = TOY + "TargetEnv") -> str:
    with pytest.raises(UserError) as error:
        load_dataset(path, *specs_of(environment))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_files_that_are_no_datasets(tmp_path: Path) -> None:
    assert "does not exist" in refused(str(tmp_path / "none.npz"))
    text = tmp_path / "text.npz"
    text.write_text("hello")
    assert refused(str(text)).endswith("which is no .npz file of arrays (it is no zip file).")
    text.write_bytes(b"")
    assert "no .npz file of arrays" in refused(str(text))
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "single array" in refused(str(tmp_path / "one.npy"))
    os.mkfifo(tmp_path / "pipe.npz")
    assert "not a regular file" in refused(str(tmp_path / "pipe.npz"))
    assert "not a regular file" in refused(str(tmp_path))  # a folder is a run, which is recorded before this


def test_a_file_with_objects_is_not_unpickled(tmp_path: Path) -> None:
    path = record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2)

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    evil = rewritten(Path(path), reward=np.array([Bomb()] * 8, dtype=object))
    assert "allow_pickle=False" in refused(evil)
    assert not (tmp_path / "ran").exists()


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    path = Path(record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2))
    steps = 8
    assert 'lacks the array "reward"' in refused(rewritten(path, reward=None))
    assert 'lacks the array "action"' in refused(rewritten(path, action=None))
    assert 'unknown array "more"' in refused(rewritten(path, more=np.zeros(3)))
    assert "has 7 rows" in refused(rewritten(path, reward=np.zeros(steps - 1)))
    assert "rewards of shape" in refused(rewritten(path, reward=np.zeros((steps, 1))))
    assert "a reward is not a finite number" in refused(rewritten(path, reward=np.full(steps, np.nan)))
    assert "not a finite number" in refused(rewritten(path, action=np.full((steps, 2), np.inf)))
    assert 'action "action" has shape (3,)' in refused(rewritten(path, action=np.zeros((steps, 3))))
    assert "numbers of type complex128" in refused(rewritten(path, action=np.zeros((steps, 2), complex)))
    assert '"length"' in refused(rewritten(path, length=np.array([4, -4])))


def test_a_damaged_file(tmp_path: Path) -> None:
    path = Path(record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2))
    whole, other = path.read_bytes(), path.with_name("damaged.npz")
    draw = np.random.default_rng(0)
    for _ in range(150):  # zlib.error, TokenError and NotImplementedError are among what these raise
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[draw.integers(len(whole), size=3)] = draw.integers(256, size=3)
        other.write_bytes(damaged.tobytes()[: draw.integers(len(whole)) if draw.random() < 0.2 else None])
        with suppress(UserError):
            load_npz(other)


def test_flags_that_are_none(tmp_path: Path) -> None:
    path = Path(record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2))
    for wrong in (np.zeros((2, 2), bool), np.full(2, "False"), np.full(2, np.nan)):
        assert 'wrong array "terminated"' in refused(rewritten(path, terminated=wrong))
    assert not load_npz(rewritten(path, truncated=np.zeros(2))).episodes[0].truncated


def test_numbers_that_do_not_fit_the_type(tmp_path: Path) -> None:
    path = Path(record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2))
    assert "not a finite number of type float32" in refused(rewritten(path, reward=np.full(8, 1e300)))
    assert "not a finite number of type float32" in refused(rewritten(path, action=np.full((8, 2), 1e300)))
    image, action = {"observation": Spec((2, 2, 1), "uint8", low=0, high=255)}, specs_of(TOY + "TargetEnv")[1]
    for value in (300, -1):
        with pytest.raises(UserError, match="do not fit into uint8"):
            load_dataset(rewritten(path, observation=np.full((10, 2, 2, 1), value)), image, action)


def test_an_empty_file(tmp_path: Path) -> None:
    path = Path(record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 1))
    nothing = {"observation": np.zeros((0, 2)), "action": np.zeros((0, 2)), "reward": np.zeros(0)}
    flags = {"length": np.zeros(0, np.int64), "terminated": np.zeros(0, bool), "truncated": np.zeros(0, bool)}
    assert "has no steps" in refused(rewritten(path, **nothing, **flags))
    unplayed = {"observation": np.zeros((1, 2)), "length": np.zeros(1, np.int64)}
    ends = {"terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool)}
    assert "has no steps" in refused(rewritten(path, **(nothing | unplayed | ends)))


def test_a_dataset_of_other_spaces(tmp_path: Path) -> None:
    path = record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2)
    assert 'observation "observation" has shape (2,)' in refused(path, "CartPole-v1")
    masked = record_to(tmp_path / "masked.npz", TOY + "MaskedEnv", obey, 2)
    assert "has the observations action_mask, observation, but the environment has observation" in refused(masked)


def test_choices_that_the_environment_does_not_have(tmp_path: Path) -> None:
    path = Path(record_to(tmp_path / "x.npz", TOY + "MaskedEnv", obey, 2))
    wrong = refused(rewritten(path, action=np.full(16, 10)), TOY + "MaskedEnv")
    assert "values from 10 to 10, but the environment has 10 choices" in wrong
    assert "numbers of type float64" in refused(rewritten(path, action=np.zeros(16)), TOY + "MaskedEnv")
    small = load_dataset(rewritten(path, action=np.zeros(16, np.uint8)), *specs_of(TOY + "MaskedEnv"))
    assert small.episodes[0].action["action"].dtype == np.int64


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    path = record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2)
    (tmp_path / "link.npz").symlink_to(path)
    assert load_dataset(str(tmp_path / "link.npz"), *specs_of(TOY + "TargetEnv")).transitions == 8


def test_the_fingerprint_changes_with_the_contents(tmp_path: Path) -> None:
    path = Path(record_to(tmp_path / "x.npz", TOY + "TargetEnv", aim, 2))
    whole = load_npz(path)
    assert whole.fingerprint == load_npz(path).fingerprint
    assert Dataset(whole.episodes[:1], whole.name).fingerprint != whole.fingerprint
    first = whole.episodes[0]
    for changed in (
        first._replace(truncated=False),
        first._replace(reward=first.reward + 1),
        first._replace(action={"action": first.action["action"] + 1}),
    ):
        assert Dataset((changed, whole.episodes[1]), "").fingerprint != whole.fingerprint


def test_the_state_of_the_world_must_be_observed_as_when_it_was_recorded(tmp_path: Path) -> None:
    name, path = "ludus.environments.agents_toy:CueTeam", tmp_path / "team.npz"
    for recorded in (False, True):
        observation, action = (
            {key: np.zeros((steps, *spec.shape), spec.dtype) for key, spec in specs.items()}
            for specs, steps in zip(specs_of(name, global_state=recorded), (3, 2), strict=True)
        )
        save_npz(path, [RecordedEpisode(observation, action, np.zeros(2, np.float32), True, False)])
        assert load_dataset(str(path), *specs_of(name, global_state=recorded)).transitions == 2
        fix = r"turn on env\.global_state, as" if recorded else r"record it from a run with --env\.global-state\.$"
        with pytest.raises(UserError, match=rf'the observation "state", that of the whole world; {fix}'):
            load_dataset(str(path), *specs_of(name, global_state=not recorded))
