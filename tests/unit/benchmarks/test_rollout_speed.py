"""What the throughput benchmark computes besides times: limits, cells, what a log says, rows that add up."""

import pytest

from benchmarks import rollout_speed as speed
from benchmarks.runner import parse
from benchmarks.whole_runs import read_log
from megatron_fp8rl.preflight import rules

SPEED = speed.RolloutSpeed()


def read(model: str, precision: str, shape: speed.Shape) -> tuple[float, float]:
    cell = speed.Cell("run", model, precision, "auto", "auto", "auto", False, False)
    return speed.bytes_read(speed.run_config(cell, [shape]), shape)


def test_roofline_of_a_dense_model_is_its_matrices_and_its_cache():
    """Qwen3-8B: 8.19 G parameters, 0.62 G of them an unread embedding; 147,456 cache bytes per token."""
    weights, cache = read("qwen3_8b", "bf16", speed.SHAPES["long"])
    assert weights == pytest.approx(2 * (8_190_735_360 - 151936 * 4096), rel=1e-4)
    assert cache == 128 * (2048 + 1536) * 2 * 36 * 8 * 128 * 2
    cell = speed.Cell("run", "qwen3_8b", "bf16", "auto", "auto", "auto", False, False)
    row = speed.speeds(cell, "long", speed.SHAPES["long"], seconds=10.0, bandwidth=4.8e12)
    assert row["roofline_tokens_per_s"] == pytest.approx(128 * 4.8e12 / (weights + cache), abs=1)


def test_fp8_halves_what_it_covers_and_no_more():
    shape, head = speed.SHAPES["short"], 2 * 151936 * 4096
    bf16, fp8, both = (read("qwen3_8b", precision, shape) for precision in ("bf16", "fp8", "fp8_kv"))
    assert fp8[0] - head == pytest.approx((bf16[0] - head) / 2, rel=1e-3)
    assert (fp8[1], both[1]) == (bf16[1], bf16[1] / 2)


def test_a_small_batch_reads_only_the_experts_that_it_reaches():
    one, _ = read("qwen3_30b_a3b", "bf16", speed.Shape(1, 1, 1))
    everyone, _ = read("qwen3_30b_a3b", "bf16", speed.Shape(1, 1, 4096))
    assert everyone - one == pytest.approx((128 - 8) * 2 * 3 * 2048 * 768 * 48, rel=1e-6)


def cells_of(*args: str) -> list[speed.Cell]:
    return [speed.Cell(**arm) for arm in SPEED.arms(parse(SPEED, args))]


def shown(cell: speed.Cell) -> dict:
    row = {**vars(cell), "environment": {}, "device": "x", "kv_tokens": None, "start_s": 3.0}
    return SPEED.line(row | speed.speeds(cell, "short", speed.SHAPES["short"], seconds=10.0, bandwidth=4.8e12))


def test_cells_that_would_be_the_same_engine_run_once():
    args = ["--model", "qwen3_8b", "--precision", "bf16", "fp8", "--linear", "deep_gemm", "cutlass"]
    assert [(c.precision, c.linear, c.moe) for c in cells_of(*args, "--moe", "auto", "triton")] == [
        ("bf16", "auto", "auto"),
        ("fp8", "deep_gemm", "auto"),
        ("fp8", "cutlass", "auto"),
    ]


def test_batch_invariant_engines_are_cells_of_their_own_and_never_compiled():
    args = ["--model", "qwen3_8b", "--precision", "fp8", "--compile"]
    (invariant,) = cells_of(*args, "on", "off", "--batch-invariant")
    (plain,) = cells_of(*args, "off")
    assert invariant != plain and not invariant.compile
    cfg = speed.run_config(invariant, [speed.SHAPES["short"]])
    assert cfg.engine.batch_invariant and rules.check(cfg, accelerator="hopper") == []
    chosen = shown(invariant)["asked: linear / experts / attention"]
    assert chosen == "auto / auto / auto, no compile, batch-invariant"
    assert {"batch_invariant", "compile"} <= set(SPEED.keys)


def test_the_baseline_is_one_engine_of_each_precision_on_the_kernels_that_vllm_takes():
    args = "--engine run vllm --model qwen3_8b --precision bf16 fp8_kv --compile on off".split()
    cells = cells_of(*args, "--linear", "deep_gemm", "cutlass")
    alone = [cell for cell in cells if cell.engine == "vllm"]
    assert [(c.precision, c.linear, c.compile) for c in alone] == [("bf16", "auto", True), ("fp8_kv", "auto", True)]
    assert len(cells) == 2 + 4 + 2
    line = shown(alone[0])
    assert line["asked: linear / experts / attention"] == "vLLM's offline API" and line["tokens/s"] == "26,214"


def test_log_lines_of_vllm_are_read():
    log = """
INFO [cuda.py:477] Using AttentionBackendEnum.FLASH_ATTN attention backend out of potential backends: [...]
INFO [__init__.py:543] Selected DeepGemmFp8BlockScaledMMKernel for Fp8LinearMethod
INFO [fp8.py:405] Using TRITON Fp8 MoE backend out of potential backends: ['TRITON', 'DEEPGEMM'].
INFO [model_runner.py:303] Model loading took 29.13 GiB and 6.1 seconds
INFO [kv_cache_utils.py:2146] GPU KV cache size: 1,234,560 tokens
"""
    actual = read_log(log)
    assert actual["kv_tokens"] == 1_234_560 and actual["weights_gib"] == 29.13
    assert actual["kernels"] == ["DeepGemmFp8BlockScaledMMKernel", "TRITON", "FLASH_ATTN"]
    assert read_log("")["kv_tokens"] is None


@pytest.mark.parametrize("model", ["qwen3_8b", "qwen3_30b_a3b"])
@pytest.mark.parametrize("linear", ["auto", "deep_gemm", "cutlass", "triton"])
def test_engines_that_are_measured_are_engines_that_runs_may_have(model, linear):
    args = ["--model", model, "--linear", linear, "--moe", "auto", "deep_gemm", "--compile", "on", "off"]
    for cell in cells_of(*args):
        cfg = speed.run_config(cell, list(speed.SHAPES.values()))
        assert rules.check(cfg, accelerator="hopper") == [], cell
