import math

import numpy as np
import pytest
import torch

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.exploration import NOISES
from ludus.exploration.action_noise import OU, ActionNoise, UniformNoise, make_action_noise, noise_class

STEPS, BATCH, SIZE = 20_000, 4, 3
N = STEPS * BATCH * SIZE


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def run(noise, steps=STEPS, batch=BATCH, size=SIZE, seed=0, first=None):
    """Return the noise added to an action of 0, ``[steps, B, K]``."""
    drawn, state = noise.draw(steps, batch, size, generator(seed)), noise.initial_state(batch, size)
    action, added = torch.zeros(batch, size), []
    first = torch.zeros(steps, batch, dtype=torch.bool) if first is None else first
    for t in range(steps):
        noisy, state = noise.apply(action, drawn[t], state, first[t])
        added.append(noisy)
    assert not action.any()  # the policy's action is unchanged
    return torch.stack(added).double().numpy()


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def clipped_variance(clip):
    """Return E[min(z², c²)] = P(|z| < c) − 2cφ(c) + c²·P(|z| > c)."""
    inside = 2 * normal_cdf(clip) - 1
    return inside - 2 * clip * math.exp(-(clip**2) / 2) / math.sqrt(2 * math.pi) + clip**2 * (1 - inside)


def check_moments(x, variance, kurtosis):
    """Check mean and variance of i.i.d. numbers within 4 sigma; ``kurtosis`` is E x⁴ / (E x²)²."""
    n = x.size
    assert abs(x.mean()) < 4 * math.sqrt(variance / n)
    assert abs(np.square(x).mean() / variance - 1) < 4 * math.sqrt((kurtosis - 1) / n)


@pytest.mark.parametrize(
    ("kind", "variance", "kurtosis"),
    [("normal", 1.0, 3.0), ("uniform", 1 / 3, 9 / 5), ("clipped_normal", clipped_variance(2.5), 3.0)],
)
def test_moments(kind, variance, kurtosis):
    sigma = 0.05
    x = run(make_action_noise(kind, sigma, clip=2.5))
    check_moments(x / sigma, variance, kurtosis)
    for row in range(BATCH):
        check_moments(x[:, row] / sigma, variance, kurtosis)
    for element in range(SIZE):
        check_moments(x[:, :, element] / sigma, variance, kurtosis)


@pytest.mark.parametrize("kind", NOISES)
def test_rows_elements_and_steps_are_independent(kind):
    x = run(make_action_noise(kind, 0.05, theta=1.0)).reshape(STEPS, -1)  # with θ·dt = 1, OU noise is independent too
    correlation = np.corrcoef(x.T) - np.eye(BATCH * SIZE)
    assert np.abs(correlation).max() < 4.5 / math.sqrt(STEPS)  # of 66 pairs
    lagged = (x[1:] * x[:-1]).mean() / x.var()
    assert abs(lagged) < 4 / math.sqrt(x[1:].size)


@pytest.mark.parametrize("clip", [0.5, 1.0, 2.5])
def test_clipped_normal_clips(clip):
    sigma = 0.1
    x = run(make_action_noise("clipped_normal", sigma, clip=clip)) / sigma
    assert np.abs(x).max() <= clip * (1 + 1e-6)
    at_bound = np.abs(x) > clip * (1 - 1e-6)  # clipped, not drawn again
    share = 2 * (1 - normal_cdf(clip))
    assert abs(at_bound.mean() - share) < 4 * math.sqrt(share * (1 - share) / N)
    assert abs(np.square(x).mean() - clipped_variance(clip)) < 4 * np.square(x).std() / math.sqrt(N)
    raw = run(make_action_noise("normal", sigma)) / sigma  # the same numbers otherwise
    np.testing.assert_allclose(x, raw.clip(-clip, clip), rtol=1e-5)


def test_uniform_covers_its_range():
    x = run(make_action_noise("uniform", 0.2)) / 0.2
    assert np.abs(x).max() <= 1 + 1e-6
    counts = np.histogram(x, bins=20, range=(-1, 1))[0]
    chi_square = np.square(counts - counts.mean()).sum() / counts.mean()
    assert chi_square < 19 + 4 * math.sqrt(2 * 19) + 10  # far in the tail with 19 degrees of freedom


