"""Policies whose parts depend on each other, against enumeration and float64 references."""

import itertools
import math

import numpy as np
import pytest
import torch

from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.networks.conditional_policy import ConditionalPolicy, make_policy
from ludus.networks.policy import Policy
from ludus.networks.policy_config import PolicyConfig

FUNCTION = Spec((), "int64", "categorical", sizes=(3,))
PLACE = Spec((2,), "int64", "categorical", sizes=(2, 3))
TARGET = Spec((), "int64", "categorical", sizes=(4,))
GROUP = Spec((4,), "int8", "binary")
FORCE = Spec((2,), "float32", low=-1.0, high=1.0)
INPUTS = {"screen": (5, 2, 3), "units": (6, 4)}
DISCRETE = {"function": FUNCTION, "place": PLACE, "target": TARGET, "group": GROUP}
ALL = {**DISCRETE, "force": FORCE}
HEADS = ("place=spatial", "target=pointer(units)", "group=select(units)")
ORDER = ("function", "target", "place", "group")
TABLE = ("function: 1=place, 2=place+target",)


def config(**changes):
    return PolicyConfig(heads=HEADS, head_width=8, **changes)


def outputs_of(policy, *leading, scale=1.0):
    return {name: (scale * torch.randn(*leading, *shape)).requires_grad_() for name, shape in policy.outputs.items()}


def strengthen(policy):
    """Make the last layers, which start near 0, strong enough for parts to depend on each other."""
    with torch.no_grad():
        for conditioner in policy.conditioners.values():
            conditioner.last.weight.normal_()


def every_action():
    """All combinations of the discrete parts, as a batch."""
    places = list(itertools.product(range(2), range(3)))
    bits = list(itertools.product(range(2), repeat=4))
    found = list(itertools.product(range(3), places, range(4), bits))
    return {
        "function": torch.tensor([f for f, _, _, _ in found]),
        "place": torch.tensor([p for _, p, _, _ in found]),
        "target": torch.tensor([t for _, _, t, _ in found]),
        "group": torch.tensor([b for _, _, _, b in found]),
    }


def wide(outputs, rows):
    return {name: x.expand(rows, *x.shape) for name, x in outputs.items()}


@pytest.mark.parametrize("order", [ORDER, ("place", "group", "function"), ("target", "group", "function", "place")])
def test_probabilities_of_all_actions_add_up_to_1(order):
    torch.manual_seed(0)
    policy = make_policy(DISCRETE, config(autoregressive=order), INPUTS)
    strengthen(policy)
    outputs, actions = outputs_of(policy), every_action()
    rows = len(actions["function"])
    log_prob = policy.evaluate(wide(outputs, rows), actions, {})["log_prob"].double()
    assert float(log_prob.detach().exp().sum()) == pytest.approx(1, abs=1e-5)
    assert float(log_prob.detach().std()) > 0.1


def test_the_joint_probability_is_not_a_product_of_marginals():
    torch.manual_seed(1)
    policy = make_policy(DISCRETE, config(autoregressive=("function", "place")), INPUTS)
    strengthen(policy)
    actions = every_action()
    rows = len(actions["function"])
    terms = policy.evaluate(wide(outputs_of(policy), rows), actions, {})
    p = terms["log_prob"].detach().exp().reshape(3, 6, -1).sum(-1)  # [function, place]
    product = p.sum(1, keepdim=True) * p.sum(0)
    assert float((p - product).abs().max()) > 0.01


