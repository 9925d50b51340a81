"""The settings of a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ludus.core.errors import UserError

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]

NATURE_CNN_SIDE = 36  # the smallest side that leaves one pixel after the three layers of nature_cnn


@dataclass(frozen=True)
class NetworkConfig:
    """How observations become outputs; --network.critic.hidden sets it for the critic alone.

    A piece of your own is pkg.mod:Class, made as Class(input_shape, config).
    """

    name: str = "modular"  # or your own as package.module:Class: a Network, or any torch module (ludus.networks.build)
    net1d: str = "mlp"  # what each vector observation goes through first
    net2d: str = "flat_mlp"  # what each matrix observation [F, S] goes through first; flat_mlp: an mlp on all entries
    # what each image observation [F, H, W] goes through first; auto: nature_cnn, and small_cnn below 36×36
    net3d: str = "auto"
    net4d: str = "identity4d"  # what each volume or clip observation [F, D, H, W] goes through first
    # what all observations go through together; lstm gives a memory; auto: an mlp, where there are several of them
    body: str = "auto"
    head: str = "identity1d"  # what lies between the body and the outputs of the same rank as this piece
    hidden: tuple[int, ...] = (64, 64)  # the layers of an mlp; wider fits more and is slower: 256 256 suits robots
    activation: Activation = "tanh"  # after each layer of an mlp; tanh is steady for PPO and A2C, relu quick off-policy
    lstm_size: int = 64  # how much an lstm remembers; its cost grows with the square
    # one trunk for policy and value: less work, often slower to learn; auto: yes for images of 64×64 and more
    shared: Literal["auto", "yes", "no"] = "auto"
    # observations that the network gets, by name; * stands for any part of a name: network.actor.sees 'policy/*'
    sees: tuple[str, ...] = ("*",)
    orthogonal: bool = True  # orthogonal first weights and a nearly uniform first policy; off: PyTorch's own

    def resolved(self, inputs: int) -> NetworkConfig:
        """The same with ``auto`` decided: several observations meet before an mlp, vectors and matrices as they are.

        With layers of their own first and none together, what is learned of each would only be added up.
        """
        if self.body != "auto":
            return self
        if inputs < 2:
            return replace(self, body="identity1d")
        return replace(
            self,
            net1d="identity1d" if self.net1d == "mlp" else self.net1d,
            net2d="identity2d" if self.net2d == "flat_mlp" else self.net2d,
            body="mlp",
        )

    @property
    def may_be_recurrent(self) -> bool:
        """Whether some piece is an lstm or the user's own, which may have a memory too."""
        return self.name != "modular" or any(piece == "lstm" or ":" in piece for piece in self.piece_names)

    @property
    def piece_names(self) -> tuple[str, ...]:
        """The names of all classes that the network is made of."""
        return (self.name, self.net1d, self.net2d, self.net3d, self.net4d, self.body, self.head)

    def net3d_for(self, shape: tuple[int, ...]) -> str:
        """Return the piece that an image ``[F, H, W]`` goes through, with ``auto`` decided by its size."""
        if self.net3d != "auto":
            return self.net3d
        return "nature_cnn" if min(shape[1:]) >= NATURE_CNN_SIDE else "small_cnn"

    def visible(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that the network sees."""
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.sees)]

    def validate(self, table: str = "network") -> None:
        """Refuse sizes that no layer can have; ``table`` is where these settings are given."""
        for size in self.hidden:
            if size < 1:
                raise UserError(f"{table}.hidden has a layer of {size}; every layer needs a size of 1 or more.")
        if self.lstm_size < 1:
            raise UserError(f"{table}.lstm_size is {self.lstm_size}; it must be 1 or more.")
