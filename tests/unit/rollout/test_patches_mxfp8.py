"""MXFP8 on a GPU engine, with stand-ins for kernels: parameters stay as sent, and kernels read rearranged scales."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision.formats import MXFP8
from megatron_fp8rl.precision.quantizers import dequantize, quantize, round_activation
from megatron_fp8rl.precision.recipes import make_recipe, quantized_linear
from megatron_fp8rl.rollout.vllm_plugin import patches_mxfp8
from megatron_fp8rl.rollout.vllm_plugin.kernel_weights import DerivedTensors, kernel_weights
from megatron_fp8rl.rollout.vllm_plugin.kernels_in_use import kernels_in_use

flashinfer = pytest.importorskip("vllm.model_executor.kernels.linear.mxfp8.flashinfer")
moe = pytest.importorskip(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_w8a8_mxfp8"
)


def unswizzled(scale: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Row-major scales from cuBLAS' tiles of 128x4."""
    tiles = -(-num_rows // 128), -(-num_columns // 128)
    rows = scale.view(*tiles, 32, 4, 4).transpose(1, 3).reshape(tiles[0] * 128, tiles[1] * 4)
    return rows[:num_rows, : num_columns // 32].contiguous()


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@pytest.fixture
def patched(monkeypatch):
    linear, experts = flashinfer.FlashInferCutlassMxfp8LinearKernel, moe.CompressedTensorsW8A8Mxfp8MoEMethod
    for kind in (linear, experts):  # restored after the test
        for name in ("process_weights_after_loading", "apply_weights"):
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, getattr(kind, name))

    def quantized(x, is_sf_swizzled_layout=False, alignment=0):
        assert is_sf_swizzled_layout
        data, scale = quantize(x, MXFP8)
        return data, flashinfer.swizzle_mxfp8_scale(scale, M=x.shape[0], K=x.shape[1])

    def product(x, weight, x_scale, weight_scale, out_dtype, backend):
        """FlashInfer's mm_mxfp8, which reads rearranged scales of both operands."""
        operands = ((x, x_scale), (weight.t(), weight_scale))
        left, right = (dequantize(data, unswizzled(scale, *data.shape), MXFP8).double() for data, scale in operands)
        return (left @ right.t()).to(out_dtype)

    monkeypatch.setattr(flashinfer, "mxfp8_e4m3_quantize", quantized)
    monkeypatch.setattr(flashinfer.vllm_flashinfer, "mm_mxfp8", product, raising=False)
    patches_mxfp8.keep_scales_readable()


class Method:
    """CompressedTensorsLinearMethod."""

    def process_weights_after_loading(self, layer):
        layer.scheme.kernel.process_weights_after_loading(layer)


def test_a_linear_multiplies_as_the_reference_and_keeps_what_was_sent(patched):
    model = nn.Module()
    model.o_proj = layer = nn.Module()
    kernel = object.__new__(flashinfer.FlashInferCutlassMxfp8LinearKernel)
    layer.quant_method, layer.scheme = Method(), SimpleNamespace(kernel=kernel)
    sent = quantize(torch.randn(192, 160).bfloat16(), MXFP8)
    layer.weight, layer.weight_scale = map(parameter, sent)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(40, 160).bfloat16()

    def expected(weight):
        return (round_activation(x, MXFP8, torch.float64) @ dequantize(*weight, MXFP8).double().t()).bfloat16()

    assert torch.equal(kernel.apply_weights(layer, x), expected(sent))
    assert kernels_in_use(model) == {"linears": ["FlashInferCutlassMxfp8LinearKernel"]}
    views = dict(kernel_weights(model))
    assert views.keys() == {"o_proj.weight", "o_proj.weight_scale"}
    for view, tensor in zip(views.values(), sent, strict=True):
        assert torch.equal(view.view(torch.uint8), tensor.view(torch.uint8))

    address, derived = layer.kernel_scales[0].data_ptr(), DerivedTensors(model, torch.bfloat16)
    update = quantize(torch.randn(192, 160).bfloat16() * 8, MXFP8)
    for view, tensor in zip(views.values(), update, strict=True):  # as a publication writes it
        view.copy_(tensor)
    derived.refresh()
    assert torch.equal(kernel.apply_weights(layer, x), expected(update))
    assert layer.kernel_scales[0].data_ptr() == address, "CUDA graphs read the old one"


def test_experts_rearrange_scales_in_place_and_build_their_kernel_once(patched, monkeypatch):
    built = []

    def rearranged(*, fp8_backend, layer, w13, w2, w13_scale, w2_scale, w13_input_scale, w2_input_scale):
        """As for DeepGEMM: four scales in an int32, other shapes, the same weights."""
        packed = [scale.contiguous().view(torch.int32).transpose(1, 2).contiguous() for scale in (w13_scale, w2_scale)]
        return w13, w2, *packed

    monkeypatch.setattr(moe, "convert_to_fp8_moe_kernel_format", rearranged)
    monkeypatch.setattr(moe, "make_fp8_moe_quant_config", lambda **options: SimpleNamespace(**options))
    monkeypatch.setattr(moe, "make_fp8_moe_kernel", lambda **options: built.append(options))
    method = object.__new__(moe.CompressedTensorsW8A8Mxfp8MoEMethod)
    method.fp8_backend, method.experts_cls, method.moe = None, object, None
    method.weight_block_size = [1, 32]
    layer = nn.Module()
    layer._expert_routing_tables, layer.quant_method = lambda: None, method
    layer.w13_input_scale = layer.w2_input_scale = None
    sent = {"w13": quantize(torch.randn(4 * 256, 128), MXFP8), "w2": quantize(torch.randn(4 * 128, 128), MXFP8)}
    for name, (data, scale) in sent.items():
        layer.register_parameter(f"{name}_weight", parameter(data.view(4, -1, 128)))
        layer.register_parameter(f"{name}_weight_scale", parameter(scale.view(4, -1, 4)))
    method.process_weights_after_loading(layer)
    for name, (_, scale) in sent.items():
        assert torch.equal(getattr(layer, f"{name}_weight_scale"), scale.view(4, -1, 4))
    (kernel,) = built
    read = kernel["moe_quant_config"].w1_scale, kernel["moe_quant_config"].w2_scale
    assert [scale.dtype for scale in read] == [torch.int32] * 2

    layer.w13_weight_scale.fill_(120)
    layer.w2_weight_scale.fill_(121)
    method.process_weights_after_loading(layer)
    assert len(built) == 1
    assert read[0].view(torch.uint8).eq(120).all() and read[1].view(torch.uint8).eq(121).all()


@pytest.fixture
def emulated(monkeypatch):
    """A linear of vLLM's, as ``--linear-backend emulation`` builds it: (its model, the linear)."""
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Mxfp8

    for name in ("process_weights_after_loading", "apply_weights"):  # restored after the test
        monkeypatch.setattr(EmulationMxfp8LinearKernel, name, getattr(EmulationMxfp8LinearKernel, name))
    monkeypatch.setattr(CompressedTensorsW8A8Mxfp8, "create_weights", CompressedTensorsW8A8Mxfp8.create_weights)
    patches_mxfp8.emulate_linears()
    scheme = object.__new__(CompressedTensorsW8A8Mxfp8)
    scheme.kernel = EmulationMxfp8LinearKernel(Mxfp8LinearLayerConfig())
    model = nn.Module()
    model.o_proj = layer = nn.Module()
    layer.scheme, layer.quant_method = scheme, Method()
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1)
    scheme.create_weights(layer, [128, 64], 160, torch.bfloat16, lambda *_: None)
    assert layer.weight_scale.eq(127).all(), "vLLM's dummy weights leave them as they are"
    return model, layer


