"""What the doctor says of weights, gradients and optimizer states, against what Megatron-Core allocates on ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.preflight import trainer_memory
from megatron_fp8rl.preflight.memory import GPUS
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, MOE, continue_training, run_config

GROUPED = replace(MOE, hidden_size=128, moe_ffn_hidden_size=256)
NO_EXPERTS = {
    "family": "qwen3",
    "num_experts": 0,
    "experts_per_token": 0,
    "moe_ffn_hidden_size": 0,
    "ffn_hidden_size": 256,
}
FP8 = {"trainer": "blockwise", "kernels": {"experts": "deep_gemm"}}
ALL = {"kernels": {"experts": "deep_gemm", "linears": "deep_gemm"}, "bf16_last_layers": 1}


def _measure(cfg):
    """On a rank: (pipeline rank, bytes of weights, of gradients without weights inside, of masters and moments)."""
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    continue_training(policy, 1)
    parameters = [parameter for model in policy.models for parameter in model.parameters()]

    of_weights, of_gradients = (
        {t.untyped_storage().data_ptr() for t in tensors} for tensors in (parameters, [p.main_grad for p in parameters])
    )

    def is_in_both(t) -> bool:
        return t.untyped_storage().data_ptr() in of_weights & of_gradients

    written = sum(p.nbytes for p in parameters if is_in_both(p.main_grad))
    optimizer = policy.optimizer.megatron
    states = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                moments = [t for t in part.optimizer.state[master].values() if torch.is_tensor(t) and t.numel() > 1]
                states += sum(t.numel() * t.element_size() for t in (master, *moments))
    return (
        policy.parallel.pp_rank,
        sum(p.nbytes for p in parameters if not is_in_both(p)) + written,
        sum(p.main_grad.nbytes for p in parameters) - written,
        states,
    )


@pytest.mark.parametrize(
    ("model", "layout", "precision"),
    [
        pytest.param(MOE, {"tensor": 2, "pipeline": 2}, {}, id="tp2-pp2"),
        pytest.param(MOE, {"tensor": 2, "expert": 2, "expert_tensor": 2}, {}, id="tp2-ep2-etp2"),
        pytest.param(GROUPED, {"expert": 2, "pipeline": 2}, FP8, id="ep2-pp2-fp8"),
        pytest.param(GROUPED, {"expert": 2, "tensor": 2}, FP8 | ALL, id="tp2-ep2-fp8"),
        pytest.param(replace(GROUPED, **NO_EXPERTS), {"pipeline": 2}, FP8 | ALL, id="pp2-dp2-fp8"),
        pytest.param(replace(DENSE, tie_embeddings=True), {"pipeline": 2}, {}, id="tied-pp2-dp2"),
    ],
)
def test_states_are_those_that_megatron_allocates(model, layout, precision):
    cfg = run_config(model=model, params="bf16", world_size=4, **layout)
    cfg = replace(cfg, precision=replace(cfg.precision, **precision))
    gpu = GPUS["h200"]
    ranks = run_ranks(4, _measure, cfg)
    for stage in range(cfg.parallel.pipeline):
        expected = trainer_memory.estimate_stage(cfg, gpu, gpu.memory_bytes, 1.0, stage)
        on_stage = [rank for rank in ranks if rank[0] == stage]
        for _, weights, gradients, _ in on_stage:
            assert weights == expected.part("weights").num_bytes
            assert gradients == expected.part("gradients").num_bytes
        # Shards are cut where the buffer says, not where tensors end, so that ranks differ; the mean is exact.
        states = sum(rank[3] for rank in on_stage) / len(on_stage)
        assert states == pytest.approx(expected.part("optimizer states").num_bytes, abs=1)
