"""Supervised warm start: trains a new model until reinforcement learning finds rewards.

In: a RunConfig with ``warm_start.steps``. Out: a Hugging Face checkpoint and metrics. Runs identically on every trainer
rank, in BF16, with the policy, packing and optimizer of the reinforcement-learning loop.
"""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.algo.losses import sft
from megatron_fp8rl.config import LoraConfig, RunConfig
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.data.sft import SftSource
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.observe.observer import Observer
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.runtime.stop import StopRequest
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Sample
from megatron_fp8rl.weight_sync.save_hf import save_hf

WARM_START, HF, CHECKPOINTS = "warm_start", "hf", "checkpoints"
EVALUATE_EVERY = 50
SAVE_EVERY_S = 60.0  # minimum interval between two checkpoints
SAVE_SHARE = 0.05  # maximum fraction of the time spent on checkpoints; extends the interval if needed


def run(cfg: RunConfig, parallel: Parallel, tokenizer_dir: Path, stop: StopRequest | None = None) -> Path:
    """Collective: train for ``warm_start.steps`` and return the checkpoint's folder; skip training if it exists.

    Saves a checkpoint every minute or less often; resuming is bit-exact. If ``stop`` requests an early end, saves a
    checkpoint after a step and raises RunStopped.
    """
    stop = stop or StopRequest()
    path = Path(cfg.run_dir) / WARM_START / HF
    checkpoints = path.parent / CHECKPOINTS
    if parallel.broadcast_object(path.exists()):
        _delete(checkpoints, parallel)  # left if the warm start was killed right after it finished
        return path
    cfg = _supervised(cfg)
    source = SftSource(cfg, load_tokenizer(str(tokenizer_dir)))
    policy = Policy.build(cfg, parallel)
    held_out = source.held_out(cfg.observe.eval_prompts)
    saves = _Checkpoints(checkpoints, policy)
    with (
        Observer(cfg, parallel.rank == 0, path.parent, title=f"{cfg.name}: warm start") as observer,
        stop.errors_noted(),
    ):
        resumed = checkpoint.resume(checkpoints, policy, observer.message)
        step = 0 if resumed is None else resumed[0]
        if step:
            with observer.prelude(step):
                pass
        for step in range(step + 1, cfg.num_steps + 1):  # noqa: B020  the first step is read once, before the loop
            stop.at_boundary(parallel, step - 1, saves.save)
            with observer.step(step) as log:
                (batch,) = pack_for(cfg, source.samples(step - 1), data_rank=parallel.dp_rank)
                with span("update"):
                    log.updates([policy.update(batch, sft)], [batch])
                if held_out and (step % EVALUATE_EVERY == 0 or step == cfg.num_steps):
                    with span("evaluate"):
                        pass_rate = expected_pass_rate(policy, held_out)
                    log.update({"sft/expected_pass_rate/mean": pass_rate})
                    if cfg.warm_start.stop_pass_rate is not None and pass_rate >= cfg.warm_start.stop_pass_rate:
                        break  # before saving: resuming from a checkpoint must mean that training continues
                if step < cfg.num_steps:
                    saves.save_if_due(step)
    save_hf(policy, path, tokenizer_dir)
    _delete(checkpoints, parallel)
    return path


class _Checkpoints:
    """Time-based checkpoints of a warm start: both steps and checkpoints can take from 0.1 s to many seconds."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._folder, self._policy = folder, policy
        self._due = time.monotonic() + SAVE_EVERY_S

    def save_if_due(self, step: int) -> None:
        """Collective: save if rank 0's clock says that a checkpoint is due."""
        if self._policy.parallel.broadcast_object(time.monotonic() >= self._due):
            self.save(step)

    def save(self, step: int) -> Path:
        """Collective: save and return the checkpoint; the newest ``checkpoint.keep`` are kept."""
        begin = time.monotonic()
        with span("checkpoint"):
            path = checkpoint.save(self._folder, step, self._policy, extra={})
        end = time.monotonic()
        self._due = end + max(SAVE_EVERY_S, (end - begin) / SAVE_SHARE)
        return path


def _delete(checkpoints: Path, parallel: Parallel) -> None:
    """Delete the checkpoints of a finished warm start, which are larger than its result."""
    if parallel.rank == 0:
        shutil.rmtree(checkpoints, ignore_errors=True)


def expected_pass_rate(policy: Policy, samples: Sequence[Sample]) -> float:
    """Collective: probability that a sampled completion equals the reference answer, averaged over the samples.

    One forward pass computes the probability of sampling the reference answer at ``sampling.temperature``. Other
    correct answers are not counted.
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
    """The run's configuration with the optimizer and number of steps of the warm start, in BF16, without exact mode and
    adapters."""
    precision = cfg.precision
    params = "bf16" if precision.params == "fp8" else precision.params
    kernels = {role: kernel for role, kernel in precision.kernels.items() if role != "linears"}
    return replace(
        cfg,
        num_steps=cfg.warm_start.steps,
        optim=replace(
            cfg.optim, lr=cfg.warm_start.lr, warmup_steps=min(20, cfg.warm_start.steps // 10), decay="linear"
        ),
        precision=replace(precision, trainer="bf16", params=params, kernels=kernels, exact=False),
        algo=replace(cfg.algo, updates_per_step=1, kl_coef=0.0),
        lora=LoraConfig(),
    )
