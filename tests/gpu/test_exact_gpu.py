"""What makes trainer and engine bitwise equal at the lengths of real answers, on one GPU."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fp8rl.config import RopeScaling
from megatron_fp8rl.kernels import exact_logprobs
from megatron_fp8rl.trainer.model.rotary import Rotary, rotary_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

POSITIONS = 40_960
LLAMA3 = dict(factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(
    factor=40.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
)
CASES = {
    "plain": (128, 1e6, None, {"rope_type": "default"}),
    "llama3": (128, 5e5, RopeScaling(kind="llama3", **LLAMA3), {"rope_type": "llama3", **LLAMA3}),
    "yarn": (64, 1e4, RopeScaling(kind="yarn", **YARN), {"rope_type": "deepseek_yarn", **YARN}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rotary_table_is_the_engines_at_every_position(name):
    """A table of the host differs from position 43, 282 or 459 on."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    features, theta, scaling, parameters = CASES[name]
    is_latent = name == "yarn"
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        rope = get_rope(
            features,
            POSITIONS,
            is_neox_style=not is_latent,
            rope_parameters={"rope_theta": theta, **parameters},
            dtype=torch.bfloat16,
        )
    rotary = Rotary(num_features=features, first_feature=0, theta=theta, scaling=scaling, interleaved=is_latent)
    theirs = rope.cos_sin_cache[:POSITIONS]
    ours = torch.cat(rotary_table(POSITIONS, rotary, theirs.dtype, theirs.device), dim=-1)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("longest", [4096, 8192], ids=["short", "long"])
def test_longrope_turns_heads_like_the_engine(longest, monkeypatch):
    """Phi-4-mini's table at every position, and the rotated heads of the last ones."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    from megatron_fp8rl.names import rope
    from megatron_fp8rl.rollout.vllm_plugin import phi3
    from model_configs.dense import phi4_mini

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # its keys lack the length
    model, current = phi4_mini(), VllmConfig()
    current.model_config = SimpleNamespace(max_model_len=longest)
    written, length = rope.write(model, has_fraction=True)["rope_parameters"], model.max_position_embeddings
    with set_current_vllm_config(current), torch.device("cuda"):
        engine = rotary_embedding.get_rope(128, length, rope_parameters=written, dtype=torch.bfloat16)
    assert type(engine) is phi3.LongRope
    rotary = Rotary.of(model, longest=longest)
    cos, sin = rotary_table(length, rotary, torch.bfloat16, torch.device("cuda"))
    assert torch.equal(torch.cat([cos, sin], dim=-1), engine.cos_sin_cache)
    generator = torch.Generator("cuda").manual_seed(1)
    query, key = (torch.randn(512, n, 128, device="cuda", generator=generator).bfloat16() for n in (24, 8))
    positions = torch.arange(longest - 512, longest, device="cuda")
    of_tokens = [table[positions].float()[:, None] for table in (cos, sin)]
    ours = [rotary.rotate(x, *of_tokens) for x in (query, key)]
    theirs = engine.forward_cuda(positions, query.flatten(1).clone(), key.flatten(1).clone())
    assert all(torch.equal(mine.flatten(1), other) for mine, other in zip(ours, theirs))


@pytest.mark.parametrize("vocab", [16_384, 151_936])
def test_log_probabilities_have_the_bits_of_other_dtypes_and_shards(vocab):
    generator = torch.Generator("cuda").manual_seed(vocab)
    logits = (5 * torch.randn(256, vocab, device="cuda", generator=generator)).bfloat16()
    ids = torch.randint(vocab, (256, 1), device="cuda", generator=generator)
    actual = exact_logprobs.token_logprobs(logits, ids)
    assert torch.equal(actual, exact_logprobs.token_logprobs(logits.float(), ids))
    assert torch.equal(actual, exact_logprobs.log_softmax(logits).gather(1, ids))
    expected = torch.log_softmax(logits.double(), dim=-1).gather(1, ids)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
