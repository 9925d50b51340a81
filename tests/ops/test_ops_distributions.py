# mypy: disable-error-code="no-untyped-call,arg-type"
"""Distributions against torch.distributions, against numerical integrals, and samples against moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributions as D

from ludus.ops import distributions as ops

SIZES = [(3, 3), (2, 5, 1, 3)]
DRAWS = 40_000


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-7) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def mean_is(samples: Tensor, mean: Tensor) -> None:
    """Assert that the mean over the first dimension is within four standard errors."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert ((samples.mean(0) - mean).abs() <= 4 * error + 1e-12).all()


def moments_are(samples: Tensor, mean: Tensor, variance: Tensor) -> None:
    mean_is(samples, mean)
    mean_is((samples - mean).square(), variance)


# Categorical.


def test_categorical_against_torch() -> None:
    logits, other = 3 * randn(4, 5, 6), randn(4, 5, 6, seed=1)
    p, q = D.Categorical(logits=logits), D.Categorical(logits=other)
    action = torch.arange(20).reshape(4, 5) % 6
    close(ops.categorical_log_prob(logits, action), p.log_prob(action))
    close(ops.categorical_entropy(logits), p.entropy())
    close(ops.categorical_kl(logits, other), D.kl_divergence(p, q))
    assert torch.equal(ops.categorical_mode(logits), p.probs.argmax(-1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_straight_through_sample_is_hard_with_a_soft_gradient(temperature: float) -> None:
    """d soft_i / d logit_j = soft_i (1[i = j] − soft_j) / τ, in numpy."""
    logits, noise, slope = (3 * randn(6, 4)).requires_grad_(), ops.gumbel(rand(6, 4)), randn(6, 4, seed=1)
    sample = ops.straight_through_sample(logits, noise, temperature)
    assert sample.argmax(-1).equal(ops.categorical_sample(logits, noise))
    torch.testing.assert_close(sample.detach(), torch.eye(4).double()[sample.argmax(-1)])
    z = np.exp((logits + noise).detach().numpy() / temperature)
    soft = z / z.sum(-1, keepdims=True)
    expected = soft * (slope.numpy() - (soft * slope.numpy()).sum(-1, keepdims=True)) / temperature
    (found,) = torch.autograd.grad((sample * slope).sum(), logits)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_categorical_samples_have_the_right_frequencies() -> None:
    logits = ops.mask_logits(torch.tensor([2.0, 0.0, -1.0, 5.0]).double(), torch.tensor([1, 1, 1, 0]))
    samples = ops.categorical_sample(logits, ops.gumbel(rand(DRAWS, 4)))
    assert samples.dtype == torch.int64
    mean_is(torch.nn.functional.one_hot(samples, 4).double(), logits.softmax(-1))
    assert samples.max() == 2


@given(st.lists(st.floats(-50, 50), min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
@settings(deadline=None)
def test_masked_choices_have_no_effect(values: list[float], allowed: list[bool]) -> None:
    allowed = [*allowed[:4], True]
    logits, mask = torch.tensor(values, dtype=torch.float64, requires_grad=True), torch.tensor(allowed)
    masked = ops.mask_logits(logits, mask)
    small = logits.detach()[mask]
    close(ops.categorical_entropy(masked), ops.categorical_entropy(small))
    close(ops.categorical_kl(masked, masked + randn(5)), ops.categorical_kl(small, (small + randn(5)[mask])))
    assert (masked.softmax(-1)[~mask] == 0).all()
    total = ops.categorical_entropy(masked) + ops.categorical_log_prob(masked, torch.tensor(4))
    (gradient,) = torch.autograd.grad(total, logits)
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()
    assert mask[ops.categorical_sample(masked, ops.gumbel(rand(100, 5)))].all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_of_any_dtype_and_all_zero(dtype: torch.dtype) -> None:
    logits = torch.tensor([1.0, 2.0], requires_grad=True)
    masked = ops.mask_logits(logits, torch.zeros(2, dtype=dtype))
    entropy = ops.categorical_entropy(masked)
    assert entropy.item() == pytest.approx(math.log(2))
    assert torch.equal(torch.autograd.grad(entropy, logits)[0], torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_is_finite_at_0_and_1_and_has_the_right_moments(dtype: torch.dtype) -> None:
    edges = ops.gumbel(torch.tensor([0.0, 1.0], dtype=dtype))
    assert edges.dtype == dtype
    assert edges.isfinite().all()
    assert edges[0] < -4
    assert edges[1] > 16
    noise = ops.gumbel(rand(DRAWS, dtype=dtype)).double()
    moments_are(noise, torch.tensor(0.5772156649).double(), torch.tensor(math.pi**2 / 6).double())


# Several choices, padded to one categorical.


@pytest.mark.parametrize("sizes", SIZES)
def test_padded_choices_against_torch(sizes: tuple[int, ...]) -> None:
    logits, other = randn(7, sum(sizes)), randn(7, sum(sizes), seed=1)
    padded = ops.pad_choices(logits, sizes)
    ps = [D.Categorical(logits=x) for x in logits.split(sizes, -1)]
    qs = [D.Categorical(logits=x) for x in other.split(sizes, -1)]
    action = torch.stack([p.sample() for p in ps], -1)
    log_prob = sum(p.log_prob(a) for p, a in zip(ps, action.unbind(-1), strict=True))
    close(ops.categorical_log_prob(padded, action).sum(-1), log_prob)
    close(ops.categorical_entropy(padded).sum(-1), sum(p.entropy() for p in ps))
    kl = sum(D.kl_divergence(p, q) for p, q in zip(ps, qs, strict=True))
    close(ops.categorical_kl(padded, ops.pad_choices(other, sizes)).sum(-1), kl)
    mode = torch.stack([p.probs.argmax(-1) for p in ps], -1)
    assert torch.equal(ops.categorical_mode(padded), mode)


@pytest.mark.parametrize("sizes", SIZES)
def test_padded_choices_samples(sizes: tuple[int, ...]) -> None:
    logits = randn(sum(sizes))
    noise = ops.gumbel(rand(DRAWS, sum(sizes)))
    samples = ops.categorical_sample(ops.pad_choices(logits, sizes), ops.pad_choices(noise, sizes))
    assert samples.shape == (DRAWS, len(sizes))
    for sample, part in zip(samples.unbind(-1), logits.split(sizes), strict=True):
        mean_is(torch.nn.functional.one_hot(sample, len(part)).double(), part.softmax(-1))


@pytest.mark.parametrize("sizes", SIZES)
def test_padded_choices_mask(sizes: tuple[int, ...]) -> None:
    logits = randn(sum(sizes)).requires_grad_()
    mask = torch.ones(sum(sizes), dtype=torch.bool)
    mask[0] = False
    masked = ops.mask_logits(logits, mask)
    rest = D.Categorical(logits=logits.detach()[1 : sizes[0]]).entropy()
    rest = rest + sum(D.Categorical(logits=x).entropy() for x in logits.detach()[sizes[0] :].split(sizes[1:]))
    entropy = ops.categorical_entropy(ops.pad_choices(masked, sizes)).sum(-1)
    close(entropy.detach(), rest)
    (gradient,) = torch.autograd.grad(entropy, logits)
    assert gradient[0] == 0
    assert gradient.isfinite().all()


# Bernoulli.


def test_bernoulli_against_torch() -> None:
    logits, other = 4 * randn(6, 3), randn(6, 3, seed=1)
    p, q = D.Bernoulli(logits=logits), D.Bernoulli(logits=other)
    action = p.sample()
    for dtype in (torch.float64, torch.int64, torch.int8, torch.bool):
        close(ops.bernoulli_log_prob(logits, action.to(dtype)), p.log_prob(action).sum(-1))
    close(ops.bernoulli_entropy(logits), p.entropy().sum(-1))
    close(ops.bernoulli_kl(logits, other), D.kl_divergence(p, q).sum(-1))
    assert torch.equal(ops.bernoulli_mode(logits), (p.probs > 0.5).long())


def test_bernoulli_at_the_extremes_and_its_samples() -> None:
    sure = torch.tensor([[200.0, -200.0]], requires_grad=True)
    value = ops.bernoulli_entropy(sure) + ops.bernoulli_log_prob(sure, torch.tensor([1, 0]))
    assert value.item() == 0
    assert torch.autograd.grad(value.sum(), sure)[0].isfinite().all()
    logits = torch.tensor([0.0, 2.0, -3.0]).double()
    mean_is(ops.bernoulli_sample(logits, rand(DRAWS, 3)).double(), logits.sigmoid())


def test_masked_bits_are_fixed_without_entropy_or_gradient() -> None:
    logits = torch.tensor([0.3, -2.0, 5.0, 1.0]).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 0]])
    masked = ops.mask_bernoulli_logits(logits, mask)
    uniform = torch.rand(1000, 4, generator=torch.Generator().manual_seed(0))
    uniform[0], uniform[1] = 0.0, 1 - 2**-24
    drawn = ops.bernoulli_sample(masked, uniform)
    assert [set(column.tolist()) for column in drawn.T] == [{0, 1}, {0}, {1}, {0}]
    assert ops.bernoulli_mode(masked).tolist() == [1, 0, 1, 0]
    action = torch.tensor([1, 0, 1, 0])
    free = logits.detach()[:1]
    for ours, expected in (
        (ops.bernoulli_log_prob(masked, action), ops.bernoulli_log_prob(free, action[:1])),
        (ops.bernoulli_entropy(masked), ops.bernoulli_entropy(free)),
        (ops.bernoulli_kl(masked, ops.mask_bernoulli_logits(logits + 1, mask)), ops.bernoulli_kl(free, free + 1)),
    ):
        close(ours.detach(), expected)
        (gradient,) = torch.autograd.grad(ours, logits, retain_graph=True)
        assert gradient[1:].tolist() == [0, 0, 0]
        assert torch.isfinite(gradient).all()


# Gaussian.


@pytest.mark.parametrize("rows", [(5,), ()], ids=["std per row", "one std"])
def test_gaussian_against_torch(rows: tuple[int, ...]) -> None:
    mean, log_std, other, log_std_q = randn(5, 3), randn(*rows, 3, seed=1), randn(5, 3, seed=2), randn(*rows, 3, seed=3)
    p, q = D.Normal(mean, log_std.exp().expand(5, 3)), D.Normal(other, log_std_q.exp().expand(5, 3))
    action = randn(5, 3, seed=4)
    close(ops.gaussian_log_prob(mean, log_std, action), p.log_prob(action).sum(-1))
    close(ops.gaussian_entropy(mean, log_std), p.entropy().sum(-1))
    close(ops.gaussian_kl(mean, log_std, other, log_std_q), D.kl_divergence(p, q).sum(-1))
    assert torch.equal(ops.gaussian_mode(mean, log_std), mean)


def test_gaussian_samples() -> None:
    mean, log_std = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, -1.0]).double()
    moments_are(ops.gaussian_sample(mean, log_std, randn(DRAWS, 2)), mean, (2 * log_std).exp())


