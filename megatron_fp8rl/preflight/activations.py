"""Activation memory of one trainer rank, layer by layer.

The counting follows Korthikanti et al., arXiv:2205.05198, section 4, adapted to these layers: no dropout, attention
without a score matrix (the fused kernel keeps the output and one FP32 log-sum-exp per head), SwiGLU, experts, and FP8
linears, which keep their input in FP8, columnwise only (one byte per element, and the scales). Everything else is BF16,
or FP32 with FP32 parameters. The count holds for the GPU kernels (``precision.kernels.trainer`` auto or te); the
emulation keeps wider copies. Tests compare the count with autograd's saved tensors.

Symbols: t = tokens of a microbatch on one context-parallel rank; s = t / tensor-parallel size, the tokens of a rank
outside the linears (sequence parallelism); r = s x experts per token x expert-tensor-parallel size, the token copies
that a rank's experts receive under balanced routing; h = hidden size; f = MLP width on this rank. Pure; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_fp8rl.config import LayerKind, RunConfig
from megatron_fp8rl.kernels.types import BLOCK, DELTA_CHUNK
from megatron_fp8rl.names.registry import norms_inputs, norms_outputs
from megatron_fp8rl.precision.kernel_choice import TrainerKernels
from megatron_fp8rl.precision.layer_table import LayerTable

_FP32_BYTES, _INT64_BYTES = 4, 8


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Activations of one layer for one microbatch."""

    kept: float  # from the forward to the backward pass
    recomputed: float  # recomputed, and kept while the backward pass is in this layer
    workspace: float  # gradients at the widest point of the backward pass


@dataclass(frozen=True, kw_only=True)
class Tokens:
    context: float  # t
    sequence: float  # s
    routed: float  # r

    @classmethod
    def of(cls, cfg: RunConfig, routing_imbalance: float) -> Tokens:
        """``routing_imbalance``: token copies of the busiest rank over the mean of all ranks."""
        parallel = cfg.parallel
        context = cfg.optim.max_tokens_per_microbatch / parallel.context
        sequence = context / parallel.tensor
        routed = sequence * cfg.model.experts_per_token * parallel.expert_tensor * routing_imbalance
        return cls(context=context, sequence=sequence, routed=routed)


@dataclass(frozen=True, kw_only=True)
class _Widths:
    """Bytes per element, and bytes a linear keeps per input element, if its input is separate or shared."""

    element: float
    fp8: float | None  # None: the layer's linears are BF16

    @property
    def separate_input(self) -> float:
        return self.element if self.fp8 is None else self.fp8

    @property
    def shared_input(self) -> float:
        """A BF16 linear shares the tensor that another operation keeps; an FP8 linear keeps a quantized copy."""
        return 0.0 if self.fp8 is None else self.fp8


def layer_bytes(cfg: RunConfig, layer: int, tokens: Tokens, kernels: TrainerKernels) -> LayerBytes:
    """Activations of one layer under the configured recomputation."""
    model, optim = cfg.model, cfg.optim
    table = LayerTable.build(model, cfg.precision)
    recipe = table.trainer_format(f"model.layers.{layer}.self_attn.o_proj.weight")
    width = _Widths(
        element=4.0 if cfg.precision.params == "fp32" else 2.0,
        fp8=recipe.activation_bytes_per_value if recipe.is_quantized else None,
    )
    num_norms = 2 * (norms_inputs(model) + norms_outputs(model))
    norms = num_norms * tokens.sequence * model.hidden_size * width.element  # their inputs
    if norms_outputs(model):  # no kernel fuses this feed-forward
        kernels = replace(kernels, linears=kernels.kernels)
    kind = model.layers[layer]
    attention, core, core_inputs = _attention(cfg, kind, tokens, width)
    hidden = tokens.sequence * model.hidden_size * width.element  # input of a layer, of a router, of a checkpoint
    if kind.is_moe:
        shared = _shared_experts(cfg, tokens, width)
        feed_forward = hidden + _routed_experts(cfg, tokens, width, kernels) + shared
        workspace = _moe_workspace(cfg, tokens, width, kernels)
    else:
        shared = 0.0
        feed_forward = _dense(model.ffn_hidden_size / cfg.parallel.tensor, cfg, tokens, width, kernels)
        workspace = _dense_workspace(cfg, tokens, width, kernels)

    always = 0.0  # recomputed under every setting
    if kind.mixer == "gdn":
        _, always, gradients = _delta_net(cfg, tokens, width)
        workspace = max(workspace, gradients)
    everything = norms + attention + feed_forward
    if optim.recompute == "none":
        return LayerBytes(kept=everything, recomputed=always, workspace=workspace)
    if optim.recompute == "full":
        return LayerBytes(kept=hidden, recomputed=everything - hidden + always, workspace=workspace)
    # (bytes kept inside a module, which are recomputed; bytes of its inputs that only its checkpoint keeps)
    modules = {
        "core_attn": (core, core_inputs),
        "mlp": (0.0, 0.0) if kind.is_moe else (feed_forward, hidden),
        "moe": (feed_forward - hidden, 0.0) if kind.is_moe else (0.0, 0.0),
        "shared_experts": (shared, 0.0) if "moe" not in optim.recompute_modules else (0.0, 0.0),
    }
    chosen = [modules[name] for name in set(optim.recompute_modules)]
    inside = sum(freed for freed, _ in chosen)
    inputs = sum(kept for _, kept in chosen)
    return LayerBytes(kept=everything - inside + inputs, recomputed=max(inside, always), workspace=workspace)


