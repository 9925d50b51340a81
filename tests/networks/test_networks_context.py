"""A body that attends to lists with queries from the other observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ludus.containers.build import build_agent, build_evaluator, build_manager
from ludus.containers.local import LocalWorker
from ludus.containers.loop import begin, collect
from ludus.containers.updater import LocalUpdater
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, Shape, Shapes, SubModule
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.critic import ACTION
from ludus.networks.modular import ModularNetwork
from ludus.settings.settings import resolve_settings

T, B = 3, 2
FIRST = torch.tensor([[True, True], [False, True], [False, False]])
INPUTS: Shapes = {"units": (3, 5), "speed": (2,), "order": (4,)}
MASKS = {"units": "units/mask"}
DECODER = 'transformer_dec(queries="given", width=8, heads=2, layers=2)'
CONFIG = NetworkConfig(net1d="identity1d", net2d="identity2d", body=DECODER)


def rows(shapes: Shapes, garbage: float = 0.0) -> dict[str, Tensor]:
    """Observations, with ``garbage`` in the padding of units; one list is empty."""
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.rand(T, B, *shape, generator=generator) for name, shape in shapes.items()}
    mask = torch.arange(5) < torch.tensor([[3, 5], [0, 1], [2, 4]]).unsqueeze(-1)
    return x | {"units": torch.where(mask.unsqueeze(2), x["units"], garbage), "units/mask": mask}


def build(config: NetworkConfig = CONFIG, inputs: Shapes = INPUTS, outputs: Shapes | None = None, **spec: Any) -> Any:
    torch.manual_seed(0)
    outputs = {"policy": (2,), "value": (1,)} if outputs is None else outputs
    return build_network(config, NetworkSpec(inputs, outputs, **{"masks": MASKS, **spec}))


def is_without_effect(parameter: str) -> bool:
    """Self-attention of a single query has the weight 1, whatever its query and key; attention ignores a key's bias."""
    return ".attention.query." in parameter or ".attention.key." in parameter or parameter.endswith("key.bias")


def test_vectors_are_the_queries_and_lists_the_context() -> None:
    network = build().double()
    piece = network.pieces["body"]
    assert (piece.input_shape, piece.output_shape()) == ((6, 1), (8, 1))
    x = {name: y.double() if y.is_floating_point() else y for name, y in rows(INPUTS).items()}
    queries = torch.cat([x["speed"], x["order"]], -1).flatten(0, 1).unsqueeze(2)  # [N, 6, 1]
    units, mask = x["units"].flatten(0, 1), x["units/mask"].flatten(0, 1)
    expected, _ = piece(queries, HiddenState(), FIRST, None, units, mask)
    y, _ = network(x, HiddenState(), FIRST)
    torch.testing.assert_close(y["value"].flatten(0, 1), network.projections["value"](expected.flatten(1)))
    alone, _ = piece(queries[:1], HiddenState(), FIRST, None, units[:1, :, :3])  # the first has three units
    torch.testing.assert_close(expected[:1], alone)


def test_gradients_reach_queries_and_context_but_not_padding() -> None:
    network = build()
    x = {name: y.requires_grad_(y.is_floating_point()) for name, y in rows(INPUTS).items()}
    y, _ = network(x, HiddenState(), FIRST)
    sum(z.square().sum() for z in y.values()).backward()
    assert all(p.grad.any() for name, p in network.named_parameters() if not is_without_effect(name))
    assert x["speed"].grad.flatten(0, 1).any(1).all()  # type: ignore[union-attr]
    assert torch.equal(x["units"].grad.any(2), x["units/mask"])  # type: ignore[union-attr]


@pytest.mark.parametrize("shared", ["yes", "sources", "body"])
@pytest.mark.parametrize("garbage", [1e3, float("nan")])
def test_padding_of_the_context_changes_nothing(garbage: float, shared: Any) -> None:
    branches = {} if shared == "yes" else {"actor": ("policy",), "critic": ("value",)}
    config = NetworkConfig(net2d="entity_mlp", body=DECODER, shared=shared, hidden=(4,))
    network = build(config, branches=branches)
    results = []
    for x in (rows(INPUTS), rows(INPUTS, garbage)):
        network.zero_grad()
        y, _ = network(x, HiddenState(), FIRST)
        sum(z.square().sum() for z in y.values()).backward()
        results.append((y, {name: p.grad.clone() for name, p in network.named_parameters()}))
        assert all(z.isfinite().all() for z in y.values())
    torch.testing.assert_close(results[0], results[1])


