import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.spec import Spec
from ludus.networks.policy import Policy
from ludus.networks.policy_config import Distribution, PolicyConfig

DISTRIBUTIONS = get_args(Distribution)
DISCRETE = Spec((), "int64", "categorical", sizes=(4,))
MULTI = Spec((3,), "int64", "categorical", sizes=(2, 3, 2))
GRID = Spec((2, 2), "int64", "categorical", sizes=(2, 3, 4, 2))
BITS = Spec((3,), "int8", "binary")
BOX = Spec((2,), "float32", low=-2.0, high=2.0)
MATRIX = Spec((2, 3), "float32", low=-1.0, high=1.0)
NUMBER = Spec((), "float32", low=0.0, high=1.0)
KINDS = {"discrete": DISCRETE, "multi": MULTI, "grid": GRID, "bits": BITS, "box": BOX, "matrix": MATRIX, "n": NUMBER}
MIXES = [{name: spec} for name, spec in KINDS.items()] + [KINDS, {"move.x": DISCRETE, "aim": BOX}]


def outputs_of(policy, *leading):
    return {name: torch.randn(*leading, *shape, requires_grad=True) for name, shape in policy.outputs.items()}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("action", MIXES, ids=lambda a: "+".join(a))
def test_sample_evaluate_and_kl_are_consistent(action, distribution):
    torch.manual_seed(0)
    policy = Policy(action, PolicyConfig(distribution=distribution, log_std_init=-0.5))
    assert list(policy.outputs) == [f"policy/{name}" for name in action]
    noise = policy.draw(5, 7, torch.Generator().manual_seed(1))
    outputs = outputs_of(policy, 5, 7)
    actions, log_prob = policy.sample(outputs, {}, noise)
    for name, spec in action.items():
        assert actions[name].shape == (5, 7, *spec.shape)
        assert actions[name].dtype == (torch.float32 if spec.kind == "continuous" else torch.int64)
    terms = policy.evaluate(outputs, {k: a.detach() for k, a in actions.items()}, {})
    assert terms["log_prob"].shape == terms["entropy"].shape == (5, 7)
    torch.testing.assert_close(terms["log_prob"], log_prob, atol=1e-6, rtol=1e-6)
    old = {name: x.detach() for name, x in policy.distribution(outputs, {}, {}).items()}
    torch.testing.assert_close(policy.kl(old, outputs, {}, {}), torch.zeros(5, 7), atol=1e-6, rtol=0)
    assert (policy.kl(old, outputs_of(policy, 5, 7), actions, {}) > 0).all()
    (terms["log_prob"] + terms["entropy"]).sum().backward()
    assert all(x.grad.isfinite().all() for x in outputs.values())
    assert all(p.grad.isfinite().all() for p in policy.parameters())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_single_step_matches_the_rollout(distribution):
    policy = Policy(KINDS, PolicyConfig(distribution=distribution))
    noise, outputs = policy.draw(3, 4, torch.Generator()), outputs_of(policy, 3, 4)
    actions, log_prob = policy.sample(outputs, {}, noise)
    one, one_log_prob = policy.sample({k: x[1] for k, x in outputs.items()}, {}, {k: x[1] for k, x in noise.items()})
    torch.testing.assert_close(one_log_prob, log_prob[1])
    torch.testing.assert_close(one, {name: a[1] for name, a in actions.items()})


def test_joint_terms_are_sums_over_names():
    policy = Policy(KINDS)
    outputs = outputs_of(policy, 6)
    actions, joint = policy.sample(outputs, {}, {k: x[0] for k, x in policy.draw(1, 6, torch.Generator()).items()})
    entropy = policy.evaluate(outputs, actions, {})["entropy"]
    parts = []
    for name, spec in KINDS.items():
        alone = Policy({name: spec})
        parts.append(alone.evaluate({f"policy/{name}": outputs[f"policy/{name}"]}, {name: actions[name]}, {}))
    torch.testing.assert_close(joint, sum(p["log_prob"] for p in parts))
    torch.testing.assert_close(entropy, sum(p["entropy"] for p in parts))


