"""Where trainer and engine first differ, and by how much: operation by operation, for one prompt.

    python -m benchmarks.probe grpo_qwen3_8b --layers 8
    python -m benchmarks.probe grpo_qwen3_30b_a3b --layers 4 --rollout.linear_backend cutlass --precision.scales fp32
    python -m benchmarks.probe tiny_qwen3_moe

CONFIG is that of a run; words that this program does not know are overrides of its fields, as on the command line of
megatron_fp8rl. One trainer rank and one eager engine share the device. Without ``model.hf_path`` the model is first
trained briefly on benchmarks/synthetic.py, and the prompt is a sentence of it.

For every operation the table has the difference of the two forward passes (total), and that of the trainer's operation
on the engine's inputs (own). "Beyond rounding" marks own differences that rounding to BF16 does not explain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import runner
from benchmarks.record import FOLDER, Row
from benchmarks.runner import num_gpus
from benchmarks.synthetic import Language
from benchmarks.training import batches, single_rank, switch_precision, train
from megatron_fp8rl import cli
from megatron_fp8rl.config import ParallelConfig, RunConfig

if TYPE_CHECKING:
    from megatron_fp8rl.diagnose.operations import Difference
    from megatron_fp8rl.trainer.policy import Policy

_EQUAL_DB = -999.0  # stands for minus infinity, which JSON does not have


def run_config(options: argparse.Namespace) -> RunConfig:
    """The configuration on one trainer rank and one eager engine."""
    cfg = cli.load_config(options.config)
    rollout = replace(
        cfg.rollout, num_replicas=1, tensor=1, gpu_memory_utilization=0.3,
        kv_cache_bytes=(1 << 30) if num_gpus() else (64 << 20), max_num_sequences=8,
        max_prompt_tokens=options.prompt_tokens, max_completion_tokens=16,
        max_tokens_per_microbatch=max(4096, options.prompt_tokens + 16),
    )  # fmt: skip
    cfg = replace(cfg, parallel=ParallelConfig(), rollout=rollout, output_dir=str(FOLDER / "probe" / cfg.name))
    cfg = cli.parse_overrides(cfg, options.overrides)
    layers = options.layers or cfg.model.num_layers
    optim = replace(cfg.optim, lr=options.lr, warmup_steps=5, decay="linear")
    return replace(
        cfg, model=replace(cfg.model, num_layers=min(layers, cfg.model.num_layers)),
        rollout=replace(cfg.rollout, enforce_eager=True), optim=optim, num_steps=max(1, options.warm_steps),
    )  # fmt: skip


def prompt_of(cfg: RunConfig, options: argparse.Namespace) -> list[int]:
    """Token ids of the prompt: of the run's own problems for a trained checkpoint, else a sentence of the language."""
    if cfg.model.hf_path is None:
        return Language(cfg.model.vocab_size).walks(1, options.prompt_tokens, seed=900_002)[0].tolist()
    from megatron_fp8rl.data.prompts import PromptStream
    from megatron_fp8rl.data.tokenizer import load_tokenizer

    (prompt, *_) = PromptStream(cfg, load_tokenizer(cfg.data.tokenizer)).eval_prompts(1)
    return list(prompt.token_ids)


