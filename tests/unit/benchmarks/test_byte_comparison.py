"""The comparison behind benchmarks/same_bytes.py finds what is the same, and names what is not."""

from dataclasses import replace

import pytest
import torch

from benchmarks import byte_comparison, same_bytes
from benchmarks.light_policy import draw
from megatron_fp8rl.config import EngineConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.names import registry
from model_configs import tiny

CPU = torch.device("cpu")


def config(trainer: str, engine_tensor: int = 2, **model) -> RunConfig:
    return RunConfig(
        name="test",
        model=replace(tiny.tiny_qwen3_moe().model, **model),
        parallel=same_bytes.TRAINERS[trainer],
        precision=PrecisionConfig(),
        engine=EngineConfig(tensor=engine_tensor),
    )


def held_by_an_engine(cfg: RunConfig) -> list[list[dict]]:
    """The reports of one correct replica's workers."""
    workers = [{"rank": rank, "digests": {}} for rank in reversed(range(cfg.engine.tensor))]
    for name, transfers in byte_comparison.groups(cfg):
        whole = dict(registry.to_hf(name, draw(registry.weight(name, cfg.model), cfg, CPU), cfg.model))
        for transfer in transfers:
            tensors = {transfer.name: whole[transfer.name]}
            if transfer.is_fp8:
                pair = quantize_weight(whole[transfer.name], cfg.precision.scales)
                tensors = dict(zip((transfer.name, transfer.scale_name), pair))
            for worker in workers:
                for tensor_name, tensor in tensors.items():
                    kept = transfer.slices[worker["rank"]]
                    first, end = kept if tensor_name == transfer.name else transfer.blocks(kept)
                    part = tensor.narrow(transfer.axis, first, end - first)
                    (worker["digests"][tensor_name],) = byte_comparison.worker_digests([part])
    return [workers]


def fake_te(parameter: torch.Tensor):
    """Bytes of the definition for whole blocks, as Transformer Engine's."""
    if any(n % 128 for n in parameter.shape):
        return None
    data, scale = quantize_weight(parameter, "pow2")
    return data.view(torch.uint8), scale


def compare(cfg: RunConfig, held, te=fake_te) -> byte_comparison.Tally:
    total = byte_comparison.Tally()
    for rank in range(cfg.parallel.world_size):
        total.add(byte_comparison.compare(cfg, held, rank, CPU, te))
    return total


@pytest.mark.parametrize("trainer", ["single", "tp2", "ep2", "tp2ep2", "pp2"])
def test_everything_is_the_same_in_every_layout(trainer):
    cfg = config(trainer)
    actual = compare(cfg, held_by_an_engine(cfg))
    num_fp8 = 2 * (4 + 3 * cfg.model.num_experts)
    assert actual.fp8 == actual.equal_to_definition == actual.equal_to_te == num_fp8
    assert actual.tensors == actual.equal_in_engine == len(registry.hf_tensors(cfg.model))
    assert not actual.exceptions


def test_a_wrong_slice_of_one_worker_is_named():
    cfg = config("single")
    held = held_by_an_engine(cfg)
    name = "model.layers.1.self_attn.o_proj.weight"
    held[0][0]["digests"][f"{name}_scale_inv"] = "0" * 16
    del held[0][1]["digests"]["model.norm.weight"]
    actual = compare(cfg, held)
    assert actual.tensors - actual.equal_in_engine == 2
    assert actual.exceptions == {byte_comparison.ENGINE_DIFFERS: [name, "model.norm.weight"]}


def test_other_bytes_of_transformer_engine_are_named():
    def damaged(parameter):
        data, scale = fake_te(parameter)
        if parameter.shape == (512, 128):  # gate and up of an expert, fused
            data[300, 5] ^= 1  # in the second half: up
        return data, scale

    cfg = config("single")
    actual = compare(cfg, held_by_an_engine(cfg), damaged)
    names_found = actual.exceptions.pop(byte_comparison.TE_DIFFERS)
    assert not actual.exceptions and actual.bytes_unlike_te == len(names_found) == 16
    assert all(name.endswith("up_proj.weight") for name in names_found)


def test_parts_that_are_not_whole_blocks_are_explained():
    # A rank holds one group of 64 queries, keys and values: 192 rows.
    cfg = config("tp2", 1, head_dim=64, num_key_value_heads=2, num_attention_heads=2)
    actual = compare(cfg, held_by_an_engine(cfg))
    assert actual.equal_in_engine == actual.tensors and actual.fp8 > actual.equal_to_te
    assert set(actual.exceptions) == {byte_comparison.NOT_BLOCKS}


def test_rows_become_a_table_with_numbered_reasons():
    cfg = config("single")
    tally = compare(cfg, held_by_an_engine(cfg))
    keys = {"model": "tiny_moe", "layers": 0, "scales": "fp32", "trainer": "single", "engine": "tp2"}
    keys |= {"transport": "auto", "device": "x", "run": "A"}
    tally.exceptions[byte_comparison.TE_SCALES] = ["b", "a"]
    row = keys | same_bytes.row_of(cfg, tally, has_te=True)
    assert row["exceptions"] == {byte_comparison.TE_SCALES: [2, "a", "b"]}
    benchmark = same_bytes.SameBytes()
    assert "| tiny_moe, 2 layers |" in benchmark.table([row]) and benchmark.line(row)["exceptions"] == "2 (1)"
    assert f"(1) {byte_comparison.TE_SCALES}. For example a." in benchmark.notes([row])
    wrong = row | {"exceptions": {byte_comparison.KERNEL_DIFFERS: [1, "a"]}}
    assert not benchmark.is_wrong(row) and benchmark.is_wrong(wrong)
