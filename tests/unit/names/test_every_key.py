"""Every key of config.json is used, known to have no effect, or rejected by name, compared by transformers' logits.

Each key of a family's configuration class is changed, one at a time. If the reader accepts the change and gives the
same ModelConfig, the logits of transformers' model must not move.
"""

import json

import pytest
import torch
import transformers

from megatron_fp8rl.names.registry import FAMILIES, from_hf_config

BASE = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MORE = {
    "qwen3": dict(head_dim=8),
    "qwen3_moe": dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": dict(
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v3": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
}
MORE["glm4_moe_lite"] = MORE["deepseek_v3"] | {"n_group": 1, "mlp_layer_types": ["dense", "sparse"]}
MORE["minimax_m2"] = dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2)
_WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
MORE["olmo3"] = _WINDOWS
MORE["gemma3_text"] = _WINDOWS | dict(head_dim=8, query_pre_attn_scalar=12)
MORE["qwen3_next"] = MORE["qwen3_moe"] | dict(
    layer_types=["linear_attention", "full_attention"],
    shared_expert_intermediate_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
MORE["phi3"] = dict(
    original_max_position_embeddings=16,
    pad_token_id=None,
    rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 2.0], "long_factor": [1.0, 4.0],
    },
)  # fmt: skip
MORE["qwen3_5_moe_text"] = MORE["qwen3_next"]
MORE["qwen3_5_text"] = {key: value for key, value in MORE["qwen3_next"].items() if "expert" not in key}
MORE["gpt_oss"] = MORE["minimax_m2"] | {"sliding_window": 5}
EXTRA = {  # said beside what the class knows
    "is_causal": False,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "original_max_position_embeddings": 16,
    "no_such_key": None,
    "another": False,
    "rope_interleaved": False,
    "mlp_bias": False,
    "attention_bias": False,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 8**-0.5,
    "head_size": 8,
    "num_layers": 2,
    "layer_norm_eps": 1e-6,
    "hidden_activation": "silu",
    "no_rope_layers": [],
    "use_rope": True,
    "num_shared_experts": 0,
    "shared_intermediate_size": 0,
    "max_sequence_length": 9,
    "is_llama_config": True,
    "sliding_window_pattern": 2,
}
TOKENS = torch.arange(2, 26)[None]


def _logits(config: dict, state: dict | None = None) -> tuple[torch.Tensor, dict]:
    torch.manual_seed(0)
    cls = transformers.CONFIG_MAPPING[config["model_type"]]
    model = transformers.AutoModelForCausalLM.from_config(cls(**config)).float().eval()
    if state is not None:
        model.load_state_dict(state)
    else:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    with torch.no_grad():
        return model(TOKENS).logits, model.state_dict()


def _changed(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 0]
    if isinstance(value, float):
        return [value * 2 + 0.25]
    if value is None:
        return [True, 4]
    return []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_changes_the_model_is_honoured_or_refused(name):
    config = {**BASE, **MORE.get(name, {}), "model_type": name}
    config = json.loads(transformers.CONFIG_MAPPING[name](**config).to_json_string(use_diff=False))
    own = from_hf_config(config)
    expected, state = _logits(config)
    num_judged = 0
    for key, values in {
        **{key: _changed(value) for key, value in config.items()},
        **{k: [v] for k, v in EXTRA.items()},
    }.items():
        for value in values:
            changed = {**config, key: value}
            try:
                if from_hf_config(changed) != own:
                    continue
            except ValueError as error:
                named = (
                    key
                    if "kv_lora_rank" not in MORE.get(name, {}) or key != "num_attention_heads"
                    else "num_key_value_heads"
                )
                assert not value or named in str(error), (key, value, str(error))
                continue
            try:
                actual, _ = _logits(changed, state)
            except Exception:  # transformers does not build it either
                continue
            num_judged += 1
            assert torch.allclose(actual, expected, atol=1e-5), (
                f"{name}: {key} = {value!r} is read as nothing and changes logits"
            )
    assert num_judged > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = .* disagrees with rope_parameters"),
        ({"rope_theta": 1e6}, "rope_theta = 1000000.0 disagrees with 10000.0 in rope_parameters; remove one"),
        ({"is_causal": False}, "is_causal = False is not supported"),
        ({"original_max_position_embeddings": 16}, "original_max_position_embeddings = 16"),
        ({"anything": False}, "anything = False is not known"),
        ({"rope_interleaved": True}, r"rope_interleaved = True is not known in this family \(without effect: False\)"),
        ({"qkv_bias": False}, r"qkv_bias = False is not known in this family \(without effect: True\)"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 is not known"),
        ({"logit_scale": True}, "logit_scale = True is not known"),
        ({"layer_norm_eps": 1e-4}, "layer_norm_eps = 0.0001 is not known"),
        ({"n_routed_experts": 8}, "n_routed_experts = 8 is not known"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic' is not supported"),
    ],
)
def test_what_was_silent_once_is_refused(change, message):
    config = transformers.CONFIG_MAPPING["qwen2"](**BASE).to_dict() | {"model_type": "qwen2"}
    if "original_max_position_embeddings" in change:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    with pytest.raises(ValueError, match=message):
        from_hf_config(config | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_scaling = .* disagrees",
        ),
        ("qwen2", {"is_causal": None}, "is_causal = None"),
        ("qwen2", {"rope_parameters": None, "rope_theta": 0}, "rope_theta = 0 is not a number above 0"),
        ("qwen2", {"rope_parameters": None, "rope_theta": "abc"}, "rope_theta = 'abc'"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ("qwen2", {"num_hidden_layers": 0}, "num_hidden_layers = 0 is below 1"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0 is a window of no tokens"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is not between 1 and num_experts = 4"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3 does not divide n_routed_experts = 4"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group = 3 is above n_group = 2"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_by_key(name, change, message):
    config = {**BASE, **MORE.get(name, {}), "model_type": name}
    config = json.loads(transformers.CONFIG_MAPPING[name](**config).to_json_string(use_diff=False))
    from_hf_config(config)
    with pytest.raises(ValueError, match=message):
        from_hf_config(
            {key: value for key, value in {**config, **change}.items() if value is not None or key == "is_causal"}
        )