def test_action_transforms_and_outputs():
    mixed = {"a": DISCRETE, "b": BOX, "c": BITS, "d": MULTI}
    transforms = dict.fromkeys(DISTRIBUTIONS, "clip") | {"tanh": "tanh", "beta": "unit"}
    for distribution, action_transform in transforms.items():
        policy = Policy(mixed, PolicyConfig(distribution=distribution))
        assert policy.action_transform == {"a": "none", "b": action_transform, "c": "none", "d": "none"}
    assert Policy(mixed).outputs == {"policy/a": (4,), "policy/b": (2,), "policy/c": (3,), "policy/d": (7,)}
    assert Policy(mixed, PolicyConfig(distribution="beta")).outputs["policy/b"] == (4,)
    assert Policy(mixed, PolicyConfig(log_std_init=-1.0)).heads["policy/b"].log_std.tolist() == [-1.0, -1.0]


def draws(policy, outputs, observation, n=10_000):
    noise = {name: x[0] for name, x in policy.draw(1, n, torch.Generator().manual_seed(0)).items()}
    wide = {name: x.expand(n, *x.shape) for name, x in outputs.items()}
    masks = {name: x.expand(n, *x.shape) for name, x in observation.items()}
    return policy.sample(wide, masks, noise)


def test_masked_actions_are_never_drawn_and_others_keep_their_odds():
    policy = Policy({"action": DISCRETE})
    logits = torch.tensor([0.0, 9.0, math.log(3), 9.0])
    mask = {"action_mask": torch.tensor([1, 0, 1, 0], dtype=torch.uint8)}
    actions, _ = draws(policy, {"policy/action": logits}, mask)
    counts = actions["action"].bincount(minlength=4) / 10_000
    assert counts[1] == counts[3] == 0
    assert abs(counts[2] - 0.75) < 0.02
    entropy = policy.evaluate({"policy/action": logits}, {"action": torch.tensor(0)}, mask)["entropy"]
    torch.testing.assert_close(entropy, torch.tensor(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    greedy, _ = policy.sample({"policy/action": logits}, mask, None)
    assert greedy["action"] == 2


def test_masks_of_several_actions_are_matched_by_name():
    policy = Policy({"a": DISCRETE, "m": MULTI, "b": BITS})
    masks = {
        "action_mask/a": torch.tensor([False, False, False, True]),
        "action_mask/m": torch.tensor([True, False, True, False, True, True, True]),
        "action_mask/b": torch.tensor(
            [True, True, True, False, False, True]
        ),  # two entries per bit: may be 0, may be 1
    }
    actions, _ = draws(policy, {k: torch.randn(*s) for k, s in policy.outputs.items()}, masks)
    assert (actions["a"] == 3).all()
    assert (actions["m"][:, 0] == 0).all()
    assert (actions["m"][:, 1] != 1).all()
    assert set(actions["m"][:, 2].tolist()) == {0, 1}
    assert set(actions["b"][:, 0].tolist()) == {0, 1}
    assert (actions["b"][:, 1] == 0).all()
    assert (actions["b"][:, 2] == 1).all()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), min_size=4, max_size=4).filter(any), st.integers(0, 50))
def test_masked_terms_stay_finite(mask, seed):
    torch.manual_seed(seed)
    policy = Policy({"action": DISCRETE})
    observation, outputs = {"action_mask": torch.tensor([mask])}, outputs_of(policy, 1)
    actions, log_prob = policy.sample(
        outputs, observation, {"action": policy.draw(1, 1, torch.Generator())["action"][0]}
    )
    assert mask[int(actions["action"])]
    terms = policy.evaluate(outputs, actions, observation)
    torch.testing.assert_close(terms["log_prob"], log_prob)
    assert 0 <= float(terms["entropy"].detach()) <= math.log(sum(mask)) + 1e-6
    kl = policy.kl(policy.distribution(outputs, {}, observation), outputs_of(policy, 1), {}, observation)
    (terms["log_prob"] + terms["entropy"] + kl).sum().backward()
    assert outputs["policy/action"].grad.isfinite().all()
    assert not outputs["policy/action"].grad[0, ~torch.tensor(mask)].any()


