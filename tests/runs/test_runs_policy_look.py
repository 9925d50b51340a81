"""What a loaded policy tells beside actions: states for many clients, values and distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import TOY, UNSCALED, train

import ludus
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.runs.policy import Player

REPLAY: dict[str, Any] = {"agent__batch_size": 8, "agent__warmup": 20}
LSTM: dict[str, Any] = {"network__body": "lstm"}
SEQUENCES: dict[str, Any] = (
    REPLAY | LSTM | {"agent__sequence": 4, "agent__burn_in": 2, "agent__overlap": 0, "nb_step": 200}
)
POLICIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", "ppo", UNSCALED),
    "lstm": ("CartPole-v1", "ppo", LSTM | UNSCALED),
    "shared lstm": ("CartPole-v1", "ppo", LSTM | UNSCALED | {"network__shared": "yes"}),
    "acer": ("CartPole-v1", "acer", {"agent__rollout": 8, "agent__warmup": 20}),
    "acer lstm": ("CartPole-v1", "acer", LSTM | {"agent__rollout": 8, "agent__warmup": 20}),
    "acer_vtrace": ("CartPole-v1", "acer_vtrace", {"agent__rollout": 8, "agent__warmup": 20}),
    "dqn": ("CartPole-v1", "dqn", REPLAY),
    "iqn": ("CartPole-v1", "iqn", REPLAY),
    "rainbow": ("CartPole-v1", "rainbow", REPLAY),
    "r2d2": ("CartPole-v1", "r2d2", SEQUENCES),
    "discrete_sac": ("CartPole-v1", "discrete_sac", REPLAY),
    "pendulum": ("Pendulum-v1", "ppo", {"agent__normalize_reward": True}),
    "tanh": ("Pendulum-v1", "ppo", {"agent__distribution": "tanh"}),
    "beta": ("Pendulum-v1", "ppo", {"agent__distribution": "beta"}),
    "td3": ("Pendulum-v1", "td3", REPLAY),
    "sac": ("Pendulum-v1", "sac", REPLAY),
    "sac lstm": ("Pendulum-v1", "sac", SEQUENCES),
    "masked": (TOY + "MaskedEnv", "ppo", {}),
    "masked dqn": (TOY + "MaskedEnv", "dqn", REPLAY),
    "mixed": (TOY + "MixedActionEnv", "ppo", {"env__options": ("more=true",)}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("looked_at")


def policy(folder: Path, name: str) -> Player:
    """A fresh player of a run that is made when it is first asked for."""
    environment, agent, changes = POLICIES[name]
    place = folder / name.replace(" ", "_")
    if not place.exists():
        train(place, environment, agent, **changes)
    return ludus.load("latest", "latest", runs=str(place))


def observations(player: Player, count: int) -> Any:
    return np.random.default_rng(0).normal(0, 1, (count, *player._world.observation["observation"].shape)).astype("f4")


@pytest.mark.parametrize("name", ["ppo", "lstm", "acer lstm", "r2d2", "dqn", "sac lstm"])
def test_a_state_of_ones_own_does_what_the_players_memory_does(folder: Path, name: str) -> None:
    own, free = policy(folder, name), policy(folder, name)
    x = observations(own, 5)
    state = free.initial_state()
    for row in x:
        expected = own.act(row)
        action, state = free.act(row, state=state)
        np.testing.assert_array_equal(action, expected)
        assert np.shape(action) == np.shape(expected)
    assert bool(state) == bool(own._state)
    for key, tensor in state.items():
        torch.testing.assert_close(tensor, own._state[key])
    assert free._rows == 0  # it remembers nothing itself


def test_clients_do_not_disturb_each_other_and_may_be_answered_together(folder: Path) -> None:
    alone, server = policy(folder, "lstm"), policy(folder, "lstm")
    x = observations(alone, 6)
    states = {client: server.initial_state() for client in "ab"}
    for client, row in zip("ababab", x, strict=True):
        _, states[client] = server.act(x[0] if client == "a" else row, state=states[client])
    for _ in range(3):
        alone.act(x[0])
    for key, tensor in states["a"].items():
        assert torch.equal(tensor, alone._state[key])
    joined = HiddenState.concatenate([states["a"], states["b"]])
    together, after = server.act(x[:2], state=joined)
    one, _ = server.act(x[1], state=after.rows(slice(1, 2)))
    assert together.shape == (2,)
    assert np.shape(one) == ()
    separate = [server.act(x[i], state=states[client]) for i, client in enumerate("ab")]
    np.testing.assert_array_equal(together, [action for action, _ in separate])
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, torch.cat([state[key] for _, state in separate]))


def test_a_new_episode_of_a_client_is_told_by_first(folder: Path) -> None:
    player = policy(folder, "lstm")
    x = observations(player, 3)
    _, used = player.act(x[0], state=player.initial_state())
    _, begun = player.act(x[1], state=used, first=True)
    _, fresh = player.act(x[1], state=player.initial_state())
    assert all(torch.equal(begun[key], fresh[key]) for key in fresh)


def test_a_state_of_another_size_is_one_sentence(folder: Path) -> None:
    player = policy(folder, "lstm")
    x = observations(player, 3)
    with pytest.raises(UserError, match=r"^The hidden state has shape [^\n]*initial_state\(3\)[^\n]*$"):
        player.act(x, state=player.initial_state(2))
    with pytest.raises(UserError, match=r"has nothing for"):
        player.value(x[0], state=HiddenState())


@pytest.mark.parametrize(
    "name", [name for name in POLICIES if name not in ("sac lstm", "mixed", "masked", "masked dqn")]
)
def test_values_are_one_number_per_observation(folder: Path, name: str) -> None:
    player = policy(folder, name)
    x = observations(player, 4)
    values = player.value(x)
    assert values.shape == (4,)
    assert len(set(values.tolist())) > 1
    one = player.value(x[1])
    assert isinstance(one, float)
    assert one == pytest.approx(values[1], rel=1e-5, abs=1e-5)


def test_a_value_is_that_of_the_critic(folder: Path) -> None:
    player = policy(folder, "ppo")
    x = observations(player, 4)
    agent: Any = player.agent
    critic = agent.networks["critic"]
    out, _ = critic({"observation": torch.from_numpy(x)[None]}, HiddenState(), torch.ones(1, 4, dtype=torch.bool))
    np.testing.assert_allclose(player.value(x), out["value"][0, :, 0].detach().numpy(), rtol=1e-6)


def test_a_scaled_reward_does_not_show_in_the_value(folder: Path) -> None:
    player = policy(folder, "pendulum")
    x = observations(player, 4)
    agent: Any = player.agent
    scale = float(agent.reward_scaler.statistics.scale)
    assert scale != 1
    values = player.value(x)
    agent.reward_scaler = None
    np.testing.assert_allclose(values * scale, player.value(x), rtol=1e-5)


def test_the_value_of_dqn_is_the_largest_q_and_forbidden_choices_do_not_count(folder: Path) -> None:
    player = policy(folder, "masked dqn")
    shown = np.zeros((10, 10), np.float32)
    only = np.eye(10, dtype=np.int8)
    each = player.value({"observation": shown, "action_mask": only})
    free = player.value({"observation": shown[:1], "action_mask": np.ones((1, 10), np.int8)})
    assert len(set(each.tolist())) == 10
    assert free[0] == pytest.approx(each.max())


def test_r2d2s_value_is_not_squeezed(folder: Path) -> None:
    from ludus.ops.q_learning import rescale

    player = policy(folder, "r2d2")
    x = observations(player, 2)
    agent: Any = player.agent
    seen = {"observation": torch.from_numpy(x)[None]}
    out, _ = agent.run("q", seen, agent.initial_state(2), torch.zeros(1, 2, dtype=torch.bool))
    squeezed = agent.head.q({name: t[0] for name, t in out.items()}).amax(-1).detach()
    torch.testing.assert_close(rescale(torch.from_numpy(player.value(x)), 1e-3), squeezed)


@pytest.mark.parametrize("name", ["lstm", "shared lstm", "acer lstm"])
def test_a_value_with_a_memory_knows_what_came_before(folder: Path, name: str) -> None:
    """The critic's memory moves while acting, and looking changes nothing."""
    player = policy(folder, name)
    x = observations(player, 4)
    for row in x[:3]:
        player.act(row)
    agent: Any = player.agent
    seen = {"observation": torch.from_numpy(x)[:, None]}
    first = torch.tensor([True, False, False, False])[:, None]
    outputs, _ = agent.outputs(seen, agent.initial_state(1), first)
    if "value" in outputs:
        expected = float(outputs["value"][-1, 0, 0].detach())
    else:
        probabilities = outputs["policy/action"][-1, 0].softmax(-1)
        expected = float((probabilities * outputs["q"][-1, 0]).sum().detach())
    assert player.value(x[3]) == pytest.approx(expected, rel=1e-4)
    assert player.value(x[3]) == player.value(x[3])
    assert player.value(x[3]) != pytest.approx(player.value(x[3], first=True), rel=1e-6)


