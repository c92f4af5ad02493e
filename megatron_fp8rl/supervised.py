"""The job of the command sft: supervised training on rows, and the base of other jobs that learn rows as they are.

In: a RunConfig whose sources are rows without rewards (data/training_rows.py). A step learns ``prompts_per_step`` rows,
packed. Held-out rows give the validation loss. There are no engines. Runs identically on every trainer rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from megatron_fp8rl.algo.load_function import load_loss
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.data.training_rows import TrainingRows
from megatron_fp8rl.observe.observer import StepLog
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.runtime.stop import StopRequest
from megatron_fp8rl.trainer.forward import to_device
from megatron_fp8rl.trainer.optimizer.offload import HostMemory
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.training_loop import TrainingLoop
from megatron_fp8rl.types import LossInputs, Sample, TrainBatch


def run(
    cfg: RunConfig,
    parallel: Parallel,
    tokenizer_dir: Path,
    stop: StopRequest | None = None,
    host: HostMemory | None = None,
    job: type[Supervised] | None = None,
) -> None:
    """Collective: train on the rows of ``cfg`` to ``cfg.num_steps``; resumes from the run's newest checkpoint."""
    cfg = replace(cfg, precision=replace(cfg.precision, exact=False))  # there are no engines to agree with
    with ExitStack() as stack:
        how = {"stop": stop or StopRequest(), "host": host, "stack": stack}
        (job or Supervised)(cfg, parallel, tokenizer_dir, **how).run()


class Supervised(TrainingLoop):
    """One run on this rank. Every method is a collective over the trainer ranks."""

    samples_per_row: ClassVar[int] = 1  # that share a microbatch

    def open_data(self, stack: ExitStack) -> None:
        self.loss = load_loss(self.cfg.algo)
        self.data = TrainingRows(self.cfg, load_tokenizer(str(self.tokenizer_dir)), log=self.parallel.rank == 0)
        self.held_out = self.data.held_out(self.cfg.observe.eval_prompts)

    def position(self) -> int:
        return self.data.position

    def train(self, log: StepLog) -> None:
        """Learn the next rows."""
        with span("pack"):
            batch = self.pack(self.data.next(self.cfg.sampling.prompts_per_step))
        self.step += 1
        self.saver.poll()
        with span("update"):
            log.updates([self.policy.update(batch, self.loss)], [batch])
        log.update({"data/dropped/sum": self.data.num_dropped})

    def end_step(self, log: StepLog) -> None:
        """Compute the validation loss if it is due."""
        if self.held_out and self.evaluation_is_due():
            with span("evaluate"):
                log.update(self.validate())

    def pack(self, samples: Sequence[Sample]) -> TrainBatch:
        """This rank's part of one update."""
        (batch,) = pack_for(self.cfg, samples, data_rank=self.parallel.dp_rank, together=self.samples_per_row)
        return batch

    def validate(self) -> dict[str, float]:
        """The loss of all held-out rows, and its metrics, under names that begin with ``eval/``."""
        batch = self.policy.with_old_logprobs(self.pack(self.held_out))
        sums: dict[str, float] = defaultdict(float)
        for mb in batch.microbatches:
            mb = to_device(mb, self.parallel.device)
            old_logprobs_T = mb.old_logprobs_T
            assert old_logprobs_T is not None
            inputs = LossInputs(
                mb=mb,
                batch=batch,
                trainer_logprobs_T=old_logprobs_T,
                entropy_T=torch.zeros_like(old_logprobs_T),
                cfg=self.cfg.algo,
                max_completion_tokens=self.cfg.sampling.max_completion_tokens,
            )
            loss, metrics = self.loss(inputs)
            sums["eval/loss/mean"] += loss.item()
            for key, value in metrics.items():
                name = key.removeprefix("loss/")
                if name not in ("entropy/mean", "nll/mean"):
                    sums[f"eval/{name}"] += value.item() / max(batch.num_loss_tokens, 1)
        return self.parallel.sum_over_data(dict(sums))