def test_lists_of_different_length_are_one_context() -> None:
    network = build(inputs=INPUTS | {"items": (3, 2)})
    x = rows(INPUTS | {"items": (3, 2)})
    seen: list[Any] = []
    network.pieces["body"].register_forward_pre_hook(lambda _, given: seen.extend(given))
    network(x, HiddenState(), FIRST)
    _, _, _, mask, context, context_mask = seen
    assert mask is None
    assert torch.equal(context, torch.cat([x["units"], x["items"]], 3).flatten(0, 1))
    assert torch.equal(context_mask[:, :5], x["units/mask"].flatten(0, 1))
    assert context_mask[:, 5:].all()


def test_outputs_about_entities_come_from_their_source() -> None:
    """The queries are as many as the units, but they are not the units."""
    inputs: Shapes = {"units": (3, 5), "image": (2, 1, 5)}
    config = NetworkConfig(net2d="identity2d", net3d="identity3d", body=DECODER)
    network = build(config, inputs, {"target": (1, 5), "value": (1,)}, over={"target": "units"})
    y, _ = network(x := rows(inputs), HiddenState(), FIRST)
    assert network.pieces["body"].output_shape() == (8, 5)
    assert network.projections["target"].in_channels == 3 + 8 * 5
    assert torch.equal(y["target"].squeeze(2) != 0, x["units/mask"])
    learned = NetworkConfig(net2d="identity2d", body="transformer_dec(queries=5, width=8)")
    network = build(learned, INPUTS, {"target": (1, 5)}, over={"target": "units"})
    assert network.projections["target"].in_channels == 3 + 8 * 5


@pytest.mark.parametrize("members", [1, 2])
def test_actions_of_a_critic_are_queries(members: int) -> None:
    network = build(inputs={"units": (3, 5), ACTION: (2,)}, outputs={"q": (1,)}, concatenate=True, members=members)
    x = rows({"units": (3, 5)}) | {ACTION: torch.rand(T, B, 2, requires_grad=True)}
    y, _ = network(x, network.initial_state(B), FIRST)
    y["q"].sum().backward()
    assert x[ACTION].grad.flatten(0, 1).any(1).all()  # type: ignore[union-attr]


class Counter(SubModule):
    """A recurrent piece with a context: the sum over time of a vector and of the entries that are present."""

    dim, recurrent = 1, True

    def __init__(self, input_shape: Shape, config: NetworkConfig, context_shape: Shape, *, scale: float = 1.0) -> None:
        super().__init__(input_shape)
        self.context_shape, self.scale = context_shape, nn.Parameter(torch.tensor(scale))

    @classmethod
    def uses_context(cls, arguments: Mapping[str, Any]) -> bool:
        return True

    def output_shape(self, dim: int | None = None) -> Shape:
        return (1,)

    def initial_state(self, batch: int) -> HiddenState:
        return HiddenState(sum=torch.zeros(batch, 1))

    def forward(
        self, x: Any, state: Any, first: Any, mask: Any = None, context: Any = None, context_mask: Any = None
    ) -> tuple[Tensor, HiddenState]:
        steps = first.shape
        assert (x.shape, context.shape) == ((*steps, *self.input_shape), (*steps, *self.context_shape))
        found = (context * context_mask.unsqueeze(2)).sum((2, 3)) + x.sum(2)  # [T, B]
        total, out = state["sum"], []
        for now, reset in zip(found, first, strict=True):
            total = total * ~reset.unsqueeze(1) + now.unsqueeze(1)
            out.append(self.scale * total)
        return torch.stack(out), HiddenState(sum=total)


