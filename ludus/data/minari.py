"""Recorded episodes as local datasets of Minari (https://minari.farama.org)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.dataset import Dataset, RecordedEpisode
from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs
from ludus.environments.spaces import Layout

ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+")  # stays within the folder of Minari's datasets


def load_minari(id: str) -> Dataset:
    """Read a local dataset; nothing is downloaded, and the environment that it names is not made."""
    minari = _import(id)
    from minari.dataset.minari_storage import MinariStorage
    from minari.storage.datasets_root_dir import get_dataset_path

    name = f"minari:{id}"
    folder = get_dataset_path(id) / "data"
    if not folder.is_dir():
        known = ", ".join(sorted(minari.list_local_datasets())) or "none"
        raise UserError(
            f'data.path is "{name}", which is not on this machine (there: {known}); get it with `minari download {id}`.'
        )
    try:
        metadata = MinariStorage.read_raw_metadata(folder)
        if not {"observation_space", "action_space"} <= metadata.keys():
            # Minari would make the environment that the dataset names
            raise ValueError("it does not name its spaces")
        if metadata.get("total_episodes") == 0:  # its file of arrays is empty, which Minari cannot open
            return Dataset((), name)
        found = minari.MinariDataset(folder)
        observation, action = Layout(found.observation_space, "observation"), Layout(found.action_space, "action")
        episodes = tuple(_from_minari(episode, observation, action) for episode in found.iterate_episodes())
    except (OSError, ValueError, KeyError, AssertionError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        reason = f"it lacks {reason}" if isinstance(error, KeyError) else reason
        raise UserError(f'The Minari dataset "{id}" cannot be read: {reason or type(error).__name__}.') from error
    return Dataset(episodes, name)


def save_minari(
    id: str, episodes: Sequence[RecordedEpisode], observation: Specs, action: Specs, environment: str, agent: str
) -> None:
    """Write episodes as a new local dataset, with images as they are."""
    check_new(id)
    minari = _import(id)
    from minari.data_collector import EpisodeBuffer

    buffers = [
        EpisodeBuffer(
            id=number,
            observations=_nest(episode.observation, "observation"),
            actions=_nest(episode.action, "action"),
            rewards=episode.reward.tolist(),
            terminations=_at_end(episode.length, episode.terminated),
            truncations=_at_end(episode.length, episode.truncated),
        )
        for number, episode in enumerate(episodes)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Minari recommends an author, a link to the code, …
        minari.create_dataset_from_buffers(
            dataset_id=id,
            buffer=buffers,
            observation_space=_space(_nest(observation, "observation")),
            action_space=_space(_nest(action, "action")),
            algorithm_name=agent,
            description=f"{len(episodes)} episodes of {environment}, recorded by Ludus.",
            jpeg_encoding=False,
        )


def check_new(id: str) -> None:
    """Refuse an id that Minari does not take or that exists."""
    _import(id)
    from minari.storage.datasets_root_dir import get_dataset_path

    if get_dataset_path(id).exists():
        raise UserError(f'There is a Minari dataset "{id}" already; choose another version, or delete it.')


def _import(id: str) -> Any:
    try:
        import minari
    except ImportError as error:
        raise UserError(
            f'The dataset "minari:{id}" needs Minari, which is not installed: run `pip install "ludus[offline]"`.'
        ) from error
    from minari.dataset.minari_dataset import parse_dataset_id

    try:
        if not ID.fullmatch(id):
            raise ValueError
        parse_dataset_id(id)
    except ValueError:
        raise UserError(
            f'"{id}" is no id of a Minari dataset; write it as NAMESPACE/NAME-v0, such as cartpole/ppo-v0.'
        ) from None
    return minari


def _from_minari(episode: Any, observation: Layout, action: Layout) -> RecordedEpisode:
    ends = [np.asarray(x) for x in (episode.terminations, episode.truncations)]
    return RecordedEpisode(
        observation.flatten(episode.observations, batched=True),
        action.flatten(episode.actions, batched=True),
        np.asarray(episode.rewards),
        *(bool(x[-1]) if len(x) else False for x in ends),
    )


def _at_end(length: int, flag: bool) -> list[bool]:
    return [False] * (length - 1) + [flag]


def _nest(values: Mapping[str, Any], root: str) -> Any:
    """Return values by name as nested dicts (HDF5 has no names with a slash); a plain one as it is."""
    if list(values) == [root]:
        return values[root]
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split("/")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def _space(specs: Spec | Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the Gymnasium space of nested specs."""
    if isinstance(specs, Mapping):
        return spaces.Dict({name: _space(inner) for name, inner in specs.items()})
    if specs.kind == "binary":
        return spaces.MultiBinary(specs.shape)
    if specs.kind == "categorical":
        sizes: NDArray[np.int64] = np.asarray(specs.sizes, np.int64).reshape(specs.shape)
        return spaces.MultiDiscrete(sizes) if specs.shape else spaces.Discrete(specs.sizes[0])
    low, high = (bound.astype(specs.dtype) for bound in specs.bounds)
    return spaces.Box(low, high, specs.shape, np.dtype(specs.dtype).type)
