"""A layer with a gated delta net as on GPUs: chunks inside a checkpoint, against the recurrence."""

import torch

from megatron_fp8rl.config import GdnConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.trainer.model.build import build_chunks
from megatron_fp8rl.trainer.parallel import Parallel
from tests import tolerances
from tests.helpers.dist import run_ranks
from tests.helpers.models import small_model

GDN = GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=32, value_head_dim=16)
_TYPES = ("linear_attention",)
MODEL = small_model((1, 64, 4, 2, 16, 128), ffn=96, family="qwen3_5_text", qk_norm=True, gdn=GDN, layer_types=_TYPES)


def _results(cfg: RunConfig) -> list[tuple[torch.Tensor, ...]]:
    """Runs on a rank: output and gradients of a layer, of its input and of the delta net's small parameters, in both
    forms."""
    from megatron.core.packed_seq_params import PackedSeqParams

    (chunk,) = build_chunks(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    layer = chunk.decoder.layers[0]
    mixer, generator = layer.self_attention, torch.Generator().manual_seed(0)
    weights = [mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.out_norm.weight]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    ends = torch.tensor([0, 5, 135, 200], dtype=torch.int32)
    longest = {"max_seqlen_q": 130, "max_seqlen_kv": 130}
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **longest)
    x = torch.randn(200, 1, 64, generator=generator).requires_grad_()
    upstream, results = torch.randn(200, 1, 64, generator=generator), []
    for mixer.in_chunks in (False, True):
        out, _ = layer(x, None, packed_seq_params=packed)
        results.append((out.detach(), *torch.autograd.grad(out, [x, *weights], upstream)))
    return results


def test_a_layer_in_chunks_has_outputs_and_gradients_of_the_recurrence():
    precision = PrecisionConfig(trainer="bf16", rollout="bf16", params="fp32")
    (results,) = run_ranks(1, _results, RunConfig(name="chunks", model=MODEL, precision=precision))
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() / expected.norm() < tolerances.CHUNKED_FLOAT32
