"""Experts that read gathered tokens by index, on a Hopper GPU, against CPU kernels and against sorted copies."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig, RouterConfig
from megatron_fp8rl.kernels.deep_gemm import has_deep_gemm
from megatron_fp8rl.kernels.expert_slots import Choice, sum_rows
from megatron_fp8rl.kernels.fused_moe import pack, permute_quantize
from megatron_fp8rl.kernels.routing import routed_scores
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2
from megatron_fp8rl.trainer.model.router import rounded_linear
from tests.helpers.hopper import ON_HOPPER
from tests.helpers.training import MOE, alone, continue_training, run_config
from tests.tolerances import BF16_NEIGHBOURS, FP8_FIRST_LOSS

pytestmark = [*ON_HOPPER, pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")]


@pytest.mark.parametrize(("tokens", "experts", "most"), [(16384, 64, 8), (1000, 128, 8), (77, 3, 2), (1, 16, 4)])
def test_tokens_and_sums_are_those_of_a_cpu(tokens, experts, most):
    draw = torch.Generator().manual_seed(tokens)
    scores = torch.full((tokens, experts), -1.0)
    chosen = torch.rand(tokens, experts, generator=draw).topk(min(most, experts), dim=1).indices
    scores.scatter_(1, chosen, torch.rand(tokens, chosen.shape[1], generator=draw))
    scores = torch.where(torch.rand(tokens, experts, generator=draw) < 0.6, scores, -1.0)  # the rest is on other ranks
    actual = []
    for device, num_rows in (("cuda", None), ("cuda", int((scores >= 0).sum())), ("cpu", None)):
        own = scores.to(device).requires_grad_()
        slots = Choice.of(own, num_rows).slots(most)
        y = torch.randn(slots.layout.num_tokens, 2048, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        (slots.probs_R * torch.arange(1.0, 1 + len(slots.probs_R), device=device)).sum().backward()
        sums = [sum_rows(y, slots.rows_TK, probs).cpu() for probs in (None, slots.probs_R.detach())]
        rows = slice(int(slots.layout.offsets[-1]))
        exact = slots.layout.sources[rows], slots.layout.rows[rows], slots.rows_TK, slots.probs_R.detach(), own.grad
        actual.append(([tensor.cpu() for tensor in exact], sums))
    *ours, (others, expected) = actual
    for exact, sums in ours:
        assert all(torch.equal(a, b) for a, b in zip(exact, others, strict=True))
        assert torch.equal(sums[0], expected[0])
        torch.testing.assert_close(sums[1], expected[1], **BF16_NEIGHBOURS)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "normalize"), [(8192, 128, 8, True), (1000, 60, 4, False)])
def test_scores_of_a_router_are_those_of_a_cpu(tokens, experts, top_k, normalize):
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts))
    logits += 1e-3 * torch.arange(experts)  # BF16 has equal logits, of which a CPU may take others
    actual = []
    for device in ("cuda", "cpu"):
        own = logits.to(device).requires_grad_()
        scores = routed_scores(own, top_k, RouterConfig(normalize=normalize))
        (scores.clamp(min=0) * torch.arange(experts, device=device).sin()).sum().backward()
        actual.append((scores.detach().cpu(), own.grad.cpu()))
    for ours, theirs in zip(*actual, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_gradients_of_a_router_are_those_of_float64():
    draw = torch.Generator().manual_seed(7)
    hidden, weight = (
        torch.randn(4000, 2048, generator=draw).bfloat16(),
        torch.randn(128, 2048, generator=draw).bfloat16(),
    )
    grad = torch.randn(4000, 128, generator=draw)
    own = [hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()]
    rounded_linear(*own).backward(grad.cuda())
    for actual, expected in zip(
        own, (grad.double() @ weight.double(), grad.double().t() @ hidden.double()), strict=True
    ):
        torch.testing.assert_close(actual.grad.cpu().double(), expected, rtol=2**-8, atol=2e-4 * expected.std().item())


@pytest.mark.parametrize("columns", [False, True])
def test_packed_rows_and_their_operands_are_those_of_a_cpu(columns):
    draw = torch.Generator().manual_seed(2)
    x = (torch.randn(1000, 2048, generator=draw) * torch.exp(4 * torch.randn(1000, 1, generator=draw))).bfloat16()
    scores = torch.rand(1000, 16, generator=draw)
    scores = torch.where(scores < 0.3, scores, -1.0)
    actual = []
    for device in ("cuda", "cpu"):
        packed = pack(x.to(device))
        layout = Choice.of(scores.to(device)).slots(16).layout
        made = permute_quantize(packed, layout, BLOCKWISE_POW2, columns=columns)
        parts = [packed.data[:, :2064], made.rows.view(torch.uint8), made.row_scales]
        parts += [made.columns.view(torch.uint8), made.column_scales] if columns else []
        real = (layout.rows >= 0).cpu()
        actual.append([part.cpu() if len(part) != len(real) else part.cpu()[real] for part in parts])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "blockwise"])
def test_updates_are_those_of_sorted_copies(precision):
    from megatron_fp8rl.trainer.policy import Policy

    model = replace(MOE, num_layers=2, hidden_size=256, moe_ffn_hidden_size=256)
    cfg = replace(
        run_config(model=model),
        precision=PrecisionConfig(trainer=precision, kernels={"experts": "deep_gemm"}, exact=False),
    )
    actual = []
    with alone(cfg) as parallel:
        for dispatch in ("alltoall", "gather"):
            policy = Policy.build(replace(cfg, parallel=replace(cfg.parallel, dispatch=dispatch)), parallel)
            actual.append(continue_training(policy, 2)[0])
    for ours, theirs in zip(*actual, strict=True):
        assert ours["train/loss/mean"] == pytest.approx(theirs["train/loss/mean"], abs=FP8_FIRST_LOSS)
        assert ours["train/grad_norm/max"] == pytest.approx(theirs["train/grad_norm/max"], rel=0.02)
