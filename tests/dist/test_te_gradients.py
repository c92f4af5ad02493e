"""Transformer Engine's linears in Megatron-Core's gradient buffers and optimizer, with a stand-in for its kernels."""

from dataclasses import replace

import pytest

from megatron_fp8rl.config import OptimConfig, PrecisionConfig
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.trainer.model import build as model
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.family_configs import GEMMA3
from tests.helpers.training import DENSE, MOE, assert_same_metrics, continue_training, run_config, weight_pieces

PRECISIONS = {
    "blockwise": PrecisionConfig(trainer="blockwise", params="fp32", bf16_last_layers=1),
    "delayed": PrecisionConfig(trainer="delayed", params="fp32"),
}


def _train_twice(cfg) -> list:
    """Runs on a rank: (metrics, weights) on emulated kernels, then on Transformer Engine's, and the latter's calls."""
    from tests.helpers import fake_te

    parallel, runs = Parallel.init(cfg.parallel, deadline_s=60), []
    with pytest.MonkeyPatch.context() as patch:
        for kernels in ("emulated", "te"):
            if kernels == "te":
                fake_te.install(patch)
                patch.setattr(model, "local_hardware", lambda: Hardware("hopper"))
            policy = Policy.build(cfg, parallel)
            metrics, _ = continue_training(policy, 3)
            runs.append((metrics, {name: piece for name, (_, piece) in weight_pieces(policy).items()}))
    parallel.barrier("done")
    return [*runs, set(fake_te.calls["gemm"]), len(fake_te.calls["quantized"])]


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize(
    "model, layout, overlap",
    [
        (DENSE, {}, False),
        (DENSE, {"world_size": 2, "tensor": 2}, True),
        (MOE, {}, True),
        (MOE, {"world_size": 2, "expert": 2}, False),
        (GEMMA3, {}, False),
    ],
    ids=["dense", "dense-tp2-overlap", "moe-overlap", "moe-ep2", "gemma3"],
)
def test_training_is_that_of_the_emulation(name, model, layout, overlap):
    optim = OptimConfig(lr=2e-3, eps=1e-2, weight_decay=0.1, overlap_grad_reduce=overlap)
    cfg = replace(run_config(model=model, optim=optim, max_tokens=48, **layout), precision=PRECISIONS[name])
    for emulated, ours, products, num_quantized in run_ranks(layout.get("world_size", 1), _train_twice, cfg):
        assert {"TN", "NN", "NT"} <= products and num_quantized
        assert ("grouped NT" in products) == model.is_moe
        assert_same_metrics(emulated[0], ours[0])
        for key, weight in emulated[1].items():
            factor = weight + (model is GEMMA3 and "norm" in key)  # its norms multiply by 1 + weight
            assert (ours[1][key] - weight).norm() < 1e-2 * factor.norm(), key
