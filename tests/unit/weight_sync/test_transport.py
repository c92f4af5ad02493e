"""Both transports deliver every byte, overlap two buckets, and turn every failure into an error within the deadline."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.weight_sync import transport as module
from megatron_fp8rl.weight_sync.transport import GlooTransport, SharedMemoryTransport, TransportError
from megatron_fp8rl.weight_sync.wire import BucketInfo, GlooGroup, read_file, unpack
from tests.helpers.processes import DEADLINE_S, until


def bucket_info(index: int, num_bytes: int) -> BucketInfo:
    return BucketInfo(
        version=1,
        bucket=index,
        num_buckets=3,
        num_bytes=num_bytes,
        names=["w"],
        dtypes=["bfloat16"],
        shapes=[[num_bytes // 2]],
        offsets=[0],
    )


def ours() -> set[str]:
    return {file.name for file in Path("/dev/shm").glob(f"megatron_fp8rl-{os.getpid()}-*")}


class FileReaders:
    """Two replicas of one worker that read what the requests describe, once ``may_read`` is set."""

    num_replicas = 2
    workers_per_replica = 1

    def __init__(self, fail_at: int = -1):
        self.received: list[torch.Tensor] = []
        self.fail_at = fail_at
        self.may_read = threading.Event()
        self.may_read.set()

    def init_transfer(self, infos):
        assert infos == [{}, {}]

    def update_weights(self, info):
        assert self.may_read.wait(DEADLINE_S)
        path = info.pop("path")
        if info["bucket"] == self.fail_at:
            raise TransportError("replica 1 has died")
        self.received.append(dict(unpack(read_file(path, info["num_bytes"]), BucketInfo(**info)))["w"])


def test_shared_memory_delivers_and_overlaps():
    readers = FileReaders()
    transport = SharedMemoryTransport(readers, deadline_s=DEADLINE_S)
    transport.connect()
    sent = [torch.randn(n).bfloat16() for n in (5000, 300, 9000)]
    reserved = []

    def send_all() -> None:
        for index, values in enumerate(sent):
            buffer = transport.reserve(2 * values.numel())
            reserved.append(index)
            buffer.copy_(values.view(torch.uint8))
            transport.send(bucket_info(index, 2 * values.numel()))
        transport.wait()

    readers.may_read.clear()
    with ThreadPoolExecutor(1) as sender:
        sending = sender.submit(send_all)
        # The second buffer is free while the first is being read; the third has to wait for the first.
        until(lambda: len(reserved) == 2, "two buffers")
        time.sleep(0.3)
        assert reserved == [0, 1] and not readers.received
        readers.may_read.set()
        sending.result(DEADLINE_S)
    assert all(torch.equal(a, b) for a, b in zip(readers.received, sent, strict=True))
    assert len(ours()) == 2
    transport.close()
    transport.close()
    assert not ours()


def test_shared_memory_failure_stops_what_follows():
    readers = FileReaders(fail_at=0)
    transport = SharedMemoryTransport(readers, deadline_s=DEADLINE_S)
    with pytest.raises(TransportError, match="replica 1 has died"):
        for index in range(3):
            transport.reserve(64).zero_()
            transport.send(bucket_info(index, 64))
    assert not readers.received
    transport.close()
    assert not ours()


def test_a_reader_that_hangs_meets_the_deadline(monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    readers = FileReaders()
    readers.may_read.clear()
    transport = SharedMemoryTransport(readers, deadline_s=0.1)
    transport.reserve(64).zero_()
    transport.send(bucket_info(0, 64))
    with pytest.raises(TransportError, match="not delivered within 0.1 s"):
        transport.wait()
    readers.may_read.set()
    transport.close()


def test_a_late_reader_finds_no_file_and_makes_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_file(str(tmp_path / "gone"), 4)
    assert not list(tmp_path.iterdir())
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes, where a bucket of 4 was announced"):
        read_file(str(tmp_path / "short"), 4)


def test_files_of_killed_runs_are_removed():
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftover = Path(f"/dev/shm/megatron_fp8rl-{dead.pid}-abc-0")
    alive = Path(f"/dev/shm/megatron_fp8rl-{os.getppid()}-abc-0")
    for file in (leftover, alive):
        file.write_bytes(b"x")
    try:
        SharedMemoryTransport(FileReaders(), deadline_s=1).close()
        assert not leftover.exists() and alive.exists()
    finally:
        leftover.unlink(missing_ok=True)
        alive.unlink(missing_ok=True)


def test_too_little_shared_memory_is_an_error_not_a_crash():
    transport = SharedMemoryTransport(FileReaders(), deadline_s=1)
    free = os.statvfs("/dev/shm")
    with pytest.raises(TransportError, match="lower rollout.bucket_bytes"):
        transport.reserve(2 * free.f_bavail * free.f_frsize)
    transport.close()
    assert not ours()


def gloo_worker(pipe, mode: str) -> None:
    """An engine worker without an engine: joins the group and receives buckets until told otherwise."""
    infos = pipe.recv()
    group = GlooGroup(host="127.0.0.1", port=infos["port"], rank=1, world_size=2, timeout_s=infos["timeout_s"])
    pipe.send("joined")
    while (info := pipe.recv()) is not None:
        if mode == "die" and info["bucket"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "hang" and info["bucket"] == 1:
            time.sleep(1000)
        buffer = torch.empty(info["num_bytes"], dtype=torch.uint8)
        group.broadcast(buffer)
        pipe.send(buffer.sum().item())


class GlooWorker:
    """One replica: a process behind a pipe."""

    num_replicas = 1
    workers_per_replica = 1

    def __init__(self, mode: str):
        self.answer_s = 6.0 if mode == "hang" else DEADLINE_S
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=gloo_worker, args=(theirs, mode), daemon=True)
        self.process.start()
        theirs.close()
        self.sums: list[int] = []

    def init_transfer(self, infos):
        assert infos[0]["rank_offset"] == 1 and infos[0]["world_size"] == 2
        self.pipe.send(infos[0])
        assert self.pipe.poll(DEADLINE_S) and self.pipe.recv() == "joined"

    def update_weights(self, info):
        self.pipe.send(info)
        if not self.pipe.poll(self.answer_s):
            raise TransportError("replica 0 does not answer")
        try:
            self.sums.append(self.pipe.recv())
        except EOFError:
            raise TransportError("replica 0 has died") from None


@pytest.fixture
def gloo(request):
    worker = GlooWorker(request.param)
    transport = GlooTransport(worker, deadline_s=5.0 if request.param == "hang" else DEADLINE_S)
    yield worker, transport
    transport.close()
    worker.process.kill()
    worker.process.join()


def send_three(transport) -> list[int]:
    transport.connect()
    sums = []
    for index in range(3):
        buffer = transport.reserve(4096)
        buffer.copy_(torch.arange(4096) % (7 + index))
        sums.append(buffer.sum().item())
        transport.send(bucket_info(index, 4096))
    transport.wait()
    return sums


# The child opens its own store and group before anything else; it uses none of the parent's threads.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@forks
@pytest.mark.parametrize("gloo", ["work"], indirect=True)
def test_gloo_delivers(gloo):
    worker, transport = gloo
    assert send_three(transport) == worker.sums


@forks
@pytest.mark.parametrize("gloo", ["die", "hang"], indirect=True)
def test_gloo_names_a_worker_that_dies_or_hangs(gloo):
    _, transport = gloo
    started = time.monotonic()
    with pytest.raises(TransportError, match="replica 0"):
        send_three(transport)
    assert time.monotonic() - started < DEADLINE_S / 2


def test_gloo_names_a_worker_that_never_joins(monkeypatch):
    class Absent:
        num_replicas = 1
        workers_per_replica = 1

        def init_transfer(self, infos):
            asked.wait(DEADLINE_S)

    asked = threading.Event()
    monkeypatch.setattr(module, "_GRACE_S", 0.5)
    transport = GlooTransport(Absent(), deadline_s=1.0)
    with pytest.raises(TransportError, match="not all 1 engine workers joined"):
        transport.connect()
    asked.set()
    transport.close()


@pytest.mark.parametrize(
    ("on_gpu", "one_host", "colocated", "kind"),
    [
        (False, True, True, "shm"),
        (False, False, True, "gloo"),
        (True, True, True, "ipc"),
        (True, True, False, "ipc"),
        (True, False, False, "nccl"),
        (True, False, True, "gloo"),
    ],
)
def test_what_auto_means(on_gpu, one_host, colocated, kind):
    from megatron_fp8rl.weight_sync.shards import resolve

    assert resolve("auto", on_gpu=on_gpu, one_host=one_host, colocated=colocated) == kind
    assert resolve("nccl", on_gpu=on_gpu, one_host=one_host, colocated=colocated) == "nccl"
