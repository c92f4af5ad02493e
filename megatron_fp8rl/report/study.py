"""Precision study: one warm start, then the same RL run in several precisions and seeds.

    python -m megatron_fp8rl study tiny_qwen3_moe --seeds 1 2 3 [--arms bf16/bf16 fp8/fp8 exact] [overrides]

Arms are rollout precision / trainer precision, each with and without the correction of the mismatch, and exact mode.
All start from the same weights and see the same prompts for the same seed. Each run is a process of the ``rl`` command.
With ``--evaluate N``, one BF16 engine evaluates all final weights on the same N held-out problems. Arms are compared
with the first arm, problem by problem. A study can be continued: finished runs are not repeated. Out: ``study.md``
(table), ``study.png`` (plot) and one run folder per arm and seed, under ``runs/<name>_study``.
"""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fp8rl import cli
from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.preflight import rules

WARM_START_DIR, EVALUATION_DIR = "warm_start", "evaluation"
PRECISIONS = {
    name: ("--precision.rollout", rollout, "--precision.trainer", trainer, "--precision.exact", str(name == "exact"))
    for name, rollout, trainer in (
        ("bf16/bf16", "bf16", "bf16"),
        ("fp8/bf16", "blockwise", "bf16"),
        ("fp8/fp8", "blockwise", "blockwise"),
        ("exact", "blockwise", "blockwise"),
        ("mxfp8/mxfp8", "mxfp8", "mxfp8"),
    )
}
PRECISIONS |= {f"{arm}+kv": (*PRECISIONS[arm], "--engine.kv_cache_dtype", "fp8") for arm in ("fp8/fp8", "exact")}
_EVALUATED = (*PRECISIONS["bf16/bf16"], "--engine.kv_cache_dtype", "auto")
_NO_QUANTILE = ("--algo.correction-quantile", "None")
_UNCORRECTED = ("--algo.correction", "off", "--algo.veto-below", "None", *_NO_QUANTILE)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of the study command, in addition to the configuration's fields."""

    seeds: tuple[int, ...] = (1, 2, 3)  # one run of every arm per seed
    # Rollout/training precision, or exact; "+kv": with an FP8 KV cache. Others are compared with the first.
    arms: tuple[str, ...] = ("bf16/bf16", "fp8/bf16", "fp8/fp8")
    corrected_only: bool = False  # leave out the runs without correction of the mismatch
    at_once: int = 1  # runs in parallel on the same GPUs; their times say little
    evaluate: int = 0  # held-out problems for the final weights of all runs; 0: none
    evaluate_completions: int = 4  # completions sampled per problem

    def violations(self) -> list[Violation]:
        errors = [
            Violation("--arms", arm, "is not a pair of precisions", f"Choose from {', '.join(PRECISIONS)}")
            for arm in self.arms
            if arm not in PRECISIONS
        ]
        for name, values in (("seeds", self.seeds), ("arms", self.arms)):
            if not values or len(set(values)) < len(values):
                text = " ".join(map(str, values))
                errors.append(Violation(f"--{name}", text, "is empty or has duplicates", "Give each value once"))
        for name, least in (("at_once", 1), ("evaluate", 0), ("evaluate_completions", 1)):
            if (number := getattr(self, name)) < least:
                errors.append(Violation(f"--{name}", str(number), f"is below {least}", f"Set it to {least} or more"))
        return errors


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    arm: str
    seed: int
    run_dir: Path
    overrides: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        return (self.run_dir / "done.json").exists()


def study_folder(cfg: RunConfig) -> Path:
    return Path(cfg.run_dir.rstrip("/") + "_study")


def _warm_start(study_dir: Path) -> Path:
    return study_dir / WARM_START_DIR / "warm_start" / "hf"


