"""Memory of one engine worker, by part, and the capacity of its KV cache.

In: a RunConfig and a GPU. Out: an :class:`EngineEstimate`. Pure; vLLM is not imported.

    weights        the sum over the plan of a publication: FP8 bytes, FP32 scales, BF16 for the rest
    activations    of the profile run with max_num_batched_tokens tokens: the widest point of one layer, and the
                   sampler's FP32 logits, probabilities and log-probabilities of max_num_sequences rows; experts of
                   data-parallel ranks see the tokens of all of them, before and after
    KV cache       the rest of gpu_memory_utilization unless engine.kv_cache_bytes is set; bytes per token are those
                   of ``rollout/vllm_args.py``
    CUDA graphs    an allowance: they share one pool of the size of the largest captured batch
"""

from dataclasses import dataclass

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.preflight.memory import GIB, Estimate, Part
from megatron_fp8rl.preflight.weights import on_engine_worker
from megatron_fp8rl.rollout.vllm_args import kv_token_bytes, max_batched_tokens

_CONTEXT_BYTES = int(0.8 * GIB)  # CUDA context and cuBLAS
_TENSOR_PARALLEL_BYTES = int(0.5 * GIB)  # NCCL and vLLM's all-reduce buffers
_GRAPH_BYTES = int(1.0 * GIB)
_MIN_FULL_SEQUENCES = 8  # in the KV cache


@dataclass(frozen=True, kw_only=True)
class EngineEstimate:
    """One worker of a replica."""

    estimate: Estimate
    kv_bytes: int  # of the cache; negative if nothing is left for it
    kv_token_bytes: int
    max_sequence_tokens: int
    num_sequences: int  # decoded at once, at most

    @property
    def kv_tokens(self) -> int:
        return max(self.kv_bytes, 0) // max(self.kv_token_bytes, 1)  # 0 bytes: no layer of attention

    @property
    def full_sequences(self) -> float:
        return self.kv_tokens / self.max_sequence_tokens

    @property
    def is_idle(self) -> bool:
        """Whether the cache holds so few full-length sequences that most of the engine idles."""
        return self.full_sequences < min(_MIN_FULL_SEQUENCES, self.num_sequences)


def worker(cfg: RunConfig, capacity_bytes: int) -> EngineEstimate:
    engine, weight_sync = cfg.engine, cfg.weight_sync
    weights = on_engine_worker(cfg)
    context = _CONTEXT_BYTES + (_TENSOR_PARALLEL_BYTES if engine.ranks > 1 else 0)
    activations = _activation_bytes(cfg)
    graphs = 0 if engine.graphs == "none" else _GRAPH_BYTES
    per_token = kv_token_bytes(cfg.model, cfg.engine, expanded=False)
    copies = 2 * weights.fp8 if cfg.precision.kernel("engine_linears") == "emulated" else 0
    used = weights.total + copies + activations + graphs + context
    left = int(engine.gpu_memory_utilization * capacity_bytes) - used
    kv_bytes, source = left, f"what is left of {engine.gpu_memory_utilization:.0%} of the GPU"
    if engine.kv_cache_bytes is not None:
        kv_bytes, source = engine.kv_cache_bytes, "engine.kv_cache_bytes"
    scales = "E8M0, one per 32 values" if cfg.precision.rollout == "mxfp8" else "FP32, one per 128x128 block"
    parts = [
        Part("weights, FP8", weights.fp8, f"{weights.fp8 / 1e9:.2f} G x 1 B"),
        Part("weights, scales", weights.scales, scales),
        Part("weights, BF16", weights.bf16, f"{weights.bf16 / 2e9:.2f} G x 2 B"),
        *([Part("latent projections", weights.absorbed, "BF16 copies of kv_b_proj")] if weights.absorbed else []),
        *([Part("emulated linears", copies, "BF16 copies of FP8 weights")] if copies else []),
        Part("activations", activations, f"{max_batched_tokens(cfg)} tokens at a time, and the sampler"),
        Part("CUDA graphs", graphs, "allowance" if graphs else "engine.graphs is none"),
        Part("communication, CUDA", context, "allowance"),
        Part("KV cache", max(kv_bytes, 0), f"{source}; {per_token} B a token"),
        Part(
            "weight update",
            weight_sync.bucket_bytes + weights.total // cfg.model.num_layers,
            "weight_sync.bucket_bytes and one layer; outside gpu_memory_utilization",
        ),
    ]
    if weight_sync.spare_weights == "device":
        formula = "weight_sync.spare_weights: all weights again; outside gpu_memory_utilization"
        parts.append(Part("spare weights", weights.sent, formula))
    title = f"engine, every one of {engine.ranks} workers" if engine.ranks > 1 else "engine, its one worker"
    return EngineEstimate(
        estimate=Estimate(title=title, parts=tuple(parts), capacity_bytes=capacity_bytes),
        kv_bytes=kv_bytes,
        kv_token_bytes=per_token,
        max_sequence_tokens=cfg.max_sequence_tokens,
        num_sequences=engine.max_num_sequences,
    )


def _activation_bytes(cfg: RunConfig) -> int:
    """The widest point of one layer in BF16, and the sampler.

    The residual, its normed sum, the layer's output, and the attention projections or gate, up, their product and its
    FP8 copy. Experts hold, per token copy, gate and up or their output (vLLM's ``cache13``), the product, and its FP8
    copy.
    """
    model, tensor, tokens = cfg.model, cfg.engine.tensor, max_batched_tokens(cfg)
    stream = 3 * model.hidden_size * 2
    attention = 2 * 2 * (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim / tensor
    has_dense = model.has("dense")
    dense = model.ffn_hidden_size / tensor * (2 * 2 + 2 + 1) if has_dense else 0.0
    experts = 0.0
    if model.is_moe:
        columns, data = model.moe_ffn_hidden_size / tensor, cfg.engine.data
        per_copy = 2 * max(2 * columns, model.hidden_size) + columns * (2 + 1)
        experts = model.experts_per_token * per_copy + model.num_shared_experts * columns * 7
        if data > 1:  # of all tokens, the copies that choose this rank's experts are a data-th
            experts += 2 * data * 2 * model.hidden_size
    copies = 3 + (cfg.engine.draft_tokens if cfg.engine.speculation != "none" else 0)
    sampler = cfg.engine.max_num_sequences * model.vocab_size * 4 * copies
    return int(tokens * (stream + max(attention, dense, experts)) + sampler)
