"""Training with linears on DeepGEMM, as a CPU computes them: against the linears' own kernels, in several layouts."""

from dataclasses import replace

import pytest

from megatron_fp8rl.config import MlaConfig, OptimConfig, PrecisionConfig
from megatron_fp8rl.trainer.model import linear_deep_gemm
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.models import small_model
from tests.helpers.training import (
    assert_equal_gradients,
    assert_same_training,
    continue_training,
    first_gradients,
    run_config,
    weight_pieces,
)

PLAIN = small_model((2, 256, 4, 2, 128, 62), ffn=512, max_position_embeddings=128, initializer_range=0.03)
MODELS = {
    "dense": PLAIN,
    # Heads of half a block, whose q, k and v have blocks in another order than rows, and a bias.
    "bias": replace(
        PLAIN, family="qwen2", qkv_bias=True, qk_norm=False, num_attention_heads=8, num_key_value_heads=4, head_dim=64
    ),
    "moe": small_model(
        (2, 256, 4, 2, 128, 62), experts=(4, 2, 256), max_position_embeddings=128, initializer_range=0.03
    ),
    # Its kv_a_proj_with_mqa has 192 rows, which are left to the other kernels; shared experts are linears, too.
    "latent": replace(
        PLAIN,
        family="deepseek_v3",
        qk_norm=False,
        num_key_value_heads=4,
        first_dense_layers=1,
        num_experts=4,
        experts_per_token=2,
        moe_ffn_hidden_size=128,
        num_shared_experts=1,
        mla=MlaConfig(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128),
    ),
}


def _config(model: str, layout: dict, precision: dict | None = None, **optim):
    settings = OptimConfig(**{"lr": 1e-3, "eps": 1e-2, "weight_decay": 0.1} | optim)
    cfg = run_config(model=MODELS[model], optim=settings, max_tokens=96, **layout)
    return replace(cfg, precision=PrecisionConfig(**precision or {}))


def _train_twice(cfg) -> list:
    """Runs on a rank: (metrics, old log-probabilities, weights) with the linears' kernels, and with DeepGEMM's."""
    parallel, runs, calls = Parallel.init(cfg.parallel, deadline_s=60), [], {"linear": 0, "mlp": 0, "multiply_dense": 0}
    with pytest.MonkeyPatch.context() as patch:

        def count(module, name):
            real = getattr(module, name)

            def counted(*args):
                calls[name] += 1
                return real(*args)

            patch.setattr(module, name, counted)

        for module, name in (
            (linear_deep_gemm, "linear"),
            (linear_deep_gemm, "mlp"),
            (linear_deep_gemm, "multiply_dense"),
        ):
            count(module, name)
        for kind in ("te", "deep_gemm"):
            policy = Policy.build(
                replace(cfg, precision=replace(cfg.precision, kernels=cfg.precision.kernels | {"linears": kind})),
                parallel,
            )
            metrics, old = continue_training(policy, 3)
            runs.append((metrics, old, weight_pieces(policy)))
            if kind == "te":
                assert not any(calls.values())
    parallel.barrier("done")
    return [*runs, calls]


TP2 = {"world_size": 2, "tensor": 2}


@pytest.mark.parametrize(
    "model, layout, precision, optim",
    [
        ("dense", {}, {"scales": "fp32"}, {}),
        ("dense", TP2, {"bf16_last_layers": 1}, {"overlap_grad_reduce": True}),
        ("bias", {}, {}, {"recompute": "full"}),
        ("bias", TP2, {}, {"recompute": "selective"}),
        ("moe", {"world_size": 2, "expert": 2}, {"kernels": {"experts": "deep_gemm"}}, {"overlap_grad_reduce": True}),
        ("latent", TP2, {}, {}),
    ],
    ids=["fp32-scales", "tp2-edges-overlap", "bias-recompute", "bias-tp2-recompute", "moe-ep2", "latent-tp2"],
)
def test_training_is_that_of_the_linears(model, layout, precision, optim):
    ranks = run_ranks(layout.get("world_size", 1), _train_twice, _config(model, layout, precision, **optim))
    for plain, ours, calls in ranks:
        assert calls["linear"] and bool(calls["mlp"]) == (model != "moe")
        assert_same_training(plain, ours)
        for key, (_, weight) in plain[2].items():
            limit = 0.1 if key.endswith("bias") else 1e-2  # biases began at zero, and are what the updates made of them
            assert (ours[2][key][1] - weight).float().norm() < limit * weight.float().norm(), key


@pytest.mark.parametrize("layout", [{}, TP2], ids=["one", "tp2"])
def test_recompute_changes_no_bit_of_a_gradient(layout):
    ranks = []
    for recompute in ("none", "selective"):
        cfg = _config("dense", layout, {"kernels": {"linears": "deep_gemm"}}, recompute=recompute)
        ranks.append(run_ranks(cfg.parallel.world_size, first_gradients, cfg))
    assert_equal_gradients(*ranks)