def plan_runs(cfg: RunConfig, overrides: Sequence[str], options: StudyOptions) -> list[StudyRun]:
    """The runs of a study, seeds in the outer loop, so that an aborted study still compares all arms. Raises
    ConfigError for wrong options or an invalid arm."""
    errors = options.violations()
    if cfg.algo.correction == "off" and not options.corrected_only:
        remedy = "Set --algo.correction to the correction to study, or add --corrected_only"
        errors.append(Violation("--algo.correction", "off", "both kinds of runs would be uncorrected", remedy))
    if options.evaluate and not cfg.checkpoint.export_hf:
        problem = "a study with --evaluate reads the final weights of its runs"
        errors.append(Violation("--checkpoint.export_hf", "False", problem, "Set True"))
    if errors:
        raise ConfigError(errors)
    arms: dict[str, tuple[str, ...]] = {}
    for name in options.arms:
        if name.startswith("exact"):
            arms[name] = (*PRECISIONS[name], *_NO_QUANTILE)
            continue
        arms[f"{name} corrected"] = PRECISIONS[name]
        if not options.corrected_only:
            arms[f"{name} uncorrected"] = (*PRECISIONS[name], *_UNCORRECTED)
    for arm, args in arms.items():
        if violations := rules.check(cli.parse_overrides(cfg, args)):
            raise ConfigError([replace(error, problem=f"{error.problem}, in arm {arm}") for error in violations])
    study_dir = study_folder(cfg)
    start = () if cfg.model.hf_path else ("--model.hf-path", str(_warm_start(study_dir)))
    runs = []
    for seed in options.seeds:
        for arm, args in arms.items():
            run_dir = study_dir / f"{arm.replace('/', '-').replace(' ', '_')}_seed{seed}"
            more = ("--warm_start.steps", "0", "--seed", str(seed), "--output-dir", str(run_dir), *args)
            runs.append(StudyRun(arm=arm, seed=seed, run_dir=run_dir, overrides=(*overrides, *start, *more)))
    return runs


def run(cfg: RunConfig, config_name: str, overrides: Sequence[str], options: StudyOptions) -> Path:
    """Run the missing runs, write table and plot, and return the study's folder. Raises ConfigError as
    :func:`plan_runs`, and RuntimeError, with run and log, if a run fails."""
    from megatron_fp8rl.report.compare import compare_runs  # imports matplotlib: 0.5 s

    study_dir, runs = study_folder(cfg), plan_runs(cfg, overrides, options)
    study_dir.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "megatron_fp8rl"]
    if cfg.model.hf_path is None and not _warm_start(study_dir).exists():
        print("warm start", flush=True)
        sft = [*program, "sft", config_name, *overrides, "--output-dir", str(study_dir / WARM_START_DIR)]
        _run_logged(sft, study_dir / "warm_start.log", "warm start")

    def run_arm(number: int, run: StudyRun) -> None:
        name = f"{run.arm}, seed {run.seed}"
        print(f"[{number}/{len(runs)}] {name}", flush=True)
        _run_logged([*program, "rl", config_name, *run.overrides], study_dir / f"{run.run_dir.name}.log", name)

    with ThreadPoolExecutor(options.at_once) as pool:
        pending = [pool.submit(run_arm, number, run) for number, run in enumerate(runs, 1) if not run.is_done]
        try:
            for future in pending:
                future.result()
        finally:  # after a failure, waiting runs are cancelled and running ones end
            pool.shutdown(cancel_futures=True)
    if options.evaluate:
        _evaluate(runs, study_dir, [*program, "eval", config_name, *overrides], options)
    home = study_dir / EVALUATION_DIR if options.evaluate else None
    compare_runs([(run.arm, run.seed, run.run_dir) for run in runs], study_dir, home)
    return study_dir


def _evaluate(runs: Sequence[StudyRun], study_dir: Path, command: list[str], options: StudyOptions) -> None:
    """Evaluate the final weights of all runs in BF16, unless an evaluation of this size is newer than each run."""
    from megatron_fp8rl.report.run_data import RunData  # imports numpy

    home, weights = study_dir / EVALUATION_DIR, [(run.run_dir / "hf").absolute() for run in runs]
    results = {Path(result["checkpoint"]): result for result in RunData(home).evaluations}
    num_completions = options.evaluate * options.evaluate_completions

    def is_evaluated(run: StudyRun, folder: Path) -> bool:
        trained_unix_s, result = (run.run_dir / "done.json").stat().st_mtime, results.get(folder)
        is_new = result is not None and result["finished_unix_s"] > trained_unix_s
        return is_new and result["overall"]["num_completions"] == num_completions

    if all(map(is_evaluated, runs, weights)):
        return
    print(f"evaluation of {len(runs)} runs on {options.evaluate} problems", flush=True)
    sizes = ("--num_problems", str(options.evaluate), "--num_completions", str(options.evaluate_completions))
    command += ["--checkpoint", *map(str, weights), *sizes]
    command += ["--warm_start.steps", "0", "--output_dir", str(home), *_EVALUATED]
    _run_logged(command, study_dir / f"{EVALUATION_DIR}.log", "the evaluation")


def _run_logged(command: list[str], log: Path, name: str) -> None:
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    if status:
        raise RuntimeError(f"{name} failed with status {status}; its output is in {log}")
