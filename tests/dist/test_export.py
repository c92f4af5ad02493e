"""Models and layouts of the tests of publications, and what save_hf writes: a checkpoint that is the policy."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.names import registry as names
from tests.helpers.dist import run_ranks
from tests.helpers.exports import MODELS, build, config, layout_name
from tests.helpers.training import full_weights, weight_pieces


def save(kind: str, layout: dict[str, int], folder: Path, tokenizer: Path):
    """Runs on a rank: save twice over, in shards and whole; this rank's pieces of the weights."""
    from megatron_fp8rl.weight_sync.save_hf import save_hf

    policy = build(config(kind, layout))
    save_hf(policy, folder / "sharded", tokenizer, max_shard_bytes=300_000)
    for _ in range(2):  # the second replaces the first
        save_hf(policy, folder / "whole", tokenizer)
    return weight_pieces(policy)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("tied", dict(world_size=2, pipeline=2)), ("moe", dict(world_size=2, tensor=2, expert=2))],
    ids=layout_name,
)
def test_saved_checkpoint_is_the_policy(kind, layout, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    ranks = run_ranks(2, save, kind, layout, tmp_path, tmp_path / "tokenizer")
    model = MODELS[kind]
    weights = full_weights(model, ranks) if kind == "moe" else None
    logits = []
    for name in ("sharded", "whole"):
        folder = tmp_path / name
        assert names.from_hf_config(json.loads((folder / "config.json").read_text())) == replace(model, hf_path=None)
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        with torch.no_grad():
            logits.append(loaded(torch.arange(3, 40)[None]).logits)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode("12+3", add_special_tokens=False)) == "12+3"
        assert loaded.config.eos_token_id == tokenizer.eos_token_id
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 1
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    assert torch.equal(*logits) and logits[0].isfinite().all()
    assert not list(tmp_path.glob(".*"))  # nothing partial is left
    if weights is not None:
        down = loaded.model.layers[2].mlp.experts.down_proj[3]
        assert torch.equal(down, weights["decoder.layers.2.mlp.experts.3.linear_fc2.weight"])
        gate_up = loaded.model.layers[2].mlp.experts.gate_up_proj[3]
        assert torch.equal(gate_up, weights["decoder.layers.2.mlp.experts.3.linear_fc1.weight"])
