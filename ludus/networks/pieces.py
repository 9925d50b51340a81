"""Find and make the pieces of a ModularNetwork by their names in the settings."""

from __future__ import annotations

from typing import Any

from ludus.core.calls import argument_defaults, check_arguments, parse_call
from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.network import Shape, SubModule
from ludus.networks import SUBMODULES
from ludus.networks.config import NetworkConfig

ARGUMENTS = {"lstm_size": "size"}  # arguments of pieces with another name than the setting that is their default


def piece_class(piece: str, setting: str, rank: int | None = None) -> type[SubModule]:
    """Return the class of a piece such as ``lstm(size=128)``, and check that it takes tensors of ``rank``."""
    name = parse_call(piece, setting).name
    cls = resolve(name, SUBMODULES, setting)
    if not (isinstance(cls, type) and issubclass(cls, SubModule)) or getattr(cls, "dim", None) not in (1, 2, 3, 4):
        raise UserError(f'{setting} "{name}" is not a piece of a network: it must be a ludus.core.network.SubModule.')
    if rank not in (None, cls.dim):
        raise UserError(f'{setting} is "{name}", which takes tensors of rank {cls.dim}: choose a piece of rank {rank}.')
    return cls


def uses_context(piece: str, setting: str) -> bool:
    """Return whether a piece such as ``transformer_dec(queries="given")`` attends to a context beside its input."""
    return piece_class(piece, setting).uses_context(parse_call(piece, setting).arguments)


def make_piece(
    piece: str,
    setting: str,
    shape: Shape,
    config: NetworkConfig,
    rank: int | None = None,
    context: Shape | None = None,
) -> SubModule:
    """Make a piece for inputs and a context of these shapes; a UserError names its arguments if one does not exist."""
    cls, call = piece_class(piece, setting, rank), parse_call(piece, setting)
    given = (shape, config) if context is None else (shape, config, context)
    check_arguments(cls, call, len(given), f'{setting} "{piece}"')
    if context is None and cls.uses_context(call.arguments):
        raise UserError(
            f'{setting} is "{piece}", which attends to lists beside its input: only network.body can be such a piece.'
        )
    try:
        return cls(*given, **call.arguments)
    except UserError as error:
        raise UserError(f'{setting} "{piece}": {error}') from None
    except Exception as error:
        raise UserError(
            f'{setting} "{piece}" cannot be made for an input of shape {shape}: {type(error).__name__}: {error}; '
            f"{'fix its constructor' if ':' in piece else 'change its arguments'}."
        ) from error


def settings_read(piece: str, setting: str) -> set[str]:
    """Return the settings of the network that a piece reads: those that its arguments do not replace."""
    given = parse_call(piece, setting).arguments
    return {name for name in piece_class(piece, setting).network_settings if ARGUMENTS.get(name, name) not in given}


def piece_arguments(cls: type[SubModule]) -> dict[str, Any]:
    """Return the keyword arguments of a piece with their defaults."""
    return argument_defaults(cls, given=2)
