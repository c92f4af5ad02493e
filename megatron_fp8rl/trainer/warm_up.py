"""Compile the trainer's kernels while engines start: one forward and backward pass without an update.

In: a policy, and prompts, because token counts per expert depend on the text. Out: compiled Triton, DeepGEMM and cuDNN
kernels for full microbatches, and connections between ranks. Runs on: trainer ranks without an engine on their GPU.
"""

from collections.abc import Sequence

import numpy as np

from megatron_fp8rl.algo.losses import sft
from megatron_fp8rl.config import EngineConfig, PrecisionConfig, RunConfig, SamplingConfig
from megatron_fp8rl.data.packing import Alignment, pack_for
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Prompt, Sample, Segment, TrainBatch


def is_worthwhile(precision: PrecisionConfig, engine: EngineConfig, sampling: SamplingConfig, device_type: str) -> bool:
    """Whether engines start meanwhile on other GPUs. Delayed scaling would remember the tokens."""
    waits = engine.placement == "separate" and sampling.replay is None
    return device_type == "cuda" and waits and precision.trainer != "delayed"


def warm_up(policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Collective: gradients of one full microbatch of the prompts' tokens on each rank, which nothing reads."""
    cfg, parallel = policy.cfg, policy.parallel
    num_tokens = cfg.optim.max_tokens_per_microbatch
    num_tokens -= num_tokens % Alignment.of(cfg.parallel).microbatch
    length = min(cfg.max_sequence_tokens, num_tokens)
    rounds = cfg.parallel.pipeline if cfg.parallel.virtual_stages > 1 else 1
    text = np.array([token for prompt in prompts for token in prompt.token_ids], np.int32)
    batch = batch_of(cfg, text, cfg.parallel.data * rounds * (num_tokens // length), length, data_rank=parallel.dp_rank)
    policy.accumulate_gradients(batch, sft)
    policy.optimizer.rebuild_parameters()


def batch_of(cfg: RunConfig, text: np.ndarray, num_sequences: int, length: int, data_rank: int = 0) -> TrainBatch:
    """One packed batch for a data-parallel rank: sequences of the repeated text, with loss on all but first tokens."""
    samples = []
    for i in range(num_sequences):
        tokens = TokenArray(text.take(range(i * length, (i + 1) * length), mode="wrap"))
        segments = Segment(tokens[:1]), Segment(tokens[1:], is_trained=True)
        samples.append(Sample(name=f"text-{i}", environment="", segments=segments))
    (batch,) = pack_for(cfg, samples, data_rank=data_rank)
    return batch
