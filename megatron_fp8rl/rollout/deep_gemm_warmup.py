"""Compile DeepGEMM's kernels for an engine's FP8 linears in many processes before the engine starts.

DeepGEMM compiles one kernel per tile size of a matrix, and picks a different tile size for nearly every other number of
tokens: 50 to 75 kernels of four seconds each for one model. Without this warm-up an engine would compile them one by
one during its first steps. Each process here multiplies zeros at its share of the sizes; the compiled kernels stay in
DeepGEMM's cache folder.

In: the sizes of one rank's linears and the largest number of tokens in a step. Out: files in that folder, and a marker
that lists the finished sizes, so that the next start does nothing. Runs in a replica's server before it starts the
engine; of the replicas that share a folder, one compiles and the others wait. A kernel that fails here is compiled by
the engine when needed.

    python -m megatron_fp8rl.rollout.deep_gemm_warmup --sizes 6144,4096 4096,4096 --max-tokens 8192
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_fp8rl.config import FP8_BLOCK, RunConfig
from megatron_fp8rl.kernels.deep_gemm import compiled_folder, deep_gemm, package
from megatron_fp8rl.names.blocks import ENGINE_FUSIONS
from megatron_fp8rl.names.registry import weights
from megatron_fp8rl.precision.layer_table import LayerTable

_MODULE = "megatron_fp8rl.rollout.deep_gemm_warmup"  # __name__ differs when run as a program
LINEARS_VARIABLE = "MEGATRON_FP8RL_LINEARS"  # compile deadline in seconds, and sizes, passed to the engine's server
DEADLINE_S = 900.0  # when no engine waits
_SHARE_OF_START = 0.4  # share of an engine's start deadline available for compiling
_MAX_PROCESSES = 16
_SHARE = 6  # neighboring token counts, which often share a kernel
_POLL_S = 0.5
_FUSED = {matrix: fused for fused, matrices in ENGINE_FUSIONS.items() for matrix in matrices}

Size = tuple[int, int]  # rows N and columns K of a weight


def linear_sizes(cfg: RunConfig) -> list[Size]:
    """[N, K] of every FP8 linear of one engine rank, as vLLM fuses them; routed experts are not linears."""
    table, ranks = LayerTable.build(cfg.model, cfg.precision), cfg.rollout.tensor
    found: dict[tuple[str, str], Size] = {}
    parts = ((weight, *part) for weight in weights(cfg.model).values() for part in weight.parts)
    for weight, name, shape in parts:
        if weight.is_expert or not table.rollout_fp8(name):
            continue
        *where, matrix, _ = name.split(".")
        rows, columns = shape
        if weight.cut == "columns":
            columns //= ranks
        elif weight.join == "qkv":
            rows = max(rows // ranks, cfg.model.head_dim)  # more ranks than heads share them
        elif weight.cut == "rows":
            rows //= ranks
        key = ".".join(where), _FUSED.get(matrix, matrix)
        found[key] = (found.get(key, (0, 0))[0] + rows, columns)
    return sorted({size for size in found.values() if not any(n % FP8_BLOCK for n in size)})


def token_counts(max_tokens: int, num_rows: int, num_processors: int) -> list[int]:
    """Token counts at which DeepGEMM may change its tiles: small ones, and those that fill the GPU."""
    found = {1, 2, 4, *range(8, 257, 8), *range(256, max_tokens + 1, 128)}
    for height in (64, 128, 256):
        for width in range(16, min(257, num_rows + 1), 16):
            found |= {wave * num_processors * height // -(-num_rows // width) for wave in range(1, 11)}
    return sorted(count for count in found if 1 <= count <= max_tokens)


def shares(
    sizes: Sequence[Size], max_tokens: int, num_processors: int, num_shares: int
) -> list[list[tuple[int, int, int]]]:
    """The (N, K, tokens) assigned to each process."""
    work = [(n, k, count) for n, k in sizes for count in token_counts(max_tokens, n, num_processors)]
    pieces = [work[first : first + _SHARE] for first in range(0, len(work), _SHARE)]
    return [[item for piece in pieces[i::num_shares] for item in piece] for i in range(num_shares)]


def ensure(
    sizes: Sequence[Size],
    max_tokens: int,
    *,
    folder: Path | None = None,
    identity: str | None = None,
    command: Callable[[Sequence[str]], list[str]] | None = None,
    deadline_s: float = DEADLINE_S,
) -> bool:
    """Compile what DeepGEMM's folder lacks; return whether all processes succeeded. Waits for other compiling
    processes.

    ``folder``, ``identity`` of the GPU and the compiler, and the ``command`` of a process are parameters for tests.
    """
    folder = folder or Path(compiled_folder())
    identity = identity or _identity()
    command = command or (lambda words: [sys.executable, "-m", _MODULE, *words])
    end = time.monotonic() + deadline_s
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / "fp8rl.lock", end):
        done = folder / "fp8rl.json"
        known = json.loads(done.read_text()) if done.exists() else {}
        names = {f"{n}x{k} to {max_tokens}": (n, k) for n, k in sizes}
        missing = [name for name in names if name not in known.get(identity, ())]
        if not missing:
            return True
        began = time.monotonic()
        print(f"compiling DeepGEMM's kernels of {', '.join(missing)} tokens, once for {folder}", flush=True)
        if not _run_all([names[name] for name in missing], max_tokens, command, end):
            return False
        known[identity] = sorted({*known.get(identity, ()), *missing})
        partial = done.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(done)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    return True


def _run_all(sizes: Sequence[Size], max_tokens: int, command: Callable[[Sequence[str]], list[str]], end: float) -> bool:
    """Start a process for each share and wait for all of them."""
    number = min(_MAX_PROCESSES, os.cpu_count() or 1)
    words = ["--sizes", *(f"{n},{k}" for n, k in sizes), f"--max-tokens={max_tokens}", f"--of={number}"]
    running = [subprocess.Popen(command([*words, f"--share={i}"]), stdin=subprocess.DEVNULL) for i in range(number)]
    try:
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            time.sleep(_POLL_S)
        failed = [i for i, process in enumerate(running) if process.poll() != 0]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    if failed:
        print(
            f"warning: {len(failed)} of {number} processes that compile DeepGEMM's kernels failed or were too slow; the "
            "engine compiles the rest when it first needs them",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return not failed


@contextlib.contextmanager
def _alone(path: Path, end: float) -> Iterator[None]:
    """Hold a file lock, or continue without it after the deadline: compiling twice is harmless."""
    with path.open("w") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > end:
                print(f"warning: another process has held {path} for too long", file=sys.stderr, flush=True)
                break
            time.sleep(_POLL_S)
        yield


def _identity() -> str:
    """Identifies the GPU and the code that chooses and compiles kernels, without initializing CUDA in this process."""
    import importlib.util

    said = []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # absent in some containers
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=60,
        ).stdout.splitlines()  # fmt: skip
    origin = importlib.util.find_spec(package()).origin
    return f"{said[0] if said else 'GPU'}, {hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:12]}"


def _multiply(work: Sequence[tuple[int, int, int]]) -> None:
    """Multiply zeros at each size: DeepGEMM compiles the missing kernels."""
    import torch

    weight, held = None, None
    for n, k, tokens in work:
        if held != (n, k):
            weight, held = None, (n, k)
            data = torch.zeros(n, k, dtype=torch.float8_e4m3fn, device="cuda")
            weight = data, torch.ones(n // FP8_BLOCK, k // FP8_BLOCK, device="cuda")
        x = torch.zeros(tokens, k, dtype=torch.float8_e4m3fn, device="cuda")
        # Scale columns begin at multiples of 16 bytes, as in vLLM's quantizer.
        scale = torch.ones(k // FP8_BLOCK, -(-tokens // 4) * 4, device="cuda").t()[:tokens]
        out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
        deep_gemm().fp8_gemm_nt((x, scale), weight, out, disable_ue8m0_cast=True)
    torch.cuda.synchronize()


def precompile_from_env(max_tokens: int) -> None:
    """Call :func:`ensure` with the sizes that :func:`to_env` put into the environment, if any."""
    if words := os.environ.get(LINEARS_VARIABLE, "").split():
        ensure([_size(word) for word in words[1:]], max_tokens, deadline_s=float(words[0]))


def to_env(cfg: RunConfig) -> str:
    """The value for the server's environment. Kernels not compiled in time are compiled by the engine when needed."""
    sizes = (f"{n},{k}" for n, k in linear_sizes(cfg))
    return " ".join([f"{_SHARE_OF_START * cfg.rollout.start_deadline_s:g}", *sizes])


def _size(text: str) -> Size:
    n, k = map(int, text.split(","))
    return n, k


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(
        prog="megatron_fp8rl.rollout.deep_gemm_warmup", description=__doc__.splitlines()[0]
    )
    options.add_argument("--sizes", nargs="+", type=_size, required=True, metavar="N,K")
    options.add_argument("--max-tokens", type=int, required=True)
    options.add_argument("--of", type=int, default=1, help="shares; with --share")
    options.add_argument("--share", type=int, help="compile one share here; without it, all in processes")
    known = options.parse_args(argv)
    if known.share is None:
        return 0 if ensure(known.sizes, known.max_tokens) else 1
    import torch

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    _multiply(shares(known.sizes, known.max_tokens, processors, known.of)[known.share])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
