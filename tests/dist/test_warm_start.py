"""The warm start: when it saves, and that one which was killed ends as one in one go."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_fp8rl import sft_loop
from megatron_fp8rl.config import CheckpointConfig, ObserveConfig, ParallelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.data.model_dir import model_dir, write_model_dir
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import refusals
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from model_configs import grpo_qwen3_30b_a3b, tiny_qwen3_moe
from tests.helpers.dist import RankError, run_ranks

KILLED_IN = 3  # the step that a killed warm start does not finish


def _config(folder: Path, **parallel: int) -> RunConfig:
    tiny = tiny_qwen3_moe()
    return replace(
        tiny,
        parallel=ParallelConfig(**parallel),
        warm_start=replace(tiny.warm_start, steps=4, batch_size=16),
        observe=ObserveConfig(display="none", eval_prompts=8),
        checkpoint=CheckpointConfig(keep=1),
        output_dir=str(folder),
    )


def _warm_start(cfg: RunConfig, dies: bool) -> str:
    """On a rank: the folder of the result, unless the last rank dies, in a run that saves after every step."""
    parallel, update, last = Parallel.init(cfg.parallel, deadline_s=60), Policy.update, cfg.parallel.world_size - 1
    if parallel.rank == 0:
        write_model_dir(cfg)
    parallel.barrier("model folder")

    def update_or_die(policy, *args):
        if policy.step + 1 == KILLED_IN and parallel.rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(policy, *args)

    if dies:
        Policy.update = update_or_die
        sft_loop.SAVE_EVERY_S, sft_loop.SAVE_SHARE = 0.0, float("inf")
    return str(sft_loop.run(cfg, parallel, model_dir(cfg)))


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(kernels={"linears": "deep_gemm", "experts": "deep_gemm"}),
        PrecisionConfig(params="fp8", kernels={"linears": "te", "experts": "te"}),
        PrecisionConfig(trainer="tensorwise", gradients="e5m2"),
        PrecisionConfig(exact=True),
    ],
)
def test_a_run_that_can_work_has_a_warm_start_that_can(precision):
    """The warm start is in BF16, so FP8 kernels of the run do not apply to it."""
    hopper = Hardware("hopper")
    cfg = replace(grpo_qwen3_30b_a3b(), precision=precision)
    assert not refusals(cfg, hopper, "trainer")
    assert not refusals(sft_loop._supervised(cfg), hopper, "trainer")


def _files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_warm_start_that_was_killed_ends_as_one_in_one_go(tmp_path):
    whole, cut = (_config(tmp_path / name, world_size=2, expert=2) for name in ("whole", "cut"))
    expected = run_ranks(2, _warm_start, whole, False)[0]
    with pytest.raises(RankError, match="died without a word"):
        run_ranks(2, _warm_start, cut, True)
    checkpoints = tmp_path / "cut" / "warm_start" / "checkpoints"
    (kept,) = checkpoints.glob("step_*")
    saved = json.loads((kept / "state.json").read_text())["step"]
    assert saved == KILLED_IN - 1
    actual = run_ranks(2, _warm_start, cut, False)[0]
    assert _files(actual) == _files(expected)
    assert not checkpoints.exists()
    lines = [(Path(folder).parent / "metrics.jsonl").read_text().splitlines() for folder in (expected, actual)]
    losses = [{row["step"]: row["train/loss/mean"] for row in map(json.loads, part)} for part in lines]
    assert losses[0] == losses[1] and list(losses[0]) == list(range(1, 5))


def test_saves_are_a_minute_apart_and_further_where_they_are_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    clock, took, saved = [0.0], [1.0], []
    monkeypatch.setattr(sft_loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def save(folder, step, policy, extra):
        saved.append(step)
        clock[0] += took[0]

    monkeypatch.setattr(sft_loop.checkpoint, "save", save)
    policy = SimpleNamespace(parallel=SimpleNamespace(broadcast_object=lambda value: value))
    checkpoints = sft_loop._Checkpoints(tmp_path, policy)
    for step in range(1, 301):  # a step of one second
        took[0] = 1.0 if step < 150 else 10.0
        clock[0] += 1.0
        checkpoints.save_if_due(step)
    assert saved == [60, 120, 180], "after 10 s of saving the next one is 200 s away"
