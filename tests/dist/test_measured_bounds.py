"""Bounds of the importance weight from the tokens of all ranks, against numpy and at three data-parallel sizes."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_fp8rl.config import AlgoConfig
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, make_samples, run_config

QUANTILE = 0.1
VALUES = ("truncate", "mask", "sequence_truncate", "sequence_mask", "geometric_mask")
SAMPLES = make_samples(48)


def noise(name: str, length: int) -> list[float]:
    """old - rollout of the completion tokens of a sequence; the mean is not 0."""
    generator = random.Random(name)
    return [generator.gauss(0.05, 0.3) for _ in range(length)]


def measure(world_size: int) -> list[tuple[float, float, float]]:
    """Runs on a rank: (low, high, fraction of corrected tokens) of every value of algo.correction."""
    from megatron_fp8rl.algo.mismatch import mismatch_metrics, with_measured_bounds
    from megatron_fp8rl.trainer.parallel import Parallel
    from tests.helpers.training import make_batch

    cfg = run_config(model=DENSE, world_size=world_size)
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    batches = []
    for samples in (SAMPLES[:32], SAMPLES[32:]):  # a step of two updates
        batch, filled = make_batch(cfg, parallel.dp_rank, samples), []
        for mb in batch.microbatches:
            old_T = torch.zeros_like(mb.rollout_logprobs_T)
            for index, name in enumerate(mb.names):
                own = (mb.sequence_ids_T == index) & mb.loss_mask_T
                d = torch.tensor(noise(name, int(own.sum())))
                old_T[own] = mb.rollout_logprobs_T[own] + d
            filled.append(replace(mb, old_logprobs_T=old_T))
        batches.append(replace(batch, microbatches=tuple(filled)))
    results = []
    for correction in VALUES:
        algo = AlgoConfig(correction=correction, correction_quantile=QUANTILE, veto_below=None)
        algo = with_measured_bounds(batches, algo, parallel)
        metrics = mismatch_metrics(batches, algo, parallel).metrics
        results.append((algo.correction_low, algo.correction_high, metrics["mismatch/fraction_corrected/mean"]))
    return results


@pytest.mark.core
def test_bounds_are_numpys_quantiles_on_every_rank_at_any_data_parallel_size():
    sizes = [run_ranks(size, measure, size) for size in (1, 2, 4)]
    (alone,) = sizes[0]
    for ranks in sizes:
        assert all(rank == alone for rank in ranks), "equal bits"

    rollout = [np.array(list(s.segments[1].rollout_logprobs), np.float32) for s in SAMPLES]
    d = [
        (values + np.array(noise(s.name, len(values)), np.float32)) - values
        for s, values in zip(SAMPLES, rollout, strict=True)
    ]
    tokens, sums = np.concatenate(d).astype(np.float64), np.array([x.sum(dtype=np.float64) for x in d])
    means = sums / [len(x) for x in d]
    bounded = dict(zip(VALUES, (tokens, tokens, sums, sums, means), strict=True))
    for correction, (low, high, fraction) in zip(VALUES, alone, strict=True):
        tail = QUANTILE / 2 if correction.endswith("mask") else QUANTILE
        lowest, highest = np.exp(np.quantile(bounded[correction], (tail, 1 - tail)))
        assert lowest < 1 < highest
        assert (low, high) == pytest.approx((lowest if correction.endswith("mask") else 0.0, highest), rel=1e-12)
        if bounded[correction] is tokens:
            assert fraction == pytest.approx(QUANTILE, abs=2 / len(tokens))
        elif correction != "geometric_mask":  # it also caps tokens
            outside = [not low <= np.exp(total) <= high for total in sums]
            assert sum(outside) in (5, 6), "a tenth of 48 sequences, rounded up at each side"
            assert fraction == sum(len(x) for x, out in zip(d, outside, strict=True) if out) / len(tokens)