def _attention(cfg: RunConfig, kind: LayerKind, tokens: Tokens, width: _Widths) -> tuple[float, float, float]:
    """(bytes that attention keeps after the norm, the part inside core attention, the inputs of its checkpoint).

    Core attention keeps rotated queries and keys and a contiguous copy of the values. Its checkpoint keeps queries,
    keys and, for grouped-query attention, the whole output of the projection, of which the values are a view.
    """
    model, tensor = cfg.model, cfg.parallel.tensor
    if kind.mixer == "gdn":
        return _delta_net(cfg, tokens, width)[0], 0.0, 0.0
    heads = model.num_attention_heads / tensor
    normed = tokens.sequence * model.hidden_size * width.separate_input
    mla = model.mla if kind.mixer == "mla" else None
    if mla is not None:
        queries = keys = heads * mla.qk_head_dim
        values = heads * mla.v_head_dim
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        # Two projections read the hidden states; then the inputs of the latent norms and of the up-projections.
        normed += tokens.sequence * model.hidden_size * width.shared_input
        before = tokens.sequence * latents * width.element + tokens.context * latents * width.separate_input
        inputs = queries + keys + heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    else:
        queries = heads * model.head_dim
        keys = values = max(model.num_key_value_heads / tensor, 1) * model.head_dim
        before = tokens.context * (queries + keys) * width.element if model.qk_norm else 0.0  # inputs of their norms
        inputs = queries + (keys if model.qk_norm else 0.0) + (queries + 2 * keys)
    outputs = heads * (model.head_dim if mla is None else mla.v_head_dim)
    rotated = tokens.context * (queries + keys + values) * width.element
    output = tokens.context * outputs * width.element
    log_sums = tokens.context * heads * _FP32_BYTES
    projection_input = tokens.context * outputs * width.shared_input
    core = rotated + log_sums + (output if width.fp8 is not None else 0.0)  # a BF16 projection keeps the output itself
    kept = normed + before + rotated + output + log_sums + projection_input
    return kept, core, tokens.context * inputs * width.element


def _delta_net(cfg: RunConfig, tokens: Tokens, width: _Widths) -> tuple[float, float, float]:
    """On GPUs: (bytes that a gated delta net keeps after the norm, bytes it recomputes always, of gradients in it).

    Kept per token: the normed input, for BF16 and FP8 projections; what the projections return, as inputs of a
    checkpoint; and the input of ``out_proj``. Recomputed, in FP32: convolution, queries, keys and values, rows of
    matrices of a chunk, and a state per chunk. Its factors were fitted to what autograd keeps, so they are approximate.
    Gradients are those of the operands of the loop over chunks.
    """
    gdn, tensor = cfg.model.gdn, cfg.parallel.tensor
    assert gdn is not None
    groups, heads = gdn.num_key_heads / tensor, gdn.num_value_heads / tensor
    keys, repeated, values = groups * gdn.key_head_dim, heads * gdn.key_head_dim, heads * gdn.value_head_dim
    kept = tokens.sequence * cfg.model.hidden_size * (width.element + width.shared_input)
    kept += tokens.context * (2 * (keys + values + heads) * width.element + values * width.separate_input)
    inside = 12 * keys + 3 * repeated + 10.5 * values + 5 * DELTA_CHUNK * (groups + heads)
    inside += 1.5 * values * gdn.key_head_dim / DELTA_CHUNK
    gradients = 2 * values + 3 * repeated + heads * DELTA_CHUNK
    return kept, tokens.context * _FP32_BYTES * inside, tokens.context * _FP32_BYTES * gradients


