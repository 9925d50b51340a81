"""The settings of preprocessing, and their syntax. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from ludus.core.calls import Call, parse_call
from ludus.core.errors import UserError, did_you_mean
from ludus.core.spec import is_mask

# Ops on images run in the environment's process, so that less is sent and stored; then come stacks, in the manager ...
ENVIRONMENT_OPS = {
    "grayscale": "ludus.preprocess.frames:Grayscale",
    "resize": "ludus.preprocess.frames:Resize",
    "crop": "ludus.preprocess.frames:Crop",
    "compress": "ludus.preprocess.frames:Compress",
}
STACK_OPS = {"stack": "ludus.preprocess.frame_stack:Stack"}
PREVIOUS = ("previous_action", "previous_reward")  # ops that add an observation
# ... and all others on the device of the networks, so that buffers hold what the environment returned
DEVICE_OPS = {
    "cast": "ludus.preprocess.ops:Cast",
    "scale": "ludus.preprocess.ops:Scale",
    "clip": "ludus.preprocess.ops:Clip",
    "symlog": "ludus.preprocess.ops:Symlog",
    "sign": "ludus.preprocess.ops:Sign",
    "one_hot": "ludus.preprocess.ops:ToChoices",
    "flatten": "ludus.preprocess.ops:Flatten",
    "channels_first": "ludus.preprocess.ops:ChannelsFirst",
    "pad": "ludus.preprocess.ops:Pad",
    "rename": "ludus.preprocess.ops:Rename",
    "concat": "ludus.preprocess.ops:Concat",
    "drop": "ludus.preprocess.ops:Drop",
}
REWARD_OPS = {name: DEVICE_OPS[name] for name in ("clip", "scale", "sign", "symlog")}
ACTION_OPS = ("repeat", "sticky")  # environments/preprocess.py
SETTING = "preprocess.observation"


@dataclass(frozen=True)
class PreprocessConfig:
    """Ops on observations, rewards and actions, in order; they are saved with the policy."""

    # Ops on observations, as in 'camera: grayscale, resize(height=84, width=84)' or 'joint/*: symlog'; without a name,
    # on every observation. See docs/preprocessing.md.
    observation: tuple[str, ...] = ()
    # Ops on the rewards that the agent learns from, such as clip(low=-1, high=1), scale(by=0.1), sign or symlog; logged
    # returns are the environment's. agent.normalize_reward comes after them.
    reward: tuple[str, ...] = ()
    # Ops on actions, from the policy to the environment: repeat(n=4), sticky(probability=0.25).
    action: tuple[str, ...] = ()

    def validate(self) -> None:
        """Refuse ops that do not exist."""
        observation_ops(self.observation)
        reward_ops(self.reward)
        action_ops(self.action)


class NamedOp(NamedTuple):
    """One op of a pipeline: on the observations that match ``pattern``."""

    pattern: str
    call: Call
    text: str  # of the call

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the observations that the op applies to; refuse a pattern that matches none."""
        known = [name for name in names if not is_mask(name)]
        found = [name for name in known if fnmatchcase(name, self.pattern)]
        if not found:
            raise UserError(
                f'{SETTING} has "{self.pattern}: {self.text}", but the observations are {", ".join(known)}.'
                f"{did_you_mean(self.pattern, known)}"
            )
        return found


def observation_ops(pipeline: Iterable[str]) -> list[NamedOp]:
    """Parse ``preprocess.observation``: ``name: op, op(key=value), …``; without a name, ops are on all."""
    ops = [
        NamedOp(pattern, _parse_op(text, SETTING, [*ENVIRONMENT_OPS, *STACK_OPS, *PREVIOUS, *DEVICE_OPS]), text)
        for item in pipeline
        for pattern, text in _split(item)
    ]
    for op in ops:
        if op.call.name in PREVIOUS and (op.pattern != "*" or op.call.arguments):
            raise UserError(f'{SETTING} has "{op.pattern}: {op.text}"; write {op.call.name} alone: it is added once.')
    return ops


def reward_ops(pipeline: Iterable[str]) -> list[NamedOp]:
    """Parse ``preprocess.reward``: ``op, op(key=value), …``."""
    texts = [text for item in pipeline for text in split_calls(item)]
    return [NamedOp("reward", _parse_op(text, "preprocess.reward", REWARD_OPS), text) for text in texts]


def action_ops(pipeline: Iterable[str]) -> list[Call]:
    """Parse ``preprocess.action``: ``op, op(key=value), …``."""
    return [_parse_op(text, "preprocess.action", ACTION_OPS) for item in pipeline for text in split_calls(item)]


def _split(item: str) -> Iterator[tuple[str, str]]:
    """Split ``name: op, op(key=value)`` into pairs of name and op."""
    before, colon, after = item.partition(":")
    named = colon and "(" not in before
    pattern, ops = (before.strip(), after) if named else ("*", item)
    yield from ((pattern, text) for text in split_calls(ops))


def split_calls(text: str) -> list[str]:
    """Split calls at the commas between them, which are those outside of brackets and quotes."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        depth += (character in "([{") - (character in ")]}") if not quoted else 0
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _parse_op(text: str, setting: str, known: Iterable[str]) -> Call:
    call = parse_call(text, setting, "resize(height=84, width=84)")
    names = sorted(known)
    if call.name not in names:
        raise UserError(
            f'{setting} has "{text}", but there is no op "{call.name}".{did_you_mean(call.name, names)} Choose one of '
            f"{', '.join(names)}."
        )
    return call
