"""Kernels compile for Hopper without a GPU: vectors of 16 bytes, and registers spilled by one kernel alone."""

import importlib
import itertools
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8rl.precision.formats import BF16, blockwise_format
from tests.helpers.compiled import compile_kernel, instructions, register_report

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile")
triton = pytest.importorskip("triton")


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("bits, loads", [("uint16", 8), ("uint32", 16)])
def test_a_block_is_read_and_written_once_in_vectors(bits, loads, pow2):
    from megatron_fp8rl.kernels.triton import quantize

    constants = {"SOURCE": getattr(triton.language, bits), "POW2": pow2, "ALIGNED": True, "HARDWARE": True}
    types = {"table": "*i64", "matrix_of_block": "*i32"}
    actual = instructions(compile_kernel(quantize._quantize_blocks, types, constants, num_warps=8)["ptx"])
    # A thread of 256 has 64 numbers of a block.
    assert actual["ld.global.v4.b32"] == loads and actual["st.global.v4.b32"] == 4
    assert actual["cvt.rn.satfinite.e4m3x2.f32"] == 32
    # Divisions round as IEEE says, and nothing flushes subnormal numbers.
    assert actual["div.rn.f32"] == (0 if pow2 else 65) and actual["div.full.f32"] == 0
    assert not [name for name in actual if "ftz" in name]


def test_the_digest_adds_in_64_bits():
    from megatron_fp8rl.kernels.triton import digest_tensors

    types = {"table": "*i64", "tensor_of_chunk": "*i32", "totals": "*i64"}
    actual = instructions(compile_kernel(digest_tensors._add_chunks, types, {"NARROW": False}, num_warps=4)["ptx"])
    assert sum(actual[name] for name in actual if name.startswith("atom") and name.endswith("add.u64")) == 1
    assert actual["ld.global.b64"] == 4 + 4  # of the table, and 4 words a thread in each turn of the loop


def test_bytes_are_transposed_in_vectors():
    from megatron_fp8rl.kernels.triton import quantize

    types = {"data": "*u8", "turned": "*i32", "num_rows": "i32", "num_columns": "i32"}
    how = dict(is_aligned=lambda *_: True, num_warps=8)
    actual = instructions(compile_kernel(quantize._transpose_tiles, types, {}, **how)["ptx"])
    assert actual["ld.global.v4.b32"] == actual["st.global.v4.b32"] == 4  # a thread of 256 has 64 bytes


_POINTERS = {
    "*bf16": "x h dy y out weights residual weight",
    "*u8": "data",
    "*i16": "bf16 a_bf16",
    "*i32": "row_scales column_scales a_scales scales rows experts offsets positions padded_counts columns_data "
    "a_columns counts ends sources slots",
    "*i64": "tokens_per_expert",
    "*fp32": "probs dprobs scores grad inverses",
    "i32": "num_rows num_columns width num_tokens num_heads token_stride head_stride scale_row scale_block",
    "fp32": "eps",
}
TYPES = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
_FORMS = {"ROWS": True, "COLUMNS": False, "BF16": False, "POW2": True, "HARDWARE": True}
_QUANTIZED = _FORMS | {"WEIGHTED": False, "PACKED": False, "TOGETHER": 1}
_BACKWARD = _FORMS | {"WEIGHTED": True, "COLUMNS": True, "A_COLUMNS": True, "A_BF16": False}
_IN_MATRIX = 2
_DENSE = {"WEIGHTED": False, "COLUMNS": _IN_MATRIX, "A_COLUMNS": _IN_MATRIX}


