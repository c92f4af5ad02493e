"""Which linears of the built model are FP8, what BF16 edges compute, and that amax histories do not see the layout."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.kernels.blockwise import dequantize_weight, quantize_weight
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.trainer.model.build import build_chunks, finish_fp8_step, named_global_parameters, named_linears
from megatron_fp8rl.trainer.model.linear import quantized
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.families import MODELS as FAMILIES
from tests.helpers.hf_parts import hf_names_of, to_hf
from tests.helpers.models import small_model
from tests.tolerances import AMAX_ACROSS_LAYOUTS

MOE = small_model((4, 128, 4, 2, 128, 64), experts=(4, 2, 128), initializer_range=0.1)
DENSE = replace(MOE, family="qwen3", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0, ffn_hidden_size=256)


def _run(model: ModelConfig, precision: PrecisionConfig, **layout) -> RunConfig:
    layout = {"world_size": 1, **layout}
    return RunConfig(name="precision", model=model, precision=precision, parallel=ParallelConfig(**layout))


def _build(cfg: RunConfig):
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    return build_chunks(cfg, parallel), parallel


def _fp8_weights(cfg: RunConfig) -> set[str]:
    """Hugging Face names of the weights with FP8 linears, by the recipes of the modules."""
    chunks, parallel = _build(cfg)
    owners = {
        id(parameter): module
        for chunk in chunks
        for module in chunk.modules()
        for parameter in module.parameters(recurse=False)
    }
    return {
        hf_name
        for name, parameter in named_global_parameters(chunks, parallel)
        if getattr(owners[id(parameter)], "recipe", None) is not None and parameter.ndim == 2
        for hf_name in hf_names_of(name, cfg.model)
    }


@pytest.mark.parametrize(
    "model, trainer, first, last",
    [
        (MOE, "blockwise", 0, 0),
        (MOE, "delayed", 1, 2),
        (MOE, "bf16", 0, 0),
        (DENSE, "blockwise", 0, 0),
        (DENSE, "delayed", 1, 2),
        (FAMILIES["deepseek_v3"], "blockwise", 0, 1),
        (FAMILIES["deepseek_v3-direct-queries"], "delayed", 1, 0),
        (FAMILIES["glm4_moe"], "blockwise", 0, 0),
        (FAMILIES["mixtral"], "blockwise", 0, 0),
    ],
    ids=lambda value: value.family if isinstance(value, ModelConfig) else None,
)
def test_the_layer_table_decides_which_linears_are_fp8(model, trainer, first, last):
    precision = PrecisionConfig(trainer=trainer, bf16_first_layers=first, bf16_last_layers=last)
    table = LayerTable.build(model, precision)
    actual = run_ranks(1, _fp8_weights, _run(model, precision))[0]
    assert actual == {name for name in registry.hf_tensors(model) if table.trainer_format(name).is_quantized}
    layers = {int(name.split(".")[2]) for name in actual}
    assert layers == (set() if trainer == "bf16" else set(range(first, model.num_layers - last)))
    assert not any(word in name for name in actual for word in ("norm", "mlp.gate.", "embed", "lm_head"))


def _packed(seed: int, lengths=(8, 24, 16)):
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return tokens, PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _logits(cfg: RunConfig) -> torch.Tensor:
    chunks, _ = _build(cfg)
    tokens, packed = _packed(0)
    with torch.no_grad():
        return chunks[0](tokens[None], None, None, packed_seq_params=packed)


@pytest.mark.parametrize("trainer", ["blockwise", "delayed"])
def test_a_model_of_edge_layers_is_the_bf16_model(trainer):
    edges = PrecisionConfig(trainer=trainer, bf16_first_layers=2, bf16_last_layers=2)
    expected = run_ranks(1, _logits, _run(MOE, PrecisionConfig(trainer="bf16")))[0]
    assert torch.equal(run_ranks(1, _logits, _run(MOE, edges))[0], expected)
    fp8 = run_ranks(1, _logits, _run(MOE, PrecisionConfig(trainer=trainer)))[0]
    assert 0.0 < (fp8 - expected).abs().mean() < 0.1 * expected.std()


def _histories(cfg: RunConfig, recompute: bool = False) -> dict[str, torch.Tensor]:
    """Newest entries of the amax histories after a step, by global name of the weight; experts one by one."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    chunks = build_chunks(cfg, parallel)
    for _, module in named_linears(chunks, parallel):
        # With a history, scales are the same in every layout, and so are roundings to FP8.
        module.history.history[0] = torch.tensor([8.0, 0.5, 0.5])[:, None]
    packs = [_packed(seed) for seed in range(4)]
    for tokens, packed in packs[parallel.dp_rank :: parallel.dp_size]:
        with torch.no_grad():  # as log-probabilities of other data would: no trace
            chunks[0](tokens.flip(0)[None] * 0, None, None, packed_seq_params=packed)
        logits = chunks[0](tokens[None], None, None, packed_seq_params=packed)
        gather_from_tensor_model_parallel_region(logits).float().logsumexp(-1).sum().backward()
    finish_fp8_step(chunks, parallel)
    result = {}
    for weight_names, module in named_linears(chunks, parallel):
        newest = module.history.history[0]  # [3, experts of this rank]
        result |= {name: newest[:, index].clone() for index, name in enumerate(weight_names)}
    return result


