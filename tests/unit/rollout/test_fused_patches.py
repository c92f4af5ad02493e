"""An engine's norms, SwiGLU and quantization, fused by the patch, in Triton's interpreter."""

import pytest
import torch

from megatron_fp8rl.kernels.blockwise import quantize_activation
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2
from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    pytest.importorskip("vllm")
    assert_passes_interpreted(__file__)


class Layers:
    """Modules of vLLM without their constructors, which need a GPU; ``calls`` has shapes that vLLM's kernel got."""

    def __init__(self, monkeypatch, is_aligned: bool):
        from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
        from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
        from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

        from megatron_fp8rl.rollout.vllm_plugin import patches_fused

        self.calls: list[tuple[int, ...]] = []

        def quantize(layer, x):
            self.calls.append(tuple(x.shape))
            data, scales = quantize_activation(x, "pow2")
            return data, scales.t().contiguous().t()

        def swiglu(layer, x):
            gate, up = x.float().chunk(2, -1)
            return (gate * gate.sigmoid()).bfloat16() * up.bfloat16()

        monkeypatch.setattr(QuantFP8, "forward_cuda", quantize)
        monkeypatch.setattr(SiluAndMul, "forward_cuda", swiglu)
        for kind in (RMSNorm, GemmaRMSNorm, GeluAndMul):
            monkeypatch.setattr(kind, "forward_cuda", kind.forward_cuda)
        unsplit = vars(MiniMaxText01RMSNormTP)["forward_qkv"]
        monkeypatch.setattr(MiniMaxText01RMSNormTP, "forward_qkv", unsplit)
        patches_fused.fuse_norms(BLOCKWISE_POW2)

        def bare(kind, **attributes):
            layer = kind.__new__(kind)
            torch.nn.Module.__init__(layer)
            vars(layer).update(attributes)
            return layer

        def norm(width):
            generator = torch.Generator().manual_seed(width)
            weight = torch.nn.Parameter((1 + torch.randn(width, generator=generator) / 4).bfloat16())
            layer = bare(RMSNorm, has_weight=True, variance_size_override=None, variance_epsilon=1e-6)
            layer.weight = weight
            return layer

        self.norm, self.swiglu, self.heads = norm, bare(SiluAndMul), MiniMaxText01RMSNormTP
        self.gemma, self.geglu = bare(GemmaRMSNorm, variance_epsilon=1e-6), bare(GeluAndMul, approximate="tanh")
        form = {"is_group_quant": True, "static": False, "group_size": 128, "column_major_scales": True}
        self.quantize = bare(QuantFP8, **form, tma_aligned_scales=is_aligned)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_quantized(actual, x):
    data, scales = quantize_activation(x, "pow2")
    assert torch.equal(actual[0].view(torch.uint8), data.view(torch.uint8)) and torch.equal(actual[1], scales)


@in_interpreter
@pytest.mark.parametrize("is_aligned", [True, False])
def test_a_linear_reads_bytes_that_the_norm_before_it_made(is_aligned, monkeypatch):
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    layers = Layers(monkeypatch, is_aligned)
    norm, x = layers.norm(256), numbers(5, 256)
    for call in range(3):
        stream = numbers(5, 256, seed=1 + call)
        total = x + stream
        out, summed = norm.forward_cuda(x, stream)
        assert summed is stream and torch.equal(summed, total)
        assert torch.equal(out, rms_norm(total, norm.weight.data, 1e-6)[0])
        actual = layers.quantize.forward_cuda(out.view(-1, 256))
        assert_quantized(actual, out)
    assert layers.calls == [(5, 256)], "only the first call of a norm needs vLLM's kernel"
    assert actual[1].stride() == ((1, 8) if is_aligned else (1, 5))


@in_interpreter
def test_swiglu_and_its_bytes(monkeypatch):
    layers = Layers(monkeypatch, True)
    for call in range(2):
        out = layers.swiglu.forward_cuda(numbers(6, 512, seed=call))
        assert_quantized(layers.quantize.forward_cuda(out), out)
    assert layers.calls == [(6, 256)]


@in_interpreter
def test_bytes_are_those_of_the_tensor_that_is_asked_for(monkeypatch):
    layers = Layers(monkeypatch, True)
    first, second = layers.norm(256), layers.norm(128)
    for call in range(3):
        a = first.forward_cuda(numbers(4, 256, seed=call))
        assert_quantized(layers.quantize.forward_cuda(a), a)
        b = second.forward_cuda(numbers(4, 128, seed=call))
        assert_quantized(layers.quantize.forward_cuda(a), a)  # no longer the latest
        other = numbers(4, 128, seed=9)
        assert_quantized(layers.quantize.forward_cuda(other), other)
    assert not hasattr(second, "fp8rl_aligns_scales"), f"nothing reads the bytes of {b.shape}"


