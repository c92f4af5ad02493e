"""Does an engine that is updated, put to sleep and woken compute what an engine does that loads the same weights?

    python -m benchmarks.updates
    python -m benchmarks.updates --model small_moe --linear deep_gemm --moe triton deep_gemm

For every choice of kernels one engine starts with dummy weights and CUDA graphs and lives through five publications of
two sets of random weights in turn, some of them after sleeping: level 1 (weights in host memory) and level 2 (weights
dropped). Two more engines load the same sets from FP8 checkpoints. All answer the same prompts one after another, with
the same seeds; tokens and log-probabilities of a round have to be those of the engine that loaded its weights, as
exactly as that engine repeats itself. A choice of kernels that the engine or the publication refuses is a row with the
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import record
from benchmarks.results import FOLDER, Results, Row, num_gpus, require_gpus
from benchmarks.training import MODELS
from megatron_fp8rl.config import ObserveConfig, PrecisionConfig, RolloutConfig, RunConfig

if TYPE_CHECKING:
    from benchmarks.light_policy import LightPolicy
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.parallel import Parallel

KEYS = ("model", "linear", "moe", "scales", "device")
# (set of weights, sleep level before the publication) of versions 1 to 5.
ROUNDS = ((1, 0), (2, 0), (1, 1), (2, 2), (1, 2))
PROMPT_TOKENS = (5, 40, 200)  # the longest gives grouped kernels more rows than their smallest tile
NEW_TOKENS = 24  # decoded by CUDA graphs

Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]  # tokens and their log-probabilities, by prompt


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    linear: str
    moe: str  # "auto" for a dense model
    scales: str

    @property
    def name(self) -> str:
        return "-".join(asdict(self).values())


def plan_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Dense models with every linear; mixtures of experts with the first one and every choice for experts."""
    for model in options.model:
        if MODELS[model]().is_moe:
            kernels = [(options.linear[0], moe) for moe in options.moe]
        else:
            kernels = [(linear, "auto") for linear in options.linear]
        for linear, moe in kernels:
            for scales in options.scales:
                yield Case(model, linear, moe, scales)


def run_config(case: Case) -> RunConfig:
    # Weights large enough that tokens differ clearly in probability.
    model = replace(MODELS[case.model](), initializer_range=0.05)
    return RunConfig(
        name="updates",
        model=model,
        precision=PrecisionConfig(trainer="blockwise", rollout="blockwise", scales=case.scales),
        rollout=RolloutConfig(
            linear_backend=case.linear,
            moe_backend=case.moe,
            transport="auto",
            torch_compile=False,
            sleep_level=1 if num_gpus() else 0,  # asks vLLM for memory that can sleep, at any level
            max_prompt_tokens=max(PROMPT_TOKENS),
            max_completion_tokens=NEW_TOKENS,
            max_num_sequences=8,
            kv_cache_bytes=256 << 20,
            gpu_memory_utilization=0.08,  # has to be free at the start: many engines share the GPU
            start_deadline_s=240.0,
            update_deadline_s=60.0,
            request_deadline_s=120.0,
        ),
        observe=ObserveConfig(verify_every=1),
        output_dir=str(FOLDER / "updates" / case.name),
    )


