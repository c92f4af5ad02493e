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
the kernels of its linears (precision.linears). The row "engine's prefill" needs no trainer: the engine reads what it has
sampled as prompts. An engine that is not batch-invariant differs from itself there, and no trainer can come closer to it
for certain.

``--warm-steps 0`` takes random weights without an optimizer, for one trainer: a model of full depth beside its engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks import runner
from benchmarks.record import FOLDER, Row
from benchmarks.runner import num_gpus
from benchmarks.synthetic import Language, as_sample
from benchmarks.training import MODELS, batches, free_memory, model_of, single_rank, switch_precision, train
from megatron_fp8rl.config import AlgoConfig, OptimConfig, PrecisionConfig, RolloutConfig, RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.frozen import FrozenPolicy
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy
    from megatron_fp8rl.types import KVScales, Sample, TrainBatch

LENGTHS = ("prompts", "completions", "prompt_tokens", "completion_tokens", "microbatch")
KERNELS = ("linear", "moe", "attention", "compile", "batch_invariant", "experts")  # that the options choose
ROUNDING = 1e-5  # nats: two FP32 sums of the same logits in different order are not further apart
ROLLOUTS = {"bf16": ("bf16", "auto"), "fp8": ("blockwise", "auto"), "fp8_kv": ("blockwise", "fp8")}
TRAINERS = {recipe: {"trainer": recipe, "linears": "te"} for recipe in ("bf16", "blockwise", "delayed", "tensorwise")}
TRAINERS["engine"] = TRAINERS["blockwise"] | {"attention": "engine"}
TRAINERS["deep_gemm"] = {"trainer": "blockwise", "linears": "deep_gemm"}
TRAINERS["engine, deep_gemm"] = TRAINERS["engine"] | TRAINERS["deep_gemm"]
TRAINERS["blockwise, cache not rounded"] = TRAINERS["blockwise"] | {"round_kv": False}
TRAINERS["engine, deep_gemm, cache not rounded"] = TRAINERS["engine, deep_gemm"] | {"round_kv": False}
BUCKET = 256  # positions that are counted together
PREFILL = "engine's prefill"  # no trainer: the engine's own log-probabilities of its sequences, as prompts
_SHARE_OF_GPU = 0.12  # has to be free when an engine starts; its cache has a size of its own