def test_probabilities_with_unused_arguments_add_up_to_1():
    torch.manual_seed(0)
    policy = make_policy(DISCRETE, config(autoregressive=ORDER, arguments=TABLE), INPUTS)
    strengthen(policy)
    actions = every_action()
    function, zero_place = actions["function"], (actions["place"] == 0).all(-1)
    allowed = torch.where(function == 0, zero_place, True) & torch.where(function == 2, True, actions["target"] == 0)
    actions = {name: x[allowed] for name, x in actions.items()}
    log_prob = policy.evaluate(wide(outputs_of(policy), int(allowed.sum())), actions, {})["log_prob"]
    assert float(log_prob.detach().double().exp().sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("distribution", ["gaussian", "state_gaussian", "tanh", "beta", "discretized", "gsde"])
def test_sample_evaluate_and_kl_are_consistent(distribution):
    torch.manual_seed(0)
    settings = config(
        distribution=distribution, autoregressive=("force", *ORDER), arguments=("function: 1=place, 2=place+target",)
    )
    policy = make_policy(ALL, settings, INPUTS)
    outputs = outputs_of(policy, 5, 7)
    noise = policy.draw(5, 7, torch.Generator().manual_seed(1))
    actions, log_prob = policy.sample(outputs, {}, noise)
    assert {name: x.shape[2:] for name, x in actions.items()} == {name: spec.shape for name, spec in ALL.items()}
    actions = {name: x.detach() for name, x in actions.items()}
    terms = policy.evaluate(outputs, actions, {})
    torch.testing.assert_close(terms["log_prob"], log_prob, atol=1e-5, rtol=1e-5)
    old = {name: x.detach() for name, x in policy.distribution(outputs, actions, {}).items()}
    torch.testing.assert_close(policy.kl(old, outputs, actions, {}), torch.zeros(5, 7), atol=1e-5, rtol=0)
    assert (policy.kl(old, outputs_of(policy, 5, 7, scale=3), actions, {}) > 0).all()
    (terms["log_prob"] + terms["entropy"]).sum().backward()
    assert all(x.grad.isfinite().all() for x in outputs.values())
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() or name.endswith("last.bias"), name  # the same for all places, so without effect
    one, _ = policy.sample({k: x[2] for k, x in outputs.items()}, {}, {k: x[2] for k, x in noise.items()})
    torch.testing.assert_close(one, {name: x[2] for name, x in actions.items()})


def test_log_probabilities_against_numpy():
    torch.manual_seed(3)
    policy = make_policy(DISCRETE, config(autoregressive=("function", "target", "place")), INPUTS)
    strengthen(policy)
    outputs = {name: x.detach().double().numpy() for name, x in outputs_of(policy).items()}
    weights = {name: x.double().numpy() for name, x in policy.state_dict().items()}
    function, target, place, group = 2, 3, (1, 2), (0, 1, 1, 0)

    def log_softmax(x):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())

    def head(name, hidden):
        return weights[f"conditioners.{name}.last.weight"] @ hidden + weights[f"conditioners.{name}.last.bias"][:, None]

    context = weights["embeddings.function.vectors.weight"][function]
    units = np.maximum(outputs["features/target"] + context[:, None], 0)  # [8, 4]
    chosen = units[:, target]
    linear = weights["embeddings.target.linear.weight"] @ chosen + weights["embeddings.target.linear.bias"]
    places = np.maximum(outputs["features/place"].reshape(8, 6) + (context + linear)[:, None], 0)
    bits = outputs["policy/group"][0]
    expected = (
        log_softmax(outputs["policy/function"])[function]
        + log_softmax(head("target", units)[0])[target]
        + log_softmax(head("place", places)[0])[place[0] * 3 + place[1]]
        + sum(-math.log1p(math.exp(-x if bit else x)) for x, bit in zip(bits, group, strict=True))
    )
    action = {"function": function, "target": target, "place": place, "group": group}
    given = {name: torch.tensor([x]) for name, x in action.items()}
    single = {name: torch.from_numpy(x).float().unsqueeze(0) for name, x in outputs.items()}
    assert policy.evaluate(single, given, {})["log_prob"].item() == pytest.approx(expected, abs=1e-4)


