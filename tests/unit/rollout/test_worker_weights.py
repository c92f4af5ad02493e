"""A worker of an engine: what it compares and digests of its weights, and how attention divides a batch."""

import pytest
import torch
from torch import nn

from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.names.layouts import EngineLayout
from megatron_fp8rl.weight_sync.digest import digests, widened
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
    generator, scales, result = torch.Generator().manual_seed(2), {}, []
    for part in (p for p in parts if not p.is_scale):
        data = torch.randn(part.shape, generator=generator).bfloat16()
        if part.transfer.is_fp8:
            data, scales[part.name, part.start // 128] = quantize_weight(data, "pow2")
        result.append((part, data.clone(), data))
    for part in (p for p in parts if p.is_scale):
        scale = scales[part.transfer.name, part.start]
        result.append((part, scale.clone(), scale))
    return result


def pieces(placed: list, name: str) -> list:
    result = [item for item in placed if item[0].name == name]
    assert len(result) > 2
    return result


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
    held = worker.KernelDigests()
    before = held(model)
    assert before == from_scratch(model) and len(before) == 2 + 4 * 3 * 2
    experts = model.mlp.experts.routed_experts
    experts.w13_weight.data[2, 200, 5] = 3.0
    experts.w2_weight_scale_inv.data[1] *= 2
    after = held(model)
    assert changed(before, after) == {"mlp.experts.2.up_proj.weight", "mlp.experts.1.down_proj.weight_scale_inv"}
    assert after == from_scratch(model)


def test_a_copy_in_another_type_counts_as_what_was_sent_until_it_holds_more(model):
    held = worker.KernelDigests()
    before = held(model)
    model.gate.weight.data[0, 0] = 0.5
    after = held(model)
    assert changed(before, after) == {"gate.weight"}
    assert after["gate.weight"] == digests([model.gate.weight.data.bfloat16()])[0]
    model.gate.weight.data[0, 0] += 2**-20
    assert held(model)["gate.weight"] == digests([widened(model.gate.weight.data)])[0]


def test_memory_that_moves_is_found(model):
    held = worker.KernelDigests()
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
    held = worker.KernelDigests()
    before, table = held(model, 1), held.table(model, 1)
    monkeypatch.setattr(held, "_prepare", lambda model: pytest.fail("prepared again"))
    model.norm.weight.data[3] = 5.0
    assert changed(before, held(model, 2)) == {"norm.weight"}
    assert held.table(model, 2) is table
    assert table.is_current(model, is_reloaded=False)
    model.norm.weight = nn.Parameter(model.norm.weight.data.clone(), requires_grad=False)
    assert not table.is_current(model, is_reloaded=False)


def test_weights_that_a_reload_adds_are_found(model):
    held = worker.KernelDigests()
    before = held(model, 1)
    model.mlp.norm = Norm(torch.randn(16).bfloat16())
    assert set(held(model, 2)) - set(before) == {"mlp.norm.weight"}


class Latent(nn.Module):
    """What vLLM's MLAAttention does with ``kv_b_proj``: factors that are no parameters."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = (linear,)
        self.process_weights_after_loading(torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        up, down = self.linear[0].weight.detach().to(act_dtype).chunk(2)
        self.W_UV, self.W_UK_T = up.clone(), down.t().clone()


def test_factors_of_latent_attention_follow_the_weights_of_a_reload():
    """The reload leaves their module out, because it has no weights."""
    model = nn.Module()
    model.up = nn.Linear(16, 8, bias=False)
    model.attn = Latent(model.up)
    derived, kept = worker.DerivedTensors(model, torch.float32), (model.attn.W_UV, model.attn.W_UK_T)
    assert model.attn not in receiver.Reloaded(model, [0]).modules()
    for change in (derived.keep_in_place, derived.refresh):  # after a reload, after direct writes
        model.up.weight.data.normal_()
        change()
        up, down = model.up.weight.detach().chunk(2)
        assert torch.equal(model.attn.W_UV, up) and torch.equal(model.attn.W_UK_T, down.t())
        assert model.attn.W_UV is kept[0] and model.attn.W_UK_T is kept[1], "CUDA graphs read these"


pytest.importorskip("vllm")
CPU = torch.device("cpu")


def test_sequences_that_decode_are_one_part_and_prompts_follow_in_parts_of_a_bounded_copy(monkeypatch):
    from megatron_fp8rl.rollout.vllm_plugin import patches_attention

    monkeypatch.setattr(patches_attention, "_COPIED_TOKENS", 100)
    counts, lengths = [1, 4, 0, 1, 7, 2, 90, 3], [9, 40, 0, 5, 30, 60, 300, 20]
    parts = patches_attention.parts_of(counts, lengths, CPU)
    # The copies of a part are as long as the longest: 2 x 40 tokens, and 300 are more than fit, alone.
    assert [part.rows.tolist() for part in parts] == [[0, 3], [1, 4], [5], [6], [7]]
    assert [part.tokens.tolist() for part in parts[:3]] == [[0, 5], [1, 2, 3, 4, *range(6, 13)], [13, 14]]
    assert [part.starts.tolist() for part in parts[:3]] == [[0, 1, 2], [0, 4, 11], [0, 2]]
    assert [(part.max_query, part.max_length) for part in parts] == [(1, 9), (7, 40), (2, 60), (90, 300), (3, 20)]
    assert all(
        part.rows.dtype == part.tokens.dtype == torch.int64 and part.starts.dtype == torch.int32 for part in parts
    )


def test_a_batch_may_have_no_prompt_and_no_sequence_that_decodes():
    from megatron_fp8rl.rollout.vllm_plugin.patches_attention import parts_of

    assert [part.max_query for part in parts_of([1, 1], [3, 4], CPU)] == [1]
    assert [part.rows.tolist() for part in parts_of([5, 6], [5, 6], CPU)] == [[0, 1]]
    assert parts_of([0, 0], [0, 0], CPU) == []
