"""Save what reproduces a failed update, and recompute it to find the first NaN or Inf."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ludus.containers.build import build_agent, choose_device, outline_agent
from ludus.containers.guard import TrainingFailed, must_be_finite
from ludus.containers.local import LocalWorker
from ludus.containers.threads import use_threads
from ludus.containers.updater import LocalUpdater
from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.types import State, Tensors
from ludus.core.updater import LossFunction
from ludus.experience.validate import Fault, find_fault
from ludus.networks.inspection import FirstNonFinite, all_finite, watch_modules
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory
from ludus.runs.policy import agent_of_checkpoint, refuse_mismatch
from ludus.settings.settings import Settings, from_flat
from ludus.settings.trust import read_run_settings

FOLDER = "failure"  # within a run
FAILURES = ("loss", "gradient", "backward")  # a module alone may output -inf on purpose, as a mask does


def save_failure(run: Path, worker: LocalWorker, error: TrainingFailed) -> UserError:
    """Save the live state and the batch in the run's folder; return the error with the command that reads them."""
    agent, refused = worker.agent, error.refused
    state: State = {
        "agent": dict(agent.state_dict()),
        "buffers": dict(agent.named_buffers()),  # including those that are not persistent
        "updater": worker.updater.state_dict(),
        "specs": {
            name: {key: asdict(spec) for key, spec in getattr(worker.manager, name).items()}
            for name in ("observation", "action")
        },
        "batch": dict(vars(error.batch)),
        "step": None,
    }
    if refused is not None and getattr(refused.loss, "__self__", None) is agent:  # else the loss has no known name
        batch, loss = dict(vars(refused.batch)), getattr(refused.loss, "__name__", "")
        state["step"] = {"loss": loss, "group": refused.group, "batch": batch}
    try:
        checkpoints.save(run / FOLDER, state, {"step": error.step, "message": str(error)})
    except UserError as problem:  # such as a full disk
        return UserError(f"{error} The state that led to it could not be saved: {problem}")
    return UserError(f"{error} Run `ludus diagnose {shlex.quote(str(run))}` to see where it came from.")


class Diagnosis(NamedTuple):
    """The result of recomputing a failed update."""

    settings: Settings[Any]
    step: int  # environment steps when the run ended
    message: str  # the error that ended the run
    findings: list[str]  # each NaN or Inf, in the order of computation; empty if the failure was not reproduced


def diagnose(run: RunDirectory, trust: bool = False) -> Diagnosis:
    """Recompute the failed update of a run and return where NaN or Inf appear; the run is not changed.

    ``trust``: import the classes that the run names even if this user did not create it on this machine.
    """
    folder = run.path / FOLDER
    if not folder.exists():
        raise UserError(f'The run "{run.path}" has no failed update: one is saved when training stops at a NaN or Inf.')
    settings = from_flat(read_run_settings(run.path, run.config, trust, unused=("env.", "network_check.")).flat)
    try:
        device = choose_device(settings.device)
        with checkpoints.open_checkpoint(folder) as checkpoint:
            saved = checkpoint.read("specs")["specs"]
            observation, action = _load_specs(saved["observation"]), _load_specs(saved["action"])
            refuse_mismatch(outline_agent(settings, observation, action), agent_of_checkpoint(checkpoint))
            state, step, message = checkpoint.read(), int(checkpoint.meta["step"]), str(checkpoint.meta["message"])
        batch = _load_batch(state["batch"], device)
        acting = [
            f"acting: {name} was already NaN or Inf in the rollout"
            for name, x in (batch.action | batch.experience).items()
            if not all_finite(x)
        ]
        if fault := find_fault(batch):
            return Diagnosis(settings, step, message, [*acting, _describe_fault(batch, fault)])
        agent = build_agent(settings, observation, action, device)
        with use_threads(settings.threads or torch.get_num_threads()), torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            found = _recompute(agent, batch, state)
        return Diagnosis(settings, step, message, [*acting, *found] if found else [])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f'"{folder}" does not match the settings and the code of its run ({type(error).__name__}: {reason}); '
            "use the agent and network that wrote it."
        ) from error