def test_unused_arguments_change_nothing():
    torch.manual_seed(0)
    policy = make_policy(ALL, config(autoregressive=("function", "target", "place"), arguments=TABLE), INPUTS)
    strengthen(policy)
    outputs = outputs_of(policy, 60)
    noise = {name: x[0] for name, x in policy.draw(1, 60, torch.Generator().manual_seed(0)).items()}
    actions, log_prob = policy.sample(outputs, {}, noise)
    actions = {name: x.detach() for name, x in actions.items()}
    assert set(actions["function"].tolist()) == {0, 1, 2}
    no_target, no_place = actions["function"] < 2, actions["function"] == 0
    assert (actions["target"][no_target] == 0).all()
    assert (actions["place"][no_place] == 0).all()
    assert actions["target"][~no_target].any()
    assert actions["place"][~no_place].any()
    terms = policy.evaluate(outputs, actions, {})
    kl = policy.kl(policy.distribution(outputs_of(policy, 60), actions, {}), outputs, actions, {})
    (terms["log_prob"] + terms["entropy"] + kl).sum().backward()
    assert not outputs["features/target"].grad[no_target].any()
    assert not outputs["features/place"].grad[no_place].any()
    assert outputs["features/target"].grad[~no_target].flatten(1).any(1).all()

    other = {name: x.detach().clone() for name, x in outputs.items()}
    other["features/target"][no_target] = torch.randn(8, 4)
    other["features/place"][no_place] = torch.randn(8, 2, 3)
    again, same = policy.sample(other, {}, noise)
    torch.testing.assert_close(again, actions, atol=0, rtol=0)
    torch.testing.assert_close(same, log_prob, atol=0, rtol=0)
    for name, term in policy.evaluate(other, actions, {}).items():
        torch.testing.assert_close(term, terms[name], atol=0, rtol=0)


def test_an_argument_of_an_unused_function_is_unused():
    actions = {"a": FUNCTION, "b": FUNCTION, "c": TARGET}
    policy = make_policy(actions, PolicyConfig(arguments=("a: 1=b", "b: 0=c, 1=c")), {})
    outputs = {name: torch.zeros(1, *shape) for name, shape in policy.outputs.items()}
    outputs["policy/c"][0, 3] = 30.0
    for choice, c in ((0, 0), (1, 3)):
        outputs["policy/a"] = torch.nn.functional.one_hot(torch.tensor([choice]), 3) * 30.0
        sampled, log_prob = policy.sample(outputs, {}, None)
        assert sampled["c"].item() == c
        assert log_prob.item() == pytest.approx(-math.log(3) * choice, abs=1e-4)


def test_unused_arguments_of_a_box_are_its_centre():
    for distribution in ("gaussian", "beta", "tanh"):
        policy = make_policy(
            {"f": FUNCTION, "force": FORCE}, PolicyConfig(distribution=distribution, arguments=("f: 1=force",)), {}
        )
        outputs = {name: torch.randn(4, *shape, requires_grad=True) for name, shape in policy.outputs.items()}
        action = {"f": torch.tensor([0, 1, 0, 2]), "force": torch.full((4, 2), 0.5 if distribution == "beta" else 0.0)}
        policy.evaluate(outputs, action, {})["log_prob"].sum().backward()
        assert outputs["policy/force"].grad.isfinite().all()
        assert outputs["policy/force"].grad.any(1).tolist() == [False, True, False, False]


def test_greedy_follows_the_most_likely_choice_and_describe_agrees():
    torch.manual_seed(0)
    policy = make_policy(DISCRETE, config(autoregressive=ORDER), INPUTS)
    strengthen(policy)
    outputs = outputs_of(policy, 9)
    greedy, _ = policy.sample(outputs, {}, None)
    described = policy.describe(outputs, {})
    assert list(described) == list(DISCRETE)
    assert described["place"]["probabilities"].shape == (9, 2, 3)
    assert torch.equal(described["target"]["probabilities"].argmax(-1), greedy["target"])
    place = described["place"]["probabilities"].flatten(-2).argmax(-1)
    assert torch.equal(place, greedy["place"][:, 0] * 3 + greedy["place"][:, 1])


def test_masks_and_padding_hold_in_autoregressive_parts():
    torch.manual_seed(0)
    policy = make_policy(DISCRETE, config(autoregressive=ORDER), INPUTS)
    strengthen(policy)
    masks = {
        "units/mask": torch.tensor([True, False, True, False]),
        "action_mask/target": torch.tensor([True, True, False, True]),
        "action_mask/place": torch.tensor([False, True, True, False, True]),
    }
    outputs = wide(outputs_of(policy), 500)
    noise = {name: x[0] for name, x in policy.draw(1, 500, torch.Generator().manual_seed(0)).items()}
    actions, _ = policy.sample(outputs, {name: x.expand(500, -1) for name, x in masks.items()}, noise)
    assert (actions["target"] == 0).all()
    assert (actions["place"][:, 0] == 1).all()
    assert set(actions["place"][:, 1].tolist()) == {0, 2}
    assert not actions["group"][:, [1, 3]].any()
    assert actions["group"][:, [0, 2]].any()


