"""How fast engines sample, and how much context they hold, in BF16, FP8 and FP8 with an FP8 cache.

    python -m benchmarks.rollout_speed --model qwen3_8b --precision bf16 fp8 fp8_kv --shape short long
    python -m benchmarks.rollout_speed --model qwen3_8b --precision fp8 --linear deep_gemm cutlass triton --shape long
    python -m benchmarks.rollout_speed --model qwen3_8b --precision fp8 --batch-invariant --compile off --shape short
    python -m benchmarks.rollout_speed --model qwen3_8b --engine vllm     the baseline: vLLM's offline API

Engines start as a run starts them (rollout/fleet.py, rollout/vllm_args.py), on dummy weights, and are asked as a run asks
them: over HTTP, a seed per request, log-probabilities of the sampled tokens. One engine serves all shapes of a
combination of kernels. What was measured is not measured again unless ``--again`` says so; the table is made of all
rows in ``--results``. Variables VLLM_* of the environment reach the engines and become part of a row's key.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record, vllm_alone
from benchmarks.results import FOLDER, Results, Row, copy_bandwidth, num_gpus, peak_bandwidth, require_gpus
from benchmarks.roofline import SHAPES, Shape, roofline
from megatron_fp8rl.config import PrecisionConfig, RolloutConfig, RunConfig
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.rollout.vllm_args import quantization_config
from model_configs import qwen3, tiny

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet

MODELS = {
    "qwen3_8b": qwen3.qwen3_8b,
    "qwen3_30b_a3b": qwen3.qwen3_30b_a3b,
    "tiny": lambda: tiny.tiny_qwen3().model,
}
KEYS = ("engine", "model", "precision", "linear", "moe", "attention", "compile", "batch_invariant", "environment",
        "shape", "device")  # fmt: skip
# Variables that say where files lie or what is logged, or choose a sampler that processed_logprobs rules out.
_NOT_KERNELS = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_LOGGING_LEVEL", "VLLM_USE_FLASHINFER_SAMPLER")
_WARM_TOKENS = 16  # sampled before the clock runs: kernels compile, caches fill
_ATTEMPTS = 2  # at a time in which no kernel is compiled; DeepGEMM's take seconds, at sizes of batches that are new


@dataclass(frozen=True)
class Cell:
    """One engine: a model in a precision on certain kernels."""

    model: str
    precision: str  # bf16, fp8, fp8_kv
    linear: str
    moe: str
    attention: str
    compile: bool
    batch_invariant: bool
    engine: str = "run"  # as a run starts and asks it; vllm: see vllm_alone.py

    @property
    def name(self) -> str:
        parts = [*["vllm"] * (self.engine == "vllm"), self.model, self.precision, self.linear, self.moe, self.attention]
        parts += ["compiled" if self.compile else "graphs", *["invariant"] * self.batch_invariant]
        return "-".join(parts)


def plan_cells(options: argparse.Namespace) -> Iterator[Cell]:
    """All combinations that differ: BF16 has no FP8 linears to choose for, a dense model no experts."""
    seen = set()
    names = ("engine", "model", "precision", "linear", "moe", "attention", "compile")
    for chosen in itertools.product(*(getattr(options, name) for name in names)):
        engine, model, precision, linear, moe, attention, compiled = chosen
        if precision == "bf16":
            linear = "auto"
            moe = "auto" if moe == "deep_gemm" else moe
        if not MODELS[model]().is_moe:
            moe = "auto"
        is_compiled = compiled == "on" and not options.batch_invariant
        cell = Cell(model, precision, linear, moe, attention, is_compiled, options.batch_invariant)
        if engine == "vllm":
            cell = Cell(model, precision, "auto", "auto", "auto", compile=True, batch_invariant=False, engine=engine)
        if cell not in seen:
            seen.add(cell)
            yield cell


def run_config(cell: Cell, shapes: Sequence[Shape]) -> RunConfig:
    """The run whose engine serves ``shapes``."""
    rollout = RolloutConfig(
        max_prompt_tokens=max(s.prompt_tokens for s in shapes),
        max_completion_tokens=max(s.completion_tokens for s in shapes),
        max_num_sequences=max(s.num_sequences for s in shapes),
        kv_cache_dtype="fp8" if cell.precision == "fp8_kv" else "auto",
        linear_backend=cell.linear,
        moe_backend=cell.moe,
        attention_backend=cell.attention,
        torch_compile=cell.compile,
        batch_invariant=cell.batch_invariant,
        gpu_memory_utilization=0.9,
        request_deadline_s=1200.0,
        max_tokens_per_microbatch=8192,  # no trainer runs, but a run has to hold its sequences
    )
    rollout_precision = "bf16" if cell.precision == "bf16" else "blockwise"
    # Only DeepGEMM rounds the scales of activations to powers of two.
    scales = "fp32" if cell.linear in ("cutlass", "triton") else "pow2"
    return RunConfig(
        name="rollout_speed",
        model=MODELS[cell.model](),
        precision=PrecisionConfig(trainer="bf16", rollout=rollout_precision, scales=scales),
        rollout=rollout,
        output_dir=str(FOLDER / "rollout_speed" / cell.name),
    )


def read_log(text: str) -> Row:
    """What vLLM's log says about an engine: tokens of KV cache, GiB of weights, the kernels that it chose."""
    capacity = re.findall(r"KV cache size: ([\d,]+) tokens", text)
    loaded = re.findall(r"Model loading took ([\d.]+) GiB", text)
    patterns = (r"Selected (\w+) for \w+", r"Using '?([\w ]+?)'? (?:Fp8|Unquantized) MoE backend")
    patterns += (r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend",)
    chosen = [name for pattern in patterns for name in dict.fromkeys(re.findall(pattern, text))]
    return {
        "kv_tokens": int(capacity[-1].replace(",", "")) if capacity else None,
        "weights_gib": float(loaded[-1]) if loaded else None,
        "kernels": chosen,
    }


def sample(fleet: Fleet, shape: Shape, vocab_size: int, *, max_tokens: int, seed: int) -> float:
    """Seconds to sample exactly ``max_tokens`` for every sequence, on prompts that no other seed has."""
    import random

    from megatron_fp8rl.rollout.client import Sampling

    draw = random.Random(seed)
    lowest = min(100, vocab_size // 4)  # leave the special tokens alone
    prompts = [
        [draw.randrange(lowest, vocab_size) for _ in range(shape.prompt_tokens)] for _ in range(shape.num_sequences)
    ]
    sampling = Sampling(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=max_tokens, stop_token_ids=(), stop_strings=()
    )
    (client,) = fleet.clients

    async def everything() -> int:
        answers = await asyncio.gather(
            *(client.generate(prompt, 1, 1000 * seed + i, sampling=sampling) for i, prompt in enumerate(prompts))
        )
        return sum(len(completion.token_ids) for (completion,) in answers)

    started = time.perf_counter()
    num_tokens = fleet.sync(everything(), fleet.cfg.rollout.request_deadline_s)
    seconds = time.perf_counter() - started
    if num_tokens != shape.num_sequences * max_tokens:
        raise RuntimeError(f"{num_tokens} tokens were sampled instead of {shape.num_sequences} x {max_tokens}")
    return seconds


def measure(cell: Cell, shapes: dict[str, Shape], common: Row, bandwidth: float) -> Iterator[Row]:
    """Start one engine and time each shape on it. A kernel that cannot start is a row too."""
    from megatron_fp8rl.rollout.client import EngineError
    from megatron_fp8rl.rollout.fleet import Fleet

    cfg = run_config(cell, list(shapes.values()))
    row = {**asdict(cell), **common}
    started = time.perf_counter()
    try:
        with Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir) as fleet:
            row |= {"start_s": round(time.perf_counter() - started, 1), **read_log(_log(cfg))}
            for seed, (name, shape) in enumerate(shapes.items(), 1):
                warm = min(_WARM_TOKENS, shape.completion_tokens)
                print(f"{time.perf_counter() - started:5.0f} s  {cell.name}: the engine samples {name}", flush=True)
                sample(fleet, shape, cfg.model.vocab_size, max_tokens=warm, seed=10 * seed)
                print(f"{time.perf_counter() - started:5.0f} s  {cell.name}: warm", flush=True)
                for attempt in range(1, _ATTEMPTS + 1):
                    compiled = num_kernels()
                    draw = {"max_tokens": shape.completion_tokens, "seed": seed + 100 * attempt}
                    seconds = sample(fleet, shape, cfg.model.vocab_size, **draw)
                    if (new := num_kernels() - compiled) == 0:
                        break
                    said = f"{new} kernels were compiled meanwhile"
                    print(f"{time.perf_counter() - started:5.0f} s  {cell.name}: {said}", flush=True)
                yield row | {"compiled_meanwhile": new} | speeds(cell, name, shape, seconds, bandwidth)
    except (EngineError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if re.search(r"\w(Error|Exception): ", line)]
        yield from (row | {"shape": name, "error": (lines or [str(error)])[0][-300:]} for name in shapes)


def measure_alone(cell: Cell, shapes: dict[str, Shape], common: Row, bandwidth: float, limit_s: float) -> Iterator[Row]:
    """The same of vLLM by itself. An engine that fails is a row too."""
    cfg = run_config(cell, list(shapes.values()))
    arguments = {
        "model": str(write_model_dir(cfg)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": cfg.rollout.kv_cache_dtype,
        "max_model_len": cfg.rollout.max_prompt_tokens + cfg.rollout.max_completion_tokens,
        "max_num_seqs": cfg.rollout.max_num_sequences,
        "gpu_memory_utilization": cfg.rollout.gpu_memory_utilization,
        "enable_prefix_caching": False,
    }
    if cell.precision != "bf16":
        arguments["hf_overrides"] = {"quantization_config": quantization_config(cfg.model, cfg.precision)}
    row, log = {**asdict(cell), **common}, Path(cfg.run_dir) / "vllm.log"
    asked = {name: (s.prompt_tokens, s.completion_tokens, s.num_sequences) for name, s in shapes.items()}
    try:
        found = vllm_alone.measure(arguments, asked, log, limit_s)
    except RuntimeError as error:
        yield from (row | {"shape": name, "error": str(error)[-300:]} for name in shapes)
        return
    row |= {"start_s": found["start_s"], **read_log(log.read_text())}
    for name, seconds in found["seconds"].items():
        yield row | speeds(cell, name, shapes[name], seconds, bandwidth)


def speeds(cell: Cell, name: str, shape: Shape, seconds: float, bandwidth: float) -> Row:
    """What ``seconds`` for one shape come to, and the limit of reading beside it."""
    limit = roofline(MODELS[cell.model](), cell.precision, shape, bandwidth)
    tokens_per_s = shape.num_sequences * shape.completion_tokens / seconds
    return {
        "shape": name,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens_per_s, 1),
        "roofline_tokens_per_s": round(limit.tokens_per_s),
        "of_roofline": round(tokens_per_s / limit.tokens_per_s, 3),
        "read_gb_per_step": round((limit.weight_bytes + limit.kv_bytes) / 1e9, 2),
    }


def num_kernels() -> int:
    """Kernels that DeepGEMM has compiled on this machine, which it keeps; also those of programs beside this one."""
    from megatron_fp8rl.kernels.deep_gemm import compiled_folder

    return sum(1 for _ in Path(compiled_folder()).glob("cache/*/kernel.cubin"))


def _log(cfg: RunConfig) -> str:
    return (Path(cfg.run_dir) / "logs" / "rollout-0.log").read_text(encoding="utf-8", errors="replace")


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as docs/measured.md shows them, fastest first within a model and shape."""
    shown = []
    for row in sorted(rows, key=lambda r: (r["model"], r["shape"], -(r.get("tokens_per_s") or 0.0))):
        chosen = f"{row['linear']} / {row['moe']} / {row['attention']}" + ("" if row["compile"] else ", no compile")
        chosen += ", batch-invariant" * row["batch_invariant"]
        if row["engine"] == "vllm":
            chosen = "vLLM's offline API"
        chosen += "".join(f", {name}={value}" for name, value in row["environment"].items())
        if "error" in row:
            numbers = dict.fromkeys(("tokens/s", "of roofline", "KV tokens", "start s"), "-")
            numbers["tokens/s"] = f"failed: {row['error'][:80]}"
        else:
            numbers = {
                "tokens/s": f"{row['tokens_per_s']:,.0f}",
                "of roofline": f"{row['of_roofline']:.0%} of {row['roofline_tokens_per_s']:,}",
                "KV tokens": f"{row['kv_tokens']:,}" if row["kv_tokens"] else "-",
                "start s": f"{row['start_s']:.0f}",
            }
        kernels = ", ".join(row.get("kernels", ()))
        head = {"model": row["model"], "shape": row["shape"], "precision": row["precision"]}
        shown.append(head | {"asked: linear / experts / attention": chosen} | numbers | {"kernels that ran": kernels})
    return shown


def write_section(rows: Sequence[Row]) -> None:
    shapes = "; ".join(
        f"{name}: {s.num_sequences} sequences, {s.prompt_tokens} in, {s.completion_tokens} out"
        for name, s in SHAPES.items()
        if any(row["shape"] == name for row in rows)
    )
    notes = (
        f"Shapes: {shapes}. tokens/s: sampled tokens over the whole time, prefill included. Dummy weights, one GPU, "
        "90 % of its memory. The roofline reads every needed matrix and the cache once per step at the bandwidth of "
        "the data sheet. Start: from the fleet's start to the first answer, on files that are cached or not as found. "
        "Batch-invariant engines, whose results do not depend on what else is in a batch, are never compiled: what "
        "they cost is the difference to the same engine with no compile. vLLM's offline API is the baseline: no "
        "server, no seeds, vLLM's own kernels without DeepGEMM, no prefix cache."
    )
    record.section("rollout_speed", "Rollout throughput", table(rows), notes=notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_speed", description=__doc__.split("\n")[0])
    engines = ["run", "vllm"]
    parser.add_argument("--engine", nargs="+", choices=engines, default=["run"], help="vllm: by itself, the baseline")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3_8b", "qwen3_30b_a3b"])
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp8", "fp8_kv"], default=["bf16", "fp8", "fp8_kv"])
    parser.add_argument("--linear", nargs="+", choices=["auto", "deep_gemm", "cutlass", "triton"], default=["auto"])
    moe = ["auto", "deep_gemm", "triton"]
    parser.add_argument("--moe", nargs="+", choices=moe, default=["auto"])
    attention = ["auto", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"]
    parser.add_argument("--attention", nargs="+", choices=attention, default=["auto"])
    parser.add_argument("--compile", nargs="+", choices=["on", "off"], default=["on"], help="torch.compile")
    parser.add_argument("--batch-invariant", action="store_true", help="vLLM's batch-invariant kernels")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["short", "long"])
    parser.add_argument("--quick", action="store_true", help="qwen3_8b in FP8, short, no torch.compile; tiny on a CPU")
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=570.0, help="start no engine that may not end before")
    parser.add_argument("--cell-s", type=float, default=240.0, help="what one engine with all shapes may take")
    parser.add_argument("--results", type=Path, default=FOLDER / "rollout_speed.jsonl")
    options = parser.parse_args(argv)
    if options.quick:
        on_gpu = num_gpus() > 0
        options.model, options.shape = (["qwen3_8b"], ["short"]) if on_gpu else (["tiny"], ["tiny"])
        options.precision, options.compile = ["fp8"], ["off"]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    bandwidth, device = 1e10, "cpu"
    if options.model != ["tiny"]:
        require_gpus(1, "benchmarks.rollout_speed")
    if num_gpus():
        import torch

        device = torch.cuda.get_device_name()
        copied = copy_bandwidth()
        bandwidth = peak_bandwidth(device) or copied
        print(f"{device}: copies at {copied / 1e12:.2f} TB/s, roofline at {bandwidth / 1e12:.2f} TB/s", flush=True)
    started = time.monotonic()
    results = Results(options.results, KEYS)
    environment = {n: v for n, v in sorted(os.environ.items()) if n.startswith("VLLM_") and n not in _NOT_KERNELS}
    common = {"environment": environment, "device": device, "unix_s": round(time.time())}
    for cell in plan_cells(options):
        wanted = {
            name: SHAPES[name]
            for name in options.shape
            if options.again or not results.has({**asdict(cell), **common, "shape": name})
        }
        if not wanted:
            continue
        if time.monotonic() - started > options.budget_s - options.cell_s:
            print(f"SKIPPED {cell.name}: {options.budget_s:.0f} s are nearly over; run the same command again")
            continue
        if mistakes := rules.check(run_config(cell, list(wanted.values()))):
            print(f"SKIPPED {cell.name}: no run may have it: {'; '.join(map(str, mistakes))}")
            continue
        if cell.engine == "vllm":
            rows = measure_alone(cell, wanted, common, bandwidth, options.budget_s - (time.monotonic() - started))
        else:
            rows = measure(cell, wanted, common, bandwidth)
        for row in rows:
            results.add(row)
    if device != "cpu":
        with record.turn():
            write_section(results.rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
