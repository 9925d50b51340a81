import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.spec import Spec
from ludus.ops.returns import running_returns
from ludus.preprocess.normalization import ObsNormalizer, RewardScaler, RunningStatistics
from ludus.preprocess.observation import ObsPreprocessor


def test_means_of_0_and_10_with_variance_1_merge_to_26():
    statistics = RunningStatistics(())
    half = torch.tensor([-1.0, 1.0])
    statistics.update(half, torch.ones(2))
    assert float(statistics.variance) == 1
    statistics.update(half + 10, torch.ones(2))
    assert float(statistics.mean) == 5
    assert float(statistics.variance) == 26


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([0.0, 1e6]))
def test_updates_in_parts_equal_one_update(sizes, seed, offset):
    rng = np.random.default_rng(seed)
    statistics = RunningStatistics((3,))
    seen = []
    for size in sizes:
        rows, weight = rng.normal(offset, 2, (size, 2, 3)), rng.integers(0, 2, (size, 2))
        seen.append(rows[weight > 0])
        rows[weight == 0] = np.nan
        statistics.update(torch.from_numpy(rows), torch.from_numpy(weight))
    whole = np.concatenate(seen)
    assert float(statistics.count) == len(whole)
    if len(whole):
        np.testing.assert_allclose(statistics.mean, whole.mean(0), rtol=1e-9)
        np.testing.assert_allclose(statistics.variance, whole.var(0), rtol=1e-6, atol=1e-9)
    assert statistics.scale.isfinite().all()


def test_no_scaling_without_variance():
    statistics = RunningStatistics((2,))
    x = torch.tensor([[3.0, -4.0]])
    assert torch.equal(statistics.normalize(x), x)
    statistics.update(x, torch.zeros(1))
    assert torch.equal(statistics.normalize(x), x)
    statistics.update(x, torch.ones(1))
    assert torch.equal(statistics.normalize(x + 1), torch.ones(1, 2))


SPECS = {
    "items": Spec((3,), "float32"),
    "n.x": Spec((), "float64"),
    "image": Spec((1, 4, 4), "uint8"),
    "choice": Spec((), "int64", "categorical", sizes=(2,)),
}