def _dense(columns: float, cfg: RunConfig, tokens: Tokens, width: _Widths, kernels: TrainerKernels) -> float:
    """The normed input, and what :func:`_swiglu` keeps; with DeepGEMM, which fuses SwiGLU, gate and up only."""
    normed = tokens.sequence * cfg.model.hidden_size * width.separate_input
    kept = 2 * columns * width.element if _on_deep_gemm(kernels, width) else _swiglu(columns, width)
    return normed + tokens.context * kept


def _on_deep_gemm(kernels: TrainerKernels, width: _Widths) -> bool:
    return width.fp8 is not None and kernels.linears == "deep_gemm"


def _swiglu(columns: float, width: _Widths) -> float:
    """Per token, in Megatron-Core's MLP: gate and up, silu(gate), up plus its offset of 0, the input of down."""
    return columns * (4 * width.element + width.separate_input)


def _routed_experts(cfg: RunConfig, tokens: Tokens, width: _Widths, kernels: TrainerKernels) -> float:
    """Router scores and probabilities in FP32 and the sort order of the routing map in int64. Then, per token copy: its
    expert, its position and two weights; the input of gate and up, their outputs, silu(gate), the input of down, and
    the output that the router weight multiplies. With DeepGEMM only the input of gate and up and their outputs."""
    model = cfg.model
    columns = model.moe_ffn_hidden_size / cfg.parallel.expert_tensor
    router = tokens.sequence * model.num_experts * (2 * _FP32_BYTES + _INT64_BYTES)
    per_copy = 2 * (_INT64_BYTES + _FP32_BYTES)
    if kernels.experts == "deep_gemm":
        per_copy += model.hidden_size * width.separate_input + 2 * columns * width.element
        return router + _padded(cfg, tokens, width) * per_copy
    per_copy += model.hidden_size * (width.separate_input + width.element) + columns * (
        3 * width.element + width.separate_input
    )
    return router + tokens.routed * per_copy


def _padded(cfg: RunConfig, tokens: Tokens, width: _Widths) -> float:
    """Token copies, with each expert's padded to blocks (``fused_moe.max_rows``, without torch): half a block on
    average. Almost a whole block if a rank with all experts leaves their numbers of tokens on the GPU."""
    is_bound = width.fp8 is not None and cfg.parallel.expert == 1
    experts = cfg.model.num_experts / cfg.parallel.expert
    return tokens.routed + min(tokens.routed, experts) * (BLOCK - 1 if is_bound else BLOCK / 2)


def _shared_experts(cfg: RunConfig, tokens: Tokens, width: _Widths) -> float:
    model = cfg.model
    if not model.num_shared_experts:
        return 0.0
    columns = model.num_shared_experts * model.moe_ffn_hidden_size / cfg.parallel.tensor
    copy = tokens.sequence * model.hidden_size * width.shared_input
    return copy + tokens.context * _swiglu(columns, width)


def _dense_workspace(cfg: RunConfig, tokens: Tokens, width: _Widths, kernels: TrainerKernels) -> float:
    """At gate x up: the gradients of the product and of both factors, of the residual stream, and of the gathered
    stream under tensor parallelism. With DeepGEMM: the gradient of the product, those of both factors in FP8, rowwise
    and columnwise, and the product recomputed columnwise; one of the two stream gradients is columnwise."""
    columns, hidden = cfg.model.ffn_hidden_size / cfg.parallel.tensor, cfg.model.hidden_size
    if _on_deep_gemm(kernels, width):
        streams = hidden * (width.element + width.fp8)
        return tokens.context * (columns * (width.element + 5 * width.fp8) + streams)
    return tokens.context * (3 * columns + 2 * hidden) * width.element


def _moe_workspace(cfg: RunConfig, tokens: Tokens, width: _Widths, kernels: TrainerKernels) -> float:
    """At the product of router weight and expert output: the gradients of the product and of both factors, all FP32
    and as wide as the hidden size until that of the weight is summed, and those of the residual stream. With DeepGEMM,
    at gate x up: the gradient of the output, again as an operand of wgrad, that of the product, those of both factors
    in FP8, rowwise and columnwise (in BF16 they overwrite the factors), and the product as an operand of wgrad."""
    hidden = cfg.model.hidden_size
    stream = 2 * tokens.sequence * hidden * width.element
    if kernels.experts == "deep_gemm":
        columns = cfg.model.moe_ffn_hidden_size / cfg.parallel.expert_tensor
        factors = 0.0 if width.fp8 is None else 4 * width.fp8
        per_copy = hidden * (width.element + width.separate_input) + columns * (
            width.element + factors + width.separate_input
        )
        return _padded(cfg, tokens, width) * per_copy + stream
    return tokens.routed * 3 * hidden * _FP32_BYTES + stream
