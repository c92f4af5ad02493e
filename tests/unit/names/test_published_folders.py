"""Architectures of published folders, from their public cards: each is read whole, or refused with what is missing."""

import math

import pytest

from megatron_fp8rl.names import registry
from tests.unit.names.test_published import (
    DEEPSEEK_V3,
    GLM45_AIR,
    LLAMA31_8B,
    LLAMA32_1B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
)

_QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
_QWEN |= {"use_sliding_window": False, "sliding_window": None, "use_mrope": False, "vocab_size": 151936}
_QWEN3 = _QWEN | {"head_dim": 128, "attention_bias": False, "rope_scaling": None, "tie_word_embeddings": False}
_LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 2048}
_LLAMA |= {"attention_bias": False, "pretraining_tp": 1, "rope_scaling": None, "vocab_size": 32000}
_SMOL = _LLAMA | {"is_llama_config": True, "rope_interleaved": False, "rope_theta": 1e5, "vocab_size": 49152}
_SMOL |= {"tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}
_OLMO2 = _LLAMA | {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "max_position_embeddings": 4096, "vocab_size": 100352}
_SIZES = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads".split()
_TIED, _YARN = {"tie_word_embeddings": True}, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_LINEAR = {"type": "linear", "factor": 4.0}

_PHI3 = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 4096}
_PHI3 |= {"original_max_position_embeddings": 4096, "attention_bias": False, "rope_scaling": None, "vocab_size": 32064}
_PHI3 |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False, "sliding_window": None}
_PHI3_128K = {"max_position_embeddings": 131072, "sliding_window": 262144}
_PHI3_128K |= {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [9.0] * 48}}
_PHI4_MINI = _PHI3_128K | _TIED | {"partial_rotary_factor": 0.75, "full_attn_mod": 1, "interpolate_factor": 1}
_PHI4_MINI |= {"lm_head_bias": False, "mlp_bias": False}


def _config(family: str, base: dict, sizes: tuple[int, ...], **more) -> dict:
    return base | {"model_type": family} | dict(zip(_SIZES, sizes, strict=True)) | more