# Tanh-squashed Gaussian.


def test_tanh_gaussian_against_torch() -> None:
    mean, log_std = randn(5, 3), 0.3 * randn(5, 3, seed=1)
    u = randn(5, 3, seed=2)
    p = D.TransformedDistribution(D.Normal(mean, log_std.exp()), [D.TanhTransform(cache_size=1)])
    close(ops.tanh_gaussian_log_prob(mean, log_std, u), p.log_prob(u.tanh()).sum(-1))


def test_tanh_gaussian_draw_equals_sample_and_log_prob() -> None:
    parameters = [x.requires_grad_() for x in (randn(4, 3), 0.3 * randn(4, 3, seed=1))]
    normal, weight = randn(4, 3, seed=2), randn(4, seed=3)
    u = ops.gaussian_sample(*parameters, normal)
    apart = u, ops.tanh_gaussian_log_prob(*parameters, u)
    for ours, expected in zip(ops.tanh_gaussian_draw(*parameters, normal), apart, strict=True):
        close(ours, expected)
        by = weight if ours.dim() == 1 else normal
        gradients = [torch.autograd.grad((x * by).sum(), parameters, retain_graph=True) for x in (ours, expected)]
        for one, other in zip(*gradients, strict=True):
            close(one, other)
    far = ops.tanh_gaussian_draw(torch.tensor([-30.0, 30.0]), torch.zeros(2), torch.zeros(2))[1]
    close(
        far, ops.tanh_gaussian_log_prob(torch.tensor([-30.0, 30.0]), torch.zeros(2), torch.tensor([-30.0, 30.0])), 1e-6
    )


