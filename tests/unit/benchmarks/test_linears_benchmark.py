"""The parts of benchmarks/linears.py that need no GPU."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import linears
from benchmarks.linears import Shape


def test_shapes_are_read_and_counted():
    linear, mlp = Shape.parse("100,256,384"), Shape.parse("100,256,384,mlp")
    assert linear == Shape("linear", 100, 256, 384) and mlp == Shape("mlp", 100, 256, 384)
    assert linear.num_operations == 3 * 2 * 100 * 256 * 384
    assert mlp.num_operations == 3 * linear.num_operations  # gate, up and down
    assert [rows * columns for rows, columns in linears._matrices(mlp)] == [2 * 256 * 384, 256 * 384]
    for text in ("1,2", "1,2,3,4", "0,1,1", "1,2,3,4,mlp"):
        with pytest.raises(argparse.ArgumentTypeError, match="tokens,rows,columns"):
            Shape.parse(text)


def test_quick_is_brief_and_writes_no_row_of_the_table():
    options = linears.parse(["--quick"])
    assert options.results.name == "linears_quick.jsonl" and options.budget_s <= 80 and len(options.shape) == 2
    assert {shape.what for shape in options.shape} == {"linear", "mlp"}


def test_the_table_has_a_line_for_a_shape_and_one_for_layers():
    shape = vars(Shape("linear", 100, 256, 384)) | {"device": "NVIDIA H200"}
    layers = {"measured": "layers", "what": "qwen3_8b", "layers": 4, "tokens": 100, "device": "NVIDIA H200"}
    rows = [
        {"measured": "linears", **shape, "arm": "te bf16", "ms": 3.0},
        {"measured": "linears", **shape, "arm": "te blockwise", "ms": 2.4},
        {"measured": "linears", **shape, "arm": "ours deep_gemm", "ms": 2.0},
        {"measured": "linears", **shape, "arm": "te delayed", "error": "no kernel"},
        {"measured": "kernels", **shape, "arm": "forward", "ms": 0.5},
        layers | {"arm": "bf16", "ms": 140.0},
        layers | {"arm": "deep_gemm", "ms": 100.0},
    ]
    linear, whole = linears.table(rows)
    assert linear["bf16 : ours"] == 1.5 and linear["blockwise : ours"] == 1.2 and "forward" not in linear
    assert whole["bf16 : ours"] == 1.4 and whole["blockwise : ours"] is None and whole["layers"] == 4


def test_layers_differ_in_the_kernels_of_linears_alone():
    arms = linears.LAYER_ARMS
    assert arms["te blockwise"].trainer == arms["deep_gemm"].trainer == "blockwise"
    assert (arms["te blockwise"].linears, arms["deep_gemm"].linears) == ("te", "deep_gemm")
