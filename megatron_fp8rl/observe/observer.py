"""Records and displays a run as it progresses, in the run's folder:

    metrics.jsonl    one line per step: {"step": n, "<key>": number, ...}
    details.jsonl    one line per step: mismatch by position, by environment, worst sequences; weight update digest
    rollouts/        every rollout, a file for each step, usable as input of a replay (``recording.py``)
    config.json      the resolved configuration;  versions.json  packages and hardware
    tensorboard/     the same metrics;  report.html and report.png  the same metrics as plots
    failure.json     only after a failure: step, error and traceback;  done.json  only after success

Every trainer rank creates an Observer and makes the same calls; only the writer records. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import operator
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.checkpoint_dir import errors_name, sync_to_disk
from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.observe.display import Display, make_display
from megatron_fp8rl.observe.groups import ACCEPTANCE, evaluation_metrics, group_metrics
from megatron_fp8rl.observe.metrics import check_keys
from megatron_fp8rl.observe.recording import FOLDER, RolloutWriter
from megatron_fp8rl.observe.records import last_step, truncate_from, write_json
from megatron_fp8rl.observe.spans import STARTED, add_seconds, take_seconds
from megatron_fp8rl.observe.versions import collect_versions
from megatron_fp8rl.types import PublishReport, RolloutGroup, Sample, TrainBatch

if TYPE_CHECKING:
    from megatron_fp8rl.algo.mismatch import MismatchReport

_log = logging.getLogger(__name__)
_STEP_FILES = ("metrics.jsonl", "details.jsonl")
_TENSORBOARD, _EVENTS = "tensorboard", "events.out.tfevents."


class Observer:
    """Context manager of a whole run: records and re-raises an error. Metrics must already be reduced over ranks."""

    def __init__(
        self, cfg: RunConfig, is_writer: bool = True, run_dir: Path | str | None = None, *, title: str = ""
    ) -> None:
        self.cfg = cfg
        self.is_writer = is_writer
        self.run_dir = Path(run_dir if run_dir is not None else cfg.run_dir)
        self._last_step: int | None = None
        self._open_step: StepLog | None = None
        self._files: dict[str, Any] = {}
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._rollouts: RolloutWriter | None = None
        self._compiled = compile_cache.Record()
        self._has_updated = False
        self._display: Display = make_display(
            cfg.observe.display if is_writer else "none", title or cfg.name, cfg.num_steps
        )

    def __enter__(self) -> Observer:
        if self.is_writer:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            for name in ("failure.json", "done.json"):
                (self.run_dir / name).unlink(missing_ok=True)
            write_json(self.run_dir / "config.json", dataclasses.asdict(self.cfg))
            write_json(self.run_dir / "versions.json", {**collect_versions(), "started_unix_s": time()})
            if self.cfg.observe.wandb_project is not None:
                self._wandb = _start_wandb(self.cfg, self.run_dir)
        for name, seconds in take_seconds().items():  # discard other seconds of a warm start
            if name.startswith("start_"):
                add_seconds(name, seconds)
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()
        if not self.is_writer:
            return
        for name, file in (*self._files.items(), (FOLDER, self._rollouts), (_TENSORBOARD, self._tensorboard)):
            # After an error, which may be that of a full disk, a second one while closing would hide it.
            with errors_name(self.run_dir / name), contextlib.suppress(*(() if error is None else (OSError,))):
                if file is not None:
                    file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None or isinstance(error, SystemExit) else 1)
        if error is None:
            write_json(self.run_dir / "done.json", {"step": self._last_step, "finished_unix_s": time()})
        elif not isinstance(error, SystemExit):  # SystemExit: stopped early, to be resumed
            self._record_failure(error)

    @contextmanager
    def step(self, step: int) -> Iterator[StepLog]:
        """One step of the loop; writes its line when the block ends. The first call moves the records of an earlier run
        in the folder aside, from this step on."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: steps must increase")
        log = self._open_step = StepLog(self, step)
        if self._last_step is None and self.is_writer:
            self._open_files(step)
            if STARTED in os.environ:
                log.metrics["time/start/s"] = time() - float(os.environ[STARTED])
        start = perf_counter()
        yield log
        log.metrics["time/step/s"] = perf_counter() - start
        for name, seconds in take_seconds().items():
            log.metrics[f"time/{name}/s"] = seconds
        if log.updated_unix_s is not None and not self._has_updated and STARTED in os.environ:
            log.metrics["time/first_update/s"] = log.updated_unix_s - float(os.environ[STARTED])
        self._has_updated |= log.updated_unix_s is not None
        if self.is_writer and (seconds := self._compiled.take_seconds()):
            log.metrics["time/compile/s"] = seconds
        _add_rates(log.metrics)
        check_keys(log.metrics)
        self._last_step = step
        if self.is_writer:
            self._write_step(log)
        self._open_step = None

    @contextmanager
    def prelude(self, step: int, record: Mapping[str, Any] | None = None) -> Iterator[StepLog]:
        """Work before the first update: publish, evaluate. ``step`` is where training continues.

        A new run (``step`` 0) writes the line of step 0. A resumed run keeps the line of the step. If a kill prevented
        it, it is built from the checkpoint's ``record`` (:meth:`StepLog.record`) and this work.
        """
        if step == 0:
            with self.step(0) as log:
                yield log
            return
        if self.is_writer:
            self._open_files(step + 1)
        log = self._open_step = StepLog(self, step)
        yield log
        take_seconds()
        if record and self.lacks(step):
            log.metrics = {**record["metrics"], **log.metrics}
            log.details = {**record["details"], **log.details}
            self._write_step(log)
        self._last_step = step
        self._open_step = None

    def note(self, facts: Mapping[str, str]) -> None:
        """Add facts to versions.json that are known only after startup."""
        if self.is_writer and facts:
            path = self.run_dir / "versions.json"
            write_json(path, json.loads(path.read_text(encoding="utf-8")) | dict(facts))

    def message(self, text: str) -> None:
        self._display.message(text)

    def warn(self, text: str) -> None:
        """Display a warning; within a step it also appears in the report."""
        if self.is_writer:
            self._display.warn(text)
            if self._open_step is not None:
                self._open_step.details.setdefault("warnings", []).append(text)

    def record_groups(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Record the groups of a step if the run records rollouts; :meth:`flush` writes them to disk."""
        if self._rollouts is not None:
            self._rollouts.write(step, groups)

    def flush(self) -> None:
        if self._rollouts is not None:
            self._rollouts.flush()
        for file in self._files.values():
            os.fsync(file.fileno())

    def lacks(self, step: int) -> bool:
        """On the writing rank: whether the metrics line of an earlier run's step is missing."""
        path = self.run_dir / "metrics.jsonl"
        return self.is_writer and (not path.exists() or last_step(path) < step)

    def _open_files(self, step: int) -> None:
        for name in _STEP_FILES:
            if cut := truncate_from(self.run_dir / name, step):
                _log.info("%s: moved aside %d bytes recorded from step %d on", self.run_dir / name, cut, step)
            self._files[name] = (self.run_dir / name).open("a", encoding="utf-8")
        sync_to_disk(self.run_dir)
        if self.cfg.observe.rollouts_gib:
            self._rollouts = RolloutWriter(self.run_dir / FOLDER, step, self.cfg.observe.rollouts_gib)
        from torch.utils.tensorboard import SummaryWriter  # takes 0.3 s to import

        _keep_order(self.run_dir / _TENSORBOARD)
        self._tensorboard = SummaryWriter(str(self.run_dir / _TENSORBOARD), purge_step=step)

    def _write_step(self, log: StepLog) -> None:
        # JSON has no NaN or infinity: write null, which a curve shows as a gap.
        numbers = {key: value if math.isfinite(value) else None for key, value in log.metrics.items()}
        self._append("metrics.jsonl", {"step": log.step, **numbers})
        if log.details:
            self._append("details.jsonl", {"step": log.step, **log.details})
        if self._tensorboard is not None:
            with errors_name(self.run_dir / _TENSORBOARD):
                for key, value in log.metrics.items():
                    self._tensorboard.add_scalar(key, value, log.step)
                self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(log.metrics, step=log.step)
        self._display.show_step(log.step, log.metrics)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        file = self._files[name]
        with errors_name(self.run_dir / name):
            file.write(json.dumps(record, allow_nan=False, default=str) + "\n")
            file.flush()

    def _record_failure(self, error: BaseException) -> None:
        log = self._open_step
        failure = {
            "step": self._last_step if log is None else log.step,
            "error": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error))[-20_000:],
            "metrics_of_the_unfinished_step": {} if log is None else {k: str(v) for k, v in log.metrics.items()},
            "failed_unix_s": time(),
        }
        try:
            write_json(self.run_dir / "failure.json", failure)
        except OSError as write_error:  # such as a full disk; the original error is still raised
            self._display.warn(f"{self.run_dir / 'failure.json'} could not be written: {write_error}")


