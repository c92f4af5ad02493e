"""The engine's CPU layers are the reference arithmetic, bit for bit, without an engine around them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.precision.formats import blockwise_format

cpu_kernels = pytest.importorskip("megatron_fp8rl.rollout.vllm_plugin.cpu.cpu_layers")

NUM_EXPERTS, TOP_K, HIDDEN, FFN = 8, 2, 256, 128


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_linear(scales):
    method = cpu_kernels.EmulatedFp8LinearMethod(blockwise_format(scales))
    data, scale_inv = blockwise.quantize_weight(rand(384, 256), scales)
    layer = nn.Module()
    layer.weight, layer.weight_scale_inv = parameter(data), parameter(scale_inv)
    layer.orig_dtype = torch.bfloat16
    method.process_weights_after_loading(layer)
    x, bias = rand(33, 256), rand(384)
    expected = blockwise.linear(x, data, scale_inv, scales)
    assert torch.equal(method.apply(layer, x), expected)
    assert torch.equal(method.apply(layer, x, bias), expected + bias)
    assert torch.equal(layer.weight.view(torch.uint8), data.view(torch.uint8))  # still there to be digested


def moe_layer(**weights: Tensor) -> nn.Module:
    """The attributes of vLLM's RoutedExperts that the methods read."""
    layer = nn.Module()
    for name, tensor in weights.items():
        setattr(layer, name, parameter(tensor))
    layer.layer_name, layer.orig_dtype = "model.layers.0.mlp.experts", torch.bfloat16
    layer.use_grouped_topk, layer.top_k, layer.renormalize = False, TOP_K, True
    layer.topk_group = layer.num_expert_group = layer.custom_routing_function = layer.e_score_correction_bias = None
    layer.scoring_func, layer.routed_scaling_factor = "softmax", 1.0
    layer.activation = cpu_kernels.MoEActivation.SILU
    return layer


def mixture(x: Tensor, logits: Tensor, multiply) -> tuple[Tensor, Tensor]:
    """(output, expert ids), expert by expert and in float32 where the kernels promise it.

    An expert's tokens are multiplied at once, as the kernels do: a BLAS adds the terms of a single row in another order
    than those of several, which moves a BF16 number by its last place here and there, and that an FP8 number by its
    own.
    """
    probabilities, ids = logits.float().softmax(-1).topk(TOP_K)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    result = torch.zeros(x.shape)
    for expert in range(NUM_EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = multiply(x[token], "w13", expert).chunk(2, -1)
        product = multiply(F.silu(gate) * up, "w2", expert).float()
        result.index_add_(0, token, product * probabilities[token, slot, None])
    return result, ids


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Expert ids as vLLM's capturer gets them."""
    ids: list[Tensor] = []
    runner = SimpleNamespace(router=SimpleNamespace(capture_fn=ids.append), routed_scaling_factor=1.0)
    context = SimpleNamespace(no_compile_layers={"model.layers.0.mlp.experts": runner})
    monkeypatch.setattr(cpu_kernels, "get_forward_context", lambda: context)
    return ids


@pytest.mark.parametrize("kind", ["bf16", "pow2", "fp32"])
def test_experts(kind, captured):
    whole = {"w13": rand(NUM_EXPERTS, 2 * FFN, HIDDEN) / 16, "w2": rand(NUM_EXPERTS, HIDDEN, FFN) / 16}
    scale_kind = "fp32" if kind == "fp32" else "pow2"
    quantized = {n: [blockwise.quantize_weight(w, scale_kind) for w in ws] for n, ws in whole.items()}
    if kind == "bf16":
        method = object.__new__(cpu_kernels.ReadableMoEMethod)
        layer = moe_layer(w13_weight=whole["w13"], w2_weight=whole["w2"])
    else:
        method = object.__new__(cpu_kernels.EmulatedFp8MoEMethod)
        method.fmt = blockwise_format(kind)
        stacked = {f"{n}_weight": torch.stack([q for q, _ in pairs]) for n, pairs in quantized.items()}
        scales = {f"{n}_weight_scale_inv": torch.stack([s for _, s in pairs]) for n, pairs in quantized.items()}
        layer = moe_layer(**stacked, **scales)
    method.process_weights_after_loading(layer)

    def multiply(rows: Tensor, name: str, expert: int) -> Tensor:
        if kind == "bf16":
            return F.linear(rows, whole[name][expert])
        return blockwise.linear(rows, *quantized[name][expert], kind)

    x, logits = rand(50, HIDDEN), rand(50, NUM_EXPERTS)
    expected, ids = mixture(x, logits, multiply)
    actual = method.apply_monolithic(layer, x, logits)
    assert torch.equal(captured[0].sort(-1).values, ids.sort(-1).values.int())
    # The order of the two terms, and of a softmax over two or eight logits, is free in float32: one last place of BF16.
    torch.testing.assert_close(actual.float(), expected, rtol=2**-7, atol=2**-12)
