"""What auto means, and what shared memory costs a machine: files that are left behind go, too small a one is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_fp8rl.weight_sync.transports import cuda_ipc
from megatron_fp8rl.weight_sync.transports.base import DeliveryError
from megatron_fp8rl.weight_sync.transports.choose import resolve


@pytest.mark.parametrize(
    ("on_gpu", "one_host", "colocated", "kind"),
    [
        (False, True, True, "ipc"),
        (False, False, True, "gloo"),
        (False, False, False, "gloo"),
        (True, True, True, "ipc"),
        (True, True, False, "ipc"),
        (True, False, False, "nccl"),
        (True, False, True, "gloo"),
    ],
)
def test_what_auto_means(on_gpu, one_host, colocated, kind):
    assert resolve("auto", on_gpu=on_gpu, one_host=one_host, colocated=colocated) == kind
    assert resolve("nccl", on_gpu=on_gpu, one_host=one_host, colocated=colocated) == "nccl"


def test_files_of_killed_runs_are_removed():
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftover = Path(f"/dev/shm/megatron_fp8rl-{dead.pid}-abc")
    alive = Path(f"/dev/shm/megatron_fp8rl-{os.getppid()}-abc")
    try:
        leftover.touch()
        alive.touch()
        path = cuda_ipc._new_file(100)
        assert not leftover.exists() and alive.exists()
        assert path.read_bytes() == bytes(100)
        path.unlink()
    finally:
        for file in (leftover, alive):
            file.unlink(missing_ok=True)


def test_too_little_shared_memory_is_named_and_nothing_is_left():
    free = os.statvfs("/dev/shm")
    with pytest.raises(DeliveryError, match="lower rollout.bucket_bytes"):
        cuda_ipc._new_file(free.f_blocks * free.f_frsize + (1 << 30))
    assert not list(Path("/dev/shm").glob(f"megatron_fp8rl-{os.getpid()}-*"))
