"""A Hugging Face checkpoint of every family that goes through the trainer comes back with the same bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.config import ModelConfig, ParallelConfig
from megatron_fp8rl.data.fused_tensors import fusion_of
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.names import registry
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.families import MODELS
from tests.helpers.training import run_config

# One of each kind of attention, router and head; the tests of names have all.
KINDS = (
    *("llama", "qwen2-one-group", "mixtral", "glm4_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss", "phi3", "deepseek_v3"),
)
LAYOUTS = {
    "tp2": dict(world_size=2, tensor=2),
    "pp2": dict(world_size=2, pipeline=2),
    "ep2": dict(world_size=2, expert=2),
    "tp2_ep2": dict(world_size=2, tensor=2, expert=2),
}


def _fitting(layout: dict) -> dict[str, ModelConfig]:
    return {kind: MODELS[kind] for kind in KINDS if MODELS[kind].is_moe or "expert" not in layout}


def _checkpoint(model: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Random BF16 tensors, and an FP32 correction bias, as in published checkpoints."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(4)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in registry.hf_tensors(model).items()}
    for name, tensor in tensors.items():
        if not name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.bfloat16()
    tensors = fusion_of(model.family).fuse(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(registry.to_hf_config(model)))
    return tensors


def _load_and_save(layout: dict, folder: str) -> None:
    """On a rank: read and write every family that fits the layout, in several shards."""
    from megatron_fp8rl.weight_sync.save_hf import save_hf

    parallel = Parallel.init(ParallelConfig(**layout), deadline_s=60)
    for kind, model in _fitting(layout).items():
        cfg = run_config(model=replace(model, hf_path=f"{folder}/{kind}"), params="bf16", **layout)
        save_hf(Policy.build(cfg, parallel), f"{folder}/{kind}-again", f"{folder}/tokenizer", max_shard_bytes=80_000)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_loaded_is_saved_bit_for_bit(layout, tmp_path):
    from safetensors.torch import load_file

    fitting = _fitting(LAYOUTS[layout])
    expected = {kind: _checkpoint(model, tmp_path / kind) for kind, model in fitting.items()}
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    run_ranks(LAYOUTS[layout]["world_size"], _load_and_save, LAYOUTS[layout], str(tmp_path))
    for kind, model in fitting.items():
        folder = tmp_path / f"{kind}-again"
        shards = sorted(folder.glob("*.safetensors"))
        assert len(shards) > 1
        actual = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
        assert actual.keys() == expected[kind].keys(), kind
        for name, tensor in expected[kind].items():
            assert actual[name].dtype == tensor.dtype, f"{kind}: {name}"
            assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), f"{kind}: {name}"
        assert registry.from_hf_config(json.loads((folder / "config.json").read_text())) == model
