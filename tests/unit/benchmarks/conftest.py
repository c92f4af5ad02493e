"""A GPU that is made up, for benchmarks that time kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import crossover, record, timing


@pytest.fixture
def made_up_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does at best, without timing it."""
    monkeypatch.setattr(timing, "dense_rates", lambda: {"bf16": 1e12, "fp8": 2e12})
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, made_up_ceilings: None, tmp_path: Path) -> Callable:
    """A function that makes a benchmark run whole on this machine, with the arms that ``runnable`` returns; its table
    and its plot, NAME.png, come into ``tmp_path``."""
    import torch

    def prepare(benchmark: ModuleType, name: str, runnable: Callable) -> None:
        monkeypatch.setattr(benchmark, "require_gpus", lambda *_: None)
        monkeypatch.setattr(benchmark, "runnable", runnable)
        monkeypatch.setattr(benchmark, "PLOT", tmp_path / f"{name}.png")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "cpu")
        monkeypatch.setattr(record, "section", partial(record.section, path=tmp_path / "measured.md"))
        monkeypatch.setattr(crossover, "SWEEP", (10, 128, 300))

    return prepare