def test_recurrent_piece_with_a_context_equals_its_steps() -> None:
    network = build(NetworkConfig(net1d="identity1d", net2d="identity2d", body=f"{__name__}:Counter(scale=2.0)"))
    x, state = rows(INPUTS), network.initial_state(B)
    together, last = network(x, state, FIRST)
    for t in range(T):
        y, state = network({name: z[t : t + 1] for name, z in x.items()}, state, FIRST[t : t + 1])
        torch.testing.assert_close(y["value"][0], together["value"][t])
    torch.testing.assert_close(dict(state), dict(last))


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        ({"body": DECODER}, INPUTS, "network.body.*no source gives a list.*network.net2d entity_mlp"),
        ({"body": DECODER}, {"speed": (2,)}, "network.body.*no source gives a list"),
        (
            {"body": DECODER, "net2d": "identity2d"},
            {"units": (3, 5)},
            r"all sources give lists.*transformer_dec\(queries=4\)",
        ),
        (
            {"body": DECODER, "net2d": "identity2d"},
            INPUTS | {"items": (2, 7)},
            '"units" and "items" cannot be joined.*equal features',
        ),
        ({"net2d": DECODER, "body": "mlp"}, INPUTS, "network.net2d.*only network.body"),
        ({"net2d": "identity2d", "body": "identity2d", "head1d": DECODER}, INPUTS, "network.head1d.*only network.body"),
        ({"net2d": "identity2d", "body": 'transformer_dec(queries="gven")'}, INPUTS, "queries is 'gven'.*given"),
        (
            {"net2d": "identity2d", "body": 'transformer_dec(queries="given", context_shape=[3, 5])'},
            INPUTS,
            'no argument "context_shape": its arguments are queries, width, layers, heads, dropout',
        ),
    ],
)
def test_what_lacks_queries_or_a_context_is_refused(config: dict[str, Any], inputs: Shapes, message: str) -> None:
    with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
        build(NetworkConfig(**config), inputs)


def test_other_networks_have_no_context() -> None:
    network = ModularNetwork(
        NetworkSpec(INPUTS, {"v": (1,)}), NetworkConfig(net2d="identity2d", body="transformer_dec")
    )
    assert network._context is None


class LookupEnv(gymnasium.Env[Any, Any]):
    """Answer with the value of the entity whose key is asked for; there are 1 to 4 entities."""

    observation_space = spaces.Dict(
        {
            "question": spaces.Box(0, 1, (4,), np.float32),
            "units": spaces.Sequence(spaces.Box(0, 1, (6,), np.float32), stack=True),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward = float(action == self.answer)
        return self._draw(), reward, self.count == 8, False, {}

    def _draw(self) -> Any:
        count = int(self.np_random.integers(1, 5))
        keys, values = self.np_random.permutation(4)[:count], self.np_random.integers(2, size=count)
        self.answer = values[0]
        units = np.concatenate([np.eye(4)[keys], np.eye(2)[values]], 1).astype(np.float32)
        return {"question": np.eye(4, dtype=np.float32)[keys[0]], "units": self.np_random.permutation(units)}


def make_worker(**changes: Any) -> LocalWorker:
    torch.set_num_threads(1)
    settings = {
        "env.num": 4,
        "env.max_length": 4,
        "network.net2d": "identity2d",
        "network.body": 'transformer_dec(queries="given", width=16, heads=2, layers=1)',
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    made = resolve_settings(f"{__name__}:LookupEnv", "ppo", "none", None, settings).settings
    manager = build_manager(made)
    learner = build_agent(made, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(learner.action_transform)
    return LocalWorker(made, learner, manager, LocalUpdater(learner), build_evaluator(made, learner))


@pytest.mark.parametrize("shared", ["yes", "no"])
def test_ppo_trains_a_decoder_with_given_queries(shared: str) -> None:
    worker = make_worker(network__shared=shared, agent__rollout=4, agent__minibatches=2)
    agent: Any = worker.agent
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    try:
        begin(worker, 1)
        for _ in range(3):
            collect(worker)
            batch = worker.cache.read()
            with torch.no_grad():
                terms, _ = agent.evaluate(batch.without_last_observation())
            torch.testing.assert_close(terms["log_prob"], batch.experience["log_prob"], rtol=0, atol=1e-4)
            learned = agent.learn(batch, worker.updater)
            assert all(torch.isfinite(x) for x in learned.metrics.values()), learned.metrics
        same = [name for name, p in agent.named_parameters() if torch.equal(p, before[name])]
        assert all(map(is_without_effect, same)), same
        assert all(p.isfinite().all() for p in agent.parameters())
    finally:
        worker.close()
