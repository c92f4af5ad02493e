"""Sampling speed and cache capacity of engines in BF16, FP8, and FP8 with an FP8 cache.

    python -m benchmarks.rollout_speed --model qwen3_8b --precision bf16 fp8 fp8_kv --shape short long
    python -m benchmarks.rollout_speed --model qwen3_8b --precision fp8 --linear deep_gemm cutlass triton --shape long
    python -m benchmarks.rollout_speed --model qwen3_8b --precision fp8 --batch-invariant --compile off --shape short
    python -m benchmarks.rollout_speed --model qwen3_8b --engine vllm     the baseline: vLLM's offline API

Engines start as in a run (rollout/fleet.py), with dummy weights. Requests go over HTTP with a seed each and return
log-probabilities. One engine serves all shapes of a combination of kernels. Environment variables VLLM_* reach the
engines and are part of a row's key. The baseline has no server, seeds or text, and vLLM's kernels without DeepGEMM.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import runner
from benchmarks.record import FOLDER, Row
from benchmarks.runner import device_name, num_gpus
from benchmarks.timing import copy_bandwidth, peak_bandwidth
from benchmarks.training import MODELS
from benchmarks.whole_runs import read_log
from megatron_fp8rl.config import EngineConfig, OptimConfig, PrecisionConfig, RunConfig, SamplingConfig
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.step_time import weight_bytes_read
from megatron_fp8rl.rollout.vllm_args import kv_token_bytes, quantization_config

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet

# Variables for folders and logs, and a sampler that processed_logprobs excludes.
_NOT_KERNELS = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_LOGGING_LEVEL", "VLLM_USE_FLASHINFER_SAMPLER")
_WARM_TOKENS = 16  # sampled before timing: kernels compile, caches fill
_ATTEMPTS = 2  # to time without compilation: DeepGEMM compiles for seconds at new batch sizes


@dataclass(frozen=True)
class Shape:
    prompt_tokens: int
    completion_tokens: int
    num_sequences: int


SHAPES = {
    "short": Shape(512, 1024, 256),
    "long": Shape(2048, 3072, 128),
    "8k": Shape(512, 8192, 64),
    "tiny": Shape(16, 8, 8),
}


@dataclass(frozen=True)
class Cell:
    engine: str  # run: as in a run; vllm: the offline API
    model: str
    precision: str  # bf16, fp8, fp8_kv
    linear: str
    moe: str
    attention: str
    compile: bool
    batch_invariant: bool


def run_config(cell: Cell, shapes: Sequence[Shape]) -> RunConfig:
    sampling = SamplingConfig(
        max_prompt_tokens=max(s.prompt_tokens for s in shapes),
        max_completion_tokens=max(s.completion_tokens for s in shapes),
    )
    engine = EngineConfig(
        max_num_sequences=max(s.num_sequences for s in shapes),
        kv_cache_dtype="fp8" if cell.precision == "fp8_kv" else "auto",
        graphs="compiled" if cell.compile else "plain",
        batch_invariant=cell.batch_invariant,
        gpu_memory_utilization=0.9,
        deadline_scale=2.0,
    )
    optim = OptimConfig(max_tokens_per_microbatch=16384)
    kernels = {"engine_linears": cell.linear, "engine_experts": cell.moe, "engine_attention": cell.attention}
    rollout_precision = "bf16" if cell.precision == "bf16" else "blockwise"
    # Only DeepGEMM rounds the scales of activations to powers of two.
    scales = "fp32" if cell.linear in ("cutlass", "triton") else "pow2"
    return RunConfig(
        name="rollout_speed",
        model=MODELS[cell.model](),
        precision=PrecisionConfig(
            trainer="bf16", rollout=rollout_precision, scales=scales, kernels=kernels, exact=False
        ),
        sampling=sampling,
        engine=engine,
        optim=optim,
        output_dir=str(FOLDER / "rollout_speed" / "-".join(map(str, asdict(cell).values()))),
    )


def sample(fleet: Fleet, shape: Shape, vocab_size: int, *, max_tokens: int, seed: int) -> float:
    """Seconds to sample exactly ``max_tokens`` for every sequence. Prompts depend on the seed."""
    from megatron_fp8rl.rollout.completions import Sampling

    draw = random.Random(seed)
    lowest = min(100, vocab_size // 4)  # no special tokens
    prompts = [
        [draw.randrange(lowest, vocab_size) for _ in range(shape.prompt_tokens)] for _ in range(shape.num_sequences)
    ]
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=max_tokens, stop_token_ids=(), stop_strings=())
    (client,) = fleet.clients

    async def everything() -> int:
        answers = await asyncio.gather(
            *(client.generate(prompt, 1, 1000 * seed + i, sampling=sampling) for i, prompt in enumerate(prompts))
        )
        return sum(len(completion.token_ids) for (completion,) in answers)

    started = time.perf_counter()
    num_tokens = fleet.sync(everything(), fleet.cfg.engine.request_s)
    seconds = time.perf_counter() - started
    if num_tokens != shape.num_sequences * max_tokens:
        raise RuntimeError(f"{num_tokens} tokens were sampled instead of {shape.num_sequences} x {max_tokens}")
    return seconds


def bytes_read(cfg: RunConfig, shape: Shape) -> tuple[float, float]:
    """Bytes that a decode step reads, as ``plan`` counts them: of weights, and of a cache with half of the tokens."""
    cached = shape.num_sequences * (shape.prompt_tokens + shape.completion_tokens / 2)
    return weight_bytes_read(cfg, shape.num_sequences), cached * kv_token_bytes(cfg.model, cfg.engine, expanded=False)


def speeds(cell: Cell, name: str, shape: Shape, seconds: float, bandwidth: float) -> Row:
    """Speeds of a shape, and the roofline: the limit of ``bandwidth`` in bytes/s, without arithmetic and prefill."""
    read = sum(bytes_read(run_config(cell, [shape]), shape))
    limit = shape.num_sequences * bandwidth / read
    tokens_per_s = shape.num_sequences * shape.completion_tokens / seconds
    return {
        "shape": name,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens_per_s, 1),
        "roofline_tokens_per_s": round(limit),
        "of_roofline": round(tokens_per_s / limit, 3),
        "read_gb_per_step": round(read / 1e9, 2),
    }


def num_kernels() -> int:
    from megatron_fp8rl.kernels.deep_gemm import compiled_folder

    return sum(1 for _ in Path(compiled_folder()).glob("cache/*/kernel.cubin"))


def run_rows(cell: Cell, shapes: dict[str, Shape], bandwidth: float) -> Iterator[Row]:
    from megatron_fp8rl.rollout.fleet import Fleet

    cfg, started = run_config(cell, list(shapes.values())), time.perf_counter()
    with Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir) as fleet:
        log = (Path(cfg.run_dir) / "logs" / "rollout-0.log").read_text(encoding="utf-8", errors="replace")
        row = {"start_s": round(time.perf_counter() - started, 1), **read_log(log)}
        for seed, (name, shape) in enumerate(shapes.items(), 1):
            warm = min(_WARM_TOKENS, shape.completion_tokens)
            sample(fleet, shape, cfg.model.vocab_size, max_tokens=warm, seed=10 * seed)
            for attempt in range(1, _ATTEMPTS + 1):
                compiled = num_kernels()
                draw = {"max_tokens": shape.completion_tokens, "seed": seed + 100 * attempt}
                seconds = sample(fleet, shape, cfg.model.vocab_size, **draw)
                if (new := num_kernels() - compiled) == 0:
                    break
                print(f"{new} kernels were compiled while {name} was timed", flush=True)
            yield row | {"compiled_meanwhile": new} | speeds(cell, name, shape, seconds, bandwidth)


def vllm_rows(cell: Cell, shapes: dict[str, Shape], bandwidth: float, log: Path) -> Iterator[Row]:
    """Rows of vLLM's offline API in this process, whose output goes to ``log``."""
    os.environ |= {"VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    from vllm import LLM, SamplingParams

    cfg, started = run_config(cell, list(shapes.values())), time.perf_counter()
    fp8 = {"hf_overrides": {"quantization_config": quantization_config(cfg.model, cfg.precision)}}
    engine = LLM(
        model=str(write_model_dir(cfg)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=cfg.engine.kv_cache_dtype,
        max_num_seqs=cfg.engine.max_num_sequences,
        max_model_len=cfg.sampling.max_prompt_tokens + cfg.sampling.max_completion_tokens,
        gpu_memory_utilization=cfg.engine.gpu_memory_utilization if num_gpus() else 0.1,
        enable_prefix_caching=False,
        **(fp8 if cell.precision != "bf16" else {}),
    )
    row = {"start_s": round(time.perf_counter() - started, 1)}
    draw, high = random.Random(0), min(30_000, cfg.model.vocab_size)

    def sample_all(shape: Shape, max_tokens: int) -> float:
        ids = [
            [draw.randrange(high // 4, high) for _ in range(shape.prompt_tokens)] for _ in range(shape.num_sequences)
        ]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
        began = time.perf_counter()
        answers = engine.generate([{"prompt_token_ids": prompt} for prompt in ids], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        if any(len(answer.outputs[0].token_ids) != max_tokens for answer in answers):
            raise RuntimeError(f"a completion does not have {max_tokens} tokens")
        return seconds

    for name, shape in shapes.items():
        sample_all(shape, min(_WARM_TOKENS, shape.completion_tokens))
        seconds = sample_all(shape, shape.completion_tokens)
        yield row | read_log(log.read_text(errors="replace")) | speeds(cell, name, shape, seconds, bandwidth)


class RolloutSpeed(runner.Benchmark):
    name, title, about = "rollout_speed", "Rollout throughput", __doc__
    keys = (
        *("engine", "model", "precision", "linear", "moe", "attention", "compile", "batch_invariant"),
        *("environment", "shape", "device"),
    )
    limit_s = 1200.0

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--engine", ["run", "vllm"], ["run"], help="vllm: the offline API, as a baseline")
        runner.choices(parser, "--model", MODELS, ["qwen3_8b", "qwen3_30b_a3b"])
        runner.choices(parser, "--precision", ["bf16", "fp8", "fp8_kv"], ["bf16", "fp8", "fp8_kv"])
        runner.choices(parser, "--linear", ["auto", "deep_gemm", "cutlass", "triton"], ["auto"])
        runner.choices(parser, "--moe", ["auto", "deep_gemm", "triton"], ["auto"])
        backends = ["auto", "FP8_CACHE", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"]
        runner.choices(parser, "--attention", backends, ["auto"])
        runner.choices(parser, "--compile", ["on", "off"], ["on"], help="torch.compile")
        parser.add_argument("--batch-invariant", action="store_true", help="vLLM's batch-invariant kernels")
        runner.choices(parser, "--shape", SHAPES, ["short", "long"])

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.model, options.shape = (["qwen3_8b"], ["short"]) if num_gpus() else (["tiny"], ["tiny"])
            options.precision, options.compile = ["fp8"], ["off"]

    def arms(self, options: argparse.Namespace) -> list[Row]:
        """All different combinations: BF16 has no FP8 linears to choose, a dense model no experts."""
        cells: list[Row] = []
        names = ("engine", "model", "precision", "linear", "moe", "attention", "compile")
        for chosen in itertools.product(*(getattr(options, name) for name in names)):
            engine, model, precision, linear, moe, attention, compiled = chosen
            if precision == "bf16":
                linear, moe = "auto", "auto" if moe == "deep_gemm" else moe
            if not MODELS[model]().is_moe:
                moe = "auto"
            compiles = compiled == "on" and not options.batch_invariant
            kernels = (linear, moe, attention, compiles, options.batch_invariant)
            if engine == "vllm":
                kernels = ("auto", "auto", "auto", True, False)
            cell = Cell(engine, model, precision, *kernels)
            if asdict(cell) not in cells:
                cells.append(asdict(cell))
        return cells

    def gpus(self, arm: Row) -> int:
        return int(not arm["model"].startswith("tiny"))

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        cell, shapes, bandwidth = Cell(**arm), {name: SHAPES[name] for name in options.shape}, 1e10
        if num_gpus():
            bandwidth = peak_bandwidth(device_name()) or copy_bandwidth()
        cfg = run_config(cell, list(shapes.values()))
        shutil.rmtree(cfg.run_dir, ignore_errors=True)
        if violations := rules.check(cfg):
            yield arm | {"error": f"invalid configuration: {'; '.join(map(str, violations))}"}
            return
        environment = {n: v for n, v in sorted(os.environ.items()) if n.startswith("VLLM_") and n not in _NOT_KERNELS}
        if cell.engine == "vllm":
            rows = vllm_rows(cell, shapes, bandwidth, Path(options.worker[1]).with_suffix(".log"))
        else:
            rows = run_rows(cell, shapes, bandwidth)
        for row in rows:
            yield arm | {"environment": environment, "unix_s": round(time.time())} | row

    def order(self, rows: Sequence[Row]) -> Sequence[Row]:
        return sorted(rows, key=lambda row: (row["model"], row["shape"], -row["tokens_per_s"]))

    def line(self, row: Row) -> Row:
        chosen = f"{row['linear']} / {row['moe']} / {row['attention']}" + ("" if row["compile"] else ", no compile")
        chosen += ", batch-invariant" * row["batch_invariant"]
        chosen = "vLLM's offline API" if row["engine"] == "vllm" else chosen
        chosen += "".join(f", {name}={value}" for name, value in row["environment"].items())
        return {
            "model": row["model"],
            "shape": row["shape"],
            "precision": row["precision"],
            "asked: linear / experts / attention": chosen,
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "of roofline": f"{row['of_roofline']:.0%} of {row['roofline_tokens_per_s']:,}",
            "KV tokens": f"{row['kv_tokens']:,}" if row["kv_tokens"] else "-",
            "start s": f"{row['start_s']:.0f}",
            "kernels that ran": ", ".join(row.get("kernels", ())),
        }

    def notes(self, rows: Sequence[Row]) -> str:
        shapes = "; ".join(
            f"{name}: {s.num_sequences} sequences, {s.prompt_tokens} in, {s.completion_tokens} out"
            for name, s in SHAPES.items()
            if any(row["shape"] == name for row in rows)
        )
        return (
            f"Shapes: {shapes}. tokens/s: sampled tokens per second, including prefill. Dummy weights, one GPU, 90 % "
            "of its memory. The roofline reads every needed matrix and the cache once per step at the data sheet's "
            "bandwidth. Start: from the fleet's start to its first answer, with or without cached files. "
            "Batch-invariant engines are never compiled; compare them with an engine without compile. vLLM's offline"
            " API is the baseline: no server, no seeds, no prefix cache, kernels without DeepGEMM."
        )


if __name__ == "__main__":
    sys.exit(runner.main(RolloutSpeed()))
