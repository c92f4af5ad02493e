"""The gated delta rule against transformers, and the same bits however sequences are cut or packed."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from megatron_fp8rl.config import GdnConfig, OptimConfig, RunConfig
from megatron_fp8rl.kernels import gated_delta
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.preflight.activations import Tokens, layer_bytes
from tests import tolerances
from tests.helpers.models import small_model

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


def in_chunks(tensors, lengths):
    return gated_delta.chunked(*tensors[:3], lengths, *tensors[3:], GDN)


IN_CHUNKS = [1, 5, 63, 64, 65, 200]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["recurrence", "chunks"])
def test_layer_and_gradients_equal_transformers(is_chunked, monkeypatch):
    """The whole mixer in float32: projections, convolution, delta rule and gated norm."""
    chunks = reference.torch_chunk_gated_delta_rule.__wrapped__  # not the kernel of a package, where that is installed
    monkeypatch.setattr(reference, "torch_chunk_gated_delta_rule", chunks)
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
    num = 70 if is_chunked else 9
    hidden = torch.randn(1, num, HIDDEN, requires_grad=True)
    expected = layer(hidden)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [hidden, *layer.parameters()], upstream)

    mixed, gate, b, a = gated_delta.split_heads(layer.in_proj_qkvz(hidden[0]), layer.in_proj_ba(hidden[0]), GDN)
    tensors = [mixed, b, a, layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias]
    out = in_chunks(tensors, [num]) if is_chunked else run(tensors, [num])[0]
    normed = gated_delta.gated_norm(out, gate, layer.norm.weight, config.rms_norm_eps)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [IN_CHUNKS, IN_CHUNKS[::-1], [3]], ids=str)
def test_chunks_give_outputs_and_gradients_of_the_recurrence(lengths, dtype):
    """In BF16 the recurrence also rounds the convolution before silu."""
    tensors = [x.requires_grad_() for x in inputs(dtype, lengths)]
    pairs = []
    for out in (in_chunks(tensors, lengths), run(tensors, lengths)[0]):
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        pairs.append((out, *torch.autograd.grad(out, tensors, upstream)))
    for ours, theirs in zip(*pairs, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert difference < (tolerances.CHUNKED_FLOAT32 if dtype == torch.float32 else tolerances.CHUNKED_DELTA_RULE)


def test_chunks_of_packed_sequences_do_not_see_each_other():
    """Other tokens change neither outputs nor gradients of a sequence."""
    tensors = inputs(torch.float32, IN_CHUNKS)
    packed = [x.requires_grad_() for x in tensors]
    out = in_chunks(packed, IN_CHUNKS)
    rows = slice(1 + 5 + 63, 1 + 5 + 63 + 64)
    upstream = torch.randn(out[rows].shape, generator=torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad(out[rows], packed[:1], upstream)
    assert gradient[rows].any() and not gradient[: rows.start].any() and not gradient[rows.stop :].any()
    alone = in_chunks([*(x[rows] for x in tensors[:3]), *tensors[3:]], [64])
    torch.testing.assert_close(alone, out[rows], rtol=1e-5, atol=1e-6)


def test_decays_that_forget_everything_are_finite():
    """A token whose decay is exp(-1000) and later ones that forget nothing: differences of sums keep their digits."""
    tensors = inputs(torch.float32, [70])
    tensors[2][:] = -30.0
    tensors[2][20] = 1000.0
    tensors[4][:], tensors[5][:] = 0.0, 0.0
    expected, actual = run(tensors, [70])[0], in_chunks(tensors, [70])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_kept_bytes_are_those_of_the_memory_estimate():
    """What autograd keeps inside the checkpoint, for the ratio of widths of Qwen3-Next."""
    gdn = GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=128, value_head_dim=128)
    model = small_model((1, 256, 4, 2, 64, 512), family="qwen3_5_text", layer_types=("linear_attention",), gdn=gdn)
    cfg = RunConfig(name="bytes", model=model, optim=OptimConfig(max_tokens_per_microbatch=256))
    num, channels = 256, 2 * 256 + 512
    shapes = ((num, channels), (num, 4), (num, 4), (channels, 4), (4,), (4,), (num, 4, 128), (128,))
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    held, kept = {x.untyped_storage().data_ptr() for x in tensors}, {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in held:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = gated_delta.chunked(
            *tensors[:3], [128, 128], *tensors[3:6], gdn
        ).float()  # the norm of GPUs is in float32
        gate, weight = tensors[6].float(), tensors[7].float()
        normed = out * torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + 1e-6) * weight * F.silu(gate)
    assert normed.requires_grad
    kernels = KernelChoice.of(cfg, Hardware("hopper")).trainer
    stated = layer_bytes(cfg, 0, Tokens.of(cfg, 1.0), kernels).recomputed
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(stated, rel=0.03)
