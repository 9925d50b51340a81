"""Environments with several agents as one: names, endings of single agents, masks, turns."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from team_worlds import Chooser

from ludus.core.errors import UserError
from ludus.core.spec import network_inputs
from ludus.environments.agents_toy import CueTeam, Nim
from ludus.environments.check import check_environment
from ludus.environments.config import EnvConfig
from ludus.environments.gym import make_environment
from ludus.environments.multiagent import ABSENT, ACTIVE, ENTERED, TERMINATED, TRUNCATED, JointEnv
from ludus.managers.simple import SimpleEnvManager

TOY = "ludus.environments.agents_toy:"
TICTACTOE = "pettingzoo.classic.tictactoe_v3:env"


def joint(env: Any, **options: Any) -> JointEnv:
    return JointEnv(env, "team", **options)


def right_actions(env: CueTeam) -> dict[str, int]:
    return {agent: env._cues.get(agent, 0) for agent in env.possible_agents}


def play(env: JointEnv, inner: CueTeam) -> list[tuple[Any, ...]]:
    steps: list[tuple[Any, ...]] = [(*env.reset(seed=3), False)]
    while not steps[-1][-1]:
        observation, reward, terminated, truncated, info = env.step(right_actions(inner))
        steps.append((observation, info, reward, terminated, truncated, terminated or truncated))
    return steps


def test_the_names_of_the_joint_layout() -> None:
    manager = SimpleEnvManager(lambda: joint(CueTeam(agents=11, length=11)), 2, "team")
    agents = [f"agent_{i}" for i in range(11)]  # in this order: agent_10 is the last
    assert list(manager.action) == agents
    assert list(network_inputs(manager.observation)) == [f"{agent}/observation" for agent in agents]
    results = {name: spec for name, spec in manager.observation.items() if spec.result_of}
    assert list(results) == [f"{kind}/{agent}" for kind in ("reward", "status") for agent in agents]
    assert {spec.shape for spec in results.values()} == {()}
    assert results["reward/agent_10"].result_of == "agent_10"
    assert results["reward/agent_0"].dtype == "float32"


def test_agents_leave_one_after_the_other_and_the_last_one_ends_the_episode() -> None:
    inner = CueTeam(agents=3, length=3)
    steps = play(joint(inner), inner)
    status = [[int(step[0]["status"][agent]) for agent in inner.possible_agents] for step in steps]
    assert status == [
        [ACTIVE, ACTIVE, ACTIVE],
        [ACTIVE, ACTIVE, TERMINATED],
        [ACTIVE, TERMINATED, ABSENT],
        [TRUNCATED, ABSENT, ABSENT],
    ]
    rewards = [[float(step[0]["reward"][agent]) for agent in inner.possible_agents] for step in steps]
    assert rewards == [[0, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert [step[2] for step in steps[1:]] == [1.0, pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert [step[3:5] for step in steps[1:]] == [(False, False), (False, False), (False, True)]
    assert steps[-1][1]["return"] == {"agent_0": 3.0, "agent_1": 2.0, "agent_2": 1.0}  # their mean is the return
    np.testing.assert_array_equal(steps[2][0]["agent_2"]["observation"], steps[1][0]["agent_2"]["observation"])


def test_an_agent_that_comes_later_has_entered() -> None:
    inner = CueTeam(agents=3, length=5, late=True)
    steps = play(joint(inner), inner)
    assert [int(step[0]["status"]["agent_2"]) for step in steps] == [
        ABSENT,
        ENTERED,
        ACTIVE,
        TERMINATED,
        ABSENT,
        ABSENT,
    ]
    assert not steps[0][0]["agent_2"]["observation"].any()  # a blank one


class Ghosts(CueTeam):
    """Goes on observing an agent that has left, without flags."""

    def _observe(self) -> dict[str, Any]:
        return {agent: np.zeros(self.cues, np.float32) for agent in self.possible_agents} | super()._observe()


def test_an_agent_that_the_environment_no_longer_lists_has_left() -> None:
    env = joint(inner := Ghosts(agents=2, length=3, late=True))
    observation, _ = env.reset(seed=0)
    status = [observation["status"]]
    for _ in range(3):
        observation, _, terminated, truncated, _ = env.step(right_actions(inner))
        status.append(observation["status"])
    assert [int(x["agent_0"]) for x in status] == [ACTIVE, ACTIVE, ACTIVE, TRUNCATED]
    assert [int(x["agent_1"]) for x in status] == [ABSENT, ENTERED, TERMINATED, ABSENT]
    assert (terminated, truncated) == (False, True)


@pytest.mark.parametrize("agents", [[], 2, [object(), object()]])
def test_agents_that_are_no_names_do_not_say_who_is_in_the_world(agents: Any) -> None:
    env = joint(GymTeam())
    env.env.agents = agents
    env.reset(seed=0)
    observation, *_ = env.step({"agent_0": 2, "agent_1": 1})
    assert {int(status) for status in observation["status"].values()} == {ACTIVE}


def test_the_state_is_that_of_the_environment_or_all_observations() -> None:
    inner = CueTeam(agents=2, length=3)
    env = joint(inner, global_state=True)
    observation, _ = env.reset(seed=1)
    assert env.observation_space["state"].shape == (6,)
    seen = [observation[agent]["observation"] for agent in inner.possible_agents]
    np.testing.assert_array_equal(observation["state"], np.concatenate(seen))

    class WithState(CueTeam):
        def state(self) -> Any:
            return np.array([self._step], np.int64)

    env = joint(WithState(agents=2, length=3), global_state=True)
    assert env.reset(seed=1)[0]["state"].tolist() == [0]
    assert env.step(dict.fromkeys(("agent_0", "agent_1"), 0))[0]["state"].tolist() == [1]
    with pytest.raises(UserError, match=r'env.global_state is on, but environment "CartPole-v1" has a single'):
        make_environment(EnvConfig(id="CartPole-v1", global_state=True))


def test_the_state_has_zeros_for_who_is_not_in_the_world() -> None:
    """Who is cut off is shown once more, since values go on from there."""

    class Counts(CueTeam):
        def observation_space(self, agent: str) -> Any:
            return spaces.Discrete(self.cues, start=1)  # none is zero if flattened

        def _observation(self, agent: str) -> Any:
            return self._cues[agent] + 1

    env = joint(inner := Counts(agents=3, length=4, late=True), global_state=True)
    steps = play(env, inner)
    states = [step[0]["state"].reshape(3, 3) for step in steps]
    shown = [state.any(1).tolist() for state in states]
    assert shown == [
        [True, True, False],  # agent_2 comes later
        [True, True, True],
        [True, True, False],  # agent_2 terminated
        [True, False, False],  # agent_1 terminated
        [True, False, False],  # agent_0 was truncated
    ]
    assert [int(state[0].argmax()) + 1 for state in states] == [step[0]["agent_0"]["observation"] for step in steps]
    assert steps[3][0]["agent_2"]["observation"] == steps[2][0]["agent_2"]["observation"]  # its own stays as it was


def test_who_waits_may_only_take_the_first_choice_which_is_not_used() -> None:
    env = joint(Nim(sticks=9))
    _, info = env.reset(seed=0)
    left = env.env._left
    assert info["action_mask"]["player_0"].tolist() == [1, int(left > 1), int(left > 2)]
    assert info["action_mask"]["player_1"].tolist() == [1, 0, 0]
    observation, _, _, _, info = env.step({"player_0": 0, "player_1": 2})
    assert env.env._left == left - 1
    assert info["action_mask"]["player_0"].tolist() == [1, 0, 0]
    assert observation["player_1"]["observation"][-1] == 1
    manager = SimpleEnvManager(lambda: joint(Nim()), 2, "nim")
    assert manager.observation["action_mask/player_1"].shape == (3,)


def test_turn_based_games_of_pettingzoo_alternate() -> None:
    pytest.importorskip("pettingzoo")
    env = make_environment(EnvConfig(id=TICTACTOE))
    observation, info = env.reset(seed=0)
    waits = [1, *[0] * 8]
    assert info["action_mask"]["player_1"].tolist() == [1] * 9
    assert info["action_mask"]["player_2"].tolist() == waits
    moves = {"player_1": [0, 1, 2], "player_2": [3, 4]}
    for turn in range(5):
        mover = f"player_{turn % 2 + 1}"
        action = {"player_1": 8, "player_2": 8} | {mover: moves[mover][turn // 2]}  # the other's is not used
        other = f"player_{2 - turn % 2}"
        assert (observation[mover]["turn"], observation[other]["turn"]) == (1, 0)  # the board alone does not say it
        observation, reward, terminated, truncated, info = env.step(action)
        if turn < 4:
            assert info["action_mask"][mover].tolist() == waits
            assert (reward, terminated, truncated) == (0.0, False, False)
    assert (reward, terminated, truncated) == (0.0, True, False)  # the mean of 1 and −1
    assert float(observation["reward"]["player_1"]) == 1
    assert float(observation["reward"]["player_2"]) == -1
    assert observation["player_1"]["observation"].sum() == 5


def test_whose_turn_it_is_in_what_a_loaded_policy_gets() -> None:
    """The masks say it, in observations or infos; where they allow all agents something, the caller has to."""
    pytest.importorskip("pettingzoo")
    env: Any = make_environment(EnvConfig(id=TICTACTOE)).unwrapped
    game = env._turns
    game.reset(seed=0)
    game.step(4)  # of player_1
    seen = {agent: game.observe(agent) for agent in game.agents}
    free, waits = [1, 1, 1, 1, 0, 1, 1, 1, 1], [1, *[0] * 8]

    def read(observations: Any, infos: Any) -> list[Any]:
        observation, info = env.assemble(observations, infos)
        turns = [int(observation[agent]["turn"]) for agent in ("player_1", "player_2")]
        return [turns, *(info["action_mask"][agent].tolist() for agent in ("player_1", "player_2"))]

    assert read(seen, {}) == [[0, 1], waits, free]
    assert read({"player_1": seen["player_1"]}, {})[0] == [0, 0]
    bare = {agent: {"observation": x["observation"]} for agent, x in seen.items()}
    assert read(bare, {agent: {"action_mask": x["action_mask"]} for agent, x in seen.items()}) == [[0, 1], waits, free]
    open_to_all = {agent: {**x, "action_mask": np.array(free, np.int8)} for agent, x in seen.items()}
    with pytest.raises(UserError, match="the masks of player_1 and player_2 do not say whose turn it is; name the ag"):
        read(open_to_all, {})
    assert read({**open_to_all, "turn": "player_2"}, {}) == [[0, 1], waits, free]
    assert read({**open_to_all, "turn": "player_1"}, {}) == [[1, 0], free, waits]
    with pytest.raises(UserError, match='gives agent "player_2" an action mask "action_mask", which is missing; give'):
        read({**bare, "turn": "player_2"}, {})
    with pytest.raises(UserError, match='there is no agent "player_3"'):
        read({**seen, "turn": "player_3"}, {})


def test_parallel_games_of_pettingzoo_and_their_state() -> None:
    pytest.importorskip("mpe2")
    for maker in ("parallel_env", "env"):  # the AEC version goes through PettingZoo's converter
        env = make_environment(EnvConfig(id=f"mpe2.simple_spread_v3:{maker}", global_state=True))
        observation, _ = env.reset(seed=5)
        assert list(env.action_space.spaces) == ["agent_0", "agent_1", "agent_2"]
        assert observation["agent_2"]["observation"].shape == (18,)
        assert observation["state"].shape == (54,)
        for step in range(25):
            observation, reward, terminated, truncated, info = env.step(dict.fromkeys(env.action_space.spaces, 1))
            assert (terminated, truncated) == (False, step == 24)
            assert reward == pytest.approx(np.mean([observation["reward"][f"agent_{i}"] for i in range(3)]), rel=1e-5)
        assert len(info["return"]) == 3
        env.close()


def test_pettingzoo_is_needed_for_turn_based_games_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class TurnBased(CueTeam):
        def agent_iter(self) -> None: ...

    monkeypatch.setitem(sys.modules, "pettingzoo.utils.conversions", None)
    joint(CueTeam()).reset(seed=0)
    with pytest.raises(UserError, match=r"which needs PettingZoo: pip install 'ludus\[multiagent\]'"):
        joint(TurnBased())
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(UserError, match=r"tictactoe_v3:env\" needs PettingZoo: pip install 'ludus\[multiagent\]'"):
        make_environment(EnvConfig(id=TICTACTOE))


def test_a_mistake_of_the_environment_gets_a_sentence() -> None:
    class Broken(CueTeam):
        def step(self, actions: Any) -> Any:
            return {}, {}, {}, {}

    class Nobody(CueTeam):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return {}, {}

    class Spaceless:
        possible_agents = ("a",)

        def reset(self) -> None: ...

        def step(self) -> None: ...

    env = joint(Broken())
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"team: step returned .*, but must return 5 dicts by agent"):
        env.step(dict.fromkeys(("agent_0", "agent_1", "agent_2"), 0))
    with pytest.raises(UserError, match="reset returned no observation"):
        joint(Nobody()).reset(seed=0)
    with pytest.raises(UserError, match='no observation space of agent "a"; add a method observation_space'):
        joint(Spaceless())

    class Named(CueTeam):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.possible_agents = [name, "b"]

    for name in ("a/b", "reward", "status", "state", "turn", "action_mask"):  # those of the joint layout
        with pytest.raises(UserError, match='give at least one name, without "/" and other than action_mask, reward'):
            joint(Named(name))


def test_a_mask_in_an_info_that_the_first_reset_did_not_have_is_refused() -> None:
    """It would not be among the observations, so the agent would take choices that are not allowed."""

    class Late(CueTeam):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed, options)[0], self.masks()

        def step(self, actions: Any) -> Any:
            return *super().step(actions)[:4], self.masks()

        def masks(self) -> dict[str, Any]:
            return {agent: {"action_mask": np.array([1, 1, 0], np.int8)} for agent in self.agents}

    env = joint(Late(agents=2, length=4, late=True))
    env.reset(seed=0)
    with pytest.raises(UserError, match='"agent_1" has "action_mask", which that of the first reset had not; give it'):
        env.step({"agent_0": 0})
    env = joint(Late(agents=2, length=4))
    env.reset(seed=0)
    assert list(env.step({"agent_0": 0, "agent_1": 0})[-1]["action_mask"]) == ["agent_0", "agent_1"]


def test_dict_observations_and_actions_keep_their_parts() -> None:
    class Parts(CueTeam):
        def observation_space(self, agent: str) -> Any:
            return spaces.Dict({"cue": super().observation_space(agent), "count": spaces.Discrete(5, start=1)})

        def action_space(self, agent: str) -> Any:
            return spaces.Dict({"choose": spaces.Discrete(self.cues), "speed": spaces.Box(-1, 1, (2,))})

        def step(self, actions: Any) -> Any:
            assert all(action["speed"].shape == (2,) for action in actions.values())
            return super().step({agent: action["choose"] for agent, action in actions.items()})

        def _observation(self, agent: str) -> Any:
            return {"cue": super()._observation(agent), "count": 1}

    manager = SimpleEnvManager(lambda: joint(Parts(agents=2, length=2, late=True)), 1, "parts")
    assert [name for name in manager.observation if "/" in name][:2] == ["agent_0/count", "agent_0/cue"]
    assert list(manager.action)[:2] == ["agent_0/choose", "agent_0/speed"]


@pytest.mark.parametrize("id", [TOY + "CueTeam", TOY + "Nim", TICTACTOE])
def test_the_check_of_environments_finds_nothing_wrong(id: str) -> None:
    if id == TICTACTOE:
        pytest.importorskip("pettingzoo")
    check = check_environment(EnvConfig(id=id), steps=60)
    assert [problem.what for problem in check.problems if problem.severity == "error"] == []
    assert check.episodes > 3


def test_masks_at_a_time_limit_are_those_of_the_environment() -> None:
    """Values of a truncated step are those of its best allowed choice, not of the first one."""
    env = JointEnv(world := Chooser(), "chooser")
    env.reset(seed=0)
    for step in range(6):
        _, _, _, truncated, info = env.step({"masked": step % 2, "leaver": 0})
    assert truncated
    assert info["action_mask"]["masked"].tolist() == world.allowed.tolist() == [1, 0, 1, 1]


def test_a_loaded_policy_needs_the_masks_that_the_environment_gives() -> None:
    env = JointEnv(world := Chooser(), "chooser")
    observations, infos = world.reset(seed=0)
    env.reset(seed=0)
    env.assemble(observations, infos)
    env.assemble({"leaver": observations["leaver"]}, {})
    masked = {key: x for key, x in observations["masked"].items() if key != "action_mask"}
    with pytest.raises(UserError, match='chooser gives agent "masked" an action mask "action_mask", which is missing'):
        env.assemble({**observations, "masked": masked}, {})


class GymTeam(gymnasium.Env[Any, Any]):
    """A Gymnasium environment whose spaces are Dicts by agent."""

    possible_agents = ("agent_0", "agent_1")
    observation_space = spaces.Dict(dict.fromkeys(possible_agents, spaces.Box(-1, 1, (2,), np.float32)))
    action_space = spaces.Dict(dict.fromkeys(possible_agents, spaces.Discrete(3)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        ended = dict.fromkeys(action, False)
        return self.observation_space.sample(), {agent: float(x) for agent, x in action.items()}, ended, ended, {}


def test_a_gymnasium_environment_with_dicts_by_agent_has_several_agents() -> None:
    env = make_environment(EnvConfig(id="GymTeam"), GymTeam)
    observation, _ = env.reset(seed=0)
    assert {"agent_0", "agent_1", "reward", "status"} == set(observation)
    observation, reward, *_ = env.step({"agent_0": 2, "agent_1": 1})
    assert reward == 1.5
    assert observation["reward"] == {"agent_0": 2.0, "agent_1": 1.0}
