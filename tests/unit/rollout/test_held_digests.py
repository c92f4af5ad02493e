"""Digests of a worker's model that are worked out once: they follow what is written, and what moves, in the model."""

import pytest
import torch
from torch import nn

from megatron_fp8rl.weight_sync.digest import digests, widened

worker = pytest.importorskip("megatron_fp8rl.rollout.vllm_plugin.kernel_weights")


class Norm(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Experts(nn.Module):
    """What the digests read of vLLM's RoutedExperts: four experts in FP8."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape, blocks in (("w13", (4, 256, 128), (4, 2, 1)), ("w2", (4, 128, 128), (4, 1, 1))):
            data = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            setattr(self, f"{name}_weight", nn.Parameter(data, requires_grad=False))
            scale = torch.rand(blocks, generator=generator)
            setattr(self, f"{name}_weight_scale_inv", nn.Parameter(scale, requires_grad=False))


@pytest.fixture
def model() -> nn.Module:
    model = nn.Module()
    model.norm = Norm(torch.randn(16).bfloat16())
    model.gate = Norm(torch.randn(4, 16).bfloat16().float())  # a router's copy in another type
    model.mlp = nn.Module()
    model.mlp.experts = nn.Module()
    model.mlp.experts.routed_experts = Experts()
    return model


def from_scratch(model: nn.Module) -> dict[str, str]:
    held = dict(worker.kernel_weights(model))
    held["gate.weight"] = held["gate.weight"].bfloat16()
    return dict(zip(held, digests(map(widened, held.values())), strict=True))


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_what_is_written_shows(model):
    held = worker.HeldDigests()
    before = held(model)
    assert before == from_scratch(model) and len(before) == 2 + 4 * 3 * 2
    experts = model.mlp.experts.routed_experts
    experts.w13_weight.data[2, 200, 5] = 3.0
    experts.w2_weight_scale_inv.data[1] *= 2
    after = held(model)
    assert changed(before, after) == {"mlp.experts.2.up_proj.weight", "mlp.experts.1.down_proj.weight_scale_inv"}
    assert after == from_scratch(model)


def test_a_copy_in_another_type_counts_as_what_was_sent_until_it_holds_more(model):
    held = worker.HeldDigests()
    before = held(model)
    model.gate.weight.data[0, 0] = 0.5
    after = held(model)
    assert changed(before, after) == {"gate.weight"}
    assert after["gate.weight"] == digests([model.gate.weight.data.bfloat16()])[0]
    model.gate.weight.data[0, 0] += 2**-20
    assert held(model)["gate.weight"] == digests([widened(model.gate.weight.data)])[0]


def test_memory_that_moves_is_found(model):
    held = worker.HeldDigests()
    before = held(model)
    experts = model.mlp.experts.routed_experts
    moved = experts.w2_weight.data.clone()
    moved[3, 0, 0] = -7.0
    experts.w2_weight.data.zero_()
    experts.w2_weight = nn.Parameter(moved, requires_grad=False)
    assert changed(before, held(model)) == {"mlp.experts.3.down_proj.weight"}
    experts.w2_weight = nn.Parameter(moved[:0], requires_grad=False)
    with pytest.raises(RuntimeError, match="repacked this weight"):
        held(model)


def test_a_reload_that_moves_nothing_costs_nothing(model, monkeypatch):
    held = worker.HeldDigests()
    before, table = held(model, 1), held.table(model, 1)
    monkeypatch.setattr(held, "_prepare", lambda model: pytest.fail("prepared again"))
    model.norm.weight.data[3] = 5.0
    assert changed(before, held(model, 2)) == {"norm.weight"}
    assert held.table(model, 2) is table
    assert table.is_current(model, is_reloaded=False)
    model.norm.weight = nn.Parameter(model.norm.weight.data.clone(), requires_grad=False)
    assert not table.is_current(model, is_reloaded=False)


def test_weights_that_a_reload_adds_are_found(model):
    held = worker.HeldDigests()
    before = held(model, 1)
    model.mlp.norm = Norm(torch.randn(16).bfloat16())
    assert set(held(model, 2)) - set(before) == {"mlp.norm.weight"}
