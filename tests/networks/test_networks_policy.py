import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.spec import Spec
from ludus.networks.policy import Policy

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


@pytest.mark.parametrize("distribution", ["gaussian", "tanh", "beta"])
@pytest.mark.parametrize("action", MIXES, ids=lambda a: "+".join(a))
def test_sample_evaluate_and_kl_are_consistent(action, distribution):
    torch.manual_seed(0)
    policy = Policy(action, distribution, log_std_init=-0.5)
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
    old = {name: x.detach() for name, x in policy.distribution(outputs, {}).items()}
    torch.testing.assert_close(policy.kl(old, outputs, {}), torch.zeros(5, 7), atol=1e-6, rtol=0)
    assert (policy.kl(old, outputs_of(policy, 5, 7), {}) > 0).all()
    (terms["log_prob"] + terms["entropy"]).sum().backward()
    assert all(x.grad.isfinite().all() for x in outputs.values())
    assert all(p.grad.isfinite().all() for p in policy.parameters())


@pytest.mark.parametrize("distribution", ["gaussian", "tanh", "beta"])
def test_single_step_matches_the_rollout(distribution):
    policy = Policy(KINDS, distribution)
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
    for distribution, action_transform in {"gaussian": "clip", "tanh": "tanh", "beta": "unit"}.items():
        policy = Policy(mixed, distribution)
        assert policy.action_transform == {"a": "none", "b": action_transform, "c": "none", "d": "none"}
    assert Policy(mixed).outputs == {"policy/a": (4,), "policy/b": (2,), "policy/c": (3,), "policy/d": (7,)}
    assert Policy(mixed, "beta").outputs["policy/b"] == (4,)
    assert set(Policy(mixed, log_std_init=-1.0).log_std) == {"b"}
    assert Policy(mixed, log_std_init=-1.0).log_std["b"].tolist() == [-1.0, -1.0]


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
    kl = policy.kl(policy.distribution(outputs, observation), outputs_of(policy, 1), observation)
    (terms["log_prob"] + terms["entropy"] + kl).sum().backward()
    assert outputs["policy/action"].grad.isfinite().all()
    assert not outputs["policy/action"].grad[0, ~torch.tensor(mask)].any()


@pytest.mark.parametrize(("distribution", "mean"), [("gaussian", 0.3), ("beta", 0.75)])
def test_samples_have_the_moments_of_the_distribution(distribution, mean):
    policy = Policy({"action": Spec((1,), "float32", low=-1.0, high=1.0)}, distribution, log_std_init=math.log(0.5))
    raw = math.log(math.expm1(2.0))  # softplus gives 2, so alpha is 3
    output = torch.tensor([0.3]) if distribution == "gaussian" else torch.tensor([raw, -40.0])  # Beta(3, 1): mean 3/4
    actions, _ = draws(policy, {"policy/action": output}, {})
    assert abs(float(actions["action"].mean().detach()) - mean) < 0.02


def test_noise_depends_only_on_the_generator():
    policy = Policy(KINDS, "beta")
    torch.manual_seed(1)
    one = policy.draw(2, 3, torch.Generator().manual_seed(5))
    torch.manual_seed(2)
    torch.testing.assert_close(one, policy.draw(2, 3, torch.Generator().manual_seed(5)), atol=0, rtol=0)


def test_tanh_log_std_is_clamped():
    policy = Policy({"action": BOX}, "tanh")
    stored = policy.distribution({"policy/action": torch.tensor([0.0, 0.0, -99.0, 99.0])}, {})
    assert stored["policy/action"].tolist() == [0, 0, -5, 2]


def test_stored_choices_have_no_padding() -> None:
    policy = Policy({"a": Spec((2,), "int64", "categorical", sizes=(2, 5))})
    outputs = {"policy/a": torch.randn(4, 7)}
    old = policy.distribution(outputs, {})
    assert old["policy/a"].shape == (4, 7)
    assert policy.draw(3, 4, torch.Generator())["a"].shape == (3, 4, 7)
    torch.testing.assert_close(policy.kl(old, outputs, {}), torch.zeros(4))


def test_a_gaussian_of_one_number_without_a_shape_is_described() -> None:
    policy = Policy({"a": Spec((), "float32", "continuous", -2.0, 2.0)})
    (described,) = policy.describe({"policy/a": torch.zeros(3, 1)}, {}).values()
    assert described["mean"].shape == (3,)
