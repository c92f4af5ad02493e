"""Runs of real models: published dimensions and parameter counts, no mistakes, and room on the GPUs they name."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.data.sft import SftSource
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.assessment import DoctorOptions
from megatron_fp8rl.preflight.diagnosis import diagnose
from model_configs import deepseek, dense, glm, gpt_oss, llama, minimax, mixtral, qwen3, qwen3_5, qwen3_next, small
from tests.helpers.tools import load_tool
from tests.unit.names.test_published import DEEPSEEK_V3, GLM45_AIR, LLAMA31_8B, MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN25_7B

ROOT = Path(__file__).parents[2]
SMALL = [small.small_qwen3, small.small_qwen3_8_layers, small.small_qwen3_moe, small.small_qwen3_moe_4_layers]

# Fields of the config.json files that the publishers keep beside the weights; those of test_published.py, too.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "rope_scaling": None, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "initializer_range": 0.02,
}  # fmt: skip
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64,
}  # fmt: skip
QWEN3_0_6B = QWEN3_8B | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "tie_word_embeddings": True, "max_window_layers": 28,
}  # fmt: skip
QWEN3_1_7B = QWEN3_0_6B | {"hidden_size": 2048, "intermediate_size": 6144}
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_14B = QWEN3_8B | {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    "max_window_layers": 40,
}  # fmt: skip
QWEN3_32B = QWEN3_14B | {
    "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64, "max_window_layers": 64,
}  # fmt: skip
GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "vocab_size": 154880, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "attention_bias": False,
    "partial_rotary_factor": 1.0, "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 202752, "hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000, "rope_scaling": None,
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "initializer_range": 0.02, "pad_token_id": 100277, "eos_token_id": 100257, "use_cache": True,
}  # fmt: skip
OLMO3_7B = OLMO2_7B | {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "vocab_size": 100278,
    "max_position_embeddings": 65536, "sliding_window": 4096,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                     "original_max_position_embeddings": 8192, "rope_type": "yarn"},
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_local_base_freq": 10000,
    "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid",
    "initializer_range": 0.02, "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0, "use_cache": True,
}  # fmt: skip
QWEN3_NEXT_80B_A3B = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None, "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "initializer_range": 0.02, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}  # fmt: skip
# The hub's config.json; transformers' defaults are left out there, too.
_GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
}  # fmt: skip
_GEMMA3_TEXT = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
GEMMA3_4B = _GEMMA3 | {"text_config": _GEMMA3_TEXT}
GEMMA3_12B = _GEMMA3 | {
    "text_config": _GEMMA3_TEXT | {
        "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}  # fmt: skip
GEMMA3_27B = _GEMMA3 | {
    "text_config": _GEMMA3_TEXT | {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
    },
}  # fmt: skip
QWEN3_5_35B_A3B = registry.text_config({
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "image_token_id": 248056,
    "tie_word_embeddings": False, "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "mlp_only_layers": [],
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mamba_ssm_dtype": "float32",
        "attn_output_gate": True, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "eos_token_id": 248044,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "initializer_range": 0.02,
        "router_aux_loss_coef": 0.001, "partial_rotary_factor": 0.25, "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
    },
})  # fmt: skip
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 200064, "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64,
    "rope_theta": 5000000, "rms_norm_eps": 1e-06, "max_position_embeddings": 196608, "hidden_act": "silu",
    "attn_type_list": [1] * 62, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_mtp_modules": 3,
    "use_mtp": True, "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
    "attention_dropout": 0.0, "initializer_range": 0.02, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
PHI4_MINI = {
    "_name_or_path": "Phi-4-mini-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
    "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
    "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 200064,
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 48, "long_factor": [
            1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
            2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
            6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
            16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23,
            32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
        ],
    },
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36, "num_local_experts": 128,
}  # fmt: skip

# Parameters: the totals that the hub shows for the safetensors files where it shows them to the unit (Llama, Qwen,
# Mixtral); what model cards and reports round to ("30.5B in total and 3.3B activated", "235B ... 22B", "46.7B ...
# 12.9B", arXiv:2401.04088; "671B total parameters with 37B activated", arXiv:2412.19437).
MODELS = {
    "llama31_8b": (llama.llama31_8b, LLAMA31_8B, 8_030_261_248, "8.03", "8.03"),
    "qwen3_8b": (qwen3.qwen3_8b, QWEN3_8B, 8_190_735_360, "8.19", "8.19"),
    "qwen3_30b_a3b": (qwen3.qwen3_30b_a3b, QWEN3_30B_A3B, 30_532_122_624, "30.5", "3.35"),
    "qwen3_235b_a22b": (qwen3.qwen3_235b_a22b, QWEN3_235B_A22B, 235_093_634_560, "235.1", "22.2"),
    "mixtral_8x7b": (mixtral.mixtral_8x7b, MIXTRAL_8X7B, 46_702_792_704, "46.7", "12.9"),
    # With tied embeddings the files of 0.6B and 1.7B hold the head a second time; these are the parameters.
    "qwen3_0_6b": (dense.qwen3_0_6b, QWEN3_0_6B, 596_049_920, "0.6", "0.6"),
    "qwen3_1_7b": (dense.qwen3_1_7b, QWEN3_1_7B, 1_720_574_976, "1.7", "1.7"),
    "qwen3_4b": (dense.qwen3_4b, QWEN3_4B, 4_022_468_096, "4.02", "4.02"),
    "qwen3_14b": (dense.qwen3_14b, QWEN3_14B, 14_768_307_200, "14.8", "14.8"),
    "qwen3_32b": (dense.qwen3_32b, QWEN3_32B, 32_762_123_264, "32.8", "32.8"),
    "qwen25_7b": (dense.qwen25_7b, QWEN25_7B, 7_615_616_512, "7.62", "7.62"),
    # The card says 7 B; the unit count is arithmetic over the published dimensions.
    "olmo2_7b": (dense.olmo2_7b, OLMO2_7B, 7_298_617_344, "7.30", "7.30"),
    "olmo3_7b": (dense.olmo3_7b, OLMO3_7B, 7_298_011_136, "7.30", "7.30"),
    "phi4_mini": (dense.phi4_mini, PHI4_MINI, 3_836_021_760, "3.84", "3.84"),
    "gemma3_1b": (dense.gemma3_1b, GEMMA3_1B, 999_885_952, "1.00", "1.00"),
    # What transformers' class has without its vision parts; with them 4,300,079,472, 12,187,325,040, 27,432,406,640.
    "gemma3_4b": (dense.gemma3_4b, registry.text_config(GEMMA3_4B), 3_880_263_168, "3.88", "3.88"),
    "gemma3_12b": (dense.gemma3_12b, registry.text_config(GEMMA3_12B), 11_766_034_176, "11.8", "11.8"),
    "gemma3_27b": (dense.gemma3_27b, registry.text_config(GEMMA3_27B), 27_009_346_304, "27.0", "27.0"),
    # The card says 106 B and 12 B; the unit count is arithmetic over the published dimensions.
    "glm_45_air": (glm.glm_45_air, GLM45_AIR, 106_852_251_264, "106.9", "13"),
    # The cards say 230 B and 10 B, and 30 B and 3 B; the unit counts are arithmetic over the dimensions.
    "minimax_m2": (minimax.minimax_m2, MINIMAX_M2, 228_689_764_864, "229", "11"),
    # The card says 80 B and 3 B; the unit count is arithmetic over the published dimensions.
    "qwen3_next_80b_a3b": (qwen3_next.qwen3_next_80b_a3b, QWEN3_NEXT_80B_A3B, 79_674_391_296, "80", "3.9"),
    # The name says 35 B and 3 B, with the vision tower; the unit count is arithmetic over the published dimensions.
    "qwen3_5_35b_a3b": (qwen3_5.qwen3_5_35b_a3b, QWEN3_5_35B_A3B, 34_660_610_688, "35", "3.5"),
    # The cards say 21 B and 3.6 B, 117 B and 5.1 B, without the embedding; the unit counts are arithmetic, too.
    "gpt_oss_20b": (gpt_oss.gpt_oss_20b, GPT_OSS_20B, 20_914_757_184, "20.9", "4.2"),
    "gpt_oss_120b": (gpt_oss.gpt_oss_120b, GPT_OSS_120B, 116_829_156_672, "116.8", "5.7"),
    "glm_47_flash": (glm.glm_47_flash, GLM_47_FLASH, 29_943_393_920, "30", "3.9"),
    # The report's 671 B are without the prediction layer; the unit count is arithmetic over the published dimensions.
    "deepseek_v3": (deepseek.deepseek_v3, DEEPSEEK_V3, 671_026_419_200, "671.0", "37.6"),
}
RUNS = [name for name in cli.config_functions() if name.startswith("grpo_")]


@pytest.mark.parametrize("name", MODELS)
def test_dimensions_are_the_published_ones(name):
    make, published, *_ = MODELS[name]
    assert registry.from_hf_config(published, fp8_weights=True) == replace(make(), hf_path=None)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_the_published_ones(name):
    make, _, total, total_shown, active_shown = MODELS[name]
    actual = parameters.count(make())
    assert actual.total == total
    digits = len(total_shown.partition(".")[2])
    assert f"{actual.total / 1e9:.{digits}f}" == total_shown
    assert f"{actual.active / 1e9:.{len(active_shown.partition('.')[2])}f}" == active_shown


def test_deepseek_total_is_the_sum_of_its_parts():
    """By hand, from the report's dimensions: 61 layers of latent attention, 3 dense, 58 with 256 + 1 experts."""
    h, heads = 7168, 128
    attention = h * 1536 + 1536 + 1536 * heads * 192 + h * 576 + 512 + 512 * heads * 256 + heads * 128 * h
    dense, expert = 3 * h * 18432, 3 * h * 2048
    router = 256 * h + 256
    total = 61 * (attention + 2 * h) + 3 * dense + 58 * (257 * expert + router) + 2 * 129280 * h + h
    assert parameters.count(deepseek.deepseek_v3()).total == total


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v3"])
def test_counts_are_sums_over_the_checkpoints_tensors(name):
    """The quick algebra against the table that conversions use, tensor by tensor."""
    model = replace(MODELS[name][0](), num_layers=5)
    listed = sum(math.prod(shape) for shape in registry.hf_tensors(model).values())
    assert parameters.count(model).total == listed


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("accelerator", ["cpu", "hopper", "blackwell"])
def test_runs_have_no_mistakes(name, accelerator):
    cfg = cli.config_functions()[name]()
    assert cfg.name == name
    assert rules.check(cfg, accelerator=accelerator) == []


