"""Qwen3.5's published folders, which also see images: the text part computes what transformers' whole model does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig
from transformers import Qwen3_5MoeForConditionalGeneration as Moe

from checkpoint_tools.__main__ import main
from checkpoint_tools.hf_folder import HfFolder
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import GdnConfig
from megatron_fp8rl.preflight.folder_check import check_folder

TEXT = {
    "vocab_size": 131,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        **{"mrope_interleaved": True, "mrope_section": [3, 3, 2]},
    },
}
SIZES = {
    "qwen3_5": {"intermediate_size": 256, "tie_word_embeddings": True},
    "qwen3_5_moe": {
        **{"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        **{"shared_expert_intermediate_size": 128},
    },
}
CLASSES = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Moe),
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 128}
VISION |= {"num_position_embeddings": 16, "patch_size": 4}
PUBLISHED = {"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32"}
PUBLISHED |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": []}


def published(model_type: str, folder: Path, *, stacked: bool) -> None:
    """Write a folder as it is published, with its keys and a prediction layer. ``stacked``: one tensor for all
    experts of a layer, as in BF16 releases; else one by one, as transformers saves them."""
    torch.manual_seed(0)
    config_class, model_class = CLASSES[model_type]
    text, is_tied = TEXT | SIZES[model_type], model_type == "qwen3_5"
    model = model_class(config_class(text_config=text, vision_config=VISION, tie_word_embeddings=is_tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    model = model.bfloat16()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if stacked:
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if is_tied:
            del tensors["lm_head.weight"]
    tensors["mtp.fc.weight"] = torch.ones(128, 256).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= PUBLISHED
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("model_type", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", True), ("qwen3_5_moe", False)], ids=str
)
def test_the_text_part_becomes_a_folder_of_its_own(model_type, stacked, tmp_path, capsys):
    published(model_type, tmp_path / "whole", stacked=stacked)
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert any(".experts.gate_up_proj" in name for name in stored) == stacked
    source = HfFolder.open(tmp_path / "whole")
    assert source.model.gdn == GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=32)
    assert main(["hf_to_megatron", str(tmp_path / "whole"), str(tmp_path / "mcore"), "--workers", "1"]) == 0
    printed = capsys.readouterr()
    printed = " ".join((printed.out + printed.err).split())
    assert "part of the vision tower" in printed and "part of the multi-token prediction layers" in printed
    assert main(["megatron_to_hf", str(tmp_path / "mcore"), str(tmp_path / "text"), "--workers", "1"]) == 0
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == f"{model_type}_text"
    reference = CLASSES[model_type][1].from_pretrained(tmp_path / "whole", dtype=torch.float32)
    alone, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(2 * 20).view(2, 20) * 7 % 131
    with torch.no_grad():
        expected, actual = reference(input_ids=tokens).logits, alone(tokens).logits
    assert torch.equal(actual, expected) and expected.std() > 0.3


def test_the_text_part_in_fp8(tmp_path):
    published("qwen3_5_moe", tmp_path / "whole", stacked=True)
    assert "part of the vision tower" in check_folder(model_in(tmp_path / "whole"), None)
    assert main(["hf_to_fp8", str(tmp_path / "whole"), str(tmp_path / "fp8"), "--workers", "1"]) == 0
    assert model_in(tmp_path / "fp8").family == "qwen3_5_moe_text"
    (file,) = (tmp_path / "fp8").glob("*.safetensors")
    in_fp8 = {name for name, tensor in load_file(file).items() if tensor.dtype == torch.float8_e4m3fn}
    first = "model.layers.0.linear_attn."
    assert {f"{first}in_proj_qkv.weight", f"{first}in_proj_z.weight", f"{first}out_proj.weight"} <= in_fp8
    assert not {f"{first}in_proj_b.weight", f"{first}in_proj_a.weight", f"{first}conv1d.weight"} & in_fp8
