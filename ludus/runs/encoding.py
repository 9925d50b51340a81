"""Encode a nested State as strict JSON and tensors by name, and back.

JSON cannot hold tensors, arrays, infinities or integer keys. They become marks that start with ``$``; a string key that
starts so itself gets one more. Tuples come back as lists, every kind of mapping as a dict.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from ludus.core.types import Tensors

_FLOAT, _TENSOR, _ARRAY = "$float", "$tensor", "$array"
_SCALARS = (np.bool_, np.integer, np.float16, np.float32, np.float64, np.str_)
_RESERVED = "__metadata__"  # safetensors keeps this name for itself
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
HEADER = 1 << 26  # bytes of a header, at most


def encode(value: Any, tensors: Tensors, place: str = "") -> Any:
    """Return ``value`` as strict JSON; its tensors and arrays are put into ``tensors`` under their path."""
    if isinstance(value, _SCALARS):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, Tensor | np.ndarray):
        return _put(value, tensors, place)
    if isinstance(value, Mapping):
        return {_key(key, place): encode(item, tensors, _below(place, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item, tensors, _below(place, i)) for i, item in enumerate(value)]
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__} (at {place or 'the top'})")


def decode(node: Any, tensors: Tensors) -> Any:
    """Turn what ``encode`` returned back into the value; an array without content stays a tensor of the device meta."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        (mark, content), *_ = node.items()
        if mark == _FLOAT:
            return float(content)
        if mark == _TENSOR:
            return tensors[content]
        if mark == _ARRAY:
            return tensors[content] if tensors[content].is_meta else tensors[content].numpy()
    return {_unkey(key): decode(item, tensors) for key, item in node.items()}


def serialize(tensors: Tensors) -> Iterator[memoryview]:
    """The bytes of a ``.safetensors`` file, tensor by tensor, so that the whole is never in memory twice."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # then each lies at a multiple of its size
    header: dict[str, Any] = {}
    end = 0
    for name, x in ordered:
        start, end = end, end + x.numel() * x.itemsize
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, x in ordered:
        flat = x.contiguous().as_strided((x.numel(),), (1,))  # a lone element may have the stride 0
        yield flat.view(torch.uint8).numpy().data


def names_of(node: Any) -> Iterator[str]:
    """The names of the tensors that what ``encode`` returned refers to."""
    if isinstance(node, list):
        for item in node:
            yield from names_of(item)
    elif isinstance(node, dict):
        for key, item in node.items():
            if len(node) == 1 and key in (_TENSOR, _ARRAY):
                yield str(item)
            else:
                yield from names_of(item)


class TensorFile:
    """A ``.safetensors`` file that is open: what it holds is known before any of it is read."""

    def __init__(self, file: FileIO) -> None:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, HEADER):
            raise ValueError("the length of the header is wrong")
        header = json.loads(file.read(length).decode())
        header.pop(_RESERVED, None)
        self._file, self._start, end = file, 8 + length, 0
        self._places: dict[str, int] = {}
        self.outline: Tensors = {}  # with shapes and types, but without content
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (start, stop), dtype = entry["shape"], entry["data_offsets"], _BY_NAME[entry["dtype"]]
            if not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, stop)):
                raise ValueError("a shape or place is no number")
            if start != end or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError("a tensor has another size than its shape")
            self._places[name], end = start, stop
            self.outline[name] = torch.empty(shape, dtype=dtype, device="meta")
        if end != size - 8 - length:
            raise ValueError("the tensors do not fill the file")

    def read(self, names: Iterable[str]) -> Tensors:
        """The tensors of these names, each in memory once."""
        found: Tensors = {}
        for name in names:
            found[name] = x = torch.empty(self.outline[name].shape, dtype=self.outline[name].dtype)
            if not x.numel():
                continue
            rest = x.reshape(-1).view(torch.uint8).numpy().data
            self._file.seek(self._start + self._places[name])
            while rest:
                count = self._file.readinto(rest)
                if not count:
                    raise ValueError("the file is cut short")
                rest = rest[count:]
        return found


def _put(value: Tensor | np.ndarray[Any, Any], tensors: Tensors, name: str) -> dict[str, str]:
    while name in tensors or name == _RESERVED:  # the keys 0 and "0" of one dict have the same path
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


def _below(place: str, key: str | int) -> str:
    part = quote(str(key), safe="", errors="surrogatepass")
    return f"{place}/{part}" if place else part


def _key(key: Any, place: str) -> str:
    if isinstance(key, str):
        return f"${key}" if key.startswith("$") else key
    if isinstance(key, int) and not isinstance(key, bool):
        return f"${key}"
    raise TypeError(f"a checkpoint cannot hold the key {key!r} (at {place or 'the top'}): keys are strings or integers")


def _unkey(key: str) -> str | int:
    if not key.startswith("$"):
        return key
    return key[1:] if key.startswith("$$") else int(key[1:])
