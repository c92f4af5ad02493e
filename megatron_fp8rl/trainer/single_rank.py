"""Compute the logits of a model on a single rank, without torchrun or training."""

from pathlib import Path

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_fp8rl.config import ModelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.trainer.model.build import build_chunks, load_hf
from megatron_fp8rl.trainer.parallel import Parallel


@torch.no_grad()
def float32_logits(model: ModelConfig, folder: str | Path, token_ids_T: Tensor) -> Tensor:
    """FP32 logits [T, vocab] of one sequence (int64 [T]), with parameters, activations and GEMMs in FP32."""
    precision = PrecisionConfig(trainer="bf16", rollout="bf16", params="fp32")
    cfg = RunConfig(name="logits", model=model, precision=precision)
    parallel = Parallel.init(cfg.parallel)
    try:
        (chunk,) = build_chunks(cfg, parallel)
        load_hf([chunk], folder, cfg.model, parallel)
        chunk.eval()
        num_tokens = token_ids_T.numel()
        ends = torch.tensor([0, num_tokens], dtype=torch.int32, device=parallel.device)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=num_tokens, max_seqlen_kv=num_tokens
        )
        positions = torch.arange(num_tokens, device=parallel.device)
        logits = chunk(token_ids_T.to(parallel.device)[None], positions[None], None, packed_seq_params=packed)
        return logits[0, :, : model.vocab_size].float().cpu()
    finally:
        parallel.close()