def test_a_critic_whose_memory_is_not_kept_says_so(folder: Path) -> None:
    player = policy(folder, "sac lstm")
    with pytest.raises(UserError, match=r"^SAC gives no value with a recurrent critic, [^\n]*$"):
        player.value(observations(player, 1)[0])


@pytest.mark.parametrize("name", ["ppo", "lstm", "acer", "discrete_sac"])
def test_probabilities_of_choices_are_those_that_actions_have(folder: Path, name: str) -> None:
    player = policy(folder, name)
    x = observations(player, 1)
    found = player.distribution(x[0])
    assert found.keys() == {"probabilities"}
    assert found["probabilities"].shape == (2,)
    assert found["probabilities"].sum() == pytest.approx(1)
    many = np.repeat(x, 4000, 0)
    drawn = player.act(many, greedy=False)
    assert np.mean(drawn) == pytest.approx(found["probabilities"][1], abs=0.05)
    assert player.distribution(many)["probabilities"].shape == (4000, 2)


def test_mean_and_deviation_of_a_box_are_in_its_units(folder: Path) -> None:
    player = policy(folder, "pendulum")
    x = observations(player, 1)
    agent: Any = player.agent
    with torch.no_grad():
        agent.policy.heads["policy/action"].log_std.fill_(-3.0)  # far from the bounds, where nothing is clipped
    found = player.distribution(x[0])
    assert found["mean"].shape == found["std"].shape == (1,)
    np.testing.assert_allclose(found["mean"], player.act(x[0]), rtol=1e-5)
    drawn = player.act(np.repeat(x, 20_000, 0), greedy=False)
    assert drawn.std() == pytest.approx(float(found["std"][0]), rel=0.03)
    assert float(found["std"][0]) == pytest.approx(2 * np.exp(-3))  # Pendulum's torque lies in [-2, 2]


