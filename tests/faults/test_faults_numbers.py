"""Numbers that go bad in the midst of a run: the first is caught when it happens, and one command shows how."""

import math
import re

import numpy as np
import pytest
import torch
from fault_worlds import Sound
from faults_setup import TINY, digest
from torch import nn

import ludus
from ludus.agents.ppo import PPO, PPOConfig
from ludus.cli.main import main
from ludus.core.batch import Learned
from ludus.core.errors import UserError
from ludus.runs import checkpoint as checkpoints
from ludus.runs.failure import FOLDER
from ludus.runs.folder import RunDirectory, step_folders

SETTINGS = TINY | {"nb_step": 2_000, "env.num": 4, "network.hidden": (8,), "network.lstm_size": 4, "threads": 1}
REPRODUCED = "Reproduced: recomputing the update gives NaN or Inf again."
STEPS = 16  # optimizer steps of PPO in an update, with these
PLAIN = {"agent__epochs": 4, "agent__minibatches": 4, "agent__rollout": 16, "agent__normalize_reward": False}


@pytest.fixture
def fail(tmp_path, monkeypatch):
    """``fail(environment, agent, **settings)``: train until the run refuses to go on; return its folder, what it said,
    and the metrics of all updates before."""
    monkeypatch.chdir(tmp_path)

    def run(environment, agent="ppo", **settings):
        seen = []
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        with pytest.raises(UserError) as caught:
            ludus.train(environment, agent, preset="none", settings=SETTINGS | changes, on_update=seen.append)
        assert "\n" not in str(caught.value)
        return RunDirectory.open("latest"), str(caught.value), seen

    return run


@pytest.fixture
def diagnosed(capsys):
    """``diagnosed(run, code)``: what ``ludus diagnose`` prints, its lines joined; nothing in the run may change."""

    def run(directory, code=0):
        before = digest(directory.path)
        capsys.readouterr()
        assert main(["diagnose", str(directory.path)]) == code
        assert digest(directory.path) == before
        out = capsys.readouterr().out
        assert "Traceback" not in out
        return " ".join(out.split())

    return run


def dump(run):
    return checkpoints.load(run.path / FOLDER)


def own(kind):
    return f"{__name__}:{kind.__name__}"


def finite(values):
    return all(math.isfinite(x) for name, x in values.items() if name.startswith("loss/") or name == "gradient_norm")


def assert_first(run, seen):
    """What is saved is the first bad update, and the parameters before it."""
    state, meta = dump(run)
    assert all(finite(values) for values in seen)
    assert all(bool(torch.isfinite(x).all()) for x in state["agent"].values() if torch.is_tensor(x))
    assert meta["step"] == (seen[-1]["step"] if seen else 0) + float(state["batch"]["real"].sum())


WORLDS = {"discrete": "CartPole-v1", "continuous": "Pendulum-v1"}


@pytest.mark.parametrize("body", ["identity1d", "lstm"])
@pytest.mark.parametrize("agent", ["ppo", "a2c"])
@pytest.mark.parametrize("actions", WORLDS)
def test_steps_that_are_too_large(fail, diagnosed, agent, body, actions):
    run, said, seen = fail(WORLDS[actions], agent, network__body=body, agent__learning_rate=1e20)
    assert re.match(r"Training diverged: .* is (nan|inf|-inf) at step \d+; .* Earlier checkpoints are intact\.", said)
    assert said.endswith(f"Run `ludus diagnose {run.path}` to see where it came from.")
    assert_first(run, seen)
    out = diagnosed(run)
    assert REPRODUCED in out
    assert "; lower agent.learning_rate. Earlier" in out  # rewards are small, so nothing is said of them


