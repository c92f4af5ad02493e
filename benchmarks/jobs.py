"""Everything that needs a GPU, the most worth first: what runs, on how many GPUs, and how long.

Seconds are estimates for an H200 whose caches of compiled kernels are empty, from runs there as far as there were any.
An engine takes 40 s to start, and compiles each of DeepGEMM's kernels when it first meets it, for seconds: CUDA graphs
of many sizes meet dozens, so an engine that samples little starts eagerly. Starting keeps a core busy and no GPU.
Compilers (DeepGEMM's, Triton's) put what they made into shared folders by renaming it, so jobs side by side are safe,
and the first ones pay for the others.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import BUDGET_OPTION


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command in a process of its own."""

    name: str
    module: str
    arguments: tuple[str, ...]
    num_gpus: int = 1
    is_light: bool = False  # starts no engine, times nothing and needs little memory: shares a GPU with such jobs
    seconds: float  # expected; no job starts with less time than ``least_s`` left
    limit_s: float  # after which it is ended
    shortest_s: float | None = None  # a part of the work that pays; None: all of it
    tail_s: float | None = None  # the last part may end so long after the program's own budget; None: it has no budget
    min_gpu_gib: float = 0.0

    @property
    def least_s(self) -> float:
        return self.seconds if self.shortest_s is None else self.shortest_s

    def command(self, seconds: float | None = None) -> list[str]:
        """The words to run, with a budget of its own when it ends ``seconds`` from its start at the latest."""
        words = [sys.executable, "-m", self.module, *self.arguments]
        if seconds is not None and self.tail_s is not None:
            words += [BUDGET_OPTION, f"{max(1.0, min(seconds, self.limit_s) - self.tail_s):.0f}"]
        return words


def _test(name: str, path: str, seconds: float, limit_s: float, *words: str, **more: Any) -> Job:
    """A file of tests: all of them, whatever fails."""
    arguments = ("-q", "-s", "--tb=short", "-p", "no:cacheprovider", path, *words)
    return Job(name=name, module="pytest", arguments=arguments, seconds=seconds, limit_s=limit_s, **more)


def _benchmark(name: str, arguments: str, seconds: float, limit_s: float, **more: Any) -> Job:
    """``benchmarks.NAME`` for a job NAME or NAME.WHAT, with or without the GPUs in front of it."""
    module = f"benchmarks.{name.removeprefix('two_gpus.').removeprefix('four_gpus.').partition('.')[0]}"
    return Job(
        name=name, module=module, arguments=tuple(shlex.split(arguments)), seconds=seconds, limit_s=limit_s, **more
    )  # fmt: skip


_QUICK_PROBE = "--layers 3 --quick --rollout.num_replicas 1 --rollout.placement colocated"
_SAME_KERNELS = "--precision.attention engine --precision.linears deep_gemm"
_SAME_EXPERTS = "--precision.experts deep_gemm --rollout.moe_backend deep_gemm"
_8B = "--layers 8 --compile eager"
_30B = "--model qwen3_30b_a3b --layers 5 --compile eager"
_POW2 = "--scales pow2 --rollout bf16 fp8 fp8_kv --trainer bf16 blockwise delayed engine 'engine, deep_gemm'"
_FP32 = "--scales fp32 --rollout fp8 fp8_kv --trainer bf16 blockwise engine"
_INVARIANT = "--scales pow2 --rollout bf16 fp8 --trainer bf16 blockwise engine 'engine, deep_gemm' --batch-invariant"
_GROUPED = (
    "--scales pow2 --rollout fp8 --trainer blockwise engine 'engine, deep_gemm' --experts deep_gemm --moe deep_gemm"
)
_SPEED = "--compile off --shape"
_CURVE = "--config small_qwen3_8_layers --layout colocated"
_CURVE_MOE = "--config small_qwen3_moe_4_layers --layout separate"
_NCCL = "tests/multi_gpu/test_publish_nccl.py"
_PUBLISH = "--model qwen3_30b_a3b --transport ipc nccl --again --layout"

_ROOT = Path(__file__).parents[1]
# Tests by file, with seconds expected and allowed: those that share a GPU, long ones first, then those with engines.
# Others are found, and follow these.
_LIGHT_TESTS = {
    "dense_linear": (120, 240),
    "grouped_experts": (110, 240),
    "primary_weights": (90, 200),
    "te_training": (60, 150),
    "expert_kernels": (40, 150),
    "engine_bits": (70, 200),
    "dispatch": (40, 120),
    "logprobs": (40, 120),
    "attention": (30, 90),
    "engine_attention": (25, 90),
    "te_linear": (20, 90),
    "kernels": (15, 90),
    "rotary": (15, 90),
}
_TESTS = {
    "kv_scales": (55, 150),
    "publish_ipc": (85, 200),
    "offload": (95, 180),
    "sleep": (120, 200),
}