def compiled(name: str, constants: dict, how: dict, tmp_path: Path) -> tuple[Counter[str], str]:
    """(how often each instruction stands in the PTX, what ptxas says about registers)."""
    from megatron_fp8rl.kernels.triton import (
        norm,
        packed,
        permute,
        quantize,
        quantize_activations,
        route,
        slots,
        swiglu,
    )

    modules = permute, swiglu, quantize, quantize_activations, norm, slots, route, packed
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    constants = constants | {name: size for name, size in how.items() if name == "Q"}
    options = {name: size for name, size in how.items() if name != "Q" and size is not None}
    hinted = {param.name for param in kernel.params if not param.do_not_specialize}
    ptx = compile_kernel(kernel, TYPES, constants, is_aligned=lambda name, _: name in hinted, **options)["ptx"]
    return instructions(ptx), register_report(ptx, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, constants, launch, numbers, quantized",
    [
        ("_quantize", _QUANTIZED, "_QUANTIZE_ROWS", 1, 1),
        ("_quantize", _QUANTIZED | {"COLUMNS": True}, "_QUANTIZE_BOTH", 1, 2),
        ("_quantize", _QUANTIZED | {"COLUMNS": _IN_MATRIX}, "_QUANTIZE_BOTH", 1, 2),
        ("_swiglu_quantize", _FORMS, "_SWIGLU_ROWS", 2, 1),
        ("_swiglu_backward_quantize", _BACKWARD, "_BACKWARD", 3, 5),
        ("_swiglu_backward_quantize", _BACKWARD | _DENSE, "_BACKWARD", 3, 5),
        ("_quantize_weights", {"POW2": True, "HARDWARE": True}, {"num_warps": 8}, 1, 1),
    ],
    ids=[
        "rows",
        "rows and columns",
        "columns in a matrix",
        "swiglu",
        "swiglu backward",
        "swiglu backward of dense layers",
        "weights",
    ],
)
def test_memory_moves_in_vectors_and_registers_suffice(name, constants, launch, numbers, quantized, tmp_path):
    """A tile's numbers are read once, ``quantized`` times their bytes are written, and no byte is moved by itself."""
    from megatron_fp8rl.kernels.triton import permute

    is_given = isinstance(launch, dict)
    how = launch if is_given else getattr(permute, launch).options(constants["COLUMNS"])
    actual, output = compiled(name, constants, how, tmp_path)
    size = 4 * how.get("Q", 32) * 128 // (32 * how["num_warps"])  # numbers of a tile that a thread has
    assert actual["ld.global.v4.b32"] == numbers * size // 8
    assert 16 * actual["st.global.v4.b32"] + 8 * actual["st.global.v2.b32"] == quantized * size
    assert actual["cvt.rn.satfinite.e4m3x2.f32"] == quantized * size // 2
    assert not [instruction for instruction in actual if instruction.endswith((".b8", ".u8"))]
    # SwiGLU's gradient is faster on an H200 with four warps that spill a little than with eight that do not.
    spilled = max(int(size) for size in re.findall(r"(\d+) bytes spill", output))
    assert spilled <= (352 if launch == "_BACKWARD" else 0), output
    assert {instruction for instruction in actual if "ftz" in instruction} <= {"ex2.approx.ftz.f32"}


@pytest.mark.parametrize(
    "name, loads, stores", [("_swiglu", 4, 2), ("_swiglu_backward", 6, 4), ("_weigh", 2, 2), ("_weigh_backward", 4, 2)]
)
def test_experts_on_the_linears_kernels_move_vectors(name, loads, stores, tmp_path):
    """A tile has 8 rows of 256 numbers. Each thread reads its 16 numbers once and writes them once."""
    constants = {"ROWS": 8, "COLUMNS": 256, "HARDWARE": True}
    actual, output = compiled(name, constants, {"num_warps": 4}, tmp_path)
    assert actual["ld.global.v4.b32"] == loads and actual["st.global.v4.b32"] == stores
    assert " 0 bytes spill stores" in output, output
    if name == "_swiglu":
        assert actual["div.rn.f32"] == 16 and not actual["div.full.f32"]


def test_engines_quantize_in_vectors(tmp_path):
    """Rows of 4,096 numbers, and tiles of 16 rows and 128 features: a thread has 16 of each tensor."""
    form = {"WRITES": True, "POW2": True, "HARDWARE": True}
    constants = form | {"BLOCKS": 32, "ADDS": True, "KEEPS": False, "QUANTIZES": True}
    actual, output = compiled("_norm", constants, {"num_warps": 8}, tmp_path)
    assert actual["ld.global.v4.b32"] == 6 and actual["st.global.v4.b32"] == 5, actual
    assert " 0 bytes spill stores" in output, output
    actual, output = compiled("_quantize_rows", form | {"ROWS": 16, "SWIGLU": True}, {"num_warps": 4}, tmp_path)
    assert actual["ld.global.v4.b32"] == 4 and actual["st.global.v4.b32"] == 3, actual
    assert " 0 bytes spill stores" in output, output


def test_unpermuting_moves_vectors(tmp_path):
    constants = {"WEIGHTED": True, "ROWS": 8, "COLUMNS": 512, "HARDWARE": True}
    actual, output = compiled("_unpermute", constants, {"num_warps": 4}, tmp_path)
    assert actual["ld.global.v4.b32"] == actual["st.global.v4.b32"] == 4 and " 0 bytes spill stores" in output


