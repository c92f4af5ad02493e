"""Evaluation without engines: which weights are meant, what is refused, what the numbers and the page say."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import evaluate
from megatron_fp8rl.config import ConfigError, RunConfig
from megatron_fp8rl.evaluate import EvalOptions
from megatron_fp8rl.observe.groups import evaluation_metrics
from megatron_fp8rl.observe.metrics import check_keys, meaning
from megatron_fp8rl.report.run_report import write_report
from megatron_fp8rl.types import Prompt, Rollout, RolloutGroup, single_turn
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.checkpoints import write_checkpoint, write_hf
from tests.helpers.samples import make_completion

ROOT = Path(__file__).parents[2]


def make_group(number: int, rewards: list[float], environment: str = "chain_sum") -> RolloutGroup:
    prompt = Prompt(
        prompt_id=f"{environment}/eval-{number}", environment=environment, token_ids=(1,), text=f"{number}?", answer="!"
    )
    completion = make_completion((5, 6))
    rollouts = [
        Rollout(prompt=prompt, index=i, branches=single_turn(prompt, completion), reward=reward, status="scored")
        for i, reward in enumerate(rewards)
    ]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return replace(tiny_qwen3_moe(), output_dir=str(tmp_path / "runs with spaces" / "{name}"))


def test_a_run_means_its_newest_whole_checkpoint_and_hf_without_one(cfg: RunConfig):
    run_dir = Path(cfg.run_dir)
    hf = write_hf(run_dir / "hf")
    assert evaluate.plan(cfg, EvalOptions(checkpoint=(str(run_dir),))).checkpoints == (hf,)
    write_checkpoint(run_dir / "checkpoints", 20)
    newest = write_checkpoint(run_dir / "checkpoints", 40)
    write_checkpoint(run_dir / "checkpoints", 60)
    (run_dir / "checkpoints" / "step_00000060" / ".metadata").write_bytes(b"1")  # torn
    for given in (run_dir, run_dir / "checkpoints", newest):
        actual = evaluate.plan(cfg, EvalOptions(checkpoint=(str(given),)))
        assert actual.checkpoints == (newest,) and actual.cfg.model.hf_path == str(newest)
        assert actual.folder_of(newest) == run_dir / "evaluations" / "step_00000040"
    assert evaluate.plan(cfg, EvalOptions(checkpoint=(str(hf),))).checkpoints == (hf,)


def test_names_tell_checkpoints_of_other_places_apart(tmp_path: Path):
    run_dir = tmp_path / "runs" / "a"
    assert evaluate.label(run_dir / "warm_start" / "hf", run_dir) == "warm_start_hf"
    assert evaluate.label(tmp_path / "runs" / "b" / "checkpoints" / "step_00000040", run_dir) == "b_step_00000040"
    assert evaluate.label(Path("/models"), run_dir) == "models"


def test_tokenizer_and_config_are_those_that_the_run_began_with(cfg: RunConfig, tmp_path: Path):
    run_dir = Path(cfg.run_dir)
    checkpoint = write_checkpoint(run_dir / "checkpoints", 1)
    assert evaluate.plan(cfg, EvalOptions(checkpoint=(str(checkpoint),))).model_dir is None
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    assert evaluate.plan(cfg, EvalOptions(checkpoint=(str(checkpoint),))).model_dir == run_dir / "model"
    base = write_hf(tmp_path / "base")
    began = write_checkpoint(tmp_path / "other" / "checkpoints", 1, model={"hf_path": str(base)})
    assert evaluate.plan(cfg, EvalOptions(checkpoint=(str(began),))).model_dir == base
    assert evaluate.plan(cfg, EvalOptions(checkpoint=(str(base),))).model_dir == base


def test_a_tokenizer_that_is_gone_or_another_is_not_guessed(cfg: RunConfig, tmp_path: Path):
    gone = write_checkpoint(tmp_path / "a" / "checkpoints", 1, model={"hf_path": str(tmp_path / "moved")})
    with pytest.raises(ConfigError, match=r"--model.hf_path = None: .*moved, which does not exist here"):
        evaluate.plan(cfg, EvalOptions(checkpoint=(str(gone),)))
    other = write_checkpoint(tmp_path / "b" / "checkpoints", 1, model={}, data={"tokenizer": "/tokenizers/x"})
    with pytest.raises(ConfigError, match="Pass --data.tokenizer /tokenizers/x"):
        evaluate.plan(cfg, EvalOptions(checkpoint=(str(other),)))


def test_every_mistake_is_named_at_once(cfg: RunConfig, tmp_path: Path):
    recorded = replace(cfg, sampling=replace(cfg.sampling, replay="rollouts"))
    with pytest.raises(ConfigError) as refusal:
        evaluate.plan(recorded, EvalOptions(checkpoint=(str(tmp_path),), num_problems=0, num_completions=4, ks=(1, 8)))
    named = {violation.field: violation.problem for violation in refusal.value.violations}
    assert list(named) == ["--checkpoint", "--num_problems", "--ks", "--sampling.replay"]
    assert "no weights" in named["--checkpoint"] and "pass@8 cannot be estimated from 4" in named["--ks"]
    torn = write_checkpoint(tmp_path, 3)
    (torn / ".metadata").unlink()
    with pytest.raises(ConfigError, match="complete checkpoint"):
        evaluate.plan(cfg, EvalOptions(checkpoint=(str(tmp_path),)))
    with pytest.raises(ConfigError, match="is empty"):
        evaluate.plan(cfg, EvalOptions())


@pytest.mark.slow
def test_the_command_line_refuses_before_anything_starts():
    args = ["eval", "tiny_qwen3_moe", "--checkpoint", "/no/such place", "--num_completions", "4", "--ks", "1", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fp8rl", *args], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "--checkpoint = '/no/such place': is not a folder" in done.stderr and "pass@8" in done.stderr


def test_the_summary_counts_by_environment_and_over_all():
    groups = [make_group(i, [1.0] * passed + [0.5] * (4 - passed)) for i, passed in enumerate((0, 1, 2, 4))]
    groups += [make_group(0, [0.0] * 4, "products"), make_group(1, [0.0] * 4, "products")]
    summary = evaluate.summarize(groups, (1, 2, 4))
    sums, products = summary["environments"]["chain_sum"], summary["environments"]["products"]
    assert (sums["num_problems"], sums["num_completions"], sums["num_passed"]) == (4, 16, 7)
    assert sums["accuracy"]["value"] == pytest.approx(7 / 16)
    # Of the 6 pairs: none, 3, 5 and all hold a completion that passed.
    assert sums["pass_at"]["2"]["value"] == pytest.approx((0 + 3 / 6 + 5 / 6 + 1) / 4)
    assert sums["pass_at"]["4"]["value"] == pytest.approx(3 / 4)
    assert products["accuracy"]["value"] == 0 and products["pass_at"]["4"]["high"] > 0.5, "two problems prove little"
    assert summary["overall"]["accuracy"]["value"] == pytest.approx(7 / 24)
    assert summary["overall"]["mean_reward"] == pytest.approx((7 + 9 * 0.5) / 24)
    lines = evaluate.table(summary).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["chain_sum", "products", "all"]
    assert lines[0].split() == ["problems", "completions", "accuracy", "pass@1", "pass@2", "pass@4"]
    assert "0.438 [" in lines[1]


def test_portions_keep_requests_within_their_deadline(cfg: RunConfig):
    small = replace(cfg, engine=replace(cfg.engine, max_num_sequences=8, num_replicas=2))
    prompts = [make_group(i, []).prompt for i in range(20)]
    sizes = [len(part) for part in evaluate._rounds(small.engine, prompts, 8)]
    assert sizes == [8, 8, 4], "4 x 8 x 2 sequences at a time, 8 of each problem"
    assert [len(part) for part in evaluate._rounds(small.engine, prompts[:2], 1000)] == [1, 1]


def test_metrics_during_training_are_listed_and_right():
    metrics = evaluation_metrics(
        [make_group(i, [1.0] * passed + [0.0] * (4 - passed)) for i, passed in enumerate((0, 1, 4))]
    )
    check_keys(metrics)
    assert metrics["eval/pass_rate/mean"] == pytest.approx(5 / 12)
    assert metrics["eval/pass_at_2/mean"] == pytest.approx(0.5)
    assert metrics["eval/pass_at_4/mean"] == pytest.approx(2 / 3)
    assert metrics["eval/pass_at_4_low/mean"] < 2 / 3 < metrics["eval/pass_at_4_high/mean"]
    assert metrics["eval/num_prompts/sum"] == 3 and metrics["eval/num_completions/sum"] == 12
    assert meaning("eval/pass_at_4_low/mean").startswith("Lower bound")
    single = evaluation_metrics([make_group(0, [1.0]), make_group(1, [0.0])])
    assert not [key for key in single if "pass_at" in key]
    assert evaluation_metrics([]) == {}


def test_the_report_shows_evaluations_also_where_nothing_was_trained(tmp_path: Path):
    groups = [make_group(i, [1.0, 0.0, 0.0, float(i % 2)]) for i in range(6)]
    for name, step in (("step_00000040", 40), ("step_00000005", 5), ("base <hf>", None)):
        folder = tmp_path / "evaluations" / name.replace("<", "").replace(">", "")
        folder.mkdir(parents=True)
        (folder / "eval.json").write_text(
            json.dumps({"name": name, "step": step, **evaluate.summarize(groups, (1, 4))})
        )
    page = write_report(tmp_path).read_text()
    assert "Evaluations of checkpoints" in page and "pass@k on held-out problems" in page
    assert page.index("step_00000005") < page.index("step_00000040") < page.index("base &lt;hf&gt;")
    assert "0.375 [" in page and "1.000 [" in page