CONDITIONAL = {  # one row per function or target; a group has two entries per bit
    "action_mask/target|function": torch.tensor([[0, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1]]).bool(),
    "action_mask/place|function": torch.tensor([[0, 1, 0, 0, 1], [1, 1, 1, 1, 1], [1, 0, 1, 1, 0]]).bool(),
    "action_mask/group|target": torch.tensor([[1, 0] * 4, [0, 1] * 4, [1, 1, 0, 1] * 2, [1, 1] * 4]).bool(),
}
CONDITIONAL_SPECS = {name: Spec(tuple(x.shape), "bool", "binary") for name, x in CONDITIONAL.items()}


def is_legal(actions):
    """Whether ``CONDITIONAL`` allows each action."""
    targets, places, groups = CONDITIONAL.values()
    target = targets[actions["function"], actions["target"]]
    row, column = (places[actions["function"], i] for i in (actions["place"][:, 0], 2 + actions["place"][:, 1]))
    bits = groups[actions["target"]].reshape(-1, 4, 2).gather(2, actions["group"][..., None]).squeeze(2)
    return target & row & column & bits.all(1)


@pytest.mark.parametrize("heads", [HEADS, ()])
def test_masks_depend_on_earlier_choices(heads):
    """By the chain rule, entropy and KL are means of those of the parts, given the parts before them."""
    torch.manual_seed(0)
    policy = make_policy(DISCRETE, PolicyConfig(heads=heads, head_width=8, autoregressive=ORDER), INPUTS)
    strengthen(policy)
    policy.find_conditional_masks(CONDITIONAL_SPECS)
    actions = every_action()
    legal = is_legal(actions)
    rows = len(legal)
    masks = {name: x.expand(rows, *x.shape) for name, x in CONDITIONAL.items()}
    one, other = (wide(outputs_of(policy), rows) for _ in range(2))
    terms = policy.evaluate(one, actions, masks)
    log_p, log_q = (policy.evaluate(x, actions, masks)["log_prob"].detach().double() for x in (one, other))
    p = log_p.exp()
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    assert not p[~legal].any()
    assert p[legal].all()
    entropy, kl = terms["entropy"].detach(), policy.kl(policy.distribution(one, actions, masks), other, actions, masks)
    assert float((p * entropy)[legal].sum()) == pytest.approx(float(-(p * log_p)[legal].sum()), rel=1e-4)
    assert float((p * kl.detach())[legal].sum()) == pytest.approx(float((p * (log_p - log_q))[legal].sum()), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"autoregressive": ("target", "function", "place")}])
def test_a_mask_that_depends_on_a_later_choice_is_refused(changes):
    with pytest.raises(UserError, match='depends on the choice of "function", which must be sampled first'):
        make_policy(DISCRETE, config(**changes), INPUTS).find_conditional_masks(CONDITIONAL_SPECS)


@pytest.mark.parametrize(
    ("table", "refused"),
    [
        ("function: 1=target", True),  # group, whose mask depends on the target, is used always
        ("function: 1=target, 2=group", True),
        ("function: 1=target+group, 2=target", False),
        ("function: 1=place", False),
    ],
)
def test_a_mask_that_depends_on_an_unused_choice_is_refused(table, refused):
    policy = make_policy(DISCRETE, config(autoregressive=ORDER, arguments=(table,)), INPUTS)
    if not refused:
        policy.find_conditional_masks(CONDITIONAL_SPECS)
        return
    with pytest.raises(UserError, match=r'depends on the choice of "target", which agent.arguments leaves unused'):
        policy.find_conditional_masks(CONDITIONAL_SPECS)


