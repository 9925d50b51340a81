"""Masked choices and padding are never sampled, whatever the logits and the noise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.spec import Spec
from ludus.networks.conditional_policy import make_policy
from ludus.networks.policy import Policy
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.distributions import gumbel

DRAWS = 2_000  # per example
EXTREMES = torch.tensor([0.0, 1e30, -1e30, 1e9, -1e9, 88.0, -104.0, 1e-30])
UNIFORMS = torch.tensor([0.0, 1e-45, 0.5, 1 - 2**-24, 1.0])
counts = st.one_of(st.integers(2, 40), st.sampled_from([257, 1_000, 10_000]))


def extreme(shape, values, seed, rows):
    """Return numbers of which some rows are equal, some extreme, some normal."""
    generator = torch.Generator().manual_seed(seed)
    drawn = values[torch.randint(len(values), (rows, *shape), generator=generator)]
    drawn[::3] = values[torch.randint(len(values), (1,), generator=generator)]
    return drawn


def draw(policy, size, seed, observation):
    """Sample about ``DRAWS`` actions, fewer if they are large; all rows have the masks of ``observation``."""
    rows = max(20, min(DRAWS, 4_000_000 // size))
    (output, shape), (name,) = next(iter(policy.outputs.items())), policy.action
    logits = extreme(shape, EXTREMES, seed, rows)
    uniform = extreme((size,), UNIFORMS, seed + 1, rows)
    uniform[1::3] = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    bits = policy.action[name].kind == "binary"
    noise = uniform.clamp(max=1 - 2**-24) if bits else gumbel(uniform)
    masks = {key: x.expand(rows, *x.shape) for key, x in observation.items()}
    sampled, log_prob = policy.sample({output: logits}, masks, {name: noise})
    greedy, _ = policy.sample({output: logits}, masks, None)
    terms = policy.evaluate({output: logits}, sampled, masks)
    assert log_prob.isfinite().all()
    assert terms["entropy"].isfinite().all()
    return torch.cat([sampled[name], greedy[name]])


@settings(deadline=None, max_examples=25)
@given(counts, st.data())
def test_the_one_legal_choice_is_taken(n, data):
    legal = data.draw(st.integers(0, n - 1))
    policy = Policy({"action": Spec((), "int64", "categorical", sizes=(n,))})
    actions = draw(policy, n, data.draw(st.integers(0, 99)), {"action_mask": torch.arange(n) == legal})
    assert (actions == legal).all()


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.data())
def test_the_one_legal_place_is_taken(height, width, two, data):
    row, column = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    sizes = (height, width) if two else (height * width,)
    spec = Spec((2,) if two else (), "int64", "categorical", sizes=sizes)
    policy = Policy({"a": spec}, PolicyConfig(heads=("a=spatial(screen)",)), {"screen": (3, height, width)})
    place = torch.arange(height * width) == row * width + column
    mask = torch.cat([torch.arange(height) == row, torch.arange(width) == column]) if two else place
    actions = draw(policy, height * width, data.draw(st.integers(0, 99)), {"action_mask": mask})
    assert (actions == (torch.tensor([row, column]) if two else row * width + column)).all()


@settings(deadline=None, max_examples=12)
@given(st.integers(2, 500), st.data())
def test_a_pointer_takes_the_one_entity_that_is_present_and_legal(n, data):
    legal, seed = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 99))
    other = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5
    masks = {"action_mask": other | (torch.arange(n) == legal), "units/mask": ~other | (torch.arange(n) == legal)}
    policy = Policy(
        {"a": Spec((), "int64", "categorical", sizes=(n,))},
        PolicyConfig(heads=("a=pointer(units)",)),
        {"units": (4, n)},
    )
    assert (draw(policy, n, seed, masks) == legal).all()


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 500), st.data())
def test_padding_is_never_selected(n, data):
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    present, may_be_0 = torch.rand(n, generator=generator) < 0.5, torch.rand(n, generator=generator) < 0.5
    masks = {
        "units/mask": present,
        "action_mask": torch.stack([may_be_0, torch.ones(n, dtype=torch.bool)], -1).flatten(),
    }
    policy = Policy({"a": Spec((n,), "int8", "binary")}, PolicyConfig(heads=("a=select(units)",)), {"units": (4, n)})
    actions = draw(policy, n, seed, masks)
    assert (actions[:, ~present] == 0).all()
    assert (actions[:, present & ~may_be_0] == 1).all()


@pytest.mark.parametrize("sizes", [(2, 7, 3), (5, 5)])
def test_choices_of_a_multidiscrete_stay_below_their_sizes(sizes):
    policy = Policy({"a": Spec((len(sizes),), "int64", "categorical", sizes=sizes)})
    for seed in range(5):
        actions = draw(policy, sum(sizes), seed, {})
        assert (actions < torch.tensor(sizes)).all()


def test_a_hundred_thousand_draws_with_one_legal_choice_of_ten_thousand_have_no_illegal_one():
    n, rows, rng = 10_000, 500, np.random.default_rng(0)
    policy = Policy({"action": Spec((), "int64", "categorical", sizes=(n,))})
    illegal = 0
    for _ in range(4):
        legal = torch.from_numpy(rng.integers(n, size=rows))
        mask = torch.nn.functional.one_hot(legal, n).bool()
        logits = extreme((n,), EXTREMES, int(rng.integers(1000)), rows)
        noise = gumbel(torch.rand(rows, n, generator=torch.Generator().manual_seed(int(rng.integers(1000)))))
        actions, _ = policy.sample({"policy/action": logits}, {"action_mask": mask}, {"action": noise})
        illegal += int((actions["action"] != legal).sum())
    for n in (2, 3, 10, 100):  # 98,000 draws
        rows = 24_500
        legal = torch.from_numpy(rng.integers(n, size=rows))
        policy = Policy({"action": Spec((), "int64", "categorical", sizes=(n,))})
        masks = {"action_mask": torch.nn.functional.one_hot(legal, n)}
        logits, uniform = extreme((n,), EXTREMES, n, rows), extreme((n,), UNIFORMS, n, rows)
        actions, _ = policy.sample({"policy/action": logits}, masks, {"action": gumbel(uniform)})
        illegal += int((actions["action"] != legal).sum())
    assert illegal == 0


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 12), counts, st.booleans(), st.data())
def test_the_one_choice_that_an_earlier_one_leaves_is_taken(functions, n, argument, data):
    seed = data.draw(st.integers(0, 99))
    rows, generator = max(20, min(DRAWS, 1_000_000 // n)), torch.Generator().manual_seed(seed)
    legal = torch.randint(n, (functions,), generator=generator)
    mask = legal[:, None] == torch.arange(n)  # [functions, n]
    sizes = {"function": functions, "target": n}
    action = {name: Spec((), "int64", "categorical", sizes=(size,)) for name, size in sizes.items()}
    table = {"arguments": ("function: 1=target",)} if argument else {}
    policy = make_policy(action, PolicyConfig(autoregressive=("function", "target"), head_width=4, **table), {})
    policy.find_conditional_masks({"action_mask/target|function": Spec((functions, n), "bool", "binary")})
    outputs = {name: extreme(shape, EXTREMES, seed, rows) for name, shape in policy.outputs.items()}
    noise = {name: gumbel(extreme((size,), UNIFORMS, seed, rows)) for name, size in sizes.items()}
    noise["function"][1::2] = gumbel(torch.rand(functions, generator=generator))
    masks = {"action_mask/target|function": mask.expand(rows, functions, n)}
    for drawn in (noise, None):
        actions, log_prob = policy.sample(outputs, masks, drawn)
        expected = legal[actions["function"]]
        assert torch.equal(
            actions["target"], torch.where(actions["function"] == 1, expected, 0) if argument else expected
        )
        terms = policy.evaluate(outputs, actions, masks)
        old = policy.distribution(outputs, actions, masks)
        assert all(x.isfinite().all() for x in (log_prob, *terms.values(), policy.kl(old, outputs, actions, masks)))
