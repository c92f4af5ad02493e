"""The stand-in of benchmarks holds what the trainer's model holds, the same numbers in every layout, and publishes."""

from dataclasses import replace

import pytest
import torch

from benchmarks.light_policy import light_policy
from megatron_fp8rl.config import ParallelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.trainer.model.build import build_chunks, named_global_tensors
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.exports import MODELS, config

LAYOUTS = [
    ("tied", dict(world_size=2, pipeline=2)),
    ("dense", dict(world_size=2, pipeline=2, virtual_stages=2)),
    ("moe", dict(world_size=4, tensor=2, pipeline=2, expert=2)),
    ("latent", dict(world_size=2, tensor=2, expert=2)),
]


def _built_and_drawn(kind: str, layout: dict[str, int]):
    """(shapes and types of the model's tensors, those of the stand-in, the stand-in's tensors and ranks)."""
    cfg = config(kind, layout)
    parallel = Parallel.init(cfg.parallel)
    try:
        built = {n: (t.shape, t.dtype) for n, t in named_global_tensors(build_chunks(cfg, parallel), parallel)}
        policy = light_policy(cfg, parallel)
        drawn = {n: (t.shape, t.dtype) for n, t in policy.named_tensors()}
        ranks = (parallel.tp_size, parallel.tp_rank, parallel.etp_size, parallel.etp_rank)
        return built, drawn, policy.tensors, ranks
    finally:
        parallel.close()


@pytest.mark.parametrize("kind, layout", LAYOUTS)
def test_every_rank_holds_the_pieces_of_its_model(kind, layout):
    whole = run_ranks(1, _built_and_drawn, kind, dict(world_size=1))[0][2]
    ranks = run_ranks(layout["world_size"], _built_and_drawn, kind, layout)
    for built, drawn, pieces, (tp, tp_rank, etp, etp_rank) in ranks:
        # A tied output layer is the embedding's copy, which nobody publishes.
        tied = {"output_layer.weight"} if MODELS[kind].tie_embeddings else set()
        assert drawn == {name: actual for name, actual in built.items() if name not in tied}
        for name, piece in pieces.items():
            size, rank = (etp, etp_rank) if registry.is_expert(name) else (tp, tp_rank)
            assert torch.equal(piece, registry.shard(name, whole[name], MODELS[kind], size, rank)), name


def test_an_update_changes_every_number_in_place():
    cfg = replace(config("moe", {}), parallel=ParallelConfig())
    parallel = Parallel.init(cfg.parallel)
    try:
        policy = light_policy(cfg, parallel)
        before = {name: (t, t.clone()) for name, t in policy.named_tensors()}
        policy.update()
        for name, (tensor, old) in before.items():
            assert torch.equal(tensor.view(torch.uint8), (-old).view(torch.uint8)), name
    finally:
        parallel.close()
