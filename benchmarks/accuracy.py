"""The study of docs/accuracy.md: train its runs, evaluate their weights, and write rows, tables and pictures.

    python tools/real_model.py runs/real
    python -m benchmarks.accuracy train bf16_1 fp8_1 exact_kv_1 --at-once 7
    python -m benchmarks.accuracy evaluate
    python -m benchmarks.accuracy add --commit HASH
    python -m benchmarks.accuracy                       write tables and pictures again

A run is ``FOLDER/ARM_SEED``, beside its log. Runs wait in one queue for all GPUs; finished runs are not repeated.
``evaluate`` starts one BF16 engine on each GPU. A row has the curves in means of STEPS steps, and the passed
completions of each held-out problem, so that arms are compared by problem whenever runs are added. ``add`` takes
evaluated runs, and unfinished ones that are named. Arms with experts need ``--model``, made by ``checkpoint_tools
upcycle``, then ``widen``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import psutil

from benchmarks import record, runner
from benchmarks.record import Row
from megatron_fp8rl.observe.display import interval_text
from megatron_fp8rl.report import style
from megatron_fp8rl.report.compare import against_first
from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.rollout.placement import visible_gpus

ROWS, PAGE = record.KEPT / "accuracy.jsonl", record.ROOT / "docs" / "accuracy.md"
STEPS = 5  # in each point of a curve
PROBLEMS, COMPLETIONS = 1024, 4  # of the evaluation: held-out problems, and completions of each
# Every run has these fields. A small cache and no sleep, because runs share a GPU.
SETTINGS = (
    "--num_steps 200 --sampling.prompts_per_step 32 --sampling.completions_per_prompt 8 --optim.lr 1e-5 "
    "--sampling.max_prompt_tokens 512 --sampling.max_completion_tokens 192 --optim.max_tokens_per_microbatch 8192 "
    "--observe.eval_every 40 --observe.eval_prompts 512 --observe.display plain --checkpoint.every_steps 1000 "
    "--engine.kv_cache_bytes 3221225472 --engine.gpu_memory_utilization 0.05 --engine.sleep_level 0"
)
_ALONE = "--engine.kv_cache_bytes None --engine.gpu_memory_utilization 0.4 --engine.max_num_sequences 1024"
_BF16 = "--precision.trainer bf16 --precision.rollout bf16 --precision.exact False"
_FP8 = "--precision.exact False"
_FP8_ROLLOUTS = f"{_FP8} --precision.trainer bf16"
_OFF = "--algo.correction off --algo.veto_below None"
_MASK = "--algo.correction sequence_mask"
_EMULATED = f"{_FP8} --engine.graphs plain --precision.kernels.trainer emulated"
_MXFP8 = "--precision.trainer mxfp8 --precision.rollout mxfp8 --precision.kernels.engine_linears emulated"
_EXACT_KV, _FP32 = "--precision.exact True --engine.kv_cache_dtype fp8", "--precision.scales fp32"
# Arm of the protocol -> (name, color, fields). The first arm of each table is the baseline of the others.
DENSE = {
    "bf16": ("BF16", style.BLUE, _BF16),
    "bf16_exact": ("BF16, exact", "#3B3B98", f"{_BF16.removesuffix('False')}True"),
    "fp8_rollouts_off": ("FP8 rollouts, BF16 trainer, uncorrected", style.YELLOW, f"{_FP8_ROLLOUTS} {_OFF}"),
    "fp8_rollouts": ("FP8 rollouts, BF16 trainer", style.ORANGE, _FP8_ROLLOUTS),
    "fp8": ("FP8", style.GREEN, _FP8),
    "fp8_cal": ("FP8, measured bounds", style.PURPLE, f"{_FP8} --algo.correction_quantile 0.001"),
    "fp8_mask": ("FP8, sequence mask", style.SKY, f"{_FP8} {_MASK}"),
    "fp8_kv": ("FP8, FP8 cache", style.GREY, f"{_FP8} --engine.kv_cache_dtype fp8"),
    "fp8_emulated": ("FP8, emulated in the trainer", "#8C6D31", _EMULATED),
    "mxfp8": ("MXFP8, emulated", "#637939", f"{_EMULATED} {_MXFP8}"),
    "exact": ("exact, BF16 cache", "#6B5B95", "--precision.exact True"),
    "exact_kv": ("exact, FP8 cache", style.RED, _EXACT_KV),
    "exact_kv_fp32": ("exact, FP8 cache, FP32 scales", "#8B0000", f"{_EXACT_KV} {_FP32}"),
}
_EXPERTS = "--num_steps 100 --optim.lr 2e-5"
_REPLAY = "--algo.router_replay rollout --engine.record_routed_experts True"
EXPERTS = {
    "moe_bf16": ("BF16", style.BLUE, f"{_BF16} {_EXPERTS}"),
    "moe_fp8": ("FP8", style.GREEN, f"{_FP8} {_EXPERTS}"),
    "moe_replay": ("FP8, router replay", style.PURPLE, f"{_FP8} {_REPLAY} {_EXPERTS}"),
    "moe_exact": ("exact, BF16 cache", style.RED, f"--precision.exact True {_EXPERTS}"),
}
ARMS = DENSE | EXPERTS
PROTOCOL = [f"{arm}_{seed}" for seed in (1, 2, 3) for arm in DENSE] + [f"bf16_{seed}" for seed in (4, 5, 6)]
# Marks of the page, and names of the pictures.
TABLES = {"accuracy": DENSE, "accuracy_experts": EXPERTS}
CURVES = {
    "reward": "reward/score/mean",
    "d": "mismatch/abs_logprob_diff/mean",
    "kl": "mismatch/kl_k3/mean",
    "ess": "mismatch/effective_sample_size/mean",
    "corrected": "mismatch/fraction_corrected/mean",
    "entropy": "loss/entropy/mean",
    "length": "rollout/length/mean",
}
TITLES = {
    "held_out": "Accuracy on 512 held-out questions",
    "reward": f"Reward, mean of {STEPS} steps",
    "d": "d: |log-probability of trainer - of engine|, nats",
    "kl": "KL of trainer and engine (k3), nats",
    "ess": "Effective sample size of the importance weights",
    "entropy": "Entropy of the policy, nats",
    "length": "Length of completions, tokens",
    "corrected": "Fraction of tokens that the correction caps or drops",
}
# The arms and panels of README's picture.
PROMISE = (("bf16", "fp8", "exact_kv"), ("held_out", "d"))
# End of a picture's name -> its panels.
PICTURES = {"": ("held_out", "reward", "d", "kl"), "_more": ("ess", "entropy", "length", "corrected")}


def command_of(name: str, options: argparse.Namespace) -> list[str]:
    """The command of the run ARM_SEED."""
    arm, _, seed = name.rpartition("_")
    inputs = ["--model", options.model, "--data", options.data / "train.jsonl", "--eval", options.data / "test.jsonl"]
    run = ["--reward", "number", "--gpus", 1, "--seed", seed, "--output_dir", options.runs / name]
    fields = [*SETTINGS.split(), *ARMS[arm][2].split(), *options.fields.split()]
    return [sys.executable, "-m", "megatron_fp8rl", "grpo", *map(str, [*inputs, *run, *fields])]


def train(options: argparse.Namespace) -> int:
    """Train the missing runs, ``at_once`` on each GPU; returns the number of failed ones."""
    missing = [name for name in options.names or PROTOCOL if not RunData(options.runs / name).is_done]
    return _failures({name: command_of(name, options) for name in missing}, options)


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate all finished runs without a result, in BF16 on all GPUs; returns the number of failed evaluations."""
    rates, gpus = _pass_rates(options.runs), len(_gpus())
    sizes = f"--num_problems {PROBLEMS} --num_completions {COMPLETIONS}"
    fields = f"{_BF16} --engine.kv_cache_dtype auto --engine.graphs compiled {_ALONE} {sizes}".split()
    commands, number = {}, len(list(options.runs.glob("evaluation*.log")))
    for arms in TABLES.values():  # an evaluation has one model
        named = (run for run in _finished(options.runs) if _arm(run.name) in arms)
        found = [run for run in named if (run / "hf").absolute() not in rates]
        for part in filter(None, (found[gpu::gpus] for gpu in range(gpus))):
            name, number = f"evaluation{number}", number + 1
            inputs = [part[0], "--output_dir", options.runs / name, "--checkpoint", *(run / "hf" for run in part)]
            command = [sys.executable, "-m", "megatron_fp8rl", "eval", *inputs, *fields, *options.fields.split()]
            commands[name] = [*map(str, command)]
    return _failures(commands, options)


