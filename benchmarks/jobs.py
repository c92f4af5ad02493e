"""Everything that needs a GPU, the most worth first: what runs, on how many GPUs, and how long.

Seconds are estimates for an H200 whose caches of compiled kernels are empty, from runs there as far as there were any.
An engine takes 20 s to start, and compiles each of DeepGEMM's kernels when it first meets it, for seconds: CUDA graphs
of many sizes meet dozens, so an engine that samples little starts eagerly. Compilers (DeepGEMM's, Triton's) put what
they made into shared folders by renaming it, so jobs side by side are safe, and the first ones pay for the others.
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
    """A command in a process of its own. Jobs of one program run one after the other: they share a table of results."""

    name: str
    module: str
    arguments: tuple[str, ...]
    num_gpus: int = 1
    seconds: float  # expected; no job starts with less time than ``least_s`` left
    limit_s: float  # after which it is ended
    shortest_s: float | None = None  # a part of the work that pays; None: all of it
    tail_s: float | None = None  # the last part may end so long after the program's own budget; None: it has no budget
    min_gpu_gib: float = 0.0

    @property
    def least_s(self) -> float:
        return self.seconds if self.shortest_s is None else self.shortest_s

    @property
    def program(self) -> str:
        return self.name if self.module == "pytest" else self.module

    def command(self, seconds: float | None = None) -> list[str]:
        """The words to run, with a budget of its own when it ends ``seconds`` from its start at the latest."""
        words = [sys.executable, "-m", self.module, *self.arguments]
        if seconds is not None and self.tail_s is not None:
            words += [BUDGET_OPTION, f"{max(1.0, min(seconds, self.limit_s) - self.tail_s):.0f}"]
        return words


def _test(name: str, path: str, seconds: float, limit_s: float, *more: str, num_gpus: int = 1) -> Job:
    """A file of tests: all of them, whatever fails."""
    arguments = ("-q", "-s", "--tb=short", "-p", "no:cacheprovider", path, *more)
    return Job(
        name=name, module="pytest", arguments=arguments, num_gpus=num_gpus, seconds=seconds, limit_s=limit_s
    )  # fmt: skip


def _benchmark(name: str, arguments: str, seconds: float, limit_s: float, **more: Any) -> Job:
    """``benchmarks.NAME`` for a job NAME or NAME.WHAT, with or without the GPUs in front of it."""
    module = f"benchmarks.{name.removeprefix('two_gpus.').removeprefix('four_gpus.').partition('.')[0]}"
    return Job(
        name=name, module=module, arguments=tuple(shlex.split(arguments)), seconds=seconds, limit_s=limit_s, **more
    )  # fmt: skip


_QUICK_PROBE = "--layers 3 --quick --rollout.num_replicas 1 --rollout.placement colocated"
_MISMATCH = (
    "--layers 8 --compile eager --rollout fp8 --scales pow2 "
    "--trainer blockwise engine deep_gemm 'engine, deep_gemm'"
)
_NCCL = "tests/multi_gpu/test_publish_nccl.py"
_PUBLISH = "--model qwen3_30b_a3b --transport ipc nccl --again --layout"

_ROOT = Path(__file__).parents[1]
# Tests by file, with seconds expected and allowed: what has never run comes first. Others are found, and follow these.
_TESTS = {
    "engine_attention": (40, 90),
    "expert_kernels": (75, 150),
    "dense_linear": (120, 240),
    "rotary": (30, 90),
    "grouped_experts": (140, 240),
    "sleep": (80, 180),
    "publish_ipc": (130, 240),
    "kv_scales": (80, 180),
    "te_training": (60, 150),
    "te_linear": (25, 90),
    "attention": (35, 90),
    "kernels": (30, 90),
    "offload": (85, 180),
}


def _tests() -> Iterator[Job]:
    found = {path.stem.removeprefix("test_").removesuffix("_gpu") for path in _ROOT.glob("tests/gpu/test_*_gpu.py")}
    for name in [name for name in _TESTS if name in found] + sorted(found - _TESTS.keys()):
        yield _test(f"gpu.{name}", f"tests/gpu/test_{name}_gpu.py", *_TESTS.get(name, (100, 240)))


JOBS = (
    *_tests(),
    _benchmark("experts.one_shape", "--shape 128,131072,2048,768", 120, 200),
    _benchmark("experts.layers", "--layers 4", 120, 300, shortest_s=90, tail_s=40),
    _benchmark("linears.layers", "--layers 4", 100, 300, shortest_s=80, tail_s=40),
    _benchmark("experts.sweep", "--sweep", 150, 400, shortest_s=90, tail_s=40),  # for fp8/auto_kernels.py
    _benchmark("linears.sweep", "--sweep", 150, 400, shortest_s=90, tail_s=40),
    _benchmark("linears.alone", "", 150, 400, shortest_s=90, tail_s=40),
    _benchmark(
        "probe.8b", f"grpo_qwen3_8b {_QUICK_PROBE} --precision.attention engine --rollout.batch_invariant True", 90, 180
    ),
    _benchmark("probe.30b", f"grpo_qwen3_30b_a3b {_QUICK_PROBE} --rollout.tensor 1", 100, 180),
    _benchmark("mismatch.8b", _MISMATCH, 200, 400, min_gpu_gib=90),
    _benchmark("mismatch.8b_invariant", f"{_MISMATCH} --batch-invariant", 170, 300, min_gpu_gib=90),
    _benchmark("mismatch.quick", "--quick --compile eager", 120, 300),
    _benchmark("mismatch.30b", "--model qwen3_30b_a3b --layers 5 --compile eager", 500, 700,
               shortest_s=200, tail_s=120, min_gpu_gib=120),
    _benchmark("recipes.small_moe", "--model small_moe", 400, 600, shortest_s=120, tail_s=60),
    _benchmark("updates", "", 300, 660, shortest_s=145, tail_s=10),
    _benchmark("same_bytes.30b", "--model qwen3_30b_a3b", 170, 300, min_gpu_gib=120),
    _benchmark("rollout_speed.quick", "--quick", 300, 500),
    _benchmark(
        "grpo.small", "--config small_qwen3 --steps 30 --layout colocated sleep", 600, 900, shortest_s=150, tail_s=10
    ),
    _benchmark("memory", "", 90, 240),
    _benchmark("publish.quick", "--quick", 100, 240),
    _test("two_gpus.publish_nccl", _NCCL, 60, 150, "-k", "one_trainer", num_gpus=2),
    _benchmark("two_gpus.publish", "--model qwen3_8b --layout 1+1 --transport ipc nccl", 150, 400, num_gpus=2,
               shortest_s=105, tail_s=10),
    _test("four_gpus.publish_nccl", _NCCL, 120, 270, "-k", "two_trainers", num_gpus=4),
    *(
        _benchmark(f"four_gpus.publish.{layout}", f"{_PUBLISH} {layout}", 140, 400, num_gpus=4)
        for layout in ("tp2+tp2", "ep2+ep2", "tp2ep2+ep2", "pp2+tp2")
    ),
    _benchmark("four_gpus.grpo", "--config small_qwen3_moe --steps 30 --layout separate", 400, 600, num_gpus=4,
               shortest_s=150, tail_s=10),
)  # fmt: skip
