import numpy as np
import pytest
import torch

from ludus.core.errors import UserError
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.exploration.epsilon import Epsilon, epsilon_greedy, epsilon_greedy_numpy


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def chi_square_bound(freedom, sigmas=4):
    """Return the χ² quantile of ``sigmas`` standard deviations (Wilson & Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + sigmas * (2 / (9 * freedom)) ** 0.5) ** 3


def chi_square(actions, expected):
    counts = np.bincount(np.asarray(actions), minlength=len(expected))
    assert not counts[expected == 0].any()
    seen = expected > 0
    return (np.square(counts[seen] - expected[seen]) / expected[seen]).sum()


@pytest.mark.parametrize(
    ("kind", "progress", "value"),
    [
        ("constant", 0.7, 1.0),
        ("linear", 0.0, 1.0),
        ("linear", 0.2, 0.505),
        ("linear", 0.4, 0.01),
        ("linear", 1.0, 0.01),
        ("exponential", 0.0, 1.0),
        ("exponential", 0.1, 0.01**0.25),
        ("exponential", 0.2, 0.1),
        ("exponential", 0.4, 0.01),
        ("exponential", 3.0, 0.01),
    ],
)
def test_schedules(kind, progress, value):
    epsilon = Epsilon(kind, start=1.0, end=0.01, share=0.4)
    assert epsilon.value == 1.0
    assert epsilon.update(progress) == pytest.approx(value, rel=1e-12)


def test_exponential_schedule_has_a_constant_factor():
    epsilon = Epsilon("exponential", start=0.9, end=0.05, share=1.0)
    levels = np.array([epsilon.update(i / 50) for i in range(51)])
    np.testing.assert_allclose(levels[1:] / levels[:-1], (0.05 / 0.9) ** (1 / 50), rtol=1e-12)


@pytest.mark.parametrize("level", [0.4, 0.05])
def test_each_environment_explores_by_the_ladder(level):
    steps, batch = 200_000, 4
    epsilon = Epsilon("linear", start=1.0, end=level, share=0.5, ladder=3.0)
    explore = epsilon.draw(steps, batch, 2, generator())["explore"]  # drawn while ε was 1
    assert (explore < epsilon.value).all()
    epsilon.update(1.0)
    expected = level ** np.linspace(1, 4, batch)  # ε^(1 + α·i/(N−1))
    frequency = (explore < epsilon.value).double().mean(0).numpy()
    margin = 4 * np.sqrt(expected * (1 - expected) / steps)
    assert (np.abs(frequency - expected) < margin).all()
    assert len(np.unique(frequency)) == batch


def test_single_environment_on_a_ladder_uses_epsilon_itself():
    plain, ladder = (Epsilon(ladder=x).draw(100, 1, 2, generator())["explore"] for x in (0.0, 7.0))
    assert torch.equal(plain, ladder)


def test_group_of_rows_uses_its_part_of_the_ladder():
    epsilon, steps = Epsilon("constant", start=0.5, ladder=4.0), 50_000
    numbers = epsilon.draw(steps, 8, 3, generator(1))
    q = torch.tensor([0.0, 1.0, 0.0]).expand(steps, 4, 3)
    action = epsilon_greedy(q, numbers["explore"][:, 4:], numbers["choice"][:, 4:], epsilon.value)
    expected = torch.from_numpy(0.5 ** np.linspace(1, 5, 8)[4:]) * (2 / 3)
    frequency = (action != 1).double().mean(0)
    assert ((frequency - expected).abs() < 4 * (expected * (1 - expected) / steps).sqrt()).all()


def test_one_epsilon_per_row():
    steps, values = 200_000, torch.tensor([0.0, 0.02, 0.3, 1.0])
    uniform, choice = torch.rand(steps, 4, generator=generator()), torch.rand(steps, 4, 5, generator=generator(1))
    q = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0]).expand(steps, 4, 5)
    action = epsilon_greedy(q, uniform, choice, values)
    assert action.dtype == torch.int64
    assert action.shape == (steps, 4)
    expected = values.double() * 4 / 5
    frequency = (action != 2).double().mean(0)
    assert ((frequency - expected).abs() <= 4 * (expected * (1 - expected) / steps).sqrt()).all()


def test_rows_and_steps_explore_independently():
    steps = 100_000
    numbers = Epsilon("constant", start=0.3).draw(steps, 2, 4, generator(2))
    explored = (numbers["explore"] < 0.3).double() - 0.3
    bound = 4 * 0.21 / steps**0.5
    assert abs(float((explored[:, 0] * explored[:, 1]).mean())) < bound
    assert abs(float((explored[1:, 0] * explored[:-1, 0]).mean())) < bound
    choice = numbers["choice"].argmax(-1)
    same = float((choice[:, 0] == choice[:, 1]).double().mean())
    assert abs(same - 0.25) < 4 * (0.25 * 0.75 / steps) ** 0.5


@pytest.mark.parametrize("allowed", [[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0]])
@pytest.mark.parametrize("level", [1.0, 0.2])
def test_random_action_is_uniform_over_allowed_actions(allowed, level):
    steps = 60_000
    mask = np.array(allowed, dtype=np.int8)
    q = np.array([9.0, 8.0, -1e12, -3.0, 2.0, -5.0], dtype=np.float32)  # the best action may be forbidden
    best = np.flatnonzero(mask)[q[mask > 0].argmax()]
    expected = steps * level * mask / mask.sum()
    expected[best] += steps * (1 - level)
    numbers = Epsilon("constant", start=level).draw(steps, 1, 6, generator(3))
    uniform, choice = numbers["explore"], numbers["choice"]
    rows, masks = torch.from_numpy(q).expand_as(choice), torch.from_numpy(mask).expand_as(choice)
    action = epsilon_greedy(rows, uniform, choice, level, masks)
    assert chi_square(action.flatten(), expected) < chi_square_bound(max(int(mask.sum()) - 1, 1))
    numpy = epsilon_greedy_numpy(rows.numpy(), uniform.numpy(), choice.numpy(), level, masks.numpy())
    np.testing.assert_array_equal(numpy, action)


def test_choice_may_be_any_continuous_noise():
    steps = 60_000
    uniform = torch.zeros(steps)
    gumbel = -torch.log(-torch.log(torch.rand(steps, 3, generator=generator(4))))
    action = epsilon_greedy(torch.tensor([50.0, 0.0, 0.0]).expand(steps, 3), uniform, gumbel, 1.0)
    assert chi_square(action, np.full(3, steps / 3)) < chi_square_bound(2)


def test_numpy_matches_torch():
    epsilon = Epsilon("constant", start=0.4)
    numbers = epsilon.draw(500, 7, 4, generator(5))
    q = torch.randn(500, 7, 4, generator=generator(6))
    uniform, choice = numbers["explore"], numbers["choice"]
    expected = epsilon_greedy(q, uniform, choice, epsilon.value)
    action = epsilon_greedy_numpy(q.numpy(), uniform.numpy(), choice.numpy(), epsilon.value)
    assert action.dtype == np.int64
    np.testing.assert_array_equal(action, expected)
    assert torch.equal(expected[uniform >= 0.4], q.argmax(-1)[uniform >= 0.4])


@pytest.mark.parametrize("ladder", [0.0, 7.0])
def test_epsilon_1_always_and_0_never_explores(ladder):
    epsilon = Epsilon("linear", start=1.0, end=0.0, share=1.0, ladder=ladder)
    numbers = epsilon.draw(1_000_000, 2, 1, generator(7))
    assert (numbers["explore"] < epsilon.value).all()
    epsilon.update(1.0)
    assert not (numbers["explore"] < epsilon.value).any()


def test_explore_is_below_1_on_the_ladder(monkeypatch):
    largest = torch.tensor(1 - 2**-24)
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: largest.expand(shape))
    assert (Epsilon("constant", start=1.0, ladder=7.0).draw(1, 4, 2, generator())["explore"] < 1).all()


def test_same_generator_gives_the_same_numbers_also_after_a_checkpoint():
    epsilon = Epsilon(ladder=7.0)

    def noise(seed):
        return Noise(lambda steps, g: epsilon.draw(steps, 3, 4, g), generator(seed), Rows(0, 3, 3), chunk=8)

    one, other = noise(8), noise(8)
    for _ in range(11):
        a, b = one.next(), other.next()
        assert all(torch.equal(a[name], b[name]) for name in ("explore", "choice"))
    resumed = noise(9)
    resumed.load_state_dict(one.state_dict())
    assert torch.equal(resumed.next()["choice"], other.next()["choice"])
    assert a["explore"].shape == (3,)
    assert a["choice"].shape == (3, 4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"start": 1.5}, "agent.epsilon_start is 1.5; it must be between 0 and 1."),
        ({"end": -0.1}, "agent.epsilon_end is -0.1; it must be between 0 and 1."),
        ({"share": 0.0}, "agent.epsilon_share is 0.0; it must be greater than 0."),
        ({"share": 2.0}, "agent.epsilon_share is 2.0; it must be between 0 and 1."),
        ({"ladder": -1.0}, "agent.epsilon_ladder is -1.0; it must be 0 or greater."),
        ({"start": float("nan")}, "agent.epsilon_start is nan; it must be a finite number."),
        ({"schedule": "exponential", "end": 0.0}, "agent.epsilon_end is 0.0; it must be greater than 0."),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(UserError) as error:
        Epsilon(**settings)
    assert str(error.value).startswith(sentence)
