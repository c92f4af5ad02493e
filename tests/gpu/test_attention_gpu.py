"""cuDNN's attention over packs against a loop over sequences in float32 on one GPU; -s shows decibels and times."""

import math
import types

import pytest
import torch

from megatron_fp8rl.precision.hardware import installed_packages
from megatron_fp8rl.trainer.model import attention_te
from megatron_fp8rl.trainer.model.attention import PackedAttention
from megatron_fp8rl.trainer.model.packed_sequences import PackedSequences, plan_pack
from megatron_fp8rl.trainer.model.rotary import Rotary
from tests.tolerances import FUSED_ATTENTION_DECIBELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine"),
]

# (query heads, key and value heads, features of a key head, features of a value head)
HEADS = {"mha64": (4, 4, 64, 64), "gqa64": (8, 2, 64, 64), "gqa128": (8, 2, 128, 128), "mla": (4, 4, 192, 128)}
LENGTHS = (1, 130, 17, 1, 500, 64, 7)
ALIGNED = (8, 136, 24, 8, 504, 64, 16)  # as context parallelism of up to 4 ranks needs


def _tensors(heads: tuple[int, int, int, int], num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    num_heads, num_groups, key_dim, value_dim = heads
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(num_heads, key_dim), (num_groups, key_dim), (num_groups, value_dim), (num_heads, value_dim)]
    return [torch.randn(num_tokens, *s, generator=generator, device="cuda").bfloat16() for s in shapes]


