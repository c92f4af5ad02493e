"""How far trainer and engine disagree about the tokens that the engine samples, over precisions of both.

    python -m benchmarks.mismatch --model qwen3_8b --layers 8
    python -m benchmarks.mismatch --model qwen3_30b_a3b --layers 5 --rollout fp8 --linear cutlass --moe triton
    python -m benchmarks.mismatch --layers 8 --rollout fp8 --trainer blockwise engine --batch-invariant
    python -m benchmarks.mismatch --quick

A model that is briefly trained (in BF16, supervised, on benchmarks/synthetic.py: a flat distribution would hide the
differences that a peaked one shows) is published to an engine; the engine continues prompts; the trainer computes the
log-probabilities of what was sampled under each of its recipes, on the same weights. An engine is started once for each
precision of its own; the trainer switches recipes in place. d is old - rollout, per sampled token, at temperature 1.
``engine`` is blockwise FP8 with attention by the engine's own kernel (precision.attention), ``deep_gemm`` the same with
the kernels of its linears (precision.linears).

Rows add up in ``--results``, and the table is made of all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import FOLDER, Results, Row, num_gpus, require_gpus
from benchmarks.synthetic import Language, as_sample
from benchmarks.training import MODELS, batches, free_memory, model_of, single_rank, switch_precision, train
from megatron_fp8rl.config import OptimConfig, PrecisionConfig, RolloutConfig, RunConfig

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.policy import Policy
    from megatron_fp8rl.types import Sample, TrainBatch

KEYS = (
    *("model", "layers", "warm_steps", "rollout", "scales", "trainer"),
    *("linear", "moe", "attention", "compile", "batch_invariant", "experts", "device"),
)
ROLLOUTS = {"bf16": ("bf16", "auto"), "fp8": ("blockwise", "auto"), "fp8_kv": ("blockwise", "fp8")}
TRAINERS = {recipe: {"trainer": recipe} for recipe in ("bf16", "blockwise", "delayed", "tensorwise")}
TRAINERS["engine"] = {"trainer": "blockwise", "attention": "engine"}
TRAINERS["deep_gemm"] = {"trainer": "blockwise", "linears": "deep_gemm"}
TRAINERS["engine, deep_gemm"] = TRAINERS["engine"] | TRAINERS["deep_gemm"]
_SHARE_OF_GPU = 0.3  # of memory for an engine, beside the trainer's


@dataclass(frozen=True)
class Engine:
    """One engine to start."""

    rollout: str  # a key of ROLLOUTS
    scales: str
    experts: str = "auto"  # the trainer's kernels for them

    def precision(self, trainer: str) -> PrecisionConfig:
        rollout = ROLLOUTS[self.rollout][0]
        return PrecisionConfig(**TRAINERS[trainer], rollout=rollout, scales=self.scales, experts=self.experts)


def plan_engines(options: argparse.Namespace) -> Iterator[Engine]:
    """BF16 engines have no scales to choose."""
    for rollout in options.rollout:
        for scales in options.scales if rollout != "bf16" else options.scales[:1]:
            yield Engine(rollout, scales, options.experts)


def run_config(name: str, options: argparse.Namespace, engine: Engine | None, trainer: str = "bf16") -> RunConfig:
    """The run whose engine samples and whose trainer recomputes; without an engine that of the warm start."""
    warm = PrecisionConfig(trainer="bf16", experts=options.experts)
    precision = warm if engine is None else engine.precision(trainer)
    cache = "auto" if engine is None else ROLLOUTS[engine.rollout][1]
    length = options.prompt_tokens + options.completion_tokens
    return RunConfig(
        name="mismatch",
        model=model_of(name, options.layers),
        precision=precision,
        optim=OptimConfig(lr=options.lr, warmup_steps=min(10, options.warm_steps // 4), decay="linear"),
        rollout=RolloutConfig(
            max_prompt_tokens=options.prompt_tokens,
            max_completion_tokens=options.completion_tokens,
            max_num_sequences=min(256, options.prompts * options.completions),
            max_tokens_per_microbatch=max(options.microbatch, length + 16),
            kv_cache_dtype=cache,
            kv_cache_bytes=options.kv_cache_gib << 30 if num_gpus() else 64 << 20,
            gpu_memory_utilization=_SHARE_OF_GPU,
            linear_backend=options.linear,
            moe_backend=options.moe,
            attention_backend=options.attention,
            torch_compile=options.compile == "on",
            enforce_eager=options.compile == "eager",
            batch_invariant=options.batch_invariant,
            transport=options.transport,
        ),
        num_steps=max(1, options.warm_steps),
        output_dir=str(FOLDER / "mismatch" / name),
    )


def sample(fleet: Fleet, language: Language, options: argparse.Namespace) -> list[Sample]:
    """Completions of the language's sentences, with the engine's log-probabilities."""
    prompts = language.walks(options.prompts, options.prompt_tokens, seed=900_001).tolist()
    (client,) = fleet.clients
    sampling = replace(client.sampling, temperature=1.0, stop_token_ids=(), stop_strings=())

    async def everything() -> list:
        asked = (client.generate(p, options.completions, 1000 * i, sampling=sampling) for i, p in enumerate(prompts))
        return await asyncio.gather(*asked)

    answers = fleet.sync(everything(), fleet.cfg.rollout.request_deadline_s)
    return [
        as_sample(f"{i}#{j}", (*prompt, *c.token_ids), len(prompt), c.rollout_logprobs)
        for i, (prompt, completions) in enumerate(zip(prompts, answers, strict=True))
        for j, c in enumerate(completions)
    ]


def measure_engine(
    policy: Policy, cfg: RunConfig, language: Language, history: Sequence[TrainBatch], options: argparse.Namespace
) -> tuple[list[Sample], Row]:
    """Start the engine of ``cfg``, publish to it and sample; (samples, what the engine cost)."""
    from megatron_fp8rl.data.model_dir import write_model_dir
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.weights.export import WeightExporter

    free_memory()
    started = time.perf_counter()
    with Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir) as fleet:
        start_s = time.perf_counter() - started
        exporter = WeightExporter(policy, fleet, cfg)
        try:
            if cfg.rollout.kv_cache_dtype == "fp8":
                policy.calibrate_kv(history[0])
                exporter.publish(1, kv_scales=policy.kv_scales())
            else:
                exporter.publish(1)
            samples = sample(fleet, language, options)
        finally:
            exporter.close()
    return samples, {"start_s": round(start_s, 1)}


def measure(name: str, options: argparse.Namespace, results: Results, common: Row) -> None:
    """All rows of one model that are not there yet, from one warm start."""
    from megatron_fp8rl.trainer.policy import Policy

    cfg = run_config(name, options, None)
    base = common | {"model": name, "layers": cfg.model.num_layers, "warm_steps": options.warm_steps}
    chosen = ("linear", "moe", "attention", "compile", "batch_invariant", "experts")
    base |= {key: getattr(options, key) for key in chosen}
    wanted = {engine: _missing(engine, base, options, results) for engine in plan_engines(options)}
    if not any(wanted.values()):
        return
    language = Language(cfg.model.vocab_size)
    with single_rank(cfg) as parallel:
        policy = Policy.build(cfg, parallel)
        size = {"num_sequences": max(1, options.warm_tokens // 256), "length": 256}
        size = {"num_sequences": max(1, options.warm_tokens // 64), "length": 64} if name.startswith("tiny") else size
        *steps, past, past_too = batches(cfg, language, options.warm_steps + 2, **size)
        losses = train(policy, steps)
        base["warm_loss"] = round(losses[-1], 4) if losses else None
        print(f"{name}: {base['warm_loss']} nats after {len(losses)} steps, {language.entropy:.3f} is best", flush=True)
        for engine, trainers in wanted.items():
            if trainers and time.monotonic() - options.started > options.budget_s:
                print(f"SKIPPED {name} {engine.rollout} {engine.scales}: the budget is spent; run the command again")
            elif trainers:
                for row in _rows(policy, engine, trainers, language, (past, past_too), name, options):
                    results.add(base | row)


def _missing(engine: Engine, base: Row, options: argparse.Namespace, results: Results) -> list[str]:
    head = base | {"rollout": engine.rollout, "scales": engine.scales}
    return [t for t in options.trainer if options.again or not results.has(head | {"trainer": t})]


def _rows(
    policy: Policy,
    engine: Engine,
    trainers: Sequence[str],
    language: Language,
    history: Sequence[TrainBatch],
    name: str,
    options: argparse.Namespace,
) -> Iterator[Row]:
    """One engine against the recipes. An engine that cannot start, or does not hold what it was sent, is a row too."""
    from megatron_fp8rl.algo.mismatch import LocalReducer, mismatch_metrics
    from megatron_fp8rl.data.packing import pack_for

    cfg = run_config(name, options, engine)
    policy.cfg = cfg
    switch_precision(policy, cfg.precision)
    head = {"rollout": engine.rollout, "scales": engine.scales}
    try:
        samples, cost = measure_engine(policy, cfg, language, history, options)
    except RuntimeError as error:  # of the client, the transport or the proof
        lines = [line.strip() for line in str(error).splitlines() if re.search(r"\w(Error|Exception): ", line)]
        reason = (lines or [str(error)])[0][:300]
        yield from (head | {"trainer": trainer, "error": reason} for trainer in trainers)
        return
    for trainer in trainers:
        try:
            switch_precision(policy, engine.precision(trainer), history)
            (batch,) = pack_for(policy.cfg, samples, data_rank=0)
            report = mismatch_metrics([policy.with_old_logprobs(batch)], policy.cfg.algo, LocalReducer())
        except (RuntimeError, ValueError) as error:  # of kernels that are missing, or do not compute this model
            yield head | {"trainer": trainer, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        metrics = {key.split("/", 1)[1]: float(f"{value:.5g}") for key, value in report.metrics.items()}
        kept = ("abs_logprob_diff/mean", "abs_logprob_diff/max", "kl_k3/mean", "multiplicative_error/mean")
        entropy = -sum(sum(s.rollout_logprobs) for s in samples) / batch.num_loss_tokens
        yield head | cost | {
            "trainer": trainer,
            "tokens": batch.num_loss_tokens,
            "sampled_entropy": round(entropy, 4),
            **{key: metrics[key] for key in (*kept, "effective_sample_size/mean")},
        }


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as docs/measured.md shows them."""
    shown = []
    for row in rows:
        kernels = f"{row['linear']} / {row['moe']} / {row['attention']}"
        kernels += ", batch-invariant" if row.get("batch_invariant") else ""
        kernels += {"on": ", torch.compile", "eager": ", eager"}.get(row.get("compile"), "")
        trainer = row["trainer"] + (", grouped experts" if row.get("experts") == "deep_gemm" else "")
        rollout = row["rollout"] if row["rollout"] == "bf16" else f"{row['rollout']}, {row['scales']} scales"
        head = {"model": f"{row['model']}, {row['layers']} layers", "rollout": rollout, "trainer": trainer}
        if "error" in row:
            numbers = {"mean d": f"failed: {row['error'][:80]}", "max d": "-", "KL k3": "-", "mean exp d": "-"}
        else:
            numbers = {
                "mean d": f"{row['abs_logprob_diff/mean']:.5f}",
                "max d": f"{row['abs_logprob_diff/max']:.3f}",
                "KL k3": f"{row['kl_k3/mean']:.2e}",
                "mean exp d": f"{row['multiplicative_error/mean']:.5f}",
            }
        shown.append(head | numbers | {"linear / experts / attention": kernels})
    return shown


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch", description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3_8b"])
    parser.add_argument("--layers", type=int, help="cut the models to this depth")
    parser.add_argument("--rollout", nargs="+", choices=ROLLOUTS, default=list(ROLLOUTS))
    parser.add_argument("--trainer", nargs="+", choices=TRAINERS, default=["bf16", "blockwise", "delayed"])
    parser.add_argument("--scales", nargs="+", choices=["pow2", "fp32"], default=["pow2", "fp32"])
    parser.add_argument("--linear", choices=["auto", "deep_gemm", "cutlass", "triton"], default="auto")
    parser.add_argument("--moe", choices=["auto", "deep_gemm", "triton", "flashinfer_cutlass"], default="auto")
    parser.add_argument("--attention", choices=["auto", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"], default="auto")
    compiled = "torch.compile in the engine; off: CUDA graphs alone; eager: neither, which starts soonest"
    parser.add_argument("--compile", choices=["on", "off", "eager"], default="off", help=compiled)
    parser.add_argument("--batch-invariant", action="store_true", help="the engine's batch-invariant kernels")
    parser.add_argument("--experts", choices=["auto", "te", "deep_gemm"], default="auto", help="the trainer's kernels")
    parser.add_argument("--transport", choices=["auto", "shm", "gloo", "ipc"], default="shm")
    parser.add_argument("--warm-steps", type=int, default=80)
    parser.add_argument("--warm-tokens", type=int, default=16384, help="of one step of the warm start")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--completions", type=int, default=4, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--completion-tokens", type=int, default=256)
    parser.add_argument("--microbatch", type=int, default=8192, help="tokens")
    parser.add_argument("--kv-cache-gib", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="the tiny models, or four layers of qwen3_8b on a GPU")
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=440.0, help="start no engine after this time")
    parser.add_argument("--results", type=Path, default=FOLDER / "mismatch.jsonl")
    options = parser.parse_args(argv)
    options.started = time.monotonic()
    if options.quick:
        options.scales = ["pow2"]
        if num_gpus():
            options.model, options.layers, options.rollout, options.warm_steps = ["qwen3_8b"], 4, ["fp8"], 40
        else:
            options.model, options.rollout, options.warm_steps = ["tiny_moe"], ["fp8"], 30
            options.warm_tokens, options.lr, options.prompts, options.completions = 1024, 4e-3, 8, 2
            options.prompt_tokens, options.completion_tokens = 16, 32
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    device = "cpu"
    if num_gpus():
        import torch

        device = torch.cuda.get_device_name()
    elif not {"tiny", "tiny_moe"}.issuperset(options.model):
        require_gpus(1, "benchmarks.mismatch")
    if device == "cpu" and "fp8_kv" in options.rollout:
        print("an FP8 KV cache needs a GPU; leave fp8_kv out of --rollout", file=sys.stderr)
        return 2
    results = Results(options.results, KEYS)
    for name in options.model:
        measure(name, options, results, {"device": device})
    for line in table(results.rows()):
        print(line)
    if device != "cpu" and not options.quick:
        _record(results.rows())
    return 0


def _record(rows: Sequence[Row]) -> None:
    from benchmarks import record

    warm = ", ".join(f"{m}: {s} steps to {loss} nats" for m, s, loss in dict.fromkeys(_warm(row) for row in rows))
    notes = (
        "d = |old - rollout| in nats per sampled token, at temperature 1: the trainer's log-probabilities of what the "
        "engine sampled, on the same weights. Models of these shapes, trained from random weights by supervised steps "
        f"in BF16 on the language of benchmarks.synthetic ({warm}). fp8_kv adds an FP8 KV cache of measured scales; "
        "the trainer engine is blockwise with attention by the engine's kernel."
    )
    record.section("mismatch", "Train/rollout mismatch", table(rows), notes=notes)


def _warm(row: Row) -> tuple:
    return row["model"], row["warm_steps"], row.get("warm_loss")


if __name__ == "__main__":
    sys.exit(main())