@pytest.mark.parametrize(("distribution", "mean"), [("gaussian", 0.3), ("beta", 0.75)])
def test_samples_have_the_moments_of_the_distribution(distribution, mean):
    policy = Policy(
        {"action": Spec((1,), "float32", low=-1.0, high=1.0)},
        PolicyConfig(distribution=distribution, log_std_init=math.log(0.5)),
    )
    raw = math.log(math.expm1(2.0))  # softplus gives 2, so alpha is 3
    output = torch.tensor([0.3]) if distribution == "gaussian" else torch.tensor([raw, -40.0])  # Beta(3, 1): mean 3/4
    actions, _ = draws(policy, {"policy/action": output}, {})
    assert abs(float(actions["action"].mean().detach()) - mean) < 0.02


def test_noise_depends_only_on_the_generator():
    policy = Policy(KINDS, PolicyConfig(distribution="beta"))
    torch.manual_seed(1)
    one = policy.draw(2, 3, torch.Generator().manual_seed(5))
    torch.manual_seed(2)
    torch.testing.assert_close(one, policy.draw(2, 3, torch.Generator().manual_seed(5)), atol=0, rtol=0)


def test_tanh_log_std_is_clamped():
    policy = Policy({"action": BOX}, PolicyConfig(distribution="tanh"))
    stored = policy.distribution({"policy/action": torch.tensor([0.0, 0.0, -99.0, 99.0])}, {}, {})
    assert stored["policy/action"].tolist() == [0, 0, -5, 2]


def test_stored_choices_have_no_padding() -> None:
    policy = Policy({"a": Spec((2,), "int64", "categorical", sizes=(2, 5))})
    outputs = {"policy/a": torch.randn(4, 7)}
    old = policy.distribution(outputs, {}, {})
    assert old["policy/a"].shape == (4, 7)
    assert policy.draw(3, 4, torch.Generator())["a"].shape == (3, 4, 7)
    torch.testing.assert_close(policy.kl(old, outputs, {}, {}), torch.zeros(4))


def test_a_gaussian_of_one_number_without_a_shape_is_described() -> None:
    policy = Policy({"a": Spec((), "float32", "continuous", -2.0, 2.0)})
    (described,) = policy.describe({"policy/a": torch.zeros(3, 1)}, {}).values()
    assert described["mean"].shape == (3,)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_descriptions_have_the_shape_of_the_action(distribution):
    policy = Policy(KINDS, PolicyConfig(distribution=distribution, bins=5))
    described = policy.describe(outputs_of(policy, 6), {})
    last = (5,) if distribution == "discretized" else ()
    for name in ("box", "matrix", "n"):
        assert {x.shape for x in described[name].values()} == {(6, *KINDS[name].shape, *last)}
    assert described["bits"]["probabilities"].shape == (6, 3)


def gsde(size=2, features=5, **changes):
    torch.manual_seed(0)
    config = PolicyConfig(distribution="gsde", head_width=features, log_std_init=-0.7, **changes)
    policy = Policy({"action": Spec((size,), "float32", low=-1.0, high=1.0)}, config)
    with torch.no_grad():
        policy.heads["policy/action"].log_std.add_(torch.randn(features, size))
    return policy


def test_gsde_noise_is_a_function_of_the_state_with_the_variance_of_its_log_probability():
    policy, rows = gsde(), 40_000
    output = torch.randn(7)
    actions, log_prob = draws(policy, {"policy/action": output}, {}, rows)
    z = (output[2:] / output[2:].norm()).double()
    std = (z.square() @ (2 * policy.heads["policy/action"].log_std.double()).exp()).sqrt().detach()
    samples = actions["action"].double().detach()
    assert ((samples.mean(0) - output[:2]).abs() < 4 * std / math.sqrt(rows)).all()
    torch.testing.assert_close(samples.std(0), std, rtol=0.03, atol=0)
    expected = torch.distributions.Normal(output[:2].double(), std)
    torch.testing.assert_close(log_prob.double().detach(), expected.log_prob(samples).sum(-1), atol=1e-4, rtol=1e-4)
    entropy = policy.evaluate({"policy/action": output}, {"action": samples[0].float()}, {})["entropy"]
    torch.testing.assert_close(entropy.double().detach(), expected.entropy().sum(), atol=1e-5, rtol=1e-5)
    # the same matrix and the same state give the same noise
    held = policy.draw(3, 4, torch.Generator().manual_seed(1))["action"]
    assert torch.equal(held[0], held[2])
    assert not torch.equal(held[0, 0], held[0, 1])


