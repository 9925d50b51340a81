"""Exact snapshots of environments, for resuming a run at the step where it stopped.

Supported are:

- environments with the two methods ``snapshot() -> dict`` and ``restore(snapshot)``, whether they derive from Gymnasium
  or not. The dict may hold numbers, strings, bytes, None, numpy arrays and random generators, and lists, tuples, dicts,
  sets and deques of these. ``np_random`` is saved without being named there.
- Gymnasium's MuJoCo environments: the physics state and the derived quantities that rewards and observations read;
  after a step these are those of the last substep, which cannot be recomputed from the state. Subclasses by the user
  are not supported, as they may read other quantities.
- Atari with ale-py: the state of the emulator and of its generator. With sticky actions ALE does not save the previous
  action, so a snapshot is taken only if the generator shows that the next frame will not repeat it (three times of four
  with the usual probability of 0.25). ``render`` shows the old frame until the next step.
- vector environments that have only attributes of the types above, such as Gymnasium's CartPole.

All attributes of wrappers are saved too; spaces, specs, functions, classes and constructor arguments are assumed to be
equal in an environment made in the same way. Without a snapshot (an attribute has another type, or two arrays share
memory), an episode is restored by replaying its actions from its seed.

A snapshot is a nested dict of numpy arrays and JSON values and never holds code.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.utils import RunningMeanStd

from ludus.core.errors import UserError
from ludus.environments.gym import GymAdapter

Snapshot = dict[str, Any]
_CONSTANT = object()  # stands for a value that is equal in every environment made in the same way
_PLAIN = (type(None), bool, int, float, str)
_CONSTANT_TYPES = (gymnasium.Space, EnvSpec, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, np.dtype)
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"list": list, "tuple": tuple, "set": set}
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_ARGUMENTS = {"spec", "metadata", "_metadata", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}
_RANDOM = {"_np_random", "_np_random_seed"}
_ATARI_ATTRIBUTES = {"ale", "_action_set"}
_INCOMPLETE_GAMES = {"miniature_golf"}  # ALE does not save their whole state
_MUJOCO_ATTRIBUTES = {"model", "data", "mujoco_renderer", "fullpath"}
_DERIVED = (
    "xpos",
    "xipos",
    "site_xpos",
    "ten_length",
    "ten_velocity",
    "cinert",
    "cvel",
    "cfrc_ext",
    "qfrc_actuator",
    "qfrc_constraint",
)
_SAME = "make it with the same settings and the same versions of its packages"
_MT19937 = re.compile(rb"(?:\d+ ){624}\d+")  # a std::mt19937 as text: its words and its position


def take_snapshot(env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> Snapshot | None:
    """Copy the state of an environment and its wrappers; None if some of it cannot be saved."""
    layers = _layers(env)
    writer = _Writer(layers)
    try:
        base = _take_base(layers[-1], writer)
        if base is None:
            return None
        wrappers = [writer.attributes(layer, _ARGUMENTS) for layer in layers[:-1]]
        objects = writer.finish()
    except _Unsupported:
        return None
    return {"layers": _names(layers), "base": base, "wrappers": _numbered(wrappers), "objects": objects}


def restore_snapshot(env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any], snapshot: Mapping[str, Any]) -> None:
    """Restore a snapshot into an environment made in the same way, which must have been reset before."""
    layers = _layers(env)
    if snapshot["layers"] != _names(layers):
        raise UserError(
            f"The snapshot was taken of {snapshot['layers']}, but the environment is {_names(layers)}; {_SAME}."
        )
    reader = _Reader(snapshot["objects"])
    try:
        for layer, attributes in zip(layers[:-1], snapshot["wrappers"].values(), strict=True):
            reader.set_attributes(layer, attributes)
        _restore_base(layers[-1], snapshot["base"], reader)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"The snapshot does not fit the environment {_names(layers)} ({error}); {_SAME}.") from error


def _layers(env: Any) -> list[Any]:
    """Return the wrappers, outermost first, and then the environment itself."""
    layers = [env]
    while isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper | GymAdapter):
        env = env.env
        layers.append(env)
    return layers


def _names(layers: list[Any]) -> str:
    return " > ".join(f"{type(layer).__module__}:{type(layer).__qualname__}" for layer in layers)


def _take_base(base: Any, writer: _Writer) -> Snapshot | None:
    if callable(getattr(base, "snapshot", None)) and callable(getattr(base, "restore", None)):
        return {"own": _take_own(base, writer), "attributes": writer.attributes(base, set(), _RANDOM)}
    ale = sys.modules.get("ale_py.env")  # None: not imported, so this is not one of its games
    if ale is not None and isinstance(base, ale.AtariEnv):
        state = _atari_state(base)
        if state is None:
            return None
        return {
            "atari": state,
            "game": base._game,
            "attributes": writer.attributes(base, _ARGUMENTS | _ATARI_ATTRIBUTES),
        }
    if type(base).__module__.startswith("gymnasium.envs.mujoco."):
        return {"mujoco": _mujoco_state(base), "attributes": writer.attributes(base, _ARGUMENTS | _MUJOCO_ATTRIBUTES)}
    return {"attributes": writer.attributes(base, _ARGUMENTS)} if isinstance(base, VectorEnv) else None


def _restore_base(base: Any, saved: Mapping[str, Any], reader: _Reader) -> None:
    if "game" in saved and saved["game"] != base._game:
        raise ValueError(f"it is of the game {saved['game']}")
    reader.set_attributes(base, saved["attributes"])
    if "own" in saved:
        base.restore(reader.read(saved["own"]))
    if "atari" in saved:
        _restore_atari(base.ale, saved["atari"].tobytes())
    if "mujoco" in saved:
        _restore_mujoco(base, saved["mujoco"])


def _take_own(base: Any, writer: _Writer) -> Any:
    """Call the environment's own ``snapshot`` method."""
    try:
        written = writer.write(base.snapshot())
        if written is _CONSTANT:
            raise _Unsupported("only constants")
        return written
    except _Unsupported as error:
        raise UserError(
            f"{type(base).__name__}.snapshot returned {error}, which cannot be saved; return numbers, strings, "
            "numpy arrays and generators, in lists, tuples, dicts, sets or deques."
        ) from None