def test_sums_of_a_tokens_rows_move_vectors(tmp_path):
    constants = {"MOST": 8, "WEIGHTED": True, "ROWS": 4, "COLUMNS": 512, "HARDWARE": True}
    actual, output = compiled("_sum_rows", constants, {"num_warps": 4}, tmp_path)
    assert (
        actual["ld.global.v4.b32"] == 2 * 8 and actual["st.global.v4.b32"] == 2 and " 0 bytes spill stores" in output
    ), output


@pytest.mark.parametrize("name", ["_count", "_place", "_scores_gradient"])
def test_tokens_are_placed_by_small_kernels(name, tmp_path, monkeypatch):
    constants = {"NUM_EXPERTS": 128, "EXPERTS": 128, "TOKENS": 32, "MOST": 8, "SLOTS": 8}
    if name == "_scores_gradient":
        monkeypatch.setitem(TYPES, "out", "*fp32")
    _, output = compiled(name, constants, {"num_warps": 4}, tmp_path)
    assert " 0 bytes spill stores" in output, output


@pytest.mark.parametrize("columns", [False, True])
def test_packed_rows_are_read_in_vectors(columns, tmp_path, monkeypatch):
    from megatron_fp8rl.kernels.triton import permute

    monkeypatch.setitem(TYPES, "x", "*u8")
    how = (permute._QUANTIZE_BOTH if columns else permute._QUANTIZE_ROWS).options(columns)
    actual, output = compiled("_quantize", _QUANTIZED | {"PACKED": True, "COLUMNS": columns}, how, tmp_path)
    size = 4 * how["Q"] * 128 // (32 * how["num_warps"])  # numbers of a tile that a thread has
    assert actual["ld.global.v4.b32"] * 16 + actual["ld.global.v2.b32"] * 8 == size, actual
    assert " 0 bytes spill stores" in output, output


def test_rows_are_packed_in_vectors(tmp_path, monkeypatch):
    monkeypatch.setitem(TYPES, "out", "*u8")
    actual, output = compiled("_pack", {"ROWS": 16, "HARDWARE": True}, {"num_warps": 4}, tmp_path)
    assert actual["ld.global.v4.b32"] == 2 and actual["st.global.v4.b32"] + actual["st.global.v2.b32"] >= 1, actual
    assert " 0 bytes spill stores" in output, output


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ["_route", "_route_backward"])
def test_experts_are_chosen_by_one_small_kernel(name, normalize, tmp_path, monkeypatch):
    for argument, kind in (("logits", "*fp32"), ("factor", "fp32"), ("out", "*fp32")):
        monkeypatch.setitem(TYPES, argument, kind)
    constants = {"NUM_EXPERTS": 128, "EXPERTS": 128, "TOKENS": 16, "NORMALIZE": normalize, "MOST": 8}
    _, output = compiled(name, constants, {"num_warps": 4}, tmp_path)
    assert " 0 bytes spill stores" in output, output


def test_the_layout_is_one_small_kernel(tmp_path):
    _, output = compiled("_build_layout", {"NUM_EXPERTS": 128, "EXPERTS": 128}, {"num_warps": 4}, tmp_path)
    assert " 0 bytes spill stores" in output, output


