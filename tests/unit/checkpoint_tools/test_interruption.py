"""Conversions that are killed or run out of disk leave nothing under the final name and go on where they were."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_tools import hf_to_megatron, megatron_to_hf, workers
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.megatron_folder import MegatronFolder
from checkpoint_tools.workers import Bucket, Progress, WorkerOptions, fill_buckets
from megatron_fp8rl.names import registry
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.checkpoints import assert_same_tensors, random_tensors, read_tensors, write_folder
from tests.helpers.processes import DEADLINE_S, until

ONE_WORKER = WorkerOptions(workers=1)
MODEL = replace(tiny_qwen3_moe().model, num_experts=4, vocab_size=100)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", random_tensors(MODEL), registry.to_hf_config(MODEL))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(workers, "BUCKET_BYTES", 50_000)


class Stop(Exception):
    """What interrupts a conversion here."""


def convert_until(monkeypatch, source: Path, target: Path, num_buckets: int) -> list[int]:
    """Convert and stop before the bucket after ``num_buckets``; the buckets that were run."""
    run, indices = hf_to_megatron.ToMegatron.run, []

    def counted(self, bucket: Bucket):
        if len(indices) == num_buckets:
            raise Stop
        indices.append(bucket.index)
        return run(self, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(hf_to_megatron.ToMegatron, "run", counted)
        try:
            hf_to_megatron.convert(HfFolder.open(source), target, ONE_WORKER)
        except Stop:
            assert not target.exists()
    return indices


def test_an_interrupted_conversion_goes_on(monkeypatch, source, tmp_path, capsys):
    target = tmp_path / "megatron"
    assert convert_until(monkeypatch, source, target, 3) == [0, 1, 2]
    journal = tmp_path / ".megatron.partial" / ".journal"
    journal.write_bytes(journal.read_bytes() + b'{"bucket": 3, "resu')  # the line that a kill cut off
    rest = convert_until(monkeypatch, source, target, 10_000)
    assert rest[0] == 3 and len(rest) > 3
    assert "continues after" in capsys.readouterr().err
    assert not (tmp_path / ".megatron.partial").exists()
    megatron_to_hf.convert(MegatronFolder.open(target), tmp_path / "back", ONE_WORKER, target)
    assert_same_tensors(read_tensors(tmp_path / "back"), read_tensors(source))


def test_a_changed_source_starts_anew(monkeypatch, source, tmp_path):
    target = tmp_path / "megatron"
    convert_until(monkeypatch, source, target, 3)
    file = source / "model-00001-of-00002.safetensors"
    os.utime(file, (1, 1))
    assert convert_until(monkeypatch, source, target, 10_000)[0] == 0


PROGRAM = """
import sys, time
from checkpoint_tools import __main__, hf_to_megatron, workers
workers.BUCKET_BYTES = 50_000
run = hf_to_megatron.ToMegatron.run
def slow(self, bucket):
    result = run(self, bucket)
    if bucket.index == 3:
        time.sleep(1000)  # until it is killed
    return result
hf_to_megatron.ToMegatron.run = slow
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_kill_9_leaves_no_folder_and_the_same_command_finishes(source, tmp_path):
    target, journal = tmp_path / "megatron", tmp_path / ".megatron.partial" / ".journal"
    args = ["hf_to_megatron", str(source), str(target), "--workers", "1"]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *args], stderr=subprocess.DEVNULL)

    def has_begun() -> bool:
        assert process.poll() is None, "it was to be killed"
        return journal.exists() and journal.read_bytes().count(b"\n") > 2

    until(has_begun, "two buckets")
    process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not target.exists()
    finished = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    times = {file.name: file.stat().st_mtime_ns for file in journal.parent.glob("*.distcp")}
    hf_to_megatron.convert(HfFolder.open(source), target, ONE_WORKER)
    MegatronFolder.open(target)
    # What was finished before the kill was not done again.
    for entry in finished:
        (file,) = {piece[2] for pieces in entry["result"]["pieces"].values() for piece in pieces}
        assert times[file] == (target / file).stat().st_mtime_ns


