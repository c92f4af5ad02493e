"""What vLLM finds out about a model's class in a fork is what it finds out in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, sys, time
from dataclasses import asdict

import vllm.entrypoints.openai.api_server
from vllm.model_executor.models import registry
from megatron_fp8rl.rollout.vllm_plugin import patches

if sys.argv[1] == "failing fork":
    parent, inner = os.getpid(), registry._ModelInfo.from_model_cls
    registry._ModelInfo.from_model_cls = lambda cls: inner(cls) if os.getpid() == parent else 1 / 0
    registry._run_in_subprocess = lambda inspect: inspect()  # not in a new process, which would not fail
if "fork" in sys.argv[1]:
    patches.inspect_classes_in_forks()
began = time.monotonic()
found = asdict(registry.ModelRegistry.models["Qwen3MoeForCausalLM"].inspect_model_cls())
if sys.argv[1] == "fork":
    assert "vllm.model_executor.models.qwen3_moe" not in sys.modules
print("FOUND", json.dumps([found, time.monotonic() - began]))
"""


def inspected(how: str, cache: Path) -> tuple[dict, float]:
    environ = os.environ | {"VLLM_CACHE_ROOT": str(cache / how.replace(" ", "_"))}
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])


def test_a_fork_finds_the_same_and_sooner(tmp_path):
    (actual, seconds), (expected, others) = (inspected(how, tmp_path) for how in ("fork", "new process"))
    assert actual == expected and seconds < others / 2, (seconds, others)


def test_where_a_fork_fails_vllms_own_way_is_taken(tmp_path):
    actual, _ = inspected("failing fork", tmp_path)
    assert "Qwen3Moe" in actual["architecture"]
