"""Precision study: one warm start, then the same RL run in several precisions and seeds.

    python -m megatron_fp8rl study tiny_qwen3_moe --seeds 1 2 3 [overrides]

Arms are rollout precision / trainer precision, each with and without the train/rollout mismatch correction. All arms
start from the same weights and see the same prompts for a given seed. Each run is one process of the ``rl`` command;
finished runs are not repeated, so an interrupted study continues where it stopped.

Out: ``study.md`` (table), ``study.png`` (plot) and one run folder per arm and seed, under ``runs/<name>_study``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.report.compare import compare_runs

WARM_START_DIR = "warm_start"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the table: precisions and correction."""

    rollout: str
    trainer: str
    corrected: bool

    @property
    def name(self) -> str:
        kinds = {"bf16": "bf16", "blockwise": "fp8"}
        return f"{kinds[self.rollout]}/{kinds[self.trainer]} {'corrected' if self.corrected else 'uncorrected'}"

    def overrides(self, correction: str) -> list[str]:
        """Command-line overrides that turn the base run into this arm."""
        return [
            "--precision.rollout", self.rollout,
            "--precision.trainer", self.trainer,
            "--algo.correction", correction if self.corrected else "off",
            *([] if self.corrected else ["--algo.veto-below", "None"]),
        ]  # fmt: skip


ARMS = tuple(
    Arm(rollout=rollout, trainer=trainer, corrected=corrected)
    for rollout, trainer in (("bf16", "bf16"), ("blockwise", "bf16"), ("blockwise", "blockwise"))
    for corrected in (True, False)
)


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One process of the study."""

    arm: Arm
    seed: int
    run_dir: Path
    command: list[str]

    @property
    def is_done(self) -> bool:
        return (self.run_dir / "done.json").exists()


def plan_runs(
    cfg: RunConfig, config_name: str, overrides: Sequence[str], seeds: Sequence[int], study_dir: Path
) -> Iterator[StudyRun]:
    """Pure: the runs of a study, seeds in the outer loop, so that an aborted study still compares all arms."""
    if cfg.algo.correction == "off":
        raise ValueError("algo.correction = 'off': the study compares with and without it; set the correction to study")
    for seed in seeds:
        for arm in ARMS:
            run_dir = study_dir / f"{arm.name.replace('/', '-').replace(' ', '_')}_seed{seed}"
            command = [
                sys.executable, "-m", "megatron_fp8rl", "rl", config_name, *overrides,
                "--model.hf-path", str(study_dir / WARM_START_DIR / "hf"),
                "--data.sft-steps", "0",
                "--seed", str(seed),
                "--output-dir", str(run_dir),
                *arm.overrides(cfg.algo.correction),
            ]  # fmt: skip
            yield StudyRun(arm=arm, seed=seed, run_dir=run_dir, command=command)


def run(cfg: RunConfig, config_name: str, overrides: Sequence[str], seeds: Sequence[int]) -> Path:
    """Run the missing runs of the study and write its table and plot. Returns the study's folder.

    Raises RuntimeError, naming run and log, if a run fails.
    """
    study_dir = Path(cfg.run_dir.rstrip("/") + "_study")
    study_dir.mkdir(parents=True, exist_ok=True)
    if cfg.model.hf_path is None and not (study_dir / WARM_START_DIR / "hf").exists():
        sft = [sys.executable, "-m", "megatron_fp8rl", "sft", config_name, *overrides, "--output-dir", str(study_dir)]
        _run_logged(sft, study_dir / "warm_start.log", "warm start")
    runs = list(plan_runs(cfg, config_name, overrides, seeds, study_dir))
    for number, one in enumerate(runs, 1):
        if one.is_done:
            continue
        print(f"[{number}/{len(runs)}] {one.arm.name}, seed {one.seed}", flush=True)
        _run_logged(one.command, study_dir / f"{one.run_dir.name}.log", f"{one.arm.name}, seed {one.seed}")
    compare_runs([(one.arm.name, one.seed, one.run_dir) for one in runs], study_dir)
    return study_dir


def _run_logged(command: list[str], log: Path, name: str) -> None:
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    if status:
        raise RuntimeError(f"{name} failed with status {status}; its output is in {log}")
