"""Timing for benchmarks: calls on a GPU, passes of a module, and the peak rates of the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.record import Row

Call = Callable[[], Any]
# Bytes per second of device memory from data sheets, by a part of the name that the driver reports.
_PEAK_BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8.0e12, "A100": 2.04e12}
_CYCLES = 2_000_000  # GPU cycles per millisecond, at the highest clock of Hopper


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(call: Call, rounds: int, warm: int = 4, *, busy: float = 0.0) -> float:
    """Median milliseconds of ``call`` on an idle GPU. Includes the host's launches where these are slower.

    ``busy``: milliseconds of other GPU work before each call. Meanwhile the host launches ahead, as in a training step
    with a full queue, so the time is that of the GPU alone.
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
    """Times of forward, and of forward and backward, and the additional memory that both need. ``first_s``: seconds of
    the first call, which compiles kernels. ``ms`` and ``busy_ms``: see :func:`milliseconds`."""
    import torch

    row: Row = {"first_s": round(timed(both), 4)}
    if device() == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        timed(both)
        row["peak_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    row["ms"] = round(milliseconds(both, rounds), 4)
    row["busy_ms"] = round(milliseconds(both, rounds, warm=1, busy=1 + 2 * row["ms"]), 4)
    return row | {"forward_ms": round(milliseconds(forward, rounds), 4)}


def dense_rates(size: int = 8192) -> dict[str, float]:
    """Operations per second of one large GEMM on this GPU: {"bf16": ..., "fp8": ...}."""
    import torch

    a, b = (torch.randn(size, size, device=device()).bfloat16() for _ in range(2))
    a8, b8, scale = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device())
    calls = {
        "bf16": lambda: a @ b.t(),
        "fp8": lambda: torch._scaled_mm(a8, b8.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16),
    }
    return {name: 2 * size**3 / (milliseconds(call, 10) / 1e3) for name, call in calls.items()}


def ceilings() -> dict[str, float]:
    """:func:`dense_rates`, and the bytes per second of a "copy"."""
    return dense_rates() | {"copy": copy_bandwidth()}


def peak_bandwidth(device_name: str) -> float | None:
    """Bytes per second of a GPU's memory by its data sheet; None for an unknown GPU."""
    return next((value for word, value in _PEAK_BANDWIDTH.items() if word in device_name), None)


def copy_bandwidth(num_bytes: int = 2 << 30, rounds: int = 10) -> float:
    """Bytes per second, read plus written, of a copy within the current GPU; best of ``rounds``."""
    import torch

    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source)) for _ in range(rounds))  # noqa: F821  deleted only below
    del source, target
    torch.cuda.empty_cache()
    return 2 * num_bytes / seconds


def timed(work: Any) -> float:
    """Seconds of ``work()``, including the GPU work that it started."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def busy_seconds(work: Call) -> float:
    """Seconds in which the GPU computes or copies while ``work`` runs, by PyTorch's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed(work)
    events = [event.time_range for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return covered(sorted((event.start, event.end) for event in events)) / 1e6


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of sorted spans (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def runnable(arms: Sequence[str]) -> list[str]:
    """The arms whose package is installed. Prints the arms that are left out."""
    from megatron_fp8rl.precision.hardware import installed_packages
    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    installed = installed_packages()
    needs = {arm: "transformer_engine" if arm.startswith(("te ", "ours te ")) else "deep_gemm" for arm in arms}
    for arm, package in needs.items():
        if package not in installed:
            print(f"LEFT OUT {arm}: {package} is not installed", flush=True)
    if "transformer_engine" in installed:
        import transformer_engine.pytorch  # noqa: F401  before PyTorch loads cuDNN
    return [arm for arm in arms if needs[arm] in installed]


def te_recipe(arm: str) -> Any:
    """Transformer Engine's recipe of an arm "te ..."; None in BF16."""
    from transformer_engine.common import recipe as recipes

    return {
        "te bf16": lambda: None,
        "te blockwise": lambda: recipes.Float8BlockScaling(fp8_format=recipes.Format.E4M3),
        "te delayed": lambda: recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID),
        "te tensorwise": lambda: recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID),
    }[arm]()
