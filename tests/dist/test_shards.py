"""What is published does not depend on the trainer's layout, follows the parameters, and fails on all ranks alike.

The engine workers are threads of rank 0 that keep what arrives; what they hold has to be, byte for byte, what they cut
out of the whole tensors, quantized whole.
"""

import asyncio
import functools
import time
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import UPDATE_S, RunConfig
from megatron_fp8rl.types import PublishReport
from megatron_fp8rl.weight_sync import pack, sender
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from tests.helpers.dist import run_ranks
from tests.helpers.exports import (
    LAYOUTS,
    Fleet,
    build,
    config,
    digests_of,
    expected_wire,
    layout_name,
    report_of,
    timeless,
)
from tests.helpers.shards import Replica, Worker, shard_config
from tests.helpers.training import continue_training, full_weights, weight_pieces

CASES = [
    ("dense", "gloo", dict(world_size=2, tensor=2), dict()),
    ("dense", "ipc", dict(world_size=2, pipeline=2, virtual_stages=2), dict()),
    ("tied", "ipc", dict(world_size=2, tensor=2), dict()),
    ("moe", "gloo", dict(world_size=2, tensor=2), dict(tensor=2)),
    ("moe", "ipc", dict(world_size=2, expert=2), dict(tensor=2, expert=2, num_replicas=2)),
    ("moe", "gloo", dict(world_size=2, expert=2), dict(tensor=1)),
    ("moe", "gloo", dict(world_size=2, pipeline=2), dict(tensor=2, num_replicas=2)),
    ("moe", "ipc", dict(world_size=2), dict(tensor=2)),
    ("moe", "ipc", dict(world_size=4, tensor=2, expert=2, expert_tensor=2), dict(tensor=2, expert=2)),
    ("latent", "gloo", dict(world_size=2, tensor=2, expert=2), dict()),
    ("moe", "gloo", dict(world_size=2, expert=2), dict(data=2, expert=2)),
    ("moe", "ipc", dict(world_size=2, tensor=2), dict(data=2, tensor=2, expert=4)),
    ("mxfp8", "ipc", dict(world_size=2, tensor=2, expert=2), dict(tensor=2)),
    ("mxfp8", "gloo", dict(world_size=2, tensor=2, expert_tensor=2), dict(tensor=2)),
    ("mxfp8", "ipc", dict(world_size=2, pipeline=2), dict(tensor=2)),
]
CASES += [
    (kind, "ipc", layout, dict(tensor=config(kind, layout).engine.tensor))
    for kind, layout in LAYOUTS
    if (kind, layout) not in [(kind, layout) for kind, _, layout, _ in CASES]
]


def exporter_of(cfg: RunConfig):
    """Runs on a rank: (exporter, replicas on rank 0)."""
    policy = build(cfg)
    replicas = [Replica(cfg) for _ in range(cfg.engine.num_replicas)]
    fleet = Fleet(*replicas) if policy.parallel.rank == 0 else None
    exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
    exporter.sender.warm_up()  # not collective, and of no consequence
    return exporter, policy, replicas


def publish_shards(cfg: RunConfig) -> tuple[PublishReport, list[list[dict[str, torch.Tensor]]], list[str]]:
    """Runs on a rank: (report, tensors of each worker of each replica, calls to the first replica)."""
    exporter, _, replicas = exporter_of(cfg)
    exporter.publish(1)
    report = exporter.publish(2)
    exporter.close()
    return report, [[worker.held for worker in replica.workers] for replica in replicas], replicas[0].calls


def build_alone(kind: str):
    """Runs on a single rank: the expected wire tensors, and the report of publishing them."""
    cfg = shard_config(kind, "ipc", dict(world_size=1), dict(tensor=config(kind, {}).engine.tensor))
    exporter, policy, _ = exporter_of(cfg)
    exporter.publish(1)
    report = exporter.publish(2)
    exporter.close()
    return expected_wire(cfg, {name: tensor.detach() for name, tensor in policy.named_tensors()}), report


@functools.cache
def whole(kind: str) -> tuple[dict[str, torch.Tensor], PublishReport]:
    return run_ranks(1, build_alone, kind)[0]