def test_tanh_gaussian_is_finite_for_large_u_in_float32() -> None:
    mean, log_std = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    for u in (-30.0, 30.0):
        log_prob = ops.tanh_gaussian_log_prob(mean, log_std, torch.tensor([u]))
        expected = -0.5 * u * u - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 30)
        assert log_prob.item() == pytest.approx(expected, rel=1e-6)
        assert all(g.isfinite().all() for g in torch.autograd.grad(log_prob, [mean, log_std]))


@pytest.mark.parametrize("std", [0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 10.0, 50.0])
@pytest.mark.parametrize("mean", [0.0, 0.01, 0.7, -2.0, 8.0, -40.0])
def test_tanh_gaussian_entropy_is_the_integral(mean: float, std: float) -> None:
    mu, log_std = (torch.tensor([x]).double().requires_grad_() for x in (mean, math.log(std)))
    z = torch.linspace(-10, 10, 50_001, dtype=torch.float64)
    u = (mu + log_std.exp() * z).unsqueeze(-1)
    log_density = ops.tanh_gaussian_log_prob(mu, log_std, u)  # of a = tanh(u); da = (1 − tanh²u) du
    expected = -torch.trapezoid(D.Normal(0.0, 1.0).log_prob(z).exp() * log_density, z)
    entropy = ops.tanh_gaussian_entropy(mu, log_std)
    close(entropy, expected, 2e-7)
    ours, theirs = (torch.autograd.grad(x, [mu, log_std]) for x in (entropy, expected))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, 1e-6)
    in_float32 = ops.tanh_gaussian_entropy(mu.float(), log_std.float())
    assert float(in_float32.detach()) == pytest.approx(float(expected.detach()), rel=1e-6, abs=2e-6)