@pytest.mark.parametrize("agent", ["ppo", "a2c"])
def test_normalizers_and_schedules_come_back_too(fail, diagnosed, agent):
    on = {"agent__normalize_observation": True, "agent__normalize_reward": True, "agent__rollout": 4}
    schedule = {"agent__learning_rate_schedule": "linear"} | (
        {"agent__clip_schedule": "linear"} if agent == "ppo" else {}
    )
    run, _, seen = fail("Pendulum-v1", agent, network__name=own(Hundredth), agent__learning_rate=1e-3, **on, **schedule)
    assert len(seen) > 1
    assert_first(run, seen)
    assert any(name.startswith("normalizer.") for name in dump(run)[0]["buffers"])
    assert REPRODUCED in diagnosed(run)


class Hundredth(nn.Module):
    """Gives NaN from the hundredth time that it learns."""

    when = 100

    def __init__(self, inputs):
        super().__init__()
        self.layer = nn.Linear(inputs["observation"][0], 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, observation):
        self.count += torch.is_grad_enabled()
        x = torch.tanh(self.layer(observation))
        return x * torch.where(self.count >= self.when, math.nan, 1.0)


def test_the_step_and_the_module_are_named(fail, diagnosed):
    run, said, seen = fail("CartPole-v1", network__name=own(Hundredth), **PLAIN)
    assert "Training diverged: loss/policy is nan" in said
    assert len(seen) == 100 // STEPS  # the hundredth step is the fourth of the seventh update
    assert_first(run, seen)
    assert all(step <= seen[-1]["step"] for step in map(saved_step, step_folders(run.checkpoints)))
    out = diagnosed(run)
    assert REPRODUCED in out
    assert "loss: policy is nan loss: value is nan" in out
    assert (
        "forward: the output of networks.actor.module (Hundredth) is the first with NaN or Inf; its inputs are" in out
    )
    assert "inputs are finite, its parameters are finite" in out


def saved_step(folder):
    return int(folder.name.removeprefix("step_"))


class Forgetful(Hundredth):
    """Counts where no dump looks."""

    def __init__(self, inputs):
        super().__init__(inputs)
        del self.count
        self.count = 0

    def forward(self, observation):
        self.count += torch.is_grad_enabled()
        return self.layer(observation) * (math.nan if self.count == 100 else 1.0)


def test_what_does_not_fail_again_is_said_so(fail, diagnosed):
    run, _, _ = fail("CartPole-v1", network__name=own(Forgetful))
    out = diagnosed(run, code=1)
    assert "Not reproduced" in out


class RootOfNothing(nn.Module):
    """The root of a number that is 0 for a network that has learned for a while: its gradient is infinite there."""

    def __init__(self, inputs):
        super().__init__()
        self.layer = nn.Linear(inputs["observation"][0], 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, observation):
        self.count += torch.is_grad_enabled()
        x = self.layer(observation)
        left = torch.where(self.count < 20, x.abs() + 1, x * 0)
        return torch.sqrt(left)


def test_the_way_back_is_watched(fail, diagnosed):
    run, _, seen = fail("CartPole-v1", "a2c", network__name=own(RootOfNothing))
    assert len(seen) == 19
    assert_first(run, seen)
    out = diagnosed(run)
    assert "forward:" not in out
    assert "in forward (test_faults_numbers.py, line " in out
    assert "torch.sqrt(left)" in out or "x * 0" in out


class Dropping(Hundredth):
    """Draws from torch's own generator as it learns."""

    def forward(self, observation):
        return nn.functional.dropout(super().forward(observation), 0.5, torch.is_grad_enabled())


def test_random_numbers_of_a_networks_own_come_back(fail, diagnosed):
    run, _, seen = fail("CartPole-v1", "a2c", network__name=own(Dropping), agent__rollout=4)
    assert len(seen) == 99
    assert REPRODUCED in diagnosed(run)


class Stumbles(Sound):
    """The 21st step of every environment gives a bad number."""

    def __init__(self, what="reward"):
        self.what = what

    def observe(self):
        return np.array([0.25, math.inf if self.what == "observation" and self.steps == 21 else 0.5], np.float32)

    def reward(self):
        return {"reward": math.nan if self.steps == 21 else 1.0, "large": -1e30}.get(self.what, 1.0)


