"""What a probe records of the trainer alone: every operation, on every kind of linear, and the numbers that train."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig, RunConfig
from megatron_fp8rl.diagnose.trainer_probe import TrainerProbe
from megatron_fp8rl.trainer.forward import Forward
from megatron_fp8rl.trainer.model.build import build_chunks
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, make_batch, run_config

MODEL = replace(DENSE, num_layers=2, hidden_size=128, num_attention_heads=4, head_dim=32, ffn_hidden_size=256)
PROMPT = [(7 * i) % 50 + 3 for i in range(45)]


def _probe(cfg: RunConfig) -> tuple:
    """Runs on a rank: (recorded, replayed on the recorded inputs, log-probabilities unwatched, and watched)."""
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    chunks = build_chunks(cfg, parallel)
    batch, forward = make_batch(cfg, 0), Forward(cfg, parallel)
    probe = TrainerProbe(chunks, cfg, parallel)
    recorded = probe.record(PROMPT)
    replayed = probe.replay(recorded)
    unwatched = torch.cat(forward.logprobs(chunks, batch.microbatches))
    linears = [module for module in chunks[0].modules() if hasattr(module, "recipe")]
    kinds = {module.gemm.__name__ for module in linears if module.recipe is not None}
    for module in linears:
        module.register_forward_hook(lambda *_: None)
    watched = torch.cat(forward.logprobs(chunks, batch.microbatches))
    parallel.close()
    return recorded, replayed, unwatched, watched, kinds


@pytest.mark.parametrize("linears, kinds", [("te", {"in_torch"}), ("deep_gemm", {"on_deep_gemm"})])
def test_every_operation_is_recorded_and_replayed(linears, kinds):
    precision = PrecisionConfig(trainer="blockwise", params="bf16", kernels={"linears": linears})
    cfg = replace(run_config(model=MODEL), precision=precision)
    ((recorded, replayed, unwatched, watched, actual),) = run_ranks(1, _probe, cfg)
    assert actual == kinds
    assert {"layer.1.gate_up", "layer.1.activation", "layer.1.down", "logits"} <= set(recorded)
    assert replayed.keys() == recorded.keys()
    wrong = [name for name in recorded if not torch.equal(recorded[name], replayed[name])]
    assert not wrong
    assert torch.equal(unwatched, watched), "a watched linear computes what an unwatched one does"
