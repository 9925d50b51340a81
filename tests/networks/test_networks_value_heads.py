"""Q-value heads against numpy in float64: shapes, gradients, terminal states, tracing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec
from ludus.core.step import Episode
from ludus.core.types import Tensors
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.noisy import noisy_layers
from ludus.networks.target import TargetNetworks
from ludus.networks.value_heads import (
    CategoricalValue,
    ExpectedValue,
    ImplicitQuantileValue,
    QuantileValue,
    ValueHead,
    ValueKind,
    make_value_head,
)

T, B, A, N = 2, 5, 3, 7
KINDS: tuple[ValueKind, ...] = ("expected", "categorical", "quantile", "implicit")
Array = NDArray[np.float64]


def make(kind: ValueKind, dueling: bool = False, **more: Any) -> ValueHead:
    torch.manual_seed(0)
    return make_value_head(kind, A, dueling, N, -2.0, 4.0, **more)


def outputs(head: ValueHead, seed: int = 0) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(T, B, *shape, generator=rng) for name, shape in head.outputs.items()}


def numbers(seed: int = 1) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "action": torch.randint(A, (T, B), generator=rng),
        "reward": torch.randn(T, B, generator=rng),
        "discount": 0.9 * torch.randint(2, (T, B), generator=rng),
        "taus": torch.rand(T, B, N, generator=rng),
        "taus_t": torch.rand(T, B, N + 1, generator=rng),
    }


def array(x: Tensor) -> Array:
    return x.detach().double().numpy()


def all_actions(head: ValueHead, given: Tensors) -> Array:
    """Return the outputs of all actions, [T, B, A, n], with n = 1 for expected values."""
    n = 1 if isinstance(head, ExpectedValue) else N
    if "q" in given:
        return array(given["q"]).reshape(T, B, A, n)
    value, advantage = array(given["value"]).reshape(T, B, 1, n), array(given["advantage"]).reshape(T, B, A, n)
    return value + advantage - advantage.mean(2, keepdims=True)


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def pick(x: Array, action: Tensor) -> Array:
    return np.take_along_axis(x, action.numpy()[..., None, None], 2)[:, :, 0]


def learn(head: ValueHead, now: Tensors, after: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return target, loss and priority of one batch."""
    x = numbers()
    target = head.target(after, (x["action"] + 1) % A, x["reward"], x["discount"], x["taus_t"])
    prediction = head.evaluate(now, x["action"], x["taus"])
    loss = head.loss(prediction, target, x["taus"])
    return target, loss, head.priority(prediction.detach(), target, loss.detach())


def quantile_huber(theta: Array, target: Array, taus: Array) -> Array:
    delta = target[..., None, :] - theta[..., :, None]
    loss = np.where(np.abs(delta) <= 1, 0.5 * delta**2, np.abs(delta) - 0.5)
    found: Array = (np.abs(taus[..., :, None] - (delta < 0)) * loss).mean(-1).sum(-1)
    return found


