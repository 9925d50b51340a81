"""Initialize from another run by name, rename, freeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import make_worker, saved, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ludus
from ludus.core.errors import UserError
from ludus.runs.initialise import initialise_from, rename
from ludus.runs.train import TrainResult

ACTOR = "networks.actor.pieces.source/observation.layers."
STILL: dict[str, Any] = {"agent__learning_rate": 1e-44}  # parameters stay as they were initialized
NORMALIZER = "normalizer.statistics.observation/observation."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return train(tmp_path_factory.mktemp("source"), "CartPole-v1", seed=5, agent__normalize_observation=True)


def initial(**changes: Any) -> dict[str, Tensor]:
    worker = make_worker("CartPole-v1", **changes)
    state = {name: x.clone() for name, x in worker.agent.state_dict().items()}
    worker.close()
    return state


def test_only_what_the_patterns_match_is_loaded(source: TrainResult, tmp_path: Path) -> None:
    patterns = (ACTOR + "*", "*/observation.mean")
    result = train(tmp_path, "CartPole-v1", init_from=str(source.run), init_load=patterns, **STILL)
    run = result.run
    theirs, ours, fresh = saved(source.run, "best")["agent"], saved(run)["agent"], initial(**STILL)
    for name in ours:
        if name.startswith("networks."):
            expected = theirs if name.startswith(ACTOR) else fresh
            assert torch.equal(ours[name], expected[name]), name
    assert any(not torch.equal(theirs[name], fresh[name]) for name in fresh if name.startswith("networks.critic"))
    assert ours[NORMALIZER + "count"] == result.steps  # not loaded: it counts the steps of this run alone
    log = (run / "log.txt").read_text()
    assert f"loaded {ACTOR}0.weight" in log
    assert "not loaded networks.critic.projections.value.bias: not selected by init_load" in log
    assert "Not loaded: " in log


def test_normalizers_are_loaded_by_name_and_frozen(source: TrainResult, tmp_path: Path) -> None:
    given = {"init_from": str(source.run), "init_load": ("normalizer.*",), "freeze": ("normalizer.*",)}
    run = train(tmp_path, "CartPole-v1", **given).run
    theirs, ours = saved(source.run, "best")["agent"], saved(run)["agent"]
    names = [name for name in ours if name.startswith("normalizer.")]
    assert names
    assert all(torch.equal(theirs[name], ours[name]) for name in names)


def test_other_shapes_are_skipped_and_reported(source: TrainResult, tmp_path: Path) -> None:
    given = {"init_from": str(source.run), "init_load": ("networks.*",), "network__hidden": (8, 3)}
    run = train(tmp_path, "CartPole-v1", **given, **STILL).run
    theirs, ours, fresh = saved(source.run, "best")["agent"], saved(run)["agent"], initial(network__hidden=(8, 3))
    for network in ("actor", "critic"):
        layers = f"networks.{network}.pieces.source/observation.layers."
        assert torch.equal(ours[layers + "0.weight"], theirs[layers + "0.weight"])
        assert torch.equal(ours[layers + "1.weight"], fresh[layers + "1.weight"])
    log = (run / "log.txt").read_text()
    assert "networks.critic.projections.value.weight: of another shape: (1, 8) there and (1, 3) here" in log
    assert f"not loaded {ACTOR}1.bias: not in that run" in log
    assert "warning Loaded 6 of" in log


def test_an_encoder_is_renamed_and_kept_while_the_rest_is_new(source: TrainResult, tmp_path: Path) -> None:
    given = {"init_from": str(source.run), "init_rename": ("networks.actor.pieces.*=networks.critic.pieces.*",)}
    with pytest.raises(UserError, match="which gives two tensors the name"):
        train(tmp_path, "CartPole-v1", **given, init_load=("networks.critic.*",))
    swapped = (
        "networks.critic.pieces.*=old.*",
        "networks.actor.pieces.*=networks.critic.pieces.*",
        "old.*=networks.actor.pieces.*",
    )
    run = train(tmp_path, "CartPole-v1", init_from=str(source.run), init_rename=swapped, **STILL).run  # everything fits
    theirs, ours = saved(source.run, "best")["agent"], saved(run)["agent"]
    for name in (f"pieces.source/observation.layers.0.{x}" for x in ("weight", "bias")):
        assert torch.equal(ours[f"networks.critic.{name}"], theirs[f"networks.actor.{name}"])
        assert torch.equal(ours[f"networks.actor.{name}"], theirs[f"networks.critic.{name}"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"init_load": ("networks.aktor.*",)}, 'init_load has "networks.aktor.*", which matches no tensor'),
    "one good, one bad": ({"init_load": ("networks.*", "normaliser.*")}, '"normaliser.*", which matches no tensor'),
    "an explicit tensor of another shape": (
        {"init_load": (ACTOR + "0.weight",), "network__hidden": (9,)},
        "0.weight is of another shape: (8, 4) there and (9, 4) here)",
    ),
    "stars differ": ({"init_rename": ("a.*=b",)}, "the same number of * on both sides"),
    "no equals sign": ({"init_rename": ("a.*",)}, "must be OLD=NEW"),
    "nothing to rename": ({"init_rename": ("a.*=b.*",)}, "the run has no tensor a"),
    "freeze nothing": ({"freeze": ("nothing.*",)}, 'freeze has "nothing.*", which matches no parameter'),
    "freeze everything": ({"freeze": ("*",)}, "leaves nothing to learn in the parameter group all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_before_training(source: TrainResult, name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        train(tmp_path, "CartPole-v1", init_from=str(source.run), **changes)
    assert message in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_patterns_without_a_run_are_refused(tmp_path: Path) -> None:
    for key, value in (("init_load", "networks.*"), ("init_rename", "a=b")):
        with pytest.raises(UserError, match=f"{key} is .*, but there is no init_from"):
            train(tmp_path, "CartPole-v1", **{key: (value,)})


@pytest.mark.parametrize(
    ("agent", "environment"), [("ppo", "CartPole-v1"), ("sac", "Pendulum-v1"), ("dqn", "CartPole-v1")]
)
def test_frozen_parameters_stay_bit_equal_and_the_resume_is_exact(agent: str, environment: str, tmp_path: Path) -> None:
    frozen = "networks.*.layers.0.*" if agent == "sac" else "networks.*.pieces.source/*.0.*"
    changes: dict[str, Any] = {"freeze": (frozen,), "nb_step": 120}
    if agent != "ppo":
        changes |= {"agent__warmup": 40, "agent__batch_size": 16}
    whole = train(tmp_path / "whole", environment, agent, **changes)
    worker = make_worker(environment, agent, **changes)
    before, after = dict(worker.agent.named_parameters()), saved(whole.run)["agent"]
    trainable = {name for name, p in before.items() if p.requires_grad}
    assert trainable
    assert len(worker.updater.flat.places) == len(trainable)  # type: ignore[attr-defined]
    still = [name for name in before if name.startswith("networks.") and name not in trainable]
    assert still
    assert all(".0." in name for name in still)
    for name, p in before.items():
        if name in still:
            assert torch.equal(p, after[name]), name
        elif name in trainable:
            assert not torch.equal(p, after[name]), name
    worker.close()
    part = train(tmp_path / "part", environment, agent, lambda numbers: numbers["step"] < 60, **changes)
    assert part.steps < whole.steps
    resumed = ludus.resume(part.run)
    again = saved(resumed.run)["agent"]
    assert all(torch.equal(x, again[name]) for name, x in after.items() if isinstance(x, Tensor))


def test_target_networks_start_as_copies_of_what_was_loaded(tmp_path: Path) -> None:
    small = {"agent__warmup": 40, "agent__batch_size": 16}
    run = train(tmp_path / "a", "CartPole-v1", "dqn", seed=3, **small).run
    worker = make_worker("CartPole-v1", "dqn", init_from=str(run), init_load=("*.layers.*",))
    initialise_from(worker.agent, worker.settings)
    agent, theirs = worker.agent.state_dict(), saved(run, "best")["agent"]
    worker.close()
    targets = [name for name in agent if name.startswith("target.networks.")]
    assert targets
    assert all(torch.equal(agent[name], agent[name.removeprefix("target.")]) for name in targets)
    layers = [name for name in agent if name.startswith("networks.") and ".layers." in name]
    assert all(torch.equal(agent[name], theirs[name]) for name in layers)


class Normed(nn.Module):
    """Features with batch statistics and dropout."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, observation: Tensor) -> Tensor:
        y: Tensor = self.last(self.encoder(observation))
        return y