class StepLog:
    def __init__(self, observer: Observer, step: int) -> None:
        self.step = step
        self.metrics: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self.updated_unix_s: float | None = None  # the end of the step's updates
        self._observer = observer

    def record(self) -> dict[str, Any]:
        """Flush the step's groups to disk and return collected data as JSON: {"metrics": ..., "details": ...}."""
        self._observer.flush()
        finite = {key: value for key, value in self.metrics.items() if math.isfinite(value)}
        return json.loads(json.dumps({"metrics": finite, "details": self.details}, default=str))

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics: numbers or one-element tensors. Raises UnknownMetricError."""
        check_keys(metrics)
        self.metrics.update({key: float(value) for key, value in metrics.items()})

    def groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Add reward, length and version metrics of the step's groups, and record the groups. Warn if engines with a
        prediction layer verified no draft: it then costs memory and time, and saves nothing."""
        if not self._observer.is_writer:
            return
        self.update(group_metrics(groups))
        self._observer.record_groups(self.step, groups)
        if self._observer.cfg.engine.speculation == "mtp" and groups and ACCEPTANCE not in self.metrics:
            text = "the engines verified no draft of the prediction layer; --engine.speculation none saves its cost"
            self._observer.warn(f"step {self.step}: {text}")

    def evaluation(self, groups: Sequence[RolloutGroup]) -> None:
        """Add metrics of held-out problems. Their groups are not recorded: a replay must not train on them."""
        self.update(evaluation_metrics(groups))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Add advantages, staleness and the fraction of dropped completions. Call after :meth:`groups`."""
        num_completions = self.metrics.get("rollout/num_completions/sum", 0.0)
        if num_completions:
            self.update({"reward/dropped/mean": 1 - len(samples) / num_completions})
        if not samples:
            return
        trained = [segment for sample in samples for segment in sample.segments if segment.is_trained]
        advantages = [segment.advantage for segment in trained]
        nums = [len(segment.token_ids) for segment in trained]
        staleness = [sample.staleness for sample in samples]
        self.update(
            {
                "reward/advantage/mean": sum(map(operator.mul, advantages, nums)) / sum(nums),
                "reward/advantage/min": min(advantages),
                "reward/advantage/max": max(advantages),
                "rollout/staleness/mean": sum(staleness) / len(staleness),
                "rollout/staleness/max": max(staleness),
            }
        )

    def updates(self, metrics: Sequence[Mapping[str, float]], batches: Sequence[TrainBatch]) -> None:
        """Add the metrics of the step's optimizer updates, one mapping per update, and their batches. Keys in ``/max``:
        maximum over the updates. Learning rate: mean. Others: mean weighted by loss tokens."""
        self.updated_unix_s = time()
        num_tokens = [batch.num_loss_tokens for batch in batches]
        for key in metrics[0] if metrics else ():
            values = [update[key] for update in metrics]
            if key.endswith("/max"):
                self.update({key: max(values)})
            elif key == "train/lr/mean" or len(set(num_tokens)) == 1:
                self.update({key: sum(values) / len(values)})
            else:
                weighted = sum(value * num for value, num in zip(values, num_tokens, strict=True))
                self.update({key: weighted / sum(num_tokens)})
        self.update(
            {
                "train/num_updates/sum": len(metrics),
                "train/num_tokens/sum": sum(batch.num_loss_tokens for batch in batches),
                "train/num_sequences/sum": sum(batch.num_sequences for batch in batches),
                "train/num_microbatches/sum": sum(len(batch.microbatches) for batch in batches),
            }
        )

    def mismatch(self, report: MismatchReport) -> None:
        self.update(report.metrics)
        if len(report.by_turn) > 1:
            for part in report.by_turn:
                key = f"mismatch/abs_logprob_diff_turn_{part.label}"
                self.update({f"{key}/mean": part.abs_logprob_diff_mean, f"{key}/max": part.abs_logprob_diff_max})
        for name in ("by_position", "by_environment", "by_turn", "worst"):
            self.details[name] = [dataclasses.asdict(part) for part in getattr(report, name)]
        for alarm in report.alarms:
            self._observer.warn(f"step {self.step}: {alarm}")

    def publish(self, report: PublishReport) -> None:
        """Add the contents and cost of a weight update. Costs of several updates in one step add up."""
        costs = {"total/s": report.seconds, "pause/s": report.pause_s, "bytes/sum": report.num_bytes}
        self.update(
            {
                **{f"publish/{key}": self.metrics.get(f"publish/{key}", 0.0) + cost for key, cost in costs.items()},
                "publish/num_tensors/sum": report.num_tensors,
                "publish/num_fp8_tensors/sum": report.num_fp8_tensors,
                "publish/version/max": report.version,
            }
        )
        self.details["checksum"] = report.checksum


def _add_rates(metrics: dict[str, float]) -> None:
    for rate, tokens, span in (
        ("rollout/tokens_per_s/mean", "rollout/num_tokens/sum", "time/generate/s"),
        ("train/tokens_per_s/mean", "train/num_tokens/sum", "time/update/s"),
    ):
        if rate not in metrics and metrics.get(span, 0.0) > 0 and tokens in metrics:
            metrics[rate] = metrics[tokens] / metrics[span]


def _start_wandb(cfg: RunConfig, run_dir: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            f"observe.wandb_project = {cfg.observe.wandb_project!r}, but the package wandb is not installed; "
            "run `pip install wandb`, or leave --observe.wandb_project unset"
        ) from error
    return wandb.init(
        project=cfg.observe.wandb_project,
        name=cfg.name,
        dir=str(run_dir),
        config=dataclasses.asdict(cfg),
        resume="allow",
    )


def _keep_order(folder: Path) -> None:
    """Rename event files whose time lies ahead, so that TensorBoard reads them before the file of this start.

    TensorBoard reads files by name, and a name begins with the seconds of the clock. After a jump back it would read
    this start's file first, and the first file's ``purge_step`` would hide this start's values.
    """
    files = sorted(folder.glob(f"{_EVENTS}*"))
    if not files or files[-1].name < f"{_EVENTS}{int(time()):010d}":
        return
    for index, file in enumerate(files):
        _, _, rest = file.name.removeprefix(_EVENTS).partition(".")
        file.rename(folder / f"{_EVENTS}{index:010d}.{rest}")
