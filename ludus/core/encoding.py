"""Encode a nested State as strict JSON and tensors by name, and back.

JSON has no tensors, arrays, infinities or integer keys, so they are written as markers that start with ``$``; a string
key that starts with ``$`` gets one more. Tuples are read back as lists and all mappings as dicts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO, FileIO
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from ludus.core.types import State, Tensors

_FLOAT, _TENSOR, _ARRAY = "$float", "$tensor", "$array"
_SCALARS = (np.bool_, np.integer, np.float16, np.float32, np.float64, np.str_)
_RESERVED = "__metadata__"  # reserved by safetensors
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_MAX_HEADER = 1 << 26  # bytes


def encode(value: Any, tensors: Tensors, path: str = "") -> Any:
    """Return ``value`` as strict JSON; tensors and arrays are added to ``tensors`` under their path."""
    if isinstance(value, _SCALARS):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, Tensor | np.ndarray):
        return _add_tensor(value, tensors, path)
    if isinstance(value, Mapping):
        return {_encode_key(key, path): encode(item, tensors, _join(path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item, tensors, _join(path, i)) for i, item in enumerate(value)]
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__} (at {path or 'the top'})")


def decode(node: Any, tensors: Tensors) -> Any:
    """Invert ``encode``; arrays on the meta device stay tensors."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        (marker, content), *_ = node.items()
        if marker == _FLOAT:
            return float(content)
        if marker == _TENSOR:
            return tensors[content]
        if marker == _ARRAY:
            return tensors[content] if tensors[content].is_meta else tensors[content].numpy()
    return {_decode_key(key): decode(item, tensors) for key, item in node.items()}


def serialize(tensors: Tensors) -> Iterator[memoryview]:
    """Yield the bytes of a ``.safetensors`` file tensor by tensor, so that no second copy is in memory."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # so that all are aligned
    header: dict[str, Any] = {}
    end = 0
    for name, x in ordered:
        start, end = end, end + x.numel() * x.itemsize
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, x in ordered:
        flat = x.contiguous().as_strided((x.numel(),), (1,))  # a single element may have stride 0
        yield flat.view(torch.uint8).numpy().data


def to_bytes(state: State) -> bytes:
    """Return a state as bytes, to send it to another process."""
    tensors: Tensors = {}
    text = json.dumps(encode(state, tensors), allow_nan=False).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *serialize(tensors)])


def from_bytes(data: bytes) -> State:
    """Return the state that ``to_bytes`` was given, on the CPU."""
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = TensorFile(BytesIO(data[end:]))
    state: State = decode(json.loads(data[8:end]), tensors.read(tensors.outline))
    return state


def tensor_names(node: Any) -> Iterator[str]:
    """Yield the names of the tensors in what ``encode`` returned."""
    if isinstance(node, list):
        for item in node:
            yield from tensor_names(item)
    elif isinstance(node, dict):
        for key, item in node.items():
            if len(node) == 1 and key in (_TENSOR, _ARRAY):
                yield str(item)
            else:
                yield from tensor_names(item)


class TensorFile:
    """An open ``.safetensors`` file; names, shapes and types are known before any tensor is read."""

    def __init__(self, file: FileIO | BytesIO) -> None:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError("wrong length of the header")
        header = json.loads(file.read(length).decode())
        header.pop(_RESERVED, None)
        self._file, self._start, end = file, 8 + length, 0
        self._offsets: dict[str, int] = {}
        self.outline: Tensors = {}  # meta tensors with shape and type
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (start, stop), dtype = entry["shape"], entry["data_offsets"], _BY_NAME[entry["dtype"]]
            if not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, stop)):
                raise ValueError("a shape or an offset is not a number")
            if start != end or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError("the size of a tensor does not match its shape")
            self._offsets[name], end = start, stop
            self.outline[name] = torch.empty(shape, dtype=dtype, device="meta")
        if end != size - 8 - length:
            raise ValueError("the tensors do not fill the file")

    def read(self, names: Iterable[str]) -> Tensors:
        """Read the tensors with these names."""
        found: Tensors = {}
        for name in names:
            found[name] = x = torch.empty(self.outline[name].shape, dtype=self.outline[name].dtype)
            if not x.numel():
                continue
            rest = x.reshape(-1).view(torch.uint8).numpy().data
            self._file.seek(self._start + self._offsets[name])
            while rest:
                count = self._file.readinto(rest)
                if not count:
                    raise ValueError("the file is truncated")
                rest = rest[count:]
        return found


def _add_tensor(value: Tensor | np.ndarray[Any, Any], tensors: Tensors, name: str) -> dict[str, str]:
    while name in tensors or name == _RESERVED:  # the keys 0 and "0" have the same path
        name += "~"
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPES or value.layout != torch.strided:
            raise TypeError(f"a checkpoint cannot hold a tensor of {value.dtype}, {value.layout} (at {name})")
        tensors[name] = value.detach().cpu()
        return {_TENSOR: name}
    try:
        tensors[name] = torch.from_numpy(np.array(value, order="C"))
    except TypeError as error:
        raise TypeError(f"a checkpoint cannot hold an array of {value.dtype} (at {name})") from error
    return {_ARRAY: name}


def _join(path: str, key: str | int) -> str:
    part = quote(str(key), safe="", errors="surrogatepass")
    return f"{path}/{part}" if path else part


def _encode_key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return f"${key}" if key.startswith("$") else key
    if isinstance(key, int) and not isinstance(key, bool):
        return f"${key}"
    raise TypeError(f"a checkpoint cannot hold the key {key!r} (at {path or 'the top'}): keys are strings or integers")


def _decode_key(key: str) -> str | int:
    if not key.startswith("$"):
        return key
    return key[1:] if key.startswith("$$") else int(key[1:])