def test_a_frozen_encoder_keeps_its_batch_statistics(tmp_path: Path) -> None:
    worker = make_worker("CartPole-v1", network__name=f"{__name__}:Normed", freeze=("networks.*.encoder.*",))
    before = {name: x.clone() for name, x in worker.agent.state_dict().items()}
    modes: set[tuple[str, bool]] = set()
    for name, module in worker.agent.named_modules():
        module.register_forward_hook(lambda m, a, y, name=name: modes.add((name.rpartition("module.")[2], m.training)))
    worker.run(100)
    after = worker.agent.state_dict()
    changed = {name for name, x in after.items() if not torch.equal(x, before[name]) and ".module." in name}
    assert {name.split(".module.")[1].split(".")[0] for name in changed} == {"last"}
    assert any("running_mean" in name for name in changed)
    assert ("last.1", True) in modes
    assert not any(training for name, training in modes if name.startswith("encoder"))
    worker.close()


NAMES = st.text("abc.", max_size=6)


@given(NAMES, NAMES, NAMES)
def test_renaming_keeps_the_text_of_each_star(a: str, b: str, c: str) -> None:
    assert rename([f"x{a}-{b}+{c}", "other"], ["x*-*+*=*/y/*/*"]) == {
        f"{a}/y/{b}/{c}": f"x{a}-{b}+{c}",
        "other": "other",
    }
