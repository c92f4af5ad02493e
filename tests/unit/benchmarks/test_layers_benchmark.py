"""The benchmark of layers: its policies on a CPU, and what it makes of two depths."""

import pytest

from benchmarks import layers
from benchmarks.runner import main, num_gpus, parse
from benchmarks.timing import covered
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.memory import GPUS
from megatron_fp8rl.preflight.trainer_memory import worst_rank

LAYERS = layers.Layers()


def test_every_default_cell_is_a_valid_run_that_fits_an_h200_and_keeps_its_logits():
    arms = list(LAYERS.arms(parse(LAYERS, [])))
    assert {(arm["model"], arm["precision"]) for arm in arms} == {
        (model, precision) for model in ("qwen3_8b", "qwen3_30b_a3b") for precision in ("bf16", "blockwise")
    }
    for arm in arms:
        cfg = layers.Cell(**arm).run_config()
        assert not rules.check(cfg)
        assert cfg.optim.logprob_chunk_tokens == cfg.optim.max_tokens_per_microbatch == 16_384
        assert not worst_rank(cfg, GPUS["h200"], GPUS["h200"].memory_bytes).is_tight


@pytest.mark.skipif(num_gpus() > 0, reason="measures on the CPU")
@pytest.mark.parametrize("model", ["tiny", "tiny_moe"])
def test_a_policy_accumulates_gradients_of_four_microbatches(model):
    actual = layers.measure(layers.Cell(model, 2, 64, "blockwise"), rounds=1)
    assert actual["ms"] > 0 and actual["first_s"] > 0 and "busy_ms" not in actual


def test_layers_are_the_difference_of_two_depths(monkeypatch):
    times = {2: {"ms": 70.0, "busy_ms": 65.0, "first_s": 9.0}, 4: {"ms": 100.0, "busy_ms": 90.0, "first_s": 1.0}}
    monkeypatch.setattr(layers, "measure", lambda cell, rounds: times[cell.layers])
    options = parse(LAYERS, ["--model", "qwen3_30b_a3b", "--precision", "bf16"])
    (row,) = LAYERS.measure(next(iter(LAYERS.arms(options))), options)
    assert (row["ms"], row["busy_ms"], row["layers_ms"], row["layers_busy_ms"]) == (100.0, 90.0, 60.0, 50.0)
    line = LAYERS.line(row | {"device": "NVIDIA H200"})
    assert line["layers_busy_ms"] == 50.0 and line["device"] == "NVIDIA H200"


def test_odd_depths_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(LAYERS, ["--layers", "3"])
    assert "--layers 3: give an even number" in capsys.readouterr().err


def test_overlapping_work_counts_once():
    assert covered([(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (5.0, 6.0)]) == 4.0
    assert covered([]) == 0.0
