"""Kimi-K2.5's published folder: its text part is read, INT4 is what the compressed-tensors library unpacks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint_tools.__main__ import main
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.names import registry
from megatron_fp8rl.preflight import folder_check
from tests.helpers.checkpoints import random_tensors, write_folder
from tests.helpers.family_configs import DEEPSEEK

MODEL = replace(DEEPSEEK, num_experts=4, router=replace(DEEPSEEK.router, num_groups=1))
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS, "targets": ["Linear"], "input_activations": None}},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
}


def kimi_folder(folder: Path, change_weights=None) -> dict[str, torch.Tensor]:
    """Write a folder as it is published; returns the text part's weights, unpacked by the library."""
    generator = torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    expected = random_tensors(MODEL)
    for name, tensor in expected.items():
        if ".experts." not in name:
            stored[f"language_model.{name}"] = tensor
            continue
        values = torch.randint(-8, 8, tensor.shape, generator=generator, dtype=torch.int8)
        scale = (torch.rand(tensor.shape[0], tensor.shape[1] // 32, generator=generator) / 20).bfloat16()
        packed = pack_to_int32(values, 4)
        stored[f"language_model.{name}_packed"], stored[f"language_model.{name}_scale"] = packed, scale
        stored[f"language_model.{name}_shape"] = torch.tensor(tensor.shape)
        whole = unpack_from_int32(packed, 4, tensor.shape).bfloat16()
        expected[name] = (whole.view(len(whole), -1, 32) * scale[..., None]).view(tensor.shape)
    stored["vision_tower.patch_embed.proj.weight"] = torch.ones(8, 8).bfloat16()
    stored["mm_projector.linear_1.weight"] = torch.ones(8, 8).bfloat16()
    text = registry.to_hf_config(MODEL) | {"model_type": "kimi_k2", "quantization_config": change_weights or INT4}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    write_folder(folder, stored, config | {"eos_token_id": 5, "vision_config": {"patch_size": 14}})
    return expected


def test_the_text_part_becomes_a_folder_of_its_own(tmp_path, capsys):
    expected = kimi_folder(tmp_path / "kimi")
    source = HfFolder.open(tmp_path / "kimi")
    assert source.model == MODEL
    for name, tensor in expected.items():
        assert torch.equal(source.rows(name, 0, tensor.shape[0]), tensor), name
        assert torch.equal(source.rows(name, 1, 3), tensor[1:3]), name
    assert main(["hf_to_megatron", str(tmp_path / "kimi"), str(tmp_path / "mcore"), "--workers", "1"]) == 0
    printed = capsys.readouterr()
    assert " ".join((printed.out + printed.err).split()).count("part of the vision tower, which a text model") == 1
    assert main(["megatron_to_hf", str(tmp_path / "mcore"), str(tmp_path / "text"), "--workers", "1"]) == 0
    (file,) = (tmp_path / "text").glob("*.safetensors")
    written = load_file(file)
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and "quantization_config" not in config
    assert config["eos_token_id"] == 5 and "vision_config" not in config
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "text"))
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert main(["hf_to_fp8", str(tmp_path / "kimi"), str(tmp_path / "fp8"), "--workers", "1"]) == 0
    assert model_in(tmp_path / "fp8").family == "deepseek_v3"


def test_other_packed_weights_are_refused(tmp_path):
    kimi_folder(tmp_path / "kimi", INT4 | {"config_groups": {"group_0": {"weights": WEIGHTS | {"symmetric": False}}}})
    with pytest.raises(CheckpointError, match="quantization_config = 'compressed-tensors' is not supported"):
        HfFolder.open(tmp_path / "kimi")


def test_a_run_needs_weights_that_are_not_packed(tmp_path):
    kimi_folder(tmp_path / "kimi")
    with pytest.raises(ValueError, match="'compressed-tensors' .* checkpoint_tools reads block FP8 and Kimi-K2's INT4"):
        model_in(tmp_path / "kimi")


def test_samples_of_a_large_folder_do_not_take_packed_weights_for_numbers(tmp_path, monkeypatch):
    kimi_folder(tmp_path / "kimi")
    for name, value in {"_MAX_SCANNED_BYTES": 1000, "_SAMPLED_BYTES": 1000, "_BLOCK_BYTES": 512}.items():
        monkeypatch.setattr(folder_check, name, value)
    model = HfFolder.open(tmp_path / "kimi").model
    problems, said = folder_check._weight_problems(tmp_path / "kimi", model, says_fp8=False, reads_fp8=False)
    assert problems == [] and "the trainer checks all of them" in said
