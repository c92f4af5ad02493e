"""Weights that many families have in common: standard decoder layers as Hugging Face and Megatron name them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names.table import Cut, Row

M, H = "decoder.layers.{layer}.", "model.layers.{layer}."

# Linears that the engine fuses from several matrices, by the engine's name; rows in this order.
ENGINE_FUSIONS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
FUSED_INTO = {matrix: fused for fused, matrices in ENGINE_FUSIONS.items() for matrix in matrices}
# Gate, up and down of an expert by the name of the enclosing module; the engine stacks gate and up.
EXPERT_PROJECTIONS = {"mlp": (*ENGINE_FUSIONS["gate_up_proj"], "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


def _copied(mcore: str, hf: str, size: str) -> Row:
    """A vector of every layer that is identical at both ends."""
    return Row(M + mcore, ((H + hf, (size,)),))


def edges(model: ModelConfig) -> tuple[Row, ...]:
    """Embedding, final norm and, unless it is tied to the embedding, the output head."""
    layers = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    embeddings = tuple(f"model.layers.{layer}.embed_tokens.weight" for layer in layers)
    heads = tuple(f"model.layers.{layer}.shared_head.head.weight" for layer in layers)
    in_head = ("vocab", "hidden")
    copies = embeddings + heads if model.tie_embeddings else embeddings
    rows = (
        Row(EMBEDDING, (("model.embed_tokens.weight", in_head),), "rows", padded=True, copies=copies),
        Row("decoder.final_layernorm.weight", (("model.norm.weight", ("hidden",)),)),
    )
    head = Row(OUTPUT_LAYER, (("lm_head.weight", in_head),), "rows", padded=True, copies=heads)
    return rows if model.tie_embeddings else (*rows, head)


NORMS = (
    _copied("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    _copied("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
)

OUTPUT_NORMS = (  # of what attention and feed-forward add to the residual stream; named as by Megatron Bridge
    _copied("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    _copied("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)
FOUR_NORMS = (
    NORMS[0],
    _copied("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", "hidden"),
    *OUTPUT_NORMS,
)


def attention(model: ModelConfig, norms_all_heads: bool = False, whole_norms: bool = False) -> tuple[Row, ...]:
    """Grouped-query attention, with the biases and norms of ``model``. ``norms_all_heads``: one norm spans all query
    heads, and one all key heads. ``whole_norms``: every engine rank has the whole weights of these norms."""

    def qkv(kind: str, *columns: str) -> Row:
        queries = "q_and_gate" if model.is_gated else "q"  # head by head: the query, and the gate of its output
        names = zip(ENGINE_FUSIONS["qkv_proj"], (queries, "kv", "kv"), strict=True)
        parts = tuple((f"{H}self_attn.{name}.{kind}", (rows, *columns)) for name, rows in names)
        return Row(f"{M}self_attention.linear_qkv.{kind}", parts, "rows", "qkv")

    rows = [qkv("weight", "hidden")]
    if model.qkv_bias:
        rows.append(qkv("bias"))
    if norms_all_heads:
        for norm, size, unit in (("q_norm.weight", "q", "heads"), ("k_norm.weight", "kv", "key heads")):
            part = ((f"{H}self_attn.{norm}", (size,)),)
            rows.append(Row(f"{M}self_attention.{norm}", part, "rows", unit=unit, whole_in_engine=whole_norms))
    elif model.qk_norm:
        rows += [_copied(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", "head") for x in "qk"]
    out = ((H + "self_attn.o_proj.weight", ("hidden", "q")),)
    return (*rows, Row(M + "self_attention.linear_proj.weight", out, "columns", unit="heads"))


def latent_attention(model: ModelConfig) -> tuple[Row, ...]:
    """Multi-head latent attention. Every rank has the whole projections into the latent space."""

    def up(mcore: str, hf: str, *shape: str) -> Row:
        return Row(f"{M}self_attention.{mcore}.weight", ((f"{H}self_attn.{hf}.weight", shape),), "rows", unit="heads")

    def down(mcore: str, hf: str, *shape: str) -> Row:
        return Row(f"{M}self_attention.{mcore}.weight", ((f"{H}self_attn.{hf}.weight", shape),))

    if model.mla is not None and model.mla.q_lora_rank is None:
        queries = (up("linear_q_proj", "q_proj", "q", "hidden"),)
    else:
        queries = (
            down("linear_q_down_proj", "q_a_proj", "q_latent", "hidden"),
            down("q_layernorm", "q_a_layernorm", "q_latent"),
            up("linear_q_up_proj", "q_b_proj", "q", "q_latent"),
        )
    out = ((H + "self_attn.o_proj.weight", ("hidden", "v")),)
    return (
        *queries,
        down("linear_kv_down_proj", "kv_a_proj_with_mqa", "kv_latent_and_rope", "hidden"),
        down("kv_layernorm", "kv_a_layernorm", "kv_latent"),
        up("linear_kv_up_proj", "kv_b_proj", "k_nope_and_v", "kv_latent"),
        Row(M + "self_attention.linear_proj.weight", out, "columns", unit="heads"),
    )


def gated_delta_net(model: ModelConfig) -> tuple[Row, ...]:
    """A gated delta net. Rows of its projections are sorted by key head: query, key, values and output gates; write
    strengths and decays. Every rank has the whole vectors and convolution, which are small."""

    return (
        _of_delta_net("in_proj_qkvz", "gdn_qkvz", "hidden", "rows"),
        _of_delta_net("in_proj_ba", "gdn_ba", "hidden", "rows"),
        *_delta_rule(),
    )


def gated_delta_net_in_parts(model: ModelConfig) -> tuple[Row, ...]:
    """A gated delta net whose projections are apart. Rows of ``in_proj_qkv`` are all queries, all keys and all values,
    of which a rank's heads are no one piece: every rank has them whole."""
    return (
        _of_delta_net("in_proj_qkv", "gdn_qkv", "hidden", "none"),
        _of_delta_net("in_proj_z", "gdn_v", "hidden", "rows"),
        _of_delta_net("in_proj_b", "gdn_heads", "hidden", "rows"),
        _of_delta_net("in_proj_a", "gdn_heads", "hidden", "rows"),
        *_delta_rule(),
    )


