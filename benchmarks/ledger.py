"""Whole steps of real models by phase: FP8 and BF16 with equal settings, on one machine in one invocation.

    python -m benchmarks.ledger --shape 8b_separate --arm bf16 fp8 fp8_kv exact
    python -m benchmarks.ledger --model DIR --data FILE --reward math --arm bf16 fp8     a user's job
    python -m benchmarks.ledger --model DIR --data FILE --arm fp8 drafts -- --engine.max_num_sequences 16
    python -m benchmarks.ledger --plan --gpu h200                                       show the runs
    python -m benchmarks.ledger --table                                                 write the table of all rows

Every arm runs ``python -m megatron_fp8rl grpo`` with the layout that the command chooses; every publication is
verified. Shapes have published dimensions, random weights and generated rows. Arms alternate ``--rounds`` times. A row
is one run and counts the steps after the second. A run is killed after ``--steps``, before it writes a checkpoint.

Drafts (docs/speculation.md) are accepted only with trained weights and real prompts, so their arm needs ``--model``.
Invocations with 1, 16, 64 and 256 for ``--engine.max_num_sequences`` show when they pay. Not measured on GPUs yet.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import ledger_rows, record, runner
from benchmarks.ledger_rows import LEFT_OUT, Job
from benchmarks.power import PowerMeter
from benchmarks.record import Row
from benchmarks.whole_runs import follow
from megatron_fp8rl import cli
from megatron_fp8rl.commands import grpo
from megatron_fp8rl.config import ConfigError, ModelConfig
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.preflight import rules
from model_configs import (
    deepseek,
    dense,
    glm,
    gpt_oss,
    llama,
    minimax,
    mixtral,
    qwen3,
    qwen3_5,
    qwen3_next,
    small,
    tiny,
)

_INEXACT = ("--precision.exact", "False")
ARMS = {
    "bf16": ("--precision.trainer", "bf16", "--precision.rollout", "bf16", *_INEXACT),
    "fp8": _INEXACT,
    "fp8_kv": ("--engine.kv_cache_dtype", "fp8", *_INEXACT),
    "fp8_deep_gemm": ("--precision.kernels.engine_experts", "deep_gemm", *_INEXACT),  # MoE models only
    "drafts": ("--engine.speculation", "ngram", *_INEXACT),  # compare with fp8
    "exact": ("--precision.exact", "True"),
    "exact_kv": ("--precision.exact", "True", "--engine.kv_cache_dtype", "fp8"),
}
_SEPARATE = ("--engine.placement", "separate", "--engine.gpu_memory_utilization", "0.85")


@dataclass(frozen=True)
class Shape:
    model: ModelConfig
    gpus: int
    prompts: int = 16
    completions: int = 16
    args: tuple[str, ...] = ()  # fields of every arm

    def with_layers(self, layers: int) -> Shape:
        return replace(self, model=replace(self.model, num_layers=layers))


def _separate(trainers: int, engines: int, *args: str) -> tuple[str, ...]:
    return (*_SEPARATE, "--parallel.world_size", f"{trainers}", "--engine.num_replicas", f"{engines}", *args)


_8B, _30B = Shape(qwen3.qwen3_8b(), 2, 8), Shape(qwen3.qwen3_30b_a3b(), 2)
SHAPES = {
    "0.6b": Shape(dense.qwen3_0_6b(), 1),
    "1.7b": Shape(dense.qwen3_1_7b(), 1),
    "4b": Shape(dense.qwen3_4b(), 1),
    "8b_separate": replace(_8B, args=_separate(1, 1)).with_layers(20),
    "8b_colocated": _8B,
    "30b_a3b": replace(_30B, gpus=1).with_layers(6),
    "30b_a3b_separate": replace(_30B, args=_separate(1, 1)).with_layers(8),
    "30b_a3b_colocated": replace(_30B, args=("--parallel.expert", "2")).with_layers(11),
    "30b_a3b_four": replace(_30B, gpus=4, args=_separate(2, 2, "--parallel.expert", "2")).with_layers(15),
    "30b_a3b_whole": replace(_30B, gpus=4, args=("--parallel.expert", "4")),
    "8b_eight": replace(_8B, gpus=8, prompts=32),
    "30b_a3b_eight": replace(_30B, gpus=8, prompts=32),
    "tiny": Shape(tiny.tiny_qwen3().model, 0, 2, 4),
}
# Other families at their width with few layers and perhaps fewer experts, on one GPU.
_OTHERS = {
    "llama31_8b": (llama.llama31_8b(), 4),
    "qwen25_7b": (dense.qwen25_7b(), 4),
    "olmo2_7b": (dense.olmo2_7b(), 4),
    "olmo3_7b": (dense.olmo3_7b(), 4),
    "gemma3_1b": (dense.gemma3_1b(), 6),
    "phi4_mini": (dense.phi4_mini(), 4),
    "mixtral_8x7b": (mixtral.mixtral_8x7b(), 2),
    "glm_45_air": (glm.glm_45_air(), 2),
    "glm_47_flash": (glm.glm_47_flash(), 2),
    "minimax_m2": (minimax.minimax_m2(), 1),
    "gpt_oss_20b": (gpt_oss.tiled(gpt_oss.gpt_oss_20b()), 2),
    "qwen3_next": (replace(qwen3_next.qwen3_next_80b_a3b(), num_experts=128), 4),
    "qwen35_moe": (replace(qwen3_5.qwen3_5_35b_a3b(), num_experts=128), 4),
    "kimi_k2": (replace(deepseek.kimi_k2(), num_experts=32), 2),
}
HEADLINE = "8b_colocated"  # the README's main figure
SHAPES |= {name: Shape(model, 1).with_layers(layers) for name, (model, layers) in _OTHERS.items()}


def job_of(options: argparse.Namespace, name: str, arm: str) -> Job:
    """A run and its command. Raises ConfigError for invalid options, and for a shape that does not fit."""
    limits = ["--sampling.max_completion_tokens", str(options.completion_tokens)] if options.completion_tokens else []
    args = [*limits, *ARMS[arm], *options.overrides]
    if options.model:
        data, reward = tuple(options.data), tuple(options.reward)
        user_job = grpo.GrpoOptions(model=options.model, data=data, reward=reward, gpus=options.gpus, gpu=options.gpu)
        return _job(name, arm, user_job, args, options)
    shape = SHAPES[name]
    if options.layers:
        shape = shape.with_layers(options.layers)
    model, rows, reward = inputs(options.folder, name, shape)
    job = grpo.GrpoOptions(
        model=str(model), data=(str(rows),), reward=(f"{reward}:spread",), gpus=shape.gpus, gpu=options.gpu
    )
    length = 16 if name == "tiny" else 1024
    prompt = min(512, shape.model.max_position_embeddings // 2)
    fields = (
        f"--model.random True --data.tokenizer character --sampling.prompts_per_step {shape.prompts} "
        f"--sampling.completions_per_prompt {shape.completions} --sampling.max_prompt_tokens {prompt} "
        f"--sampling.max_completion_tokens {length}"
    )
    if shape.model.is_moe:
        fields += " --model.embedding_range 1"  # otherwise all tokens choose the same experts
    return _job(name, arm, job, [*fields.split(), *shape.args, *args], options)


def _job(name: str, arm: str, job: grpo.GrpoOptions, args: list[str], options: argparse.Namespace) -> Job:
    fields = (
        f"--num_steps 1000 --name {name}-{arm} --observe.eval_prompts 0 --observe.display plain "
        "--checkpoint.every_steps 0 --checkpoint.export_hf False --output_dir"
    )
    args = [*args, *fields.split(), str((options.folder / name / arm).resolve())]
    cfg, _ = grpo.configure(job, cli.overriding(args))
    if violations := rules.check(cfg):
        raise ConfigError(violations)
    user_args = [f"--model={job.model}", "--data", *job.data, "--reward", *job.reward]
    user_args += ["--gpus", f"{job.gpus}"] if job.gpus is not None else []
    return Job(name, arm, cfg, (sys.executable, "-m", "megatron_fp8rl", "grpo", *user_args, *args))


def inputs(folder: Path, name: str, shape: Shape) -> tuple[Path, Path, Path]:
    """Write the inputs of a shape: (folder with config.json and tokenizer, rows, file with the reward)."""
    folder = (folder / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cfg = replace(small.small_qwen3(), model=shape.model, data=replace(small.small_qwen3().data, tokenizer="character"))
    model = write_model_dir(cfg, folder / f"model-{shape.model.num_layers}")
    rows, reward = folder / "rows.jsonl", folder / "spread.py"
    numbers = ", ".join(str(n) for n in range(10, 10 + min(512, shape.model.max_position_embeddings // 2) // 6))
    rows.write_text("".join(f'{{"question": "Sum of {i}, {numbers}?", "answer": "{i}"}}\n' for i in range(4096)))
    # Random weights solve no problem. This reward differs between completions, so that gradients are not zero.
    reward.write_text("import zlib\n\n\ndef spread(completion):\n    return zlib.crc32(completion.encode()) / 2**32\n")
    return model, rows, reward


def layers_that_fit(options: argparse.Namespace, name: str, arm: str) -> int:
    """The largest depth of a shape that fits by preflight; 0 if none does."""
    fits, too_many = 0, options.layers or SHAPES[name].model.num_layers
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        try:
            job_of(argparse.Namespace(**{**vars(options), "layers": middle}), name, arm)
            fits = middle
        except ConfigError:
            too_many = middle
    return fits


def planned(options: argparse.Namespace, name: str, arm: str) -> Job:
    """A run. Exits with status 2 for a shape that does not fit, and prints a depth that fits."""
    try:
        return job_of(options, name, arm)
    except ConfigError as error:
        fits = 0 if options.model else layers_that_fit(options, name, arm)
        print(f"{name}, {arm}: {error}{f' --layers {fits} fits' if fits else ''}", file=sys.stderr)
        raise SystemExit(2) from None


class Ledger(runner.Benchmark):
    name, title, keys, about = "ledger", "Whole steps", ledger_rows.KEYS, __doc__
    limit_s = 1800.0

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--shape", sorted(SHAPES), ["0.6b"])
        runner.choices(parser, "--arm", ARMS, ["bf16", "fp8"])
        parser.add_argument("--layers", type=int, default=0, help="layers of the shapes; 0: all")
        parser.add_argument(
            "--completion-tokens", type=int, default=0, help="largest number; 0: 1,024, or that of the job"
        )
        parser.add_argument("--model", default="", help="folder of a user's model, instead of a shape")
        parser.add_argument("--data", nargs="+", default=[])
        parser.add_argument("--reward", nargs="+", default=[])
        parser.add_argument("--gpus", type=int, default=None, help="GPUs for --model; default: all of this machine")
        parser.add_argument("--gpu", choices=["h100", "h200", "b200"], default=None, help="kind of GPU for --plan")
        parser.add_argument("--steps", type=int, default=LEFT_OUT + 5, help=f"the first {LEFT_OUT} do not count")
        parser.add_argument("--rounds", type=int, default=1, help="runs of each arm, alternating")
        parser.add_argument("--plan", action="store_true", help="show the runs, and start nothing")
        parser.add_argument("overrides", nargs="*", help="fields of every run, after --")

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.shape, options.steps = ["0.6b" if runner.num_gpus() else "tiny"], LEFT_OUT + 2
        if options.steps <= LEFT_OUT:
            parser.error(f"--steps {options.steps}: the first {LEFT_OUT} do not count; give at least {LEFT_OUT + 1}")

    def arms(self, options: argparse.Namespace) -> list[Row]:
        """Each arm once in every round. All arms are planned before the first starts."""
        names = ["user"] if options.model else options.shape
        for name in names:
            for arm in options.arm:
                planned(options, name, arm)
        return [
            {"shape": name, "arm": arm, "round": number}
            for name in names
            for number in range(1, options.rounds + 1)
            for arm in options.arm
        ]

    def gpus(self, arm: Row) -> int:
        return 0  # preflight decides

    def rows_of(self, arm: Row, options: argparse.Namespace, log: Path) -> Iterator[Row]:
        job = planned(options, arm["shape"], arm["arm"])
        run_dir, text = Path(job.cfg.run_dir), f"{job.name} {job.arm}"
        shutil.rmtree(run_dir, ignore_errors=True)
        with PowerMeter() as power:
            follow(text, job.command, run_dir, log, options.run_limit_s, note=power.mark, until=options.steps)
        row = ledger_rows.row_of(job, power, options.steps)
        if row is not None:
            yield row | {"round": arm["round"], "fields": options.overrides, "num_gpus": runner.num_gpus()}
        if row is None or row["steps"] < options.steps - LEFT_OUT:
            yield arm | {"error": runner.failure_in(log, options.run_limit_s)}

    def table(self, rows: Sequence[Row]) -> str:
        return ledger_rows.table(rows)

    def notes(self, rows: Sequence[Row]) -> str:
        text = (
            "Seconds: medians over the steps after the second, of all rounds. Random weights of the published shape. "
            "Every publication is verified. mean d: mean |log-probability of trainer - of engine|, in nats."
        )
        if all(row["shape"] != HEADLINE for row in rows):
            return text
        everything = record.Results(record.KEPT / "ledger.jsonl", self.keys).rows()
        layers = SHAPES[HEADLINE].model.num_layers
        over_time = ledger_rows.history(everything, HEADLINE, layers, record.superseded("ledger"))
        return f"{text}\n\n`make headline` adds a run to this table, `{HEADLINE}` over time:\n\n{over_time}"


LEDGER = Ledger()


def main(argv: Sequence[str] | None = None) -> int:
    options = runner.parse(LEDGER, argv)
    if not options.plan:
        return runner.main(LEDGER, argv)
    for arm in LEDGER.arms(options):
        cfg = planned(options, arm["shape"], arm["arm"]).cfg
        print(
            f"{arm['shape']} {arm['arm']}: {cfg.model.num_layers} layers, {cfg.parallel.world_size} trainer ranks, "
            f"{cfg.engine.placement}, sleep {cfg.engine.sleep_level}, offload {cfg.optim.offload or 'nothing'}, "
            f"recompute {cfg.optim.recompute}, {cfg.optim.max_tokens_per_microbatch:,} tokens a microbatch"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
