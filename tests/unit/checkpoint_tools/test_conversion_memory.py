"""Memory is bounded by what was asked for, not by the checkpoint or by its largest tensor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8rl.names import registry
from tests.helpers.checkpoints import random_tensors, write_folder
from tests.helpers.models import small_model

MAX_MEMORY_MIB = 64  # the least that the tools take
# Allocator and interpreter: what the heap keeps between strips, and modules that are imported on first use.
SLACK_MIB = 64
MODEL = small_model((1, 1024, 4, 2, 128, 98304), ffn=32768, tie_embeddings=True)
PROGRAM = """
import json, sys
import torch
from checkpoint_tools import __main__ as program, hf_to_fp8, hf_to_megatron, megatron_to_hf, verify

def peak_mib():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) // 1024

torch.save(torch.zeros(1), "warm")
grown = {}
for name, *words in json.loads(sys.argv[1]):
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far
    before = peak_mib()
    assert program.main([name, *words, "--workers", "1", "--max_memory", "64M"]) == 0
    grown[name] = peak_mib() - before
print(json.dumps(grown))
"""


@pytest.mark.slow
def test_peak_memory_does_not_depend_on_the_checkpoint(tmp_path):
    tensors = random_tensors(MODEL)
    size_mib = sum(tensor.nbytes for tensor in tensors.values()) >> 20
    largest_mib = max(tensor.nbytes for tensor in tensors.values()) >> 20
    assert size_mib > 4 * MAX_MEMORY_MIB and largest_mib > MAX_MEMORY_MIB + SLACK_MIB
    write_folder(tmp_path / "hf", tensors, registry.to_hf_config(MODEL), num_files=1)
    del tensors
    commands = [
        ("hf_to_megatron", "hf", "megatron"),
        ("megatron_to_hf", "megatron", "back"),
        ("hf_to_fp8", "hf", "fp8"),
        ("verify", "hf", "fp8"),
    ]
    grown = _run(commands, tmp_path)
    assert grown.keys() == {name for name, *_ in commands}
    assert max(grown.values()) <= MAX_MEMORY_MIB + SLACK_MIB, grown


def _run(commands: list[tuple[str, ...]], folder: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "clear_refs" in done.stderr:
        pytest.skip("the kernel does not reset the peak of a process")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
