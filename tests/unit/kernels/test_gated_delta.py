"""The gated delta rule against transformers, and the same bits however sequences are cut or packed."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from megatron_fp8rl.config import GdnConfig
from megatron_fp8rl.kernels import gated_delta

GDN = GdnConfig(num_key_heads=2, num_value_heads=6, key_head_dim=12, value_head_dim=10, conv_width=3)
LENGTHS = (5, 1, 17, 2)
CHANNELS, HIDDEN = 2 * 2 * 12 + 6 * 10, 16


def inputs(dtype: torch.dtype, lengths=LENGTHS) -> list[torch.Tensor]:
    """(mixed, b, a, convolution, A_log, dt_bias)"""
    generator = torch.Generator().manual_seed(0)
    num = sum(lengths)
    shapes = ((num, CHANNELS), (num, 6), (num, 6), (CHANNELS, 3), (6,), (6,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(tensors, lengths, before=None):
    return gated_delta.gated_delta_net(*tensors[:3], lengths, *tensors[3:], GDN, before)


CHUNKS = reference.torch_chunk_gated_delta_rule.__wrapped__  # not the kernel of fla, where that is installed


def test_layer_and_gradients_equal_transformers(monkeypatch):
    """The whole mixer in float32: projections, convolution, recurrence and gated norm."""
    monkeypatch.setattr(reference, "torch_chunk_gated_delta_rule", CHUNKS)
    monkeypatch.setattr(reference, "causal_conv1d_fn", reference.causal_conv1d_fn.__wrapped__)
    torch.manual_seed(1)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12,
        linear_value_head_dim=10, linear_conv_kernel_dim=3, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    layer = reference.Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5)
    hidden = torch.randn(1, 9, HIDDEN, requires_grad=True)
    expected = layer(hidden)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [hidden, *layer.parameters()], upstream)

    mixed, gate, b, a = gated_delta.split_heads(layer.in_proj_qkvz(hidden[0]), layer.in_proj_ba(hidden[0]), GDN)
    tensors = [mixed, b, a, layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias]
    normed = gated_delta.gated_norm(run(tensors, [9])[0], gate, layer.norm.weight, config.rms_norm_eps)
    actual = layer.out_proj(normed)[None]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.1
    gradients = torch.autograd.grad(actual, [hidden, *layer.parameters()], upstream)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("cuts", [(1, 4), (3, 1, 1), (1,) * 5], ids=str)
def test_chunks_give_the_bits_of_the_whole(cuts):
    tensors = inputs(torch.bfloat16)
    tensors = [x[:5] for x in tensors[:3]] + tensors[3:]
    whole, last = run(tensors, [5])
    parts, state = [], None
    for chunk in zip(*(x.split(list(cuts)) for x in tensors[:3]), strict=True):
        out, state = run([*chunk, *tensors[3:]], [len(chunk[0])], state)
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole) and whole.any()
    assert torch.equal(state.state_NHKV, last.state_NHKV) and torch.equal(state.inputs_NWC, last.inputs_NWC)


def test_packed_sequences_do_not_see_each_other():
    tensors = inputs(torch.bfloat16)
    packed, states = run(tensors, LENGTHS)
    parts = zip(*(x.split(list(LENGTHS)) for x in tensors[:3]), packed.split(list(LENGTHS)), strict=True)
    for n, (*own, out) in enumerate(parts):
        alone, state = run([*own, *tensors[3:]], [LENGTHS[n]])
        assert torch.equal(alone, out)
        assert torch.equal(state.state_NHKV[0], states.state_NHKV[n])
        assert torch.equal(state.inputs_NWC[0], states.inputs_NWC[n])


def test_chunks_of_a_trainer_on_gpus_equal_the_recurrence(monkeypatch):
    """In float32, with PyTorch's convolution and transformers' chunks in place of fla's kernels: which tensor is which
    argument, and gradients. tests/gpu/test_delta_net_gpu.py has the kernels."""

    def convolve(x_1TC, weight_CW, *, activation, cu_seqlens, cu_seqlens_cpu):
        assert activation == "silu" and torch.equal(cu_seqlens, cu_seqlens_cpu)
        parts = []
        for x_TC in x_1TC[0].split(cu_seqlens.diff().tolist()):
            padded = F.pad(x_TC.t()[None], (weight_CW.shape[1] - 1, 0))
            parts.append(F.silu(F.conv1d(padded, weight_CW[:, None], groups=len(weight_CW)))[0].t())
        return torch.cat(parts)[None], None

    def delta_rule(*tensors, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu):
        heads = tensors[2].shape[2] // tensors[0].shape[2]
        tensors = [x.repeat_interleave(heads, dim=2) for x in tensors[:2]] + list(tensors[2:])
        parts = zip(*(x.split(cu_seqlens.diff().tolist(), dim=1) for x in tensors), strict=True)
        settings = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "chunk_size": 8}
        return torch.cat([CHUNKS(*part, **settings)[0] for part in parts], dim=1), None

    monkeypatch.setattr(gated_delta, "_fla", lambda: (convolve, delta_rule, None))
    tensors = [x.requires_grad_() for x in inputs(torch.float32)]
    expected, _ = run(tensors, LENGTHS)
    actual = gated_delta.chunked(*tensors[:3], LENGTHS, *tensors[3:], GDN)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad(out, tensors, upstream) for out in (actual, expected))
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())