def _atari_state(base: Any) -> np.ndarray[Any, Any] | None:
    blended = base.sound_obs or base.ale.getBool("color_averaging")  # these use frames that are not in the state
    if blended or base._game in _INCOMPLETE_GAMES:
        return None
    state = base.ale.cloneState(include_rng=True).serialize()
    if _may_repeat_action(state, base.ale.getFloat("repeat_action_probability")):
        return None
    return np.frombuffer(state, np.uint8).copy()


def _may_repeat_action(state: bytes, probability: float) -> bool:
    """Return whether the next frame may repeat the previous action, which is not part of the state."""
    if probability == 0:
        return False
    found = _MT19937.findall(state)
    if len(found) < 2:  # the generator of the emulator precedes that of the sticky actions
        return True
    *words, position = map(int, found[-1].split())
    generator = np.random.MT19937()
    generator.state = {"bit_generator": "MT19937", "state": {"key": np.array(words, np.uint32), "pos": position}}
    return bool(generator.random_raw() / 2**32 < probability)


def _restore_atari(ale: Any, state: bytes) -> None:
    from ale_py import Action, ALEState

    saved = ALEState(state)
    if saved.getEpisodeFrameNumber():
        ale.act(Action.NOOP)  # some games (Tetris) need a frame after the reset before they take a state
    ale.restoreState(saved)
    if ale.cloneState(include_rng=True).serialize() != state:
        raise ValueError("the emulator did not restore its state")


def _mujoco_state(base: Any) -> Snapshot:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(base.model, kind))
    mujoco.mj_getState(base.model, base.data, state, kind)
    return {"state": state, **{name: getattr(base.data, name).copy() for name in _DERIVED}}


def _restore_mujoco(base: Any, saved: Mapping[str, Any]) -> None:
    import mujoco

    mujoco.mj_setState(base.model, base.data, saved["state"], mujoco.mjtState.mjSTATE_INTEGRATION)
    for name in _DERIVED:
        getattr(base.data, name)[:] = saved[name]


class _Unsupported(Exception):
    """A value that a snapshot cannot hold."""