def test_gsde_starts_with_the_standard_deviation_of_the_settings():
    policy = Policy({"a": BOX}, PolicyConfig(distribution="gsde", log_std_init=-1.0))
    (described,) = policy.describe({"policy/a": torch.randn(3, 66)}, {}).values()
    torch.testing.assert_close(described["std"], torch.full((3, 2), 2 * math.exp(-1)))


@pytest.mark.parametrize("ordinal", [False, True])
def test_discretized_actions_are_bins_between_the_bounds(ordinal):
    config = PolicyConfig(distribution="discretized", bins=4, ordinal=ordinal)
    policy = Policy({"action": Spec((2,), "float32", low=-2.0, high=2.0)}, config)
    output = torch.randn(8, generator=torch.Generator().manual_seed(0))
    actions, log_prob = draws(policy, {"policy/action": output}, {})
    values = torch.tensor([-1, -1 / 3, 1 / 3, 1])
    index = (actions["action"].unsqueeze(-1) - values).abs().argmin(-1)
    torch.testing.assert_close(actions["action"], values[index])
    logits = output.double().numpy().reshape(2, 4)
    if ordinal:  # Tang & Agrawal 2020, eq. 4
        s = 1 / (1 + np.exp(-logits))
        logits = np.array(
            [[np.log(row[: i + 1]).sum() + np.log(1 - row[i + 1 :]).sum() for i in range(4)] for row in s]
        )
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.log(p[[0, 1], index.numpy()]).sum(1)
    np.testing.assert_allclose(log_prob, expected, atol=1e-5)
    for i in range(2):
        np.testing.assert_allclose(index[:, i].bincount(minlength=4) / 10_000, p[i], atol=0.02)
    described = policy.describe({"policy/action": output}, {})["action"]["probabilities"]
    np.testing.assert_allclose(described, p, atol=1e-6)


@pytest.mark.parametrize("two", [False, True])
def test_a_spatial_action_is_one_choice_of_all_places(two):
    sizes = (3, 4) if two else (12,)
    spec = Spec((2,) if two else (), "int64", "categorical", sizes=sizes)
    policy = Policy({"action": spec}, PolicyConfig(heads=("action=spatial(screen)",)), {"screen": (2, 3, 4)})
    output = torch.randn(1, 3, 4, dtype=torch.float64)
    expected = output.flatten().log_softmax(0)
    every = torch.cartesian_prod(torch.arange(3), torch.arange(4)) if two else torch.arange(12)
    outputs = {"policy/action": output.expand(12, 1, 3, 4)}
    terms = policy.evaluate(outputs, {"action": every}, {})
    torch.testing.assert_close(terms["log_prob"], expected)
    torch.testing.assert_close(terms["entropy"][0], -(expected.exp() * expected).sum())
    other = torch.randn(12, 1, 3, 4, dtype=torch.float64)
    kl = policy.kl(policy.distribution(outputs, {}, {}), {"policy/action": other}, {}, {})
    torch.testing.assert_close(kl, (expected.exp() * (expected - other.flatten(1).log_softmax(1))).sum(1))


def test_a_pointer_into_an_empty_list_is_0_and_finite():
    spec = Spec((), "int64", "categorical", sizes=(4,))
    policy = Policy({"a": spec}, PolicyConfig(heads=("a=pointer(units)",)), {"units": (2, 4)})
    nothing = {"units/mask": torch.zeros(4, dtype=torch.bool)}
    actions, log_prob = draws(policy, {"policy/a": torch.randn(1, 4)}, nothing, 100)
    assert not actions["a"].any()
    assert log_prob.isfinite().all()
