"""Models whose matrices tile over eight ranks, and a trainer's log-probabilities of given tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import KVScales, Sample, Segment
from tests.helpers.family_configs import GLM
from tests.helpers.models import small_model
from tests.helpers.training import make_batch, token_values

MOE = small_model((2, 128, 8, 4, 128, 128), experts=(8, 2, 128), max_position_embeddings=256)
DENSE = small_model((2, 128, 8, 4, 128, 128), ffn=1024, max_position_embeddings=256)
WINDOW = replace(DENSE, family="mistral", qk_norm=False, sliding_window=8)

# Shared experts, a router in FP32 with a bias and a factor, a dense layer first.
GLM_MOE = replace(
    GLM,
    hidden_size=128,
    head_dim=128,
    num_experts=8,
    moe_ffn_hidden_size=256,
    max_position_embeddings=256,
    vocab_size=128,
)


def random_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Tensors of a checkpoint; matrices keep the scale of their input, so that every rounding shows."""
    generator = torch.Generator().manual_seed(1)
    dtypes = {part: weight.dtype for weight in registry.weights(model).values() for part, _ in weight.parts}
    tensors = {}
    for name, shape in registry.hf_tensors(model).items():
        tensor = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)
        tensors[name] = (tensor + (1.0 if "norm" in name else 0.0)).to(getattr(torch, dtypes[name]))
    return tensors


def tokens_logprobs(
    cfg: RunConfig,
    weights: Mapping[str, Tensor],
    sequences: Sequence[Sequence[int]],
    cache_scales: KVScales | None = None,
) -> list[Tensor]:
    """On a rank: log-probabilities of all but the first token of each sequence, in one batch."""
    from megatron_fp8rl.trainer import kv_scales
    from megatron_fp8rl.trainer.model.build import load_hf
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    load_hf(policy.models, weights.__getitem__, cfg.model, parallel)
    if cache_scales is not None:
        kv_scales.set_scales(policy.chunks, cache_scales, parallel.device)
    samples = []
    for index, tokens in enumerate(sequences):
        ids = TokenArray(torch.tensor(tokens).int().numpy())
        scored = Segment(ids[1:], TokenArray.from_floats([0.0] * (len(ids) - 1)), 1.0, True)
        samples.append(Sample(name=str(index), environment="test", segments=(Segment(ids[:1]), scored)))
    batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank, samples))
    values = token_values(batch, [mb.old_logprobs_T for mb in batch.microbatches])
    parallel.close()
    return [values[str(index)] for index in range(len(sequences))]
