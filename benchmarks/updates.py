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
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import runner
from benchmarks.record import FOLDER, Row
from benchmarks.runner import num_gpus
from benchmarks.training import MODELS, single_rank
from megatron_fp8rl.config import ObserveConfig, PrecisionConfig, RolloutConfig, RunConfig

if TYPE_CHECKING:
    from benchmarks.light_policy import LightPolicy
    from megatron_fp8rl.rollout.fleet import Fleet

# (set of weights, sleep level before the publication) of versions 1 to 5.
ROUNDS = ((1, 0), (2, 0), (1, 1), (2, 2), (1, 2))
PROMPT_TOKENS = (5, 40, 200)  # the longest gives grouped kernels more rows than their smallest tile
NEW_TOKENS = 24  # decoded by CUDA graphs

Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]  # tokens and their log-probabilities, by prompt


def run_config(arm: Row) -> RunConfig:
    # Weights large enough that tokens differ clearly in probability.
    model = replace(MODELS[arm["model"]](), initializer_range=0.05)
    return RunConfig(
        name="updates",
        model=model,
        precision=PrecisionConfig(trainer="blockwise", rollout="blockwise", scales=arm["scales"]),
        rollout=RolloutConfig(
            linear_backend=arm["linear"],
            moe_backend=arm["moe"],
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
        output_dir=str(FOLDER / "updates" / "-".join(map(str, arm.values()))),
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


class Updates(runner.Benchmark):
    name, title, about = "updates", "Updates that stay right", __doc__
    keys = ("model", "linear", "moe", "scales", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        linear = ["deep_gemm", "cutlass", "triton"]
        runner.choices(parser, "--model", MODELS, ["small", "small_moe"])
        runner.choices(parser, "--linear", [*linear, "auto"], linear)
        runner.choices(parser, "--moe", ["triton", "deep_gemm", "auto"], ["triton", "deep_gemm"])
        runner.choices(parser, "--scales", ["pow2", "fp32"], ["pow2"])

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.model, options.linear = ["small" if num_gpus() else "tiny"], ["deep_gemm" if num_gpus() else "auto"]

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        """Dense models with every linear; mixtures of experts with the first one and every choice for experts."""
        for model in options.model:
            if MODELS[model]().is_moe:
                kernels = [(options.linear[0], moe) for moe in options.moe]
            else:
                kernels = [(linear, "auto") for linear in options.linear]
            for linear, moe in kernels:
                for scales in options.scales:
                    yield {"model": model, "linear": linear, "moe": moe, "scales": scales}

    def gpus(self, arm: Row) -> int:
        return int(not arm["model"].startswith("tiny"))

    def is_wrong(self, row: Row) -> bool:
        return row["outcome"] == "FAILED"

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        """Refusals are rows, other errors are raised."""
        from megatron_fp8rl.config import ConfigError
        from megatron_fp8rl.rollout.client import EngineError
        from megatron_fp8rl.weight_sync.engines import TransportError
        from megatron_fp8rl.weight_sync.verify import WeightMismatch

        kernels: dict[str, str] = {}
        try:
            yield arm | live_through(run_config(arm), kernels)
        except (ConfigError, EngineError, TransportError, WeightMismatch) as error:
            print(f"refused: {error}", flush=True)
            yield arm | {"outcome": "refused", "reason": runner.reason(error), "kernels": kernels}

    def order(self, rows: Sequence[Row]) -> Sequence[Row]:
        return sorted(rows, key=lambda row: [str(row[key]) for key in self.keys])

    def line(self, row: Row) -> Row:
        return {
            "model": row["model"],
            "linear kernels": row["linear"],
            "expert kernels": row["moe"] if MODELS[row["model"]]().is_moe else "-",
            "scales": row["scales"],
            "kernels that ran": ", ".join(f"{kind} {name}" for kind, name in row["kernels"].items()) or "-",
            "outcome": row["outcome"],
            "rounds equal": f"{row['rounds_equal']} of {len(ROUNDS)}" if "rounds_equal" in row else "-",
            "reason": row["reason"] or "-",
        }

    def notes(self, rows: Sequence[Row]) -> str:
        rounds = ", ".join(f"set {seed}" + (f" after sleep level {level}" if level else "") for seed, level in ROUNDS)
        return (
            f"CUDA graphs, no torch.compile. Publications: {rounds}. Each is proven by digests, then {len(PROMPT_TOKENS)} "
            f"prompts of {', '.join(map(str, PROMPT_TOKENS))} tokens are continued by {NEW_TOKENS}; tokens and "
            "log-probabilities have to equal those of an engine that loaded the same weights from an FP8 checkpoint, to "
            "the last bit if that engine repeats itself to the last bit."
        )


def live_through(cfg: RunConfig, kernels: dict[str, str]) -> Row:
    """Start the engines, publish five times, compare; ``kernels`` is filled as soon as they are known."""
    with single_rank(cfg) as parallel, ExitStack() as stack:
        from benchmarks.light_policy import LightPolicy, light_policy
        from megatron_fp8rl.data.model_dir import write_model_dir
        from megatron_fp8rl.rollout.fleet import Fleet
        from megatron_fp8rl.weight_sync.publish import WeightExporter

        weights = {seed: light_policy(replace(cfg, seed=seed), parallel) for seed in (1, 2)}
        policy = LightPolicy(cfg, parallel, {name: tensor.clone() for name, tensor in weights[1].named_tensors()})
        model_dir = write_model_dir(cfg)
        fleet = stack.enter_context(Fleet.start(cfg, model_dir, cfg.run_dir, wait=False))
        loaded = {}
        for seed, source in weights.items():
            folder = write_checkpoint(cfg, source, model_dir, Path(cfg.run_dir) / f"weights-{seed}")
            loaded[seed] = stack.enter_context(start_loading(cfg, folder))
        for engine in (fleet, *loaded.values()):
            engine.wait_until_ready()
        kernels |= fleet.kernels()
        expected, noise = {}, 0.0
        for seed, engine in loaded.items():
            expected[seed] = ask(engine, cfg.model.vocab_size)
            noise = max(noise, difference(ask(engine, cfg.model.vocab_size), expected[seed]))
            print(f"the engine that loaded set {seed} is asked; so far engines repeat themselves to {noise!r}", flush=True)
            engine.shutdown()
        exporter = WeightExporter(policy, fleet, cfg)
        stack.callback(exporter.close)
        differences = []
        for answers, (seed, level) in zip(publish_rounds(cfg, policy, weights, fleet, exporter), ROUNDS, strict=True):
            differences.append(difference(answers, expected[seed]))
            print(f"publication of set {seed}, sleep level {level}: difference {differences[-1]!r}", flush=True)
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


if __name__ == "__main__":
    sys.exit(runner.main(Updates()))