class _Writer:
    """Converts attributes to snapshot values; a mutable object is written once, so that references stay shared."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = {id(layer) for layer in layers}
        self._known: dict[int, tuple[str, Any]] = {}  # by id; holds the object too, as ids of dead objects are reused
        self._written: dict[str, Any] = {}

    def attributes(self, thing: Any, skipped: set[str], only: set[str] | None = None) -> Snapshot:
        """Write the attributes of an object that may change."""
        attributes = getattr(thing, "__dict__", {}).items()
        wanted = {name: x for name, x in attributes if name not in skipped and (only is None or name in only)}
        written = {name: self.write(value) for name, value in wanted.items()}
        return {name: value for name, value in written.items() if value is not _CONSTANT}

    def write(self, value: Any) -> Any:
        """Write one value; return ``_CONSTANT`` if it is equal in every environment made in the same way."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, _CONSTANT_TYPES) or id(value) in self._layers:
            return _CONSTANT
        if id(value) not in self._known:
            number = str(len(self._known))
            self._known[id(value)] = number, value
            self._written[number] = self._object(value, type(value).__name__)
        number = self._known[id(value)][0]
        if number not in self._written:
            raise _Unsupported("an object that contains itself")
        return _CONSTANT if self._written[number] is _CONSTANT else {"object": number}

    def finish(self) -> Snapshot:
        """Return the objects that the values refer to."""
        arrays = [x for _, x in self._known.values() if isinstance(x, np.ndarray)]
        if any(np.may_share_memory(a, b) for a, b in itertools.combinations(arrays, 2)):
            raise _Unsupported("arrays that share memory")
        return {number: written for number, written in self._written.items() if written is not _CONSTANT}

    def _object(self, value: Any, kind: str) -> Any:
        match value:
            case np.ndarray() | np.generic() if value.dtype.kind not in "biuf" or value.itemsize > 8:
                raise _Unsupported(f"an array of {value.dtype}")
            case np.ndarray() if type(value) is np.ndarray:
                return value.astype(value.dtype.newbyteorder("="), order="C")
            case np.generic():
                return {"scalar": np.array(value)}
            case bytes() | bytearray():
                return {kind: np.frombuffer(value, np.uint8).copy()}
            case np.random.Generator() if type(value.bit_generator).__name__ in _BIT_GENERATORS:
                return {"generator": _copy(value.bit_generator.state)}
            case np.random.RandomState():
                return {"random_state": _copy(value.get_state(legacy=False))}
            case RunningMeanStd():
                return {"running": self.attributes(value, set())}
            case deque() if type(value) is deque:
                return self._container({"deque": value}, maxlen=value.maxlen)
            case list() | tuple() | set() if kind in _SEQUENCES:
                return self._container({kind: value})
            case dict() if type(value) is dict:
                return self._container({"dict": value, "values": value.values()})
        raise _Unsupported(f"a {kind}")

    def _container(self, parts: dict[str, Iterable[Any]], **more: Any) -> Any:
        """Write a container by its parts; a container of constants only is constant itself."""
        written = {name: _numbered(map(self.write, part)) for name, part in parts.items()}
        last = list(written.values())[-1].values()
        if not any(value is _CONSTANT for value in last):
            return {**written, **more}
        if not all(value is _CONSTANT for value in last):
            raise _Unsupported("a container of constants and other values")
        return _CONSTANT


class _Reader:
    """Converts snapshot values back to objects, each of them once."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects, self._made = objects, dict[str, Any]()

    def set_attributes(self, thing: Any, attributes: Mapping[str, Any]) -> None:
        """Set the saved attributes of an object."""
        vars(thing).update({name: self.read(value) for name, value in attributes.items()})

    def read(self, value: Any) -> Any:
        """Read one value."""
        if not isinstance(value, Mapping):
            return value
        number = value["object"]
        if number not in self._made:
            self._made[number] = self._make(self._objects[number])
        return self._made[number]

    def _make(self, written: Any) -> Any:
        if isinstance(written, np.ndarray):
            return written.copy()
        (kind, content), *rest = written.items()
        match kind:
            case "scalar":
                return content[()]
            case "bytes" | "bytearray":
                return content.tobytes() if kind == "bytes" else bytearray(content.tobytes())
            case "generator":
                bits = getattr(np.random, _BIT_GENERATORS[_BIT_GENERATORS.index(content["bit_generator"])])()
                bits.state = content
                return np.random.Generator(bits)
            case "random_state":
                legacy = np.random.RandomState()
                legacy.set_state(content)
                return legacy
            case "running":
                running = object.__new__(RunningMeanStd)
                self.set_attributes(running, content)
                return running
            case "deque":
                return deque(self._items(content), maxlen=rest[0][1])
            case "dict":
                return dict(zip(self._items(content), self._items(rest[0][1]), strict=True))
        return _SEQUENCES[kind](self._items(content))

    def _items(self, items: Mapping[str, Any]) -> list[Any]:
        return [self.read(item) for item in items.values()]


def _copy(state: Any) -> Any:
    """Copy the state of a generator: nested dicts of integers and arrays."""
    if isinstance(state, Mapping):
        return {key: _copy(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state


def _numbered(values: Iterable[Any]) -> Snapshot:
    return {str(i): value for i, value in enumerate(values)}
