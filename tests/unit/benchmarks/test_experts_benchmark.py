"""The parts of benchmarks/experts.py that need no GPU."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import experts
from benchmarks.experts import Shape
from benchmarks.results import Results
from benchmarks.timing import Budget

SHAPE = Shape(4, 1000, 256, 128)


def row(arm: str, ms: float, pattern: str = "balanced", device: str = "NVIDIA H200", **more) -> dict:
    return {"measured": "experts", **vars(SHAPE), "pattern": pattern, "arm": arm, "ms": ms, "device": device} | more


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


def test_bytes_and_floor():
    counts = [128, 0, 256, 128]
    shape = Shape(4, 512, 256, 128)
    # Numbers to a token: FP8 and its scales are 1 + 4 / 128 bytes; indices are left out of the account below.
    fp8 = 1 + 4 / 128
    forward = 256 * (2 + 2 * fp8) + 128 * (4 + fp8)
    backward = 256 * (2 + 2 * fp8) + 128 * (6 + 4 * fp8 + fp8)
    found = experts.moved_bytes(shape, counts, "grouped fp8")
    weights = 4 * 3 * 256 * 128 * (2 + 3)  # read in BF16, written in FP8, and read and written transposed
    assert found - weights == pytest.approx(512 * (forward + backward), rel=0.01)
    forward, backward = 256 * 4 + 128 * 6 + 256 * 4, 256 * 4 + 128 * (6 + 4 + 2) + 256 * 4
    found = experts.moved_bytes(shape, counts, "grouped bf16")
    assert found == pytest.approx(512 * (forward + backward), rel=0.01)
    # Padding is written, not read.
    assert experts.moved_bytes(shape, [512, 1, 1, 1], "grouped bf16") > found

    ceilings = {"bf16": 1e12, "fp8": 2e12, "copy": float("inf")}
    one_pass = shape.num_operations / 3 / 1e12 * 1e3
    assert experts.floor_ms(shape, counts, "grouped bf16", ceilings) == pytest.approx(3 * one_pass)
    assert experts.floor_ms(shape, counts, "grouped fp8", ceilings) == pytest.approx(1.5 * one_pass)
    assert experts.floor_ms(shape, counts, "grouped fp8, bf16 wgrad", ceilings) == pytest.approx(2 * one_pass)


def test_verdict_compares_the_best_of_both():
    rows = [row("te bf16", 3.0), row("grouped bf16", 2.0), row("te blockwise", 6.0), row("grouped fp8", 1.0)]
    rows += [row("te bf16", 1.0, "skewed"), row("te blockwise", 2.0, "skewed"), row("grouped fp8", 0.1, device="other")]
    rows += [row("te bf16", 0.5, "equal"), row("grouped bf16", 0.1, tokens=7), {"measured": "ceilings", "device": "a"}]
    rows[-1:] = [row("grouped fp8", 1.0, "equal") | {"error": "no"}, row("grouped fp8", 0.5, "equal")]
    lines = experts.verdict(rows, SHAPE, "NVIDIA H200").splitlines()
    assert lines[0] == "balanced: FP8 pays: grouped fp8 1.00 ms, grouped bf16 2.00 ms, 2.00x"
    assert lines[1].startswith("equal: FP8 makes no difference")
    assert lines[2] == "skewed: FP8 does not pay: te blockwise 2.00 ms, te bf16 1.00 ms, 0.50x"
    assert experts.verdict(rows, Shape(1, 1, 128, 128), "NVIDIA H200").startswith("not measured on NVIDIA H200")


def test_table_has_a_line_for_each_shape_and_pattern():
    rows = [row("te bf16", 3.0), row("grouped fp8", 1.0, floor_ms=0.8), row("te bf16", 2.0, "skewed")]
    first, second = experts.table([*rows, {"measured": "ceilings"}])
    assert (first["te bf16"], first["grouped fp8"], first["floor"], first["bf16 : fp8"]) == (3.0, 1.0, 0.8, 3.0)
    assert second["pattern"] == "skewed" and second["bf16 : fp8"] is None and second["bf16 : fp8, busy"] is None
    (line,) = experts.table([row("te bf16", 3.0) | {"busy_ms": 2.0}, rows[1] | {"busy_ms": 0.5}])
    assert (line["te bf16, busy"], line["grouped fp8, busy"], line["bf16 : fp8, busy"]) == (2.0, 0.5, 4.0)
    assert line["bf16 : fp8"] == 3.0


def test_options():
    assert experts.parse_shape("16,100,256,128") == Shape(16, 100, 256, 128)
    for text in ("16,100,256", "16,100,256,x", "0,1,1,1"):
        with pytest.raises(argparse.ArgumentTypeError, match="experts,tokens,hidden,width"):
            experts.parse_shape(text)
    options = experts.parse(["--config", "grpo_qwen3_30b_a3b"])
    assert [shape.hidden for shape in options.shape] == [2048]
    quick = experts.parse(["--quick"])
    assert len(quick.shape) == 1 and quick.results.name == "experts_quick.jsonl"
    assert options.pattern == ["balanced", "skewed"] and set(options.arms[:4]) == set(experts._FIRST)


def test_a_sweep_is_of_one_shape_and_one_pattern():
    options = experts.parse(["--sweep", "--shape", "64,7,4096,1536", "16,7,256,128"])
    assert [shape.tokens for shape in options.shape] == [128, 512, 2048, 8192, 32_768, 131_072]
    assert {(shape.experts, shape.hidden, shape.width) for shape in options.shape} == {(64, 4096, 1536)}
    assert options.pattern == ["balanced"]
    assert experts.parse(["--sweep", "--pattern", "skewed"]).pattern == ["skewed"]


def test_a_dense_configuration_is_sent_to_the_other_benchmark(capsys):
    with pytest.raises(SystemExit):
        experts.parse(["--config", "grpo_qwen3_8b"])
    assert "the model is dense. python -m benchmarks.linears" in capsys.readouterr().err


def measure(arms: list[str], kind=experts.measure_experts, known=(), seconds: float = 600.0) -> list[dict]:
    """Rows of a small shape, as a GPU would make them, on this machine."""
    options = argparse.Namespace(arms=arms, rounds=1, budget=Budget(seconds), is_known=lambda row: row["arm"] in known)
    ceilings = {"bf16": 1e12, "fp8": 2e12, "copy": 1e12}
    return list(kind(Shape(3, 300, 256, 128), "skewed", ceilings, options))


def test_rows_of_grouped_experts_have_times_and_floors():
    found = measure(["grouped fp8", "grouped bf16", "te bf16"], known=["grouped bf16"])
    fp8, te = found
    assert fp8["arm"] == "grouped fp8" and "error" not in fp8 and fp8["experts"] == 3
    assert fp8["ms"] > fp8["floor_ms"] > 0 and fp8["forward_ms"] > 0 and fp8["first_s"] > 0
    assert te["error"].startswith("ModuleNotFoundError") and "ms" not in te
    kept = [row | {"device": "cpu"} for row in found]
    assert experts.verdict(kept, Shape(3, 300, 256, 128), "cpu").startswith("not measured on cpu")  # nothing in BF16


def test_each_kernel_is_timed_once(capsys):
    names = [row["arm"] for row in measure([], experts.measure_kernels, known=["layout"])]
    assert "layout" not in names and "permute and quantize" in names and "fc1 wgrad, fp8" in names
    assert len(set(names)) == len(names) == 7 + 2 * 6 + 2
    assert not measure(["grouped fp8"], seconds=-1.0)
    assert "SKIPPED" in capsys.readouterr().out


def test_rows_of_different_kinds_do_not_replace_each_other(tmp_path):
    results = Results(tmp_path / "experts.jsonl", experts.KEYS)
    results.add({"measured": "ceilings", "device": "cpu", "bf16": 1.0})
    results.add(row("te bf16", 3.0, device="cpu"))
    results.add(row("te bf16", 2.0, device="cpu"))
    results.add(row("layout", 2.0, device="cpu") | {"measured": "kernels"})
    assert [found.get("ms") for found in results.rows()] == [None, 2.0, 2.0]


def test_a_whole_run_on_this_machine(tmp_path, prepared, capsys):
    """What a GPU does up to the table and the plot, with made-up ceilings."""
    prepared(experts, "experts", lambda arms: [arm for arm in arms if arm in experts.OURS])
    common = ["--shape", "3,300,128,128", "--rounds", "1", "--results", str(tmp_path / "experts.jsonl")]
    assert experts.main([*common, "--pattern", "skewed"]) == 0
    assert experts.main([*common, "--pattern", "skewed", "--sweep"]) == 0
    text, said = (tmp_path / "measured.md").read_text(), capsys.readouterr().out
    assert "SKIPPED" not in said and "error" not in said
    assert "skewed: FP8 " in said and "grouped fp8 before all: " in said
    assert said.count('"measured": "kernels"') == 7 + 1 + 2 * 6 + 2 and said.count('"arm": "grouped fp8"') == 3
    assert "| 10 to 300 |" in text and "first_s" not in text
    assert (tmp_path / "experts.png").exists()


def test_without_a_gpu_it_says_so(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as left:
        experts.main(["--quick"])
    assert left.value.code == 2 and "needs 1 GPU" in capsys.readouterr().err