def _of_delta_net(name: str, rows: str, columns: str, cut: Cut) -> Row:
    hf = ((f"{H}linear_attn.{name}.weight", (rows, columns)),)
    return Row(f"{M}self_attention.{name}.weight", hf, cut, unit="gdn key heads")


def _delta_rule() -> tuple[Row, ...]:
    """What a gated delta net has behind its projections."""

    def whole(mcore: str, hf: str, *shape: str) -> Row:
        return Row(f"{M}self_attention.{mcore}", ((f"{H}linear_attn.{hf}", shape),))

    return (
        whole("conv1d.weight", "conv1d.weight", "gdn_qkv", "1", "gdn_width"),
        whole("A_log", "A_log", "gdn_heads"),
        whole("dt_bias", "dt_bias", "gdn_heads"),
        whole("out_norm.weight", "norm.weight", "gdn_head"),
        _of_delta_net("out_proj", "hidden", "gdn_v", "columns"),
    )


def feed_forward(
    mcore: str, hf: str, size: str, layers: Literal["dense", "moe"], parent: str = "mlp"
) -> tuple[Row, ...]:
    """A SwiGLU MLP of ``size`` under the prefixes ``mcore`` and ``hf``; ``parent`` is a key of
    :data:`EXPERT_PROJECTIONS`."""
    gate, up, down = (f"{H}{hf}.{name}.weight" for name in EXPERT_PROJECTIONS[parent])
    fc1 = ((gate, (size, "hidden")), (up, (size, "hidden")))
    fc2 = ((down, ("hidden", size)),)
    return (
        Row(f"{M}{mcore}.linear_fc1.weight", fc1, "rows", "gate_up", layers),
        Row(f"{M}{mcore}.linear_fc2.weight", fc2, "columns", "copy", layers),
    )


DENSE = feed_forward("mlp", "mlp", "ffn", "dense")


def experts(
    model: ModelConfig, prefix: str = "mlp", router_bias: str = "gate.e_score_correction_bias"
) -> tuple[Row, ...]:
    router = Row(M + "mlp.router.weight", ((f"{H}{prefix}.gate.weight", ("experts", "hidden")),), layers="moe")
    bias = Row(
        M + "mlp.router.expert_bias",  # a buffer, changed by the expert load and not by a gradient
        ((f"{H}{prefix}.{router_bias}", ("experts",)),),
        layers="moe",
        dtype="float32",
    )
    rows = (router, bias) if model.router.correction_bias else (router,)
    rows += feed_forward("mlp.experts.{expert}", prefix + ".experts.{expert}", "expert_ffn", "moe", prefix)
    if model.num_shared_experts:
        name = f"{prefix}.shared_expert" if model.is_gated else f"{prefix}.shared_experts"
        rows += feed_forward("mlp.shared_experts", name, "shared_ffn", "moe")
        if model.is_gated:
            gate = ((f"{H}{name}_gate.weight", ("1", "hidden")),)
            rows += (Row(M + "mlp.shared_experts.gate_weight", gate, layers="moe"),)
    return rows


Mixers = dict[str, Callable[..., tuple[Row, ...]]]
MIXERS: Mixers = {"attention": attention, "mla": latent_attention, "gdn": gated_delta_net}


def decoder(
    model: ModelConfig,
    parent: str = "mlp",
    router_bias: str = "gate.e_score_correction_bias",
    norms: tuple[Row, ...] = NORMS,
    mixers: Mixers = MIXERS,
    **mixer: bool,
) -> tuple[Row, ...]:
    """A standard decoder with the parts of its layers. ``parent`` is a key of :data:`EXPERT_PROJECTIONS`; ``mixers``
    has the rows of each mixer, and ``mixer`` options of attention."""
    present = [name for name in mixers if model.has(name)]
    mixing = [replace(row, layers=name) for name in present for row in mixers[name](model, **mixer)]
    moe = experts(model, parent, router_bias) if model.is_moe else ()
    return (*edges(model), *norms, *mixing, *DENSE, *moe)


MTP = (  # additional weights of a multi-token prediction layer; its embedding and head are the model's
    Row("enorm.weight", ((H + "enorm.weight", ("hidden",)),)),
    Row("hnorm.weight", ((H + "hnorm.weight", ("hidden",)),)),
    Row("eh_proj.weight", ((H + "eh_proj.weight", ("hidden", "2_hidden")),), "rows", whole_in_engine=True),
    Row("final_layernorm.weight", ((H + "shared_head.norm.weight", ("hidden",)),)),
)