def _describe_fault(batch: Batch, fault: Fault) -> str:
    """Name the environment step that returned a NaN or Inf."""
    row, length = fault.row, len(batch.reward)
    where = f"environment {row}" if batch.index is None else f"item {row} of the batch from the replay buffer"
    what, returned_at = "the reward", fault.time + 1  # with the observation that followed
    if fault.kind == "observation":
        what, returned_at = f'observation "{fault.name}" at {fault.element}', fault.time
    if fault.kind == "observation" and bool(batch.first[returned_at, row]):
        return f"{where}, t={returned_at} of {length}: {what} is {fault.value}, returned by reset()"
    actions = {name: x[returned_at - 1, row].tolist() for name, x in batch.action.items()} if returned_at else {}
    after = "".join(f", {name} {x}" if name == "action" else f', action "{name}" {x}' for name, x in actions.items())
    return f"{where}, t={returned_at} of {length}: {what} is {fault.value}, returned by step(){after}"


def _recompute(agent: Agent, batch: Batch, state: State) -> list[str]:
    """Recompute the failed optimizer step, or the whole update if that step is unknown."""
    findings: list[str] = []
    updater = _InspectingUpdater(agent, findings)
    agent.load_state_dict(state["agent"])
    with torch.no_grad():
        for name, buffer in agent.named_buffers():
            buffer.copy_(state["buffers"][name])
    agent.read_scheduled()
    updater.read_coefficients()
    updater.load_state_dict(state["updater"])
    failed = state["step"]
    first = FirstNonFinite()
    with watch_modules(agent, first), _inspect_backward(findings):
        try:
            if failed is not None:
                batch = _load_batch(failed["batch"], batch.reward.device)
                updater.step(getattr(agent, failed["loss"]), batch, failed["group"])
            else:
                metrics = agent.learn(batch, updater).metrics
                findings += [
                    f"loss: {k} is {float(x)}" for k, x in metrics.items() if must_be_finite(k) and not all_finite(x)
                ]
        except _Found:
            pass
    found = [f"forward: {first.finding}", *findings] if first.finding else findings
    return found if any(finding.startswith(FAILURES) for finding in findings) else []


class _Found(Exception):
    """Ends a recomputation at the first step that is not finite."""


class _InspectingUpdater(LocalUpdater):
    """Computes losses and gradients without applying them, and stops at the first that are not finite."""

    def __init__(self, agent: Agent, findings: list[str]) -> None:
        super().__init__(agent)
        self.findings = findings

    def step(self, loss: LossFunction, batch: Batch, group: str) -> Tensors:
        """Record which losses and gradients are not finite."""

        def inspected(batch: Batch) -> tuple[Tensors, Tensors]:
            losses, metrics = loss(batch)
            self.findings += [f"loss: {name} is {float(x)}" for name, x in losses.items() if not all_finite(x)]
            return losses, metrics

        gradient, metrics = self.gradient(inspected, batch, group)
        part = self.parts[group]
        bad = [place[0] for place, x in zip(part.places, part.gradients, strict=True) if not all_finite(x)]
        norm = gradient.norm()
        if bad:
            self.findings.append(f"gradient: not finite for {', '.join(bad[:3])}{', …' * (len(bad) > 3)}")
        elif not all_finite(norm):
            self.findings.append("gradient: its norm overflows")
        if any(finding.startswith(FAILURES) for finding in self.findings):
            raise _Found
        return metrics | {"gradient_norm": norm}


@contextmanager
def _inspect_backward(findings: list[str]) -> Iterator[None]:
    """Record the operation with the first NaN gradient, and the line that called it, by PyTorch's anomaly mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                yield
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            trace = next((str(w.message) for w in caught if "Traceback of forward call" in str(w.message)), "")
            frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', trace)
            finding = "backward: " + str(error).split(". ")[0].rstrip(".")
            for file, line, function, code in [frame for frame in frames if "/torch/" not in frame[0]][-1:]:
                finding += f", in {function} ({Path(file).name}, line {line}): {code.strip()}"
            findings.append(finding)


def _load_batch(state: State, device: torch.device) -> Batch:
    def move(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: move(item) for name, item in x.items()}
        return x.to(device) if isinstance(x, Tensor) else x

    values: dict[str, Any] = {
        name: HiddenState(move(x)) if name in ("state", "last_state") else move(x) for name, x in state.items()
    }
    return Batch(**values)


def _load_specs(saved: State) -> Specs:
    def load(spec: State) -> Any:
        return {key: tuple(x) if isinstance(x, list) else x for key, x in spec.items()}

    return {name: Spec(**load(spec)) for name, spec in saved.items()}
