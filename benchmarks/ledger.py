"""Whole steps of real models, phase by phase: FP8 next to BF16, with everything else alike, on one machine in one go.

    python -m benchmarks.ledger --shape 8b_separate --arm bf16 fp8 fp8_kv exact
    python -m benchmarks.ledger --model DIR --data FILE --reward math --arm bf16 fp8     a job of your own
    python -m benchmarks.ledger --plan --gpu h200                                       what each shape would run
    python -m benchmarks.ledger --table                                                 the section again, of all rows

Every arm is a process of ``python -m megatron_fp8rl grpo`` as a user calls it, so its layout is the one that the command
chooses; every publication is proven. Shapes have the published dimensions, random weights, and rows and rewards made
here. The arms take turns, ``--rounds`` times; a row is one run, and its figures are those of the steps after the second.
A run is killed after ``--steps``, before it writes a checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import ledger_rows, runner
from benchmarks.ledger_rows import LEFT_OUT, Job
from benchmarks.power import PowerMeter
from benchmarks.record import Row
from benchmarks.whole_runs import follow
from megatron_fp8rl import cli
from megatron_fp8rl.commands import grpo
from megatron_fp8rl.config import ConfigError, ModelConfig
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.preflight import rules
from model_configs import dense, qwen3, small, tiny

ARMS = {
    "bf16": ("--precision.trainer", "bf16", "--precision.rollout", "bf16"),
    "fp8": (),
    "fp8_kv": ("--engine.kv_cache_dtype", "fp8"),
    "fp8_deep_gemm": ("--precision.kernels.engine_experts", "deep_gemm"),  # MoE models only
    "exact": ("--precision.exact", "True"),
}
_SEPARATE = ("--engine.placement", "separate", "--engine.gpu_memory_utilization", "0.85")


@dataclass(frozen=True)
class Shape:
    """One model on so many GPUs, and the batch of a step."""

    model: ModelConfig
    gpus: int
    prompts: int = 16
    completions: int = 16
    words: tuple[str, ...] = ()  # fields of every arm

    def with_layers(self, layers: int) -> Shape:
        return replace(self, model=replace(self.model, num_layers=layers))


def _separate(trainers: int, engines: int, *words: str) -> tuple[str, ...]:
    """Trainer ranks and engines on GPUs of their own."""
    return (*_SEPARATE, "--parallel.world_size", f"{trainers}", "--engine.num_replicas", f"{engines}", *words)


_8B, _30B = Shape(qwen3.qwen3_8b(), 2, 8), Shape(qwen3.qwen3_30b_a3b(), 2)
SHAPES = {
    "0.6b": Shape(dense.qwen3_0_6b(), 1),
    "1.7b": Shape(dense.qwen3_1_7b(), 1),
    "4b": Shape(dense.qwen3_4b(), 1),
    "8b_separate": replace(_8B, words=_separate(1, 1)).with_layers(20),
    "8b_colocated": _8B,
    "30b_a3b": replace(_30B, gpus=1).with_layers(6),
    "30b_a3b_separate": replace(_30B, words=_separate(1, 1)).with_layers(8),
    "30b_a3b_colocated": replace(_30B, words=("--parallel.expert", "2")).with_layers(11),
    "30b_a3b_four": replace(_30B, gpus=4, words=_separate(2, 2, "--parallel.expert", "2")).with_layers(15),
    "30b_a3b_whole": replace(_30B, gpus=4, words=("--parallel.expert", "4")),
    "8b_eight": replace(_8B, gpus=8, prompts=32),
    "30b_a3b_eight": replace(_30B, gpus=8, prompts=32),
    "tiny": Shape(tiny.tiny_qwen3().model, 0, 2, 4),
}


def job_of(options: argparse.Namespace, name: str, arm: str) -> Job:
    """The command of one run. Raises ConfigError for a mistake of the user, and for a shape that does not fit."""
    limits = ["--sampling.max_completion_tokens", str(options.completion_tokens)] if options.completion_tokens else []
    words = [*limits, *ARMS[arm], *options.overrides]
    if options.model:
        own = grpo.GrpoOptions(
            model=options.model,
            data=tuple(options.data),
            reward=tuple(options.reward),
            gpus=options.gpus,
            gpu=options.gpu,
        )
        return _job(name, arm, own, words, options)
    shape = SHAPES[name]
    if options.layers:
        shape = shape.with_layers(options.layers)
    model, rows, reward = inputs(options.folder, name, shape)
    own = grpo.GrpoOptions(
        model=str(model), data=(str(rows),), reward=(f"{reward}:spread",), gpus=shape.gpus, gpu=options.gpu
    )
    length = 16 if name == "tiny" else 1024
    prompt = min(512, shape.model.max_position_embeddings // 2)
    batch = [
        "--sampling.prompts_per_step",
        f"{shape.prompts}",
        "--sampling.completions_per_prompt",
        f"{shape.completions}",
    ]
    lengths = ["--sampling.max_prompt_tokens", f"{prompt}", "--sampling.max_completion_tokens", f"{length}"]
    random = ["--model.random", "True", "--data.tokenizer", "character"]
    random += (
        ["--model.embedding_range", "1"] if shape.model.is_moe else []
    )  # or all tokens would have the same experts
    return _job(name, arm, own, [*random, *batch, *lengths, *shape.words, *words], options)


def _job(name: str, arm: str, own: grpo.GrpoOptions, words: list[str], options: argparse.Namespace) -> Job:
    words = [
        *words,
        "--num_steps",
        "1000",
        "--name",
        f"{name}-{arm}",
        "--observe.eval_prompts",
        "0",
        "--observe.display",
        "plain",
        "--checkpoint.every_steps",
        "0",
        "--checkpoint.export_hf",
        "False",
        "--output_dir",
        str((options.folder / name / arm).resolve()),
    ]
    cfg, _ = grpo.configure(own, cli.overriding(words))
    if violations := rules.check(cfg):
        raise ConfigError(violations)
    given = [f"--model={own.model}", "--data", *own.data, "--reward", *own.reward]
    given += ["--gpus", f"{own.gpus}"] if own.gpus is not None else []
    return Job(name, arm, cfg, tuple([sys.executable, "-m", "megatron_fp8rl", "grpo", *given, *words]))


def inputs(folder: Path, name: str, shape: Shape) -> tuple[Path, Path, Path]:
    """(folder with config.json and tokenizer, rows, file with the reward) of a shape; made once."""
    here = (folder / name).resolve()
    here.mkdir(parents=True, exist_ok=True)
    cfg = replace(small.small_qwen3(), model=shape.model, data=replace(small.small_qwen3().data, tokenizer="character"))
    model = write_model_dir(cfg, here / f"model-{shape.model.num_layers}")
    rows, reward = here / "rows.jsonl", here / "spread.py"
    numbers = ", ".join(str(n) for n in range(10, 10 + min(512, shape.model.max_position_embeddings // 2) // 6))
    rows.write_text("".join(f'{{"question": "Sum of {i}, {numbers}?", "answer": "{i}"}}\n' for i in range(4096)))
    # Random weights solve nothing: a reward that differs from completion to completion, so that gradients are not zero.
    reward.write_text("import zlib\n\n\ndef spread(completion):\n    return zlib.crc32(completion.encode()) / 2**32\n")
    return model, rows, reward


def layers_that_fit(options: argparse.Namespace, name: str, arm: str) -> int:
    """The largest depth of a shape that preflight finds to fit; 0 if none does."""
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
    """One run. Exits with 2 for a shape that does not fit, and names a depth that does."""
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
        parser.add_argument("--layers", type=int, default=0, help="of the shapes; 0: as they are")
        parser.add_argument("--completion-tokens", type=int, default=0, help="at most; 0: 1,024, or the job's own")
        parser.add_argument("--model", default="", help="folder of a model, instead of a shape")
        parser.add_argument("--data", nargs="+", default=[])
        parser.add_argument("--reward", nargs="+", default=[])
        parser.add_argument("--gpus", type=int, default=None, help="of --model; default: those of this machine")
        parser.add_argument("--gpu", choices=["h100", "h200", "b200"], default=None, help="with --plan: the kind")
        parser.add_argument(
            "--steps", type=int, default=LEFT_OUT + 5, help=f"of a run; the first {LEFT_OUT} do not count"
        )
        parser.add_argument("--rounds", type=int, default=1, help="runs of each arm, in turns")
        parser.add_argument("--plan", action="store_true", help="show what would run, and start nothing")
        parser.add_argument(
            "overrides", nargs="*", help="after --: fields of every run, e.g. -- --optim.recompute none"
        )

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.shape, options.steps = ["0.6b" if runner.num_gpus() else "tiny"], LEFT_OUT + 2
        if options.steps <= LEFT_OUT:
            parser.error(f"--steps {options.steps}: the first {LEFT_OUT} do not count; give at least {LEFT_OUT + 1}")

    def arms(self, options: argparse.Namespace) -> list[Row]:
        """Each arm once in every round; all are planned before the first one starts."""
        names = ["own"] if options.model else options.shape
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
        return 0  # as preflight has found

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
        return (
            "Seconds; medians over the steps after the second, of all rounds. Random weights of the published shape; every "
            "publication is proven. mean d: mean difference of log-probabilities of trainer and engine, in nats."
        )


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