def close(given: Tensor, expected: Array) -> None:
    torch.testing.assert_close(given.double(), torch.from_numpy(np.ascontiguousarray(expected)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dueling", [False, True])
def test_expected_values(dueling: bool) -> None:
    head, x = make("expected", dueling), numbers()
    now, after = outputs(head), outputs(head, 1)
    q, q_t = all_actions(head, now)[..., 0], all_actions(head, after)
    close(head.q(now), q)
    target, loss, priority = learn(head, now, after)
    expected = array(x["reward"]) + array(x["discount"]) * pick(q_t, (x["action"] + 1) % A)[..., 0]
    close(target, expected)
    error = expected - pick(all_actions(head, now), x["action"])[..., 0]
    close(loss, np.where(np.abs(error) <= 1, 0.5 * error**2, np.abs(error) - 0.5))
    close(priority, np.abs(error))


@pytest.mark.parametrize("dueling", [False, True])
def test_categorical_values(dueling: bool) -> None:
    head, x = make("categorical", dueling), numbers()
    now, after = outputs(head), outputs(head, 1)
    support = np.linspace(-2, 4, N)
    close(head.q(now), softmax(all_actions(head, now)) @ support)
    target, loss, priority = learn(head, now, after)
    p = softmax(pick(all_actions(head, after), (x["action"] + 1) % A))
    places = np.clip(array(x["reward"])[..., None] + array(x["discount"])[..., None] * support, -2, 4)
    share = np.clip(1 - np.abs(places[..., None, :] - support[:, None]) / (support[1] - support[0]), 0, 1)
    expected = (share * p[..., None, :]).sum(-1)
    close(target, expected)
    cross = -(expected * np.log(softmax(pick(all_actions(head, now), x["action"])))).sum(-1)
    close(loss, cross)
    close(priority, cross + (expected * np.log(np.maximum(expected, 1e-300))).sum(-1))


@pytest.mark.parametrize("dueling", [False, True])
def test_quantile_values(dueling: bool) -> None:
    head, x = make("quantile", dueling), numbers()
    now, after = outputs(head), outputs(head, 1)
    close(head.q(now), all_actions(head, now).mean(-1))
    target, loss, priority = learn(head, now, after)
    expected = pick(all_actions(head, after), (x["action"] + 1) % A) * array(x["discount"])[..., None]
    expected += array(x["reward"])[..., None]
    close(target, expected)
    theta = pick(all_actions(head, now), x["action"])
    close(loss, quantile_huber(theta, expected, (2 * np.arange(N) + 1) / (2 * N)))
    close(priority, np.abs(expected.mean(-1) - theta.mean(-1)))


def implicit(head: Any, given: Tensors, taus: Tensor) -> Array:
    """Return the quantiles [T, B, n, A], computed from the parameters by the paper's equations."""

    def stream(layers: Any, x: Array) -> Array:
        x = np.maximum(x @ array(layers.hidden.weight).T + array(layers.hidden.bias), 0)
        return x @ array(layers.last.weight).T + array(layers.last.bias)

    cosines = np.cos(np.pi * np.arange(64) * array(taus)[..., None])
    level = np.maximum(cosines @ array(head.embedding.weight).T + array(head.embedding.bias), 0)
    x = np.maximum(array(given["features"]), 0)[:, :, None] * level
    found = stream(head.choices, x)
    if head.value is None:
        return found
    return stream(head.value, x) + found - found.mean(-1, keepdims=True)


@pytest.mark.parametrize("dueling", [False, True])
def test_implicit_values(dueling: bool) -> None:
    head, x = make("implicit", dueling), numbers()
    now, after = outputs(head), outputs(head, 1)
    close(head.q(now, x["taus"]), implicit(head, now, x["taus"]).mean(2))
    fixed = ((torch.arange(32) + 0.5) / 32).expand(T, B, 32)
    close(head.q(now), implicit(head, now, fixed).mean(2))
    target, loss, priority = learn(head, now, after)
    expected = pick(implicit(head, after, x["taus_t"]).swapaxes(2, 3), (x["action"] + 1) % A)
    expected = array(x["reward"])[..., None] + array(x["discount"])[..., None] * expected
    close(target, expected)
    assert target.shape == (T, B, N + 1)
    theta = pick(implicit(head, now, x["taus"]).swapaxes(2, 3), x["action"])
    close(loss, quantile_huber(theta, expected, array(x["taus"])))
    close(priority, np.abs(expected.mean(-1) - theta.mean(-1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dueling", [False, True])
def test_terminal_states_need_no_next_state_and_targets_have_no_gradient(kind: ValueKind, dueling: bool) -> None:
    head, x = make(kind, dueling), numbers()
    assert set(x["discount"].flatten().tolist()) > {0.0}
    now = {name: y.requires_grad_() for name, y in outputs(head).items()}
    clean = {name: y.requires_grad_() for name, y in outputs(head, 1).items()}
    ended = (x["discount"] == 0).unsqueeze(-1)
    with_nan = {name: y.detach().masked_fill(ended, torch.nan).requires_grad_() for name, y in clean.items()}
    for after in (clean, with_nan):
        target, loss, priority = learn(head, now, after)
        assert target.isfinite().all()
        assert not target.requires_grad
        assert not priority.requires_grad
        assert loss.shape == priority.shape == (T, B)
        (loss + priority).sum().backward()  # type: ignore[no-untyped-call]
        assert all(y.grad is None for y in after.values())
        held = target.clone().requires_grad_()  # even if the target requires grad
        head.loss(head.evaluate(now, x["action"], x["taus"]), held, x["taus"]).sum().backward()  # type: ignore[no-untyped-call]
        assert held.grad is None
        assert all(y.grad is not None and y.grad.isfinite().all() and y.grad.any() for y in now.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dueling", [False, True])
def test_traced_function_matches_on_other_inputs(kind: ValueKind, dueling: bool) -> None:
    head = make(kind, dueling)
    fixed = dict(head.named_parameters()) | dict(head.named_buffers())

    def total(now: Tensors, after: Tensors, x: Tensors) -> Tensor:
        target = head.target(after, head.q(after).argmax(-1), x["reward"], x["discount"], x["taus_t"])
        prediction = head.evaluate(now, x["action"], x["taus"])
        loss = head.loss(prediction, target, x["taus"])
        priority = head.priority(prediction.detach(), target, loss.detach())
        return loss.sum() + priority.sum()

    step = torch.func.grad(total)
    traced = make_fx(step)(outputs(head), outputs(head, 1), numbers())
    again = outputs(head, 2), outputs(head, 3), numbers(4)
    torch.testing.assert_close(traced(*again), step(*again))
    assert fixed.keys() == (dict(head.named_parameters()) | dict(head.named_buffers())).keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_heads_match_the_networks_built_for_them(kind: ValueKind, dueling: bool, noisy: bool) -> None:
    head = make(kind, dueling, noisy=noisy)
    spec = NetworkSpec({"observation": (4,)}, head.outputs, streams=head.streams, noisy=noisy)
    network = build_network(NetworkConfig(), spec)
    target = TargetNetworks({"q": network, "head": head})
    first = torch.zeros(T, B, dtype=torch.bool)
    given = network({"observation": torch.randn(T, B, 4)}, HiddenState(), first)[0]
    assert head.q(given).shape == (T, B, A)
    copy: Any = target.networks["head"]
    torch.testing.assert_close(copy.q(given), head.q(given))
    target_, loss, _ = learn(head, given, given)
    assert not target_.requires_grad
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.any() for m in (network, head) for p in m.parameters())
    assert len(noisy_layers(head)) == (2 * (1 + dueling) if kind == "implicit" and noisy else 0)
    assert head.streams == (dueling and kind != "implicit")


@pytest.mark.parametrize("kind", ["quantile", "implicit"])
def test_quantiles_of_a_known_distribution_are_learned(kind: ValueKind) -> None:
    head: Any = make(kind)
    rng = torch.Generator().manual_seed(0)
    given = {name: torch.zeros(1, *shape) + 0.5 for name, shape in head.outputs.items()}
    given = {name: y.requires_grad_() for name, y in given.items()}
    optimizer = torch.optim.Adam([*given.values(), *head.parameters()], lr=0.01)
    action = torch.zeros(1, dtype=torch.long)
    seen = ((torch.arange(64) + 0.5) / 64).unsqueeze(0)  # uniform in [0, 1]
    for i in range(400):
        taus = torch.rand(1, 32, generator=rng)
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - i / 400)
        optimizer.zero_grad()
        head.loss(head.evaluate(given, action, taus), seen, taus).sum().backward()
        optimizer.step()
    levels = torch.tensor([[0.1, 0.3, 0.5, 0.7, 0.9]])
    if isinstance(head, QuantileValue):
        found, levels = head.evaluate(given, action), head.taus
    else:
        found = head.evaluate(given, action, levels)
    # no error is larger than κ = 1, so these are expectiles: where τ E(x − e)₊ = (1 − τ) E(e − x)₊
    expected = levels.flatten().sqrt() / (levels.flatten().sqrt() + (1 - levels.flatten()).sqrt())
    torch.testing.assert_close(found.flatten().detach(), expected, atol=0.05, rtol=0)


def test_return_outside_the_support_warns_once() -> None:
    head = make("categorical")  # from -2 to 4

    def warn(total: float, length: int) -> str:
        return head.episode_warning([Episode(0, total, length, None, {})], 0.9)

    assert warn(4.0, 1) == warn(-2.0, 1) == warn(4.6, 5) == ""  # 4.6 over 5 steps: 3.8 discounted
    warning = warn(100.0, 100)
    assert "100 steps" in warning
    assert "about 10" in warning
    assert "-2 to 4" in warning
    assert warn(100.0, 100) == ""


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"agent.atoms is 1"):
        CategoricalValue(A, 1, -1.0, 1.0)
    with pytest.raises(UserError, match=r"agent.v_min is 3.*agent.v_max, 3"):
        CategoricalValue(A, 5, 3.0, 3.0)
    with pytest.raises(ValueError, match="taus"):
        make("implicit").evaluate(outputs(make("implicit")), numbers()["action"])
    assert ImplicitQuantileValue.needs_taus
    assert not QuantileValue.needs_taus
