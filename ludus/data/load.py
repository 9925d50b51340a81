"""Load recorded episodes and check that they fit an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ludus.core.dataset import Dataset, RecordedEpisode
from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs
from ludus.data.npz import load_npz
from ludus.environments.multiagent import STATE, STATUS

MINARI = "minari:"  # prefix of the id of a Minari dataset
Array = NDArray[Any]


def load_dataset(path: str, observation: Specs, action: Specs) -> Dataset:
    """Load the episodes of an ``.npz`` file or of a local Minari dataset (``minari:ID``) for an environment.

    Arrays are converted to the dtypes of the specs; a dataset with other observations or actions is refused.
    """
    if path.startswith(MINARI):
        from ludus.data.minari import load_minari

        found = load_minari(path.removeprefix(MINARI))
    else:
        found = load_npz(path)
    episodes = tuple(_convert(episode, observation, action, found.name) for episode in found.episodes)
    kept = tuple(episode for episode in episodes if episode.length)
    if not kept:
        raise UserError(f'data.path is "{path}", which has no steps; record episodes with `ludus record`.')
    return Dataset(kept, found.name)


def _convert(episode: RecordedEpisode, observation: Specs, action: Specs, name: str) -> RecordedEpisode:
    steps = episode.length
    seen = _match(episode.observation, observation, "observation", steps + 1, name)
    done = _match(episode.action, action, "action", steps, name)
    reward = np.asarray(episode.reward)
    if reward.shape != (steps,) or not np.can_cast(reward.dtype, np.float32, "same_kind"):
        raise UserError(f'The dataset "{name}" has rewards of shape {reward.shape} and type {reward.dtype}; give [T].')
    reward = _cast(reward, np.dtype(np.float32), f'The dataset "{name}": a reward')
    return RecordedEpisode(seen, done, reward, bool(episode.terminated), bool(episode.truncated))


def _match(
    arrays: Mapping[str, Array], specs: Specs, kind: Literal["observation", "action"], steps: int, name: str
) -> dict[str, Array]:
    """Return the arrays in the order and dtypes of the specs; refuse those of another environment."""
    missing, unknown = specs.keys() - arrays.keys(), arrays.keys() - specs.keys()
    if missing ^ unknown == {STATE} and any(name.startswith(f"{STATUS}/") for name in specs):  # several agents
        lack, fix = f'lacks the observation "{STATE}", that of', "record it from a run with --env.global-state"
        if unknown:
            lack, fix = f'has the observation "{STATE}", that of', "turn on env.global_state, as when it was recorded"
        raise UserError(f'The dataset "{name}" {lack} the whole world; {fix}.')
    if any(name.startswith(f"{STATUS}/") for name in unknown):
        raise UserError(
            f'The dataset "{name}" has the steps of worlds with several agents, from which maddpg, vdn and qmix learn; '
            "other agents take episodes of single agents, as `ludus record RUN --replay` writes of a run with a replay "
            "buffer."
        )
    if missing or unknown:
        raise UserError(
            f'The dataset "{name}" has the {kind}s {", ".join(sorted(arrays)) or "of no name"}, but the environment '
            f"has {', '.join(specs)}; record it in this environment, with the same wrappers and preprocessing."
        )
    return {key: _convert_array(np.asarray(arrays[key]), spec, kind, key, steps, name) for key, spec in specs.items()}


def _convert_array(array: Array, spec: Spec, kind: str, key: str, steps: int, name: str) -> Array:
    place = f'The dataset "{name}": {kind} "{key}"'
    if array.shape != (steps, *spec.shape):
        found = len(array) if array.ndim else 0
        problem = f"{found} entries" if array.shape[1:] == spec.shape else f"shape {array.shape[1:]}"
        right = f"{steps} belong to its steps" if array.shape[1:] == spec.shape else f"the environment has {spec.shape}"
        raise UserError(f"{place} has {problem}, but {right}; record it in this environment.")
    dtype = np.dtype(spec.dtype)
    integers = all(kind.kind in "biu" for kind in (array.dtype, dtype))
    if not integers and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UserError(f"{place} has numbers of type {array.dtype}, but the environment has {dtype}.")
    if spec.kind != "continuous" and array.size:
        low, high = array.min(axis=0), array.max(axis=0)
        if (low < 0).any() or (high >= np.asarray(spec.choices).reshape(spec.shape)).any():
            raise UserError(
                f"{place} has values from {low.min()} to {high.max()}, but the environment has "
                f"{max(spec.choices)} choices, counted from 0."
            )
    return _cast(array, dtype, place)


def _cast(array: Array, dtype: np.dtype[Any], place: str) -> Array:
    """Convert to the dtype; refuse NaN and Inf, and what does not fit into it."""
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise UserError(f"{place} has values from {array.min()} to {array.max()}, which do not fit into {dtype}.")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(cast).all():
        raise UserError(f"{place} is not a finite number of type {dtype}; remove the episode that has it.")
    return cast
