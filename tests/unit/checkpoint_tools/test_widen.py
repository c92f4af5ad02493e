"""``widen``: the same function with sizes that FP8 blocks tile, and added weights that stay zero in training."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_tools import __main__ as program
from checkpoint_tools import wider_model
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.wider_model import untiled, widened
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import RopeScaling, RouterConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.preflight import tiling
from tests.helpers.checkpoints import random_tensors, read_tensors, save_with_transformers, write_folder
from tests.helpers.family_configs import DEEPSEEK, MINIMAX, QWEN3_NEXT
from tests.helpers.models import small_model

# Its norm_eps is so large that a mistake in it shows.
SHARED = {"rope_theta": 10_000.0, "norm_eps": 0.01, "tie_embeddings": True}
LLAMA = small_model((2, 96, 6, 3, 32, 101), ffn=200, family="llama", **SHARED)
EXPERTS = {"ffn_hidden_size": 0, "num_experts": 4, "experts_per_token": 2, "moe_ffn_hidden_size": 72}
SCALING = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=16)
MODELS = {
    "llama": LLAMA,
    "llama_scaled_untied": replace(LLAMA, rope_scaling=SCALING, tie_embeddings=False),
    "mistral": replace(LLAMA, family="mistral", num_key_value_heads=1, num_attention_heads=3),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, num_attention_heads=3),
    "phi3": replace(
        LLAMA,
        family="phi3",
        num_attention_heads=3,
        rotary_fraction=0.75,
        rope_scaling=RopeScaling(
            kind="longrope",
            factor=4.0,
            original_max_position_embeddings=1024,
            short_factor=(1.5,) * 12,
            long_factor=(3.0,) * 12,
        ),
    ),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, hidden_size=80),
    "qwen3_moe": replace(LLAMA, family="qwen3_moe", qk_norm=True, tie_embeddings=False, **EXPERTS),
    "mixtral": replace(LLAMA, family="mixtral", tie_embeddings=False, **EXPERTS),
    "gpt_oss": replace(
        LLAMA,
        **EXPERTS,
        family="gpt_oss",
        qkv_bias=True,
        tie_embeddings=False,
        sliding_window=8,
        layer_types=("sliding_attention", "full_attention"),
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "glm4_moe": replace(
        LLAMA,
        **EXPERTS | {"ffn_hidden_size": 136, "num_shared_experts": 2, "first_dense_layers": 1},
        family="glm4_moe",
        qkv_bias=True,
        qk_norm=True,
        tie_embeddings=False,
        rotary_fraction=0.5,
        router=RouterConfig(score="sigmoid", correction_bias=True),
    ),
}


def run(*args: object) -> int:
    return program.main([*map(str, args), "--workers", "1"])


def transformers_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


@pytest.mark.parametrize("head_dim", [None, 128])
@pytest.mark.parametrize("kind", MODELS)
def test_the_wider_model_has_the_function_and_tiles(kind, head_dim, tmp_path, capsys):
    model = MODELS[kind]
    assert untiled(model)
    source = save_with_transformers(model, tmp_path / "in", torch.float32)
    options = [] if head_dim is None else ["--head_dim", head_dim]
    status = run("widen", source, tmp_path / "out", *options)
    if kind in ("glm4_moe", "gpt_oss", "phi3") and head_dim:
        assert status == 2 and "rotary frequencies would change; choose one of 32" in capsys.readouterr().err
        return
    assert status == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    found = re.search(r"of 64 random tokens in float64: max difference (\S+) \(standard deviation (\S+)\)", printed)
    assert found and float(found[1]) < 1e-11 < float(found[2]), printed
    wider = model_in(tmp_path / "out")
    assert not untiled(wider) and all(size % 128 == 0 for k in tiling.kinds(wider) for size in k.shape)
    assert head_dim in (None, wider.head_dim)
    # transformers and the trainer's own float32 code, without the program's comparison
    tokens = torch.arange(40)[None] % model.vocab_size
    with torch.no_grad():
        logits = [transformers_model(folder)(tokens).logits for folder in (source, tmp_path / "out")]
    torch.testing.assert_close(logits[1], logits[0], rtol=2e-4, atol=2e-4 * float(logits[0].std()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("head_dim", [None, 128])
def test_added_weights_get_no_gradient(kind, head_dim, tmp_path):
    """They stay zero under an optimizer with momentum, so training changes the function as it would that of the
    source."""
    tensors = {name: 0.3 * tensor for name, tensor in random_tensors(MODELS[kind], torch.float32).items()}
    source = write_folder(tmp_path / "in", tensors, registry.to_hf_config(MODELS[kind]))
    assert run("widen", source, tmp_path / "out", *([] if head_dim is None else ["--head_dim", head_dim])) == 0
    model = transformers_model(tmp_path / "out")
    zeros = {name: parameter == 0 for name, parameter in model.named_parameters()}
    added = registry.hf_tensors(model_in(tmp_path / "out"))
    num_added = sum(torch.Size(shape).numel() for shape in added.values())
    num_added -= sum(torch.Size(shape).numel() for shape in registry.hf_tensors(MODELS[kind]).values())
    assert sum(int(mask.sum()) for mask in zeros.values()) == num_added > 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        tokens = (torch.arange(40)[None] * (3 + step)) % 101
        model(tokens, labels=tokens).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad[zeros[name]].eq(0).all(), name
            assert parameter.grad[~zeros[name]].ne(0).any(), name
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter[zeros[name]].eq(0).all(), name


def test_weights_without_a_factor_are_copied(tmp_path):
    """Key/value heads are added; heads and hidden size stay, so every old weight keeps its bits."""
    model = replace(MODELS["qwen3"], hidden_size=128, ffn_hidden_size=256)
    source = write_folder(tmp_path / "in", random_tensors(model), registry.to_hf_config(model))
    assert run("widen", source, tmp_path / "out") == 0
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    assert model_in(tmp_path / "out").num_key_value_heads == 4
    for name, tensor in before.items():
        part = after[name][tuple(slice(size) for size in tensor.shape)]
        assert after[name].dtype == torch.bfloat16 and torch.equal(part, tensor), name


def test_block_fp8_is_read_and_special_tokens_are_kept(tmp_path):
    model = replace(
        LLAMA, head_dim=64, num_key_value_heads=2, num_attention_heads=4, hidden_size=128, ffn_hidden_size=256
    )
    config = registry.to_hf_config(model) | {"eos_token_id": [2, 7], "pad_token_id": 0}
    source = write_folder(tmp_path / "in", random_tensors(model), config)
    (source / "tokenizer.json").write_text("{}")
    assert run("hf_to_fp8", source, tmp_path / "fp8") == 0
    assert run("widen", tmp_path / "fp8", tmp_path / "out", "--head_dim", 128) == 0
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in written and written["eos_token_id"] == [2, 7] and written["pad_token_id"] == 0
    assert written["head_dim"] == 128 and (tmp_path / "out/tokenizer.json").exists()
    HfFolder.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (replace(LLAMA, hidden_size=128, head_dim=128, ffn_hidden_size=256), [], "every matrix tiles already"),
        (replace(DEEPSEEK, num_layers=2), [], "family deepseek_v3: the sizes of latent attention cannot be widened"),
        (QWEN3_NEXT, [], "family qwen3_next: the sizes of gated delta nets cannot be widened"),
        (MINIMAX, [], "family minimax_m2: heads that share a norm cannot be widened"),
        (LLAMA, ["--head_dim", "48"], "--head_dim 48: rotary frequencies would change; choose one of 32, 64, 128"),
    ],
)
def test_refusals_name_the_part(model, options, message, tmp_path, capsys):
    source = write_folder(tmp_path / "in", random_tensors(model), registry.to_hf_config(model))
    assert run("widen", source, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "out").exists()


def test_not_finite_weights_are_refused(tmp_path, capsys):
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"][3] = float("nan")
    source = write_folder(tmp_path / "in", tensors, registry.to_hf_config(LLAMA))
    assert run("widen", source, tmp_path / "out") == 2
    assert "model.norm.weight: has NaN or infinity" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_wrong_formula_is_caught(tmp_path, capsys, monkeypatch):
    """The program compares logits before the folder gets its name."""
    source = save_with_transformers(LLAMA, tmp_path / "in", torch.float32)
    monkeypatch.setattr(wider_model.Widening, "_factor", lambda *args: 1.0)
    assert run("widen", source, tmp_path / "out") == 2
    assert "logits in float64 differ by" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_cheapest_sizes_are_chosen():
    smollm = replace(LLAMA, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    wider = widened(replace(smollm, ffn_hidden_size=1536))
    assert (wider.family, wider.hidden_size, wider.num_attention_heads, wider.num_key_value_heads) == (
        "mistral",
        640,
        12,
        4,
    )
    wider = widened(replace(smollm, ffn_hidden_size=1536), 128)
    assert (wider.hidden_size, wider.num_attention_heads, wider.num_key_value_heads) == (640, 9, 3)
    scaled = widened(replace(smollm, rope_scaling=SCALING))  # Mistral has no scaled rotary embedding
    assert scaled.family == "llama" and scaled.hidden_size % scaled.num_attention_heads == 0
    qwen2 = widened(MODELS["qwen2"])  # vLLM derives its head size
    assert qwen2.head_dim * qwen2.num_attention_heads == qwen2.hidden_size