def test_vectors_are_normalized_and_clipped():
    preprocess = ObsPreprocessor(SPECS)
    normalizer = ObsNormalizer(preprocess.outputs)
    raw = {
        "items": torch.randn(50, 4, 3) * 5 + 100,
        "n.x": torch.rand(50, 4, dtype=torch.float64),
        "image": torch.zeros(50, 4, 1, 4, 4, dtype=torch.uint8),
        "choice": torch.zeros(50, 4, dtype=torch.int64),
    }
    ready = preprocess(raw)
    before = {k: x.clone() for k, x in ready.items()}
    normalizer.update(ready, torch.ones(50, 4))
    after = normalizer(ready)
    for name in ("items", "n.x"):
        torch.testing.assert_close(after[name].mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
        torch.testing.assert_close(after[name].std(), torch.tensor(1.0), atol=1e-2, rtol=0)
    assert after["image"] is ready["image"]
    assert after["choice"] is ready["choice"]
    assert all(torch.equal(ready[k], before[k]) for k in before)  # the input is left alone
    far = normalizer({**ready, "items": torch.full((1, 1, 3), 1e9)})["items"]
    assert (far == 10).all()
    again = ObsNormalizer(preprocess.outputs)
    again.load_state_dict(normalizer.state_dict())
    assert torch.equal(again(ready)["items"], after["items"])


def test_other_observations_are_unchanged():
    specs = {
        "speed": Spec((3,), "float32"),
        "grey": Spec((4, 4), "uint8", low=0, high=255),
        "board": Spec((3, 3), "int8", axes="image"),
        "bits": Spec((3,), "int8", "binary"),
        "several": Spec((2,), "int64", "categorical", sizes=(2, 3)),
    }
    preprocess = ObsPreprocessor(specs)
    normalizer = ObsNormalizer(preprocess.outputs)
    raw = {name: torch.randint(0, 2, (50, 4, *spec.shape)) for name, spec in specs.items()}
    ready = preprocess(raw | {"speed": torch.randn(50, 4, 3) * 5 + 100})
    normalizer.update(ready, torch.ones(50, 4))
    after = normalizer(ready)
    torch.testing.assert_close(after["speed"].mean((0, 1)), torch.zeros(3), atol=1e-4, rtol=0)
    assert all(after[name] is ready[name] for name in specs if name != "speed")


def test_lists_are_normalized_per_feature_without_padding():
    specs = {
        "units": Spec((5, 2), "float32"),
        "all": Spec((3, 2), "float32"),
        "units/mask": Spec((5,), "bool", "binary", masks="units"),
    }
    preprocess = ObsPreprocessor(specs)
    normalizer = ObsNormalizer(preprocess.outputs)
    raw = {
        "units": torch.randn(50, 4, 5, 2) * torch.tensor([5.0, 0.1]) + torch.tensor([100.0, -3.0]),
        "all": torch.randn(50, 4, 3, 2) * 7,
        "units/mask": torch.rand(50, 4, 5) < 0.4,
    }
    weight = torch.rand(50, 4) < 0.8
    raw["units"][~raw["units/mask"]] = 1e6
    raw["units"][~weight] = 1e6
    raw["all"][~weight] = 1e6
    ready = preprocess(raw)
    for half in (slice(0, 20), slice(20, 50)):
        normalizer.update({name: x[half] for name, x in ready.items()}, weight[half])
    after = normalizer(ready)
    present = raw["units/mask"] & weight[..., None]
    seen = raw["units"][present].double()  # [n, F]
    expected = (seen - seen.mean(0)) / seen.std(0, correction=0)
    torch.testing.assert_close(after["units"].mT[present], expected.float(), rtol=1e-3, atol=1e-4)
    assert (after["units"].mT[~raw["units/mask"]] == 0).all()
    others = raw["all"][weight].double().flatten(0, 1)
    expected = (raw["all"][weight].double() - others.mean(0)) / others.std(0, correction=0)
    torch.testing.assert_close(after["all"].mT[weight], expected.float(), rtol=1e-3, atol=1e-4)
    assert after["units/mask"] is ready["units/mask"]


def test_numpy_equals_forward():
    normalizer = ObsNormalizer({"o": Spec((3,), "float32")})
    x = torch.randn(8, 3) * 4 + 1
    normalizer.update({"o": x}, torch.ones(8))
    x[0] = 1e6
    np.testing.assert_array_equal(normalizer.numpy(x.numpy(), "o"), normalizer({"o": x})["o"].numpy())
    assert x[0, 0] == 1e6


def test_statistics_are_fixed_between_updates():
    normalizer = ObsNormalizer({"o": Spec((3,), "float32")})
    x = {"o": torch.randn(8, 3)}
    normalizer.train()
    one = normalizer(x)["o"]
    assert torch.equal(normalizer(x)["o"], one)
    assert float(next(iter(normalizer.statistics.values())).count) == 0


def reference_returns(reward, ended, weight, gamma, carried):
    seen = []
    for t in range(len(reward)):
        for b in range(reward.shape[1]):
            if weight[t, b] == 0:
                carried[b] = 0.0
                continue
            carried[b] = gamma * carried[b] + reward[t, b]
            seen.append(carried[b])
            if ended[t, b]:
                carried[b] = 0.0
    return seen


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999))
def test_rewards_are_divided_by_the_std_of_the_discounted_return(seed):
    rng = np.random.default_rng(seed)
    scaler, carried, seen, before = RewardScaler(), np.zeros(3), [], torch.zeros(3, dtype=torch.float64)
    for _ in range(3):  # returns go on from one rollout to the next
        reward = rng.normal(1, 2, (7, 3))
        ended, weight = rng.random((7, 3)) < 0.2, (rng.random((7, 3)) < 0.8).astype(float)
        seen += reference_returns(reward, ended, weight, 0.9, carried)
        reward[weight == 0] = np.nan
        real = torch.from_numpy(weight > 0)
        returns, before = running_returns(torch.from_numpy(reward), torch.from_numpy(ended), real, 0.9, before)
        scaler.update(returns, real)
    np.testing.assert_allclose(float(scaler.statistics.variance), np.var(seen), rtol=1e-9)
    np.testing.assert_allclose(float(scaler.scale(torch.tensor(5.0))), 5 / np.std(seen), rtol=1e-5)


def test_constant_rewards_are_not_scaled():
    scaler = RewardScaler()
    ones = torch.ones(4, 2)
    scaler.update(0 * ones, ones.bool())
    assert torch.equal(scaler.scale(ones), ones)


def test_reward_scaler_accepts_any_number_of_rows():
    one, two = RewardScaler(), RewardScaler()
    returns, real = torch.randn(6, 4, dtype=torch.float64), torch.ones(6, 4, dtype=torch.bool)
    one.update(returns, real)
    for part in (slice(0, 1), slice(1, 4)):
        two.update(returns[:, part], real[:, part])
    torch.testing.assert_close(two.scale(torch.tensor(1.0)), one.scale(torch.tensor(1.0)))
