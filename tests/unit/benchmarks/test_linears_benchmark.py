"""The parts of benchmarks/linears.py that need no GPU."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import linear_arms, linears
from benchmarks.linears import Shape, parse_shape
from benchmarks.timing import Budget


def test_shapes_are_read_and_counted():
    linear, mlp = parse_shape("100,256,384"), parse_shape("100,256,384,mlp")
    assert linear == Shape("linear", 100, 256, 384) and mlp == Shape("mlp", 100, 256, 384)
    assert linear.num_operations == 3 * 2 * 100 * 256 * 384
    assert mlp.num_operations == 3 * linear.num_operations  # gate, up and down
    assert [rows * columns for rows, columns in linear_arms._matrices(mlp)] == [2 * 256 * 384, 256 * 384]
    for text in ("1,2", "1,2,3,4", "0,1,1", "1,2,3,4,mlp", "1,x,3", "mlp"):
        with pytest.raises(argparse.ArgumentTypeError, match="tokens,rows,columns"):
            parse_shape(text)


def test_quick_is_brief_and_writes_no_row_of_the_table():
    options = linears.parse(["--quick"])
    assert options.results.name == "linears_quick.jsonl" and options.budget_s <= 80 and len(options.shape) == 2
    assert {shape.what for shape in options.shape} == {"linear", "mlp"}


def test_the_table_has_a_line_for_a_shape():
    shape = vars(Shape("linear", 100, 256, 384)) | {"device": "NVIDIA H200"}
    rows = [
        {"measured": "linears", **shape, "arm": "te bf16", "ms": 3.0},
        {"measured": "linears", **shape, "arm": "te blockwise", "ms": 2.4},
        {"measured": "linears", **shape, "arm": "ours deep_gemm", "ms": 2.0},
        {"measured": "linears", **shape, "arm": "te delayed", "error": "no kernel"},
        {"measured": "kernels", **shape, "arm": "forward", "ms": 0.5},
        {"measured": "layers", "what": "qwen3_8b", "layers": 4, "tokens": 100, "arm": "te bf16", "ms": 140.0},
    ]
    (linear,) = linears.table(rows)
    assert linear["bf16 : ours"] == 1.5 and linear["blockwise : ours"] == 1.2 and "forward" not in linear


def test_layers_differ_in_the_kernels_of_linears_alone():
    arms = linears.LAYER_ARMS
    assert arms["te blockwise"].trainer == arms["deep_gemm"].trainer == "blockwise"
    assert (arms["te blockwise"].linears, arms["deep_gemm"].linears) == ("te", "deep_gemm")


def test_a_configuration_gives_its_shapes_and_a_sweep_takes_the_largest():
    """Two ranks of a tensor-parallel group divide Qwen3-8B."""
    options = linears.parse(["--config", "grpo_qwen3_8b"])
    assert options.shape == [
        Shape("linear", 8192, 3072, 4096),
        Shape("linear", 8192, 4096, 2048),
        Shape("mlp", 8192, 4096, 6144),
    ]
    swept = linears.parse(["--config", "grpo_qwen3_8b", "--sweep"]).shape
    assert {(shape.what, shape.rows, shape.columns) for shape in swept} == {("mlp", 4096, 6144)}
    assert [shape.tokens for shape in swept] == [128, 512, 2048, 8192, 32_768, 131_072]
    assert set(options.arms[:4]) == set(linears._FIRST)


def test_the_verdict_names_shape_and_arms():
    shape = Shape("mlp", 100, 256, 384)
    base = {"measured": "linears", **vars(shape), "device": "NVIDIA H200"}
    rows = [
        base | {"arm": arm, "ms": ms} for arm, ms in {"te bf16": 3.0, "ours te bf16": 2.0, "te delayed": 1.0}.items()
    ]
    told = linears.verdict(rows, shape, "NVIDIA H200")
    assert told == "mlp 256 x 384, 100 tokens: FP8 pays: te delayed 1.00 ms, ours te bf16 2.00 ms, 2.00x"
    assert linears.verdict(rows, shape, "cpu") == "mlp 256 x 384, 100 tokens: not measured on cpu"


def measure(kind, shape: Shape, known=()) -> list[dict]:
    """Rows of a small shape, as a GPU would make them, on this machine."""
    arms = ["ours deep_gemm", linears.APART, "te bf16"]
    options = argparse.Namespace(arms=arms, rounds=1, budget=Budget(600.0), is_known=lambda row: row["arm"] in known)
    return list(kind(shape, {"bf16": 1e12, "fp8": 2e12, "copy": 1e12}, options))


def test_rows_of_deep_gemms_path_have_times():
    ours, te = measure(linears.measure_linears, Shape("linear", 100, 256, 384))
    assert ours["arm"] == "ours deep_gemm" and "error" not in ours and ours["ms"] > 0 and ours["first_s"] > 0
    assert te["error"].startswith("ModuleNotFoundError")
    mlp = measure(linears.measure_linears, Shape("mlp", 100, 256, 384), known=["te bf16"])
    assert [row["arm"] for row in mlp] == ["ours deep_gemm", linears.APART] and not any("error" in row for row in mlp)


def test_a_shape_that_the_kernels_do_not_divide_is_refused_before_it_reaches_them():
    (found,) = measure(linears.measure_linears, Shape("linear", 100, 192, 256), known=["te bf16"])
    assert "192 x 256 are no multiples of 128" in found["error"]
    with pytest.raises(ValueError, match="no multiples of 128"):
        measure(linears.measure_kernels, Shape("linear", 100, 192, 256))


def test_each_kernel_is_timed_once():
    names = [row["arm"] for row in measure(linears.measure_kernels, Shape("linear", 100, 256, 384), known=["dgrad"])]
    assert "dgrad" not in names and {"forward", "wgrad", "quantize rows"} <= set(names)
    assert len(set(names)) == len(names)


def test_a_whole_run_on_this_machine(tmp_path, prepared, capsys):
    """What a GPU does up to the table and the plot, with made-up ceilings."""
    prepared(linears, "linears", lambda arms: ["ours deep_gemm"])
    common = ["--rounds", "1", "--results", str(tmp_path / "linears.jsonl")]
    rows = [{"measured": "linears", "what": "mlp", "tokens": n, "rows": 256, "columns": 384} for n in (10, 128, 300)]
    added = linears.Results(tmp_path / "linears.jsonl", linears.KEYS)
    for row in rows:
        added.add(row | {"arm": "te bf16", "ms": 1e6, "device": "cpu"})
    assert linears.main([*common, "--shape", "300,256,384", "300,256,384,mlp"]) == 0
    assert linears.main([*common, "--shape", "300,256,384,mlp", "--sweep"]) == 0
    text, said = (tmp_path / "measured.md").read_text(), capsys.readouterr().out
    assert "SKIPPED" not in said and '"error"' not in said
    assert "mlp 256 x 384, 300 tokens: FP8 pays: ours deep_gemm" in said and "FP8 pays: everywhere" in said
    assert "| 10 to 300 | everywhere |" in text and (tmp_path / "linears.png").exists()


def test_a_configuration_is_answered_for(tmp_path, made_up_ceilings, capsys):
    """All of its linears together, from rows that are there already."""
    options = linears.parse(["--config", "grpo_qwen3_8b", "--arms", "te bf16", "ours te blockwise"])
    results = linears.Results(tmp_path / "linears.jsonl", linears.KEYS)
    for shape in options.shape:
        for arm, ms in (("te bf16", 3.0), ("ours te blockwise", 1.5)):
            results.add({"measured": "linears", **vars(shape), "arm": arm, "ms": ms, "device": "NVIDIA H200"})
    linears.measure_all(options, results, "NVIDIA H200")
    said = capsys.readouterr().out
    assert "grpo_qwen3_8b, FP8 for linears: FP8 pays: ours te blockwise 162.00 ms, te bf16 324.00 ms, 2.00x" in said