def test_clipped_fraction_at_the_action_bounds():
    noise, sigma = make_action_noise("normal", 0.5), 0.5
    drawn = noise.draw(STEPS, BATCH, SIZE, generator(1)).flatten(0, 1)
    action = torch.full_like(drawn, 0.8)
    noisy, _ = noise.apply(action, drawn, HiddenState(), torch.zeros(len(drawn), dtype=torch.bool))
    assert noisy.abs().max() == 1
    for bound, share in ((1.0, 1 - normal_cdf(0.2 / sigma)), (-1.0, normal_cdf(-1.8 / sigma))):
        found = float((noisy == bound).double().mean())
        assert abs(found - share) < 4 * math.sqrt(share / N)


def test_ornstein_uhlenbeck_matches_the_equation():
    sigma, theta, steps = 0.03, 0.3, 50
    noise = make_action_noise("ornstein_uhlenbeck", sigma, theta=theta)
    first = torch.zeros(steps, BATCH, dtype=torch.bool)
    first[0], first[20, 1], first[33, 2:] = True, True, True
    added = run(noise, steps, first=first)
    epsilon = noise.draw(steps, BATCH, SIZE, generator()).double().numpy()
    x = np.zeros((BATCH, SIZE))
    for t in range(steps):
        x[first[t].numpy()] = 0
        x = x - theta * x + sigma * epsilon[t]
        np.testing.assert_allclose(added[t], x, atol=1e-6)


@pytest.mark.parametrize("theta", [0.15, 0.5])
def test_ornstein_uhlenbeck_stationary_variance_and_correlation(theta):
    sigma, burn_in, batch = 0.05, 200, 100
    x = run(make_action_noise("ornstein_uhlenbeck", sigma, theta=theta), 3_000, batch, 1)[burn_in:, :, 0]
    keeps = 1 - theta
    variance = sigma**2 / (2 * theta - theta**2)
    # rows are independent, so the spread of their estimates gives the error
    spread, error = np.square(x).mean(0), 4 / math.sqrt(batch)
    assert abs(spread.mean() - variance) < error * spread.std()
    for lag in (1, 2, 5, 10):
        products = (x[lag:] * x[:-lag]).mean(0)
        assert abs(products.mean() - variance * keeps**lag) < error * products.std()
    means = x.mean(0)
    assert abs(means.mean()) < error * means.std()
    correlation = np.corrcoef(x.T)[np.triu_indices(batch, 1)]
    assert abs(correlation.mean()) < 4 * correlation.std() / math.sqrt(len(correlation))


