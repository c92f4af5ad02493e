"""Which runs a study makes of a configuration, and what it refuses before the first one."""

import json
import os
import time
from dataclasses import replace

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.config import ConfigError
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.report import study
from megatron_fp8rl.report.study import StudyOptions, plan_runs

TINY = cli.load_config("tiny_qwen3_moe")


def of(overrides: tuple[str, ...], name: str) -> str:
    return overrides[len(overrides) - 1 - overrides[::-1].index(name) + 1]


def test_arms_differ_in_precision_and_correction_and_share_start_and_seed(tmp_path):
    cfg = replace(TINY, output_dir=str(tmp_path / "{name}"))
    runs = plan_runs(cfg, ("--num_steps", "2"), StudyOptions(seeds=(4, 5), arms=("bf16/bf16", "exact")))
    arms = ["bf16/bf16 corrected", "bf16/bf16 uncorrected", "exact"]
    assert [(run.arm, run.seed) for run in runs] == [(arm, seed) for seed in (4, 5) for arm in arms]
    assert len({run.run_dir for run in runs}) == 6 and not any(run.is_done for run in runs)
    actual = [cli.parse_overrides(TINY, run.overrides) for run in runs[:3]]
    assert [cfg.precision.rollout for cfg in actual] == ["bf16", "bf16", "blockwise"]
    assert [cfg.precision.exact for cfg in actual] == [False, False, True]
    assert [cfg.algo.correction for cfg in actual] == [TINY.algo.correction, "off", TINY.algo.correction]
    for cfg in actual:
        assert cfg.model.hf_path == str(tmp_path / "tiny_qwen3_moe_study" / "warm_start" / "warm_start" / "hf")
        assert (cfg.seed, cfg.num_steps, cfg.warm_start.steps) == (4, 2, 0)


def test_a_model_of_ones_own_is_where_all_arms_start(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "check", lambda cfg: [])  # nothing looks at weights
    cfg = replace(TINY, model=replace(TINY.model, hf_path=str(tmp_path)))
    runs = plan_runs(cfg, ("--model.hf_path", str(tmp_path)), StudyOptions(seeds=(1,), corrected_only=True))
    assert [run.arm for run in runs] == ["bf16/bf16 corrected", "fp8/bf16 corrected", "fp8/fp8 corrected"]
    assert {of(run.overrides, "--model.hf_path") for run in runs} == {str(tmp_path)}
    assert not any("/warm_start" in word for run in runs for word in run.overrides)


@pytest.mark.parametrize(
    ("options", "changes", "output"),
    [
        ({"arms": ("fp16",)}, (), r"--arms = 'fp16': is not a pair .*bf16/bf16, fp8/bf16, fp8/fp8, exact"),
        ({"seeds": (1, 1)}, (), "--seeds = '1 1': is empty or has duplicates"),
        ({"at_once": 0}, (), "--at_once = '0': is below 1"),
        ({"evaluate": -1}, (), "--evaluate = '-1': is below 0"),
        ({"evaluate": 8}, ("--checkpoint.export_hf", "False"), "--checkpoint.export_hf = 'False': a study with --eval"),
        ({"arms": ()}, (), "--arms = '': is empty or has duplicates"),
        ({}, ("--algo.correction", "off"), "--algo.correction = 'off': both kinds of runs would be uncorrected"),
        ({"arms": ("exact",)}, ("--algo.router_replay", "rollout"), "in arm exact"),
    ],
)
def test_what_makes_no_study_is_refused_before_it_starts(options, changes, output):
    with pytest.raises(ConfigError, match=output):
        plan_runs(cli.parse_overrides(TINY, changes), changes, StudyOptions(**options))


def test_a_quantile_of_the_correction_is_for_corrected_runs_alone():
    cfg = cli.parse_overrides(TINY, quantile := ("--algo.correction_quantile", "0.01"))
    runs = plan_runs(cfg, quantile, StudyOptions(seeds=(1,), arms=("fp8/bf16", "exact")))
    actual = [cli.parse_overrides(TINY, run.overrides).algo.correction_quantile for run in runs]
    assert actual == [0.01, None, None]


def test_without_correction_its_own_runs_are_the_study():
    cfg = cli.parse_overrides(TINY, ("--algo.correction", "off", "--algo.veto_below", "None"))
    assert len(plan_runs(cfg, (), StudyOptions(seeds=(1,), corrected_only=True))) == len(StudyOptions().arms)


@pytest.mark.parametrize(
    ("change", "is_repeated"), [("nothing", False), ("trained again", True), ("more completions", True)]
)
def test_weights_are_evaluated_again_only_if_the_evaluation_is_older_or_of_another_size(
    change, is_repeated, tmp_path, monkeypatch
):
    commands, now = [], time.time()
    monkeypatch.setattr(study, "_run_logged", lambda command, log, what: commands.append(command))
    options = StudyOptions(seeds=(1, 2), arms=("exact",), evaluate=8, evaluate_completions=2)
    runs = plan_runs(replace(TINY, output_dir=str(tmp_path / "{name}")), (), options)
    for run in runs:
        run.run_dir.mkdir(parents=True)
        (run.run_dir / "done.json").touch()
        os.utime(
            run.run_dir / "done.json", (now, now + 60 if change == "trained again" and run.seed == 2 else now - 60)
        )
        result = {"checkpoint": str(run.run_dir / "hf"), "name": str(run.seed), "step": 2, "finished_unix_s": now}
        result["overall"] = {"num_completions": 32 if change == "more completions" else 16}
        folder = tmp_path / "evaluation" / "evaluations" / str(run.seed)
        folder.mkdir(parents=True)
        (folder / "eval.json").write_text(json.dumps(result))
    study._evaluate(runs, tmp_path, ["eval"], options)
    assert len(commands) == is_repeated
    if commands:
        (words,) = commands
        assert words[:4] == ["eval", "--checkpoint", *(str(run.run_dir / "hf") for run in runs)]
