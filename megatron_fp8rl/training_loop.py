"""The loop of every training job: steps, records, checkpoints, resume and export.

In: a RunConfig and a job, which is a subclass of :class:`TrainingLoop`. Out: a trained policy, and all files that the
observer writes to the run's folder. Runs identically on every trainer rank.
"""

from abc import ABC, abstractmethod
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.resumed_config import changed_contents, content_digests
from megatron_fp8rl.observe.observer import Observer, StepLog
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.precision.hardware import local_hardware
from megatron_fp8rl.precision.kernel_choice import choose
from megatron_fp8rl.runtime.stop import StopRequest
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.checkpoint_schedule import CheckpointSchedule
from megatron_fp8rl.trainer.model.lora import merged
from megatron_fp8rl.trainer.optimizer.offload import HostMemory
from megatron_fp8rl.trainer.optimizer.optimizer import optimizer_name
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.weight_sync.save_adapter import save_adapter
from megatron_fp8rl.weight_sync.save_hf import save_hf

CHECKPOINTS, FINAL_HF, ADAPTER = "checkpoints", "hf", "adapter"


class TrainingLoop(ABC):
    """One run on this rank. Every method is a collective over the trainer ranks."""

    says_exactness: ClassVar[bool] = False  # whether there are engines to compare with
    has_reference: ClassVar[bool] = True  # whether ``algo.kl_coef`` makes the policy keep its initial weights
    data: Any  # set by :meth:`open_data`: has a ``position``, which a resume sets, and ``row_identities``

    def __init__(
        self,
        cfg: RunConfig,
        parallel: Parallel,
        tokenizer_dir: Path,
        *,
        stop: StopRequest,
        host: HostMemory | None,
        stack: ExitStack,
    ) -> None:
        """Build the policy and resume from the newest checkpoint; ``stack`` closes all resources."""
        checkpoints = Path(cfg.run_dir) / CHECKPOINTS
        self.cfg, self.parallel, self.stop, self.tokenizer_dir = cfg, parallel, stop, tokenizer_dir
        self.observer = stack.enter_context(Observer(cfg, is_writer=parallel.rank == 0))
        stack.enter_context(stop.errors_noted())
        self.open_data(stack)
        self.contents = content_digests(cfg, tokenizer_dir)
        with span("start_model"):
            self.policy = Policy.build(cfg, parallel, host, has_reference=self.has_reference)
            self.kernels = choose(cfg, local_hardware(), "trainer")
            if self.says_exactness:
                self.observer.message(f"precision.exact: {self.kernels.exact_text()}")
            self.observer.note({**self.kernels.record(), "trainer kernel, optimizer": optimizer_name(cfg.optim)})
            if (untried := self.kernels.untried(cfg)) is not None:
                self.observer.warn(untried)
            # Number of finished steps, metrics of the last step so far, and whether the run is complete.
            self.step, self.record, self.is_complete = self._resume(checkpoints)
        stop.at_boundary(parallel, self.step)
        self.connect(stack)
        self.saver = stack.enter_context(closing(checkpoint.Saver(checkpoints, self.policy)))
        self.schedule = CheckpointSchedule(cfg.checkpoint, cfg.num_steps, parallel)

    def run(self) -> None:
        """Train to ``cfg.num_steps``, then export the weights."""
        if not self.is_complete:
            with self.observer.prelude(self.step, self.record) as log:
                self.begin(log)
        while self.step < self.cfg.num_steps:
            self.stop.at_boundary(self.parallel, self.step, self.save_early)
            with self.observer.step(self.step + 1) as log:
                self.train(log)
                self.save(log)
                self.end_step(log)
            self.saver.poll()  # after the step's line is on disk
        self.saver.finish()
        self.end()
        if self.cfg.checkpoint.export_hf:
            with merged(self.policy.models):
                save_hf(self.policy, Path(self.cfg.run_dir) / FINAL_HF, self.tokenizer_dir)
            if self.cfg.lora.rank:
                save_adapter(self.policy, Path(self.cfg.run_dir) / ADAPTER)

    @abstractmethod
    def open_data(self, stack: ExitStack) -> None:
        """Set :attr:`data`, before the policy is built."""

    @abstractmethod
    def train(self, log: StepLog) -> None:
        """Take the data of the next step, count the step, and learn."""

    @abstractmethod
    def end_step(self, log: StepLog) -> None:
        """What follows an update, such as publication and evaluation."""

    @abstractmethod
    def position(self) -> Any:
        """The position in the data after the finished steps; rank 0's value is saved."""

    def connect(self, stack: ExitStack) -> None:  # noqa: B027  optional
        """Connect to other programs, such as engines, once the policy is built."""

    def begin(self, log: StepLog) -> None:
        """Work before the first update."""
        self.end_step(log)

    def end(self) -> None:  # noqa: B027  optional
        """Work after the last step, before the weights are exported."""

    def release(self) -> None:  # noqa: B027  optional
        """Prepare a checkpoint of a run that ends early."""

    def evaluation_is_due(self) -> bool:
        """True at the start, at the end, and every ``observe.eval_every`` steps, if ``observe.eval_prompts`` > 0."""
        observe, step = self.cfg.observe, self.step
        is_due = step in (0, self.cfg.num_steps) or (observe.eval_every and step % observe.eval_every == 0)
        return bool(is_due and observe.eval_prompts)

    def save(self, log: StepLog) -> None:
        """Begin a checkpoint if one is due."""
        if self.schedule.is_due(self.step):
            self._begin_save(log.record())

    def save_early(self, step: int) -> Path | None:
        """Finish the checkpoint of a run that ends early; finished groups of the next step are kept."""
        self.release()
        if self.schedule.is_missing(step):
            self._begin_save({})
        return self.saver.finish()

    def _begin_save(self, record: dict[str, Any]) -> None:
        self.schedule.begin(self.step)
        with span("checkpoint"):
            position = self.parallel.broadcast_object(self.position())
            # If the run is killed before it writes the step's line to metrics.jsonl, it writes the line on resume.
            record = self.parallel.broadcast_object(record)
            extra = {"prompt_position": position, "record": record, "rows": self.data.row_identities}
            extra["contents"] = self.contents
            self.saver.begin(self.step, extra)

    def _resume(self, checkpoints: Path) -> tuple[int, dict[str, Any], bool]:
        """Restore the newest checkpoint: (its step or 0, the step's record, whether the run is complete). A run that
        lacks the line of its last step, because it was killed, is not complete."""
        resumed = checkpoint.resume(checkpoints, self.policy, self.observer.message)
        if resumed is None:
            return 0, {}, self.cfg.num_steps == 0
        step, extra = resumed
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()  # reading allocates parts of the state twice, and engines share this GPU
        self.data.position = extra["prompt_position"]
        for key, before in extra.get("rows", {}).items():
            if (now := self.data.row_identities.get(key, before)) != before:
                self.observer.message(f"changed since then: the data of {key} were {before}, now {now}")
        for text in changed_contents(extra.get("contents", {}), self.contents):
            self.observer.message(f"changed since then: {text}")
        record = extra.get("record", {})
        lacks_line = self.parallel.broadcast_object(bool(record) and self.observer.lacks(step))
        return step, record, step >= self.cfg.num_steps and not lacks_line