@in_interpreter
def test_heads_are_normed_where_they_lie(monkeypatch):
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    layers = Layers(monkeypatch, True)
    norm, projection = layers.norm(64), numbers(3, 6 * 64)
    heads = projection[:, 64:256].unflatten(1, (3, 64))
    assert torch.equal(norm.forward_cuda(heads), rms_norm(heads.contiguous(), norm.weight.data, 1e-6)[0])


@in_interpreter
def test_gemmas_norm_multiplies_by_one_plus_its_weight_and_its_feed_forward_rounds_twice(monkeypatch):
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    layers, x, stream = Layers(monkeypatch, True), numbers(5, 256), numbers(5, 256, seed=1)
    layers.gemma.weight = torch.nn.Parameter(numbers(256, seed=2) / 4)
    expected, _ = rms_norm(x + stream, 1 + layers.gemma.weight.data.float(), 1e-6)
    out, _ = layers.gemma.forward_cuda(x, stream)
    assert torch.equal(out, expected)
    assert_quantized(layers.quantize.forward_cuda(out), out)
    gate, up = x.chunk(2, -1)
    assert torch.equal(layers.geglu.forward_cuda(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@in_interpreter
def test_a_norm_of_another_kind_is_refused(monkeypatch):
    norm = Layers(monkeypatch, True).norm(64)
    with pytest.raises(ValueError, match="needs a weight and BF16 rows"):
        norm.forward_cuda(numbers(3, 64).float())


@in_interpreter
def test_heads_are_normed_and_rotated_at_once_unless_a_probe_reads_the_norms(monkeypatch):
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.qwen3 import Qwen3Attention
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

    from megatron_fp8rl.kernels.triton.rotate import norm_and_rotate_
    from megatron_fp8rl.rollout.vllm_plugin import patches_fused

    layers, projection = Layers(monkeypatch, True), numbers(5, (4 + 2 + 2) * 64)
    table, positions, seen = numbers(9, 64), torch.tensor([3, 0, 8, 3, 1]), []
    monkeypatch.setattr(Qwen3Attention, "forward", lambda *_: "plain")
    monkeypatch.setattr(Qwen3MoeAttention, "forward", Qwen3MoeAttention.forward)
    patches_fused.fuse_heads()
    rotary = RotaryEmbedding.__new__(RotaryEmbedding)
    torch.nn.Module.__init__(rotary)
    vars(rotary).update(use_flashinfer=False, is_neox_style=True, rotary_dim=64)
    monkeypatch.setattr(RotaryEmbedding, "_match_cos_sin_cache_dtype", lambda *_: table)
    attention = Qwen3Attention.__new__(Qwen3Attention)
    torch.nn.Module.__init__(attention)
    sizes = dict(head_dim=64, num_heads=4, num_kv_heads=2, q_size=256, kv_size=128)
    vars(attention).update(sizes, qkv_proj=lambda x: (x.clone(), None), attn=lambda *qkv: torch.cat(qkv, -1))
    attention.o_proj, attention.rotary_emb = lambda x: (x, None), rotary
    attention.q_norm, attention.k_norm = layers.norm(64), layers.norm(64)
    weights, expected = (attention.q_norm.weight.data,) * 2, projection.clone()
    norm_and_rotate_(expected, 4, 2, weights, 1e-6, positions, table)
    assert torch.equal(attention.forward(positions, projection), expected)
    assert torch.equal(expected[:, 384:], projection[:, 384:])
    attention.q_norm.register_forward_hook(lambda *_: seen.append(1))
    assert attention.forward(positions, projection) == "plain"


@in_interpreter
def test_norms_of_all_query_and_all_key_heads(monkeypatch):
    """The definition in integers, of rows that are not adjacent."""
    from tests.unit.kernels.test_norm_kernel import EPS, normed

    layers, qkv = Layers(monkeypatch, True), numbers(5, 512)
    norms = [layers.norm(width) for width in (256, 128)]
    for norm in norms:
        norm.tp_world, norm.variance_epsilon = 1, EPS
    query, key, value = layers.heads.forward_qkv(*norms, qkv, 256, 128)
    assert torch.equal(value, qkv[:, 384:])
    for actual, norm, x in zip((query, key), norms, (qkv[:, :256], qkv[:, 256:384])):
        assert torch.equal(actual, normed(x, norm.weight.data))
