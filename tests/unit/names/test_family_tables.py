"""Every family against random models that transformers builds and saves: names, config.json and slices, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_fp8rl.config import ModelConfig, PrecisionConfig
from megatron_fp8rl.data.fused_tensors import fusion_of
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.plan import plan
from tests.helpers.hf_parts import hf_names_of, to_hf
from tests.helpers.unshard import unshard

# Odd on purpose: one key/value head, heads unrelated to the hidden size, three layers, six experts, odd vocabulary.
COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707}
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0}
FACTOR_YARN = QWEN_YARN | {"attention_factor": 1.1, "truncate": False, "beta_fast": 16.0}
FACTOR_YARN |= {"attn_factor": 1.1, "apply_yarn_scaling": False}  # the same for vLLM
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
GPT_OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.4}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5e5, "partial_rotary_factor": 0.4,
    "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 8.0, 20.0],
}  # fmt: skip
MSCALE = {"short_mscale": 1.3, "long_mscale": 1.3}  # the same for vLLM
PHI3 = {"hidden_size": 80, "original_max_position_embeddings": 16, "pad_token_id": None}
SCALED = {"original_max_position_embeddings": 16, "rope_theta": 5e5}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK_MOE = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
MLA = {"q_lora_rank": 28, "kv_lora_rank": 36, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
DEEPSEEK = {"num_key_value_heads": 4, "head_dim": 8, "n_group": 3, "topk_group": 1, **DEEPSEEK_MOE, **MLA}
DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
CASES = {
    "llama": ("llama", {"rope_parameters": LLAMA3 | SCALED}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {"rope_parameters": QWEN_YARN | SCALED}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"rope_parameters": FACTOR_YARN | SCALED}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3_moe_unnormalized": ("qwen3_moe", QWEN_MOE | {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "mixtral_window": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 40}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | {"rope_parameters": YARN | SCALED}),
    "deepseek_v3_direct": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "glm4_moe": ("glm4_moe", DEEPSEEK_MOE | {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", DEEPSEEK_MOE | MLA | {"num_key_value_heads": 4, "head_dim": 8}),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4, "rope_parameters": PARTIAL},
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "olmo3": ("olmo3", {"num_key_value_heads": 4, "sliding_window": 8}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 12}),
    "qwen3_next": ("qwen3_next", QWEN_MOE | DELTA_NETS | {"shared_expert_intermediate_size": 48}),
    "qwen3_5": ("qwen3_5_text", DELTA_NETS | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN_MOE | DELTA_NETS | {"shared_expert_intermediate_size": 48}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": GPT_OSS_YARN}),
    "phi3": ("phi3", PHI3 | {"rope_parameters": PARTIAL, "original_max_position_embeddings": 64}),
    "phi3_longrope": ("phi3", PHI3 | {"rope_parameters": LONGROPE, "tie_word_embeddings": True, "sliding_window": 9}),
    "phi3_factor": ("phi3", PHI3 | {"rope_parameters": LONGROPE | {"attention_factor": 1.3} | MSCALE}),
    "glm4_moe_plain": ("glm4_moe", DEEPSEEK_MOE | {"first_k_dense_replace": 2, "tie_word_embeddings": True}),
}


class Saved:
    """A random model that transformers wrote in several files."""

    def __init__(self, case: str, folder: Path):
        family, options = CASES[case]
        torch.manual_seed(0)
        self.folder = folder
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | options))
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                if tensor.is_floating_point():
                    tensor.normal_()  # biases and norms too, so that none can be taken for another
        self.model.save_pretrained(folder, max_shard_size="40KB")
        self.config = json.loads((folder / "config.json").read_text())
        stored = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        self.tensors = fusion_of(family).split(stored)
        fused = fusion_of(family).fuse(self.tensors)
        assert fused.keys() == stored.keys() and all(torch.equal(t, stored[n]) for n, t in fused.items())
        assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made: dict[str, Saved] = {}

    def get(case: str) -> Saved:
        if case not in made:
            made[case] = Saved(case, tmp_path_factory.mktemp(case))
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_round_trip(case, saved, tmp_path):
    """Through Megatron's tensors and back: the same files, which transformers loads as the same state dict."""
    source = saved(case)
    model = registry.from_hf_config(source.config)
    assert registry.hf_tensors(model) == {name: tuple(t.shape) for name, t in source.tensors.items()}
    back: dict[str, torch.Tensor] = {}
    for name in registry.weights(model):
        full = registry.from_hf(name, source.tensors.__getitem__, model)
        assert tuple(full.shape) == registry.weight(name, model).shape
        back |= dict(to_hf(name, full, model))
    assert back.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        assert torch.equal(back[name], tensor), name

    back = fusion_of(model.family).fuse(back)
    save_file({n: t.contiguous() for n, t in back.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(registry.to_hf_config(model) | {"dtype": "float32"}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    state, expected = loaded.state_dict(), source.model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_config_round_trip(case, saved):
    """transformers reads the same architecture from our config.json as from its own."""
    config = saved(case).config
    model = registry.from_hf_config(config)
    written = registry.to_hf_config(model)
    assert registry.from_hf_config(written) == model
    ours = AutoConfig.for_model(**written).to_dict()
    theirs = AutoConfig.for_model(**config).to_dict()
    # What belongs to the tokenizer, to the files or to transformers, and a second way to say the same.
    ignored = {"architectures", "dtype", "transformers_version", "rope_theta", "rope_scaling", "partial_rotary_factor"}
    ignored |= {"bos_token_id", "eos_token_id", "scoring_func", "topk_method", "moe_layer_freq"}
    ignored |= {"num_nextn_predict_layers", "num_mtp_layers", "max_window_layers", "first_k_dense_replace"}
    ignored |= {"use_qk_norm", "qk_norm_type", "use_routing_bias", "rotary_dim", "attn_type_list", "attention_bias"}
    ignored |= {"rope_local_base_freq", "hidden_act", "_sliding_window_pattern"}
    ignored |= {"experts_per_token", "initial_context_length", "swiglu_limit"}
    ignored |= {"attn_output_gate", "mamba_ssm_dtype"}  # which vLLM reads
    if model.family == "qwen3_5_moe_text":
        ignored |= {"intermediate_size"}  # a key of no layer
    assert {k: v for k, v in ours.items() if k not in ignored} == {k: v for k, v in theirs.items() if k not in ignored}


@pytest.mark.parametrize("case", CASES)
def test_absent_keys_mean_what_they_mean_to_transformers(case):
    family, options = CASES[case]
    config = AutoConfig.for_model(family, **COMMON | options).to_dict()
    for key in ("num_key_value_heads", "head_dim", "sliding_window", "tie_word_embeddings", "norm_topk_prob"):
        if (
            family in ("deepseek_v3", "glm4_moe_lite") and key == "num_key_value_heads"
        ):  # transformers' 128 would not be latent attention
            continue
        rest = {k: v for k, v in config.items() if k != key}
        if key == "num_key_value_heads":  # what transformers assumes, 8 or 32, has to divide the heads
            rest |= {"num_attention_heads": 32, "hidden_size": 640}
        assert registry.from_hf_config(rest) == registry.from_hf_config(AutoConfig.for_model(**rest).to_dict()), key


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_slices_round_trip(case, tp_size, saved):
    """One key/value head over two and four ranks, an odd vocabulary: pieces make up the whole under either name."""
    source = saved(case)
    model = registry.from_hf_config(source.config)
    for name in registry.weights(model):
        weight = registry.weight(name, model)
        full = registry.from_hf(name, source.tensors.__getitem__, model)
        shards = [registry.shard(name, full, model, tp_size, rank) for rank in range(tp_size)]
        assert torch.equal(unshard(name, shards, model), full), name
        assert len({s.shape for s in shards}) == 1 and all(s.is_contiguous() for s in shards), name
        if weight.cut == "none":
            continue
        pieces = [dict(to_hf(name, shard, model, tp_size, rank)) for rank, shard in enumerate(shards)]
        for hf_name in hf_names_of(name, model):
            assert torch.equal(torch.cat([p[hf_name] for p in pieces], weight.axis), source.tensors[hf_name]), hf_name
    table = registry.shard("embedding.word_embeddings.weight", torch.ones(131, 48), model, 4, 3)
    assert table.shape == (33, 48) and table.sum() == 32 * 48  # the last of 132 rows is padding
    assert registry.padded_vocab_size(model, 4) == 132


LAYOUTS = [
    TrainerLayout(world_size=2, tensor=2),
    TrainerLayout(world_size=2, pipeline=2),
    TrainerLayout(world_size=2, expert=2),
    TrainerLayout(world_size=2, tensor=2, expert=2),
    TrainerLayout(world_size=4, tensor=4, expert=2, expert_tensor=2),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"tp{x.tensor}_pp{x.pipeline}_ep{x.expert}")
def test_plans_cover_every_tensor_once(case, layout, saved):
    """The sources of every transfer hold what they send, in pieces that make up the tensor."""
    source = saved(case)
    model = registry.from_hf_config(source.config)
    if not model.is_moe and layout.expert > 1:
        return
    table = LayerTable.build(model, PrecisionConfig(trainer="bf16", rollout="bf16"))
    made = plan(model, table, layout, EngineLayout(tensor=2))
    assert [t.name for t in made.transfers] == list(registry.hf_tensors(model))
    for transfer in made.transfers:
        weight = registry.weight(transfer.mcore_name, model)
        ranks = layout.shards(weight, model)
        full = registry.from_hf(transfer.mcore_name, source.tensors.__getitem__, model)
        parts = []
        for piece in transfer.sources:
            index = ranks.index(piece.rank)
            shard = registry.shard(transfer.mcore_name, full, model, len(ranks), index)
            part = dict(to_hf(transfer.mcore_name, shard, model, len(ranks), index))[transfer.name]
            assert part.shape[transfer.axis] == piece.stop - piece.start
            parts.append(part)
        assert torch.equal(torch.cat(parts, transfer.axis), source.tensors[transfer.name]), transfer.name
        kept = {i for low, high in filter(None, transfer.slices) for i in range(low, high)}
        assert kept == set(range(transfer.shape[transfer.axis])), transfer.name
        assert (transfer.dtype == "float32") == transfer.name.endswith("e_score_correction_bias")


def model_of(case: str) -> ModelConfig:
    family, options = CASES[case]
    return registry.from_hf_config(AutoConfig.for_model(family, **COMMON | options).to_dict())


def test_engine_slices_of_fused_and_replicated_matrices():
    """What vLLM's QKVParallelLinear, MergedColumnParallelLinear and ReplicatedLinear keep on two ranks."""
    table = PrecisionConfig(trainer="bf16", rollout="bf16")
    layer = "model.layers.2."

    def slices(case: str) -> dict:
        model = model_of(case)
        made = plan(model, LayerTable.build(model, table), TrainerLayout(), EngineLayout(tensor=2))
        return {t.name.removeprefix(layer): t.slices for t in made.transfers}

    glm = slices("glm4_moe")
    assert glm["self_attn.q_proj.bias"] == ((0, 40), (40, 80))
    assert glm["self_attn.k_proj.bias"] == glm["self_attn.v_proj.weight"] == ((0, 20), (0, 20))  # one head, copied
    assert glm["mlp.shared_experts.up_proj.weight"] == ((0, 24), (24, 48))
    assert glm["mlp.gate.e_score_correction_bias"] == glm["mlp.gate.weight"] == ((0, 6), (0, 6))
    deepseek = slices("deepseek_v3")
    assert deepseek["self_attn.q_a_proj.weight"] == ((0, 28), (0, 28))
    assert deepseek["self_attn.kv_a_proj_with_mqa.weight"] == ((0, 44), (0, 44))
    assert deepseek["self_attn.kv_b_proj.weight"] == ((0, 44), (44, 88))
    assert deepseek["self_attn.o_proj.weight"] == ((0, 20), (20, 40))
    olmo = slices("olmo2")
    assert olmo["self_attn.q_norm.weight"] == ((0, 80), (0, 80))  # vLLM gathers all heads; MiniMax-M2's are divided
    assert olmo["self_attn.q_proj.weight"] == ((0, 40), (40, 80))
    assert slices("mixtral")["block_sparse_moe.experts.5.w2.weight"] == ((0, 28), (28, 56))


def test_multi_token_prediction_layers_are_kept_or_left_out_by_choice():
    config = AutoConfig.for_model("deepseek_v3", **COMMON | DEEPSEEK).to_dict()
    plain, kept = registry.from_hf_config(config), registry.from_hf_config(config, keep_mtp=True)
    assert (plain.num_mtp_layers, kept.num_mtp_layers) == (0, 1)
    assert registry.to_hf_config(kept)["num_nextn_predict_layers"] == 1
    extra = registry.hf_tensors(kept).keys() - registry.hf_tensors(plain).keys()
    # The names of the published checkpoint, whose layer 61 this is.
    own = {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"}
    layer = {n.replace("layers.2.", "layers.3.") for n in registry.hf_tensors(plain) if n.startswith("model.layers.2.")}
    assert extra == {f"model.layers.3.{name}.weight" for name in own} | layer
    assert {registry.reason_to_skip(name, plain) is None for name in extra} == {False}
    assert registry.reason_to_skip("model.layers.2.mlp.gate.weight", plain) is None

    tensors = {name: torch.randn(shape) for name, shape in registry.hf_tensors(kept).items()}
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]
    back: dict[str, torch.Tensor] = {}
    for name in registry.weights(kept):
        back |= dict(to_hf(name, registry.from_hf(name, tensors.__getitem__, kept), kept))
    assert back.keys() == tensors.keys() and all(torch.equal(back[n], t) for n, t in tensors.items())
    assert hf_names_of("mtp.layers.0.mtp_model_layer.mlp.experts.5.linear_fc2.weight", kept) == [
        "model.layers.3.mlp.experts.5.down_proj.weight"
    ]
    tensors["model.layers.3.shared_head.head.weight"] = torch.randn(131, 48)
    with pytest.raises(ValueError, match="shared_head.head.weight: differs from lm_head.weight"):
        registry.from_hf("output_layer.weight", tensors.__getitem__, kept)