def _failures(commands: Mapping[str, list[str]], options: argparse.Namespace) -> int:
    """Run the commands, each with a log beside its folder; returns how many failed."""
    options.runs.mkdir(parents=True, exist_ok=True)

    def run(name: str, gpu: str) -> str:
        log, environment = options.runs / f"{name}.log", {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        with log.open("wb") as file:
            done = subprocess.run(
                commands[name], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
        return runner.failure_in(log, 0) if done.returncode else ""

    return sum(bool(failure) for _, failure in in_queue(commands, run, options.at_once))


def in_queue(names: Iterable[str], run: Callable[[str, str], str], at_once: int) -> Iterator[tuple[str, str]]:
    """Call ``run(name, gpu)`` for all names, ``at_once`` on each GPU; it returns the failure, or an empty text. Yields
    (name, failure) as calls end. If this process is interrupted, it ends its child processes."""
    gpus = _gpus() * at_once
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    began_s = time.monotonic()

    def one(name: str) -> tuple[str, str]:
        gpu = free.get_nowait()  # there are as many workers as places
        print(f"{time.monotonic() - began_s:5.0f} s: {name} starts on GPU {gpu}", flush=True)
        failure = run(name, gpu)
        free.put(gpu)
        print(f"{time.monotonic() - began_s:5.0f} s: {name} {f'FAILED: {failure}' if failure else 'done'}", flush=True)
        return name, failure

    with ThreadPoolExecutor(len(gpus)) as pool:
        try:
            yield from (future.result() for future in as_completed([pool.submit(one, name) for name in names]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in psutil.Process().children():
                child.terminate()
            raise


def _gpus() -> list[str]:
    return visible_gpus() or ["none"]  # a machine without a GPU runs on its CPU


def _arm(run: str) -> str:
    return run.rpartition("_")[0]


def _finished(runs: Path) -> list[Path]:
    named = (path for path in runs.iterdir() if _arm(path.name) in ARMS)
    return sorted(path for path in named if RunData(path).is_done)


def _pass_rates(runs: Path) -> dict[Path, dict[str, float]]:
    """Final weights of a run -> pass rate of each held-out problem, of all evaluations in the folder."""
    folders = (path for path in sorted(runs.glob("evaluation*")) if path.is_dir())
    return functools.reduce(lambda rates, path: rates | RunData(path).pass_rates, folders, {})


def row_of(folder: Path, rates: Mapping[str, float] | None, commit: str) -> Row:
    """The row of the run in a folder named ARM_SEED, with the pass rates of its final weights if they are known."""
    run, (arm, _, seed) = RunData(folder), folder.name.rpartition("_")
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    updates = run.series("time/update/s")[1][1:]  # the first step compiles
    started = datetime.datetime.fromtimestamp(versions["started_unix_s"], datetime.UTC)
    held_out = run.series("eval/pass_rate/mean")
    curves = {name: run.series(key)[1] for name, key in CURVES.items()}
    return {
        "arm": arm,
        "seed": int(seed),
        "steps": len(curves["d"]),
        "held_out": dict(zip(map(str, held_out[0]), (round(value, 4) for value in held_out[1]), strict=True)),
        "update_s": {"median": round(statistics.median(updates), 2), "largest": round(max(updates), 2)},
        "max_d": max(run.series("mismatch/abs_logprob_diff/max")[1]),
        "curves": {name: _means(values) for name, values in curves.items()},
        "passed": rates and "".join(str(round(rates[name] * COMPLETIONS)) for name in sorted(rates)),
        "stamp": {
            "date": started.date().isoformat(),
            "commit": commit,
            "gpu": versions["gpus"][0],
            "cores": versions["num_cpus"],
            "packages": versions["packages"],
        },
    }


def _means(values: Sequence[float]) -> list[float]:
    parts = (values[start : start + STEPS] for start in range(0, len(values) - STEPS + 1, STEPS))
    return [float(f"{statistics.fmean(part):.4g}") for part in parts]


def by_arm(rows: Sequence[Row], arms: Collection[str] = ARMS) -> dict[str, list[Row]]:
    return {arm: found for arm in arms if (found := [row for row in rows if row["arm"] == arm])}


def differences(arms: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, dict[str, float]]]:
    """By arm with evaluated runs: accuracy of the final weights, and its difference from the first arm, problem by
    problem."""
    passed = {arm: [row["passed"] for row in rows if row["passed"]] for arm, rows in arms.items()}
    return against_first(
        {arm: [[int(digit) / COMPLETIONS for digit in run] for run in runs] for arm, runs in passed.items() if runs}
    )


def section(arms: Mapping[str, Sequence[Row]]) -> str:
    """Markdown of the rows of some arms: a table of the arms, and the runs."""
    rows, estimates, lines = [row for runs in arms.values() for row in runs], differences(arms), []
    for arm, runs in arms.items():

        def mean(name: str, runs: Sequence[Row] = runs) -> float:
            return statistics.fmean(value for row in runs for value in row["curves"][name])

        evaluated = arm in estimates
        lines.append(
            {
                "arm": ARMS[arm][0],
                "seeds": ", ".join(f"{row['seed']}{'' if row['passed'] else '*'}" for row in runs),
                "accuracy": interval_text(estimates[arm]["accuracy"]) if evaluated else "",
                "minus BF16": interval_text(estimates[arm]["difference"]) if evaluated and lines else "",
                "mean d": f"{mean('d'):.3f}",
                "largest d": f"{max(row['max_d'] for row in runs):.1f}",
                "KL (k3)": f"{mean('kl'):.4f}",
                "effective sample size": f"{mean('ess'):.3f}",
                "capped or dropped": f"{mean('corrected'):.2%}",
            }
        )
    stamps = sorted({(row["stamp"]["date"], row["stamp"]["commit"], row["stamp"]["gpu"]) for row in rows})
    measured = "; ".join(f"{date}, commit {commit}, {gpu}" for date, commit, gpu in stamps)
    return f"{record.table(lines)}\n\nMeasured: {measured}. 95 % intervals draw seeds and questions. * not evaluated."


def draw(arms: Mapping[str, Sequence[Row]], picture: Path, curves: Sequence[str]) -> None:
    """Write a picture of two curves, or of four, by step: means of the seeds, and a band that spans them."""
    with style.styled():
        figure = style.new_figure(*((10.0, 7.0) if len(curves) > 2 else (8.0, 5.0)))
        for panel, curve in zip(figure.subplots(2, len(curves) // 2, squeeze=False).flatten(), curves, strict=True):
            for arm, runs in arms.items():
                name, color, _ = ARMS[arm]
                if curve == "held_out":
                    shortest = min((row["held_out"] for row in runs), key=len)
                    steps, values = list(map(int, shortest)), [list(row["held_out"].values()) for row in runs]
                else:
                    values = [row["curves"][curve] for row in runs]
                    steps = [STEPS * (i + 1) for i in range(min(map(len, values)))]
                _band(panel, steps, [run[: len(steps)] for run in values], color, name)
            style.finish(panel, TITLES[curve], legend=False)
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        style.save_png(figure, picture)


def _band(axes, steps: Sequence[int], runs: Sequence[Sequence[float]], color: str, name: str) -> None:
    columns = list(zip(*runs, strict=True))
    axes.plot(steps, [statistics.fmean(column) for column in columns], color=color, label=name)
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15, linewidth=0)


def add(options: argparse.Namespace) -> None:
    """Write the rows of all runs that were evaluated; a row replaces an older one of its arm and seed."""
    rows, rates = {(row["arm"], row["seed"]): row for row in _rows()}, _pass_rates(options.runs)
    evaluated = [folder for folder in _finished(options.runs) if (folder / "hf").absolute() in rates]
    for folder in [*evaluated, *(options.runs / name for name in options.names)]:
        row = row_of(folder, rates.get((folder / "hf").absolute()), options.commit)
        rows[row["arm"], row["seed"]] = row
    ROWS.write_text("".join(json.dumps(row) + "\n" for _, row in sorted(rows.items())), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["train", "evaluate", "add"])
    parser.add_argument("names", nargs="*", metavar="ARM_SEED", help=f"arms: {', '.join(ARMS)}")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share a GPU")
    parser.add_argument("--runs", type=Path, default=record.FOLDER / "accuracy", help="folder of all runs")
    parser.add_argument("--data", type=Path, default=Path("runs/real"), help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--model", type=Path, default=Path("runs/real/model"))
    parser.add_argument("--commit", help="of the code that ran")
    parser.add_argument("--fields", default="", help="more fields of every command, in one string")
    options = parser.parse_args()
    if wrong := [name for name in options.names if _arm(name) not in ARMS]:
        parser.error(f"{wrong[0]} is not ARM_SEED of {', '.join(ARMS)}")
    if options.action in ("train", "evaluate"):
        return 1 if {"train": train, "evaluate": evaluate}[options.action](options) else 0
    if options.action == "add":
        if options.commit is None:
            parser.error("add needs --commit")
        add(options)
    for name, arms in TABLES.items():
        if found := by_arm(_rows(), arms):
            record.replace(name, section(found), PAGE)
            for end, curves in PICTURES.items():
                draw(found, PAGE.with_name(f"{name}{end}.png"), curves)
    arms, curves = PROMISE
    draw(by_arm(_rows(), arms), PAGE.with_name("promise.png"), curves)
    return 0


def _rows() -> list[Row]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


if __name__ == "__main__":
    raise SystemExit(main())