def test_tanh_gaussian_entropy_shapes() -> None:
    entropy = ops.tanh_gaussian_entropy(randn(4, 5, 3), torch.zeros(3).double())
    assert entropy.shape == (4, 5)
    close(entropy[1, 2], ops.tanh_gaussian_entropy(randn(4, 5, 3)[1, 2], torch.zeros(3).double()))


# Beta.


def test_beta_against_torch() -> None:
    a, b, c, d = (0.5 + 5 * rand(6, 3, seed=s) for s in range(4))
    p, q = D.Beta(a, b), D.Beta(c, d)
    action = rand(6, 3, seed=9).clamp(1e-3, 1 - 1e-3)
    close(ops.beta_log_prob(a, b, action), p.log_prob(action).sum(-1))
    close(ops.beta_entropy(a, b), p.entropy().sum(-1))
    close(ops.beta_kl(a, b, c, d), D.kl_divergence(p, q).sum(-1))


def test_beta_mode_is_where_the_density_is_highest() -> None:
    a, b = 1 + 4 * rand(8, seed=1), 1 + 4 * rand(8, seed=2)
    grid = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    highest = grid[ops.beta_log_prob(a.reshape(-1, 1, 1), b.reshape(-1, 1, 1), grid.unsqueeze(-1)).argmax(-1)]
    close(ops.beta_mode(a, b), highest, 1e-4)
    one = torch.ones(1)
    assert ops.beta_mode(one, one).item() == 0.5
    assert ops.beta_mode(one, one + 1).item() == 0
    assert ops.beta_log_prob(one, one, torch.zeros(1)).item() == 0


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.0, 7.0), (2.5, 1.5), (60.0, 20.0), (300.0, 1.2)])
def test_beta_samples(alpha: float, beta: float) -> None:
    a, b = torch.tensor([alpha]).double(), torch.tensor([beta]).double()
    samples = ops.beta_sample(a, b, torch.stack([randn(DRAWS, 1, 2, 8), rand(DRAWS, 1, 2, 8, seed=1)], -1))
    p = D.Beta(a, b)
    assert samples.shape == (DRAWS, 1)
    moments_are(samples, p.mean, p.variance)
    log_prob = ops.beta_log_prob(a, b, samples)
    mean_is(-log_prob, ops.beta_entropy(a, b).squeeze())


