"""Everything a run writes: folder, metrics, console, log and checkpoints."""

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
from ludus.logging.clock import Rate
from ludus.logging.console import Console
from ludus.logging.curve import curve
from ludus.logging.logfile import LogFile
from ludus.logging.metrics import Metrics, read_metrics
from ludus.runs.checkpoint import CheckpointKeeper
from ludus.runs.folder import RunDirectory
from ludus.runs.open_run import SavedRun
from ludus.runs.summary import State as SummaryState
from ludus.runs.summary import Summary, write_summary
from ludus.settings.config_file import write_config
from ludus.settings.settings import NO_PRESET, Settings, find_preset, to_flat
from ludus.settings.trust import IMPORTED_FROM, add_import_folders

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker

SHOWN = {  # metrics on the console, and what they are called there; all are in metrics.jsonl
    "loss/policy": "policy loss",
    "loss/actor": "actor loss",
    "loss/value": "value loss",
    "loss/critic": "critic loss",
    "q": "q",
    "loss/entropy": "entropy",
    "entropy": "entropy",
    "kl": "kl",
    "explained_variance": "explained_variance",
}


class Reporter:
    """Writes the run folder and the console; a LocalWorker without one writes nothing."""

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
    ) -> None:
        self.run, self.settings, self._origins = run, settings, origins
        unsigned = write_config(
            run.config, add_import_folders(to_flat(settings)), {**origins, IMPORTED_FROM: "chosen"}, signs
        )
        self.metrics = Metrics(run.metrics, run.tensorboard)
        self.keeper = CheckpointKeeper(run, settings.keep)
        self.log_file = LogFile(run.log)
        self.console = None if settings.quiet else Console()
        self._losses: dict[str, float] = {}
        self._rate = Rate()
        self._rate.update(step)
        self._curve: list[tuple[int, float]] = []
        self._emptied = 0, 0  # steps and updates when the replay, where there is one, was last empty
        self._begun = step  # where this process took the run over
        info = self._info(engines, agent, backend)
        self.log_file.note("\n".join(f"{name}: {value}" for name, value in info.items()))
        if self.console is not None:
            self.console.start(info, settings.nb_step, step)
        if unsigned:
            self.warn(f"The run is not signed, because {unsigned}: to load it later, add --trust or trust=True.")

    def resumed(self, worker: LocalWorker, saved: SavedRun, restored: str) -> None:
        """Truncate metrics to the checkpoint and report where the run resumes."""
        start: State = {"offset": 0, "step": 0}
        self.metrics.load_state_dict(start if saved.state is None else saved.state["metrics"])
        lines = read_metrics(self.run.metrics)
        self._curve = [(int(line["step"]), line["evaluation/mean"]) for line in lines if "evaluation/mean" in line]
        for text in saved.warnings:
            self.warn(text)
        step = worker.local_step_count
        if saved.state is None:
            self.note("Resumed before the first checkpoint: from step 0.")
            return
        from ludus.logging.hints import left_out, too_few_left  # what a new run does without

        emptied, exactly = left_out(worker, saved.state), restored == "exactly"
        came = "came back exactly" if exactly else restored
        (self.note if exactly else self.warn)(f"Resumed at step {step:,}. Environments {came}.{emptied}")
        if emptied:
            self._emptied = step, worker.updates
            if warning := too_few_left(worker):
                self.warn(warning)

    def _info(self, engines: Engines, agent: Agent, backend: str) -> dict[str, str]:
        settings, size = self.settings, sum(p.numel() for p in agent.parameters() if p.requires_grad)
        return {
            "environment": f"{settings.env.id} x {settings.env.num}{', ' * bool(backend)}{backend}",
            "agent": f"{settings.agent_name}, {size:,} parameters, seed {settings.seed}",
            "engines": f"{engines.device}, {engines.threads} thread{'s' * (engines.threads > 1)}, "
            f"{engines.acting} acting, {engines.update} update",
            "settings": where_from(settings, self._origins),
            "run": str(self.run.path),
        }

    def summarize(self, worker: LocalWorker, state: SummaryState = "running", best: float | None = None) -> None:
        """Write what a list of runs shows; ``best`` where it is newer than the worker's."""
        settings = self.settings
        summary = Summary(
            environment=settings.env.id,
            agent=settings.agent_name,
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
        """End the run with a sentence if its folder was removed meanwhile."""
        if not self.run.config.exists():
            raise UserError(
                f'The run folder "{self.run.path}" was removed or moved during the training, so nothing more can be '
                "saved; train again, and leave the folder in its place until the end."
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line of metrics and speed."""
        self._refuse_removed()
        self._rate.update(step)
        self.metrics.write(step, dict(values) | {"time/steps_per_second": self._rate.per_second()})
        self._losses = {label: values[name] for name, label in SHOWN.items() if name in values}
        if "loss/entropy" in values:
            self._losses["entropy"] = -values["loss/entropy"]  # the loss is its negative

    def show(self, worker: LocalWorker) -> None:
        """Redraw the console, if it is time."""
        if self.console is not None and self.console.due():
            self._draw(worker, self.console)

    def _draw(self, worker: LocalWorker, console: Console) -> None:
        recent = worker.progress()
        shares = worker.clock.shares()
        console.update(worker.local_step_count, recent.get("return"), recent.get("length"), self._losses, shares)

    def evaluated(self, worker: LocalWorker, evaluation: Evaluation, better: bool) -> None:
        """Report an evaluation, and save the policy to ``best/`` if it is the best so far."""
        step = worker.local_step_count
        self._refuse_removed()
        if better:
            self.keeper.save_best(step, {"agent": dict(worker.agent.state_dict())}, evaluation.mean)
        values = {"mean": evaluation.mean, "std": evaluation.std, "length": evaluation.mean_length}
        self.metrics.write(step, {f"evaluation/{name}": x for name, x in values.items()})
        self.summarize(worker, best=evaluation.mean if better else None)
        self._curve.append((step, evaluation.mean))
        self.log_file.note(f"evaluation at step {step}: {evaluation.mean:.6g} ± {evaluation.std:.4g}")
        if self.console is not None:
            self.console.evaluated(step, evaluation.mean, evaluation.std, len(evaluation.returns))

    def checkpoint(self, worker: LocalWorker) -> None:
        """Save all that a resume needs, the metrics up to here included."""
        self._refuse_removed()
        self.keeper.save(worker.local_step_count, self._state(worker))
        self.summarize(worker)

    def failed(self, error: BaseException) -> None:
        """Log the traceback of the error that ends the run."""
        with suppress(UserError):  # a full disk, say: the error itself matters more
            self.log_file.warning("".join(traceback.format_exception(error)))

    def rescue(self, worker: LocalWorker, why: str, tells: bool = False) -> None:
        """Save what an early end would lose, unless that is saved already or training diverged.

        ``tells``: say so too where nothing was saved because nothing was learned yet.
        """
        saved = not worker.between and self.keeper.has(worker.local_step_count)
        if worker.updates and not saved and not worker.guard.diverged:
            try:
                self.checkpoint(worker)
                new = "" if worker.between else "; a resume from there begins new episodes"
                self.note(f"{why}; all up to step {worker.local_step_count:,} is saved{new}.")
            except UserError as error:  # a full disk, say: the error that ends the run matters more
                with suppress(UserError):
                    self.note(f"{why}, and the last steps could not be saved: {error}")
        elif saved:
            self.note(f"{why}; the checkpoint of step {worker.local_step_count:,} is whole, and a resume is exact.")
        elif tells:
            self.note(f"{why}; nothing was learned yet, so nothing is saved.")
        with suppress(UserError):
            self.summarize(worker, "stopped" if worker.interrupted else "failed")
        if self.console is not None:
            self._draw(worker, self.console)

    def _state(self, worker: LocalWorker) -> State:
        return worker.state_dict() | {"metrics": self.metrics.state_dict()}

    def finish(self, worker: LocalWorker) -> None:
        """Save, and show the learning curve."""
        self.checkpoint(worker)
        reason = worker.stopping or "all steps are done"
        self.summarize(worker, "stopped" if worker.interrupted else "complete")
        self.log_file.note(f"ended at step {worker.local_step_count}: {reason}")
        idle = worker.updates == self._emptied[1]
        if self.console is None and not idle:
            return
        from ludus.logging.hints import hints, no_update  # what is quiet and learns does without

        why = no_update(worker, self._emptied[0]) if idle else []
        for text in why:
            self.log_file.warning(text)
        if self.console is None:
            return
        self._draw(worker, self.console)
        self.console.finish()
        if len(self._curve) > 1:
            steps, means = zip(*self._curve, strict=True)
            self.console.note(curve(steps, means, self.settings.evaluation.stop_at, min(self.console.width, 72)))
        self.console.note(f"Ended after {worker.local_step_count:,} steps: {reason}.")
        self.console.note(f"All is saved in {self.run.path}.")
        for hint in why + hints(worker, self._losses.get("explained_variance", 1.0), self._begun):
            self.console.note(hint)

    def close(self) -> None:
        """Give the terminal back and close the files; may be called twice."""
        if self.console is not None:
            self.console.finish()
        self.metrics.close()


def where_from(settings: Settings[Any], origins: Mapping[str, str]) -> str:
    """The preset, the file and the number of flags that settings came from."""
    counts = Counter(origin for key, origin in origins.items() if key != "env.id")  # which is a word without a flag
    layers = [origin for origin in counts if origin.startswith("preset ")]
    if not layers:
        none = find_preset(settings.env.id, settings.agent_name) == NO_PRESET
        layers = ["defaults (no preset fits)" if none else "defaults (no preset)"]
    layers += [origin for origin in counts if origin.startswith("file ")]
    layers += [f"{n} {kind}{'s' * (n > 1)}" for kind in ("flag", "argument") if (n := counts[kind])]
    return ", ".join(layers + [f"{n} by resume" for n in [counts["flag of resume"]] if n])
