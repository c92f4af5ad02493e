"""What auto means, who waits for whom in connecting, and what shared memory costs a machine: files that are left behind
go, too small a one is named."""

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.weight_sync.schedule import SendSchedule
from megatron_fp8rl.weight_sync.transports import cuda_ipc
from megatron_fp8rl.weight_sync.transports.base import DeliveryError, Peer
from megatron_fp8rl.weight_sync.transports.choose import open_transport, resolve
from megatron_fp8rl.weight_sync.transports.signed_store import open_store


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


@pytest.mark.parametrize("kind", ["gloo", "ipc"])
def test_a_worker_that_never_comes_ends_connecting_at_once_on_every_rank(kind):
    """Of two trainer ranks and two workers the last does not come, and the request that should bring it has failed."""
    began, secret = time.monotonic(), "secret"
    store = open_store("127.0.0.1", 0, 60.0, is_master=True, secret=secret)
    nothing_to_send = SendSchedule(rounds=(), num_engine_ranks=1)

    def request_failed() -> None:
        if time.monotonic() > began + 1.0:
            raise RuntimeError("rollout-1 died with exit code -9")

    def connect(rank: int, watch: Callable[[], None]) -> None:
        peer = Peer(rank=rank, num_trainers=2, num_replicas=2, num_engine_ranks=1)
        own = store if rank == 0 else open_store("127.0.0.1", store.port, 60.0, is_master=False, secret=secret)
        open_transport(kind, peer, own, torch.device("cpu"), 60.0, [nothing_to_send], watch=watch)

    with ThreadPoolExecutor(3) as pool:
        first, *others = [
            pool.submit(connect, rank, request_failed if rank == 0 else lambda: None) for rank in range(3)
        ]
        with pytest.raises(RuntimeError, match="^rollout-1 died with exit code -9$"):
            first.result()
        for other in others:
            with pytest.raises(DeliveryError, match="3 of 4 processes .*trainer rank 0: RuntimeError: rollout-1 died"):
                other.result()
    assert time.monotonic() - began < 30.0, "the deadline is 60 s"


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
    with pytest.raises(DeliveryError, match="lower weight_sync.bucket_bytes"):
        cuda_ipc._new_file(free.f_blocks * free.f_frsize + (1 << 30))
    assert not list(Path("/dev/shm").glob(f"megatron_fp8rl-{os.getpid()}-*"))
