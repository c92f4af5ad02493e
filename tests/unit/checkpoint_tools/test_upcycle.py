"""``upcycle``: experts that start from a dense feed-forward layer, and differ."""

import re
from dataclasses import replace

import pytest
import torch

from checkpoint_tools import __main__ as program
from checkpoint_tools import upcycle
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from tests.helpers.checkpoints import assert_same_tensors, random_tensors, read_tensors, write_folder
from tests.unit.checkpoint_tools.test_widen import LLAMA, transformers_model

MODELS = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, family="mistral", tie_embeddings=False, sliding_window=64),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, tie_embeddings=False),
}
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}


def run(*args: object) -> int:
    return program.main([*map(str, args), "--workers", "1"])


def small_source(model: ModelConfig, folder, scale: float = 0.1):
    tensors = {name: scale * tensor for name, tensor in random_tensors(model, torch.float32).items()}
    return write_folder(folder, tensors, registry.to_hf_config(model))


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_without_new_features_the_function_stays(kind, top_k, tmp_path, capsys):
    source = small_source(MODELS[kind], tmp_path / "in")
    assert run("upcycle", source, tmp_path / "out", "--experts", 4, "--top_k", top_k, "--fraction", 0) == 0
    printed = capsys.readouterr().out
    found = re.search(r"in float64: max difference (\S+) without new features \(standard deviation (\S+)\)", printed)
    assert found and float(found[1]) < 1e-12 < float(found[2]), printed
    model = model_in(tmp_path / "out")
    assert (model.num_experts, model.experts_per_token, model.moe_ffn_hidden_size) == (4, top_k, 200)
    assert model.sliding_window == MODELS[kind].sliding_window
    tokens = torch.arange(40)[None] % 101
    with torch.no_grad():
        logits = [transformers_model(folder)(tokens).logits for folder in (source, tmp_path / "out")]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4 * float(logits[0].std()))


@pytest.mark.parametrize("kind", MODELS)
def test_new_features_are_the_same_in_the_three_matrices_and_differ_between_experts(kind, tmp_path):
    source = small_source(MODELS[kind], tmp_path / "in", scale=0.3)
    assert run("upcycle", source, tmp_path / "out", "--experts", 4, "--fraction", 0.3) == 0
    dense, mixed = read_tensors(source), read_tensors(tmp_path / "out")
    parent, gate, up, down = NAMES[model_in(tmp_path / "out").family]
    chosen = []
    for layer in range(2):
        for expert in range(4):
            new = []
            for name, of, axis in ((gate, "gate_proj", 1), (up, "up_proj", 1), (down, "down_proj", 0)):
                tensor = mixed[f"model.layers.{layer}.{parent}.experts.{expert}.{name}.weight"]
                old = dense[f"model.layers.{layer}.mlp.{of}.weight"]
                changed = (tensor != old).any(axis)
                assert (tensor != old).all(axis).equal(changed)
                part = tensor[changed] if axis else tensor[:, changed]
                assert abs(float(part.std()) / 0.3 - 1) < 0.05 and abs(float(part.mean())) < 0.02
                new.append(changed)
            assert new[0].equal(new[1]) and new[0].equal(new[2]) and int(new[0].sum()) == 60
            chosen.append(tuple(new[0].nonzero().flatten().tolist()))
    assert len(set(chosen)) == 8
    others = [name for name in mixed if ".experts." not in name and not name.endswith(f"{parent}.gate.weight")]
    assert_same_tensors({n: mixed[n] for n in others}, {n: dense[n] for n in dense if ".mlp." not in n})
    router = mixed[f"model.layers.0.{parent}.gate.weight"]
    assert router.shape == (4, 96) and abs(float(router.std()) / 0.02 - 1) < 0.2


def test_the_seed_decides_whatever_the_memory(tmp_path, monkeypatch):
    source = small_source(LLAMA, tmp_path / "in")
    for name, options in (("a", []), ("b", []), ("c", ["--seed", 1])):
        if name == "b":  # many chunks of rows
            monkeypatch.setattr("checkpoint_tools.derived.row_chunks", lambda shape, memory: _rows(shape[0], 7))
        assert run("upcycle", source, tmp_path / name, "--experts", 2, *options) == 0
    a, b, c = (read_tensors(tmp_path / name) for name in "abc")
    assert_same_tensors(a, b)
    assert {name for name in a if not torch.equal(a[name], c[name])} == {
        name for name in a if "block_sparse_moe" in name
    }


def _rows(count: int, step: int):
    return ((first, min(first + step, count)) for first in range(0, count, step))


def test_experts_can_be_widened_and_read_from_block_fp8(tmp_path, capsys):
    model = replace(
        LLAMA, hidden_size=128, head_dim=64, num_key_value_heads=2, num_attention_heads=4, ffn_hidden_size=256
    )
    source = small_source(model, tmp_path / "in")
    assert run("hf_to_fp8", source, tmp_path / "fp8") == 0
    assert run("upcycle", tmp_path / "fp8", tmp_path / "out") == 0
    assert run("widen", tmp_path / "out", tmp_path / "wide", "--head_dim", 128) == 0, capsys.readouterr().err
    assert model_in(tmp_path / "wide").num_experts == 8
    assert run("hf_to_fp8", tmp_path / "wide", tmp_path / "wide8") == 0


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (replace(LLAMA, family="qwen2", qkv_bias=True), [], "family qwen2: no family of experts has all its parts"),
        (
            replace(
                LLAMA, family="mixtral", ffn_hidden_size=0, num_experts=2, experts_per_token=1, moe_ffn_hidden_size=64
            ),
            [],
            "family mixtral: has experts already",
        ),
        (LLAMA, ["--top_k", 9], "--top_k 9: there are only 8 experts"),
        (LLAMA, ["--experts", 1], "--experts 1: at least 2 is needed"),
        (LLAMA, ["--fraction", 1.5], "--fraction 1.5: expected a number from 0 to 1"),
        (LLAMA, ["--router_std", 0], "--router_std 0.0: expected a number above 0"),
    ],
)
def test_refusals_name_the_part(model, options, message, tmp_path, capsys):
    source = small_source(model, tmp_path / "in")
    try:
        assert run("upcycle", source, tmp_path / "out", *options) == 2
    except SystemExit as end:  # of the parser of options
        assert end.code == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in error and "Traceback" not in error and not (tmp_path / "out").exists()


def test_a_wrong_layout_is_caught(tmp_path, capsys, monkeypatch):
    """The program compares logits before the folder gets its name."""
    source = small_source(LLAMA, tmp_path / "in", scale=0.3)
    wrong = upcycle.blocks.EXPERT_PROJECTIONS | {"block_sparse_moe": ("w3", "w1", "w2")}  # gate and up exchanged
    monkeypatch.setattr(upcycle.blocks, "EXPERT_PROJECTIONS", wrong)
    assert run("upcycle", source, tmp_path / "out") == 2
    assert "with --fraction 0 logits in float64 differ by" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