@pytest.mark.parametrize("agent", ["ppo", "a2c"])
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_a_number_of_the_environment(fail, diagnosed, agent, what):
    run, said, seen = fail(own(Stumbles), agent, env__options=(f"what='{what}'",))
    assert f"{own(Stumbles)} (row 0): a" in said
    assert said.endswith(f"Run `ludus diagnose {run.path}` to see where it came from.")
    assert len(seen) == 1
    state, _ = dump(run)
    # ten steps and a reset are eleven rows; the 21st step is the first after row 22, and a rollout has 16
    at = 23 - 16
    value = math.nan if what == "reward" else math.inf
    assert run.latest_checkpoint() is not None
    out = diagnosed(run)
    action = int(state["batch"]["action"]["action"][at - 1, 0])
    assert f"environment 0, t={at} of 16: " in out
    assert f" is {value}, returned by step(), action {action}" in out


def test_rewards_that_are_far_too_large(fail, diagnosed):
    run, said, seen = fail(own(Stumbles), env__options=("what='large'",), **PLAIN)
    assert "Training diverged" in said
    assert_first(run, seen)
    out = diagnosed(run)
    assert REPRODUCED in out
    assert "or turn on agent.normalize_reward (rewards reach 1e+30)" in out


def test_a_failure_of_the_first_update_leaves_the_run_to_be_diagnosed(fail, diagnosed):
    run, said, seen = fail("CartPole-v1", agent__learning_rate=1e30)
    assert not seen
    assert str(run.path) in said
    assert REPRODUCED in diagnosed(run)


class TwoSteps(PPO):
    """Learns in a way of its own, and says nothing of it."""

    Config = PPOConfig

    def learn(self, batch, updater):
        prepared = self.with_shares(self.prepare(batch).without_last_observation())
        for updater.learning_rate in (1e-3, 1e-4):
            updater.step(self.compute_loss, prepared, "all")
        return Learned({})


class Alone(PPO):
    """Needs no updater."""

    Config = PPOConfig

    def learn(self, batch, updater):
        losses, _ = self.compute_loss(self.with_shares(self.prepare(batch).without_last_observation()))
        gradients = torch.autograd.grad(sum(losses.values()), list(self.parameters()))
        with torch.no_grad():
            for p, gradient in zip(self.parameters(), gradients, strict=True):
                p -= 1e-3 * gradient
        return Learned({"loss/mine": losses["policy"].detach()})


@pytest.mark.parametrize(
    ("kind", "updates", "told", "module"),
    [
        (TwoSteps, 49, "loss/policy is nan", "Hundredth"),
        (Alone, 99, "loss/mine is nan", "Linear"),  # it applied the NaN to its parameters
    ],
)
def test_an_agent_of_ones_own(fail, diagnosed, kind, updates, told, module):
    run, message, seen = fail("CartPole-v1", own(kind), network__name=own(Hundredth), agent__rollout=4)
    assert told in message
    assert len(seen) == updates
    out = diagnosed(run)
    assert REPRODUCED in out
    assert f"({module}) is the first with NaN or Inf" in out


def test_where_all_is_well_nothing_is_saved(run, refused):
    assert not (run / FOLDER).exists()
    refused(["diagnose", str(run)], "has no failed update", "NaN or Inf")
    refused(["diagnose", "nowhere"], 'The run "nowhere" does not exist')


def test_a_damaged_dump_is_refused(fail, refused, here, monkeypatch):
    monkeypatch.chdir(here)
    run, _, _ = fail("CartPole-v1", agent__learning_rate=1e30)
    tensors = run.path / FOLDER / "tensors.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    refused(["diagnose", str(run.path)], "is truncated")
    tensors.write_bytes(whole)
    config = run.config.read_text()
    run.config.write_text(config.replace("[8]", "[9]"))
    refused(["diagnose", str(run.path)], "another network")
    run.config.write_text(config)
    assert main(["diagnose", "latest"]) == 0
