"""Compile DeepGEMM's kernels for FP8 linears of engine and trainer in many processes, while a server imports.

DeepGEMM compiles one kernel per tile size, which depends on the number of tokens: 50 to 75 kernels of four seconds each
for one model. Engine and trainer would compile them one by one in their first steps. Here one process imports DeepGEMM
and forks others, which multiply zeros at their share of the sizes; DeepGEMM's cache folder keeps the kernels.

In: the sizes of one rank's linears and the largest number of tokens in a step. Out: files in that folder, and a marker
that lists the finished sizes, which the next start skips. A replica's server starts this program and waits for it
before the engine measures its memory. Of replicas that share a folder, one compiles and the others wait. A kernel that
fails here is compiled when it is needed.

    python -m megatron_fp8rl.rollout.deep_gemm_warmup --sizes 6144,4096 4096,4096 --max-tokens 8192
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

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
LINEARS_VARIABLE = "MEGATRON_FP8RL_LINEARS"  # options of this program, for the engine's server
DEADLINE_S = 900.0  # if no engine waits
_SHARE_OF_START = 0.4  # share of an engine's start deadline available for compiling
_MAX_PROCESSES = 32
_SHARE = 6  # neighboring token counts, which often share a kernel
_POLL_S = 0.5

Size = tuple[int, int]  # rows N and columns K of a weight
Item = tuple[Literal["y", "dw"], int, int, int]  # product or weight gradient; N, K, tokens


@dataclass(frozen=True)
class Work:
    """Kernels to compile: an engine's and the trainer's linears, for all token counts up to a largest one each."""

    sizes: tuple[Size, ...]
    max_tokens: int
    trained: tuple[Size, ...] = ()
    trained_tokens: int = 0

    def names(self) -> dict[str, Size]:
        """Return sizes by their names in the folder's marker."""
        sizes_by_name = {f"{n}x{k} to {self.max_tokens}": (n, k) for n, k in self.sizes}
        return sizes_by_name | {f"{n}x{k} trained to {self.trained_tokens}": (n, k) for n, k in self.trained}

    def without(self, done: Sequence[str]) -> Work:
        left = {name: size for name, size in self.names().items() if name not in done}
        return replace(
            self,
            sizes=tuple(size for name, size in left.items() if " trained " not in name),
            trained=tuple(size for name, size in left.items() if " trained " in name),
        )

    def words(self) -> list[str]:
        words = ["--sizes", *(f"{n},{k}" for n, k in self.sizes), f"--max-tokens={self.max_tokens}"]
        if self.trained:
            words += ["--trained", *(f"{n},{k}" for n, k in self.trained), f"--trained-tokens={self.trained_tokens}"]
        return words


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
    return sorted({size for size in by_matrix.values() if not any(n % BLOCK for n in size)})


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
    return sorted(size for size in shapes if not any(n % BLOCK for n in size))


def token_counts(max_tokens: int, num_rows: int, num_processors: int) -> list[int]:
    """Return token counts at which DeepGEMM may change its tiles: small ones, and those that fill the GPU."""
    counts = {1, 2, 4, *range(8, 257, 8), *range(256, max_tokens + 1, 128)}
    for height in (64, 128, 256):
        for width in range(16, min(257, num_rows + 1), 16):
            counts |= {wave * num_processors * height // -(-num_rows // width) for wave in range(1, 11)}
    return sorted(count for count in counts if 1 <= count <= max_tokens)


def shares(work: Work, num_processors: int, num_shares: int) -> list[list[Item]]:
    items: list[Item] = [("dw", n, k, work.trained_tokens) for n, k in work.trained]  # its tiles depend on N and K
    most = dict.fromkeys(work.sizes, work.max_tokens)
    for n, k in work.trained:  # the last microbatch of an update may have any number of tokens
        for size in ((n, k), (k, n)):
            most[size] = max(most.get(size, 0), work.trained_tokens)
    for (n, k), tokens in most.items():
        items += [("y", n, k, count) for count in token_counts(tokens, n, num_processors)]
    pieces = [items[first : first + _SHARE] for first in range(0, len(items), _SHARE)]
    return [[item for piece in pieces[i::num_shares] for item in piece] for i in range(num_shares)]


def ensure(
    work: Work,
    *,
    folder: Path | None = None,
    identity: str | None = None,
    compile_share: Callable[[Work, int, int], None] | None = None,
    deadline_s: float = DEADLINE_S,
) -> bool:
    """Compile missing kernels, after other compiling processes; return whether all processes succeeded. Tests set
    ``folder``, ``identity`` (of GPU and compiler) and ``compile_share`` (does share i of n)."""
    folder = folder or Path(compiled_folder())
    identity = identity or _identity()
    end = time.monotonic() + deadline_s
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / "fp8rl.lock", end):
        done = folder / "fp8rl.json"
        known = json.loads(done.read_text()) if done.exists() else {}
        missing = work.without(known.get(identity, ()))
        if not missing.names():
            return True
        began = time.monotonic()
        print(f"compiling DeepGEMM's kernels of {', '.join(missing.names())} tokens, once for {folder}", flush=True)
        if not _run_all(missing, compile_share or _compile_share, end):
            return False
        known[identity] = sorted({*known.get(identity, ()), *missing.names()})
        partial = done.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(done)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    return True


