"""Does FP8 pay? What is quoted of rows that a GPU would have measured; all rows here are made up."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, replace

import pytest

from benchmarks import fp8_pays as pays
from benchmarks import measured_rows as measured
from benchmarks.experts import Experts as ExpertsBenchmark
from benchmarks.linears import Linears
from benchmarks.measured_rows import Answer
from benchmarks.runner import parse
from megatron_fp8rl.config import ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_fp8rl.precision import kernel_choice
from megatron_fp8rl.precision.matmul_shapes import Experts, Linear, linears_of
from model_configs.deepseek import grpo_deepseek_v3
from model_configs.qwen3 import grpo_qwen3_8b, grpo_qwen3_30b_a3b

H200 = "NVIDIA H200"
EXPERTS = Experts(128, 131_072, 2048, 768)
QKV, OUT, MLP = (
    Linear("linear", 16_384, 6144, 4096),
    Linear("linear", 16_384, 4096, 4096),
    Linear("mlp", 16_384, 4096, 12_288),
)


def run(cfg, tokens: int = 16_384, **precision):
    rollout = replace(RolloutConfig(), max_tokens_per_microbatch=tokens)
    return replace(cfg, parallel=ParallelConfig(), rollout=rollout, precision=PrecisionConfig(**precision))


@pytest.fixture(autouse=True)
def auto_is_transformer_engine(monkeypatch):
    """Whatever H200s have measured so far."""
    monkeypatch.setattr(kernel_choice, "DEEP_GEMM_IS_FASTER", dict.fromkeys(
        kernel_choice.DEEP_GEMM_IS_FASTER, kernel_choice.Range(math.inf)
    ))  # fmt: skip


def timed(shape, ms: dict[str, float], device: str = H200, pattern: str = "balanced") -> list[dict]:
    is_moe = isinstance(shape, Experts)
    base = {"measured": "experts" if is_moe else "linears", **asdict(shape), "device": device}
    base |= {"pattern": pattern} if is_moe else {}
    return [base | {"arm": arm, "ms": time} for arm, time in ms.items()]


def of_experts(rows, cfg, gpu: str = "h200"):
    return pays.findings(cfg, gpu, {"experts": rows, "linears": []})[0]


def of_linears(rows, cfg, gpu: str = "h200"):
    return pays.findings(cfg, gpu, {"experts": [], "linears": rows})[-1]


def test_an_answer_compares_the_best_of_both():
    answer = Answer.of({"te bf16": 3.0, "grouped bf16": 2.0, "te blockwise": 6.0, "grouped fp8, bf16 wgrad": 1.0})
    assert str(answer) == "FP8 pays: grouped fp8, bf16 wgrad 1.00 ms, grouped bf16 2.00 ms, 2.00x"
    assert str(Answer.of({"a bf16": 1.01, "b": 1.0})).startswith("FP8 makes no difference")
    assert str(Answer.of({"a bf16": 1.0, "b": 1.0 / 0.97})).startswith("FP8 does not pay")
    assert Answer.of({"a bf16": 1.0}) is Answer.of({"b": 1.0}) is Answer.of({}) is None


def test_experts_are_quoted_with_shape_device_and_command():
    rows = timed(EXPERTS, {"te bf16": 12.0, "te blockwise": 20.0, "grouped fp8": 8.0})
    note = of_experts(rows, run(grpo_qwen3_30b_a3b()))
    assert note.severity == "note" and note.subject == "FP8 for experts"
    assert note.problem == (
        "FP8 pays: grouped fp8 8.00 ms, te bf16 12.00 ms, 1.50x (128 experts of 2048 x 768, 131,072 routed tokens, "
        "balanced, NVIDIA H200)"
    )
    assert note.remedy == "The faster kernels are --precision.experts deep_gemm"
    assert note.command == "python -m benchmarks.experts --shape 128,131072,2048,768 --pattern balanced"
    assert not of_experts(rows, run(grpo_qwen3_30b_a3b(), experts="deep_gemm")).remedy


def test_experts_of_another_number_are_quoted_by_the_tokens_of_each():
    cfg = run(grpo_qwen3_30b_a3b())
    rows = []
    for experts, tokens, ms in ((64, 131_072, 1.0), (32, 32_768, 2.0), (256, 262_144, 3.0), (16, 16_384, 4.0)):
        shape = replace(EXPERTS, experts=experts, tokens=tokens)
        rows += timed(shape, {"te bf16": 2 * ms, "te blockwise": ms})
    note = of_experts(rows, cfg)  # 1,024 tokens for each of 128 experts
    assert "te blockwise 3.00 ms" in note.problem
    assert "256 experts of 2048 x 768 where the run has 128, 262,144 routed tokens where the run has 131,072" in note.problem
    assert note.command.endswith("--shape 256,262144,2048,768 --pattern balanced")
    own = timed(replace(EXPERTS, tokens=64), {"te bf16": 12.0, "te blockwise": 6.0})
    assert "128 experts of 2048 x 768, 64 routed tokens" in of_experts(rows + own, cfg).problem


def test_the_newest_time_of_an_arm_counts():
    rows = timed(EXPERTS, {"te bf16": 12.0, "grouped fp8": 8.0}) + timed(EXPERTS, {"te bf16": 4.0})
    assert of_experts(rows, run(grpo_qwen3_30b_a3b())).problem.startswith("FP8 does not pay")
    failed = [*timed(EXPERTS, {"te bf16": 12.0, "grouped fp8": 8.0}), rows[0] | {"error": "no memory"}]
    del failed[-1]["ms"]
    assert of_experts(failed, run(grpo_qwen3_30b_a3b())).problem.startswith("FP8 pays")


def test_the_nearest_tokens_then_the_pattern():
    rows = []
    for tokens, ms in ((4_096, 1.0), (32_768, 2.0), (131_072, 8.0)):
        rows += timed(replace(EXPERTS, tokens=tokens), {"te bf16": 2 * ms, "te blockwise": ms}, pattern="skewed")
    rows += timed(replace(EXPERTS, tokens=32_768), {"te bf16": 3.0, "te blockwise": 2.0})
    note = of_experts(rows, run(grpo_qwen3_30b_a3b(), tokens=6_000))
    assert "32,768 routed tokens where the run has 48,000, balanced" in note.problem and "1.50x" in note.problem
    note = of_experts(rows, run(grpo_qwen3_30b_a3b(), tokens=64))
    assert "4,096 routed tokens where the run has 512, skewed" in note.problem
    assert note.command.endswith("--shape 128,4096,2048,768 --pattern skewed") and not note.remedy


def test_the_gpu_that_is_meant_comes_first():
    near = timed(EXPERTS, {"te bf16": 12.0, "te blockwise": 6.0}, device="NVIDIA H100 80GB HBM3")
    far = timed(replace(EXPERTS, tokens=512), {"te bf16": 9.0, "te blockwise": 6.0})
    assert "1.50x" in of_experts(near + far, run(grpo_qwen3_30b_a3b())).problem
    assert "2.00x" in of_experts(near + far, run(grpo_qwen3_30b_a3b()), gpu="h100").problem
    other = of_experts(near, run(grpo_qwen3_30b_a3b()))
    assert "NVIDIA H100 80GB HBM3" in other.problem
    grouped = timed(EXPERTS, {"te bf16": 12.0, "grouped fp8": 6.0})
    assert "--precision.experts deep_gemm" in of_experts(grouped, run(grpo_qwen3_30b_a3b())).remedy
    assert not of_experts(grouped, run(grpo_qwen3_30b_a3b()), gpu="b200").remedy  # it cannot run them
    assert "was not measured" in of_experts(grouped, run(grpo_qwen3_30b_a3b(), gradients="e5m2")).problem


def test_names_of_gpus():
    assert measured.is_of("h200", "NVIDIA H200") and measured.is_of("h100", "NVIDIA H100 80GB HBM3")
    assert measured.is_of("NVIDIA H200", "NVIDIA H200")
    assert not measured.is_of("h200", "NVIDIA GH200 480GB") and not measured.is_of("h100", "NVIDIA H200")


def test_another_shape_or_recipe_is_not_quoted():
    rows = [*timed(EXPERTS, {"te bf16": 12.0, "te delayed": 6.0}), {"measured": "ceilings", "device": H200}]
    rows += timed(replace(EXPERTS, width=1536), {"te bf16": 12.0, "te blockwise": 6.0})
    note = of_experts(rows, run(grpo_qwen3_30b_a3b()))
    assert note.problem == "whether it pays was not measured: 128 experts of 2048 x 768"
    assert note.command == "python -m benchmarks.experts --shape 128,131072,2048,768"
    assert "te delayed 6.00 ms" in of_experts(rows, run(grpo_qwen3_30b_a3b(), trainer="delayed")).problem


def test_linears_count_as_often_as_there_are_layers_that_have_them():
    cfg = run(grpo_qwen3_8b())
    rows = timed(QKV, {"te bf16": 3.0, "ours te blockwise": 2.0, "ours deep_gemm": 1.0, "te delayed": 0.1})
    rows += timed(OUT, {"te bf16": 2.0, "ours te blockwise": 1.0, "ours deep_gemm": 1.0})
    note = of_linears(rows, cfg)
    assert note.problem == "whether it pays was not measured: 1 of 3 shapes of this run"
    assert note.command == "python -m benchmarks.linears --shape 16384,4096,12288,mlp"

    rows += timed(MLP, {"te bf16": 15.0, "ours te blockwise": 7.0, "ours deep_gemm": 9.0, "ours te bf16": 1.0})
    note = of_linears(rows, cfg)
    assert note.problem == (
        "FP8 pays: ours te blockwise 360.00 ms, te bf16 720.00 ms, 2.00x (the linears of 36 layers, 16,384 tokens, "
        "NVIDIA H200)"
    )
    assert not note.remedy and note.command == (
        "python -m benchmarks.linears --shape 16384,6144,4096 16384,4096,4096 16384,4096,12288,mlp"
    )
    named = of_linears(rows, run(grpo_qwen3_8b(), linears="deep_gemm"))
    assert named.remedy == "The faster kernels are --precision.linears te"
    in_bf16 = of_linears(rows, run(grpo_qwen3_8b(), trainer="bf16"))
    assert in_bf16.problem == note.problem and not in_bf16.remedy
    assert "where the run has 8,192" in of_linears(rows, run(grpo_qwen3_8b(), tokens=8192)).problem


def test_a_matrix_that_deep_gemm_leaves_to_others_counts_on_both_sides():
    """kv_a_proj_with_mqa of DeepSeek-V3 has 576 rows."""
    cfg = grpo_deepseek_v3()
    rows = []
    for use in linears_of(cfg):
        is_whole = use.shape.rows % 128 == 0
        ms = {"te bf16": 3.0, "ours te blockwise": 2.0} | ({"ours deep_gemm": 1.0} if is_whole else {})
        rows += timed(use.shape, ms)
    layers = [use.num_layers for use in linears_of(cfg)]
    problem = of_linears(rows, cfg).problem
    assert f"ours deep_gemm {sum(layers) + 61:.2f} ms, te bf16 {3 * sum(layers):.2f} ms" in problem


def test_linears_of_two_devices_are_not_added():
    ms = {"te bf16": 2.0, "ours te blockwise": 1.0}
    h100 = [row for shape in (QKV, OUT, MLP) for row in timed(shape, ms, device="NVIDIA H100 80GB HBM3")]
    assert "NVIDIA H100" in of_linears(h100 + timed(QKV, ms), run(grpo_qwen3_8b())).problem
    assert "1 of 3" in of_linears(h100[:4] + timed(MLP, ms), run(grpo_qwen3_8b())).problem


def test_commands_are_those_that_the_benchmarks_take():
    for cfg, benchmark in ((grpo_qwen3_30b_a3b(), ExpertsBenchmark()), (grpo_qwen3_8b(), Linears())):
        note = pays.findings(cfg, "h200", {"experts": [], "linears": []})[0]
        words = shlex.split(note.command)
        assert words[:3] == ["python", "-m", f"benchmarks.{benchmark.name}"]
        options = parse(benchmark, words[3:])
        assert options.shape and all(pays.text_of(shape) in words for shape in options.shape)


def test_the_command_answers_for_a_configuration(capsys):
    assert pays.main(["grpo_qwen3_30b_a3b", "--parallel.expert", "1"]) == 0
    printed = capsys.readouterr().out
    assert "FP8 for experts: " in printed and "FP8 for linears: " in printed and "$ python -m benchmarks." in printed