def _tests() -> Iterator[Job]:
    found = {path.stem.removeprefix("test_").removesuffix("_gpu") for path in _ROOT.glob("tests/gpu/test_*_gpu.py")}
    listed = _LIGHT_TESTS | _TESTS
    for name in [name for name in listed if name in found] + sorted(found - listed.keys()):
        seconds, limit_s = listed.get(name, (100, 240))
        path = f"tests/gpu/test_{name}_gpu.py"
        yield _test(f"gpu.{name}", path, seconds, limit_s, is_light=name in _LIGHT_TESTS)


def _updates() -> Iterator[Job]:
    """One choice of kernels each. Their four processes with a GPU are small, and start as slowly as large ones."""
    for model, option, kernels in (
        *(("small", "linear", linear) for linear in ("deep_gemm", "cutlass", "triton")),
        *(("small_moe", "moe", experts) for experts in ("triton", "deep_gemm")),
    ):
        name = f"updates.{option}_{kernels}"
        scales = "fp32" if kernels in ("cutlass", "triton") and option == "linear" else "pow2"  # what a run may have
        yield _benchmark(name, f"--model {model} --{option} {kernels} --scales {scales}", 180, 300, is_light=True)


JOBS = (
    *_tests(),
    # The runs of a curve start from it, and whoever comes before it is done makes it.
    _benchmark("grpo.warm_start", f"{_CURVE} --precision bf16 --warm-start", 120, 300, shortest_s=60, tail_s=25,
               is_light=True),
    *_updates(),
    *(
        _benchmark(f"grpo.{name}", f"{_CURVE} --precision {name}", seconds, 450, shortest_s=120, tail_s=25)
        for name, seconds in (("bf16", 150), ("fp8", 200), ("fp8_invariant", 230))
    ),
    _benchmark("mismatch.8b", f"{_8B} {_POW2}", 170, 300, min_gpu_gib=110),
    _benchmark("mismatch.30b", f"{_30B} {_POW2}", 190, 320, min_gpu_gib=120),
    _benchmark("mismatch.8b_invariant", f"{_8B} {_INVARIANT}", 150, 300, min_gpu_gib=100),
    _benchmark("mismatch.30b_invariant", f"{_30B} {_GROUPED} --batch-invariant", 160, 300, min_gpu_gib=120),
    _benchmark("mismatch.30b_grouped", f"{_30B} {_GROUPED}", 140, 280, min_gpu_gib=110),
    _benchmark("mismatch.8b_fp32", f"{_8B} {_FP32}", 150, 300, min_gpu_gib=100),
    _benchmark("mismatch.30b_fp32", f"{_30B} {_FP32}", 160, 300, min_gpu_gib=120),
    *(
        _benchmark(f"rollout_speed.{name}_{precision}{suffix}", f"--model {model} --precision {precision} {_SPEED} "
                   f"{shapes} {more}", seconds, 400)
        for name, model, shapes, seconds in (
            ("8b", "qwen3_8b", "short long", 220), ("30b", "qwen3_30b_a3b", "short", 180)
        )
        for precision in ("bf16", "fp8", "fp8_kv")
        for suffix, more in (("", ""), ("_alone", "--engine vllm"))
    ),
    _benchmark("rollout_speed.8b_compiled", "--model qwen3_8b --precision fp8_kv --compile on --shape short long", 260,
               400),
    _benchmark("rollout_speed.8b_invariant", f"--model qwen3_8b --precision fp8 --batch-invariant {_SPEED} short", 260,
               400),
    _benchmark("experts.one_shape", "--shape 128,131072,2048,768", 110, 200),
    # Shapes of other models and ranks: see benchmarks/experts.py.
    *(
        _benchmark(f"experts.{name}", f"--shape {shapes}", 150, 300, shortest_s=60, tail_s=40)
        for name, shapes in (
            ("few", "16,131072,2048,768 8,32768,4096,14336"),
            ("wide", "16,131072,4096,1536 32,65536,7168,2048"),
            ("many", "256,131072,2048,512"),
        )
    ),
    _benchmark("experts.layers", "--layers 4", 200, 420, shortest_s=110, tail_s=70),
    _benchmark("linears.layers", "--layers 4", 180, 420, shortest_s=100, tail_s=70),
    _benchmark("experts.sweep", "--sweep", 150, 400, shortest_s=90, tail_s=40),  # for precision/kernel_choice.py
    _benchmark("linears.sweep", "--sweep", 150, 400, shortest_s=90, tail_s=40),
    _benchmark("linears.alone", "", 150, 400, shortest_s=90, tail_s=40),
    _benchmark("probe.8b", f"grpo_qwen3_8b {_QUICK_PROBE} --precision.attention engine --rollout.batch_invariant True",
               120, 200),
    _benchmark("probe.30b", f"grpo_qwen3_30b_a3b {_QUICK_PROBE} --rollout.tensor 1", 110, 200),
    *(
        _benchmark(f"probe.30b_{name}", f"grpo_qwen3_30b_a3b {_QUICK_PROBE} --rollout.tensor 1 {_SAME_KERNELS} "
                   f"--output_dir runs/benchmarks/probe/{name} {more}", 110, 200)
        for name, more in (("invariant", f"{_SAME_EXPERTS} --rollout.batch_invariant True"), ("grouped", _SAME_EXPERTS))
    ),
    _benchmark("mismatch.quick", "--quick --compile eager", 120, 300),
    *(
        _benchmark(f"recipes.{model}", f"--model {model}", seconds, 600, shortest_s=60, tail_s=60)
        for model, seconds in (("small", 240), ("small_moe", 550))
    ),
    _benchmark("same_bytes.30b", "--model qwen3_30b_a3b", 170, 300, min_gpu_gib=120),
    _benchmark(
        "grpo.small", "--config small_qwen3 --steps 30 --layout colocated sleep", 900, 1200, shortest_s=300, tail_s=25
    ),
    *(
        _benchmark(f"ledger.{shape}", f"--shape {shape} --arm bf16 fp8 fp8_kv exact", 900, 1800, shortest_s=400, tail_s=10)
        for shape in ("0.6b", "1.7b", "4b")
    ),
    _benchmark("memory", "", 90, 240),
    _benchmark("publish.quick", "--quick", 100, 240),
    _test("two_gpus.publish_nccl", _NCCL, 65, 150, "-k", "one_trainer", num_gpus=2),
    _benchmark("two_gpus.publish", "--model qwen3_8b --layout 1+1 --transport ipc nccl", 150, 400, num_gpus=2,
               shortest_s=105, tail_s=10),
    *(
        _benchmark(f"two_gpus.ledger.{shape}", f"--shape {shape} --arm bf16 fp8 fp8_kv exact", 900, 1800, num_gpus=2,
                   shortest_s=400, tail_s=10)
        for shape in ("8b_separate", "8b_colocated", "30b_a3b_separate", "30b_a3b_colocated")
    ),
    # Both ends on the same GPUs, so that few are taken; engines of two GPUs, which hold other slices than the trainer.
    *(
        _benchmark(f"two_gpus.same_bytes.{name}", f"--model {model} --layers 4 --placement colocated --trainer-layout "
                   f"{trainer} --engine-layout {engines}", 130, 240, num_gpus=2, shortest_s=70, tail_s=15)
        for name, model, trainer, engines in (
            ("tp2", "qwen3_30b_a3b", "tp2", "tp2 ep2"),
            ("ep2", "qwen3_30b_a3b", "ep2", "tp2 ep2"),
            ("tp2ep2", "qwen3_30b_a3b", "tp2ep2", "tp2 ep2"),
            ("pp2", "qwen3_30b_a3b", "pp2", "tp2 ep2"),
            ("8b", "qwen3_8b", "tp2", "tp2"),
        )
    ),
    _benchmark("four_gpus.same_bytes.ep4", "--model qwen3_30b_a3b --layers 4 --placement colocated --trainer-layout "
               "ep4 --engine-layout ep2", 90, 200, num_gpus=4, shortest_s=70, tail_s=15),
    _test("four_gpus.publish_nccl", _NCCL, 180, 300, "-k", "two_trainers", num_gpus=4),
    *(
        _benchmark(f"four_gpus.publish.{layout}", f"{_PUBLISH} {layout}", 250, 400, num_gpus=4)
        for layout in ("tp2+tp2", "ep2+ep2", "tp2ep2+ep2", "pp2+tp2")
    ),
    # The host takes the most of its steps, so it shares a GPU with nobody.
    _benchmark("grpo.warm_start_moe", f"{_CURVE_MOE} --precision bf16 --warm-start", 150, 400, shortest_s=60,
               tail_s=25),
    _benchmark("four_gpus.grpo", _CURVE_MOE, 330, 600, num_gpus=4, shortest_s=150, tail_s=25),
)  # fmt: skip
