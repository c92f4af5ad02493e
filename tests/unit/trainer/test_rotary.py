"""Rotary embedding against transformers' frequencies, and the rotation against complex numbers."""

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_fp8rl.config import MlaConfig, ModelConfig, RopeScaling, RouterConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.trainer.model.rotary import Rotary, rotary_table, softmax_scale
from tests.helpers.models import small_model
from tests.tolerances import ROTARY_FREQUENCY, ROTARY_TABLE

_SIZES = {"ffn": 64, "max_position_embeddings": 4096}


def _llama(**scaling) -> ModelConfig:
    stretch = RopeScaling(kind="llama3", original_max_position_embeddings=256, **scaling)
    return small_model((1, 64, 4, 4, 48, 64), family="llama", rope_theta=5e5, rope_scaling=stretch, **_SIZES)


def _plain(family: str, kind: str, **scaling) -> ModelConfig:
    stretch = RopeScaling(kind=kind, original_max_position_embeddings=4096 if kind == "linear" else 32, **scaling)
    return small_model((1, 64, 4, 4, 48, 64), family=family, rope_theta=1e4, rope_scaling=stretch, **_SIZES)


def _deepseek(**scaling) -> ModelConfig:
    stretch = RopeScaling(kind="yarn", original_max_position_embeddings=128, **scaling)
    mla = MlaConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=10, qk_rope_head_dim=36, v_head_dim=8)
    router = RouterConfig(score="sigmoid", correction_bias=True)
    mixture = {"experts": (2, 1, 8), "first_dense_layers": 1, "num_shared_experts": 1, "router": router}
    rope = {"rope_theta": 1e4, "rope_scaling": stretch, "mla": mla}
    return small_model((1, 64, 4, 4, 46, 64), family="deepseek_v3", **rope, **mixture, **_SIZES)


def _longrope(**scaling) -> ModelConfig:
    """Of 16 rotated pairs; the table of 64 positions is above the original length, 32."""
    lists = {"short_factor": [1 + 0.1 * i for i in range(16)], "long_factor": [1 + 0.9 * i * i for i in range(16)]}
    stretch = RopeScaling(kind="longrope", original_max_position_embeddings=32, **lists, **scaling)
    options = {"rope_theta": 1e4, "rope_scaling": stretch, "rotary_fraction": 2 / 3}
    return small_model((1, 192, 4, 4, 48, 64), family="phi3", **options, **_SIZES)


def _hf_rotary_module(model: ModelConfig):
    kind = {"deepseek_v3": "DeepseekV3"}.get(model.family, model.family.capitalize())
    path, _, name = f"transformers.models.{model.family}.modeling_{model.family}.{kind}RotaryEmbedding".rpartition(".")
    config = transformers.AutoConfig.for_model(**registry.to_hf_config(model))
    return getattr(__import__(path, fromlist=[name]), name)(config), config


@pytest.mark.parametrize(
    "model",
    [
        _llama(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        _llama(factor=32.0, low_freq_factor=2.0, high_freq_factor=6.0),
        _deepseek(factor=40.0, mscale=1.0, mscale_all_dim=1.0),
        _deepseek(factor=8.0, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=1.3),
        _deepseek(factor=4.0),
        _deepseek(factor=4.0, beta_fast=1.0, beta_slow=1.0),
        _plain("qwen3", "yarn", factor=4.0),
        _plain("qwen3", "yarn", factor=32.0, truncate=False),
        _plain("llama", "yarn", factor=8.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3),
        _plain("mistral", "yarn", factor=8.0, mscale=0.7, mscale_all_dim=1.3),
        _plain("llama", "linear", factor=3.0),
        _longrope(factor=128.0),
        _longrope(factor=64.0, attention_factor=1.3),
    ],
    ids=lambda model: (
        f"{model.family}-{model.rope_scaling.kind}-{model.rope_scaling.factor}-{model.rope_scaling.mscale_all_dim}"
    ),
)
def test_tables_are_those_of_transformers(model):
    module, config = _hf_rotary_module(model)
    assert config.rope_parameters["rope_type"] in ROPE_INIT_FUNCTIONS
    if model.rope_scaling.kind == "longrope":  # transformers compares the length of each call
        module(torch.zeros(1), torch.arange(32)[None])
        torch.testing.assert_close(Rotary.of(model, longest=32).frequencies(), module.inv_freq, **ROTARY_FREQUENCY)
        module(torch.zeros(1), torch.arange(33)[None])
    rotary = Rotary.of(model, longest=33)
    frequencies = rotary.frequencies() / (model.rope_scaling.factor if model.rope_scaling.kind == "linear" else 1)
    torch.testing.assert_close(frequencies, module.inv_freq, **ROTARY_FREQUENCY)
    assert model.rope_scaling.amplitude == pytest.approx(module.attention_scaling, rel=1e-15)
    plain = 1.0 / model.rope_theta ** (torch.arange(0, rotary.num_features, 2) / rotary.num_features)
    assert not torch.allclose(frequencies, plain), "nothing was stretched"
    cos, sin = module(torch.zeros(1), torch.arange(64)[None])
    for ours, theirs in zip(rotary_table(64, rotary, torch.float32), (cos, sin)):
        torch.testing.assert_close(ours, theirs[0, :, : rotary.num_features // 2], **ROTARY_TABLE)


def test_softmax_scale_of_latent_attention():
    model = _deepseek(factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert softmax_scale(model) == pytest.approx(46**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)
    assert softmax_scale(_llama(factor=8.0)) == 48**-0.5


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_pairs_turn_like_complex_numbers(interleaved):
    rotary = Rotary(num_features=6, first_feature=2, theta=100.0, scaling=None, interleaved=interleaved)
    x = torch.randn(5, 3, 11, generator=torch.Generator().manual_seed(0))
    cos, sin = (table[:, None] for table in rotary_table(5, rotary, torch.float32))
    turned = rotary.rotate(x, cos, sin)
    assert torch.equal(turned[..., :2], x[..., :2]) and torch.equal(turned[..., 8:], x[..., 8:])
    assert not torch.allclose(turned[1:, :, 2:8], x[1:, :, 2:8])
    pairs = x[..., 2:8]
    pairs = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, dim=-1)
    angles = torch.outer(torch.arange(5.0), 100.0 ** (-torch.arange(3) / 3))
    expected = torch.complex(*pairs) * torch.polar(torch.ones(5, 3), angles)[:, None]
    torch.testing.assert_close(torch.complex(*turned[..., 2:8].chunk(2, dim=-1)), expected, **ROTARY_TABLE)


def test_bf16_is_rounded_once():
    rotary = Rotary(num_features=8, first_feature=0, theta=1e4, scaling=None, interleaved=False)
    x = torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    cos, sin = (table.float()[:, None] for table in rotary_table(16, rotary, torch.bfloat16))
    assert torch.equal(rotary.rotate(x, cos, sin), rotary.rotate(x.float(), cos, sin).bfloat16())
