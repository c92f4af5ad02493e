"""The benchmark of memory: what it compares, and that it reads the meter where it says."""

import gc
import weakref
from dataclasses import replace

import pytest

from benchmarks import memory
from benchmarks.runner import main, num_gpus, parse
from benchmarks.training import single_rank
from megatron_fp8rl.preflight import rules, trainer_memory
from megatron_fp8rl.preflight.memory import GIB, GPUS

H200, MEMORY = GPUS["h200"], memory.Memory()


class ScriptedMeter(memory.Meter):
    """Records calls; every reading is larger than the last."""

    def __init__(self):
        self.asked: list[str] = []

    def _read(self, what: str) -> int:
        self.asked.append(what)
        return len(self.asked) * GIB

    def allocated(self) -> int:
        return self._read("allocated")

    def peak(self) -> int:
        return self._read("peak")

    def reset(self) -> None:
        self._read("reset")

    def outside(self) -> int:
        return self._read("outside")


def test_every_default_cell_is_a_valid_run_that_fits_an_h200():
    cells = [memory.Cell(**arm) for arm in MEMORY.arms(parse(MEMORY, []))]
    assert {(cell.model, cell.precision, cell.recompute) for cell in cells} == {
        (model, *rest)
        for model in ("qwen3_8b", "qwen3_30b_a3b")
        for rest in (("bf16", "none"), *(("blockwise", r) for r in ("none", "selective", "full")))
    }
    for cell in cells:
        cfg = cell.run_config()
        assert not rules.check(cfg)
        estimate = trainer_memory.worst_rank(cfg, H200, H200.memory_bytes)
        assert {part.name for part in estimate.parts} == set(memory.PARTS)
        assert 0.3 < estimate.share < 0.7


def test_totals_are_the_peak_and_what_lies_outside_of_the_allocator():
    estimate = trainer_memory.worst_rank(
        memory.Cell("tiny", 1, 512, "blockwise", "none").run_config(), H200, H200.memory_bytes
    )
    measured = dict.fromkeys(memory.PARTS, 0) | {"weights": 2 * GIB, "communication, CUDA": GIB}
    measured |= {"built": 0, "logprobs_peak": 0, "update_peak": 3 * GIB, "step_peak": 4 * GIB, "left": 0}
    row = memory.compare(estimate, measured)
    assert row["weights"][1] == 2.0 and row["total"][1] == 5.0
    assert row["ratio"] == round(estimate.total_bytes / (5 * GIB), 3)
    line = MEMORY.line(row | dict.fromkeys(MEMORY.keys, "x"))
    assert line["weights"] == f"{row['weights'][0]:.2f} / 2.00"


@pytest.mark.parametrize("experts", ["te", "deep_gemm"])
def test_a_measurement_of_a_tiny_model_leaves_nothing_behind(monkeypatch, experts):
    policies = []
    cell = memory.Cell("tiny_moe", 1, 64, "blockwise", "none")
    cfg, meter = cell.run_config(), ScriptedMeter()
    cfg = replace(cfg, precision=replace(cfg.precision, kernels={"experts": experts}))
    with single_rank(cfg) as parallel:
        from megatron_fp8rl.trainer.policy import Policy

        build = Policy.build
        monkeypatch.setattr(
            Policy, "build", lambda *given: policies.append(weakref.ref(policy := build(*given))) or policy
        )
        row = memory.measure(cell, cfg, parallel, meter)
    update = ["reset", "allocated", "allocated", "peak", "allocated", "allocated", "reset", "peak"]
    start = ["allocated", "allocated", "reset", "peak"]  # before, built, around the log-probabilities
    assert meter.asked == [*start, *update, "allocated", *update, "outside"]
    estimate = trainer_memory.worst_rank(cfg, H200, H200.memory_bytes)
    # Buffers are filled up to multiples of 64 elements for each parameter, and more at their ends.
    assert row["weights"] == pytest.approx(estimate.part("weights").num_bytes, rel=0.02)
    assert row["gradients"] == pytest.approx(estimate.part("gradients").num_bytes, rel=0.02)
    # Readings of the second update, which follow one another: loss of the second microbatch, peak, before the step.
    assert (row["activations"], row["temporaries"], row["FP8 copies"]) == (-2 * GIB, GIB, -GIB)
    gc.collect()
    assert policies[0]() is None


@pytest.mark.skipif(num_gpus() > 0, reason="says what happens without a GPU")
def test_without_a_gpu_it_predicts_and_exits_with_2(tmp_path, capsys):
    assert main(MEMORY, ["--quick", "--folder", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("PREDICTED {") == 2 and "FP8 copies" in shown.out
    assert "needs 1 GPU;" in shown.err
