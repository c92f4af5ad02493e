"""Compile DeepGEMM's kernels for FP8 linears of engine and trainer in many processes, while a server imports.

DeepGEMM compiles one kernel per tile size, which depends on the number of tokens: 50 to 75 kernels of four seconds each
for one model. Engine and trainer would compile them one by one in their first steps. Here one process imports DeepGEMM
and forks others, which multiply zeros at their share of the sizes; DeepGEMM's cache folder keeps the kernels.

In: the sizes of one rank's linears and the largest number of tokens in a step, from the environment. Out: files in that
folder, and a marker that lists the finished linears, which the next start skips. A replica's server starts this program
and waits for it before the engine measures its memory. Of replicas that share a folder, one compiles and the others
wait. A kernel that fails here is compiled when it is needed.
"""

import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock, Timeout

from megatron_fp8rl.config import EngineConfig, ModelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.kernels.deep_gemm import compiled_folder, deep_gemm, package
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.names import slicing
from megatron_fp8rl.names.blocks import FUSED_INTO
from megatron_fp8rl.names.layouts import EngineLayout
from megatron_fp8rl.names.registry import weights
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.plan import engine_slices

_MODULE = "megatron_fp8rl.rollout.deep_gemm_warmup"  # __name__ differs when run as a program
LINEARS_VARIABLE = "MEGATRON_FP8RL_LINEARS"  # JSON: {"deadline_s": ..., "linears": [...]}
_SHARE_OF_START = 0.4  # share of an engine's start deadline available for compiling
_MAX_PROCESSES = 32
_SHARE = 6  # neighboring token counts, which often share a kernel

Size = tuple[int, int]  # rows N and columns K of a weight
Item = tuple[Literal["y", "dw"], int, int, int]  # product or weight gradient; N, K, tokens


class Linear(NamedTuple):
    """A linear of an engine or of the trainer, whose kernels are compiled for all token counts up to a largest one."""

    rows: int
    columns: int
    max_tokens: int
    is_trained: bool = False

    def __str__(self) -> str:
        """Its name in the folder's marker."""
        return f"{self.rows}x{self.columns}{' trained' if self.is_trained else ''} to {self.max_tokens}"


