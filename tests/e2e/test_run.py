"""Whole runs through the command line, as a user starts them: the demo in short form, a resume, a failure."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_weights import RECORDS_EXPERTS

from megatron_fp8rl.observe.recording import read_steps
from tests.tolerances import RESUMED_METRIC

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
BRIEF = {
    "--observe.display": "plain",
    "--observe.eval_prompts": "8",
    "--sampling.prompts_per_step": "16",
    "--warm_start.steps": "20",
    "--num_steps": "4",
    "--checkpoint.every_steps": "2",
    "--checkpoint.keep": "3",
}


def _start(command: str, config: str, run_dir: Path, **overrides: str | tuple[str, ...]) -> subprocess.Popen[str]:
    options = (
        BRIEF | {"--output_dir": str(run_dir)} | {f"--{key.replace('__', '.')}": v for key, v in overrides.items()}
    )
    args = [word for name, value in options.items() for word in (name, *([value] if isinstance(value, str) else value))]
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_fp8rl", command, config, *args],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"the run did not end within {DEADLINE_S} s:\n{output[-3000:]}")
    return process.returncode, output


def _lines(run_dir: Path, name: str = "metrics.jsonl") -> dict[int, dict]:
    return {line["step"]: line for line in map(json.loads, (run_dir / name).read_text().splitlines())}


def _sampled(run_dir: Path, step: int) -> list[tuple[int, ...]]:
    groups = dict(read_steps(run_dir / "rollouts"))[step]
    return [rollout.completions[0].token_ids for group in groups for rollout in group.rollouts]


def tiny_num_parameters() -> int:
    """Embedding and head, final norm, and two layers of attention, norms, router and eight experts."""
    attention = 128 * (4 + 2 + 2) * 128 + 4 * 128 * 128
    experts = 8 * 3 * 128 * 256
    return 2 * 128 * 128 + 128 + 2 * (attention + 2 * 128 + 2 * 128 + 8 * 128 + experts)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "brief run"
    status, output = _finish(_start("train", "tiny_qwen3_moe", run_dir))
    assert status == 0, output[-3000:]
    return run_dir


@pytest.mark.core
def test_a_run_learns_in_fp8_and_proves_its_weights(finished_run: Path):
    steps = _lines(finished_run)
    assert list(steps) == [0, 1, 2, 3, 4]
    for step, line in steps.items():
        assert line["publish/version/max"] == step
        assert line["publish/num_fp8_tensors/sum"] == 2 * (4 + 8 * 3)  # layers x (q k v o + experts x gate up down)
        if step:
            assert line["rollout/num_completions/sum"] == 16 * 8
            assert line["mismatch/abs_logprob_diff/max"] == 0
            assert line["train/grad_norm/max"] > 0
            assert line["loss/update_ratio/max"] == 1  # the only update of its batch
    assert json.loads((finished_run / "config.json").read_text())["precision"]["exact"] is True
    assert json.loads((finished_run / "versions.json").read_text())["precision.exact"].startswith("on: ")
    checksums = [line["checksum"] for line in _lines(finished_run, "details.jsonl").values()]
    assert len(set(checksums)) == 5, "every update changes the published weights"


@pytest.mark.parametrize(
    "layout",
    [
        {
            "config": "tests.helpers.stretched:run",
            "parallel__world_size": "2",
            "parallel__expert": "2",
            "sampling__temperature": "0.7",
            "engine__record_routed_experts": str(RECORDS_EXPERTS),
        },
        {"config": "tiny_qwen3_next"},
        {"config": "tiny_qwen3_5_moe", "parallel__world_size": "2", "parallel__tensor": "2", "parallel__expert": "2"},
        {
            "parallel__world_size": "2",
            "parallel__pipeline": "2",
            "engine__data": "2",
            "engine__expert": "2",
            "precision__bf16_last_layers": "1",
        },
        pytest.param(
            {
                "parallel__world_size": "2",
                "parallel__context": "2",
                "sampling__min_p": "0.05",
                "sampling__temperature": "0.8",
            },
            marks=pytest.mark.slow,
        ),
        {
            "precision__trainer": "mxfp8",
            "precision__rollout": "mxfp8",
            "parallel__world_size": "2",
            "parallel__tensor": "2",
            "parallel__expert": "2",
            "engine__tensor": "2",
            "engine__expert": "2",
            "sampling__top_k": "7",
            "sampling__top_p": "0.95",
        },
    ],
    ids=[
        "YaRN, experts on two ranks",
        "gated delta nets",
        "delta nets in parts",
        "two stages, engine of two ranks",
        "kept entries",
        "mxfp8, sums of two ranks",
    ],
)
def test_an_exact_run_measures_every_token_and_finds_none_that_differs(tmp_path: Path, layout: dict):
    """Without a pass for old log-probabilities. The second update of a step is off-policy and is not measured."""
    more = {"precision__exact": "True", "algo__updates_per_step": "2", "warm_start__steps": "5", "num_steps": "2"}
    more |= layout
    status, output = _finish(_start("train", more.pop("config", "tiny_qwen3_moe"), tmp_path, **more))
    assert status == 0, output[-3000:]
    assert json.loads((tmp_path / "config.json").read_text())["weight_sync"]["verify_every"] == 1
    for step, line in _lines(tmp_path).items():
        assert line["publish/version/max"] == step and line["publish/num_fp8_tensors/sum"] > 0
        if step:
            assert line["mismatch/abs_logprob_diff/max"] == 0 and line["mismatch/ratio/max"] == 1
            assert "time/mismatch/s" not in line, "mismatch is measured in the update, not in a pass before it"
            assert line["train/grad_norm/max"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek", {"parallel__world_size": "2", "parallel__expert": "2"}),
        ("glm_lite", {"parallel__world_size": "2", "parallel__pipeline": "2", "engine__kv_cache_dtype": "fp8"}),
    ],
)
def test_an_exact_run_with_latent_attention(tmp_path: Path, family: str, layout: dict):
    more = {"algo__updates_per_step": "2", "warm_start__steps": "5", "num_steps": "2"}
    status, output = _finish(_start("train", f"tests.helpers.latent_runs:{family}", tmp_path, **more, **layout))
    assert status == 0, output[-3000:]
    assert json.loads((tmp_path / "config.json").read_text())["precision"]["exact"] is True
    for step, line in _lines(tmp_path).items():
        if step:
            assert line["mismatch/abs_logprob_diff/max"] == 0 and line["mismatch/ratio/max"] == 1
            assert line["train/grad_norm/max"] > 0


@pytest.mark.slow
def test_an_exact_run_that_samples_ahead_trains_tokens_of_older_weights(tmp_path: Path):
    """The first step compares all tokens. Later steps also train tokens of older weights, which differ. How many
    depends on the machine. Steps with both kinds are tested in ``unit/algo/test_mismatch.py``."""
    more = {"sampling__max_staleness": "2", "sampling__window_groups": "24", "warm_start__steps": "5", "num_steps": "3"}
    more |= {"precision__exact": "True", "optim__lr": "0.001", "engine__max_num_sequences": "16"}  # engines lag behind
    status, output = _finish(_start("train", "tiny_qwen3_moe", tmp_path, **more))
    assert status == 0, output[-3000:]
    lines = [line for step, line in _lines(tmp_path).items() if step]
    assert lines[0]["mismatch/not_compared/mean"] == lines[0]["mismatch/abs_logprob_diff/max"] == 0
    for line in lines:
        assert (line["mismatch/not_compared/mean"] > 0) == (line["mismatch/abs_logprob_diff/max"] > 0)
    assert any(line["mismatch/not_compared/mean"] > 0 for line in lines)


def test_an_exact_run_that_is_not_names_the_operation(tmp_path: Path):
    more = {"precision__exact": "True", "warm_start__steps": "5", "num_steps": "2"}
    status, output = _finish(_start("train", "tests.helpers.wrong_norm:run", tmp_path, **more))
    assert status != 0
    message = " ".join(output.split())
    assert "InexactError: precision.exact: trainer and engine disagree" in message, output[-3000:]
    assert "differs first at layer.0.input_norm" in message and "operation of the trainer differs, too" in message
    assert not (tmp_path / "explain_mismatch.safetensors").exists()


@pytest.mark.core
def test_a_run_leaves_a_report_and_a_checkpoint_that_transformers_loads(finished_run: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    page = (finished_run / "report.html").read_text()
    assert not re.search(r"""(?:src|href)=["']https?:""", page), "the report needs nothing from elsewhere"
    assert page.count("data:image/") >= 8
    model = AutoModelForCausalLM.from_pretrained(finished_run / "hf")
    assert model.num_parameters() == tiny_num_parameters()
    assert AutoTokenizer.from_pretrained(finished_run / "hf").decode([4]) != ""
    assert json.loads((finished_run / "done.json").read_text())["step"] == 4


