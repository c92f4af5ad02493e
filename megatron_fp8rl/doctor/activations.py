"""Bytes that the backward pass of one trainer rank needs, layer by layer.

The counting follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4, for what the layers here differ in: no dropout, grouped or latent attention without a
score matrix (FlashAttention keeps the output and one FP32 log-sum per head), SwiGLU, experts, and linears that keep
their input in FP8 (one byte, and the scales) where they multiply in FP8. All of it is BF16 otherwise; with FP32
parameters, FP32.

Symbols: t = tokens of a microbatch on one context-parallel rank; s = t / tensor parallel, the tokens of a rank between
the linears (sequence parallelism); r = s x experts per token x expert tensor parallel, the copies of tokens that a
rank's experts receive when routing is balanced; h = hidden size; f = feed-forward width on this rank. Pure; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp8rl.config import FP8_BLOCK, RunConfig
from megatron_fp8rl.fp8.layers import LayerTable

_FP32_BYTES = 4
_FP8_BYTES = {"blockwise": 1 + _FP32_BYTES / FP8_BLOCK, "mxfp8": 1 + 1 / 32, "tensorwise": 1.0, "delayed": 1.0}


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Activations of one layer for one microbatch."""

    kept: float  # from the forward to the backward pass
    recomputed: float  # made again, and held, while the backward pass is in this layer
    workspace: float  # gradients and their FP8 copies at the widest place of the backward pass

    @property
    def transient(self) -> float:
        return self.recomputed + self.workspace


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of one microbatch, by place."""

    context: float  # t
    sequence: float  # s
    routed: float  # r

    @classmethod
    def of(cls, cfg: RunConfig, routing_imbalance: float) -> Tokens:
        """``routing_imbalance``: token copies of the busiest rank over the mean of all."""
        parallel = cfg.parallel
        context = cfg.rollout.max_tokens_per_microbatch / parallel.context
        sequence = context / parallel.tensor
        routed = sequence * cfg.model.experts_per_token * parallel.expert_tensor * routing_imbalance
        return cls(context=context, sequence=sequence, routed=routed)


@dataclass(frozen=True, kw_only=True)
class _Widths:
    """Bytes per element, and what a linear keeps of its input when another operation keeps the same tensor, or not."""

    element: float
    fp8: float | None  # None: the layer's linears are BF16

    @property
    def own_input(self) -> float:
        return self.element if self.fp8 is None else self.fp8

    @property
    def shared_input(self) -> float:
        """A BF16 linear keeps the very tensor that its neighbour keeps; an FP8 linear keeps a copy."""
        return 0.0 if self.fp8 is None else self.fp8

    @property
    def gradient(self) -> float:
        """A gradient, and its row-wise and column-wise FP8 copies."""
        return self.element + (0.0 if self.fp8 is None else 2 * self.fp8)


def layer_bytes(cfg: RunConfig, layer: int, tokens: Tokens) -> LayerBytes:
    """Activations of one layer under the configured recompute."""
    model, optim = cfg.model, cfg.optim
    is_fp8 = LayerTable.build(model, cfg.precision).trainer_fp8(f"model.layers.{layer}.self_attn.o_proj.weight")
    width = _Widths(
        element=2.0 if cfg.precision.params == "bf16" else 4.0,
        fp8=_FP8_BYTES[cfg.precision.trainer] if is_fp8 else None,
    )
    norms = 2 * tokens.sequence * model.hidden_size * width.element  # inputs of the two norms: the residual stream
    attention, core = _attention(cfg, tokens, width)
    if model.is_moe_layer(layer):
        shared = _shared_experts(cfg, tokens, width)
        moe_input = tokens.sequence * model.hidden_size * width.element  # of the router and of all experts
        feed_forward = moe_input + _routed_experts(cfg, tokens, width) + shared
        workspace = _moe_workspace(cfg, tokens, width)
    else:
        shared = moe_input = 0.0
        feed_forward = _dense(model.ffn_hidden_size / cfg.parallel.tensor, cfg, tokens, width)
        workspace = _dense_workspace(cfg, tokens, width)

    everything = norms + attention + feed_forward
    if optim.recompute == "none":
        recomputed = 0.0
    elif optim.recompute == "full":
        recomputed = everything - tokens.sequence * model.hidden_size * width.element
    else:
        freed = {
            "core_attn": core,
            "mlp": 0.0 if model.is_moe_layer(layer) else feed_forward,
            "moe": feed_forward - moe_input if model.is_moe_layer(layer) else 0.0,
            "shared_experts": shared if "moe" not in optim.recompute_modules else 0.0,
        }
        recomputed = sum(freed[name] for name in set(optim.recompute_modules))
    return LayerBytes(kept=everything - recomputed, recomputed=recomputed, workspace=workspace)


def _attention(cfg: RunConfig, tokens: Tokens, width: _Widths) -> tuple[float, float]:
    """(all that attention keeps besides the norm's input, the part that core_attn recompute frees)."""
    model, tensor = cfg.model, cfg.parallel.tensor
    heads = model.num_attention_heads / tensor
    normed = tokens.sequence * model.hidden_size * width.own_input
    if model.mla is not None:
        mla = model.mla
        queries = heads * mla.qk_head_dim
        values = heads * mla.v_head_dim
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        # Inputs of the norms of the latents, on this rank's tokens; what the projections up from them keep; the
        # projected queries, keys and values, and the queries and keys that rotation makes of them.
        projected = queries + heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        kept = tokens.sequence * latents * width.element + tokens.context * latents * width.own_input
        kept += tokens.context * (projected + 2 * queries) * width.element
    else:
        queries = values = heads * model.head_dim
        keys = max(model.num_key_value_heads / tensor, 1) * model.head_dim
        # The projection's output, of which values are a view; rotated queries and keys; with norms of queries and
        # keys also the contiguous copies that these read.
        per_token = queries + 2 * keys + (queries + keys) * (2 if model.qk_norm else 1)
        kept = tokens.context * per_token * width.element
    output = tokens.context * values * width.element
    log_sums = tokens.context * heads * _FP32_BYTES
    projection_input = tokens.context * values * width.shared_input
    core = log_sums + (output if width.fp8 is not None else 0.0)  # a BF16 projection keeps the output itself
    return normed + kept + output + log_sums + projection_input, core


def _dense(columns: float, cfg: RunConfig, tokens: Tokens, width: _Widths) -> float:
    """Normed input; gate and up; their product, the input of down."""
    normed = tokens.sequence * cfg.model.hidden_size * width.own_input
    return normed + tokens.context * columns * (2 * width.element + width.own_input)


def _routed_experts(cfg: RunConfig, tokens: Tokens, width: _Widths) -> float:
    """Router scores and probabilities in FP32 and its map; then, for each copy of a token, the input of gate and up,
    their outputs, the input of down, and the output that the router's weight multiplies."""
    model = cfg.model
    columns = model.moe_ffn_hidden_size / cfg.parallel.expert_tensor
    router = tokens.sequence * model.num_experts * (2 * _FP32_BYTES + 1)
    per_copy = model.hidden_size * (width.own_input + width.element) + columns * (2 * width.element + width.own_input)
    return router + tokens.routed * per_copy


def _shared_experts(cfg: RunConfig, tokens: Tokens, width: _Widths) -> float:
    model = cfg.model
    if not model.num_shared_experts:
        return 0.0
    columns = model.num_shared_experts * model.moe_ffn_hidden_size / cfg.parallel.tensor
    own_copy = tokens.sequence * model.hidden_size * width.shared_input
    return own_copy + tokens.context * columns * (2 * width.element + width.own_input)


def _dense_workspace(cfg: RunConfig, tokens: Tokens, width: _Widths) -> float:
    """Gradient of gate and up with its FP8 copies, and the input and its gradient gathered over tensor parallelism."""
    columns = 2 * cfg.model.ffn_hidden_size / cfg.parallel.tensor
    return tokens.context * (columns * width.gradient + 2 * cfg.model.hidden_size * width.element)


def _moe_workspace(cfg: RunConfig, tokens: Tokens, width: _Widths) -> float:
    """The same per copy of a token, where sending and receiving them takes a buffer each."""
    columns = 2 * cfg.model.moe_ffn_hidden_size / cfg.parallel.expert_tensor
    return tokens.routed * (columns * width.gradient + 2 * cfg.model.hidden_size * width.element)
