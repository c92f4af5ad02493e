"""The comparison of a first publication: whether kernels hold, part by part, what vLLM's loaders were given."""

import pytest
import torch
from torch import nn

from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.names.layouts import EngineLayout
from megatron_fp8rl.weight_sync.plan import plan
from megatron_fp8rl.weight_sync.schedule import plan_schedule
from tests.helpers.plans import DENSE, LAYOUTS, table

receiver = pytest.importorskip("megatron_fp8rl.rollout.vllm_plugin.receiver")
NAME = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def placed() -> list:
    """A round of parts of 128 rows each, and kernels that hold them."""
    made = plan(DENSE, table(DENSE, "fp8"), LAYOUTS[0], EngineLayout())
    rounds = plan_schedule(made, DENSE, bucket_bytes=1 << 15).rounds
    parts = [part for number in rounds for message in number.messages for part in message.parts]
    generator, scales, found = torch.Generator().manual_seed(2), {}, []
    for part in (p for p in parts if not p.is_scale):
        data = torch.randn(part.shape, generator=generator).bfloat16()
        if part.transfer.is_fp8:
            data, scales[part.name, part.start // 128] = quantize_weight(data, "pow2")
        found.append((part, data.clone(), data))
    for part in (p for p in parts if p.is_scale):
        scale = scales[part.transfer.name, part.start]
        found.append((part, scale.clone(), scale))
    return found


def pieces(placed: list, name: str) -> list:
    found = [one for one in placed if one[0].name == name]
    assert len(found) > 2
    return found


def test_equal_kernels_pass(placed):
    receiver.compare(placed)


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("name", [NAME, f"{NAME}_scale_inv"])
def test_every_piece_of_a_tensor_counts(placed, name, number):
    _, held, _ = pieces(placed, name)[number]
    held.view(torch.uint8).view(-1)[held.itemsize - 1] ^= 1
    with pytest.raises(receiver.UnwritableKernel, match=NAME.replace(".", r"\.")):
        receiver.compare(placed)


def test_a_bf16_tensor_counts(placed):
    held = next(held for part, held, _ in placed if part.name == "model.norm.weight")
    held[3] += 1
    with pytest.raises(receiver.UnwritableKernel, match=r"model\.norm\.weight"):
        receiver.compare(placed)


def test_the_same_values_with_another_scale_pass(placed):
    """vLLM takes the smallest scale of a power of two; what is sent may have twice that and half the values."""
    _, _, data = pieces(placed, NAME)[1]
    _, _, scale = pieces(placed, f"{NAME}_scale_inv")[1]
    data.copy_(((data.float() * 0.5).to(torch.float8_e4m3fn).float() * 2).to(torch.float8_e4m3fn))  # exactly halved
    pieces(placed, NAME)[1][1].copy_(data)
    receiver.compare(placed)
    data.copy_((data.float() * 0.5).to(torch.float8_e4m3fn))
    scale.mul_(2)
    receiver.compare(placed)
    scale.mul_(2)
    with pytest.raises(receiver.UnwritableKernel):
        receiver.compare(placed)


def test_the_reload_walks_over_the_modules_whose_weights_it_is_sent():
    """Over others, such as rotary embeddings, vLLM warns that nothing was loaded."""
    model = nn.Module()
    model.embed, model.rotary = nn.Embedding(4, 4), nn.Module()
    model.rotary.register_buffer("cos_sin_cache", torch.zeros(4))
    model.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 4), "act": nn.SiLU()}) for _ in range(3))
    assert list(receiver.Reloaded(model, [1]).modules()) == [model.embed, model.layers[1]["up"]]
