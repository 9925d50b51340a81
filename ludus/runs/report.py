"""Write the run folder (metrics, log, checkpoints) and the console during training."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ludus.containers.build import Engines
from ludus.containers.evaluate import Evaluation
from ludus.core.agent import Agent
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.logging.console import Console
from ludus.logging.curve import curve
from ludus.logging.logfile import LogFile
from ludus.logging.metrics import Metrics, read_metrics
from ludus.logging.rate import Rate
from ludus.logging.status import number, percent
from ludus.runs.checkpoint import CheckpointManager
from ludus.runs.folder import RunDirectory
from ludus.runs.initialise import Transfer
from ludus.runs.open_run import SavedRun
from ludus.runs.summary import State as SummaryState
from ludus.runs.summary import Summary, write_summary
from ludus.settings.config_file import write_config
from ludus.settings.settings import ADAPTED, NO_PRESET, Settings, find_preset, to_flat
from ludus.settings.trust import IMPORTED_FROM, add_import_folders

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker
    from ludus.containers.network_check import NetworkReport

SHOWN = {  # metrics on the console and their labels; metrics.jsonl has all
    "loss/policy": "policy loss",
    "loss/actor": "actor loss",
    "loss/value": "value loss",
    "loss/critic": "critic loss",
    "q": "q",
    "loss/entropy": "entropy",
    "entropy": "entropy",
    "kl": "kl",
    "explained_variance": "explained variance",
}


class Reporter:
    """Writes the run folder and the console (standard output); a LocalWorker without a reporter writes nothing."""

    def __init__(
        self,
        run: RunDirectory,
        settings: Settings[Any],
        origins: Mapping[str, str],
        engines: Engines,
        agent: Agent,
        step: int = 0,
        signs: bool = True,
        backend: str = "",
        console: Console | None = None,
    ) -> None:
        self.run, self.settings = run, settings
        unsigned = write_config(
            run.config, add_import_folders(to_flat(settings)), {**origins, IMPORTED_FROM: "chosen"}, signs
        )
        self.metrics = Metrics(run.metrics, run.tensorboard)
        self.checkpoints = CheckpointManager(run, settings.keep)
        self.log_file = LogFile(run.log)
        self.console = None if settings.quiet else console or Console()
        self._losses: dict[str, float] = {}
        self._workers: list[str] = []  # what the console shows of IMPALA's workers
        self._rate = Rate()
        self._rate.update(step)
        self._curve: list[tuple[int, float]] = []
        self._problems: set[tuple[str, str]] = set()  # of networks, shown on the console already
        self._emptied = 0, 0  # steps and updates when the replay buffer was last empty
        self._first_step = step  # of this process
        size = sum(p.numel() for p in agent.parameters() if p.requires_grad)
        frozen = f" ({', '.join(settings.freeze)} frozen)" if settings.freeze else ""
        spread = f", {settings.ranks} ranks" if settings.ranks > 1 else ""
        who = settings.roles.agents or settings.agent_name
        info = {
            "environment": f"{settings.env.id} x {settings.env.num}{', ' * bool(backend)}{backend}{spread}",
            "agent": f"{who}, {size:,} parameters{frozen}, seed {settings.seed}",
            "engines": f"{engines.device}, {engines.threads} thread{'s' * (engines.threads > 1)}, "
            f"{engines.acting} acting, {engines.update} update{engines.obstacle and f' ({engines.obstacle})'}",
            "settings": where_from(settings, origins),
            "run": str(run.path),
        }
        self.log_file.note("\n".join(f"{name}: {value}" for name, value in info.items()))
        if self.console is not None:
            self.console.start(info, settings.nb_step, step)
        if unsigned:
            self.warn(f"The run is not signed ({unsigned}): load it with --trust or trust=True.")

    def resumed(self, worker: LocalWorker, saved: SavedRun, restored: str) -> None:
        """Truncate the metrics at the checkpoint and report where the run resumes."""
        start: State = {"offset": 0, "step": 0}
        self.metrics.load_state_dict(start if saved.state is None else saved.state["metrics"])
        lines = read_metrics(self.run.metrics)
        self._curve = [(int(line["step"]), line["evaluation/mean"]) for line in lines if "evaluation/mean" in line]
        for text in saved.warnings:
            self.warn(text)
        step = worker.local_step_count
        if saved.state is None:
            self.note("No checkpoint was saved yet: training starts again from step 0.")
            return
        from ludus.logging.hints import missing_replay, too_few_steps_left

        missing, exact = missing_replay(worker, saved.state), restored == "exactly"
        environments = "were restored exactly" if exact else restored
        (self.note if exact else self.warn)(f"Resumed at step {step:,}. Environments {environments}.{missing}")
        if missing:
            self._emptied = step, worker.updates
            if warning := too_few_steps_left(worker):
                self.warn(warning)

    def initialised(self, transfer: Transfer) -> None:
        """Report which tensors were loaded from another run."""
        self.log_file.note(transfer.details())
        (self.note if transfer.complete else self.warn)(transfer.summary())

    def summarize(self, worker: LocalWorker, state: SummaryState = "running", best: float | None = None) -> None:
        """Write ``summary.json``, which `ludus list runs` shows; ``best`` overrides the worker's."""
        settings = self.settings
        summary = Summary(
            environment=settings.env.id,
            agent=settings.agent_names,
            seed=settings.seed,
            name=settings.name,
            tags=settings.tags,
            steps=worker.local_step_count,
            nb_step=settings.nb_step,
            best=worker.best if best is None else best,
            state=state,
            reason="" if state == "running" else worker.stopping,
        )
        write_summary(self.run, summary)

    def note(self, text: str) -> None:
        """Print and log a line."""
        self.log_file.note(text)
        if self.console is not None:
            self.console.note(text)

    def warn(self, text: str) -> None:
        """Print and log a warning."""
        self.log_file.warning(text)
        if self.console is not None:
            self.console.note(text)

    def _refuse_removed(self) -> None:
        """End the run if its folder was deleted."""
        if not self.run.config.exists():
            raise UserError(
                f'The run folder "{self.run.path}" was deleted or moved during training, so nothing more can be saved: '
                "train again, and keep the folder in place until the end."
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line of metrics."""
        self._refuse_removed()
        self._rate.update(step)
        self.metrics.write(step, dict(values) | {"time/steps_per_second": self._rate.per_second()})
        self._losses = {label: values[name] for name, label in SHOWN.items() if name in values}
        if "loss/entropy" in values:
            self._losses["entropy"] = -values["loss/entropy"]  # the loss is the negative entropy
        self._workers = describe_workers(values)

    def show(self, worker: LocalWorker) -> None:
        """Update the console if it is due."""
        if self.console is not None and self.console.due():
            self._draw(worker, self.console)

    def _draw(self, worker: LocalWorker, console: Console) -> None:
        recent = worker.progress()
        shares = worker.clock.shares()
        console.update(
            worker.local_step_count, recent.get("return"), recent.get("length"), self._losses, shares, self._workers
        )

    def evaluated(self, worker: LocalWorker, evaluation: Evaluation, better: bool) -> None:
        """Report an evaluation, and save the policy to ``best/`` if it is ``better`` than all before."""
        step = worker.local_step_count
        self._refuse_removed()
        if better:
            self.checkpoints.save_best(step, {"agent": dict(worker.agent.state_dict())}, evaluation.mean)
        values = {"mean": evaluation.mean, "std": evaluation.std, "length": evaluation.mean_length}
        self.metrics.write(step, {f"evaluation/{name}": x for name, x in values.items()})
        self.summarize(worker, best=evaluation.mean if better else None)
        self._curve.append((step, evaluation.mean))
        self.log_file.note(f"evaluation at step {step}: {evaluation.mean:.6g} ± {evaluation.std:.4g}")
        if self.console is not None:
            self.console.evaluated(step, evaluation.mean, evaluation.std, len(evaluation.returns))

    def checked(self, report: NetworkReport) -> None:
        """Report a check of the networks; the console shows each kind of problem of a layer once."""
        self.log_file.note(report.text())
        self.metrics.write(report.step, report.metrics())
        for problem in report.problems:
            if (problem.layer, problem.kind) not in self._problems and self.console is not None:
                self.console.note(f"network check at step {report.step:,}: {problem.text}")
            self._problems.add((problem.layer, problem.kind))

    def checkpoint(self, worker: LocalWorker) -> None:
        """Save everything that a resume needs."""
        self._refuse_removed()
        state = worker.state_dict() | {"metrics": self.metrics.state_dict()}
        self.checkpoints.save(worker.local_step_count, state)
        self.summarize(worker)

    def failed(self, error: BaseException) -> None:
        """Log the traceback of the error that ends the run."""
        with suppress(UserError):  # such as a full disk; the error itself matters more
            self.log_file.warning("".join(traceback.format_exception(error)))

    def rescue(self, worker: LocalWorker, why: str, tells: bool = False) -> None:
        """Save a checkpoint before an early end, unless it is saved already or training diverged.

        ``tells``: also report that nothing was saved because there was no update yet.
        """
        saved = not worker.between and self.checkpoints.has(worker.local_step_count)
        if not worker.can_rescue:
            self.note(f"{why}; a resume continues from the last checkpoint.")
        elif worker.updates and not saved and not worker.diverged:
            try:
                self.checkpoint(worker)
                new = "" if worker.between else "; a resume starts new episodes"
                self.note(f"{why}; saved at step {worker.local_step_count:,}{new}.")
            except UserError as error:  # such as a full disk; the error that ends the run matters more
                with suppress(UserError):
                    self.note(f"{why}; the last steps could not be saved: {error}")
        elif saved:
            self.note(f"{why}; already saved at step {worker.local_step_count:,}, and a resume is exact.")
        elif tells:
            self.note(f"{why}; nothing was saved, because there was no update yet.")
        with suppress(UserError):
            self.summarize(worker, "stopped" if worker.interrupted else "failed")
        if self.console is not None:
            self._draw(worker, self.console)

    def finish(self, worker: LocalWorker) -> None:
        """Save, and show the learning curve and hints."""
        self.checkpoint(worker)
        reason = worker.stopping or "all steps done"
        self.summarize(worker, "stopped" if worker.interrupted else "complete")
        self.log_file.note(f"ended at step {worker.local_step_count}: {reason}")
        no_update = worker.updates == self._emptied[1]
        if self.console is None and not no_update:
            return
        from ludus.logging.hints import hints, why_no_update

        why = why_no_update(worker, self._emptied[0]) if no_update else []
        for text in why:
            self.log_file.warning(text)
        if self.console is None:
            return
        self._draw(worker, self.console)
        self.console.finish()
        if len(self._curve) > 1:
            steps, means = zip(*self._curve, strict=True)
            self.console.note(curve(steps, means, self.settings.evaluation.stop_at, min(self.console.width, 72)))
        self.console.note(f"Training ended after {worker.local_step_count:,} steps: {reason}.")
        self.console.note(f"Saved in {self.run.path}.")
        for hint in why + hints(worker, self._losses.get("explained variance", 1.0), self._first_step):
            self.console.note(hint)

    def close(self) -> None:
        """Restore the terminal and close the files; may be called twice."""
        if self.console is not None:
            self.console.finish()
        self.metrics.close()


def describe_workers(values: Mapping[str, float]) -> list[str]:
    """Describe the workers of IMPALA by their metrics; empty without them."""
    if "impala/lag" not in values:
        return []
    return [
        f"waiting {percent(values['impala/workers_wait'])} of the time",
        f"queue {percent(values['impala/queue'])} full",
        f"lag {number(values['impala/lag'])}",
        f"{values['impala/restarts']:.0f} replaced",
    ]


def where_from(settings: Settings[Any], origins: Mapping[str, str]) -> str:
    """Describe which preset, file and flags the settings came from, and name the defaults adapted to this run."""
    counts = Counter(origin for key, origin in origins.items() if key != "env.id")  # a positional argument
    layers = [origin for origin in counts if origin.startswith("preset ")]
    if not layers:
        none = find_preset(settings.env.id, settings.agent_name) == NO_PRESET
        layers = ["defaults (no matching preset)" if none else "defaults (no preset)"]
    if counts[ADAPTED]:
        flat = to_flat(settings)
        adapted = [f"{key} {flat[key]}" for key, origin in origins.items() if origin == ADAPTED]
        layers.append(f"for this run {', '.join(adapted)}")
    layers += [origin for origin in counts if origin.startswith("file ")]
    layers += [f"{n} {kind}{'s' * (n > 1)}" for kind in ("flag", "argument") if (n := counts[kind])]
    return ", ".join(layers + [f"{n} changed by resume" for n in [counts["flag of resume"]] if n])