def require_slices(cfg: RunConfig, workers: list[dict[str, torch.Tensor]], tensors: dict[str, torch.Tensor]) -> None:
    for engine_rank, held in enumerate(workers):
        kept = {}
        for transfer in PlanInputs.of(cfg).plan.transfers:
            span = transfer.slices[engine_rank]
            if span is not None and span[0] < span[1]:
                kept[transfer.name] = transfer.axis, span
                if transfer.is_fp8:
                    kept[transfer.scale_name] = transfer.axis, transfer.blocks(span)
        assert held.keys() == kept.keys()
        for name, (axis, (start, stop)) in kept.items():
            expected = tensors[name].narrow(axis, start, stop - start).contiguous()
            assert torch.equal(held[name].view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize(("kind", "transport", "layout", "engine"), CASES, ids=layout_name)
def test_every_worker_holds_its_slices_of_the_quantized_whole(kind, transport, layout, engine):
    cfg = shard_config(kind, transport, layout, engine)
    ranks = run_ranks(layout["world_size"], publish_shards, cfg)
    tensors, report_alone = whole(kind)
    report, replicas, calls = ranks[0]
    assert all(other == report for other, _, _ in ranks)
    assert len(replicas) == cfg.engine.num_replicas
    for workers in replicas:
        require_slices(cfg, workers, tensors)
    if config(kind, layout).engine.tensor == cfg.engine.tensor and cfg.engine.expert == 1:
        assert timeless(report) == timeless(report_alone)  # the checksum too
    # The first publication goes twice: through the loaders, and straight into the kernels' tensors.
    first = ["pause", "start", "reload", "start", "compare", "resume"]
    assert calls == [*first, "pause", "start", "direct", "resume"]


def publish_with_a_clock(cfg: RunConfig, is_stuck: bool):
    """Runs on a rank: (preparations during the engines' pause, error of the publication, calls)."""
    exporter, _, replicas = exporter_of(cfg)
    made, calls = [], replicas[0].calls

    class Packer(pack.RoundPacker):
        def __init__(self, *args, **kwargs):
            made.append("pause" in calls)
            super().__init__(*args, **kwargs)

    def join(info: dict) -> None:
        Worker.join(worker, info)
        if is_stuck:
            raise ValueError("model.norm.weight: the engine's kernels hold nothing")

    worker, sender.RoundPacker = replicas[0].workers[1], Packer
    worker.join = join
    try:
        exporter.publish(1)
    except Exception as error:
        return made, f"{type(error).__name__}: {error}", calls
    finally:
        sender.RoundPacker = pack.RoundPacker
        exporter.close()
    return made, None, calls


def test_both_passes_of_a_first_publication_are_prepared_before_the_pause():
    cfg = shard_config("moe", "ipc", dict(world_size=2, expert=2), dict(tensor=2, bucket_bytes=100_000))
    inputs = PlanInputs.of(cfg)
    num_rounds = len(inputs.slices().rounds) + len(inputs.whole([0]).rounds)
    for made, error, _ in run_ranks(2, publish_with_a_clock, cfg, False):
        assert error is None and made == [False] * num_rounds


def test_an_engine_whose_kernels_cannot_be_written_is_not_paused():
    cfg = shard_config("moe", "ipc", dict(world_size=2, expert=2), dict(tensor=2))
    ranks = run_ranks(2, publish_with_a_clock, cfg, True)
    for _, error, _ in ranks:
        assert "TransportError: init_weight_transfer_engine: replica 0: model.norm.weight" in error
    assert ranks[0][2] == []


def publish_to_spare_memory(cfg: RunConfig):
    """Runs on a rank: (workers' tensors after an update, calls, weights after it)."""
    exporter, policy, replicas = exporter_of(cfg)
    for version in (1, 2, 3, 4):
        if version == 4:
            continue_training(policy, 1)
        exporter.publish(version)
    exporter.close()
    return [worker.held for worker in replicas[0].workers], replicas[0].calls, weight_pieces(policy)


@pytest.mark.parametrize("transport", ["ipc", "gloo"])
def test_weights_arrive_in_spare_memory_before_the_pause(transport):
    engine = dict(data=2, expert=2, num_replicas=2, spare_weights="host", bucket_bytes=100_000)
    cfg = shard_config("moe", transport, dict(world_size=2, tensor=2, expert=2), engine)
    ranks = run_ranks(2, publish_to_spare_memory, cfg)
    workers, calls, _ = ranks[0]
    require_slices(cfg, workers, expected_wire(cfg, full_weights(cfg.model, [pieces for *_, pieces in ranks])))
    first = ["pause", "start", "reload", "start", "compare", "resume"]
    assert calls == [*first, *["stage", "pause", "start", "switch", "resume"] * 3]


def train_and_publish(cfg: RunConfig):
    """Runs on a rank: (workers' tensors after an update, checksums before and after it, weights after it)."""
    exporter, policy, replicas = exporter_of(cfg)
    first = exporter.publish(1).checksum
    continue_training(policy, 1)
    second = exporter.publish(2).checksum
    exporter.close()
    return [worker.held for worker in replicas[0].workers], (first, second), weight_pieces(policy)


def test_a_publication_carries_the_current_parameters():
    cfg = shard_config("moe", "ipc", dict(world_size=2, tensor=2, expert=2), dict(tensor=2))
    ranks = run_ranks(2, train_and_publish, cfg)
    workers, (first, second), _ = ranks[0]
    assert first != second
    require_slices(cfg, workers, expected_wire(cfg, full_weights(cfg.model, [pieces for _, _, pieces in ranks])))


def fail_shards(cfg: RunConfig, failure: str):
    """Runs on a rank: (type and text of the publication's error, seconds)."""
    exporter, policy, replicas = exporter_of(cfg)
    rank = policy.parallel.rank
    exporter.publish(1)
    if failure == "engine" and rank == 0:
        replicas[0].workers[1].die_at = 1
    elif failure == "late" and rank == 1:
        exporter.sender.send = lambda version, mode: time.sleep(16.0)
    elif failure == "hang" and rank == 0:
        replicas[0].update_weights = lambda info: asyncio.sleep(60)
        exporter._engines._deadline_s = 3.0
    elif failure == "rank" and rank == 1:
        name = "decoder.layers.2.mlp.experts.3.linear_fc2.weight"
        exporter.sender._shards._parameters[name] = torch.zeros(3, 3, dtype=torch.bfloat16)
    elif failure == "lie" and rank == 0:

        async def lie(names=True):
            return [report_of(r, 2, digests_of(replicas[0].workers[0].held)) for r in range(2)]

        replicas[0].weight_digests = lie
    elif failure == "nan" and rank == 1:
        with torch.no_grad():
            weight = "decoder.layers.1.mlp.experts.2.linear_fc1.weight"
            dict(policy.named_parameters())[weight][5, 7] = float("nan")
    started = time.monotonic()
    try:
        exporter.publish(2)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started, replicas[0].calls
    finally:
        exporter.close()
    return None


@pytest.mark.parametrize("transport", ["ipc", "gloo"])
@pytest.mark.parametrize(
    ("failure", "error", "texts"),
    [
        ("engine", "TransportError", ["replica 0", "exit code -9"]),
        ("late", "TransportError", ["replica 0", "trainer rank 1", "within 7.2 s"]),
        ("hang", "TransportError", ["policy version 2 (direct)", "engine.deadline_scale"]),
        ("rank", "ValueError", ["decoder.layers.2.mlp.experts.3.linear_fc2.weight: shape (3, 3)"]),
        ("nan", "ValueError", ["model.layers.1.mlp.experts.2.gate_proj.weight", "NaN"]),
        ("lie", "WeightMismatch", ["model.embed_tokens.weight in replica 0 rank 1: corrupted"]),
    ],
)
def test_all_ranks_raise_the_same_error_before_the_deadline(transport, failure, error, texts):
    cfg = shard_config("moe", transport, dict(world_size=2, expert=2), dict(tensor=2))
    limit_s = 8.0 if failure == "late" else 100.0
    cfg = replace(
        cfg,
        engine=replace(cfg.engine, deadline_scale=limit_s / UPDATE_S),
        weight_sync=replace(cfg.weight_sync, bucket_bytes=100_000),
    )
    ranks = run_ranks(2, fail_shards, cfg, failure, deadline_s=300)
    for raised, message, seconds, _ in ranks:
        assert raised == error, message
        assert all(text in message for text in texts), message
        assert seconds < 50.0
    assert ranks[0][3].count("resume") == 1  # the engines stay paused after the failure
