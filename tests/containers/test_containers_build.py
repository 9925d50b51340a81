from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludus.containers.build import _choose_update, adapt_to_environment, build_agent, choose_device, flattened_maps
from ludus.core.spec import Spec
from ludus.settings.settings import resolve_settings

CHOICE = {"action": Spec((), "int64", "categorical", sizes=(3,))}


def networks(shape: tuple[int, ...], **changes: Any) -> set[str]:
    stack = shape[0] if len(shape) == 4 else 1
    observation = {"image": Spec(shape, "uint8", "continuous", low=0, high=255, stack=stack)}
    settings = resolve_settings("CartPole-v1", "ppo", "none", None, changes).settings
    agent: Any = build_agent(settings, observation, CHOICE, torch.device("cpu"))
    return set(agent.networks)


@pytest.mark.parametrize("shape", [(12, 12, 1), (36, 36, 3), (3, 36, 36), (63, 63, 3), (210, 32, 3)])
def test_policy_and_value_of_small_images_have_a_trunk_each(shape: tuple[int, ...]) -> None:
    assert networks(shape) == {"actor", "critic"}
    assert networks(shape, **{"network.shared": "yes"}) == {"actor_critic"}


@pytest.mark.parametrize("shape", [(64, 64, 3), (4, 84, 84), (210, 160, 3), (4, 84, 84, 3)])
def test_policy_and_value_of_large_images_share_one(shape: tuple[int, ...]) -> None:
    assert networks(shape) == {"actor_critic"}
    assert networks(shape, **{"network.shared": "no"}) == {"actor", "critic"}


@pytest.mark.parametrize(
    ("shape", "rate"), [((4,), 8.8e-4), ((5, 4), 3e-4), ((36, 36, 3), 3e-4), ((4, 84, 84, 3), 3e-4)]
)
def test_short_runs_have_a_larger_learning_rate_unless_there_are_images(shape: tuple[int, ...], rate: float) -> None:
    observation = {"vector": Spec((2,), "float32"), "other": Spec(shape, "uint8", low=0, high=255)}
    resolved = resolve_settings("CartPole-v1", "ppo", "none", None, {"nb_step": 40_000})
    assert adapt_to_environment(resolved, observation, {}).settings.agent.learning_rate == rate


@pytest.mark.parametrize(
    ("free", "needs", "device"),
    [([], 0, "cpu"), ([5, 9, 7], 8, "cuda:1"), ([5, 9, 7], 10, "cpu")],
)
def test_auto_is_the_freest_gpu_that_suffices(
    monkeypatch: pytest.MonkeyPatch, free: list[int], needs: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))  # no machine of ours has them
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free[i], 10))
    assert choose_device("auto", needs) == torch.device(device)


@pytest.mark.parametrize(
    ("environments", "nb_step", "device", "compiled"),
    [(8, 1_000_000, "cpu", False), (512, 10_000_000, "cpu", True), (512, 10_000_000, "cuda", False)],
)
def test_large_batches_repay_a_compilation_sooner(environments: int, nb_step: int, device: str, compiled: bool) -> None:
    """All runs take fewer than 50,000 optimizer steps."""
    settings = resolve_settings(
        "CartPole-v1", "ppo", "none", None, {"env.num": environments, "nb_step": nb_step}
    ).settings
    agent: Any = SimpleNamespace(recurrent=False, parameters=list)
    update, _ = _choose_update(settings, agent, torch.device(device))
    assert update == ("compiled" if compiled else "eager")


def test_a_large_layer_over_a_flattened_map_is_named() -> None:
    screen, units = Spec((3, 24, 24), "uint8", low=0, high=255), Spec((5, 2), "float32")
    place = {"place": Spec((2,), "int64", "categorical", sizes=(24, 24))}

    def warning(**changes: str) -> str:
        given = {"agent.heads": ("place=spatial",)} | {f"network.{key}": value for key, value in changes.items()}
        settings = resolve_settings("CartPole-v1", "ppo", "none", None, given).settings
        agent = build_agent(settings, {"screen": screen, "units": units}, place, torch.device("cpu"))
        return flattened_maps(agent)

    assert warning().startswith("mlp (body) has 1,184,")
    assert 'network "actor", since it gets (32, 24, 24) of source/screen flattened; ' in warning()
    assert not warning(body="small_cnn")