def write_checkpoint(cfg: RunConfig, policy: LightPolicy, model_dir: Path, folder: Path) -> Path:
    """The FP8 checkpoint of a policy on one rank, beside the tokenizer of ``model_dir``."""
    from safetensors.torch import save_file

    from megatron_fp8rl.kernels.blockwise import quantize_weight_in_torch
    from megatron_fp8rl.names import registry
    from megatron_fp8rl.precision.layer_table import LayerTable
    from megatron_fp8rl.rollout.vllm_args import quantization_config

    table = LayerTable.build(cfg.model, cfg.precision)
    content = {}
    for name, parameter in policy.named_tensors():
        for hf_name, tensor in registry.to_hf(name, parameter, cfg.model):
            tensor = tensor.cpu()
            if table.rollout_fp8(hf_name):
                data, scale = quantize_weight_in_torch(tensor, cfg.precision.scales)
                content |= {hf_name: data, f"{hf_name}_scale_inv": scale}
            else:
                content[hf_name] = tensor.clone()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model_dir, folder)
    save_file({n: t.contiguous() for n, t in content.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": quantization_config(cfg.model, cfg.precision), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start_loading(cfg: RunConfig, folder: Path) -> Fleet:
    """An engine as a run starts it, but on the weights in ``folder``; not waited for."""
    from megatron_fp8rl.rollout import vllm_args as engine
    from megatron_fp8rl.rollout.fleet import Fleet

    arguments, asked = engine.engine_arguments, threading.Event()

    def loading(*args: Any, **kwargs: Any) -> dict[str, Any]:
        asked.set()
        return arguments(*args, **kwargs) | {"load-format": "auto"}

    with mock.patch.object(engine, "engine_arguments", loading):
        fleet = Fleet.start(cfg, folder, folder / "run", wait=False)
        if not asked.wait(60.0):  # by the fleet's thread
            fleet.shutdown()
            raise TimeoutError(f"the engine of {folder} was not started within 60 s")
        return fleet


def ask(fleet: Fleet, vocab_size: int) -> Answers:
    """Fixed prompts, one after another, so that no answer depends on what runs beside it."""
    import torch

    client = fleet.clients[0]
    sampling = replace(client.sampling, temperature=1.0, max_tokens=NEW_TOKENS, stop_token_ids=(), stop_strings=())
    generator = torch.Generator().manual_seed(7)

    async def everything() -> Answers:
        await client.reset_cache()
        answers = []
        for length in PROMPT_TOKENS:
            prompt = torch.randint(vocab_size, (length,), generator=generator).tolist()
            (completion,) = await client.generate(prompt, 1, length, sampling=sampling)
            answers.append((completion.token_ids, completion.rollout_logprobs))
        return answers

    return fleet.sync(everything(), len(PROMPT_TOKENS) * fleet.cfg.rollout.request_deadline_s)


def difference(found: Answers, expected: Answers) -> float:
    """Largest |difference| of log-probabilities, up to and including the first token that differs."""
    worst = 0.0
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        for token, logprob, other, other_logprob in zip(tokens, logprobs, expected_tokens, expected_logprobs):
            if token != other:
                return float("inf")
            worst = max(worst, abs(logprob - other_logprob))
    return worst


def run_case(case: Case, parallel: Parallel) -> Row:
    """Start the engines, publish five times, compare. Refusals are rows, other errors are raised.

    Every phase is a line with its seconds, so that a log tells how far a case came that was cut short.
    """
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {case.name}: {what}", flush=True)

    from benchmarks.light_policy import LightPolicy, light_policy
    from megatron_fp8rl.config import ConfigError
    from megatron_fp8rl.data.model_dir import write_model_dir
    from megatron_fp8rl.rollout.client import EngineError
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.weight_sync.engines import TransportError
    from megatron_fp8rl.weight_sync.publish import WeightExporter
    from megatron_fp8rl.weight_sync.verify import WeightMismatch

    cfg = run_config(case)
    weights = {seed: light_policy(replace(cfg, seed=seed), parallel) for seed in (1, 2)}
    policy = LightPolicy(cfg, parallel, {name: tensor.clone() for name, tensor in weights[1].named_tensors()})
    model_dir = write_model_dir(cfg)
    kernels: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            fleet = stack.enter_context(Fleet.start(cfg, model_dir, cfg.run_dir, wait=False))
            loaded = {}
            for seed, source in weights.items():
                folder = write_checkpoint(cfg, source, model_dir, Path(cfg.run_dir) / f"weights-{seed}")
                loaded[seed] = stack.enter_context(start_loading(cfg, folder))
            say("checkpoints are written")
            for engine in (fleet, *loaded.values()):
                engine.wait_until_ready()
            kernels = fleet.kernels()
            say(f"{1 + len(loaded)} engines are ready: {kernels}")
            expected, noise = {}, 0.0
            for seed, engine in loaded.items():
                expected[seed] = ask(engine, cfg.model.vocab_size)
                noise = max(noise, difference(ask(engine, cfg.model.vocab_size), expected[seed]))
                say(f"set {seed} is asked of the engine that loaded it; so far engines repeat themselves to {noise!r}")
                engine.shutdown()
            exporter = WeightExporter(policy, fleet, cfg)
            stack.callback(exporter.close)
            differences = []
            answered = publish_rounds(cfg, policy, weights, fleet, exporter)
            for answers, (seed, level) in zip(answered, ROUNDS, strict=True):
                differences.append(difference(answers, expected[seed]))
                say(f"publication of set {seed}, sleep level {level}: difference {differences[-1]!r}")
    except (ConfigError, EngineError, TransportError, WeightMismatch) as error:
        say(f"refused: {error}")
        return {"outcome": "refused", "reason": reason(error), "kernels": kernels}
    num_equal = sum(d <= noise for d in differences)
    return {
        "outcome": "pass" if num_equal == len(ROUNDS) else "FAILED",
        "reason": "" if num_equal == len(ROUNDS) else f"{len(ROUNDS) - num_equal} rounds differ from a fresh load",
        "kernels": kernels,
        "rounds_equal": num_equal,
        "differences": [repr(d) for d in differences],  # JSON has no infinity
        "repeat_difference": repr(noise),
        "sets_differ": difference(expected[1], expected[2]) > 0.01,
    }


def publish_rounds(cfg: RunConfig, policy: LightPolicy, weights: dict, fleet: Fleet, exporter: Any) -> Iterator[Answers]:
    """What the engine answers after each publication."""
    (client,) = fleet.clients
    deadline_s = 3 * cfg.rollout.update_deadline_s
    for version, (seed, level) in enumerate(ROUNDS, 1):
        sleeps = level > 0 and cfg.rollout.sleep_level > 0
        if sleeps:
            fleet.sync(client.sleep(level), deadline_s)
        for name, tensor in weights[seed].named_tensors():
            policy.tensors[name].copy_(tensor)
        if sleeps:
            fleet.sync(client.wake_up("weights"), deadline_s)
        exporter.publish(version)
        if sleeps:
            fleet.sync(client.wake_up("kv_cache"), deadline_s)
        yield ask(fleet, cfg.model.vocab_size)


def reason(error: Exception) -> str:
    """The line of a long message that says what is wrong: a kernel that is named, the last exception, the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    refused = [line[line.index("UnwritableKernel: ") :] for line in lines if "UnwritableKernel: " in line]
    named = [line for line in lines[1:] if "Error: " in line or "Exception: " in line]
    return f"{type(error).__name__}: {(refused or named[::-1] or lines)[0][:300]}"


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as docs/measured.md shows them."""
    return [
        {
            "model": row["model"],
            "linear kernels": row["linear"],
            "expert kernels": row["moe"] if MODELS[row["model"]]().is_moe else "-",
            "scales": row["scales"],
            "kernels that ran": ", ".join(f"{kind} {name}" for kind, name in row["kernels"].items()) or "-",
            "outcome": row["outcome"],
            "rounds equal": f"{row['rounds_equal']} of {len(ROUNDS)}" if "rounds_equal" in row else "-",
            "reason": row["reason"] or "-",
        }
        for row in sorted(rows, key=lambda row: [str(row[key]) for key in KEYS])
    ]


def write_section(rows: Sequence[Row]) -> None:
    rounds = ", ".join(f"set {seed}" + (f" after sleep level {level}" if level else "") for seed, level in ROUNDS)
    notes = (
        f"CUDA graphs, no torch.compile. Publications: {rounds}. Each is proven by digests, then {len(PROMPT_TOKENS)} "
        f"prompts of {', '.join(map(str, PROMPT_TOKENS))} tokens are continued by {NEW_TOKENS}; tokens and "
        "log-probabilities have to equal those of an engine that loaded the same weights from an FP8 checkpoint, to the "
        "last bit if that engine repeats itself to the last bit."
    )
    record.section("updates", "Updates that stay right", table(rows), notes=notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.updates", description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["small", "small_moe"])
    linear = ["deep_gemm", "cutlass", "triton"]
    parser.add_argument("--linear", nargs="+", choices=[*linear, "auto"], default=linear)
    parser.add_argument("--moe", nargs="+", choices=["triton", "deep_gemm", "auto"], default=["triton", "deep_gemm"])
    parser.add_argument("--scales", nargs="+", choices=["pow2", "fp32"], default=["pow2"])
    parser.add_argument("--quick", action="store_true", help="one dense model on DeepGEMM's linears")
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=570.0, help="start no engines that may not end before")
    parser.add_argument("--case-s", type=float, default=130.0, help="what one case may take")
    parser.add_argument("--results", type=Path, default=FOLDER / "updates.jsonl")
    options = parser.parse_args(argv)
    if options.quick:
        options.model, options.linear = ["small"], ["deep_gemm"]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    on_cpu = all(model.startswith("tiny") for model in options.model) and num_gpus() == 0
    if not on_cpu:
        require_gpus(1, "benchmarks.updates")
    else:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before Megatron-Core is imported
    import torch

    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_fp8rl.config import ParallelConfig
    from megatron_fp8rl.trainer.parallel import Parallel

    started = time.monotonic()
    results = Results(options.results, KEYS)
    device = "cpu" if on_cpu else torch.cuda.get_device_name()
    parallel = Parallel.init(ParallelConfig())
    failed = False
    try:
        for case in plan_cases(options):
            row: Row = {**asdict(case), "device": device}
            if results.has(row) and not options.again:
                continue
            if time.monotonic() - started > options.budget_s - options.case_s:
                print(f"SKIPPED {case.name}: {options.budget_s:.0f} s are nearly over; run the same command again")
                continue
            case_started = time.monotonic()
            row |= run_case(case, parallel)
            failed |= row["outcome"] == "FAILED"
            results.add(row | {"seconds": round(time.monotonic() - case_started, 1)})
    finally:
        parallel.close()
    if not on_cpu:
        with record.turn():
            write_section(results.rows())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
