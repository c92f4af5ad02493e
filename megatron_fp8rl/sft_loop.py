"""The supervised program: teaches a freshly built model enough of a task that reinforcement learning finds rewards.

In: a RunConfig with ``data.sft_steps``. Out: a Hugging Face checkpoint, and the curve of the warm start beside it. Run
alike by every trainer rank; the same policy, packing and optimizer as the reinforcement-learning loop.

The warm start trains in BF16, as the model of a real run would have been pretrained.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.algo.losses import sft
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.data.sft import SftSource
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.observe.observer import Observer
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.stop import StopRequest
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Sample
from megatron_fp8rl.weight_sync.save_hf import save_hf

WARM_START, HF, CHECKPOINTS = "warm_start", "hf", "checkpoints"
EVALUATE_EVERY = 50
SAVE_EVERY_S = 60.0  # between two checkpoints at least,
SAVE_SHARE = 0.05  # and so long that they take at most this share of the time


def warm_start_path(cfg: RunConfig) -> Path:
    """Where the warm start of a run leaves its Hugging Face checkpoint."""
    return Path(cfg.run_dir) / WARM_START / HF


def run(cfg: RunConfig, parallel: Parallel, tokenizer_dir: Path, stop: StopRequest | None = None) -> Path:
    """Collective: train for ``data.sft_steps`` and return the checkpoint's folder; at once when it exists already.

    Every minute or more it leaves a checkpoint, from which the next one goes on, bit for bit. A warm start that
    ``stop`` asks to end early raises RunStopped after a step, with a checkpoint of it.
    """
    stop = stop or StopRequest()
    path = warm_start_path(cfg)
    checkpoints = path.parent / CHECKPOINTS
    if parallel.broadcast_object(path.exists()):
        _forget(checkpoints, parallel)  # a warm start that was killed right after its end left them
        return path
    cfg = _supervised(cfg)
    source = SftSource(cfg, load_tokenizer(str(tokenizer_dir)))
    policy = Policy.build(cfg, parallel)
    held_out = source.held_out(cfg.observe.eval_prompts)
    saves = _Checkpoints(checkpoints, policy)
    with Observer(cfg, parallel.rank == 0, path.parent, title=f"{cfg.name}: warm start") as observer, stop.errors_noted():
        step = _resume(cfg, policy, checkpoints)
        if step:
            with observer.prelude(step):
                pass
        for step in range(step + 1, cfg.num_steps + 1):
            stop.at_boundary(parallel, step - 1, saves.save)
            with observer.step(step) as log:
                (batch,) = pack_for(cfg, source.samples(step - 1), data_rank=parallel.dp_rank)
                with span("update"):
                    log.updates([policy.update(batch, sft)], [batch])
                if held_out and (step % EVALUATE_EVERY == 0 or step == cfg.num_steps):
                    with span("evaluate"):
                        pass_rate = expected_pass_rate(policy, held_out)
                    log.update({"sft/expected_pass_rate/mean": pass_rate})
                    if cfg.data.sft_stop_pass_rate is not None and pass_rate >= cfg.data.sft_stop_pass_rate:
                        break  # before the checkpoint: a warm start that goes on from one has not reached its end
                if step < cfg.num_steps:
                    saves.save_if_due(step)
    save_hf(policy, path, tokenizer_dir)
    _forget(checkpoints, parallel)
    return path


class _Checkpoints:
    """Those of a warm start, by the clock: its steps may take a tenth of a second or many, and so may a checkpoint."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._folder, self._policy = folder, policy
        self._due = time.monotonic() + SAVE_EVERY_S

    def save_if_due(self, step: int) -> None:
        """Collective: by the clock of rank 0."""
        if self._policy.parallel.broadcast_object(time.monotonic() >= self._due):
            self.save(step)

    def save(self, step: int) -> Path:
        """Collective: returns the checkpoint; ``checkpoint.keep`` of them stay."""
        begin = time.monotonic()
        with span("checkpoint"):
            path = checkpoint.save(self._folder, step, self._policy, extra={})
        end = time.monotonic()
        self._due = end + max(SAVE_EVERY_S, (end - begin) / SAVE_SHARE)
        return path


def _forget(checkpoints: Path, parallel: Parallel) -> None:
    """Remove the checkpoints of a warm start that is over: they are larger than its result."""
    if parallel.rank == 0:
        shutil.rmtree(checkpoints, ignore_errors=True)


def _resume(cfg: RunConfig, policy: Policy, checkpoints: Path) -> int:
    """Collective: the step to continue after; 0 for a new warm start."""
    newest = policy.parallel.broadcast_object(checkpoint.latest(checkpoints)) if cfg.checkpoint.resume else None
    return 0 if newest is None else checkpoint.restore(newest, policy)[0]


def expected_pass_rate(policy: Policy, samples: Sequence[Sample]) -> float:
    """Collective: the chance that a sampled completion is the reference answer, averaged over the samples.

    The product of the probabilities of an answer's tokens is the probability of sampling that answer at
    ``rollout.temperature``, so this needs one forward pass and has no sampling noise. Other answers that would earn a
    reward too are not counted.
    """
    (batch,) = pack_for(policy.cfg, samples, data_rank=policy.parallel.dp_rank)
    scored = policy.with_old_logprobs(batch)
    log_probability: dict[str, float] = defaultdict(float)
    for mb in scored.microbatches:
        assert mb.old_logprobs_T is not None
        for index, name in enumerate(mb.names):
            mask = mb.loss_mask_T & (mb.sequence_ids_T == index)
            if mask.any():
                log_probability[name] += float(mb.old_logprobs_T[mask].sum())
    total = {"pass": sum(map(math.exp, log_probability.values())), "num": float(len(log_probability))}
    total = policy.parallel.sum_over_data(total)
    return total["pass"] / max(total["num"], 1.0)


def _supervised(cfg: RunConfig) -> RunConfig:
    """The same run with the optimizer, precision and length of its warm start."""
    return replace(
        cfg,
        num_steps=cfg.data.sft_steps,
        optim=replace(cfg.optim, lr=cfg.data.sft_lr, warmup_steps=min(20, cfg.data.sft_steps // 10), decay="linear"),
        precision=replace(cfg.precision, trainer="bf16"),
        algo=replace(cfg.algo, updates_per_step=1, kl_coef=0.0),
    )