@pytest.mark.core
def test_a_run_records_the_kernels_of_both_ends(finished_run: Path):
    record = json.loads((finished_run / "versions.json").read_text())
    assert record["trainer kernel, FP8 linears"] == "PyTorch (emulated)"
    assert record["engine kernel, linears"] == "EmulatedFp8LinearMethod"
    assert record["engine kernel, experts"] == "EmulatedFp8MoEMethod (CPU)"
    assert record["engine kernel, attention"] == "CPU_ATTN"


@pytest.mark.core
def test_a_run_ends_its_engine_in_order(finished_run: Path):
    log = (finished_run / "logs" / "rollout-0.log").read_text()
    assert "Application shutdown complete" in log and "Traceback" not in log, log[-3000:]


@pytest.mark.long
def test_a_run_that_resumes_in_another_layout_samples_and_learns_the_same(finished_run: Path, tmp_path: Path):
    resumed = tmp_path / "resumed"
    shutil.copytree(finished_run, resumed)
    for checkpoint in (resumed / "checkpoints").iterdir():
        if checkpoint.name != "step_00000002":
            shutil.rmtree(checkpoint)
    status, output = _finish(
        _start("train", "tiny_qwen3_moe", resumed, parallel__world_size="2", parallel__expert="2", num_steps="3")
    )
    assert status == 0, output[-3000:]
    before, after = _lines(finished_run), _lines(resumed)
    assert list(after) == [0, 1, 2, 3]
    assert after[2] == before[2], "the line of the step before the resume is kept"
    # The engines hold the same bytes and get the same prompts and seeds, so they sample the same completions.
    sampled = [_sampled(run_dir, 3) for run_dir in (finished_run, resumed)]
    assert sampled[0] == sampled[1]
    for key in ("train/loss/mean", "train/grad_norm/max", "mismatch/abs_logprob_diff/mean", "loss/entropy/mean"):
        assert after[3][key] == pytest.approx(before[3][key], **RESUMED_METRIC), key