def test_ornstein_uhlenbeck_restarts_at_0_where_first():
    noise = make_action_noise("ornstein_uhlenbeck", 0.02, theta=0.01)
    batch, steps = 2_000, 60
    first = torch.zeros(steps, batch, dtype=torch.bool)
    first[40, : batch // 2] = True
    x = run(noise, steps, batch, 1, first=first)[:, :, 0]
    restarted, went_on = x[:, : batch // 2], x[:, batch // 2 :]
    for t, rows, age in ((0, x, 1), (39, x, 40), (40, restarted, 1), (40, went_on, 41), (59, restarted, 20)):
        variance = 0.02**2 * (1 - 0.99 ** (2 * age)) / (1 - 0.99**2)
        margin = 4 * variance * math.sqrt(2 / rows.shape[1])
        assert abs(np.square(rows[t]).mean() - variance) < margin, (t, age)
    before_and_after = np.corrcoef(restarted[39], restarted[40])[0, 1]
    assert abs(before_and_after) < 4 / math.sqrt(batch // 2)
    assert np.corrcoef(went_on[39], went_on[40])[0, 1] > 0.95


def test_apply_keeps_other_hidden_states_and_changes_nothing_in_place():
    noise = make_action_noise("ornstein_uhlenbeck", 0.1)
    lstm = torch.ones(2, 5)
    before = HiddenState({"actor/body/h": lstm}) | noise.initial_state(2, 3)
    before = HiddenState(before)
    drawn = noise.draw(1, 2, 3, generator())[0]
    _, after = noise.apply(torch.zeros(2, 3), drawn, before, torch.tensor([False, True]))
    assert isinstance(after, HiddenState)
    assert after["actor/body/h"] is lstm
    assert not before[OU].any()
    assert after[OU].all()
    half = noise.apply(torch.zeros(1, 3), drawn[1:], before.rows(slice(1, 2)), torch.tensor([True]))[1]
    assert torch.equal(half[OU], after[OU][1:])  # same for a group of rows
    for kind in ("normal", "clipped_normal", "uniform"):
        other = make_action_noise(kind, 0.1)
        assert other.initial_state(2, 3) == {}
        assert other.apply(torch.zeros(2, 3), drawn, before, torch.zeros(2, dtype=torch.bool))[1] is before


@pytest.mark.parametrize("kind", NOISES)
def test_sigma_changes_linearly(kind):
    noise = make_action_noise(kind, 0.4, 0.1)
    drawn = noise.draw(1, 2, 3, generator())[0]
    added = []
    for progress, level in ((0.0, 0.4), (0.5, 0.25), (1.0, 0.1), (1.5, 0.1)):
        assert noise.update(progress) == pytest.approx(level)
        noisy, _ = noise.apply(torch.zeros(2, 3), drawn / 10, noise.initial_state(2, 3), torch.ones(2).bool())
        added.append(noisy / level)  # also applies to noise drawn before
    for other in added[1:]:
        torch.testing.assert_close(other, added[0])
    assert make_action_noise(kind, 0.4).update(1.0) == 0.4


@pytest.mark.parametrize("kind", NOISES)
def test_same_generator_gives_the_same_noise(kind):
    noise = make_action_noise(kind, 0.1)
    assert noise.draw(5, 2, 3, generator()).shape == (5, 2, 3)
    np.testing.assert_array_equal(run(noise, 50), run(noise, 50))
    assert (run(noise, 50) != run(noise, 50, seed=1)).mean() > 0.9


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "normal", "sigma": -0.1}, "agent.noise_sigma is -0.1; it must be 0 or greater."),
        ({"kind": "uniform", "sigma": math.inf}, "agent.noise_sigma is inf; it must be a finite number."),
        ({"kind": "normal", "sigma_end": -1.0}, "agent.noise_sigma_end is -1.0; it must be 0 or greater."),
        ({"kind": "clipped_normal", "clip": 0.0}, "agent.noise_clip is 0.0; it must be greater than 0."),
        ({"kind": "ornstein_uhlenbeck", "theta": 0.0}, "agent.noise_theta is 0.0; it must be greater than 0."),
        ({"kind": "ornstein_uhlenbeck", "theta": 3.0}, "agent.noise_theta is 3.0; it must be 1 at most"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(UserError) as error:
        make_action_noise(**settings)
    assert str(error.value).startswith(sentence)


class Brownian(ActionNoise):
    """The user's own: steps of the noise add up, and start anew with the episode."""

    def __init__(self, sigma: float = 0.1, end: float | None = None, keep: float = 0.9) -> None:
        super().__init__(sigma, end)
        self.keep = keep

    def initial_state(self, batch, size, device=None):
        return HiddenState({"brownian": torch.zeros(batch, size, device=device)})

    def draw(self, steps, batch, size, generator):
        return torch.randn(steps, batch, size, generator=generator, device=generator.device)

    def apply(self, action, drawn, state, first):
        x = self.keep * state["brownian"].masked_fill(first.unsqueeze(-1), 0) + self.sigma * drawn
        return (action + x).clamp(-1, 1), HiddenState(state | {"brownian": x})


OWN = f"{__name__}:Brownian"


def test_own_noise_by_import_path():
    noise = make_action_noise(f"{OWN}(keep=0.5)", 0.2, 0.1)
    assert (type(noise), noise.keep, noise.update(1.0)) == (Brownian, 0.5, 0.1)
    assert noise_class(OWN) is Brownian
    assert noise_class("uniform") is UniformNoise


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pink", r'Unknown agent.noise "pink".*ornstein_uhlenbeck.*or give your own'),
        ("normal(clip=1)", "normal takes no arguments"),
        (f"{__name__}:generator", "is not a noise: it must be a subclass of"),
        (f"{OWN}(size=3)", 'has no argument "size": its arguments are keep'),
        (f"{OWN}(keep='x')", "keep is 'x', but must be a number"),
    ],
)
def test_noise_that_cannot_be_made_is_refused(kind, message):
    with pytest.raises(UserError, match=message):
        make_action_noise(kind)
