"""Published config.json files: what they say, how many parameters that makes, and what is refused."""

import json
import math
from dataclasses import replace

import pytest

from megatron_fp8rl.config import MlaConfig, PrecisionConfig, RopeScaling, RouterConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.plan import PlanError, plan
from tests.helpers.models import small_model

# As their authors published them; keys that say nothing about the architecture are left out of some.
LLAMA31_8B = json.loads("""
{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
"eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size":
14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
"num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling":
{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
"rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256}
""")
LLAMA32_1B = LLAMA31_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA31_8B["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
MISTRAL_7B = json.loads("""
{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window":
4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000}
""")
MIXTRAL_8X7B = MISTRAL_7B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
QWEN25_7B = json.loads("""
{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584,
"initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
"model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps":
1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false, "use_mrope": false,
"use_sliding_window": false, "vocab_size": 152064}
""")
QWEN3_30B_A3B = json.loads("""
{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
"max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
"norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers":
48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window":
null, "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936}
""")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_V3 = json.loads("""
{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "auto_map": {"AutoConfig":
"configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3,
"hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
"max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
"n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
"pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config":
{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
"rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false, "topk_group":
4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280}
""")
GLM45_AIR = json.loads("""
{"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": [151329,
151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
"intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size":
1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
"num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000,
"routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": false, "vocab_size": 151552}
""")


@pytest.mark.parametrize(("config", "expected"), [(DEEPSEEK_V3, 684_489_845_504), (GLM45_AIR, 110_468_824_832)])
def test_parameter_counts_with_the_prediction_layer(config, expected):
    model = registry.from_hf_config(config, keep_mtp=True, fp8_weights=True)
    assert sum(math.prod(shape) for shape in registry.hf_tensors(model).values()) == expected
    assert registry.from_hf_config(registry.to_hf_config(model), keep_mtp=True) == model


def test_deepseek_v3_in_full():
    expected = small_model(
        (61, 7168, 128, 128, 192, 129280),
        experts=(256, 8, 2048),
        ffn=18432,
        family="deepseek_v3",
        num_shared_experts=1,
        first_dense_layers=3,
        router=RouterConfig(
            score="sigmoid", correction_bias=True, num_groups=8, groups_per_token=4, scaling_factor=2.5
        ),
        mla=MlaConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        rope_theta=10000.0,
        rope_scaling=RopeScaling(
            kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
        ),
        max_position_embeddings=163840,
    )
    assert registry.from_hf_config(DEEPSEEK_V3, fp8_weights=True) == expected
    assert [expected.layers[layer].is_moe for layer in (0, 2, 3, 60)] == [False, False, True, True]


def test_deepseek_v3_travels_in_blocks_that_its_matrices_fill_but_for_one():
    """At 8-way tensor parallelism at both ends every rank quantizes what it holds; 576 rows are 4 blocks and a half."""
    model = replace(registry.from_hf_config(DEEPSEEK_V3, fp8_weights=True), num_layers=4)
    trainer = TrainerLayout(world_size=64, tensor=8, expert=64)
    made = plan(model, LayerTable.build(model, PrecisionConfig()), trainer, EngineLayout(tensor=8, expert=8))
    assert {t.quantize for t in made.transfers if t.is_fp8} == {"at_source"}
    shapes = {t.name: t.shape for transfer in made.transfers for t in transfer.wire_tensors()}
    latent = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    assert (shapes[latent], shapes[f"{latent}_scale_inv"]) == ((576, 7168), (5, 56))
    assert shapes["model.layers.3.mlp.experts.255.down_proj.weight_scale_inv"] == (56, 16)
    # A fused matrix in an engine has scales of whole blocks, so the first part of one may not end within a block.
    narrow = replace(model, mla=replace(model.mla, q_lora_rank=1500))
    with pytest.raises(PlanError, match="self_attn.q_a_proj.weight: an engine rank keeps 1500"):
        plan(narrow, LayerTable.build(narrow, PrecisionConfig()), TrainerLayout(), EngineLayout())


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
PHI35 = {
    **{"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "vocab_size": 32064},
    **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE},
}
REFUSED = [
    (LLAMA31_8B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' .*it needs another activation"),
    (LLAMA31_8B, {"attention_bias": True}, "attention_bias = True .*it needs biases"),
    (LLAMA31_8B, {"mlp_bias": True}, "mlp_bias = True .*it needs biases"),
    (LLAMA31_8B, {"sliding_window": 1024}, "sliding_window = 1024 is not known in this family"),
    (LLAMA31_8B, {"attention_sinks": True}, "attention_sinks = True is not known"),
    (LLAMA31_8B, {"logit_softcapping": 30.0}, "logit_softcapping = 30.0 is not known"),
    (LLAMA31_8B, {"rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope' .*it needs its formula"),
    (LLAMA31_8B, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    (LLAMA31_8B, {"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25 .*it needs a family"),
    (LLAMA31_8B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config = 'awq' .*it needs"),
    (LLAMA31_8B, {"quantization_config": "fp8"}, "quantization_config = 'fp8' .*it needs"),
    (LLAMA31_8B, {"rope_scaling": [8.0]}, r"rope_parameters = \[8.0\] is not supported; it needs one"),
    (LLAMA31_8B, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention.* is not supported"),
    (LLAMA31_8B, {"layer_types": 3}, r"layer_types = \['3'\]"),
    (LLAMA31_8B, {"hidden_size": None}, "hidden_size is missing"),
    (LLAMA31_8B, {"hidden_size": "4096"}, "hidden_size = '4096' is not a whole number of at least 0"),
    (LLAMA31_8B, {"num_hidden_layers": -3}, "num_hidden_layers = -3 is not a whole number"),
    (LLAMA31_8B, {"vocab_size": 128256.0}, "vocab_size = 128256.0 is not a whole number"),
    (LLAMA31_8B, {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' is not a number"),
    (LLAMA31_8B, {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 is not true or false"),
    (QWEN25_7B, {"use_sliding_window": True}, "use_sliding_window = True .*it needs attention over a window"),
    (QWEN25_7B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .*sliding_attention"),
    (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] .*it needs experts in some layers"),
    (QWEN3_30B_A3B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
    (QWEN3_30B_A3B, {"rope_scaling": YARN | {"factor": "4"}}, "factor = '4' is not a number of at least 1"),
    (QWEN3_30B_A3B, {"rope_scaling": YARN | {"factor": 0.5}}, "factor = 0.5 is not a number of at least 1"),
    (QWEN3_30B_A3B, {"rope_scaling": YARN | {"truncate": "no"}}, "truncate = 'no' is not true or false"),
    (QWEN3_30B_A3B, {"rope_scaling": YARN | {"beta_slow": 0}}, "beta_slow = 0 is not a number above 0"),
    (QWEN3_30B_A3B, {"rope_scaling": YARN | {"finetuned": True}}, "finetuned = True is not supported"),
    (QWEN3_30B_A3B, {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale is missing beside mscale_all_dim"),
    (
        QWEN3_30B_A3B,
        {"rope_scaling": YARN | {"attn_factor": 2}},
        r"vLLM multiplies by 2.27726 .*transformers by 1.13863",
    ),
    (LLAMA31_8B, {"rope_scaling": {"type": "linear", "factor": None}}, "rope_parameters.factor is missing"),
    (LLAMA31_8B, {"rope_scaling": {"type": "linear", "factor": 2, "truncate": False}}, "truncate = False is not supp"),
    (DEEPSEEK_V3, {}, "quantization_config = 'fp8' .*it needs weights that are dequantized"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    (DEEPSEEK_V3, {"num_key_value_heads": 1}, "num_key_value_heads = 1"),
    (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk = 2048 is not known"),
    (DEEPSEEK_V3, {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"attention_factor": 2.0}}, "attention_factor = 2.0"),
    (
        PHI35,
        {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 47}},
        "long_factor has 47 numbers, .* 48 rotated",
    ),
    (PHI35, {"partial_rotary_factor": 0.75}, "short_factor has 48 numbers, and a head has 36 rotated pairs"),
    (
        PHI35,
        {"rope_scaling": LONGROPE | {"short_factor": [0] * 48}},
        "short_factor = .* not a list of numbers",
    ),
    (
        PHI35,
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 48}},
        "long_factor is missing",
    ),
    (
        PHI35,
        {"rope_scaling": LONGROPE | {"long_mscale": 2.0}},
        "multiplies by long_mscale = 2, transformers",
    ),
    (PHI35, {"rope_scaling": LONGROPE | {"beta_fast": 16}}, "beta_fast = 16 is not supported"),
    (PHI35, {"original_max_position_embeddings": 1}, "original_max_position_embeddings = 1 is below 2"),
    (
        PHI35,
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "'yarn' .*supported: default, longrope",
    ),
    (PHI35, {"full_attn_mod": 2}, "full_attn_mod = 2 is not known"),
]


@pytest.mark.parametrize(("config", "change", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name_with_what_it_needs(config, change, message):
    with pytest.raises(ValueError, match=f"config.json of a {config['model_type']} model: .*{message}"):
        registry.from_hf_config(config | change)


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        registry.from_hf_config({"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"]})
    parts = (
        "'cohere2' (architectures ['Cohere2ForCausalLM'])",
        "supported are deepseek_v3, gemma3_text, glm4_moe, glm4_moe_lite, gpt_oss, llama",
    )
    assert all(part in str(error.value) for part in (*parts, "extending.md"))


def test_all_mistakes_of_a_config_are_named_at_once():
    with pytest.raises(ValueError) as error:
        registry.from_hf_config(LLAMA31_8B | {"mlp_bias": True, "vocab_size": None, "swiglu_limit": 7.0})
    assert all(text in str(error.value) for text in ("mlp_bias = True", "vocab_size is missing", "swiglu_limit = 7.0"))


def test_what_a_family_cannot_say_is_not_written():
    model = registry.from_hf_config(LLAMA31_8B)
    for change, text in [
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"qk_norm": True}, "qk_norm = True"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"num_mtp_layers": 1}, "num_mtp_layers = 1"),
    ]:
        with pytest.raises(ValueError, match=f"config.json of the family llama cannot express {text}"):
            registry.to_hf_config(replace(model, **change))
    with pytest.raises(ValueError, match="needs mla"):
        registry.to_hf_config(replace(model, family="deepseek_v3"))


def test_unfit_tensors_are_refused_by_name():
    import torch

    model = registry.from_hf_config(LLAMA31_8B)
    fp8 = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="layers.3.self_attn.o_proj.weight: torch.float8_e4m3fn needs its scales"):
        registry.from_hf("decoder.layers.3.self_attention.linear_proj.weight", lambda _: fp8, model)
    assert registry.reason_to_skip("model.layers.0.self_attn.rotary_emb.inv_freq", model) == "computed from rope_theta"
    assert registry.reason_to_skip("lm_head.weight", registry.from_hf_config(LLAMA32_1B)) == "tied to the embedding"
    assert registry.reason_to_skip("model.layers.40.mlp.up_proj.weight", model) is None  # no layer of this model