def test_beta_samples_exclude_0_and_1() -> None:
    normal = torch.zeros(3, 1, 2, 8)
    normal[0], normal[1, :, 0], normal[1, :, 1], normal[2] = -9, 9, -9, 9
    uniform = torch.full((3, 1, 2, 8), 0.9999999)
    one = torch.ones(3, 1)
    samples = ops.beta_sample(one, one, torch.stack([normal, uniform], -1))
    assert ((samples > 0) & (samples < 1)).all()
    assert ops.beta_log_prob(one + 4, one + 4, samples).isfinite().all()


# All of them.


def integrals() -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Density by name: points to integrate over, and the log-density there."""
    line, unit = (
        torch.linspace(-12, 12, 40_001, dtype=torch.float64),
        torch.linspace(1e-9, 1 - 1e-9, 200_001, dtype=torch.float64),
    )
    one = torch.ones(1).double()
    open_unit = torch.linspace(-1 + 1e-9, 1 - 1e-9, 200_001, dtype=torch.float64)
    return {
        "gaussian": (line, lambda x: ops.gaussian_log_prob(0.7 * one, -0.4 * one, x)),
        "tanh": (open_unit, lambda x: ops.tanh_gaussian_log_prob(0.3 * one, -1.0 * one, x.atanh())),
        "beta": (unit, lambda x: ops.beta_log_prob(2.3 * one, 1.7 * one, x)),
    }


@pytest.mark.parametrize("name", ["gaussian", "tanh", "beta"])
def test_density_integrates_to_one(name: str) -> None:
    x, log_density = integrals()[name]
    total = torch.trapezoid(log_density(x.unsqueeze(-1)).exp(), x)
    assert total.item() == pytest.approx(1, abs=1e-5)


def parameters(name: str, seed: int) -> tuple[Tensor, ...]:
    positive = name == "beta"
    pieces = 1 if name in ("categorical", "bernoulli") else 2
    xs = (randn(4, 3, seed=10 * seed + i) for i in range(pieces))
    return tuple((1 + x.abs() if positive else x).requires_grad_() for x in xs)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian", "tanh_gaussian", "beta"])
def test_kl_and_gradients(name: str) -> None:
    p, q = parameters(name, 1), parameters(name, 2)
    kl = getattr(ops, f"{name.removeprefix('tanh_')}_kl")  # invariant under bijections
    entropy, log_prob = (getattr(ops, f"{name}_{what}") for what in ("entropy", "log_prob"))
    assert kl(*p, *q).shape == (4,)
    assert (kl(*p, *q) > 0).all()
    close(kl(*p, *p), torch.zeros(4).double())
    action = torch.tensor([0, 2, 1, 1]) if name == "categorical" else rand(4, 3)
    action = action.round() if name == "bernoulli" else action
    assert torch.autograd.gradcheck(kl, (*p, *q))
    assert torch.autograd.gradcheck(entropy, p)
    assert torch.autograd.gradcheck(lambda *x: log_prob(*x, action), p)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian", "tanh_gaussian", "beta"])
def test_float32_stays_float32(name: str) -> None:
    p = tuple(x.detach().float() for x in parameters(name, 1))
    action = torch.zeros(4, dtype=torch.int64) if name == "categorical" else torch.full((4, 3), 0.5)
    results = [getattr(ops, f"{name}_entropy")(*p), getattr(ops, f"{name}_log_prob")(*p, action)]
    assert all(x.dtype == torch.float32 and x.shape == (4,) for x in results)


def test_categorical_terms_are_log_probability_and_entropy() -> None:
    logits, action = torch.randn(5, 6, 4, dtype=torch.float64), torch.randint(4, (5, 6))
    expected = D.Categorical(logits=logits)
    torch.testing.assert_close(ops.categorical_terms(logits, action), (expected.log_prob(action), expected.entropy()))


@pytest.mark.parametrize("choices", [2, 7])
def test_the_perplexity_of_equally_likely_choices_is_their_number(choices: int) -> None:
    entropy = ops.categorical_entropy(torch.zeros(3, choices, dtype=torch.float64))
    torch.testing.assert_close(ops.perplexity(entropy), torch.full((3,), float(choices), dtype=torch.float64))