def test_amax_histories_do_not_depend_on_the_layout_or_recomputation():
    precision = PrecisionConfig(trainer="delayed", params="fp32")
    expected = run_ranks(1, _histories, _run(MOE, precision))[0]
    assert len(expected) == 4 * (2 + 2 * MOE.num_experts)
    layouts = [dict(world_size=2), dict(world_size=2, expert=2), dict(world_size=2, tensor=2, expert=2)]
    runs = [_run(MOE, precision, **layout) for layout in layouts]
    base = _run(MOE, precision)
    runs.append(replace(base, optim=replace(base.optim, recompute="full")))
    for cfg in runs:
        for rank in run_ranks(cfg.parallel.world_size, _histories, cfg):
            for name, newest in rank.items():
                assert newest[1] == expected[name][1], f"{name}: weight"
                if name.startswith("decoder.layers.0.self_attention.linear_qkv"):
                    assert newest[0] == expected[name][0], "no FP8 came before this input"
                alone = expected[name].tolist()
                message = f"{name}: input, weight, gradient {newest.tolist()} in {cfg.parallel}, {alone} alone"
                torch.testing.assert_close(newest, expected[name], **AMAX_ACROSS_LAYOUTS, msg=message)


def _held_and_used(cfg: RunConfig) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(Hugging Face name, weight, operand of the FP8 product) of this rank's q, k and v projections."""
    chunks, parallel = _build(cfg)
    identity = torch.eye(cfg.model.hidden_size, dtype=torch.bfloat16)  # exact in FP8, so the product is the weight
    layout = (parallel.tp_size, parallel.tp_rank)
    result = []
    for (name, *_), module in named_linears(chunks, parallel):
        if "linear_qkv" in name:
            used = (
                module._forward_impl(identity, module.weight, sequence_parallel=False, allreduce_dgrad=False, bias=None)
                .detach()
                .T
            )
            assert torch.equal(used, quantized(module, identity, module.weight).detach().T)
            pairs = zip(
                to_hf(name, module.weight.detach(), cfg.model, *layout),
                to_hf(name, used, cfg.model, *layout),
                strict=True,
            )
            result += [(hf_name, held, used_part) for (hf_name, held), (_, used_part) in pairs]
    return result


@pytest.mark.parametrize("head_dim, kv_heads, tensor", [(128, 2, 1), (64, 2, 1), (32, 4, 1), (64, 4, 2), (96, 4, 1)])
def test_the_trainer_multiplies_by_what_the_exporter_sends(head_dim, kv_heads, tensor):
    """Includes heads smaller than FP8 blocks, where q, k and v would share blocks in Megatron-Core's order."""
    model = replace(DENSE, num_attention_heads=8, head_dim=head_dim, num_key_value_heads=kv_heads)
    for pairs in run_ranks(tensor, _held_and_used, _run(model, PrecisionConfig(), world_size=tensor, tensor=tensor)):
        assert len(pairs) == 3 * model.num_layers
        for hf_name, held, used in pairs:
            sent = dequantize_weight(*quantize_weight(held, "pow2"))
            assert torch.equal(used.float(), sent), hf_name
