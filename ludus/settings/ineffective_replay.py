"""Settings of agents with a replay that would do nothing beside others of theirs: a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import not_
from typing import Any, NamedTuple

from ludus.settings.settings import Settings


class Idle(NamedTuple):
    """Settings (those that an agent has) which nothing reads while another has such a value."""

    names: str
    by: str
    idle: Callable[[Any], Any]  # of the value of ``by``: whether they do nothing
    why: str  # may name that value: {}


IDLE = (
    Idle("priority_exponent importance_exponent priority_mix", "prioritized", not_, "agent.prioritized is off"),
    Idle("importance_exponent", "priority_exponent", not_, "agent.priority_exponent is 0, so there is no bias"),
    Idle("burn_in overlap priority_mix", "sequence", not_, "agent.sequence is 0, and single transitions are drawn"),
    Idle("atoms", "values", "expected".__eq__, "agent.values is expected, one number for each choice"),
    Idle("v_min v_max", "values", "categorical".__ne__, "agent.values is {}, which has no bounds"),
    Idle("temperature", "munchausen", not_, "agent.munchausen is 0"),
    Idle(
        "epsilon_schedule epsilon_start epsilon_end epsilon_share epsilon_ladder",
        "noisy",
        bool,
        "agent.noisy is on, and noisy layers explore in place of ε",
    ),
    Idle("epsilon_end epsilon_share", "epsilon_schedule", "constant".__eq__, "agent.epsilon_schedule is constant"),
    Idle("target_noise_clip", "target_noise", not_, "agent.target_noise is 0"),
    Idle("noise_clip", "noise", "clipped_normal".__ne__, "agent.noise is {}, and only clipped_normal has a clip"),
    Idle("noise_theta", "noise", "ornstein_uhlenbeck".__ne__, "agent.noise is {}, and only ornstein_uhlenbeck has it"),
    Idle("alpha_learning_rate target_entropy", "learn_alpha", not_, "agent.learn_alpha is off, so alpha stays"),
    Idle("average_decay", "trust_region", not_, "agent.trust_region is 0, which needs no average"),
    Idle("replay warmup save_replay", "replay_ratio", not_, "agent.replay_ratio is 0, so nothing is replayed"),
)
RATES = ("actor_learning_rate", "critic_learning_rate", "alpha_learning_rate")


def ineffective_replay(settings: Settings[Any]) -> Iterator[tuple[str, str]]:
    """Every setting of the agent that nothing reads, with the reason."""
    config = settings.agent
    for names, by, idle, why in IDLE:
        if hasattr(config, by) and idle(getattr(config, by)):
            said = why.format(getattr(config, by))
            yield from ((f"agent.{name}", said) for name in names.split() if hasattr(config, name))
    if hasattr(config, "epsilon_ladder") and settings.env.num == 1:
        yield "agent.epsilon_ladder", "env.num is 1, and a ladder is over environments"
    if hasattr(config, RATES[0]):
        used = RATES if getattr(config, "learn_alpha", False) else RATES[:2]
        if all(getattr(config, name) for name in used):
            yield "agent.learning_rate", f"{', '.join(f'agent.{name}' for name in used)} take its place"
