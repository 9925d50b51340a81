"""Parameter and gradient servers between processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from server_jobs import model
from torch import nn

from ludus.containers.servers import GradientServer, ParameterServer
from ludus.parallel.process import Launcher, WorkerError
from ludus.parallel.shared_queue import SharedQueue

PATIENCE = 120.0  # seconds: far more than a test takes


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher(preload=["ludus.containers.servers"])
    yield launcher
    launcher.close()


def test_workers_pull_whole_versions_in_order_and_the_newest_one_at_last(launcher: Launcher) -> None:
    module, last = model(), 300
    server, out = ParameterServer(module), SharedQueue(32)
    assert not ParameterServer.pull(server, module)  # nothing was pushed
    fds = server.fds | out.fds("out")
    workers = [launcher.start("server_jobs:echo", {"last": last}, fds, f"worker {i}") for i in range(2)]
    seen: list[list[float]] = []
    for version in range(1, last + 1):
        with torch.no_grad():
            for x in module.state_dict().values():
                x.fill_(version)
        assert server.push(module) == version
        while len(out):
            seen.append(out.get(PATIENCE))
    while sum(version == last for version, _ in seen) < len(workers):
        seen.append(out.get(PATIENCE, workers))
    assert all(values == [version] for version, values in seen)  # never parts of two versions
    assert len(seen) >= len(workers)
    for worker in workers:
        assert worker.wait(PATIENCE)
        worker.end()
    server.close()
    out.close()


def test_gradients_of_workers_are_learned_from_and_a_failed_worker_is_reported(launcher: Launcher) -> None:
    line = nn.Linear(1, 1)
    server, optimizer = GradientServer(line, slots=2), torch.optim.SGD(line.parameters(), lr=0.2)
    server.push(line)
    workers = [launcher.start("server_jobs:fit", {"seed": i}, server.fds, f"worker {i}") for i in range(2)]
    seen = []
    for _ in range(300):
        seen += server.receive(line, 2, PATIENCE, workers)
        optimizer.step()
        server.push(line)
    assert abs(float(line.weight.detach()) - 3) < 0.1
    assert abs(float(line.bias.detach()) + 1) < 0.1
    assert {gradient.report["seed"] for gradient in seen} == {0, 1}
    assert min(gradient.lag for gradient in seen) >= 0
    with torch.no_grad():
        line.weight.fill_(torch.nan)
    server.push(line)
    with pytest.raises(WorkerError, match="raised ValueError: the loss is not finite"):
        server.receive(line, 20, PATIENCE, workers)  # more than the workers push before they see it
    for worker in workers:
        worker.end()
    server.close()


def test_the_mean_of_gradients_is_stored_in_the_shapes_of_the_parameters() -> None:
    module = model()
    server = GradientServer(module)
    for scale in (1.0, 3.0):
        for i, p in enumerate(module.parameters()):
            p.grad = None if i == 0 else torch.arange(p.numel()).view_as(p) * scale
        server.push_gradient(module, timeout=1.0)
    assert [gradient.lag for gradient in server.receive(module, 2)] == [0, 0]
    for i, p in enumerate(module.parameters()):
        assert p.grad is not None
        assert torch.equal(p.grad, torch.arange(p.numel()).view_as(p) * (2.0 if i else 0.0))
    server.close()