def test_an_emulated_linear_multiplies_as_the_trainer_and_keeps_what_was_sent(emulated):
    model, layer = emulated
    recipe = make_recipe(PrecisionConfig(trainer="mxfp8"))
    x, bias = torch.randn(40, 160).bfloat16(), torch.randn(192).bfloat16()
    derived, address = None, None
    for spread in (1, 8):
        matrix = torch.randn(192, 160).bfloat16() * spread
        sent = dict(zip(("o_proj.weight", "o_proj.weight_scale"), quantize(matrix, MXFP8), strict=True))
        views = dict(kernel_weights(model))
        assert views.keys() == sent.keys()
        for name, view in views.items():  # as a publication writes it
            view.copy_(sent[name])
        if derived is None:
            layer.quant_method.process_weights_after_loading(layer)
            derived, address = DerivedTensors(model, torch.bfloat16), layer.dequantized_weight.data_ptr()
        else:
            derived.refresh()
        expected = quantized_linear(x, [matrix], recipe)
        actual = layer.scheme.apply_weights(layer, x)
        # The sums of products have another order than the trainer's float64.
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-2 * spread)
        assert (actual != nn.functional.linear(x, layer.dequantized_weight)).float().mean() > 0.5, "x was not rounded"
        assert torch.equal(layer.scheme.apply_weights(layer, x, bias), actual + bias)
        for name, view in kernel_weights(model):
            assert torch.equal(view.view(torch.uint8), sent[name].view(torch.uint8))
    assert layer.dequantized_weight.data_ptr() == address, "CUDA graphs read the old one"
    assert kernels_in_use(model) == {"linears": ["EmulationMxfp8LinearKernel"]}


def test_torch_compile_sees_the_rounding_of_an_emulated_linear_as_one_operator(emulated, monkeypatch):
    _, layer = emulated
    for tensor, value in zip((layer.weight, layer.weight_scale), quantize(torch.randn(192, 160), MXFP8), strict=True):
        tensor.data.copy_(value)
    layer.quant_method.process_weights_after_loading(layer)
    graphs = []
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr("torch._dynamo.config.disable", False)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: layer.scheme.apply_weights(layer, x), backend=backend, fullgraph=True)
    for rows in (3, 40):
        x = torch.randn(rows, 160).bfloat16()
        assert torch.equal(compiled(x), layer.scheme.apply_weights(layer, x))
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [str(target) for target in called[:1]] == ["megatron_fp8rl.round_mxfp8.default"] and len(called) == 2


def test_vllm_has_one_emulation_on_cuda_which_every_gpu_supports():
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CUDA]
    (kernel,) = linear._filter_kernels_by_backend("emulation", kernels)
    assert kernel is linear.EmulationMxfp8LinearKernel and kernel.is_supported(90)[0]
