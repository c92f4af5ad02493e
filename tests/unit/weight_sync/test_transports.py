"""What auto means, who waits for whom in connecting, and what shared memory costs a machine: files that are left behind
go, too small a one is named."""

import inspect
import json
import os
import pickle
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fp8rl.kernels import compat
from megatron_fp8rl.weight_sync.schedule import Message, Round, SendSchedule
from megatron_fp8rl.weight_sync.transports import cuda_ipc
from megatron_fp8rl.weight_sync.transports.base import DeliveryError, Peer
from megatron_fp8rl.weight_sync.transports.choose import open_transport, resolve
from megatron_fp8rl.weight_sync.transports.cuda_ipc import IpcTransport
from megatron_fp8rl.weight_sync.transports.signed_store import UnsignedError, open_store


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
    """Two trainer ranks, two workers: the last worker does not connect, and its request has failed."""
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


SECRET = "of this job"


@pytest.fixture
def store():
    return open_store("127.0.0.1", 0, 10.0, is_master=True, secret=SECRET)


@pytest.fixture
def stranger(store):
    """A process that reaches the store without the secret."""
    from datetime import timedelta

    return dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10), wait_for_workers=False)


class Command:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_values_pass_between_those_who_know_the_secret(store):
    other = open_store("127.0.0.1", store.port, 10.0, is_master=False, secret=SECRET)
    store.set("ipc/0", '{"path": "ü"}')
    assert other.get("ipc/0") == '{"path": "ü"}' and other.check(["ipc/0"]) and not other.check(["ipc/1"])
    assert other.add("joined", 1) == 1 and store.add("joined", 0) == 1


def test_it_listens_on_its_address_alone(store):
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = {args[1] for args in lines if args[3] == "0A" and args[1].endswith(f":{store.port:04X}")}
    assert listening == {f"0100007F:{store.port:04X}"}  # 127.0.0.1


@pytest.mark.parametrize("forged", [b"", b"x" * 64 + b"/etc/passwd", b"\xff\x80"])
def test_a_strangers_value_is_not_taken(store, stranger, forged):
    stranger.set("counters", forged)
    with pytest.raises(UnsignedError, match="counters in the store of trainer rank 0 was not written by this job"):
        store.get("counters")


def test_a_handle_of_gpu_memory_is_text_and_numbers_in_the_order_of_pytorchs_arguments(monkeypatch):
    """With stand-ins for both ends: reduce_tensor's arguments and rebuild_cuda_tensor's, by PyTorch's own names."""
    from torch.multiprocessing import reductions

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    given = {"storage_handle": b"\x01\xff", "storage_size_bytes": 64, "storage_offset_bytes": 8, "requires_grad": False}
    given |= {
        "ref_counter_handle": b"\x02",
        "ref_counter_offset": 3,
        "event_handle": b"\x04",
        "event_sync_required": True,
    }
    fixed = {"tensor_cls": torch.Tensor, "tensor_size": torch.Size((2, 8)), "tensor_stride": (8, 1), "tensor_offset": 0}
    fixed |= {"storage_cls": torch.UntypedStorage, "dtype": torch.uint8, "storage_device": 5}
    assert names == [*fixed, *given]
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (None, (*fixed.values(), *given.values())))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: dict(zip(names, arguments, strict=True)))
    handle = json.loads(json.dumps(compat.handle_of(torch.zeros(2, 8))))
    assert compat.open_on(handle, (2, 8), 1) == fixed | given | {"storage_device": 1}


@pytest.mark.parametrize("given", ["", "max_split_size_mb:512", "expandable_segments:False,max_split_size_mb:512"])
def test_memory_to_share_is_of_segments_that_any_process_may_open(monkeypatch, given):
    chosen = []

    def record(settings: str) -> None:
        set_allocator(settings)  # refuses what it does not know
        chosen.append(dict(part.split(":") for part in settings.split(",") if part))

    set_allocator = torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", record)
    monkeypatch.setattr(compat, "_ALLOCATOR", [given])
    compat.expand_segments()
    with compat.shareable_segments():
        pass
    expands = [settings["expandable_segments"] for settings in chosen]
    assert expands == (["False"] * 3 if "expandable" in given else ["True", "False", "True"])
    assert all(settings.get("max_split_size_mb") == ("512" if given else None) for settings in chosen)
    set_allocator("expandable_segments:False")


def test_a_value_of_another_key_is_not_taken(store, stranger):
    store.set("ipc/0", "one")
    stranger.set("ipc/1", stranger.get("ipc/0"))
    with pytest.raises(UnsignedError, match="ipc/1"):
        store.get("ipc/1")


def test_a_worker_runs_no_code_from_the_store(store, stranger, tmp_path):
    """An attack on an earlier version: a pickle in place of a buffer's handle."""
    peer = Peer(rank=1, num_trainers=1, num_replicas=1, num_engine_ranks=1)
    worker = IpcTransport(peer, store, torch.device("cpu"), 10.0)
    counters = tmp_path / "counters"
    counters.write_bytes(bytes(8 * peer.world_size))
    store.set("counters", str(counters))
    stranger.set("ipc/0", pickle.dumps(Command(tmp_path / "it ran")))

    class Schedule:
        rounds = (Round((Message(0, (0,), 1, 0, 0, (), False),), ()),)

    with pytest.raises(UnsignedError, match="ipc/0"):
        worker.connect([Schedule()])
    assert not (tmp_path / "it ran").exists()
    pickle.loads(pickle.dumps(Command(tmp_path / "it ran")))  # the attack works where it is unpickled
    assert (tmp_path / "it ran").exists()
