"""Keys of config.json that a family does not read: accepted in one line without effect, else refused."""

import pytest

from megatron_fp8rl.names import registry
from tests.unit.names.test_published import (
    DEEPSEEK_V3,
    GLM45_AIR,
    LLAMA31_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN25_7B,
)

QWEN3_8B = QWEN25_7B | {"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
FAMILIES = {
    "llama": LLAMA31_8B,
    "mistral": MISTRAL_7B,
    "qwen2": QWEN25_7B,
    "qwen3": QWEN3_8B,
    "qwen3_moe": QWEN3_30B_A3B,
    "mixtral": MIXTRAL_8X7B,
    "glm4_moe": GLM45_AIR,
    "deepseek_v3": {key: value for key, value in DEEPSEEK_V3.items() if key != "quantization_config"},
}
EVERY = list(FAMILIES)
DENSE = ["llama", "mistral", "qwen2", "qwen3"]
ACCEPTED = [
    (EVERY, {"_model_name_or_path": "org/model", "is_llama_config": True, "_commit_hash": "abc"}),
    (EVERY, {"max_sequence_length": 2048, "model_max_length": 4096, "gradient_checkpointing": True}),
    (EVERY, {"use_flash_attention_2": True, "resid_pdrop": 0.1, "unsloth_whatever": [1]}),
    (EVERY, {"some_option_of_a_program": None, "attn_logit_softcapping": None, "no_rope_layers": None}),
    (EVERY, {"rope_interleaved": False, "logit_scale": 1.0, "residual_multiplier": 1, "alibi": 0}),
    (EVERY, {"attention_sinks": False, "use_rope": True, "norm_type": "rmsnorm", "hidden_activation": "silu"}),
    (["llama", "mistral", "mixtral"], {"qkv_bias": False, "use_bias": False, "bias": False}),
    (["mistral", "mixtral"], {"attention_bias": False}),
    (["llama", "mistral", "mixtral", "qwen2"], {"use_qk_norm": False, "qk_layernorm": False}),
    (["qwen3", "qwen3_moe"], {"use_qk_norm": True}),
    (["qwen2"], {"attention_bias": True, "qkv_bias": True}),
    (["qwen2"], {"attention_bias": False}),
    (["mistral", "qwen2", "qwen3", "mixtral"], {"mlp_bias": False}),
    (["llama"], {"use_sliding_window": False, "sliding_window": 4096}),
    (DENSE, {"num_local_experts": 0, "num_experts_per_tok": 2, "n_shared_experts": 0, "norm_topk_prob": True}),
    (["mixtral"], {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "scoring_func": "softmax"}),
    (["qwen3_moe"], {"shared_expert_intermediate_size": 0, "first_k_dense_replace": 0, "moe_layer_freq": 1}),
    (["glm4_moe"], {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    (DENSE, {"kv_channels": 128, "n_head": 0}),  # n_head is set to the heads of the family
    (DENSE, {"layer_norm_eps": 0}),  # set to rms_norm_eps
]
# Read before as well, without a line: what transformers writes, in its older and newer form.
SILENT = [
    (["llama"], {"pretraining_tp": 1, "torch_dtype": "bfloat16", "dtype": "bfloat16", "eos_token_id": [1, 2]}),
    (["mistral"], {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    (["mistral"], {"rope_scaling": {"type": "linear", "factor": 1.0}}),
    (["mistral"], {"use_sliding_window": True}),
    (["qwen2"], {"rope_scaling": None, "layer_types": ["full_attention"] * 28}),
]
REFUSED = [
    (EVERY, "rope_interleaved", True),
    (EVERY, "logit_scale", 0.0625),
    (EVERY, "residual_multiplier", 0.22),
    (EVERY, "attn_logit_softcapping", 50.0),
    (EVERY, "clip_qkv", 8.0),
    (EVERY, "swiglu_limit", 7.0),
    (EVERY, "use_rope", False),
    (EVERY, "no_rope_layers", [0, 1]),
    (EVERY, "norm_type", "layernorm"),
    (EVERY, "hidden_activation", "gelu_pytorch_tanh"),
    (EVERY, "some_option_of_a_program", False),
    (EVERY, "some_option_of_a_program", 0),
    (EVERY, "lora_rank", 16),
    (["llama"], "sliding_window", 4096),
    (["llama", "mistral", "mixtral"], "qkv_bias", True),
    (["qwen2"], "qkv_bias", False),
    (["qwen2"], "use_bias", False),
    (["qwen3"], "qk_norm", False),
    (["mistral"], "use_sliding_window", False),
    (DENSE, "num_experts", 8),
    (["mixtral"], "norm_topk_prob", False),
    (["qwen3_moe"], "scoring_func", "sigmoid"),
    (["qwen3_moe"], "shared_expert_intermediate_size", 512),
    (["deepseek_v3"], "index_topk", None),
    (DENSE, "kv_channels", 64),
]


def cases(table: list) -> list:
    return [(name, *case) for names, *case in table for name in names]


@pytest.mark.parametrize(("name", "keys"), cases(ACCEPTED))
def test_keys_without_effect_are_accepted_and_named_in_one_line(name, keys):
    config = FAMILIES[name]
    computed = {"n_head": config["num_attention_heads"], "layer_norm_eps": config["rms_norm_eps"]}
    keys = {key: computed.get(key, value) for key, value in keys.items()}
    assert registry.ignored_keys(config) == ""
    assert registry.from_hf_config(config | keys) == registry.from_hf_config(config)
    line = registry.ignored_keys(config | keys)
    assert "\n" not in line and all(f"{key} = {value!r}" in line for key, value in keys.items())


@pytest.mark.parametrize(("name", "keys"), cases(SILENT))
def test_keys_that_transformers_writes_are_read_without_a_line(name, keys):
    config = FAMILIES[name]
    assert registry.from_hf_config(config | keys) == registry.from_hf_config(config)
    assert registry.ignored_keys(config | keys) == ""


@pytest.mark.parametrize(("name", "key", "value"), cases(REFUSED))
def test_a_value_that_can_change_the_model_is_refused_by_key(name, key, value):
    with pytest.raises(ValueError, match=f"(^|[ ;]){key} = "):
        registry.from_hf_config(FAMILIES[name] | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("bos_token_id", [1, 2]), ("bos_token_id", "1"), ("pad_token_id", [0]), ("eos_token_id", [2, "3"])],
)
def test_token_ids_that_transformers_does_not_read_are_refused_by_key(key, value):
    with pytest.raises(ValueError, match=f"{key} = .* is not a whole number, and transformers reads nothing else"):
        registry.from_hf_config(LLAMA31_8B | {key: value})
