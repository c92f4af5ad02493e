"""Precision study: one warm start, then the same RL run in several precisions and seeds.

    python -m megatron_fp8rl study tiny_qwen3_moe --seeds 1 2 3 [--arms bf16/bf16 fp8/fp8 exact] [overrides]

Arms are rollout precision / trainer precision, each with and without the train/rollout mismatch correction, and the exact
mode, which has nothing to correct. All arms start from the same weights and see the same prompts for a given seed. Each
run is one process of the ``rl`` command; finished runs are not repeated, so an interrupted study continues where it
stopped.

Out: ``study.md`` (table), ``study.png`` (plot) and one run folder per arm and seed, under ``runs/<name>_study``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fp8rl import cli
from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.preflight import rules

WARM_START_DIR = "warm_start"
PRECISIONS = {
    "bf16/bf16": ("--precision.rollout", "bf16", "--precision.trainer", "bf16"),
    "fp8/bf16": ("--precision.rollout", "blockwise", "--precision.trainer", "bf16"),
    "fp8/fp8": ("--precision.rollout", "blockwise", "--precision.trainer", "blockwise"),
    "exact": ("--precision.rollout", "blockwise", "--precision.trainer", "blockwise", "--precision.exact", "True"),
}
_UNCORRECTED = ("--algo.correction", "off", "--algo.veto-below", "None")


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of the study command, in addition to the configuration's fields."""

    seeds: tuple[int, ...] = (1, 2, 3)  # one run of every arm per seed
    arms: tuple[str, ...] = ("bf16/bf16", "fp8/bf16", "fp8/fp8")  # rollout/training; exact: the same bits at both ends
    corrected_only: bool = False  # leave out the runs without correction of the mismatch
    at_once: int = 1  # runs side by side, on the same GPUs; small models leave them idle, but seconds then say little

    def violations(self) -> list[Violation]:
        """What is wrong with these options."""
        found = [
            Violation("--arms", arm, "is no pair of precisions", f"Choose from {', '.join(PRECISIONS)}")
            for arm in self.arms
            if arm not in PRECISIONS
        ]
        for name, values in (("seeds", self.seeds), ("arms", self.arms)):
            if not values or len(set(values)) < len(values):
                text = " ".join(map(str, values))
                found.append(Violation(f"--{name}", text, "are no runs to compare", "Give at least one, and each once"))
        if self.at_once < 1:
            found.append(Violation("--at_once", str(self.at_once), "runs nothing", "Set it to 1 or more"))
        return found


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One process of the study."""

    arm: str
    seed: int
    run_dir: Path
    overrides: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        return (self.run_dir / "done.json").exists()


def folder_of(cfg: RunConfig) -> Path:
    """Where the study of a configuration lies."""
    return Path(cfg.run_dir.rstrip("/") + "_study")


def _warm_start(study_dir: Path) -> Path:
    return study_dir / WARM_START_DIR / "warm_start" / "hf"


def plan_runs(cfg: RunConfig, overrides: Sequence[str], options: StudyOptions) -> list[StudyRun]:
    """The runs of a study, seeds in the outer loop, so that an aborted study still compares all arms.

    Raises ConfigError for options that make no study and for an arm that its configuration refuses.
    """
    found = options.violations()
    if cfg.algo.correction == "off" and not options.corrected_only:
        remedy = "Name the one to study, or leave out the runs without by --corrected_only"
        found.append(Violation("--algo.correction", "off", "leaves nothing to compare with", remedy))
    if found:
        raise ConfigError(found)
    arms: dict[str, tuple[str, ...]] = {}
    for name in options.arms:
        if name == "exact":
            arms[name] = PRECISIONS[name]
            continue
        arms[f"{name} corrected"] = PRECISIONS[name]
        if not options.corrected_only:
            arms[f"{name} uncorrected"] = (*PRECISIONS[name], *_UNCORRECTED)
    for arm, words in arms.items():
        if violations := rules.check(cli.parse_overrides(cfg, words)):
            raise ConfigError([replace(one, problem=f"{one.problem}, in arm {arm}") for one in violations])
    study_dir = folder_of(cfg)
    start = () if cfg.model.hf_path else ("--model.hf-path", str(_warm_start(study_dir)))
    runs = []
    for seed in options.seeds:
        for arm, words in arms.items():
            run_dir = study_dir / f"{arm.replace('/', '-').replace(' ', '_')}_seed{seed}"
            own = ("--warm_start.steps", "0", "--seed", str(seed), "--output-dir", str(run_dir), *words)
            runs.append(StudyRun(arm=arm, seed=seed, run_dir=run_dir, overrides=(*overrides, *start, *own)))
    return runs


def run(cfg: RunConfig, config_name: str, overrides: Sequence[str], options: StudyOptions) -> Path:
    """Run the missing runs of the study and write its table and plot. Returns the study's folder.

    Raises RuntimeError, naming run and log, if a run fails, and what :func:`plan_runs` raises.
    """
    from megatron_fp8rl.report.compare import compare_runs  # draws: half a second that other commands should not pay

    study_dir, runs = folder_of(cfg), plan_runs(cfg, overrides, options)
    study_dir.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "megatron_fp8rl"]
    if cfg.model.hf_path is None and not _warm_start(study_dir).exists():
        print("warm start", flush=True)
        sft = [*program, "sft", config_name, *overrides, "--output-dir", str(study_dir / WARM_START_DIR)]
        _run_logged(sft, study_dir / "warm_start.log", "warm start")

    def run_one(number: int, one: StudyRun) -> None:
        name = f"{one.arm}, seed {one.seed}"
        print(f"[{number}/{len(runs)}] {name}", flush=True)
        _run_logged([*program, "rl", config_name, *one.overrides], study_dir / f"{one.run_dir.name}.log", name)

    with ThreadPoolExecutor(options.at_once) as pool:
        running = [pool.submit(run_one, number, one) for number, one in enumerate(runs, 1) if not one.is_done]
        try:
            for each in running:
                each.result()
        finally:  # one that failed ends those that wait, not those that run
            pool.shutdown(cancel_futures=True)
    compare_runs([(one.arm, one.seed, one.run_dir) for one in runs], study_dir)
    return study_dir


def _run_logged(command: list[str], log: Path, name: str) -> None:
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    if status:
        raise RuntimeError(f"{name} failed with status {status}; its output is in {log}")
