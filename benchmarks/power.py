"""Power, utilization and memory of GPUs while steps run, from nvidia-smi once a second."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
import time
from typing import Self

_QUERY = ["nvidia-smi", "--query-gpu=power.draw,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
_EVERY_S = 1.0


class PowerMeter:
    """Samples in a thread while its block runs. Without a GPU there are no samples."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[list[float]]]] = []  # (time, for each GPU: W, %, MiB)
        self._marks: dict[int, float] = {}  # step -> time of its end
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power", daemon=True)

    def mark(self, step: int) -> None:
        self._marks[step] = time.monotonic()

    def between(self, first: int, last: int) -> dict[str, float]:
        """Mean W, mean utilization and largest GiB of a GPU between the ends of two steps; empty without samples."""
        if first not in self._marks or last not in self._marks:
            return {}
        gpus = [gpu for at, gpus in self._samples if self._marks[first] < at <= self._marks[last] for gpu in gpus]
        if not gpus:
            return {}
        watts, busy, mib = zip(*gpus, strict=True)
        return {"watts": statistics.fmean(watts), "busy": statistics.fmean(busy) / 100, "gib": max(mib) / 1024}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=30)

    def _sample(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # the runs inherit it
        query = [*_QUERY, f"--id={visible}"] if visible else _QUERY
        while not self._end.wait(_EVERY_S):
            try:
                lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            except (OSError, subprocess.SubprocessError):
                return
            with contextlib.suppress(ValueError):  # a field that this GPU does not report
                gpus = [[float(part) for part in line.split(",")] for line in lines.splitlines() if line.strip()]
                self._samples.append((time.monotonic(), gpus))