@pytest.mark.parametrize("name", RUNS)
def test_runs_fit_the_gpus_that_they_name(name):
    function = cli.config_functions()[name]
    num_gpus, kind = re.search(r"on (\d+) (H\d+)", function.__doc__).groups()
    actual = diagnose(function(), DoctorOptions(gpu=kind.lower()))
    assert actual.num_gpus == int(num_gpus)
    assert [f for f in actual.findings if f.severity == "error"] == []
    # The only thing missing is a checkpoint to start from. An FP8 cache is always warned of; packages depend on the
    # machine that tests.
    warnings = {f.subject for f in actual.findings if f.severity == "warning"}
    known = {p.name for p in actual.packages} | {"python", "--engine.kv_cache_dtype"}
    assert warnings - known == {"--model.hf_path"}
    assert actual.trainer.share < 0.92 and actual.engine.full_sequences >= 32


def test_half_billion_models_are_what_they_say():
    """By hand: attention, feed-forward, norms (two of a layer, one of queries and keys each), embedding and head."""
    attention = 1024 * 128 * (2 * 16 + 2 * 8)
    dense = 28 * (attention + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128) + 2 * 128 * 1024 + 1024
    experts = 12 * (attention + 32 * 3 * 1024 * 512 + 32 * 1024 + 2 * 1024 + 2 * 128) + 2 * 128 * 1024 + 1024
    assert parameters.count(small.small_qwen3().model).total == dense
    assert parameters.count(small.small_qwen3_moe().model).total == experts
    assert f"{dense / 1e9:.2f} B parameters" in small.small_qwen3.__doc__
    short = parameters.count(small.small_qwen3_8_layers().model).total
    assert f"{short / 1e9:.2f} B parameters" in small.small_qwen3_8_layers.__doc__
    short = parameters.count(small.small_qwen3_moe_4_layers().model).total
    assert f"{short / 1e9:.2f} B parameters" in small.small_qwen3_moe_4_layers.__doc__
    active = parameters.count(small.small_qwen3_moe().model).active
    assert f"{experts / 1e9:.2f} B parameters, {active / 1e9:.2f} B active" in small.small_qwen3_moe.__doc__