def test_outputs_are_features_of_the_rank_of_the_action():
    policy = make_policy(ALL, config(autoregressive=ORDER), INPUTS)
    assert policy.outputs == {
        "policy/function": (3,),
        "features/target": (8, 4),
        "features/place": (8, 2, 3),
        "features/group": (8, 4),
        "policy/force": (2,),
    }
    first = make_policy(ALL, config(autoregressive=("target", "function")), INPUTS)
    assert first.outputs["features/target"] == (8, 4)  # its choice is embedded by the features of the entity
    plain = make_policy(ALL, config(), INPUTS)
    assert type(plain) is Policy
    assert plain.outputs["policy/place"] == (1, 2, 3)
    assert plain.outputs["policy/target"] == plain.outputs["policy/group"] == (1, 4)


def test_a_pointer_is_embedded_by_its_entity_and_not_by_its_position():
    torch.manual_seed(0)
    policy = make_policy(DISCRETE, config(autoregressive=("target", "function")), INPUTS)
    strengthen(policy)
    outputs = {name: x.detach() for name, x in outputs_of(policy, 1).items()}
    turned = outputs | {"features/target": outputs["features/target"].roll(1, -1)}
    first, _ = policy.sample(outputs, {}, None)
    second = policy.distribution(turned, first | {"target": (first["target"] + 1) % 4}, {})
    expected = policy.distribution(outputs, first, {})["features/function"]
    torch.testing.assert_close(second["features/function"], expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": ("palce=spatial",)}, '"palce".*Did you mean "place"'),
        ({"heads": ("place=special",)}, "spatial, pointer"),
        ({"heads": ("place",)}, "<action>=<kind>"),
        ({"heads": ("place=spatial", "place=spatial")}, "twice"),
        ({"heads": ("target=spatial",)}, "spatial\\(screen\\)"),
        ({"heads": ("target=spatial(screen)",)}, "2 × 3 = 6 places.*4 choices"),
        ({"heads": ("force=spatial",)}, "MultiDiscrete"),
        ({"heads": ("target=pointer",)}, "the lists are units"),
        ({"heads": ("target=pointer(unit)",)}, 'Did you mean "units"'),
        ({"heads": ("target=pointer(screen)",)}, "the lists are units"),
        ({"heads": ("function=pointer(units)",)}, "4 entities, but the action has 3"),
        ({"heads": ("group=pointer(units)",)}, "must be a Discrete"),
        ({"heads": ("target=select(units)",)}, "must be a MultiBinary"),
        ({"autoregressive": ("function",)}, "two actions or more"),
        ({"autoregressive": ("function", "function")}, "twice"),
        ({"autoregressive": ("function", "plaec")}, 'Did you mean "place"'),
        ({"arguments": ("function 1=place",)}, "write it like"),
        ({"arguments": ("function: one=place",)}, "<choice>=<action>"),
        ({"arguments": ("function: 3=place",)}, "0 to 2"),
        ({"arguments": ("force: 1=place",)}, "not a Discrete"),
        ({"arguments": ("function: 1=function",)}, "its own argument"),
        ({"arguments": ("function: 1=forse",)}, 'Did you mean "force"'),
        ({"arguments": ("function: 1=place", "function: 2=target")}, "two tables"),
        ({"arguments": ("function: 1=place", "target: 2=place")}, "keep one"),
        ({"arguments": ("function: 1=target", "target: 2=function")}, "before each other"),
        ({"arguments": ("function: 1=place",), "autoregressive": ("place", "function")}, "before each other"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(changes, words):
    with pytest.raises(UserError, match=words) as error:
        make_policy(ALL, PolicyConfig(**changes), INPUTS)
    assert "\n" not in str(error.value)


def test_a_discretized_action_needs_bounds():
    with pytest.raises(UserError, match="infinite bounds"):
        make_policy({"a": Spec((1,), "float32")}, PolicyConfig(distribution="discretized"), {})


def test_tables_follow_the_device_and_are_not_saved():
    policy = make_policy(ALL, config(arguments=TABLE), INPUTS)
    assert isinstance(policy, ConditionalPolicy)
    assert not [name for name in policy.state_dict() if "uses" in name]
    assert all(x.device.type == "meta" for x in policy.to("meta").buffers())