def _run_all(work: Work, compile_share: Callable[[Work, int, int], None], end: float) -> bool:
    import torch

    with contextlib.suppress(ImportError):
        importlib.import_module(package() or "")  # once, before the forks
    number = min(_MAX_PROCESSES, os.cpu_count() or 1)
    # A forked process cannot use CUDA if its parent has.
    start = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    running = [start.Process(target=compile_share, args=(work, i, number), daemon=True) for i in range(number)]
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


@contextlib.contextmanager
def _alone(path: Path, end: float) -> Iterator[None]:
    """Lock a file for the block. Continues without the lock after the deadline: compiling twice is harmless."""
    with path.open("w") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > end:
                print(
                    f"warning: another process has locked {path} for too long; continuing", file=sys.stderr, flush=True
                )
                break
            time.sleep(_POLL_S)
        yield


def _identity() -> str:
    """Identify the GPU and the code that selects and compiles kernels, without initializing CUDA here."""
    origin = importlib.util.find_spec(package()).origin
    return f"{compile_cache.gpu() or 'GPU'}, {hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:12]}"


def _compile_share(work: Work, share: int, num_shares: int) -> None:
    import torch

    torch.set_num_threads(1)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for kind, n, k, tokens in shares(work, processors, num_shares)[share]:
        if kind == "y":
            _product(n, k, tokens)
        else:
            _weight_gradient(n, k, tokens)
    torch.cuda.synchronize()


def _product(n: int, k: int, tokens: int) -> None:
    import torch

    data = torch.zeros(n, k, dtype=torch.float8_e4m3fn, device="cuda")
    weight = data, torch.ones(n // BLOCK, k // BLOCK, device="cuda")
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
    """Start this program with options from the environment (:func:`to_env`); None without them."""
    if options := os.environ.get(LINEARS_VARIABLE, "").split():
        return subprocess.Popen([sys.executable, "-m", _MODULE, *options], stdin=subprocess.DEVNULL)
    return None


def to_env(cfg: RunConfig, max_tokens: int, *, with_trainer: bool) -> str:
    """Return the options for the server's environment, including a deadline."""
    tokens = -(-cfg.optim.max_tokens_per_microbatch // BLOCK) * BLOCK
    trained = tuple(trainer_sizes(cfg.model, cfg.precision, cfg.parallel.tensor)) if with_trainer else ()
    work = Work(
        tuple(linear_sizes(cfg.model, cfg.precision, cfg.engine)), max_tokens, trained, tokens if trained else 0
    )
    return " ".join([f"--deadline-s={_SHARE_OF_START * cfg.engine.start_s:g}", *work.words()])


def _size(text: str) -> Size:
    n, k = map(int, text.split(","))
    return n, k


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(
        prog="megatron_fp8rl.rollout.deep_gemm_warmup", description=__doc__.splitlines()[0]
    )
    options.add_argument("--sizes", nargs="*", type=_size, required=True, metavar="N,K")
    options.add_argument("--max-tokens", type=int, required=True)
    options.add_argument("--trained", nargs="+", type=_size, default=[], metavar="N,K", help="linears of the trainer")
    options.add_argument("--trained-tokens", type=int, default=0, help="of a microbatch")
    options.add_argument("--deadline-s", type=float, default=DEADLINE_S)
    known = options.parse_args(argv)
    work = Work(tuple(known.sizes), known.max_tokens, tuple(known.trained), known.trained_tokens)
    return 0 if ensure(work, deadline_s=known.deadline_s) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
