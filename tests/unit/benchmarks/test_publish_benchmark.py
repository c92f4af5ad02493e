"""The benchmark of publications: layouts that it understands, cases that exist, and its table."""

import pytest

from benchmarks import publish
from benchmarks.runner import parse
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.types import PublishReport
from megatron_fp8rl.weight_sync.plan import plan

PUBLISH = publish.Publish()


@pytest.mark.parametrize(
    "text, world, trainer, engine",
    [
        ("colocated", 1, (1, 1, 1), ("colocated", 1, 1)),
        ("1+1", 1, (1, 1, 1), ("separate", 1, 1)),
        ("tp2+tp2", 2, (2, 1, 1), ("separate", 2, 1)),
        ("ep2+ep2", 2, (1, 1, 2), ("separate", 2, 2)),
        ("tp2ep2+tp2", 2, (2, 1, 2), ("separate", 2, 1)),
        ("pp2+tp2", 2, (1, 2, 1), ("separate", 2, 1)),
    ],
)
def test_layouts(text, world, trainer, engine):
    parallel, fields = publish.layout(text)
    assert parallel.world_size == world
    assert (parallel.tensor, parallel.pipeline, parallel.expert) == trainer
    assert (fields["placement"], fields["tensor"], fields.get("expert", 1)) == engine


def test_an_unknown_layout_is_refused_by_name():
    with pytest.raises(ValueError, match="cp2"):
        publish.layout("cp2+1")


@pytest.mark.parametrize("text", ["tp2+tp2", "ep2+ep2", "tp2ep2+ep2", "pp2+tp2"])
def test_the_large_mixture_of_experts_can_be_published_in_every_layout(text):
    arm = {"model": "qwen3_30b_a3b", "layers": 2, "precision": "fp8", "layout": text, "transport": "ipc", "rounds": 1}
    cfg = publish.run_config(arm)
    assert PUBLISH.ranks(arm) == 2 and PUBLISH.gpus(arm) == 4
    actual = plan(
        cfg.model,
        LayerTable.build(cfg.model, cfg.precision),
        TrainerLayout.from_config(cfg.parallel),
        EngineLayout.from_config(cfg.engine),
    )
    assert {s.rank for t in actual.transfers for s in t.sources} == {0, 1}  # both ranks have something to send


def test_cases_that_cannot_exist_are_left_out():
    args = ["--model", "qwen3_8b", "--layout", "colocated", "1+1", "ep2+ep2", "--transport", "ipc", "nccl"]
    actual = [(arm["layout"], arm["transport"]) for arm in PUBLISH.arms(parse(PUBLISH, args))]
    assert actual == [("colocated", "ipc"), ("1+1", "ipc"), ("1+1", "nccl")]


def test_rows_give_the_first_publication_and_the_median_of_the_others():
    counts = {"num_tensors": 3, "num_fp8_tensors": 2, "num_bytes": 8_000_000_000, "checksum": ""}
    reports = [
        PublishReport(version=v, seconds=2 * pause, pause_s=pause, **counts)
        for v, pause in enumerate([9.0, 0.5, 0.25, 4.0], 1)
    ]
    row = publish.summary(30.0, reports, ("copy to the peer GPU", 0.02))
    assert row["first"]["pause_s"] == 9.0 and row["later"]["pause_s"] == 0.5
    assert row["floor_share_of_pause"] == pytest.approx(0.04) and row["gb_per_s_of_pause"] == 16.0
    keys = {"model": "qwen3_8b", "layers": 0, "precision": "fp8", "layout": "1+1", "transport": "ipc"}
    line = PUBLISH.line(row | keys)
    assert (line["pause s"], line["share"], line["model"]) == ("0.500", "4.0%", "qwen3_8b, fp8")
