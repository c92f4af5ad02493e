"""What doctor says a layer keeps for its backward pass, against what autograd saves."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_fp8rl.config import OptimConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.preflight.activations import Tokens, layer_bytes
from megatron_fp8rl.trainer.model.attention import PackedAttention
from megatron_fp8rl.trainer.model.build import build_chunks
from megatron_fp8rl.trainer.model.linear import RMSNorm
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.models import small_model

_TOKENS = 256
DENSE = small_model((2, 256, 8, 2, 64, 512), ffn=384, qk_norm=True)
MOE = replace(DENSE, family="qwen3_moe", ffn_hidden_size=0, num_experts=8, experts_per_token=2, moe_ffn_hidden_size=128)


class _FusedAttention(torch.autograd.Function):
    """Saves the tensors of the fused GPU kernel: rotated queries and keys, values, output, one number per head."""

    @staticmethod
    def forward(ctx, query, key, value):
        out, statistics = torch.zeros_like(query), query.new_zeros(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, statistics)
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:3])


def _saved_bytes(cfg: RunConfig) -> int:
    """Runs on a rank: bytes of all storages in one layer's graph, without parameters."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from tests.helpers import fake_te

    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    (chunk,) = build_chunks(cfg, parallel)
    layer = chunk.module.decoder.layers[0]
    held = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held and storage.nbytes() > 64:  # a checkpoint saves the mask's kind, a number
            saved[storage.data_ptr()] = storage
        return tensor

    ends = torch.tensor([0, _TOKENS], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=_TOKENS, max_seqlen_kv=_TOKENS
    )
    with pytest.MonkeyPatch.context() as patch:
        fake_te.install(patch)
        from megatron_fp8rl.trainer.model.norm import te_rms_norm

        for name, module in chunk.named_modules():
            if isinstance(module, RMSNorm):
                is_first = name.endswith(("input_layernorm", "pre_mlp_layernorm"))
                module.compute = partial(te_rms_norm, with_input=is_first)
        # On a CPU attention widens its operands; the GPU's kernel takes them as they are.
        patch.setattr(
            PackedAttention,
            "_attend",
            lambda self, q, k, v, plan: _FusedAttention.apply(*(x.bfloat16().contiguous() for x in (q, k, v))),
        )
        x = torch.randn(_TOKENS, 1, cfg.model.hidden_size).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = layer(x, None, packed_seq_params=packed)
        assert out.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("modules", [(), ("core_attn",), ("feed_forward",)], ids=["none", "core_attn", "feed_forward"])
@pytest.mark.parametrize("model", [DENSE, replace(DENSE, qk_norm=False), MOE], ids=["dense", "no_qk_norm", "moe"])
def test_a_layer_keeps_what_doctor_says(model, modules):
    """In BF16, where autograd sees every tensor. The doctor omits norm statistics and the shared rotary tables."""
    if modules == ("feed_forward",):
        modules = ("moe",) if model.is_moe else ("mlp",)
    cfg = RunConfig(
        name="bytes",
        model=model,
        precision=PrecisionConfig(trainer="bf16", rollout="bf16", kernels={"experts": "te"}),
        optim=OptimConfig(
            recompute="selective" if modules else "none",
            recompute_modules=modules or ("core_attn",),
            max_tokens_per_microbatch=_TOKENS,
        ),
    )
    (actual,) = run_ranks(1, _saved_bytes, cfg)
    statistics = 2 + (model.num_attention_heads + model.num_key_value_heads if model.qk_norm else 0)
    kernels = KernelChoice.of(cfg, Hardware("cpu")).trainer
    tables = 0 if modules == ("core_attn",) else 2 * model.head_dim // 2
    expected = layer_bytes(cfg, 0, Tokens.of(cfg, 1.0), kernels).kept + _TOKENS * 4 * (statistics + tables)
    # On some machines PyTorch keeps the numbers of the chosen experts once more, int64 [tokens, experts per token].
    copies = (0, 8 * _TOKENS * model.experts_per_token) if model.is_moe else (0,)
    assert actual - expected in copies
