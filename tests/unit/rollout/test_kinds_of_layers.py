"""What goes through an engine's own loaders in a first publication: a layer of each kind, told apart by all they hold, and
one module after another."""

import pytest
import torch
from torch import nn

from megatron_fp8rl.rollout.vllm_plugin.kernel_weights import first_of_kinds, holder_of


class Other(nn.Linear):
    """The same tensors in another class."""


def model_of(*layers: nn.Module) -> nn.Module:
    model = nn.Module()
    model.embed, model.layers = nn.Embedding(4, 4), nn.ModuleList(nn.Sequential(layer) for layer in layers)
    return model


def test_equal_layers_are_one_kind():
    assert first_of_kinds(model_of(*(nn.Linear(4, 8) for _ in range(5)))) == {0}
    assert first_of_kinds(nn.Linear(4, 4)) == frozenset()


def test_what_a_loader_could_treat_in_another_way_is_a_kind_of_its_own():
    strided, double, buffered = nn.Linear(4, 8), nn.Linear(4, 8).double(), nn.Linear(4, 8)
    strided.weight = nn.Parameter(torch.zeros(4, 8).t())
    buffered.register_buffer("scale", torch.ones(1))
    plain = [nn.Linear(4, 8) for _ in range(2)]
    layers = [plain[0], nn.Linear(4, 9), strided, double, buffered, Other(4, 8), nn.Linear(4, 8, bias=False), plain[1]]
    assert first_of_kinds(model_of(*layers)) == set(range(7))  # the last is as the first


def test_ranks_experts_are_part_of_a_kind():
    layers = [nn.Linear(4, 8) for _ in range(4)]
    for layer, own in zip(layers, ([0, -1], [0, -1], [-1, 0], None), strict=True):
        layer.expert_map = None if own is None else torch.tensor(own)
    assert first_of_kinds(model_of(*layers)) == {0, 2, 3}


def test_a_module_that_all_layers_share_makes_no_kind():
    rotary = nn.Module()
    rotary.register_buffer("cos_sin_cache", torch.ones(2))
    model = model_of(*(nn.Linear(4, 8) for _ in range(3)))
    for layer in model.layers:
        layer.rotary = rotary  # found in the first layer alone
    assert first_of_kinds(model) == {0}


@pytest.mark.parametrize(
    "name, holder",
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.k_proj.weight_scale_inv", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.0.self_attn.fused_qkv_a_proj"),
        ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_norm"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj"),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "model.layers.0.mlp.down_proj"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.experts"),
        ("model.layers.0.block_sparse_moe.experts.7.w2.weight_scale_inv", "model.layers.0.block_sparse_moe.experts"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.mlp.shared_experts.gate_up_proj"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_tensors_of_one_module_are_loaded_together(name, holder):
    assert holder_of(name) == holder