def build_policy(cfg: RunConfig, parallel: Any, options: argparse.Namespace) -> tuple[Policy, list]:
    """(policy, two batches for delayed scaling to remember), trained briefly in BF16 unless it is trained already."""
    from megatron_fp8rl.trainer.policy import Policy

    bf16 = replace(cfg, precision=replace(cfg.precision, trainer="bf16", attention="auto", exact=False))
    policy = Policy.build(bf16, parallel)
    num_steps = options.warm_steps if cfg.model.hf_path is None else 0
    size = {"num_sequences": max(1, options.warm_tokens // 64), "length": 64}
    *steps, past, past_too = batches(cfg, Language(cfg.model.vocab_size), num_steps + 2, **size)
    losses = train(policy, steps)
    if losses:
        print(f"warm start: {losses[0]:.3f} to {losses[-1]:.3f} nats in {len(losses)} steps", flush=True)
    return policy, [past, past_too]


def differences(
    cfg: RunConfig, options: argparse.Namespace
) -> tuple[list[Difference], dict[str, dict[str, float]]]:
    """(one entry per operation; by layer the share of tokens with other experts in the trainer, total and own)."""
    prompt = prompt_of(cfg, options)
    with single_rank(cfg) as parallel:
        from megatron_fp8rl.data.model_dir import write_model_dir
        from megatron_fp8rl.diagnose.engine_probe import record_prefill
        from megatron_fp8rl.diagnose.operations import compare, share_of_other_experts
        from megatron_fp8rl.diagnose.trainer_probe import TrainerProbe
        from megatron_fp8rl.rollout.fleet import Fleet
        from megatron_fp8rl.weight_sync.publish import WeightExporter

        with Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir, wait=False) as fleet:  # while the trainer learns
            policy, history = build_policy(cfg, parallel, options)
            fleet.wait_until_ready()
            exporter = WeightExporter(policy, fleet, cfg)
            try:
                if cfg.rollout.kv_cache_dtype == "fp8":
                    policy.calibrate_kv(history[0])
                    exporter.publish(1, kv_scales=policy.kv_scales())
                else:
                    exporter.publish(1)
                path = Path(cfg.run_dir).resolve() / "engine.safetensors"
                engine = fleet.sync(record_prefill(fleet.clients[0], prompt, path), cfg.rollout.request_deadline_s)
            finally:
                exporter.close()
        switch_precision(policy, cfg.precision, history)
        probe = TrainerProbe(policy.models, policy.cfg, parallel)
        trainer = probe.record(prompt)
        replayed = probe.replay(engine)
        rows = compare(engine, trainer, replayed, cfg.model)
    return rows, {
        row.name: {
            kind: round(share_of_other_experts(engine[row.name], found[row.name], cfg.model.experts_per_token), 4)
            for kind, found in (("total", trainer), ("own", replayed))
        }
        for row in rows
        if row.name.endswith(".router")
    }


def _finite(decibels: float) -> float:
    """For JSON, which has no infinity; -999 is equality."""
    return round(max(decibels, -999.0), 1)


def _own_db(by_kind: dict[str, float], shown: int = 4) -> list[str]:
    """The kinds of operations with the largest errors of their own, and that all others have none."""
    inexact = sorted(((db, kind) for kind, db in by_kind.items() if db > _EQUAL_DB), reverse=True)
    rest = ["all others bit-equal"] if len(inexact) < len(by_kind) else []
    return [f"{kind} {db}" for db, kind in inexact[:shown]] + rest


class Probe(runner.Benchmark):
    name, title, about = "probe", "Where trainer and engine differ", __doc__
    takes_fields = True
    keys = ("config", "layers", "precision", "kv_cache", "kernels", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("config", nargs="?", default="tiny_qwen3_moe", metavar="CONFIG")
        parser.add_argument("--layers", type=int, help="cut the model to this depth")
        parser.add_argument("--prompt-tokens", type=int, default=200)
        parser.add_argument("--warm-steps", type=int, default=40)
        parser.add_argument("--warm-tokens", type=int, default=8192, help="of one step of the warm start")
        parser.add_argument("--lr", type=float, default=3e-4)

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.warm_steps, options.warm_tokens, options.prompt_tokens = 10, 1024, 60
            options.layers = options.layers or 4

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        cfg = run_config(options)
        precision = f"{cfg.precision.rollout} rollout, {cfg.precision.trainer} trainer, {cfg.precision.scales} scales"
        precision += ", the engine's attention" if cfg.precision.attention == "engine" else ""
        precision += ", batch-invariant engine" if cfg.rollout.batch_invariant else ""
        yield {
            "config": cfg.name,
            "layers": cfg.model.num_layers,
            "precision": precision,
            "kv_cache": cfg.rollout.kv_cache_dtype,
            "kernels": f"{cfg.rollout.linear_backend} / {cfg.rollout.moe_backend} / {cfg.rollout.attention_backend}",
        }

    def gpus(self, arm: Row) -> int:
        return int(not arm["config"].startswith("tiny"))

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        rows, other_experts = differences(run_config(options), options)
        from megatron_fp8rl.diagnose.operations import first_beyond_rounding, first_different, table

        print(table(rows), flush=True)
        first, beyond = first_different(rows), first_beyond_rounding(rows)
        yield arm | {
            "first_different": first.name if first else None,
            "first_beyond_rounding": beyond.name if beyond else None,
            "logits_db": _finite(rows[-1].total_db),
            "worst_own_db": {
                kind: _finite(max(r.own_db for r in rows if r.name.rpartition(".")[2] == kind))
                for kind in dict.fromkeys(row.name.rpartition(".")[2] for row in rows)
            },
            "tokens_with_other_experts": other_experts,
        }

    def line(self, row: Row) -> Row:
        return {
            "config": f"{row['config']}, {row['layers']} layers",
            "precision": row["precision"] + (", FP8 KV cache" if row["kv_cache"] == "fp8" else ""),
            "linear / experts / attention": row["kernels"],
            "bits first differ at": row["first_different"],
            "beyond BF16 rounding first at": row["first_beyond_rounding"] or "nowhere",
            "logits dB": row["logits_db"],
            "largest own dB": ", ".join(_own_db(row["worst_own_db"])),
        }

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "dB are 20 log10 of the RMS difference over the engine's RMS. 'Own' is the trainer's operation on the engine's "
            "inputs: what an operation inherits does not count. Models without a checkpoint were trained briefly."
        )


if __name__ == "__main__":
    sys.exit(runner.main(Probe()))
