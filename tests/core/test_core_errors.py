import pytest

from ludus.core.errors import did_you_mean

FLAGS = ["--agent", "--agent.clip", "--agent.learning-rate", "--agent.learning-rate-schedule", "--agent.gae-lambda"]
FLAGS += ["--agent.normalize-observation", "--agent.entropy-coef", "--env.num", "--network.hidden", "--nb-step"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--agent.lr", "--agent.learning-rate"),
        ("--lr", "--agent.learning-rate"),
        ("--agent.lr-schedule", "--agent.learning-rate-schedule"),
        ("--agent.norm-obs", "--agent.normalize-observation"),
        ("--agent.ent-coef", "--agent.entropy-coef"),
        ("--agent.gae", "--agent.gae-lambda"),
        ("--num", "--env.num"),
        ("--hidden", "--network.hidden"),
        ("--nbstep", "--nb-step"),
        ("--agent.lerning-rate", "--agent.learning-rate"),
    ],
)
def test_abbreviations_and_misspellings(typed: str, meant: str) -> None:
    assert did_you_mean(typed, FLAGS) == f' Did you mean "{meant}"?'


def test_newest_version_is_suggested() -> None:
    assert did_you_mean("cartpole", ["Acrobot-v1", "CartPole-v0", "CartPole-v1"]) == ' Did you mean "CartPole-v1"?'


@pytest.mark.parametrize("typed", ["--video", "--plot", "--agent.foo", "--evaluation.zzz", "--render"])
def test_dissimilar_flags_get_no_suggestion(typed: str) -> None:
    flags = [*FLAGS, "--episodes", "--preset", "--evaluation.every", "--checkpoint", "--trust", "--seed", "--out"]
    assert did_you_mean(typed, flags) == ""


@pytest.mark.parametrize("typed", ["", "-", "x", "--", "zzzzzz", "..", "--agent.zq"[8:]])
def test_no_suggestion_without_a_similar_name(typed: str) -> None:
    assert did_you_mean(typed, ["alpha", "beta"]) == ""
