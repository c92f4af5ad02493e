"""Which weights get adapters, and the names of their modules in peft's configuration."""

from dataclasses import replace

import pytest

from megatron_fp8rl.config import LoraConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.adapted import is_adapted, target_modules, targets_in
from model_configs.deepseek import deepseek_v3
from model_configs.qwen3 import qwen3_8b, qwen3_30b_a3b
from tests.helpers.family_configs import OLMO2

ATTENTION, DENSE = ["k_proj", "o_proj", "q_proj", "v_proj"], ["down_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("make", "targets", "expected"),
    [
        (qwen3_8b, (), sorted(ATTENTION + DENSE)),
        (qwen3_8b, ("dense",), DENSE),
        (qwen3_30b_a3b, ("attention",), ATTENTION),
        (qwen3_30b_a3b, ("experts",), DENSE),
    ],
)
def test_modules_are_named_as_in_the_model(make, targets, expected):
    assert target_modules(make(), LoraConfig(rank=4, targets=targets)) == expected


def test_a_name_that_other_modules_share_is_written_whole():
    """DeepSeek-V3 has an MLP of the same names in dense layers, in shared experts and in routed experts."""
    model = replace(deepseek_v3(), num_layers=4, num_experts=2, first_dense_layers=3, num_mtp_layers=0)
    modules = target_modules(model, LoraConfig(rank=4, targets=("dense",)))
    assert "model.layers.0.mlp.gate_proj" in modules and "model.layers.3.mlp.shared_experts.up_proj" in modules
    assert len(modules) == 4 * 3 and all("." in module for module in modules)
    assert targets_in(model) == ("attention", "dense", "experts")


def test_norms_routers_biases_embedding_and_head_have_no_adapters():
    model = replace(qwen3_30b_a3b(), num_layers=2, num_experts=4)
    others = {name for name in registry.weights(model) if not is_adapted(name, LoraConfig(rank=1))}
    assert len(others) == 3 + 2 * (4 + 1)  # embedding, last norm, head; two norms, q and k norms, router
    assert targets_in(model) == ("attention", "experts")
    assert not any(is_adapted(name, LoraConfig()) for name in registry.weights(model))
    assert target_modules(OLMO2, LoraConfig(rank=4)) == sorted(ATTENTION + DENSE)  # and no norm behind a linear
