"""The supervised program: teaches a freshly built model enough of a task that reinforcement learning finds rewards.

In: a RunConfig with ``data.sft_steps``. Out: a Hugging Face checkpoint, and the curve of the warm start beside it. Run
alike by every trainer rank; the same policy, packing and optimizer as the reinforcement-learning loop.

The warm start trains in BF16, as the model of a real run would have been pretrained.
"""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_fp8rl.algo.loss import sft_loss
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
from megatron_fp8rl.weights.save import save_hf

WARM_START, HF, CHECKPOINTS = "warm_start", "hf", "checkpoints"
EVALUATE_EVERY = 50


def warm_start_path(cfg: RunConfig) -> Path:
    """Where the warm start of a run leaves its Hugging Face checkpoint."""
    return Path(cfg.run_dir) / WARM_START / HF


def run(cfg: RunConfig, parallel: Parallel, tokenizer_dir: Path, stop: StopRequest | None = None) -> Path:
    """Collective: train for ``data.sft_steps`` and return the checkpoint's folder; at once when it exists already.

    A warm start that ``stop`` asks to end early raises RunStopped after a step; the next one goes on from there.
    """
    stop = stop or StopRequest()
    path = warm_start_path(cfg)
    checkpoints = path.parent / CHECKPOINTS
    if parallel.broadcast_object(path.exists()):
        return path
    cfg = _supervised(cfg)
    source = SftSource(cfg, load_tokenizer(str(tokenizer_dir)))
    policy = Policy.build(cfg, parallel)
    held_out = source.held_out(cfg.observe.eval_prompts)
    with Observer(cfg, parallel.rank == 0, path.parent, title=f"{cfg.name}: warm start") as observer, stop.errors_noted():
        step = _resume(cfg, policy, checkpoints)
        if step:
            with observer.prelude(step):
                pass
        for step in range(step + 1, cfg.num_steps + 1):
            stop.at_boundary(parallel, step - 1, partial(checkpoint.save, checkpoints, policy=policy, extra={}))
            with observer.step(step) as log:
                (batch,) = pack_for(cfg, source.samples(step - 1), data_rank=parallel.dp_rank)
                with span("update"):
                    log.updates([policy.update(batch, sft_loss)], [batch])
                if step % EVALUATE_EVERY == 0 or step == cfg.num_steps:
                    with span("evaluate"):
                        pass_rate = expected_pass_rate(policy, held_out)
                    log.update({"sft/expected_pass_rate/mean": pass_rate})
                    if cfg.data.sft_stop_pass_rate is not None and pass_rate >= cfg.data.sft_stop_pass_rate:
                        break
    save_hf(policy, path, tokenizer_dir)
    if parallel.rank == 0:
        shutil.rmtree(checkpoints, ignore_errors=True)  # the warm start is over, and they are larger than its result
    return path


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
