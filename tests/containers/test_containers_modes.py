"""Networks that differ between training and evaluation, or draw numbers of their own, are treated as they expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from containers_setup import make_worker, saved, train
from torch import Tensor, nn

import ludus
from ludus.agents.ppo import PPOConfig
from ludus.cli.main import main
from ludus.containers.loop import begin, collect, improve
from ludus.core.agent import Agent
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network
from ludus.networks.config import NetworkConfig
from ludus.networks.module_checks import depends_on_training_mode
from ludus.networks.net1d.lstm import LSTM


class Moody(nn.Module):
    """Batch statistics and dropout: both must rest in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation)


class MoodyCritic(nn.Module):
    """The same for agents whose critics see the action."""

    def __init__(self, inputs: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        size = sum(shape[0] for shape in inputs.values())
        self.layers = nn.Sequential(nn.Linear(size, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())

    def forward(self, observation: Tensor, taken_action: Tensor | None = None) -> Tensor:
        return self.layers(observation if taken_action is None else torch.cat([observation, taken_action], -1))


class MoodyMemory(Network):
    """The same for agents with a memory."""

    recurrent = True

    def __init__(self, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        (self.name,), self.outputs = inputs, outputs
        self.norm, self.drop = nn.BatchNorm1d(inputs[self.name][0]), nn.Dropout(0.5)
        self.memory = LSTM(inputs[self.name], NetworkConfig(lstm_size=4))
        self.heads = nn.ModuleList(nn.Linear(4, shape[0]) for shape in outputs.values())

    def initial_state(self, batch: int) -> HiddenState:
        return self.memory.initial_state(batch)

    def forward(
        self, observation: dict[str, Tensor], state: HiddenState, first: Tensor
    ) -> tuple[dict[str, Tensor], HiddenState]:
        x = observation[self.name]
        x = self.drop(self.norm(x.flatten(0, 1))).view_as(x)
        y, state = self.memory(x, state, first)
        return {name: head(y) for name, head in zip(self.outputs, self.heads, strict=True)}, state


class Normed(Moody):
    """Batch statistics alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())


class Dropping(Moody):
    """Dropout alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh())


MOODY = f"{__name__}:Moody"
CRITIC = f"{__name__}:MoodyCritic"
MEMORY = f"{__name__}:MoodyMemory"
REPLAY = {"agent__warmup": 32, "agent__batch_size": 16, "agent__replay": 200}
ACER = {"agent__warmup": 32, "agent__rollout": 8, "agent__replay": 200, "agent__replay_ratio": 1.0}
AGENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", MOODY, {}),
    "a2c": ("CartPole-v1", MOODY, {}),
    "ppo with a memory": ("CartPole-v1", MEMORY, {"agent__minibatches": 1}),
    "acer": ("CartPole-v1", MOODY, ACER),
    "dqn": ("CartPole-v1", MOODY, REPLAY),
    "discrete_sac": ("CartPole-v1", MOODY, REPLAY),
    "sac": ("Pendulum-v1", CRITIC, REPLAY),
    "td3": ("Pendulum-v1", CRITIC, REPLAY),
    "r2d2": ("CartPole-v1", MEMORY, REPLAY | {"agent__sequence": 8, "agent__burn_in": 2, "agent__overlap": 4}),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("agent", AGENTS)
def test_networks_act_in_evaluation_mode_and_learn_in_training_mode(agent: str, rows: int) -> None:
    environment, network, changes = AGENTS[agent]
    worker = make_worker(environment, agent.split()[0], env__num=rows, network__name=network, **changes)
    acting, trained = True, set()

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if acting or module not in online:
            assert not module.training
        elif torch.is_grad_enabled():
            assert module.training
            trained.add(module)

    norms = {module for module in worker.agent.modules() if isinstance(module, nn.BatchNorm1d)}
    online = {module for module in worker.agent.networks.modules() if module in norms}  # type: ignore[union-attr]
    for module in norms:
        module.register_forward_hook(note)
    begin(worker, 0)
    updates = 0
    while updates < 4:
        acting, before = True, tensors(worker.agent)
        collect(worker)
        for name, x in tensors(worker.agent).items():
            assert torch.equal(x, before[name]), name
        acting = False
        updates += improve(worker)[1]
    assert trained == online
    assert worker.agent.training  # tells a training run from an evaluation
    worker.evaluator.run(worker.agent, worker.device)
    worker.close()


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in module.state_dict().items() if isinstance(x, Tensor)}


@pytest.mark.parametrize(
    ("kind", "only_trace"),
    [
        (Normed, True),  # what is compiled, without the compiler, which takes 20 seconds
        pytest.param(Normed, False, marks=pytest.mark.slow),
        pytest.param(Dropping, False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_update_trains_in_training_mode(
    kind: type[nn.Module], only_trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled update moves the statistics as the eager one does, and is compiled once for all its steps."""
    import ludus.containers.compiled as compiled

    compile_graph: Any = (lambda graph, inputs: graph) if only_trace else compiled.compile_graph
    traced, failures = [], []
    monkeypatch.setattr(compiled, "compile_graph", lambda *given: traced.append(1) or compile_graph(*given))
    results = []
    for compiles in (False, True):
        worker = make_worker("CartPole-v1", network__name=f"{__name__}:{kind.__name__}", agent__minibatches=2)
        if compiles:
            worker.updater.compile(failures.append)  # type: ignore[attr-defined]
        begin(worker, 0)
        for _ in range(2):
            collect(worker)
            improve(worker)
        results.append(tensors(worker.agent))
        worker.close()
    assert not failures
    assert len(traced) == 1
    if kind is Normed:  # the numbers of dropout are drawn in another order
        for name, x in results[0].items():
            torch.testing.assert_close(results[1][name], x, rtol=0, atol=1e-3)


@pytest.mark.parametrize("agent", ["ppo", "a2c", "acer", "dqn", "rainbow", "iqn", "r2d2", "sac", "td3", "discrete_sac"])
def test_networks_of_ludus_need_no_switch(agent: str) -> None:
    environment = "Pendulum-v1" if agent in ("sac", "td3") else "CartPole-v1"
    worker = make_worker(environment, agent)
    assert not depends_on_training_mode(worker.agent)
    worker.close()


def test_evaluation_moves_no_statistics_of_the_network(tmp_path: Path) -> None:
    often, never = (
        saved(train(tmp_path / str(every), "CartPole-v1", network__name=MOODY, evaluation__every=every).run)
        for every in (1, 1_000_000)
    )
    for name, x in often["agent"].items():
        assert torch.equal(x, never["agent"][name]), name


def test_a_loaded_policy_rests_and_acts_on_one_observation(tmp_path: Path) -> None:
    result = train(tmp_path, "CartPole-v1", network__name=MOODY)
    policy = result.load()
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    assert len({int(policy.act(observation)) for _ in range(20)}) == 1
    assert not policy.agent.training


def test_a_network_that_draws_numbers_repeats_itself_by_seed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = saved(train(tmp_path / "1", "CartPole-v1", network__name=MOODY).run)
    torch.manual_seed(2)
    two = saved(train(tmp_path / "2", "CartPole-v1", network__name=MOODY).run)
    for name, x in one["agent"].items():
        assert torch.equal(x, two["agent"][name]), name


def test_a_native_vector_environment_can_be_played(tmp_path: Path) -> None:
    result = train(tmp_path, "CartPole-v1", env__backend="vector")
    out = tmp_path / "film.gif"
    assert main(["play", str(result.run), "--out", str(out)]) == 0
    assert out.stat().st_size > 0


def test_an_agent_that_lacks_a_part_is_told_which(tmp_path: Path) -> None:
    with pytest.raises(ludus.UserError, match="lacks act"):
        train(tmp_path, "CartPole-v1", agent=f"{__name__}:Halfway")


class Halfway(Agent):
    Config = PPOConfig