@pytest.fixture
def launches(monkeypatch):
    """Launches that follow, as (kernel's name, grid, bytes of shared memory): compiled for Hopper, and not run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from megatron_fp8rl.kernels.triton import permute

    actual, compile_and_launch = [], JITFunction.run

    def compile_alone(self, *args, grid, warmup, **options):
        made = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        actual.append((self.__name__, grid, made.metadata.shared))

    kernels = [x for x in vars(permute).values() if isinstance(x, JITFunction)]
    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", hopper)
    monkeypatch.setattr(JITFunction, "run", compile_alone)
    yield actual
    for kernel in kernels:
        kernel.device_caches.clear()


def _layout(num_tokens: int, num_rows: int):
    from megatron_fp8rl.kernels.triton.permute import layout_tensors
    from megatron_fp8rl.kernels.types import ExpertPermutation

    tensors = (x.zero_() for x in layout_tensors(torch.tensor([num_tokens, 0, 0]), num_tokens, num_rows))
    return ExpertPermutation(num_tokens, num_rows, *tensors, host_counts=(num_rows, 0, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them")
@pytest.mark.parametrize("scales", ["pow2", "fp32", None])
def test_the_forms_that_experts_ask_for_compile_as_they_are_called(scales, launches):
    from megatron_fp8rl.kernels.triton import permute
    from megatron_fp8rl.trainer.model.experts import _Call

    layout, kind = _layout(300, 384), scales or "pow2"
    fmt = BF16 if scales is None else blockwise_format(scales)
    sizes, probs = ((300, 256), (384, 128), (384, 256)), torch.zeros(300)
    x, dy, h = (torch.zeros(size).bfloat16() for size in sizes)
    for wgrad_fp8, wgrad in itertools.product((True, False), repeat=2):
        call = _Call(layout, fmt, wgrad_fp8, record=True)
        forms = {"columns": False, "bf16": False} | call.forms(wgrad=wgrad)
        activation = {"activation_columns": False, "activation_bf16": False} | call.operands(
            wgrad=wgrad, columns="activation_columns", bf16="activation_bf16"
        )
        permute.permute_quantize(x, layout, kind, **forms, probs=None)
        permute.swiglu_quantize(h, layout, kind, **({"columns": False, "bf16": False} | call.forms(wgrad=False)))
        permute.swiglu_backward_quantize(dy, h, layout, kind, **forms, **activation, probs=probs)
    permute.unpermute(torch.zeros(384, 264).bfloat16(), layout, probs)
    kernels = "_build_layout _quantize _swiglu_quantize _swiglu_backward_quantize _sum_for_tokens _unpermute"
    assert {name for name, _, _ in launches} == {*kernels.split()}
    assert all(num_bytes <= 227 << 10 for _, _, num_bytes in launches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them")
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_the_forms_that_linears_ask_for_compile_as_they_are_called(scales, launches):
    from megatron_fp8rl.kernels.triton import permute

    layout = _layout(300, 384)
    x, dy, h = (torch.zeros(size).bfloat16() for size in ((300, 256), (384, 128), (384, 256)))
    for rows, columns in ((True, True), (True, False), (False, True)):
        forms = {"rows": rows, "columns": columns, "bf16": False}
        permute.permute_quantize(x, layout, scales, **forms, probs=None)
        permute.swiglu_backward_quantize(
            dy, h, layout, scales, **forms, activation_columns=columns, activation_bf16=False, probs=None
        )
    permute.swiglu_quantize(h, layout, scales, rows=True, columns=False, bf16=False)
    assert len(launches) == 8 and all(num_bytes <= 227 << 10 for _, _, num_bytes in launches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them")
def test_other_numbers_of_tokens_compile_nothing(launches):
    from megatron_fp8rl.kernels.triton import permute

    for num_tokens in (1, 320, 333):
        permute.unpermute(torch.zeros(384, 264).bfloat16(), _layout(num_tokens, 384), None)
    assert [name for name, _, _ in launches].count("_unpermute") == 3
    assert [len(kernel.device_caches[0][0]) for kernel in (permute._unpermute, permute._build_layout)] == [1, 1]


@pytest.mark.parametrize(
    ("module", "argument", "number"),
    [
        ("permute", "num_tokens", 3),
        ("slots", "num_tokens", 4),
        ("route", "num_tokens", 2),
        ("log_softmax", "num_tokens", 1),
        ("packed", "num_rows", 1),
        ("swiglu", "num_rows", 4),
        ("batch_invariant", "num_rows", 1),
    ],
)
def test_numbers_of_tokens_are_not_specialized(module, argument, number):
    """A run would compile in the middle of a step, for numbers that are divisible by 16 or 1."""
    from triton.runtime.jit import JITFunction

    actual = vars(importlib.import_module(f"megatron_fp8rl.kernels.triton.{module}")).values()
    kernels = [x for x in actual if isinstance(x, JITFunction)]
    launched = [kernel for kernel in kernels if kernel.__module__.endswith(module) and "tl.store" in kernel.src]
    params = [param for kernel in launched for param in kernel.params if param.name == argument]
    assert len(params) == number and all(param.do_not_specialize for param in params)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them")
def test_a_million_tokens_fit_into_a_grid(launches):
    from megatron_fp8rl.kernels.triton import permute

    num_tokens = 1 << 21
    layout = _layout(num_tokens, num_tokens)
    permute.unpermute(torch.zeros(num_tokens, 8).bfloat16(), layout, None)
    permute.permute_quantize(
        torch.zeros(num_tokens, 128).bfloat16(), layout, "pow2", rows=True, columns=False, bf16=False, probs=None
    )
    assert [len(grid) for name, grid, _ in launches if name == "_unpermute"] == [1]
    assert all(size < 65_536 for _, grid, _ in launches for size in grid[1:])
