"""The jobs beside GRPO on one GPU, each in a short run, with GRPO of the same settings as the baseline.

    python tools/real_model.py runs/real
    python -m benchmarks.jobs --at-once 4
    python -m benchmarks.jobs --shape 1.7b --steps 6 --job grpo lora muon     random weights: memory and times only
    python -m benchmarks.jobs --plan h200                                     check the commands and show them

``--at-once`` runs share each GPU. A run is killed after ``--steps``, before it writes a checkpoint; ``sft`` ends by
itself, because it makes the teacher of ``distill``. ``mtp`` and its baseline ``glm`` train a tiny GLM-4.5.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import ledger, runner
from benchmarks.accuracy import SETTINGS, in_queue
from benchmarks.ledger_rows import LEFT_OUT
from benchmarks.record import Row
from benchmarks.whole_runs import follow
from megatron_fp8rl import cli
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.preflight.memory import GPUS
from megatron_fp8rl.report.run_data import RunData

_INEXACT, _LORA = "--precision.exact False", "--lora.rank 16 --optim.lr 1e-4"
_REWARD, _LOSS, _KL = "reward/score/mean", "eval/loss/mean", "loss/kl_ref/mean"
# Job -> (command, fields, what it improves). On GPUs unmerged adapters and drafts refuse exact mode.
JOBS = {
    "sft": ("sft", "", _LOSS),
    "grpo": ("grpo", "", _REWARD),
    "grpo_inexact": ("grpo", _INEXACT, _REWARD),
    "lora": ("grpo", _LORA, _REWARD),
    "lora_unmerged": ("grpo", f"{_LORA} --lora.merge False {_INEXACT}", _REWARD),
    "ngram": ("grpo", f"--engine.speculation ngram {_INEXACT}", _REWARD),
    "muon": ("grpo", "--optim.optimizer muon", _REWARD),
    "adam_bf16": ("grpo", "--optim.states bf16", _REWARD),
    "adam_fp8": ("grpo", "--optim.states fp8", _REWARD),
    "dpo": ("dpo", "--optim.lr 5e-6", _LOSS),
    "glm": ("train", f"--engine.speculation none --engine.draft_tokens 4 --model.num_mtp_layers 0 {_INEXACT}", _REWARD),
    "mtp": ("train", _INEXACT, _REWARD),
    "distill": ("distill", "--algo.teacher_kl full", _KL),
}
_TRAINED = ("ngram", "dpo", "glm", "mtp", "distill")  # need weights that are not random
_DRAFTED = ("ngram", "mtp")
_SAMPLED = f"{SETTINGS} --observe.eval_prompts 0"
_SUPERVISED = (
    "--observe.display plain --checkpoint.every_steps 1000 --max_length 512 --optim.max_tokens_per_microbatch 8192"
)
_WARM = "--observe.display plain --warm_start.steps 200 --engine.gpu_memory_utilization 0.05 --engine.sleep_level 0"
_MEDIANS = {"step_s": "time/step/s", "update_s": "time/update/s", "publish_s": "publish/total/s"}
_MEDIANS |= {"pause_s": "publish/pause/s", "publish_bytes": "publish/bytes/sum"}
_MEDIANS |= {"tokens_per_s": "rollout/tokens_per_s/mean", "accepted_drafts": "speculation/acceptance/mean"}
_MEMORY = [f"memory/{phase}_allocated/max" for phase in ("rollout", "train", "publish")]
_COLUMNS = "model job at_once held_gib peak_gib step_s tokens_per_s update_s publish_s pause_s publish_bytes".split()
_COLUMNS += "mean_d accepted_drafts metric first last".split()


def pairs(rows: Path, folder: Path) -> Path:
    """Write pairs of answers for DPO, at most 4,096: the right number, and the next one."""
    file, found = folder / f"pairs-{rows.name}", map(json.loads, rows.read_text(encoding="utf-8").splitlines()[:4096])
    named = ({"prompt": r["question"], "chosen": r["answer"], "rejected": str(int(r["answer"]) + 1)} for r in found)
    file.write_text("\n".join(map(json.dumps, named)), encoding="utf-8")
    return file


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Job -> its command, with the user's model, or with random weights of a shape of the ledger. Writes their data."""
    folder = (options.folder / (options.shape or "model")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model, reward, files = options.model, "number", [options.data / "train.jsonl", options.data / "test.jsonl"]
    more = ["--gpus", 1, "--gpu", options.plan] if options.plan else ["--gpus", min(1, runner.num_gpus())]
    if options.shape:
        model, rows, file = ledger.inputs(options.folder, options.shape, ledger.SHAPES[options.shape])
        reward, files = f"{file}:spread", [rows, rows]
        more += "--model.random True --data.tokenizer character".split()
    found = {}
    for job in options.job or [job for job in JOBS if not options.shape or job not in _TRAINED]:
        program, fields, _ = JOBS[job]
        rows, held_out = [pairs(file, folder) for file in files] if program == "dpo" else files
        words = ["--model", model, "--data", rows, *more]
        if program in ("sft", "dpo"):
            words += [*_SUPERVISED.split(), "--eval", held_out, "--observe.eval_every", options.steps]
        elif program == "train":
            words = ["tiny_glm4_moe", *_WARM.split()]
        else:
            teacher = ["--teacher", model if options.plan else folder / "sft" / "hf"]
            words += [*_SAMPLED.split(), *(teacher if program == "distill" else ["--reward", reward])]
        words += ["--num_steps", options.steps + 1, "--output_dir", folder / job]
        words = [*map(str, words), *fields.split(), *options.overrides]
        found[job] = [sys.executable, "-m", "megatron_fp8rl", program, *words]
    return found


def row_of(job: str, run: RunData, last: int) -> Row:
    """The row of a run up to step ``last``, in bytes, seconds and nats; without what the run did not measure."""
    records = [step for step in run.records if step["step"] <= last]

    def known(key: str, after: int = -1) -> list[float]:
        return [step[key] for step in records if step["step"] > after and step.get(key) is not None]

    row: Row = {"job": job, "steps": len(known("time/step/s", LEFT_OUT)), "metric": JOBS[job][2]}
    row |= {name: statistics.median(values) for name, key in _MEDIANS.items() if (values := known(key, LEFT_OUT))}
    if peaks := [peak for key in _MEMORY for peak in known(key)]:
        row |= {"held_gib": statistics.median(known(_MEMORY[0])) / 2**30, "peak_gib": max(peaks) / 2**30}
    if differences := known("mismatch/abs_logprob_diff/mean"):
        row |= {"mean_d": statistics.fmean(differences), "max_d": max(known("mismatch/abs_logprob_diff/max"))}
    if improved := known(JOBS[job][2]):
        few = max(1, min(5, len(improved) // 2))  # the reward of one step is noisy
        row |= {"first": statistics.fmean(improved[:few]), "last": statistics.fmean(improved[-few:])}
    return row


class Jobs(runner.Benchmark):
    name, title, keys, about = "jobs", "Jobs beside GRPO", ("run", "model", "job", "fields", "device"), __doc__

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--job", JOBS, [])
        parser.add_argument("--shape", choices=sorted(ledger.SHAPES), default="", help="instead of a model with data")
        parser.add_argument("--model", type=Path, default=Path("runs/real/model"), help="folder of trained weights")
        parser.add_argument("--data", type=Path, default=Path("runs/real"), help="folder of train.jsonl and test.jsonl")
        parser.add_argument("--at-once", type=int, default=1, help="runs that share a GPU")
        parser.add_argument("--steps", type=int, default=20, help=f"the first {LEFT_OUT} do not count")
        parser.add_argument("--plan", choices=GPUS, help="check the commands for this GPU and show them; start nothing")
        parser.add_argument("overrides", nargs="*", help="fields of every run, after --")

    def arms(self, options: argparse.Namespace) -> list[Row]:
        return [{"model": options.shape or options.model.name}]  # one queue of all jobs

    def gpus(self, arm: Row) -> int:
        return 0  # preflight decides

    def rows_of(self, arm: Row, options: argparse.Namespace, log: Path) -> Iterator[Row]:
        planned, folder = commands(options), options.folder / (options.shape or "model")

        def run(job: str, gpu: str) -> str:
            out, until, limit_s = folder / f"{job}.log", None if job == "sft" else options.steps, options.run_limit_s
            shutil.rmtree(folder / job, ignore_errors=True)
            follow(job, planned[job], folder / job, out, limit_s, until=until, CUDA_VISIBLE_DEVICES=gpu)
            is_done = any(step["step"] == options.steps for step in RunData(folder / job).records)
            return "" if is_done else runner.failure_in(out, limit_s)

        for jobs in (planned.keys() - {"distill"}, planned.keys() & {"distill"}):
            for job, failure in in_queue(sorted(jobs, key=list(JOBS).index), run, options.at_once):
                row = {"job": job, "error": failure} if failure else row_of(job, RunData(folder / job), options.steps)
                yield arm | {"at_once": options.at_once, "fields": options.overrides} | row

    def is_wrong(self, row: Row) -> bool:
        return row["job"] in _DRAFTED and "accepted_drafts" not in row  # the engines verified no draft

    def order(self, rows: Sequence[Row]) -> Sequence[Row]:
        return sorted(rows, key=lambda row: (row["model"], list(JOBS).index(row["job"])))

    def line(self, row: Row) -> Row:
        own = {"model": "tiny_glm4_moe"} if JOBS[row["job"]][0] == "train" else {}
        return {name.replace("_", " "): (row | own).get(name) for name in _COLUMNS}

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "At once: runs that shared the GPU; their seconds are no speeds of single runs. Held: the trainer's memory "
            "while the engine samples, without activations. Peak: its largest allocation, which depends on the sampled "
            "tokens. Seconds, bytes and sampled tokens/s: medians after step 2. Pause: the part of a publication in "
            "which the engine waits. First and last: means of 5 steps, or single evaluations. `model`: "
            "SmolLM2-135M-Instruct, widened by `tools/real_model.py`."
        )


def main(argv: Sequence[str] | None = None) -> int:
    options = runner.parse(benchmark := Jobs(), argv)
    for command in commands(options).values() if options.plan else ():
        cli.parse(command[3:], {known.name: known for known in COMMANDS})
        print(shlex.join(command))
    return 0 if options.plan else runner.main(benchmark, argv)


if __name__ == "__main__":
    sys.exit(main())
