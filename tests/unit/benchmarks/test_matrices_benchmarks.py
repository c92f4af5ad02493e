"""The parts of benchmarks/experts.py and benchmarks/linears.py that need no GPU."""

import argparse

import pytest

from benchmarks import experts, linear_arms, linears
from benchmarks.experts import Experts, Shape
from benchmarks.linears import Linears
from benchmarks.runner import parse
from megatron_fp8rl.precision.matmul_shapes import Linear

SHAPE = Shape(4, 1000, 256, 128)
CEILINGS = {"bf16": 1e12, "fp8": 2e12, "copy": 1e12}


def row(arm: str, ms: float, pattern: str = "balanced", **more) -> dict:
    base = {"measured": "experts", **vars(SHAPE), "pattern": pattern, "arm": arm, "ms": ms}
    return base | {"device": "NVIDIA H200", "run": "A"} | more


def test_every_pattern_gives_away_every_token():
    for pattern in experts.PATTERNS:
        counts = experts.token_counts(pattern, 1000, 8)
        assert len(counts) == 8 and sum(counts) == 1000
        assert counts == experts.token_counts(pattern, 1000, 8)
    assert experts.token_counts("equal", 10, 4) == [3, 3, 2, 2]
    assert experts.token_counts("one has all", 10, 4) == [0, 0, 10, 0]
    assert experts.token_counts("half empty", 1000, 4)[1::2] == [0, 0]
    skewed = experts.token_counts("skewed", 100_000, 8)
    assert 6 < skewed[0] / skewed[7] < 10


def test_operations_are_those_of_nine_products():
    assert SHAPE.num_operations == 9 * 2 * 1000 * 256 * 128


def test_the_table_has_a_line_for_each_shape_pattern_and_run():
    rows = [row("te bf16", 3.0, busy_ms=2.0), row("grouped fp8", 1.0, busy_ms=0.5), row("te bf16", 2.0, "skewed")]
    rows += [row("te bf16", 1.0, run="B"), {"measured": "ceilings", "device": "NVIDIA H200", "run": "B", "fp8": 1.5}]
    names = ("experts", "tokens", "hidden", "width", "pattern", "device")
    first, second, third = experts.lines(rows, "experts", names)
    assert (first["te bf16"], first["grouped fp8"], first["bf16 : fp8"]) == (3.0, 1.0, 3.0)
    assert (first["te bf16, busy"], first["grouped fp8, busy"], first["bf16 : fp8, busy"]) == (2.0, 0.5, 4.0)
    assert second["pattern"] == "skewed" and second["bf16 : fp8"] is None and second["bf16 : fp8, busy"] is None
    assert (third["run"], third["bf16 : fp8"]) == ("B", None)  # FP8 was measured in another run
    text = Experts().table(rows)
    assert "| B | NVIDIA H200 | 1.5 |" in text and text.count("\n\n") == 1


def test_options():
    assert experts.parse_shape("16,100,256,128") == Shape(16, 100, 256, 128)
    for text in ("16,100,256", "16,100,256,x", "0,1,1,1"):
        with pytest.raises(argparse.ArgumentTypeError, match="experts,tokens,hidden,width"):
            experts.parse_shape(text)
    options = parse(Experts(), ["--config", "grpo_qwen3_30b_a3b", "--sweep"])
    arms = list(Experts().arms(options))
    assert {arm["hidden"] for arm in arms} == {2048} and len(arms) == 2 * 6
    assert [arm["tokens"] for arm in arms[:6]] == [128, 512, 2048, 8192, 32_768, 131_072]


def test_a_dense_configuration_is_sent_to_the_other_benchmark(capsys):
    with pytest.raises(SystemExit):
        parse(Experts(), ["--config", "grpo_qwen3_8b"])
    assert "the model is dense; use python -m benchmarks.linears" in capsys.readouterr().err


def test_rows_of_grouped_experts_have_times_and_arms_that_fail_say_why():
    counts = experts.token_counts("skewed", 300, 3)
    fp8, te = experts.measure_experts(Shape(3, 300, 256, 128), counts, ["grouped fp8", "te bf16"], 1)
    assert "error" not in fp8 and fp8["ms"] > 0 and fp8["forward_ms"] > 0 and fp8["first_s"] > 0
    assert te["error"].startswith("ModuleNotFoundError") and "ms" not in te


def test_shapes_of_linears_are_read_and_counted():
    linear, mlp = linears.parse_shape("100,256,384"), linears.parse_shape("100,256,384,mlp")
    assert linear == Linear("linear", 100, 256, 384) and mlp == Linear("mlp", 100, 256, 384)
    assert linear.num_operations == 3 * 2 * 100 * 256 * 384
    assert mlp.num_operations == 3 * linear.num_operations  # gate, up and down
    assert [rows * columns for rows, columns in linear_arms._matrices(mlp)] == [2 * 256 * 384, 256 * 384]
    for text in ("1,2", "1,2,3,4", "0,1,1", "1,2,3,4,mlp", "1,x,3", "mlp"):
        with pytest.raises(argparse.ArgumentTypeError, match="tokens,rows,columns"):
            linears.parse_shape(text)


def test_a_configuration_gives_its_linears():
    """Two ranks of a tensor-parallel group divide Qwen3-8B."""
    assert parse(Linears(), ["--config", "grpo_qwen3_8b"]).shape == [
        Linear("linear", 8192, 3072, 4096),
        Linear("linear", 8192, 4096, 2048),
        Linear("mlp", 8192, 4096, 6144),
    ]


def test_rows_of_deep_gemms_path_have_times():
    arms = ["ours deep_gemm", linears.APART, "te bf16"]
    ours, te = linears.measure_linears(Linear("linear", 100, 256, 384), arms, CEILINGS, 1)
    assert ours["arm"] == "ours deep_gemm" and "error" not in ours and ours["ms"] > 0 and ours["first_s"] > 0
    assert te["error"].startswith("ModuleNotFoundError")
    mlp = list(linears.measure_linears(Linear("mlp", 100, 256, 384), arms[:2], CEILINGS, 1))
    assert [actual["arm"] for actual in mlp] == arms[:2] and not any("error" in actual for actual in mlp)


def test_a_shape_that_the_kernels_do_not_divide_is_refused_before_it_reaches_them():
    (actual,) = linears.measure_linears(Linear("linear", 100, 192, 256), ["ours deep_gemm"], CEILINGS, 1)
    assert "192 x 256 are no multiples of 128" in actual["error"]
