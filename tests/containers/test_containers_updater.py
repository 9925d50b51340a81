"""One flat block of parameters: nothing changes but where they lie; each step is that of the reference optimizer."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import make_worker
from torch import Tensor, nn

from ludus.containers.loop import begin, collect
from ludus.containers.updater import ALIGN, FlatParameters, LocalUpdater, gradients
from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.updater import Group
from ludus.networks.config import NetworkConfig
from ludus.networks.net3d.nature_cnn import NatureCNN

STEPS = 6


def make_agent(agent: str = "ppo", environment: str = "CartPole-v1", **changes: Any) -> tuple[Agent, list[Batch]]:
    """An untouched agent (its parameters lie where PyTorch put them) and minibatches that it would learn from."""
    worker = make_worker(environment, agent, **changes)
    begin(worker, 0)
    collect(worker)
    batch = worker.agent.prepare(worker.cache.read())  # type: ignore[operator]
    by = "environment" if worker.agent.recurrent else "transition"
    parts = [worker.agent.with_shares(x) for x in batch.minibatches(2, by, torch.Generator().manual_seed(0))]  # type: ignore[operator]
    fresh = copy.deepcopy(worker.agent)
    for p in fresh.parameters():
        p.data, p.grad = p.detach().clone(memory_format=torch.preserve_format), None
    worker.close()
    return fresh, parts


def updater_of(
    agent: Agent, optimizer: Any = "adam", rate: float = 1e-2, norm: float = 0.5, decay: float = 0.0
) -> LocalUpdater:
    own = tuple(p for p in agent.parameters() if p.requires_grad)
    agent.parameter_groups = lambda: {"all": Group(own, rate, norm, decay, optimizer, 1e-5)}  # type: ignore[method-assign]
    return LocalUpdater(agent)


def reference_loss(agent: Agent, batch: Batch) -> Tensor:
    losses, _ = agent.compute_loss(batch)
    coefficients = agent.loss_coefficients()
    return torch.stack([coefficients.get(name, 1.0) * x for name, x in losses.items()]).sum()


def assert_parameters(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    others = dict(b.named_parameters())
    for name, p in a.named_parameters():
        torch.testing.assert_close(p, others[name], rtol=0, atol=tolerance)


def test_flat_parameters_keep_values_and_strides() -> None:
    piece = NatureCNN((4, 36, 36), NetworkConfig())
    before = {name: (p.detach().clone(), p.stride()) for name, p in piece.named_parameters()}
    flat = FlatParameters(list(piece.named_parameters()))
    for name, p in piece.named_parameters():
        value, stride = before[name]
        assert torch.equal(p, value), name
        assert p.stride() == stride, name
        assert p.grad is not None
        assert p.grad.stride() == stride
        assert p.untyped_storage().data_ptr() == flat.value.untyped_storage().data_ptr()
        assert p.grad.untyped_storage().data_ptr() == flat.gradient.untyped_storage().data_ptr()
        assert p.storage_offset() % ALIGN == 0
    for convolution in piece.convolutions:
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    norms = torch.stack([p.detach().double().norm() for p in piece.parameters()])
    assert float(flat.value.double().norm()) == pytest.approx(float(norms.norm()), rel=1e-12)  # nothing lies between


def test_parameters_do_not_overlap() -> None:
    layers = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    flat = FlatParameters(list(layers.named_parameters()))
    for number, p in enumerate(layers.parameters(), 1):
        p.data.fill_(number)
    for number, p in enumerate(layers.parameters(), 1):
        assert (p == number).all()
    assert (flat.value != 0).sum() == sum(p.numel() for p in layers.parameters())  # what lies between stays 0


def test_gradients_land_in_the_block() -> None:
    agent, parts = make_agent()
    updater = updater_of(agent)
    reference_loss(agent, parts[0]).backward()  # type: ignore[no-untyped-call]
    own = torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])
    assert updater.flat.gradient.norm() == pytest.approx(float(own.norm()))
    assert own.norm() > 0


CASES: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared": {"network__shared": "yes"},
    "lstm": {"network__body": "lstm"},
    "gaussian": {"environment": "ludus.environments.toy:TargetEnv"},
    "mixed": {"environment": "ludus.environments.toy:MixedActionEnv"},
    "a2c": {"agent": "a2c"},
}


@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_an_eager_step_is_that_of_torchs_adam(case: str, norm: float) -> None:
    agent, parts = make_agent(agent__entropy_coef=0.01, **CASES[case])
    reference = copy.deepcopy(agent)
    updater = updater_of(agent, norm=norm)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-5)
    for at in range(STEPS):
        batch = parts[at % len(parts)]
        metrics = updater.step(agent.compute_loss, batch, "all")
        adam.zero_grad()
        loss = reference_loss(reference, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        length = nn.utils.clip_grad_norm_(reference.parameters(), norm or float("inf"))
        adam.step()
        torch.testing.assert_close(metrics["gradient_norm"], length, rtol=1e-4, atol=1e-6)
        own = sum(float(metrics[f"loss/{name}"]) * weight for name, weight in coefficients(agent).items())
        assert own == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    assert_parameters(agent, reference, 1e-6)


def coefficients(agent: Agent) -> dict[str, float]:
    return {"policy": 1.0, **agent.loss_coefficients()}


@pytest.mark.parametrize("norm", [0.0, 1e-2])
def test_rmsprop_is_torchs(norm: float) -> None:
    agent, parts = make_agent("a2c")
    reference = copy.deepcopy(agent)
    updater = updater_of(agent, "rmsprop", norm=norm)
    rmsprop = torch.optim.RMSprop(reference.parameters(), lr=1e-2, eps=1e-5)
    for at in range(STEPS):
        batch = parts[at % len(parts)]
        updater.step(agent.compute_loss, batch, "all")
        rmsprop.zero_grad()
        reference_loss(reference, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(reference.parameters(), norm or float("inf"))
        rmsprop.step()
    assert_parameters(agent, reference, 1e-6)


@pytest.mark.parametrize("norm", [0.0, 1e-2])
def test_rmsprop_tf_is_tensorflows(norm: float) -> None:
    """The average of squares starts at 1 and eps is inside the root, in numpy."""
    agent, parts = make_agent("a2c")
    reference = copy.deepcopy(agent)
    updater = updater_of(agent, "rmsprop_tf", norm=norm)
    square = {name: np.ones(p.shape) for name, p in reference.named_parameters()}
    for at in range(STEPS):
        batch = parts[at % len(parts)]
        updater.step(agent.compute_loss, batch, "all")
        reference.zero_grad()
        reference_loss(reference, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(reference.parameters(), norm or float("inf"))
        for name, p in reference.named_parameters():
            assert p.grad is not None
            g = p.grad.double().numpy()
            square[name] = 0.99 * square[name] + 0.01 * g**2
            p.data = (p.double() - torch.from_numpy(1e-2 * g / np.sqrt(square[name] + 1e-5))).float().detach()
    assert_parameters(agent, reference, 1e-6)


def test_a_new_learning_rate_takes_effect_at_the_next_step() -> None:
    agent, parts = make_agent()
    reference = copy.deepcopy(agent)
    updater = updater_of(agent)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-5)
    for rate in (1e-2, 1e-3, 0.0, 5e-2):
        updater.learning_rate = adam.param_groups[0]["lr"] = rate
        assert updater.learning_rate == rate
        before = updater.flat.value.clone()
        updater.step(agent.compute_loss, parts[0], "all")
        assert torch.equal(before, updater.flat.value) == (rate == 0)
        adam.zero_grad()
        reference_loss(reference, parts[0]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        adam.step()
    assert_parameters(agent, reference, 1e-6)


def test_a_loss_of_weight_zero_has_no_say_and_is_still_reported() -> None:
    agent, parts = make_agent(agent__entropy_coef=0.0)
    metrics = updater_of(agent).step(agent.compute_loss, parts[0], "all")
    assert metrics["loss/entropy"] != 0


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "rmsprop_tf"])
def test_the_state_goes_through_a_checkpoint(optimizer: str) -> None:
    """Three steps, a save, three steps: the same as six steps, to the bit."""
    agent, parts = make_agent()
    updater = updater_of(agent, optimizer)
    updater.learning_rate = 3e-3
    for _ in range(3):
        updater.step(agent.compute_loss, parts[0], "all")
    state = copy.deepcopy(updater.state_dict())
    other = copy.deepcopy(agent)
    for p in other.parameters():  # a deep copy shares one block, as its source does: give it one of its own
        p.data, p.grad = p.detach().clone(), None
    resumed = updater_of(other, optimizer)
    resumed.load_state_dict(state)
    assert resumed.learning_rate == 3e-3
    for _ in range(3):
        updater.step(agent.compute_loss, parts[1], "all")
        resumed.step(other.compute_loss, parts[1], "all")
    assert torch.equal(updater.flat.value, resumed.flat.value)
    assert not torch.equal(state["moments"]["square"], updater.state_dict()["moments"]["square"])


def test_the_state_of_another_optimizer_is_refused() -> None:
    agent, _ = make_agent()
    state = updater_of(agent, "rmsprop_tf").state_dict()
    with pytest.raises(UserError, match="optimizer is rmsprop, but the checkpoint was saved with 'rmsprop_tf'"):
        updater_of(agent, "rmsprop").load_state_dict(state)
    state["optimizer"] = {"critic": "rmsprop"}
    with pytest.raises(UserError, match="other parameter groups than the agent"):
        updater_of(agent, "rmsprop").load_state_dict(state)


def test_frozen_parameters_stay() -> None:
    agent, parts = make_agent()
    frozen = next(agent.networks["critic"].parameters())  # type: ignore[index, union-attr]
    frozen.requires_grad_(False)
    before = frozen.clone()
    updater = updater_of(agent)
    for _ in range(3):
        updater.step(agent.compute_loss, parts[0], "all")
    assert torch.equal(frozen, before)
    assert updater.flat.value.numel() < sum(p.numel() for p in agent.parameters()) + len(updater.flat.places) * ALIGN


@pytest.mark.slow
@pytest.mark.parametrize("case", ["separate", "gaussian", "mixed", "a2c"])
def test_a_compiled_step_is_an_eager_one(case: str) -> None:
    agent, parts = make_agent(**CASES[case])
    reference = copy.deepcopy(agent)
    compiled, eager = updater_of(agent), updater_of(reference)
    compiled.compile(on_failure=pytest.fail)
    for at in range(STEPS):
        compiled.learning_rate = eager.learning_rate = 1e-2 / (at + 1)
        batch = parts[at % len(parts)]
        one, other = compiled.step(agent.compute_loss, batch, "all"), eager.step(reference.compute_loss, batch, "all")
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
    assert_parameters(agent, reference, 1e-5)
    assert torch.equal(next(agent.parameters()), compiled.flat.views(compiled.flat.value)[0])


@pytest.mark.slow
def test_a_compiled_step_keeps_images_channels_last() -> None:
    agent, parts = make_agent(environment="Pong-v5", env__backend="envpool", env__num=2, agent__rollout=4)
    reference = copy.deepcopy(agent)
    compiled, eager = updater_of(agent, rate=1e-3), updater_of(reference, rate=1e-3)
    compiled.compile(on_failure=pytest.fail)
    for at in range(3):
        compiled.step(agent.compute_loss, parts[at % 2], "all")
        eager.step(reference.compute_loss, parts[at % 2], "all")
    assert_parameters(agent, reference, 1e-4)
    kernels = [p for p in agent.parameters() if p.dim() == 4]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


@pytest.mark.slow
def test_a_loss_that_cannot_be_compiled_runs_eagerly_alone() -> None:
    torch.manual_seed(0)
    agent: Any = TwoParts()
    reference = copy.deepcopy(agent)

    def on(of: Any) -> Any:
        def undecided(batch: Batch) -> Any:
            losses, metrics = of.critic_loss(batch)
            if losses["critic"].detach() > 0:  # what runs depends on a number: no compiler sees the whole
                losses["critic"] = losses["critic"] * 2
            return losses, metrics

        return undecided

    said: list[str] = []
    built: list[int] = []
    compiled, eager = LocalUpdater(agent), LocalUpdater(reference)
    compiled.compile(said.append, lambda build: (built.append(1), build())[1])
    mine, its = on(agent), on(reference)
    for _ in range(3):
        compiled.step(mine, two_parts_batch(), "critic")
        compiled.step(agent.actor_loss, two_parts_batch(), "actor")
        eager.step(its, two_parts_batch(), "critic")
        eager.step(reference.actor_loss, two_parts_batch(), "actor")
    assert len(said) == 1
    assert "undecided cannot be compiled" in said[0]
    assert "other losses stay compiled" in said[0]
    assert "\n" not in said[0]
    assert len(built) == 2  # each loss was tried once
    assert_parameters(agent, reference, 1e-6)
    seen = []
    compiled._eager = lambda *given: seen.append(given)  # type: ignore[assignment, method-assign]
    compiled.step(agent.actor_loss, two_parts_batch(), "actor")
    assert not seen  # it is compiled still


def test_a_loss_that_reaches_no_parameter_is_refused() -> None:
    agent, (batch, _) = make_agent()
    with pytest.raises(UserError, match="does not depend on any trainable parameter"):
        updater_of(agent).step(lambda _: ({"mine": torch.ones(())}, {}), batch, "all")


class TwoParts(nn.Module):
    """An actor whose loss goes through a critic, as in DDPG, and a frozen target."""

    is_scheduled, given_config, tensor_config = False, nullcontext, nullcontext

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic, self.target = (nn.Linear(3, 3) for _ in range(3))
        self.target.requires_grad_(False)
        self.register_buffer("shift", torch.ones(3))

    def loss_coefficients(self) -> dict[str, float]:
        return {"actor": 0.5}

    def parameter_groups(self) -> dict[str, Group]:
        return {
            "critic": Group(tuple(self.critic.parameters()), 1e-2),
            "actor": Group(tuple(self.actor.parameters()), 3e-2),
        }

    def critic_loss(self, batch: Batch) -> Any:
        with torch.no_grad():
            aim = self.target(batch.reward) + self.shift
        return {"critic": (self.critic(batch.reward) - aim).square().mean()}, {"priority": aim.mean(-1)}

    def actor_loss(self, batch: Batch) -> Any:
        return {"actor": -self.critic(torch.tanh(self.actor(batch.reward))).mean()}, {}


def two_parts_batch() -> Batch:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    return Batch({}, x, {}, x, x, x, x, x, x, {})


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_group_moves_alone_at_its_own_rate_as_torchs_adam_would(compiled: bool) -> None:
    torch.manual_seed(0)
    agent: Any = TwoParts()
    reference = copy.deepcopy(agent)
    updater = LocalUpdater(agent)
    if compiled:
        updater.compile(on_failure=pytest.fail)
    adams = {name: torch.optim.Adam(own.parameters) for name, own in reference.parameter_groups().items()}
    batch = two_parts_batch()
    for at in range(4):
        rate = 1e-2 / (at + 1)
        updater.learning_rate = rate
        for name in ("critic", "actor") if at % 2 else ("critic",):
            for own in adams[name].param_groups:
                own["lr"] = rate * (3 if name == "actor" else 1)
            metrics = updater.step(getattr(agent, f"{name}_loss"), batch, name)
            losses, more = getattr(reference, f"{name}_loss")(batch)
            loss = losses[name] * reference.loss_coefficients().get(name, 1.0)
            adams[name].zero_grad()
            loss.backward()
            adams[name].step()
            assert metrics[f"loss/{name}"] == pytest.approx(float(losses[name].detach()), abs=1e-6)
            for key, x in more.items():
                torch.testing.assert_close(metrics[key], x)
            assert_parameters(agent, reference, 1e-6)
    assert {name: int(part.steps) for name, part in updater.parts.items()} == {"critic": 4, "actor": 2}
    agent.target.weight.data.add_(1)  # what is frozen may move between the steps, as a target does
    reference.target.weight.data.add_(1)
    updater.step(agent.critic_loss, batch, "critic")
    adams["critic"].zero_grad()
    reference.critic_loss(batch)[0]["critic"].backward()
    adams["critic"].step()
    assert_parameters(agent, reference, 1e-6)


def test_no_gradient_is_taken_of_another_group() -> None:
    agent: Any = TwoParts()
    updater = LocalUpdater(agent)
    updater.step(agent.actor_loss, two_parts_batch(), "actor")
    critic, actor = (updater.parts[name].of(updater.flat.gradient) for name in ("critic", "actor"))
    assert not critic.any()
    assert actor.any()


def test_counts_of_all_groups_are_saved() -> None:
    agent: Any = TwoParts()
    updater = LocalUpdater(agent)
    updater.step(agent.actor_loss, two_parts_batch(), "actor")
    again = LocalUpdater(agent)
    again.load_state_dict(updater.state_dict())
    assert [float(part.steps) for part in again.parts.values()] == [0, 1]


def test_numbers_too_small_to_be_normal_are_zero_in_a_step_and_nowhere_else() -> None:
    agent, (batch, *_) = make_agent()
    updater = updater_of(agent)
    updater._moments["mean"].fill_(1e-40)
    updater._moments["square"].fill_(1e-40)

    def still(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"all": updater.flat.value.sum() * 0 + sum(p.sum() * 0 for p in agent.parameters())}, {}

    updater.step(still, batch, "all")
    assert not updater._moments["mean"].any()
    assert not updater._moments["square"].any()
    assert torch.tensor(2e-38).mul(0.1) > 0


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop", "sgd"])
def test_optimizers_are_torchs(optimizer: Any, decay: float, compiled: bool) -> None:
    torch.manual_seed(0)
    agent: Any = TwoParts()
    agent.parameter_groups = lambda: {"critic": Group(tuple(agent.critic.parameters()), 1e-2, 0.0, decay, optimizer)}
    reference = copy.deepcopy(agent)
    kinds: Any = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
        "sgd": torch.optim.SGD,
    }
    theirs = kinds[optimizer](reference.critic.parameters(), lr=1e-2, weight_decay=decay)
    ours = LocalUpdater(agent)
    if compiled:
        ours.compile(on_failure=pytest.fail)
    for _ in range(5):
        ours.step(agent.critic_loss, two_parts_batch(), "critic")
        theirs.zero_grad()
        reference.critic_loss(two_parts_batch())[0]["critic"].backward()
        theirs.step()
        assert_parameters(agent, reference, 1e-6)
    again = LocalUpdater(agent)
    again.load_state_dict(ours.state_dict())
    again.step(agent.critic_loss, two_parts_batch(), "critic")
    theirs.zero_grad()
    reference.critic_loss(two_parts_batch())[0]["critic"].backward()
    theirs.step()
    assert_parameters(agent, reference, 1e-6)


def test_a_gradient_and_its_application_are_a_step() -> None:
    torch.manual_seed(0)
    agent: Any = TwoParts()
    reference = copy.deepcopy(agent)
    ours, whole = LocalUpdater(agent), LocalUpdater(reference)
    for _ in range(3):
        before = ours.parameters("critic").clone()
        gradient, metrics = ours.gradient(agent.critic_loss, two_parts_batch(), "critic")
        assert torch.equal(ours.parameters("critic"), before)
        expected = whole.step(reference.critic_loss, two_parts_batch(), "critic")
        torch.testing.assert_close(metrics | ours.apply(gradient, "critic"), expected, rtol=0, atol=0)
        assert torch.equal(ours.parameters("critic"), whole.parameters("critic"))
    ours.parameters("actor").zero_()
    assert not agent.actor.weight.any()
    assert agent.critic.weight.any()
    before = ours.parameters("critic").clone()
    ours.apply(gradient * torch.nan, "critic")
    assert torch.equal(ours.parameters("critic"), before)
    assert not math.isfinite(ours.pop_gradient_norms()[-1])


def test_groups_have_clipping_of_their_own_and_a_wrong_name_gets_a_sentence() -> None:
    agent: Any = TwoParts()
    critic, actor = (tuple(x.parameters()) for x in (agent.critic, agent.actor))
    agent.parameter_groups = lambda: {"critic": Group(critic, 1.0, 1e-3, 0.0, "sgd"), "actor": Group(actor, 1.0)}
    updater = LocalUpdater(agent)
    before = updater.parameters("critic").clone()
    updater.step(agent.critic_loss, two_parts_batch(), "critic")
    assert float((updater.parameters("critic") - before).norm()) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(UserError, match='TwoParts has no parameter group "all", only "critic", "actor"'):
        updater.step(agent.critic_loss, two_parts_batch(), "all")


def test_gradients_are_those_of_autograd() -> None:
    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    found = gradients((x * y.sin()).sum(), (x, y, z))
    torch.testing.assert_close(found[:2], torch.autograd.grad((x * y.sin()).sum(), (x, y)))
    assert found[2] is None
    with pytest.raises(UserError, match="does not depend on any trainable parameter"):
        gradients(torch.ones(()), (x,))
