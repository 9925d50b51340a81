"""Worker processes of the tests of parameter and gradient servers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ludus.containers.servers import GradientServer, ParameterServer
from ludus.parallel.shared_queue import SharedQueue


def model() -> nn.Module:
    """Return a module with parameters of several shapes and a buffer of integers."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def echo(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Report every version that is pulled, until the last one."""
    server, module, out = ParameterServer(model(), fds), model(), SharedQueue.open("out", fds)
    while server.version < settings["last"]:
        if server.pull(module):
            values = {float(x.double().mean()) for x in module.state_dict().values()}
            out.put([server.version, sorted(values)])


def fit(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Push gradients of a regression of y = 3x - 1."""
    line = nn.Linear(1, 1)
    server = GradientServer(line, fds)
    generator = torch.Generator().manual_seed(settings["seed"])
    while True:
        server.pull(line)
        x = torch.rand(16, 1, generator=generator)
        loss = (line(x) - (3 * x - 1)).square().mean()
        line.zero_grad()
        loss.backward()
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        server.push_gradient(line, {"seed": settings["seed"], "loss": float(loss)})
