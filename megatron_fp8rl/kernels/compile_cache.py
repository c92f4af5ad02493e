"""The folder that keeps compiled kernels of trainer and engines, and the record of what a run compiled.

In: ``MEGATRON_FP8RL_CACHE`` (default ``~/.cache/megatron_fp8rl``). Out: the folder ``kernels/GPU`` there, with one
folder for each compiler, whose files have the versions in their names. Variables that a user sets, such as
``TRITON_CACHE_DIR``, are kept. If the folder cannot be written, kernels go to memory.

Each process appends the kernels that it compiles to ``compiled.jsonl`` in the run's folder, from which the trainer
computes the seconds of each step. Imports neither torch nor Triton.
"""

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

RECORD_VARIABLE = "MEGATRON_FP8RL_COMPILED"  # passes the path of compiled.jsonl to all processes of a run
FOLDER_VARIABLE = "MEGATRON_FP8RL_KERNELS"  # the folder in use, for child processes
FOLDERS = {  # by environment variable of a compiler
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
}
NAME = "name,driver_version"  # for :func:`gpus`


def use(run_dir: str | None = None) -> Path:
    """Name the folders of all compilers in the environment, for this process and its children; return their parent.
    With ``run_dir``, compiled kernels are recorded there. Call before Triton, DeepGEMM or vLLM are imported."""
    if run_dir is not None:
        os.environ[RECORD_VARIABLE] = str(Path(run_dir).resolve() / "compiled.jsonl")
    if FOLDER_VARIABLE not in os.environ:  # otherwise a parent process has chosen
        folder = root() / "kernels" / re.sub(r"[^\w.-]+", "-", (gpus(NAME) or ["cpu"])[0])
        if problem := _problem(folder):
            text = f"warning: {folder} cannot keep compiled kernels: {problem}. This run compiles them again, to "
            folder = in_memory()
            print(f"{text}{folder}. Free space there, or set MEGATRON_FP8RL_CACHE to another folder", file=sys.stderr)
        os.environ[FOLDER_VARIABLE] = str(folder)
        for name, part in FOLDERS.items():
            os.environ.setdefault(name, str(folder / part))
    return Path(os.environ[FOLDER_VARIABLE])


def root() -> Path:
    """The folder for everything that is kept between runs."""
    return Path(os.environ.get("MEGATRON_FP8RL_CACHE") or Path.home() / ".cache" / "megatron_fp8rl")


@functools.cache
def gpus(field: str) -> list[str]:
    """A property of each GPU of this machine, as ``nvidia-smi`` names it; empty without GPUs. Does not initialize
    CUDA."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):  # absent in some containers
        return []


def _problem(folder: Path) -> str:
    """Why kernels cannot be written to a folder; empty if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        free, wanted = shutil.disk_usage(folder).free, _wanted_bytes()
    except OSError as error:
        return error.strerror or str(error)
    return "" if free >= wanted else f"{free >> 20} MiB are free, and {wanted >> 20} may be needed"


def _wanted_bytes() -> int:
    return 2 << 30 if gpus(NAME) else 16 << 20  # a cold start of a large model writes less


@functools.cache
def in_memory() -> Path:
    """A folder in memory, removed when this process ends; the system's temporary folder if memory is short."""
    memory = Path("/dev/shm")
    has_memory = memory.is_dir() and shutil.disk_usage(memory).free >= _wanted_bytes()
    folder, owner = tempfile.mkdtemp(prefix="fp8rl-kernels-", dir=memory if has_memory else None), os.getpid()
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


def seconds_by_kind(since: float) -> dict[str, list[float]]:
    """Seconds of each kernel in the run's record, without lines that a full disk has cut, and of each that DeepGEMM has
    compiled ``since``. DeepGEMM writes ``kernel.cu``, runs nvcc, and writes ``kernel.cubin``."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for line in Path(os.environ.get(RECORD_VARIABLE) or os.devnull).read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                kernel = json.loads(line)
                seconds[kernel["kind"]].append(kernel["seconds"])
    for cubin in Path(os.environ.get("DG_JIT_CACHE_DIR") or os.devnull).glob("cache/*/kernel.cubin"):
        with contextlib.suppress(OSError):
            if (ended := cubin.stat().st_mtime) >= since:
                seconds["deep_gemm"].append(max(0.0, ended - cubin.with_suffix(".cu").stat().st_mtime))
    return seconds


class Record:
    """Reads what the processes of a run have compiled since the last call. One reader per run."""

    def __init__(self) -> None:
        self._since, self._counted = time.time(), 0.0
        self.take_seconds()  # of an earlier part of the run

    def take_seconds(self) -> float:
        """Seconds of compilation, summed over processes."""
        before, self._counted = self._counted, sum(map(sum, seconds_by_kind(self._since).values()))
        return round(self._counted - before, 4)
