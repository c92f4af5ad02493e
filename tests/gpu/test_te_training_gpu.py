"""Tiny policies trained on Transformer Engine's kernels, on one GPU; -s shows decibels and losses.

What a recipe multiplies is compared linear by linear, from equal operands. Whole runs are only held to what emulated
runs differ by among themselves: in a model this small rounding moves the norm of the first gradient by a tenth.
"""

import statistics
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ModelConfig, OptimConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.precision.hardware import installed_packages
from tests.helpers import products
from tests.helpers.models import small_model
from tests.helpers.training import alone, continue_training, run_config
from tests.tolerances import TE_DECIBELS, TE_DECIBELS_FP32_SCALES, TINY_BF16_LOSS, TINY_FP8_LOSS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine"),
]

MOE = small_model((4, 128, 4, 2, 64, 62), experts=(4, 2, 128), max_position_embeddings=128, initializer_range=0.08)
DENSE = replace(MOE, family="qwen3", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0, ffn_hidden_size=256)
OPTIM = OptimConfig(lr=3e-3, eps=1e-2)
RECIPES = {
    "bf16": PrecisionConfig(trainer="bf16", exact=False),
    "blockwise": PrecisionConfig(trainer="blockwise", exact=False),
    "blockwise fp32 e5m2": PrecisionConfig(trainer="blockwise", scales="fp32", gradients="e5m2", exact=False),
    "blockwise edges": PrecisionConfig(trainer="blockwise", bf16_first_layers=1, bf16_last_layers=1, exact=False),
    "tensorwise": PrecisionConfig(trainer="tensorwise", exact=False),
    "delayed": PrecisionConfig(trainer="delayed", gradients="e5m2", exact=False),
}


def _cfg(model: ModelConfig, precision: PrecisionConfig, *, overlap: bool = False) -> RunConfig:
    cfg = run_config(model=model, optim=replace(OPTIM, overlap_grad_reduce=overlap))
    return replace(cfg, precision=precision)


def _policy(cfg: RunConfig, parallel, kernels: str):
    from megatron_fp8rl.trainer.policy import Policy

    return Policy.build(replace(cfg, precision=replace(cfg.precision, kernels={"trainer": kernels})), parallel)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_every_product_of_an_update_is_that_of_the_recipe(model):
    """Three updates, so that weights that were quantized before the last one, and histories, would show."""
    with alone(_cfg(model, RECIPES["bf16"])) as parallel:
        for name, precision in RECIPES.items():
            if precision.trainer == "bf16" and not model.is_moe:
                continue  # Megatron-Core multiplies these linears itself
            cfg = _cfg(model, replace(precision, kernels={"linears": "te", "experts": "te"}))
            policy = _policy(cfg, parallel, "auto")
            for update in range(3):
                actual = products.of_an_update(policy)
                columns = list(zip(*actual.values(), strict=True))
                typical = [statistics.median(column) for column in columns]
                shown = "  ".join(
                    f"{what} {middle:.1f}, least {min(column):.1f}"
                    for what, middle, column in zip(products.PRODUCTS, typical, columns, strict=True)
                )
                print(f"\nTE products {'moe' if model.is_moe else 'dense'} {name:20s} update {update} dB: {shown}")
                least = {linear: min(ratios) for linear, ratios in actual.items()}
                limit = TE_DECIBELS_FP32_SCALES if precision.scales == "fp32" else TE_DECIBELS
                wrong = {linear: ratio for linear, ratio in least.items() if not ratio > limit}
                assert not wrong, f"{name}, update {update}: {wrong}"


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_runs_end_where_emulated_runs_do(model):
    cases = [(name, _cfg(model, precision)) for name, precision in RECIPES.items()]
    cases.append(("blockwise overlap", _cfg(model, RECIPES["blockwise"], overlap=True)))
    with alone(cases[0][1]) as parallel:
        for name, cfg in cases:
            runs = [continue_training(_policy(cfg, parallel, kernels), 4)[0] for kernels in ("auto", "emulated")]
            losses = [[step["train/loss/mean"] for step in run] for run in runs]
            norms = [[step["train/grad_norm/max"] for step in run] for run in runs]
            kind = "moe" if model.is_moe else "dense"
            print(
                f"\nTE train {kind} {name:20s} loss {[round(x, 4) for x in losses[0]]} emulated "
                f"{[round(x, 4) for x in losses[1]]} norm {[round(x, 3) for x in norms[0]]} "
                f"emulated {[round(x, 3) for x in norms[1]]}"
            )
            first, later = TINY_BF16_LOSS if cfg.precision.trainer == "bf16" else TINY_FP8_LOSS
            assert losses[0][0] == pytest.approx(losses[1][0], abs=first), name
            assert losses[0][1:] == pytest.approx(losses[1][1:], abs=later), name


def _save_and_resume(cfg: RunConfig, folder: str) -> dict:
    """Differences of a resumed policy's state to the saved one, and the next steps of both."""
    from megatron_fp8rl.trainer import checkpoint
    from tests.helpers.training import make_batch

    with alone(cfg) as parallel:
        first = _policy(cfg, parallel, "auto")
        continue_training(first, 2)
        path = checkpoint.save(folder, 2, first, {})
        second = _policy(cfg, parallel, "auto")
        # A pass before the restore fills the caches of quantized weights with those that are about to go.
        second.with_old_logprobs(make_batch(cfg, 0))
        checkpoint.restore(path, second)
        logprobs = [
            torch.cat([mb.old_logprobs_T.cpu() for mb in policy.with_old_logprobs(make_batch(cfg, 0)).microbatches])
            for policy in (first, second)
        ]
        states = [dict(policy.models[0].state_dict()) for policy in (first, second)]
        differing = [
            name
            for name, tensor in states[0].items()
            if isinstance(tensor, torch.Tensor) and not torch.equal(tensor, states[1][name])
        ]
        metrics = [continue_training(policy, 1)[0][0] for policy in (first, second)]
    return {
        "differing": differing,
        "logprobs": float((logprobs[0] - logprobs[1]).abs().max()),
        "losses": [step["train/loss/mean"] for step in metrics],
        "norms": [step["train/grad_norm/max"] for step in metrics],
        "history": sum(name.endswith("fp8.history") for name in states[0]),
    }


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_delayed_scaling_resumes_exactly(model, tmp_path):
    actual = _save_and_resume(_cfg(model, RECIPES["delayed"]), str(tmp_path))
    assert actual["history"] and not actual["differing"]
    # Expert outputs are summed by atomic additions, in any order.
    assert actual["logprobs"] == 0.0 if not model.is_moe else actual["logprobs"] < 0.1
    assert actual["losses"][0] == pytest.approx(actual["losses"][1], rel=1e-4, abs=1e-5)
    assert actual["norms"][0] == pytest.approx(actual["norms"][1], rel=1e-2)
