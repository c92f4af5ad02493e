"""How benchmarks/experts.py and benchmarks/linears.py time: passes, the GPU's ceilings, and a budget of seconds."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.results import Results, Row, copy_bandwidth, timed

Call = Callable[[], Any]
_CYCLES = 2_000_000  # of a GPU in a millisecond: those of Hopper at its highest clock


def device() -> str:
    """Where operands lie: "cuda", or "cpu" for tests of what is timed."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(call: Call, rounds: int, warm: int = 4, *, busy: float = 0.0) -> float:
    """Median time of ``call`` on a GPU that has nothing else to do: where the host launches more slowly than the GPU
    computes, the host's.

    ``busy``: so many milliseconds before each call the GPU gets something else to do, about. While it is busy the host
    launches ahead, as in a training step whose queue is full; the time is then the GPU's alone.
    """
    import torch

    for _ in range(warm):
        call()
    if device() == "cpu":
        return 1e3 * statistics.median(timed(call) for _ in range(rounds))
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if busy:
            torch.cuda._sleep(round(busy * _CYCLES))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def passes(forward: Call, both: Call, rounds: int) -> Row:
    """Times of forward and of forward and backward, and the memory that they take besides what is there already.

    ``first_s`` are the seconds of the first call, in which kernels compile; no other number contains them. ``ms`` is
    of a GPU that waits for the host, ``busy_ms`` of one that does not: see :func:`milliseconds`.
    """
    import torch

    row: Row = {"first_s": round(timed(both), 2)}
    if device() == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        timed(both)
        row["peak_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    row["ms"] = round(milliseconds(both, rounds), 4)
    row["busy_ms"] = round(milliseconds(both, rounds, warm=1, busy=1 + 2 * row["ms"]), 4)
    return row | {"forward_ms": round(milliseconds(forward, rounds), 4)}


def dense_rates(size: int = 8192) -> dict[str, float]:
    """Operations per second of one large product: {"bf16": ..., "fp8": ...}, what this GPU's GEMMs can do at best."""
    import torch

    a, b = (torch.randn(size, size, device=device()).bfloat16() for _ in range(2))
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device())
    calls = {
        "bf16": lambda: a @ b.t(),
        "fp8": lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
    }
    return {name: 2 * size**3 / (milliseconds(call, 10) / 1e3) for name, call in calls.items()}


def measure_ceilings(results: Results, gpu: str) -> dict[str, float]:
    """:func:`dense_rates`, and the bytes per second of a "copy"; a row keeps them in TFLOP/s and TB/s."""
    found = dense_rates() | {"copy": copy_bandwidth()}
    shown = {name: round(rate / 1e12, 3) for name, rate in found.items()}
    results.add({"measured": "ceilings", "device": gpu} | shown)
    return found


class Budget:
    """Seconds, from now on. A case that may not end in time is left out, and named."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self._longest = 0.0

    def allows(self, what: str) -> bool:
        """Whether a case as long as the longest so far would still end in time; says so when it would not."""
        if time.monotonic() + self._longest <= self._end:
            return True
        print(f"SKIPPED {what}: the budget is spent; run the same command again", flush=True)
        return False

    @contextlib.contextmanager
    def case(self) -> Iterator[None]:
        """Around each case."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._longest = max(self._longest, time.monotonic() - started)


def runnable(arms: Sequence[str]) -> list[str]:
    """The arms whose package is installed; says which are left out, so that nothing fails late.

    Exits with status 2 when there is none.
    """
    from megatron_fp8rl.precision.hardware import installed_packages
    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    installed = installed_packages()
    has = {"Transformer Engine": "transformer_engine" in installed, "DeepGEMM": "deep_gemm" in installed}
    needs = {arm: "Transformer Engine" if arm.startswith(("te ", "ours te ")) else "DeepGEMM" for arm in arms}
    for arm, package in needs.items():
        if not has[package]:
            print(f"LEFT OUT {arm}: {package} is not installed", flush=True)
    found = [arm for arm in arms if has[needs[arm]]]
    if not found:
        print("nothing to measure: install the gpu extra of this project (FP8RL_EXTRA=gpu make install)", flush=True)
        raise SystemExit(2)
    return found