@dataclass(frozen=True)
class Engine:
    """One engine to start."""

    rollout: str  # a key of ROLLOUTS
    scales: str
    experts: str = "te"  # the trainer's kernels for them

    def __str__(self) -> str:
        return f"{self.rollout}-{self.scales}-{self.experts}"

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
    parts = (name, options.layers, engine, options.linear, options.moe, options.attention, options.compile)
    parts = [str(part) for part in (*parts, "invariant" * options.batch_invariant) if part]
    length = options.prompt_tokens + options.completion_tokens
    return RunConfig(
        name="mismatch",
        model=model_of(name, options.layers),
        precision=precision,
        optim=OptimConfig(lr=options.lr, warmup_steps=min(10, options.warm_steps // 4), decay="linear"),
        rollout=RolloutConfig(
            max_prompt_tokens=options.prompt_tokens,
            max_completion_tokens=options.completion_tokens + 1,  # a sequence that is a prompt is followed by a token
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
        output_dir=str(FOLDER / "mismatch" / "-".join(parts)),  # programs side by side have folders of their own
    )


def start_engine(name: str, options: argparse.Namespace, engine: Engine) -> Fleet:
    """An engine of the model's shapes, on dummy weights; not waited for."""
    from megatron_fp8rl.data.model_dir import write_model_dir
    from megatron_fp8rl.rollout.fleet import Fleet

    cfg = run_config(name, options, engine)
    return Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir, wait=False)


def sample(fleet: Fleet, language: Language, options: argparse.Namespace) -> list[Sample]:
    """Completions of the language's sentences, with the engine's log-probabilities."""
    prompts = language.walks(options.prompts, options.prompt_tokens, seed=900_001).tolist()
    (client,) = fleet.clients
    length = options.completion_tokens
    sampling = replace(client.sampling, temperature=1.0, max_tokens=length, stop_token_ids=(), stop_strings=())

    async def everything() -> list:
        asked = (client.generate(p, options.completions, 1000 * i, sampling=sampling) for i, p in enumerate(prompts))
        return await asyncio.gather(*asked)

    answers = fleet.sync(everything(), fleet.cfg.rollout.request_deadline_s)
    return [
        as_sample(f"{i}#{j}", (*prompt, *c.token_ids), len(prompt), c.rollout_logprobs)
        for i, (prompt, completions) in enumerate(zip(prompts, answers, strict=True))
        for j, c in enumerate(completions)
    ]


def prefilled(fleet: Fleet, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with what the engine computes for their tokens when it is given them as prompts."""
    (client,) = fleet.clients

    async def everything() -> list:
        return await asyncio.gather(*(client.prompt_logprobs(s.token_ids) for s in samples))

    answers = fleet.sync(everything(), fleet.cfg.rollout.request_deadline_s)
    return [
        as_sample(s.name, s.token_ids, s.num_prompt_tokens, logprobs[s.num_prompt_tokens - 1 :])
        for s, logprobs in zip(samples, answers, strict=True)
    ]


@dataclass
class WarmTrainer:
    """A policy that has learned the language, and what measurements of it share."""

    name: str
    policy: Policy | FrozenPolicy
    language: Language
    history: Sequence[TrainBatch]  # for delayed scaling, and for the scales of an FP8 cache
    options: argparse.Namespace
    loss: float | None
    cache_scales: KVScales | None = None  # of the engine's FP8 KV cache

    @classmethod
    def train(cls, name: str, parallel: Parallel, options: argparse.Namespace) -> WarmTrainer:
        from megatron_fp8rl.trainer.frozen import FrozenPolicy
        from megatron_fp8rl.trainer.policy import Policy

        cfg = run_config(name, options, None)
        language = Language(cfg.model.vocab_size)
        if not options.warm_steps:
            cfg = run_config(name, options, next(plan_engines(options)), options.trainer[0])
            return cls(name, FrozenPolicy.build(cfg, parallel), language, (), options, None)
        policy = Policy.build(cfg, parallel)
        length = 64 if name.startswith("tiny") else 256
        num_sequences = max(1, options.warm_tokens // length)
        size = {"num_sequences": num_sequences, "length": length}
        *steps, past, past_too = batches(cfg, language, options.warm_steps + 2, **size)
        losses = train(policy, steps)
        loss = round(losses[-1], 4) if losses else None
        print(f"{name}: {loss} nats after {len(losses)} steps, {language.entropy:.3f} is best", flush=True)
        free_memory()  # engines are starting
        return cls(name, policy, language, (past, past_too), options, loss)

    def publish(self, cfg: RunConfig, fleet: Fleet) -> None:
        """Send the weights to the engine of ``cfg``, in its precision, with proof that they have arrived."""
        from megatron_fp8rl.weight_sync.publish import WeightExporter

        self.policy.cfg = cfg
        if self.history:
            switch_precision(self.policy, cfg.precision)
        exporter = WeightExporter(self.policy, fleet, cfg)
        try:
            if cfg.rollout.kv_cache_dtype == "fp8":
                self.policy.calibrate_kv(self.history[0])
                self.cache_scales = self.policy.kv_scales()
            exporter.publish(1, kv_scales=self.cache_scales)
        finally:
            exporter.close()

    def recomputed(self, trainer: str, engine: Engine, fleet: Fleet, samples: Sequence[Sample]) -> TrainBatch:
        """The samples with ``old_logprobs_T`` under one of TRAINERS, or by the engine itself."""
        from megatron_fp8rl.data.packing import pack_for
        from megatron_fp8rl.trainer import kv_scales

        (batch,) = pack_for(self.policy.cfg, samples, data_rank=0)
        if trainer != PREFILL:
            if self.history:
                switch_precision(self.policy, engine.precision(trainer), self.history)
            if self.cache_scales is not None and self.policy.cfg.precision.round_kv:
                kv_scales.hold(self.policy.models, self.cache_scales, self.policy.parallel.device)
            return self.policy.with_old_logprobs(batch)
        (own,) = pack_for(self.policy.cfg, prefilled(fleet, samples), data_rank=0)
        both = zip(batch.microbatches, own.microbatches, strict=True)
        return replace(batch, microbatches=tuple(replace(a, old_logprobs_T=b.rollout_logprobs_T) for a, b in both))


def _numbers(batch: TrainBatch) -> Row:
    """How far old and rollout log-probabilities of a batch are apart."""
    import torch

    from megatron_fp8rl.algo.mismatch import LocalReducer, mismatch_metrics

    report = mismatch_metrics([batch], AlgoConfig(alarm_action="warn"), LocalReducer())
    metrics = {key.split("/", 1)[1]: float(f"{value:.5g}") for key, value in report.metrics.items()}
    kept = ("abs_logprob_diff/mean", "abs_logprob_diff/max", "kl_k3/mean", "multiplicative_error/mean")
    pairs = [(mb.old_logprobs_T[mb.loss_mask_T], mb.rollout_logprobs_T[mb.loss_mask_T]) for mb in batch.microbatches]
    old, rollout = (torch.cat(values).double() for values in zip(*pairs, strict=True))
    distance = (old - rollout).abs()
    places = torch.cat([mb.positions_T[mb.loss_mask_T] for mb in batch.microbatches]).cpu() // BUCKET
    return {
        "by_position": {int(b) * BUCKET: _spread(distance[places == b]) for b in places.unique()},
        "tokens": batch.num_loss_tokens,
        "sampled_entropy": round(-rollout.mean().item(), 4),
        **{key: metrics[key] for key in (*kept, "effective_sample_size/mean")},
        "equal_share": round((distance == 0).double().mean().item(), 5),
        "rounding_share": round((distance < ROUNDING).double().mean().item(), 5),
    }


def _spread(distance: Tensor) -> list[float]:
    """[tokens, mean, largest, share of 0]"""
    numbers = (distance.mean(), distance.max(), (distance == 0).double().mean())
    return [len(distance), *(float(f"{number.item():.3g}") for number in numbers)]


def rows_of_engine(warm: WarmTrainer, engine: Engine, fleet: Fleet) -> Iterator[Row]:
    """One engine against the recipes. Kernels that are missing, or do not compute this model, are failures of a row."""
    fleet.wait_until_ready()
    warm.publish(run_config(warm.name, warm.options, engine), fleet)
    samples = sample(fleet, warm.language, warm.options)
    for trainer in (PREFILL, *warm.options.trainer):
        head = {"rollout": engine.rollout, "scales": engine.scales, "trainer": trainer}
        try:
            yield head | _numbers(warm.recomputed(trainer, engine, fleet, samples))
        except (RuntimeError, ValueError, TypeError, LookupError, TimeoutError) as error:
            yield head | {"error": runner.reason(error)}


class Mismatch(runner.Benchmark):
    name, title, about = "mismatch", "Train/rollout mismatch", __doc__
    keys = ("model", "layers", "warm_steps", "rollout", "scales", "trainer", *KERNELS, "device", *LENGTHS)
    limit_s = 3600.0

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--model", MODELS, ["qwen3_8b"])
        parser.add_argument("--layers", type=int, help="cut the models to this depth")
        runner.choices(parser, "--rollout", ROLLOUTS, ROLLOUTS)
        runner.choices(parser, "--trainer", TRAINERS, ["bf16", "blockwise", "delayed"])
        runner.choices(parser, "--scales", ["pow2", "fp32"], ["pow2", "fp32"])
        parser.add_argument("--linear", choices=["auto", "deep_gemm", "cutlass", "triton"], default="auto")
        parser.add_argument("--moe", choices=["auto", "deep_gemm", "triton"], default="auto")
        attention = ["auto", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"]
        parser.add_argument("--attention", choices=attention, default="auto")
        compiled = "torch.compile in the engine; off: CUDA graphs alone; eager: neither, which starts soonest"
        parser.add_argument("--compile", choices=["on", "off", "eager"], default="off", help=compiled)
        parser.add_argument("--batch-invariant", action="store_true", help="the engine's batch-invariant kernels")
        parser.add_argument("--experts", choices=["te", "deep_gemm"], default="te", help="the trainer's kernels")
        parser.add_argument("--transport", choices=["auto", "gloo", "ipc"], default="auto")
        parser.add_argument("--warm-steps", type=int, default=100)
        parser.add_argument("--warm-tokens", type=int, default=8192, help="of one step of the warm start")
        parser.add_argument("--lr", type=float, default=3e-4)
        parser.add_argument("--prompts", type=int, default=64)
        parser.add_argument("--completions", type=int, default=2, help="of each prompt")
        parser.add_argument("--prompt-tokens", type=int, default=64)
        parser.add_argument("--completion-tokens", type=int, default=128)
        parser.add_argument("--microbatch", type=int, default=8192, help="tokens")
        parser.add_argument("--kv-cache-gib", type=int, default=2)

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if not options.warm_steps and (len(options.trainer) > 1 or len(list(plan_engines(options))) > 1):
            parser.error("--warm-steps 0 holds one policy in one precision: name one --trainer, --rollout and --scales")
        if options.quick and num_gpus():
            options.model, options.layers, options.rollout, options.warm_steps = ["qwen3_8b"], 4, ["fp8"], 40
        elif options.quick:
            options.model, options.rollout, options.warm_steps = ["tiny_moe"], ["fp8"], 30
            options.warm_tokens, options.lr, options.prompts, options.completions = 1024, 4e-3, 8, 2
            options.prompt_tokens, options.completion_tokens = 16, 32
        options.scales = ["pow2"] if options.quick else options.scales

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        """A warm start for each model, from which all engines are published to."""
        chosen = {key: getattr(options, key) for key in ("warm_steps", *KERNELS, *LENGTHS)}
        for name in options.model:
            yield {"model": name, "layers": model_of(name, options.layers).num_layers, **chosen}

    def gpus(self, arm: Row) -> int:
        return int(not arm["model"].startswith("tiny"))

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        first, *others = plan_engines(options)
        with ExitStack() as stack:
            parallel = stack.enter_context(single_rank(run_config(arm["model"], options, None)))
            fleet = stack.enter_context(start_engine(arm["model"], options, first))  # while the trainer learns
            warm = WarmTrainer.train(arm["model"], parallel, options)
            for engine in (first, *others):
                if engine is not first:
                    fleet = stack.enter_context(start_engine(arm["model"], options, engine))
                for row in rows_of_engine(warm, engine, fleet):
                    yield arm | {"warm_loss": warm.loss} | row
                fleet.shutdown()
                free_memory()

    def line(self, row: Row) -> Row:
        kernels = f"{row['linear']} / {row['moe']} / {row['attention']}"
        kernels += ", batch-invariant" if row["batch_invariant"] else ""
        kernels += {"on": ", torch.compile", "eager": ", eager"}.get(row["compile"], "")
        return {
            "model": f"{row['model']}, {row['layers']} layers",
            "rollout": row["rollout"] if row["rollout"] == "bf16" else f"{row['rollout']}, {row['scales']} scales",
            "trainer": row["trainer"] + (", grouped experts" if row["experts"] == "deep_gemm" else ""),
            "mean d": f"{row['abs_logprob_diff/mean']:.5f}",
            "max d": f"{row['abs_logprob_diff/max']:.3f}",
            "KL k3": f"{row['kl_k3/mean']:.2e}",
            "mean exp d": f"{row['multiplicative_error/mean']:.5f}",
            "d = 0, d < 1e-5": f"{row['equal_share']:.1%}, {row['rounding_share']:.1%}",
            "linear / experts / attention": kernels,
        }

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "d = |old - rollout| in nats per sampled token, at temperature 1: the trainer's log-probabilities of what the "
            "engine sampled, on the same weights. Models of these shapes, trained from random weights by supervised steps "
            f"in BF16 on the language of benchmarks.synthetic ({warm_starts(rows)}). fp8_kv adds an FP8 KV cache of "
            "measured scales; the trainer engine is blockwise with attention by the engine's kernel, deep_gemm with that "
            "of its linears. Engine's prefill: no trainer, but the engine's own log-probabilities of its sequences, read "
            f"as prompts. The last numbers are shares of tokens; FP32 sums in another order agree to {ROUNDING:g}."
        )


def warm_starts(rows: Sequence[Row]) -> str:
    """Each run starts anew, and BF16 sums vary: the range of what they come to."""
    found: dict[tuple[str, int], set[float]] = {}
    for row in rows:
        losses = found.setdefault((row["model"], row["warm_steps"]), set())
        losses |= {row["warm_loss"]} - {None}
    parts = []
    for (model, steps), losses in found.items():
        nats = " to ".join(f"{loss:.3f}" for loss in sorted({min(losses), max(losses)})) if losses else "random"
        parts.append(f"{model}: {steps} steps, {nats} nats")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(runner.main(Mismatch()))
