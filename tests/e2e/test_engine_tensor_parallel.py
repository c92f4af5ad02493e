"""An engine of two workers computes the same model, proves it, and is missed when it dies."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_weights import Reference, publish, random_weights, write_hf_dir

from megatron_fp8rl.rollout.errors import EngineDeadError
from megatron_fp8rl.rollout.fleet import Fleet
from tests.tolerances import ENGINE_LOGPROB_MAX, ENGINE_LOGPROB_MEAN

PROMPT = list(range(20, 44))


def processes_of_group(group: int) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "pgid=,stat=,pid="], capture_output=True, text=True, check=True).stdout
    rows = map(str.split, listing.splitlines())
    return [pid for pgid, state, pid in rows if int(pgid) == group and not state.startswith("Z")]


def processes_left(group: int, deadline_s: float = 120.0) -> list[str]:
    """Processes that still run after a while: a killed process first frees its memory."""
    end_s = time.monotonic() + deadline_s
    while (result := processes_of_group(group)) and time.monotonic() < end_s:
        time.sleep(0.1)
    return result


def shared_files(group: int) -> set[str]:
    """Files in shared memory that processes of the group have mapped."""
    maps = [Path("/proc", pid, "maps").read_text() for pid in processes_of_group(group)]
    return {line.split(maxsplit=5)[5] for text in maps for line in text.splitlines() if " /dev/shm/" in line}


def test_two_workers(engine_cfg, tmp_path: Path):
    cfg = replace(engine_cfg, engine=replace(engine_cfg.engine, tensor=2))
    weights = random_weights(cfg, seed=1)
    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path) as fleet:
        (client,) = fleet.clients
        assert fleet.sync(client.world_size(), 60.0) == 2
        publish(fleet, weights, 1)
        how = replace(client.sampling, stop_token_ids=(), max_tokens=48)
        (completion,) = fleet.sync(client.generate(PROMPT, 1, 3, sampling=how), 120.0)
        tokens = [*PROMPT, *completion.token_ids]
        expected = Reference(cfg, weights).logprobs(tokens, 1.0, completion.routed_experts)[len(PROMPT) - 1 :]
        difference = (torch.tensor(completion.rollout_logprobs) - expected).abs()
        assert difference.mean() < ENGINE_LOGPROB_MEAN
        assert difference.max() < ENGINE_LOGPROB_MAX
        assert sorted(report["rank"] for report in fleet.sync(client.weight_digests(), 120.0)) == [0, 1]

        group = client.replica.process_group
        files = shared_files(group)
        assert files, "two workers share memory"

        # A killed engine is named at once, with the call that it did not answer: it stands still from before the call.
        os.killpg(group, signal.SIGSTOP)
        running = fleet.submit(client.generate(PROMPT, 8, 1, sampling=how))
        time.sleep(0.3)
        started = time.monotonic()
        os.killpg(group, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rollout-0 was killed by signal 9, during /fp8rl/generate"):
            running.result(timeout=100.0)
        assert time.monotonic() - started < 120.0  # half of the deadline of requests
        with pytest.raises(EngineDeadError, match="rollout-0 was killed by signal 9"):
            fleet.sync(client.pause(), 60.0)
    assert processes_left(group) == []
    assert [file for file in files if os.path.exists(file)] == []


def test_an_engine_that_cannot_start_shows_its_reason(engine_cfg, tmp_path: Path):
    hf_dir = write_hf_dir(engine_cfg, tmp_path / "hf")
    (hf_dir / "config.json").write_text("{}")
    with pytest.raises(EngineDeadError, match=r"(?s)rollout-0 died with exit code 1 while it started.*model_type"):
        Fleet.start(engine_cfg, hf_dir, tmp_path)


def test_engines_do_not_outlive_a_killed_trainer(engine_cfg, tmp_path: Path):
    program = tmp_path / "trainer.py"
    hf_dir = write_hf_dir(engine_cfg, tmp_path / "hf")
    program.write_text(
        "import sys, time\n"
        "from model_configs.tiny import tiny_qwen3_moe\n"
        "from megatron_fp8rl.rollout.fleet import Fleet\n"
        f"fleet = Fleet.start(tiny_qwen3_moe(), {str(hf_dir)!r}, {str(tmp_path)!r}, wait=False)\n"
        "print(fleet._replicas._processes[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    group = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    assert processes_left(group) == []