def test_a_full_disk_leaves_no_folder_and_goes_on(monkeypatch, source, tmp_path):
    target, append = tmp_path / "megatron", hf_to_megatron.append
    calls = []

    def full(*args):
        calls.append(args)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(*args)

    with monkeypatch.context() as patch:
        patch.setattr(hf_to_megatron, "append", full)
        with pytest.raises(
            CheckpointError, match=r"the disk is full: \S+ GB are needed in all.*the same command again"
        ):
            hf_to_megatron.convert(HfFolder.open(source), target, ONE_WORKER)
    assert not target.exists()
    hf_to_megatron.convert(HfFolder.open(source), target, ONE_WORKER)
    assert len(list(target.glob("*.distcp"))) > 3


def test_a_disk_that_is_too_small_is_found_before_the_work(monkeypatch, source, tmp_path):
    monkeypatch.setattr("checkpoint_tools.output.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(hf_to_megatron.ToMegatron, "run", lambda *args: pytest.fail("work was begun"))
    with pytest.raises(CheckpointError, match="the disk is full"):
        hf_to_megatron.convert(HfFolder.open(source), tmp_path / "megatron", ONE_WORKER)
    assert not (tmp_path / "megatron").exists()


def test_two_programs_do_not_write_one_folder(source, tmp_path):
    partial = tmp_path / ".megatron.partial"
    partial.mkdir()
    with open(partial / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another program is writing it"):
            hf_to_megatron.convert(HfFolder.open(source), tmp_path / "megatron", ONE_WORKER)


@pytest.mark.parametrize("convert", ["to_megatron", "to_hf"])
def test_bytes_that_did_not_reach_the_disk_are_found(convert, monkeypatch, source, tmp_path):
    """What is read back is compared with what was written."""
    if convert == "to_megatron":
        append = hf_to_megatron.append
        monkeypatch.setattr(
            hf_to_megatron,
            "append",
            lambda stream, data, *rest: append(stream, data * 2 if hasattr(data, "shape") else data, *rest),
        )
        with pytest.raises(CheckpointError, match=r"__0_0.distcp:\n .*the disk has other bytes than were written"):
            hf_to_megatron.convert(HfFolder.open(source), tmp_path / "target", ONE_WORKER)
    else:
        hf_to_megatron.convert(HfFolder.open(source), tmp_path / "megatron", ONE_WORKER)
        from checkpoint_tools.hf_files import HfWriter

        monkeypatch.setattr(HfWriter, "write", lambda *args: None)
        with pytest.raises(CheckpointError, match=r"model.safetensors:\n  \S+: the disk has other bytes"):
            megatron_to_hf.convert(MegatronFolder.open(tmp_path / "megatron"), tmp_path / "target", ONE_WORKER, source)
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
def test_a_killed_worker_is_reported():
    buckets = [Bucket(0, ("a",), 1), Bucket(1, ("b",), 1)]
    with pytest.raises(CheckpointError, match="was killed, perhaps for its memory. Lower --workers or --max_memory"):
        list(workers.run_jobs(KilledJob(), buckets, 2))


class KilledJob:
    """A job whose worker dies as the kernel kills for memory."""

    def run(self, bucket):
        os.kill(os.getpid(), signal.SIGKILL)


def test_buckets_hold_everything_once():
    sizes = [("a", 20_000), ("b", 30_000), ("c", 1), ("d", 90_000), ("e", 1)]
    buckets = fill_buckets(sizes)
    assert [bucket.names for bucket in buckets] == [("a", "b"), ("c",), ("d",), ("e",)]
    assert [bucket.num_bytes for bucket in buckets] == [50_000, 1, 90_000, 1]


def test_progress_says_bytes_speed_and_time_left(capsys):
    now = [0.0]
    with Progress("copy", 4_000_000_000, 1_000_000_000, clock=lambda: now[0]) as progress:
        now[0] = 1.0
        progress.advance(100_000_000)  # too soon for a line
        now[0] = 6.0
        progress.advance(1_100_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "copy: continues after 1.00 GB of an interrupted run",
        "copy: 2.20 GB of 4.00 GB, 200 MB/s, 9 s left",
    ]


@pytest.mark.parametrize(("text", "num_bytes"), [("512M", 512 << 20), ("1.5G", 3 << 29), ("67108864", 64 << 20)])
def test_memory_is_read_with_units(text, num_bytes):
    assert WorkerOptions(max_memory=text).memory_bytes == num_bytes
