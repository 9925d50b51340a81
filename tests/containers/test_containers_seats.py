"""One ``collect`` for one role, several groups and several roles; nothing in it waits for a device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from containers_setup import make_worker
from role_worlds import SpeakerListener
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ludus.containers.build import build_agent
from ludus.containers.guard import Guard
from ludus.containers.loop import begin, collect
from ludus.containers.updater import LocalUpdater
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.seat import Seat
from ludus.core.updater import Updater
from ludus.logging.clock import Clock
from ludus.settings.settings import resolve_settings

CUE = "ludus.environments.tensor_toy:TensorCue"
CPU = torch.device("cpu")


class NoHostSync(TorchDispatchMode):
    """Refuses operations that make a GPU's host wait."""

    REFUSED = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_", "index_put") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        assert name not in self.REFUSED, name
        assert not by_mask, "indexing by a mask"
        return func(*args, **(kwargs or {}))


def refuse(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"Tensor.{name} in collect")

    return refused


@pytest.mark.parametrize("network", ["mlp", "lstm"])
@pytest.mark.parametrize("truncates", ["false", "true"], ids=["terminated", "truncated"])
def test_collecting_from_tensors_never_waits_for_the_device(
    network: str, truncates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"network__body": "lstm"} if network == "lstm" else {}
    options = (f"truncates={truncates}",)
    worker = make_worker(CUE, "ppo", env__backend="tensor", env__options=options, env__num=5, **body)
    begin(worker, 0)
    collect(worker)
    with monkeypatch.context() as patch, NoHostSync():
        for name in ("numpy", "cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(Tensor, name, refuse(name))
        steps = collect(worker)
    worker.close()
    assert steps == 5 * 8


def test_the_refusal_refuses() -> None:
    x = torch.tensor([1.0, 2.0])
    with NoHostSync():
        for wrong in (lambda: x[x > 1], lambda: bool(x[0]), lambda: x.nonzero(), lambda: x[0].item()):
            with pytest.raises(AssertionError):
                wrong()


def test_a_recurrent_critic_values_the_last_observation_with_the_memory_of_its_episode() -> None:
    worker = make_worker(
        CUE, "ppo", env__backend="tensor", env__options=("truncates=true",), env__num=4, network__body="lstm"
    )
    begin(worker, 0)
    collect(worker)
    batch, agent = worker.cache.read(), worker.agent
    last = {"observation": torch.tensor([0.0, 0.0, 1.0]).expand(1, 4, 3)}  # a cue's episode at its end
    found = 0
    for t in range(8):
        if not batch.first[t + 1].any():
            continue
        with torch.no_grad():
            seen = {name: x[: t + 1] for name, x in batch.observation.items()}
            _, state = agent.outputs(seen, HiddenState(batch.state), batch.first[: t + 1])  # type: ignore[operator]
            outputs, _ = agent.outputs(last, state, torch.zeros(1, 4, dtype=torch.bool))  # type: ignore[operator]
        torch.testing.assert_close(batch.experience["final_value"][t], outputs["value"][0, :, 0])
        found += 1
    worker.close()
    assert found == 2
    assert batch.real.all()


def test_a_reset_without_an_ending_is_refused_unless_it_is_padding() -> None:
    worker = make_worker(CUE, "ppo", env__backend="tensor", env__num=4)
    begin(worker, 0)
    collect(worker)
    batch = worker.cache.read()
    batch.first[3, 2] = True
    with pytest.raises(UserError, match=r"row 2.*real and begins an episode"):
        worker.guard.learn(batch)
    batch.real[2, 2] = False  # an episode that was lost
    Guard(worker.agent, worker.updater, worker.manager).learn(batch)
    worker.close()


def make_seats(manager: SpeakerListener, seed: int) -> tuple[SimpleNamespace, dict[str, Updater]]:
    """A PPO agent for each role."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    small: dict[str, Any] = {"network.hidden": (32,), "agent.rollout": 8, "agent.learning_rate": 3e-3, "env.num": 32}
    settings = resolve_settings("CartPole-v1", "ppo", "none", None, small | {"agent.entropy_coef": 0.02}).settings
    seats, updaters = [], {}
    for i, (role, needs) in enumerate(manager.roles.items()):
        agent = build_agent(settings, needs.observation, needs.action, CPU)
        generator = torch.Generator().manual_seed(100 * seed + i)
        agent.generator.manual_seed(seed)  # type: ignore[union-attr, operator]
        rows = Rows.all(manager.count * needs.agents)
        seats.append(Seat(agent, agent.make_cache(rows), agent.make_noise(rows, generator), rows, CPU, role=role))
        updaters[role] = LocalUpdater(agent)
    return SimpleNamespace(seats=seats, manager=manager, clock=Clock()), updaters


@pytest.mark.parametrize("groups", [1, 2])
def test_two_roles_learn_in_two_seats(groups: int) -> None:
    """A speaker and a listener agree on words; by chance a third of the choices are right."""
    manager = SpeakerListener(32, groups)
    loop, updaters = make_seats(manager, 0)
    begin(loop, 0)
    steps = 0
    while steps < 40_000:
        steps += collect(loop)
        for seat in loop.seats:
            while seat.cache.ready():
                seat.agent.learn(seat.cache.read(), updaters[seat.role])
        if sum(manager.rewards[-16 * groups :]) >= 0.5 * 0.95 * 16 * groups:  # an episode is two steps long
            break
    assert steps % (32 * 8) == 0
    assert sum(manager.rewards[-16 * groups :]) >= 0.5 * 0.95 * 16 * groups, steps


def test_a_critic_without_memory_never_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are computed in parts when learning starts, also with a recurrent actor and same-step resets."""
    worker = make_worker(
        CUE,
        "ppo",
        env__backend="tensor",
        env__options=("truncates=true",),
        env__num=4,
        network__actor__body="lstm",
    )
    agent: Any = worker.agent
    calls: list[int] = []
    hook = agent.networks["critic"].register_forward_hook(lambda *_: calls.append(1))
    begin(worker, 0)
    collect(worker)
    assert not calls
    batch = worker.cache.read()
    assert "value" not in batch.experience
    assert batch.final
    whole = agent._values(batch)
    monkeypatch.setattr("ludus.agents.actor_critic.VALUE_ROWS", 12)  # three steps of four rows
    torch.testing.assert_close(agent._values(batch), whole)
    assert len(calls) == 4  # 1 and 3
    assert whole.shape == (9, 4)
    hook.remove()
    worker.close()