def linear_sizes(model: ModelConfig, precision: PrecisionConfig, engine: EngineConfig) -> list[Size]:
    """Return [N, K] of every FP8 linear of one engine rank, as fused by vLLM, without routed experts."""
    table, layout = LayerTable.build(model, precision), EngineLayout.from_config(engine)
    by_matrix: dict[tuple[str, str], Size] = {}
    parts = ((weight, *part) for weight in weights(model).values() for part in weight.parts)
    for weight, name, shape in parts:
        if weight.is_expert or not table.rollout_format(name).is_quantized:
            continue
        *where, matrix, _ = name.split(".")
        start, stop = engine_slices(name, weight, shape, model, layout)[0]
        rows, columns = (stop - start, shape[1]) if weight.axis == 0 else (shape[0], stop - start)
        key = ".".join(where), FUSED_INTO.get(matrix, matrix)
        by_matrix[key] = (by_matrix.get(key, (0, 0))[0] + rows, columns)
    return sorted({(n, k) for n, k in by_matrix.values() if not (n % (BLOCK // 2) or k % BLOCK)})


def trainer_sizes(model: ModelConfig, precision: PrecisionConfig, num_ranks: int) -> list[Size]:
    """Return [N, K] of every FP8 linear of one of ``num_ranks`` tensor-parallel ranks, without routed experts."""
    table = LayerTable.build(model, precision)
    shapes = set()
    for weight in weights(model).values():
        if (
            weight.is_expert
            or len(weight.shape) != 2
            or not all(table.trainer_format(name).is_quantized for name, _ in weight.parts)
        ):
            continue
        shapes.add(slicing.shard_shape(weight, model, num_ranks))
    # The trainer completes half a block of rows with zeros.
    return sorted({(n + n % BLOCK, k) for n, k in shapes if not (n % (BLOCK // 2) or k % BLOCK)})


def token_counts(max_tokens: int, num_rows: int, num_processors: int) -> list[int]:
    """Return token counts at which DeepGEMM may change its tiles: small ones, and those that fill the GPU."""
    counts = {1, 2, 4, *range(8, 257, 8), *range(256, max_tokens + 1, 128)}
    for height in (64, 128, 256):
        for width in range(16, min(257, num_rows + 1), 16):
            counts |= {wave * num_processors * height // -(-num_rows // width) for wave in range(1, 11)}
    return sorted(count for count in counts if 1 <= count <= max_tokens)


def shares(linears: Sequence[Linear], num_processors: int, num_shares: int) -> list[list[Item]]:
    items: list[Item] = []
    most: dict[Size, int] = {}
    for n, k, tokens, is_trained in linears:
        if is_trained:
            items.append(("dw", n, k, tokens))  # its tiles depend on N and K
        for size in ((n, k), (k, n)) if is_trained else ((n, k),):
            most[size] = max(most.get(size, 0), tokens)
    for (n, k), tokens in most.items():  # the last microbatch of an update may have any number of tokens
        items += [("y", n, k, count) for count in token_counts(tokens, n, num_processors)]
    pieces = [items[first : first + _SHARE] for first in range(0, len(items), _SHARE)]
    return [[item for piece in pieces[i::num_shares] for item in piece] for i in range(num_shares)]


def ensure(
    linears: Sequence[Linear],
    *,
    folder: Path | None = None,
    identity: str | None = None,
    compile_share: Callable[[Sequence[Linear], int, int], None] | None = None,
    deadline_s: float = 900.0,
) -> bool:
    """Compile missing kernels, after other compiling processes; return whether all processes succeeded. Tests set
    ``folder``, ``identity`` (of GPU and compiler) and ``compile_share`` (does share i of n)."""
    folder = folder or Path(compiled_folder())
    identity = identity or _identity()
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    lock, done = FileLock(folder / "fp8rl.lock"), folder / "fp8rl.json"
    try:
        lock.acquire(timeout=deadline_s)
    except Timeout:  # compiling twice is harmless
        print(f"warning: another process has locked {folder} for too long; continuing", file=sys.stderr, flush=True)
    try:
        known = json.loads(done.read_text()) if done.exists() else {}
        missing = [linear for linear in linears if str(linear) not in known.get(identity, ())]
        if not missing:
            return True
        names = [*map(str, missing)]
        print(f"compiling DeepGEMM's kernels of {', '.join(names)} tokens, once for {folder}", flush=True)
        if not _run_all(missing, compile_share or _compile_share, began + deadline_s):
            return False
        known[identity] = sorted({*known.get(identity, ()), *names})
        partial = done.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(done)
    finally:
        lock.release()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    return True


def _run_all(linears: Sequence[Linear], compile_share: Callable[..., None], end: float) -> bool:
    import torch

    with contextlib.suppress(ImportError):
        importlib.import_module(package() or "")  # once, before the forks
    number = min(_MAX_PROCESSES, os.cpu_count() or 1)
    # A forked process cannot use CUDA if its parent has.
    start = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    running = [start.Process(target=compile_share, args=(linears, i, number), daemon=True) for i in range(number)]
    for process in running:
        process.start()
    for process in running:
        process.join(max(0.0, end - time.monotonic()))
    failed = [process for process in running if process.exitcode != 0]
    for process in failed:
        process.kill()
        process.join()
    if failed:
        print(
            f"warning: {len(failed)} of {number} processes that compile DeepGEMM's kernels failed or were too slow; "
            "the remaining kernels are compiled when they are first needed",
            file=sys.stderr,
            flush=True,
        )
    return not failed


def _identity() -> str:
    """Identify the GPU and the code that selects and compiles kernels, without initializing CUDA here."""
    origin = importlib.util.find_spec(package()).origin
    gpu, *_ = compile_cache.gpus(compile_cache.NAME) or ["GPU"]
    return f"{gpu}, {hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:12]}"


def _compile_share(linears: Sequence[Linear], share: int, num_shares: int) -> None:
    import torch

    torch.set_num_threads(1)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for kind, n, k, tokens in shares(linears, processors, num_shares)[share]:
        if kind == "y":
            _product(n, k, tokens)
        else:
            _weight_gradient(n, k, tokens)
    torch.cuda.synchronize()


def _product(n: int, k: int, tokens: int) -> None:
    import torch

    data = torch.zeros(n, k, dtype=torch.float8_e4m3fn, device="cuda")
    weight = data, torch.ones(-(-n // BLOCK), k // BLOCK, device="cuda")
    x = torch.zeros(tokens, k, dtype=torch.float8_e4m3fn, device="cuda")
    # Scale columns begin at multiples of 16 bytes, as in vLLM's quantizer.
    scale = torch.ones(k // BLOCK, -(-tokens // 4) * 4, device="cuda").t()[:tokens]
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
    deep_gemm().fp8_gemm_nt((x, scale), weight, out, disable_ue8m0_cast=True)


def _weight_gradient(n: int, k: int, tokens: int) -> None:
    import torch

    from megatron_fp8rl.kernels.gemm import Fp8, add_dense_weight_gradient

    def zeros(rows: int) -> Fp8:
        data = torch.zeros(rows, tokens, dtype=torch.float8_e4m3fn, device="cuda")
        return Fp8(data, torch.ones(tokens // BLOCK, rows, device="cuda").t())

    add_dense_weight_gradient(zeros(n), zeros(k), torch.zeros(n, k, device="cuda"))


def start_from_env() -> subprocess.Popen[bytes] | None:
    """Start this program if the environment has linears (:func:`to_env`)."""
    if LINEARS_VARIABLE not in os.environ:
        return None
    return subprocess.Popen([sys.executable, "-m", _MODULE], stdin=subprocess.DEVNULL)


def to_env(cfg: RunConfig, max_tokens: int, *, with_trainer: bool) -> str:
    """Return the linears of an engine, and of the trainer, for the server's environment, and a deadline."""
    linears = [Linear(*size, max_tokens) for size in linear_sizes(cfg.model, cfg.precision, cfg.engine)]
    if with_trainer:
        tokens = -(-cfg.optim.max_tokens_per_microbatch // BLOCK) * BLOCK
        sizes = trainer_sizes(cfg.model, cfg.precision, cfg.parallel.tensor)
        linears += [Linear(*size, tokens, is_trained=True) for size in sizes]
    return json.dumps({"deadline_s": _SHARE_OF_START * cfg.engine.start_s, "linears": linears})


def main() -> int:
    known = json.loads(os.environ[LINEARS_VARIABLE])
    linears = [Linear(*linear) for linear in known["linears"]]
    return 0 if ensure(linears, deadline_s=known["deadline_s"]) else 1


if __name__ == "__main__":
    sys.exit(main())
