"""Parameters and gradients between processes, for training loops of your own; the containers have their own channel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ludus.containers.channel import ActingState
from ludus.containers.shared_channel import PublishedState, layout_of
from ludus.parallel.process import Process
from ludus.parallel.shared_queue import SharedQueue


class ParameterServer:
    """The newest parameters and buffers of a module in shared memory: its owner pushes them, others pull them.

    Other processes get the file descriptors ``fds`` from a ``Launcher``, and call ``ParameterServer(module, fds)`` with
    a module of the same layers. Nobody waits: a push overwrites what was not pulled.
    """

    def __init__(self, module: nn.Module, fds: Mapping[str, int] | None = None) -> None:
        fd = None if fds is None else fds["parameters"]
        self._published = PublishedState(layout_of(module.state_dict()), fd)
        self.version = 0  # that this process pushed or pulled last

    @property
    def fds(self) -> dict[str, int]:
        """The file descriptors to pass to other processes."""
        return {"parameters": self._published.block.fd}

    def push(self, module: nn.Module) -> int:
        """Make the parameters of a module the newest version; return its number. Only the owner pushes."""
        self.version += 1
        self._published.write(ActingState(self.version, 0.0, module.state_dict()))
        return self.version

    def pull(self, module: nn.Module) -> bool:
        """Load the newest parameters into a module; return False if it has them already, or none were pushed."""
        state = self._published.read(self.version)
        if state is None:
            return False
        module.load_state_dict(state.tensors)
        self.version = state.version
        return True

    def close(self) -> None:
        """Release the memory."""
        self._published.close()


class Gradient(NamedTuple):
    """What was received with a gradient."""

    lag: int  # how many versions older the parameters are that it was computed with
    report: Any  # what the worker sent along


class GradientServer(ParameterServer):
    """Parameters that their owner improves by the gradients of others, as in A3C (Mnih et al. 2016).

    A worker pulls the parameters, computes a gradient with ``backward`` and pushes it with ``push_gradient``. The owner
    receives it with ``receive``, takes a step of its optimizer, and pushes the parameters. Up to ``slots`` gradients
    wait; then workers wait.
    """

    def __init__(self, module: nn.Module, fds: Mapping[str, int] | None = None, slots: int = 8) -> None:
        super().__init__(module, fds)
        self._queue = SharedQueue(slots) if fds is None else SharedQueue.open("gradients", fds)

    @property
    def fds(self) -> dict[str, int]:
        """The file descriptors to pass to other processes."""
        return super().fds | self._queue.fds("gradients")

    def push_gradient(self, module: nn.Module, report: Any = None, timeout: float = math.inf) -> None:
        """Send the gradients of a module's parameters, and plain values or arrays for the owner."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
        flat = torch.cat([x.detach().flatten().cpu() for x in found]).numpy()
        self._queue.put({"version": self.version, "gradient": flat, "report": report}, timeout)

    def receive(
        self, module: nn.Module, number: int = 1, timeout: float = math.inf, watch: Sequence[Process] = ()
    ) -> list[Gradient]:
        """Wait for ``number`` gradients, and store their mean in the gradients of a module's parameters.

        Raise a TimeoutError after ``timeout`` seconds without one, and the error of a process of ``watch`` that failed.
        """
        messages = [self._queue.get(timeout, watch) for _ in range(number)]
        mean = torch.from_numpy(sum(message["gradient"] for message in messages) / number)
        start = 0
        for p in module.parameters():
            p.grad = mean[start : start + p.numel()].view_as(p).to(p)
            start += p.numel()
        return [Gradient(self.version - message["version"], message["report"]) for message in messages]

    def close(self) -> None:
        """Release the memory."""
        self._queue.close()
        super().close()