@pytest.mark.long
def test_a_killed_engine_ends_the_run_with_its_name_and_a_report(finished_run: Path, tmp_path: Path):
    run_dir = tmp_path / "killed"
    process = _start(
        "rl",
        "tiny_qwen3_moe",
        run_dir,
        model__hf_path=str(finished_run / "warm_start" / "hf"),
        num_steps="200",
        checkpoint__every_steps="1",
        engine__max_replica_restarts="0",
    )
    deadline = time.monotonic() + DEADLINE_S
    while not (run_dir / "metrics.jsonl").exists() or len(_lines(run_dir)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it began"
        time.sleep(0.2)
    server = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "vllm_plugin.server"], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(server[0]), signal.SIGKILL)
    status, _output = _finish(process)
    assert status != 0
    failure = json.loads((run_dir / "failure.json").read_text())
    assert "rollout-0" in failure["message"], failure["message"]
    assert (run_dir / "report.html").exists() and not (run_dir / "done.json").exists()
    assert any((run_dir / "checkpoints").glob("step_*/state.json"))


@pytest.mark.long
def test_engines_and_trainer_in_turns_change_nothing(finished_run: Path, tmp_path: Path):
    """Every call of a sleeping engine in a real run: on a CPU memory stays, but vLLM's states are those of a GPU."""
    run_dir = tmp_path / "turns"
    turns = {"engine__sleep_level": "2", "optim__offload": ("params", "gradients", "optimizer")}
    process = _start("rl", "tiny_qwen3_moe", run_dir, model__hf_path=str(finished_run / "warm_start" / "hf"), **turns)
    status, output = _finish(process)
    assert status == 0, output[-3000:]
    before, after = _lines(finished_run), _lines(run_dir)
    assert list(after) == list(before)
    for step in (1, 2, 3, 4):
        assert after[step]["time/colocated/s"] > 0 and "time/colocated/s" not in before[step]
        sampled = [_sampled(folder, step) for folder in (finished_run, run_dir)]
        assert sampled[0] == sampled[1]
        for key in ("train/loss/mean", "train/grad_norm/max", "mismatch/abs_logprob_diff/mean"):
            assert after[step][key] == before[step][key], key
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    assert log.count("fall asleep") == 4 + 1  # before each update, and before the policy is written
    assert log.count("wake up tags ['weights']") == log.count("wake up tags ['kv_cache']") == 4
