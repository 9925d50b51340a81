"""Find and make the pieces of a ModularNetwork by their names in the settings."""

from __future__ import annotations

from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.network import Shape, SubModule
from ludus.networks import SUBMODULES
from ludus.networks.config import NetworkConfig


def make_piece(name: str, shape: Shape, config: NetworkConfig) -> SubModule:
    """Make the piece called ``name`` for inputs of this shape; blame the constructor of a custom one if it fails."""
    try:
        piece: SubModule = resolve(name, SUBMODULES, "piece of a network")(shape, config)
    except Exception as error:
        if ":" not in name or isinstance(error, UserError):
            raise
        raise UserError(
            f'The piece "{name}" of the network cannot be made for an input of shape {shape}: '
            f"{type(error).__name__}: {error}; fix its constructor."
        ) from error
    return piece


def piece_rank(name: str, setting: str, needed: int | None = None) -> int:
    """Return the rank of the tensors that a piece takes, and check that it is ``needed``."""
    piece = resolve(name, SUBMODULES, f"network.{setting}")
    rank: int | None = getattr(piece, "dim", None)
    if rank not in (1, 2, 3, 4) or not (isinstance(piece, type) and issubclass(piece, SubModule)):
        raise UserError(
            f'network.{setting} "{name}" is not a piece of a network: it must be a ludus.core.network.SubModule.'
        )
    if needed not in (None, rank):
        raise UserError(
            f'network.{setting} is "{name}", which takes tensors of rank {rank}: choose a piece of rank {needed}.'
        )
    return rank