def test_tanh_and_beta_say_which_numbers_they_are(folder: Path) -> None:
    for name in ("tanh", "sac"):
        player = policy(folder, name)
        x = observations(player, 2)
        found = player.distribution(x)
        assert found.keys() == {"mean_before_tanh", "std_before_tanh"}
        np.testing.assert_allclose(2 * np.tanh(found["mean_before_tanh"]), player.act(x), rtol=1e-4)
    player = policy(folder, "beta")
    x = observations(player, 2)
    found = player.distribution(x)
    mode = (found["alpha"] - 1) / (found["alpha"] + found["beta"] - 2)
    np.testing.assert_allclose(-2 + 4 * mode, player.act(x), rtol=1e-4)


def test_a_forbidden_choice_has_probability_0(folder: Path) -> None:
    player = policy(folder, "masked")
    mask = np.array([1, 0] * 5, np.int8)
    found = player.distribution({"observation": np.zeros(10, np.float32), "action_mask": mask})["probabilities"]
    assert (found[mask == 0] == 0).all()
    assert found.sum() == pytest.approx(1)


def test_actions_in_a_dict_have_a_distribution_each(folder: Path) -> None:
    player = policy(folder, "mixed")
    environment = player.environment()
    observation = {name: x[0].numpy() for name, x in environment.reset(0).observation.items()}
    environment.close()
    found = player.distribution(observation["observation"] if list(observation) == ["observation"] else observation)
    assert found.keys() == {"choice", "amount", "switches", "dials"}
    assert found["choice"].keys() == {"probabilities"}
    assert found["amount"].keys() == {"mean", "std"}
    assert ((found["switches"]["probabilities"] > 0) & (found["switches"]["probabilities"] < 1)).all()
    np.testing.assert_allclose(found["dials"]["probabilities"].sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("name", ["dqn", "td3"])
def test_agents_without_a_distribution_say_so(folder: Path, name: str) -> None:
    player = policy(folder, name)
    with pytest.raises(UserError, match=r"no distribution of actions, since [^\n]*policy\.act[^\n]*$"):
        player.distribution(observations(player, 1)[0])