def _exact(query, key, value, lengths, scale):
    """[T, H, V] in float32, sequence by sequence."""
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value))):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(scores.shape[-2:], device="cuda", dtype=torch.bool).triu(1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def _decibels(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal over error."""
    assert actual.isfinite().all()
    error = (actual.double() - exact.double()).square().sum().clamp(min=1e-300)
    return float(10 * torch.log10(exact.double().square().sum() / error))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_output_and_gradients(heads, cp_size):
    """Runs all context-parallel ranks one after another and joins their keys and values."""
    lengths = LENGTHS if cp_size == 1 else ALIGNED
    query, key, value, grad = _tensors(HEADS[heads], sum(lengths))
    scale = query.shape[-1] ** -0.5
    exact_inputs = [x.float().requires_grad_() for x in (query, key, value)]
    exact = _exact(*exact_inputs, lengths, scale)
    exact_grads = torch.autograd.grad(exact, exact_inputs, grad.float())

    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    plans = [plan_pack(lengths, cp_size, rank, torch.device("cuda")) for rank in range(cp_size)]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)[:-1]
    local = torch.tensor([n // cp_size for n in lengths], device="cuda")
    rows = [plan.positions_T + starts.repeat_interleave(local) for plan in plans]  # packed positions of each rank
    outputs = []
    for plan, own in zip(plans, rows):
        segments = plan.segments
        k, v = (x[torch.cat(rows)] if cp_size > 1 else x for x in inputs[1:])
        if segments.key_rows is not None:
            k, v = k[segments.key_rows], v[segments.key_rows]
        q = inputs[0][own] if cp_size > 1 else inputs[0]
        assert attention_te.supports(q, k, v, segments)
        outputs.append(attention_te.attend(q, k, v, segments, scale))
    order = torch.cat(rows)
    out = torch.cat(outputs)
    grads = torch.autograd.grad(out, inputs, grad[order])
    found = {"out": _decibels(out, exact[order])}
    found |= {name: _decibels(g, e) for name, g, e in zip(("dq", "dk", "dv"), grads, exact_grads)}
    print(f"\n{heads} cp{cp_size}", {name: round(value, 1) for name, value in found.items()})
    assert min(found.values()) > FUSED_ATTENTION_DECIBELS, found


def _layer(dim: int, window: int | None = None) -> PackedAttention:
    rotary = Rotary(num_features=dim, first_feature=0, theta=10_000.0, scaling=None, interleaved=False)
    groups = types.SimpleNamespace(cp=types.SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    return PackedAttention(None, 1, None, "self", rotary=rotary, scale=dim**-0.5, window=window, pg_collection=groups)


def _packed(lengths, device: str, is_token_T=None) -> PackedSequences:
    return PackedSequences.of(torch.tensor([0, *lengths]).cumsum(0).int(), torch.device(device), is_token_T)


def test_the_layer_is_that_of_a_cpu_and_sees_the_same_magnitudes():
    *inputs, _ = _tensors(HEADS["gqa64"], sum(LENGTHS))
    is_token_T = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1)) < 0.7
    for x in inputs:
        x[~is_token_T.cuda()] *= 3.0  # what must not count
    results = []
    for device in ("cpu", "cuda"):
        layer = _layer(64)
        layer.amax = torch.zeros(3, device=device)
        packed = _packed(LENGTHS, device, is_token_T)
        out = layer(*(x.to(device) for x in inputs), packed_seq_params=packed)
        results.append((out.cpu(), layer.amax.cpu()))
    assert torch.equal(results[0][1], results[1][1])
    assert _decibels(results[1][0], results[0][0]) > FUSED_ATTENTION_DECIBELS


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_under_a_mask_are_those_of_a_cpu(dim):
    """As for Gemma 3, whose windows and heads of 256 cuDNN does not support in Transformer Engine."""
    lengths = (704, 1374, 30)
    *inputs, grad = _tensors((4, 1, dim, dim), sum(lengths))
    grads = []
    for device in ("cpu", "cuda"):
        own = [x.detach().to(device).requires_grad_() for x in inputs]
        out = _layer(dim, window=512)(*own, packed_seq_params=_packed(lengths, device))
        out.backward(grad.to(device).flatten(1))
        grads.append([x.grad.cpu() for x in own])
    found = [_decibels(actual, exact) for exact, actual in zip(*grads)]
    assert min(found) > FUSED_ATTENTION_DECIBELS, found


def test_a_layer_does_not_wait_for_the_device():
    """Only the first layer of a microbatch copies its plan; later layers and backward do not synchronize."""
    *inputs, _ = _tensors(HEADS["gqa128"], sum(LENGTHS))
    inputs = [x.requires_grad_() for x in inputs]
    layer, packed = _layer(128), _packed(LENGTHS, "cuda", torch.ones(sum(LENGTHS), dtype=torch.bool))
    layer.amax = torch.zeros(3, device="cuda")
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            layer(*inputs, packed_seq_params=packed).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_deterministic_gradients_are_the_same_bits_again():
    query, key, value, grad = _tensors(HEADS["gqa128"], 4096)
    segments = plan_pack((2048, 1000, 1048), 1, 0, torch.device("cuda")).segments
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            inputs = [x.clone().requires_grad_() for x in (query, key, value)]
            assert attention_te.supports(*inputs, segments)
            out = attention_te.attend(*inputs, segments, 128**-0.5)
            runs.append([out, *torch.autograd.grad(out, inputs, grad)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def test_shapes_without_a_kernel_are_attended_in_batches():
    """float32 has no fused kernel: the same layer, by PyTorch."""
    *inputs, _ = _tensors(HEADS["gqa64"], sum(LENGTHS))
    segments = plan_pack(LENGTHS, 1, 0, torch.device("cuda")).segments
    assert not attention_te.supports(*(x.float() for x in inputs), segments)
    out = _layer(64)(*(x.float() for x in inputs), packed_seq_params=_packed(LENGTHS, "cuda"))
    cpu = _layer(64)(*(x.float().cpu() for x in inputs), packed_seq_params=_packed(LENGTHS, "cpu"))
    assert _decibels(out.cpu(), cpu) > FUSED_ATTENTION_DECIBELS


def test_speed(capsys):
    """Qwen3-8B's heads, 16,384 tokens: one layer forward and backward, by cuDNN and in batches."""
    generator = torch.Generator().manual_seed(2)
    lengths = [int(n) for n in torch.randint(300, 3000, (8,), generator=generator)]
    lengths.append(16_384 - sum(lengths) if sum(lengths) < 16_384 else 16)
    query, key, value, grad = _tensors((32, 8, 128, 128), sum(lengths))
    layer, packed = _layer(128), _packed(lengths, "cuda")

    def milliseconds() -> float:
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for attempt in range(8):
            if attempt == 3:
                events[0].record()
            layer(*inputs, packed_seq_params=packed).backward(grad.flatten(1))
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 5

    fused_ms = milliseconds()
    supports = attention_te.supports
    attention_te.supports = lambda *args: False
    try:
        batched_ms = milliseconds()
    finally:
        attention_te.supports = supports
    forward = sum(2 * n * n * 32 * 128 for n in lengths)  # two products over half of the pairs
    with capsys.disabled():
        print(
            f"\nattention layer with rotation, {sum(lengths)} tokens: fused {fused_ms:.2f} ms "
            f"({3.5 * forward / fused_ms / 1e9:.0f} TFLOP/s), in batches {batched_ms:.2f} ms"
        )
    assert math.isfinite(fused_ms) and fused_ms < batched_ms
