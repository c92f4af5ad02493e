"""Random packed batches in float64 for the tests of losses and mismatch."""

import dataclasses
import random

import torch

from megatron_fp8rl.data.packing import pack
from megatron_fp8rl.types import Microbatch, Sample, TrainBatch
from tests.helpers.samples import make_sample


def random_samples(seed: int, count: int = 9, longest: int = 14) -> list[Sample]:
    """Sequences of random lengths; some completions are masked in part, as after a tool call."""
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        num_prompt, num_completion = rng.randint(1, 5), rng.randint(1, longest)
        mask = [True] + [rng.random() < 0.85 for _ in range(num_completion - 1)]
        advantage = rng.choice([-1.5, -0.5, 0.5, 1.0, 2.0])
        samples.append(
            make_sample(
                f"e{i % 2}/{i}#0",
                f"e{i % 2}",
                prompt=[rng.randrange(100) for _ in range(num_prompt)],
                completion=[rng.randrange(100) for _ in range(num_completion)],
                logprobs=[-rng.expovariate(1.0) for _ in range(num_completion)],
                mask=mask,
                advantages=[advantage] * num_completion,
            )
        )
    return samples


class LocalReducer:
    def gather(self, value):
        return [value]


def packed(samples: list[Sample], *, max_tokens: int = 1 << 12, data_size: int = 1, alignment: int = 4):
    return [
        pack(samples, data_size=data_size, data_rank=rank, max_tokens=max_tokens, alignment=alignment)[0]
        for rank in range(data_size)
    ]


def with_logprobs(batch: TrainBatch, *, old_noise: float = 0.3) -> TrainBatch:
    """Old and reference log-probabilities that depend on sequence and position alone, not on the packing."""
    return dataclasses.replace(
        batch, microbatches=tuple(_with_logprobs(mb, old_noise=old_noise) for mb in batch.microbatches)
    )


def noise(mb: Microbatch, label: str, scale: float) -> torch.Tensor:
    """Float64 [T]: normal noise, the same for a token wherever it is packed."""
    values = torch.zeros(len(mb.tokens_T), dtype=torch.float64)
    for t, (sequence, position) in enumerate(
        zip(mb.sequence_ids_T.tolist(), mb.completion_positions_T.tolist(), strict=True)
    ):
        if position >= 0:
            values[t] = random.Random(f"{label}/{mb.names[sequence]}/{position}").gauss(0, scale)
    return values


def _with_logprobs(mb: Microbatch, *, old_noise: float) -> Microbatch:
    rollout_T = mb.rollout_logprobs_T.double()
    return dataclasses.replace(
        mb,
        rollout_logprobs_T=rollout_T,
        advantages_T=mb.advantages_T.double(),
        old_logprobs_T=rollout_T + noise(mb, "old", old_noise),
        ref_logprobs_T=rollout_T + noise(mb, "ref", 0.3),
    )
