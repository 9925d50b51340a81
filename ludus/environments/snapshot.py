"""Exact snapshots: all that an environment is at one moment, to be put into another one of the same make.

What has one:

- an environment of your own (a Gymnasium environment, a vector environment, or a class with the same methods) that has
  two methods, ``snapshot() -> dict`` and ``restore(snapshot)``: numbers, strings, bytes, None, numpy arrays and
  generators, and lists, tuples, dicts, sets and deques of these. Its ``np_random`` is kept without being named there.
- Gymnasium's MuJoCo environments: the physics state, and the derived quantities that its tasks read: after a step they
  are those of its last substep, and no state gives them back. A subclass of your own has none, as it may read others.
- Atari by ale-py: the emulator's state and its generator. With sticky actions ALE holds the last action back and does
  not save it, so there is a snapshot only where the next frame takes a new action anyhow, as the generator tells: with
  the usual probability of 0.25, three times of four. The picture is not part of it: ``render`` shows the old one until
  the next step.
- vector environments all of whose attributes are of the kinds above, as Gymnasium's CartPole.

Of wrappers every attribute of these kinds is kept; spaces, specs, functions, classes and the constructor's arguments
are taken to be the same in an environment of the same make. An attribute of any other kind, or two arrays that share a
part of their memory, and there is no snapshot: the episode's seed and its actions have to do.

A snapshot is a copy, and a nest of dicts of numpy arrays and JSON values; nothing in it is ever run.
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
from ludus.environments.gym import Adapted

Snapshot = dict[str, Any]
_SETTLED = object()
_PLAIN = (type(None), bool, int, float, str)
_UNCHANGING = (gymnasium.Space, EnvSpec, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, np.dtype)
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"list": list, "tuple": tuple, "set": set}
_BITS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_ARGUMENTS = {"spec", "metadata", "_metadata", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}
_GENERATOR = {"_np_random", "_np_random_seed"}
_IN_ATARI = {"ale", "_action_set"}
_LOSSY = {"miniature_golf"}  # games of which ALE does not save all that it counts
_IN_MUJOCO = {"model", "data", "mujoco_renderer", "fullpath"}
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
_TWISTER = re.compile(rb"(?:\d+ ){624}\d+")  # a std::mt19937 as text: its words and the place of the next one


def take(env: gymnasium.Env[Any, Any]) -> Snapshot | None:
    """Copy all that an environment and the wrappers around it are; None if not all of it can be had."""
    return _take(_layers(env), of_any=False)


def put(env: gymnasium.Env[Any, Any], snapshot: Mapping[str, Any]) -> None:
    """Make an environment what another one of the same make was; it must have been reset before."""
    _put(_layers(env), snapshot)


def take_vector(env: VectorEnv[Any, Any, Any]) -> Snapshot | None:
    """Copy all that a vector environment is; None if not all of it can be had."""
    return _take(_layers(env), of_any=True)


def put_vector(env: VectorEnv[Any, Any, Any], snapshot: Mapping[str, Any]) -> None:
    """Make a vector environment what another one of the same make was; it must have been reset before."""
    _put(_layers(env), snapshot)


def _take(layers: list[Any], of_any: bool) -> Snapshot | None:
    writer, base = _Writer(layers), layers[-1]
    try:
        inner = _take_base(base, writer, of_any)
        if inner is None:
            return None
        attributes = [writer.attributes(layer, _ARGUMENTS) for layer in layers[:-1]]
        objects = writer.finished()
    except _Unknown:
        return None
    return {"layers": _names(layers), "base": inner, "wrappers": _numbered(attributes), "objects": objects}


def _put(layers: list[Any], snapshot: Mapping[str, Any]) -> None:
    if snapshot["layers"] != _names(layers):
        raise UserError(
            f"The snapshot is one of {snapshot['layers']}, but the environment is {_names(layers)}; {_SAME}."
        )
    reader = _Reader(snapshot["objects"])
    try:
        for layer, attributes in zip(layers[:-1], snapshot["wrappers"].values(), strict=True):
            reader.set(layer, attributes)
        _put_base(layers[-1], snapshot["base"], reader)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"The snapshot does not fit the environment {_names(layers)} ({error}); {_SAME}.") from error


def _layers(env: Any) -> list[Any]:
    """The environment from the outermost wrapper to the innermost."""
    layers = [env]
    while isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper | Adapted):
        env = env.env
        layers.append(env)
    return layers


def _names(layers: list[Any]) -> str:
    return " > ".join(f"{type(layer).__module__}:{type(layer).__qualname__}" for layer in layers)


def _take_base(base: Any, writer: _Writer, of_any: bool) -> Snapshot | None:
    if callable(getattr(base, "snapshot", None)) and callable(getattr(base, "restore", None)):
        return {"own": _of_own(base, writer), "attributes": writer.attributes(base, set(), _GENERATOR)}
    if _is_atari(base):
        state = _atari_state(base)
        if state is None:
            return None
        return {"atari": state, "game": base._game, "attributes": writer.attributes(base, _ARGUMENTS | _IN_ATARI)}
    if _is_mujoco(base):
        return {"mujoco": _mujoco_state(base), "attributes": writer.attributes(base, _ARGUMENTS | _IN_MUJOCO)}
    return {"attributes": writer.attributes(base, _ARGUMENTS)} if of_any else None


def _put_base(base: Any, saved: Mapping[str, Any], reader: _Reader) -> None:
    if "game" in saved and saved["game"] != base._game:
        raise ValueError(f"it is of the game {saved['game']}")
    reader.set(base, saved["attributes"])
    if "own" in saved:
        base.restore(reader.read(saved["own"]))
    if "atari" in saved:
        _put_atari(base.ale, saved["atari"].tobytes())
    if "mujoco" in saved:
        _put_mujoco(base, saved["mujoco"])


def _of_own(base: Any, writer: _Writer) -> Any:
    try:
        written = writer.write(base.snapshot())
        if written is _SETTLED:
            raise _Unknown("settings only")
        return written
    except _Unknown as error:
        raise UserError(
            f"{type(base).__name__}.snapshot gives {error}, which a checkpoint cannot hold; give numbers, strings, "
            "numpy arrays and generators, in lists, tuples, dicts, sets or deques."
        ) from None


def _is_atari(base: Any) -> bool:
    module = sys.modules.get("ale_py.env")  # not imported, so not one of these
    return module is not None and isinstance(base, module.AtariEnv)


def _atari_state(base: Any) -> np.ndarray[Any, Any] | None:
    blended = base.sound_obs or base.ale.getBool("color_averaging")  # of frames that are not in the state
    if blended or base._game in _LOSSY:
        return None
    state = base.ale.cloneState(include_rng=True).serialize()
    if not _is_free(state, base.ale.getFloat("repeat_action_probability")):
        return None
    return np.frombuffer(state, np.uint8).copy()


def _is_free(state: bytes, repeat: float) -> bool:
    """Whether the next frame takes the action it is given, so that the one held back, which is not saved, is void."""
    if repeat == 0:
        return True
    found = _TWISTER.findall(state)
    if len(found) < 2:  # the emulator's own comes before the one that repeats actions
        return False
    *words, place = map(int, found[-1].split())
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": np.array(words, np.uint32), "pos": place}}
    return bool(twister.random_raw() / 2**32 >= repeat)


def _put_atari(ale: Any, state: bytes) -> None:
    from ale_py import Action, ALEState

    saved = ALEState(state)
    if saved.getEpisodeFrameNumber():
        ale.act(Action.NOOP)  # games whose frames have no end (Tetris) go on otherwise than after a reset
    ale.restoreState(saved)
    if ale.cloneState(include_rng=True).serialize() != state:
        raise ValueError("the emulator did not take its state over")


def _is_mujoco(base: Any) -> bool:
    return type(base).__module__.startswith("gymnasium.envs.mujoco.")


def _mujoco_state(base: Any) -> Snapshot:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(base.model, kind))
    mujoco.mj_getState(base.model, base.data, state, kind)
    return {"state": state, **{name: getattr(base.data, name).copy() for name in _DERIVED}}


def _put_mujoco(base: Any, saved: Mapping[str, Any]) -> None:
    import mujoco

    mujoco.mj_setState(base.model, base.data, saved["state"], mujoco.mjtState.mjSTATE_INTEGRATION)
    for name in _DERIVED:
        getattr(base.data, name)[:] = saved[name]


class _Unknown(Exception):
    """Something that a snapshot cannot hold."""


class _Writer:
    """Turns attributes into what a snapshot holds; what is mutable is written once, so that it stays shared."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = {id(layer) for layer in layers}
        self._known: dict[int, tuple[str, Any]] = {}  # with the object, as an id is its own only while it lives
        self._written: dict[str, Any] = {}

    def attributes(self, thing: Any, skipped: set[str], only: set[str] | None = None) -> Snapshot:
        """All attributes of an object that may change."""
        attributes = getattr(thing, "__dict__", {}).items()
        wanted = {name: x for name, x in attributes if name not in skipped and (only is None or name in only)}
        written = {name: self.write(value) for name, value in wanted.items()}
        return {name: value for name, value in written.items() if value is not _SETTLED}

    def write(self, value: Any) -> Any:
        """One value; ``_SETTLED`` for what is the same in every environment of the same make."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, _UNCHANGING) or id(value) in self._layers:
            return _SETTLED
        if id(value) not in self._known:
            number = str(len(self._known))
            self._known[id(value)] = number, value
            self._written[number] = self._object(value, type(value).__name__)
        number = self._known[id(value)][0]
        if number not in self._written:
            raise _Unknown("an object that holds itself")
        return _SETTLED if self._written[number] is _SETTLED else {"object": number}

    def finished(self) -> Snapshot:
        """The objects that the values refer to."""
        arrays = [x for _, x in self._known.values() if isinstance(x, np.ndarray)]
        if any(np.may_share_memory(a, b) for a, b in itertools.combinations(arrays, 2)):
            raise _Unknown("arrays that share memory")
        return {number: written for number, written in self._written.items() if written is not _SETTLED}

    def _object(self, value: Any, kind: str) -> Any:
        match value:
            case np.ndarray() | np.generic() if value.dtype.kind not in "biuf" or value.itemsize > 8:
                raise _Unknown(f"an array of {value.dtype}")
            case np.ndarray() if type(value) is np.ndarray:
                return value.astype(value.dtype.newbyteorder("="), order="C")
            case np.generic():
                return {"scalar": np.array(value)}
            case bytes() | bytearray():
                return {kind: np.frombuffer(value, np.uint8).copy()}
            case np.random.Generator() if type(value.bit_generator).__name__ in _BITS:
                return {"generator": _copy(value.bit_generator.state)}
            case np.random.RandomState():
                return {"random_state": _copy(value.get_state(legacy=False))}
            case RunningMeanStd():
                return {"running": self.attributes(value, set())}
            case deque() if type(value) is deque:
                return self._of({"deque": value}, maxlen=value.maxlen)
            case list() | tuple() | set() if kind in _SEQUENCES:
                return self._of({kind: value})
            case dict() if type(value) is dict:
                return self._of({"dict": value, "values": value.values()})
        raise _Unknown(f"a {kind}")

    def _of(self, parts: dict[str, Iterable[Any]], **more: Any) -> Any:
        """A container by its parts; one of settled values only is settled itself."""
        written = {name: _numbered(map(self.write, part)) for name, part in parts.items()}
        last = list(written.values())[-1].values()
        if not any(value is _SETTLED for value in last):
            return {**written, **more}
        if not all(value is _SETTLED for value in last):
            raise _Unknown("a container of settings and of other values")
        return _SETTLED


class _Reader:
    """Makes objects of what a snapshot holds, each of them once."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects, self._made = objects, dict[str, Any]()

    def set(self, thing: Any, attributes: Mapping[str, Any]) -> None:
        """Give an object its attributes back."""
        vars(thing).update({name: self.read(value) for name, value in attributes.items()})

    def read(self, value: Any) -> Any:
        """One value."""
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
                bits = getattr(np.random, _BITS[_BITS.index(content["bit_generator"])])()
                bits.state = content
                return np.random.Generator(bits)
            case "random_state":
                legacy = np.random.RandomState()
                legacy.set_state(content)
                return legacy
            case "running":
                running = object.__new__(RunningMeanStd)
                self.set(running, content)
                return running
            case "deque":
                return deque(self._items(content), maxlen=rest[0][1])
            case "dict":
                return dict(zip(self._items(content), self._items(rest[0][1]), strict=True))
        return _SEQUENCES[kind](self._items(content))

    def _items(self, items: Mapping[str, Any]) -> list[Any]:
        return [self.read(item) for item in items.values()]


def _copy(state: Any) -> Any:
    """The state of a generator: a nest of dicts, integers and arrays."""
    if isinstance(state, Mapping):
        return {key: _copy(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state


def _numbered(values: Iterable[Any]) -> Snapshot:
    return {str(i): value for i, value in enumerate(values)}