@pytest.mark.parametrize("function", SMALL)
def test_half_billion_models_fit_one_gpu_with_their_engine(function):
    cfg = function()
    assert rules.check(cfg, accelerator="hopper") == [] and rules.check(cfg, accelerator="cpu") == []
    actual = diagnose(cfg)
    assert "on 1 H200" in function.__doc__ and cfg.parallel.world_size == cfg.engine.num_replicas == 1
    assert cfg.engine.placement == "colocated"
    assert [f for f in actual.findings if f.severity == "error"] == []
    # Both ends live on one GPU.
    assert actual.trainer.share + cfg.engine.gpu_memory_utilization < 0.92
    assert actual.engine.full_sequences >= cfg.engine.max_num_sequences


@pytest.mark.parametrize("function", SMALL)
def test_problems_of_the_half_billion_models_fit_their_limits(function):
    cfg = function()
    samples = [s for step in range(4) for s in SftSource(cfg, load_tokenizer("character")).samples(step)]
    assert max(s.num_prompt_tokens for s in samples) <= cfg.sampling.max_prompt_tokens
    # The longest possible answer of ten digits and its end token is among 512.
    assert max(len(s.token_ids) - s.num_prompt_tokens for s in samples) == 10 * 7 + 1


def test_every_shipped_run_proves_every_publication():
    for name, function in cli.config_functions().items():
        assert function().weight_sync.verify_every == 1, name


def test_the_page_of_models_shows_the_configurations():
    tool = load_tool("models_table")
    for file, content in ((tool.PAGE, tool.table()), (tool.FAMILIES_PAGE, tool.families_table())):
        text = file.read_text()
        assert tool.page(text, content) == text, "run python tools/models_table.py --write"
    assert set(tool.RAN) <= set(RUNS)