_KIMI_ROPE = {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_KIMI_TEXT = DEEPSEEK_V3 | {
    **{"model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "vocab_size": 163840},
    **{"rope_theta": 50000.0, "rope_scaling": _KIMI_ROPE | {"original_max_position_embeddings": 4096}},
    **{"max_position_embeddings": 262144, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5},
}
_KIMI = {"model_type": "kimi_k25", "eos_token_id": 163585, "text_config": _KIMI_TEXT, "vision_config": {}}

_MISTRAL_SMALL = MISTRAL_7B | {
    **{"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "head_dim": 128, "rope_theta": 1e9},
    **{"vocab_size": 131072, "sliding_window": None, "max_position_embeddings": 131072},
}
_MISTRAL3 = {"model_type": "mistral3", "vision_config": {}, "spatial_merge_size": 2, "text_config": _MISTRAL_SMALL}
_QWEN3_VL = {
    **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "rms_norm_eps": 1e-6},
    **{"intermediate_size": 12288, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "rope_theta": 5e6},
    **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936},
    **{"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
}
_QWEN3_VL = {"model_type": "qwen3_vl", "tie_word_embeddings": False, "vision_config": {}, "text_config": _QWEN3_VL}

# Parameters without multi-token prediction layers; a tied output head counts once.
READ = {
    "Llama-2-7B": (_config("llama", _LLAMA, (32, 4096, 11008, 32, 32)), 6_738_415_616),
    "Llama-3.1-8B": (LLAMA31_8B, 8_030_261_248),
    "Llama-3.1-70B": (_config("llama", LLAMA31_8B, (80, 8192, 28672, 64, 8)), 70_553_706_496),
    "Llama-3.2-1B": (LLAMA32_1B, 1_235_814_400),
    "Llama-3.2-3B": (_config("llama", LLAMA31_8B, (28, 3072, 8192, 24, 8), head_dim=128, **_TIED), 3_212_749_824),
    "TinyLlama-1.1B": (_config("llama", _LLAMA, (22, 2048, 5632, 32, 4)), 1_100_048_384),
    "SmolLM2-135M": (_config("llama", _SMOL, (30, 576, 1536, 9, 3)), 134_515_008),
    "SmolLM2-360M": (_config("llama", _SMOL, (32, 960, 2560, 15, 5)), 361_821_120),
    "SmolLM2-1.7B": (_config("llama", _SMOL, (24, 2048, 8192, 32, 32)), 1_711_376_384),
    "Mistral-7B-v0.1": (MISTRAL_7B, 7_241_732_096),
    "Mistral-7B-v0.3": (MISTRAL_7B | {"vocab_size": 32768, "sliding_window": None, "rope_theta": 1e6}, 7_248_023_552),
    "Mistral-Nemo-2407": (
        _config("mistral", MISTRAL_7B, (40, 5120, 14336, 32, 8), head_dim=128, vocab_size=131072, sliding_window=None),
        12_247_782_400,
    ),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "Mixtral-8x22B": (_config("mixtral", MIXTRAL_8X7B, (56, 6144, 16384, 48, 8), vocab_size=32768), 140_630_071_296),
    "Qwen2.5-0.5B": (_config("qwen2", _QWEN, (24, 896, 4864, 14, 2), **_TIED), 494_032_768),
    "Qwen2.5-1.5B": (_config("qwen2", _QWEN, (28, 1536, 8960, 12, 2), **_TIED), 1_543_714_304),
    "Qwen2.5-3B": (_config("qwen2", _QWEN, (36, 2048, 11008, 16, 2), **_TIED), 3_085_938_688),
    "Qwen2.5-7B": (_config("qwen2", _QWEN, (28, 3584, 18944, 28, 4), vocab_size=152064), 7_615_616_512),
    "Qwen2.5-14B": (_config("qwen2", _QWEN, (48, 5120, 13824, 40, 8), vocab_size=152064), 14_770_033_664),
    "Qwen2.5-32B": (_config("qwen2", _QWEN, (64, 5120, 27648, 40, 8), vocab_size=152064), 32_763_876_352),
    "Qwen2.5-72B": (_config("qwen2", _QWEN, (80, 8192, 29568, 64, 8), vocab_size=152064), 72_706_203_648),
    "R1-Distill-Qwen-1.5B": (_config("qwen2", _QWEN, (28, 1536, 8960, 12, 2)), 1_777_088_000),
    "Qwen3-0.6B": (_config("qwen3", _QWEN3, (28, 1024, 3072, 16, 8), **_TIED), 596_049_920),
    "Qwen3-1.7B": (_config("qwen3", _QWEN3, (28, 2048, 6144, 16, 8), **_TIED), 1_720_574_976),
    "Qwen3-4B": (_config("qwen3", _QWEN3, (36, 2560, 9728, 32, 8), **_TIED), 4_022_468_096),
    "Qwen3-8B": (_config("qwen3", _QWEN3, (36, 4096, 12288, 32, 8)), 8_190_735_360),
    "Qwen2.5-7B with YaRN": (
        _config("qwen2", _QWEN | {"rope_scaling": _YARN}, (28, 3584, 18944, 28, 4), vocab_size=152064),
        7_615_616_512,
    ),
    "Qwen3-8B with YaRN": (
        _config("qwen3", _QWEN3 | {"rope_scaling": _YARN | {"rope_type": "yarn"}}, (36, 4096, 12288, 32, 8)),
        8_190_735_360,
    ),
    "deepseek-coder-6.7b": (
        _config("llama", _LLAMA | {"rope_scaling": _LINEAR}, (32, 4096, 11008, 32, 32), vocab_size=32256),
        6_740_512_768,
    ),
    "Qwen3-14B": (_config("qwen3", _QWEN3, (40, 5120, 17408, 40, 8)), 14_768_307_200),
    "Qwen3-32B": (_config("qwen3", _QWEN3, (64, 5120, 25600, 64, 8)), 32_762_123_264),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-235B-A22B": (
        _config("qwen3_moe", QWEN3_30B_A3B, (94, 4096, 12288, 64, 4), moe_intermediate_size=1536),
        235_093_634_560,
    ),
    "OLMo-2-7B": (_config("olmo2", _OLMO2, (32, 4096, 11008, 32, 32)), 7_298_617_344),
    "Kimi-K2.5, text": (_KIMI, 1_026_408_232_448),
    "Mistral-Small-3.2-24B, text": (_MISTRAL3, 23_572_403_200),
    "Qwen3-VL-8B, text": (_QWEN3_VL, 8_190_735_360),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200),
    "GLM-4.5-Air": (GLM45_AIR, 106_852_251_264),
    "Phi-3-mini-4k": (_config("phi3", _PHI3, (32, 3072, 8192, 32, 32), sliding_window=2047), 3_821_079_552),
    "Phi-3.5-mini": (_config("phi3", _PHI3 | _PHI3_128K, (32, 3072, 8192, 32, 32)), 3_821_079_552),
    "Phi-4": (
        _config("phi3", _PHI3, (40, 5120, 17920, 40, 10), vocab_size=100352, rope_theta=250000)
        | {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384},
        14_659_507_200,
    ),
    "Phi-4-mini": (
        _config("phi3", _PHI3 | _PHI4_MINI, (32, 3072, 8192, 24, 8), vocab_size=200064),
        3_836_021_760,
    ),
}
REFUSED = {
    "Gemma-2-9B": ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "'gemma2' .* softcapping"),
    "SmolLM3-3B": ({"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}, "'smollm3' .* without rotary"),
    "DeepSeek-V2-Lite": ({"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}, "'deepseek_v2'"),
    "Qwen2.5-VL-7B": ({"model_type": "qwen2_5_vl"}, "'qwen2_5_vl' .* names of its tensors"),
    "Llama-4-Scout": ({"model_type": "llama4"}, "'llama4' .* attention in chunks"),
    "Granite-3.1-8B": ({"model_type": "granite"}, "'granite' .* multipliers"),
    "Granite-4-Tiny": ({"model_type": "granitemoehybrid"}, "'granitemoehybrid' .* Mamba layers"),
    "Gemma-3n-E4B": ({"model_type": "gemma3n"}, "'gemma3n' .* residual streams"),
    "Gemma-4-31B": ({"model_type": "gemma4"}, "'gemma4' .* heads of two sizes"),
    "GLM-4.5V": ({"model_type": "glm4v_moe"}, "'glm4v_moe' .* rotary embedding"),
    "Qwen3-VL-30B-A3B": ({"model_type": "qwen3_vl_moe"}, "'qwen3_vl_moe' .* Name a model of docs/models.md"),
    "Ministral-3-8B": (
        _MISTRAL3 | {"text_config": {"model_type": "ministral3"}},
        "'ministral3' is not .* grows with the position .* Name a model of docs/models.md",
    ),
    "Qwen2.5-7B-AWQ": (
        READ["Qwen2.5-7B"][0] | {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "quantization_config = 'awq'",
    ),
    "sparse attention": (DEEPSEEK_V3 | {"index_topk": 2048, "index_n_heads": 64}, "needs sparse attention"),
    "DeepSeek-V3.2": (
        {"model_type": "deepseek_v32"},
        "'deepseek_v32' is not .* sparse attention by an indexer; the pinned",
    ),
    "GLM-5": ({"model_type": "glm_moe_dsa"}, "'glm_moe_dsa' is not .* sparse attention by an indexer; the pinned"),
    "DeepSeek-V4": ({"model_type": "deepseek_v4"}, "'deepseek_v4' is not .* hyper-connections, which the pinned"),
    "Kimi-K3": ({"model_type": "kimi_k3"}, "'kimi_k3' is not .* which the pinned versions do not have"),
    "Qwen3.8-Flash-Next": ({"model_type": "qwen4_exp"}, "'qwen4_exp' is not .* n-gram tables, which the pinned"),
}


@pytest.mark.parametrize("name", READ)
def test_a_published_folder_is_read_whole(name):
    config, num_parameters = READ[name]
    model = registry.from_hf_config(config, fp8_weights=True)
    assert sum(math.prod(shape) for shape in registry.hf_tensors(model).values()) == num_parameters
    assert registry.from_hf_config(registry.to_hf_config(model)) == model
    assert ("is_llama_config" in registry.ignored_keys(config)) == name.startswith("SmolLM2")


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_not_computed_is_refused_with_what_is_missing(name):
    config, missing = REFUSED[name]
    with pytest.raises(ValueError, match=missing):
        registry.from_hf_config(config, fp8_weights=True)
