"""FP8 parameters are published as they are: their bytes, in every layout and by every way, and never quantized again.

Weights are powers of two with a sign, so that the same numbers have two forms in FP8: bytes as quantizing makes them,
and half of each byte's value with twice the scale. Parameters hold the second form. Whoever quantizes what they mean
publishes the first.
"""

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.weight_sync.pack import gather_all
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.exports import MODELS, Fleet, build, config, layout_name
from tests.helpers.fake_fp8_tensor import Fp8Tensor
from tests.helpers.hf_parts import hf_names_of
from tests.helpers.shards import Replica

WIDE = replace(MODELS["dense"], head_dim=128, ffn_hidden_size=512)
FUSED = "decoder.layers.1.mlp.linear_fc1.weight"


def _config(kind: str, layout: dict[str, int], transport: str = "ipc") -> RunConfig:
    cfg = replace(config("dense", layout), model=WIDE) if kind == "wide" else config(kind, layout)
    return replace(cfg, engine=replace(cfg.engine, tensor=1), weight_sync=replace(cfg.weight_sync, transport=transport))


@dataclass
class _Policy:
    cfg: RunConfig
    parallel: Parallel
    tensors: dict[str, torch.Tensor]

    def named_tensors(self):
        return self.tensors.items()


def _as_powers(x: torch.Tensor) -> torch.Tensor:
    exponent = x.float().abs().clamp_min(2.0**-20).log2().floor().clamp(-9, -4)
    return (x.float().sign() * exponent.exp2()).to(x.dtype)


def _halved(x: torch.Tensor) -> Fp8Tensor:
    data, _scale = quantize_weight(x, "pow2")
    made = Fp8Tensor.of(x, "pow2")
    made._rowwise_data = (data.float() / 2).to(torch.float8_e4m3fn).view(torch.uint8)
    made._rowwise_scale_inv = made._rowwise_scale_inv * 2
    return made


def _policy(cfg: RunConfig, *, is_fp8: bool) -> _Policy:
    built, tensors = build(cfg), {}
    table = LayerTable.build(cfg.model, cfg.precision)
    for name, tensor in built.named_tensors():
        value = _as_powers(tensor.detach()) if tensor.ndim == 2 else tensor.detach().clone()
        in_fp8 = is_fp8 and all(table.trainer_format(n).is_quantized for n in hf_names_of(name, cfg.model))
        tensors[name] = _halved(value) if in_fp8 else value
    return _Policy(cfg, built.parallel, tensors)


def _publish(cfg: RunConfig, is_fp8: bool, nan: str = "") -> dict[str, torch.Tensor]:
    """Runs on a rank: on rank 0, the tensors of the only engine worker."""
    policy = _policy(cfg, is_fp8=is_fp8)
    if nan and policy.parallel.rank == policy.parallel.world_size - 1:
        policy.tensors[nan]._rowwise_data[3, 5] = 0xFF
    client = Replica(cfg)
    exporter = WeightExporter(policy, Fleet(client) if policy.parallel.rank == 0 else None, PlanInputs.of(cfg))
    exporter.publish(1)
    exporter.publish(2)
    exporter.close()
    return client.workers[0].held if policy.parallel.rank == 0 else {}


CASES = [
    ("wide", dict(world_size=1), "ipc"),
    ("wide", dict(world_size=2, tensor=2), "ipc"),
    ("moe", dict(world_size=2, expert=2), "gloo"),
    ("moe", dict(world_size=2, pipeline=2), "ipc"),
    ("latent", dict(world_size=1), "ipc"),  # with a matrix whose last block of rows is cut short
    ("latent", dict(world_size=2, pipeline=2), "gloo"),
]


@functools.cache
def _quantized_once(kind: str) -> dict[str, torch.Tensor]:
    """Quantized BF16 parameters of the same values, from one rank."""
    return run_ranks(1, _publish, _config(kind, dict(world_size=1)), False)[0]


@pytest.mark.parametrize(("kind", "layout", "transport"), CASES, ids=layout_name)
def test_bytes_are_those_of_the_parameters(kind, layout, transport):
    cfg = _config(kind, layout, transport)
    ours = run_ranks(layout["world_size"], _publish, cfg, True)[0]
    plain = _quantized_once(kind)
    in_fp8 = {name for name, tensor in plain.items() if tensor.dtype == torch.float8_e4m3fn}
    assert ours.keys() == plain.keys() and in_fp8
    for name, tensor in plain.items():
        if name in in_fp8:
            assert torch.equal(ours[name].float() * 2, tensor.float()), name
        elif name.removesuffix("_scale_inv") in in_fp8:
            assert torch.equal(ours[name], tensor * 2), name
        else:
            assert torch.equal(ours[name], tensor), name
    assert PlanInputs.of(cfg).plan.num_bytes == PlanInputs.of(_config(kind, dict(world_size=1))).plan.num_bytes


@pytest.mark.parametrize("transport", ["ipc", "gloo"])
def test_a_nan_among_the_bytes_is_named(transport):
    cfg = _config("wide", dict(world_size=2, tensor=2), transport)
    with pytest.raises(RankError, match=r"NaN.*: model\.layers\.1\.mlp\.gate_proj\.weight"):
        run_ranks(2, _publish, cfg, True, FUSED)


def test_parts_that_cut_blocks_are_refused_by_name():
    with pytest.raises(RankError, match=r"k_proj\.weight: its parts on trainer ranks cut blocks of 128"):
        run_ranks(2, _publish, config("dense", dict(world_size=2, tensor=2)), True)


def _saved_pieces(cfg: RunConfig, is_fp8: bool) -> dict[str, torch.Tensor]:
    from megatron_fp8rl.weight_sync.save_hf import plan_whole, prepare_gathers

    policy = _policy(cfg, is_fp8=is_fp8)
    gathers = prepare_gathers(policy, plan_whole(policy), None)
    gather_all(gathers)
    return {gather.transfer.name: gather.whole for gather in gathers}


def test_saved_weights_are_the_values_of_the_bytes():
    cfg = _config("wide", dict(world_size=1))
    ours, plain = (run_ranks(1, _saved_pieces, cfg, is_fp8)[0] for is_fp8 in (True, False))
    assert ours.keys() == plain.keys()
    for name, tensor in plain.items():
        assert ours[name].dtype == torch.bfloat16 and torch.equal(ours[name], tensor), name
