"""Published folders of Mistral Small 3 and Qwen3-VL: the text part computes what transformers' whole model does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from checkpoint_tools.__main__ import main
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.preflight.folder_check import check_folder
from tests.helpers.dist import run_ranks
from tests.helpers.logits import assert_logits_equal, sequences, trainer_logits
from tests.tolerances import LOGITS_FLOAT32

SIZES = {
    **{"vocab_size": 131, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
AXES = {"mrope_interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
PIXTRAL |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 16}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 128}
VISION |= {"num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": [0]}
# Text as published, class, vision, and the family of the text part.
MODELS = {
    "mistral3": (
        SIZES | {"model_type": "mistral", "rope_theta": 1e9, "sliding_window": None, "rms_norm_eps": 1e-5},
        *(Mistral3Config, Mistral3ForConditionalGeneration, PIXTRAL, "mistral"),
    ),
    "qwen3_vl": (
        SIZES | {"model_type": "qwen3_vl_text", "rope_theta": 5e6, "rope_scaling": AXES, "rms_norm_eps": 1e-6},
        *(Qwen3VLConfig, Qwen3VLForConditionalGeneration, VISION, "qwen3"),
    ),
}


def published(model_type: str, folder: Path, change: dict | None = None) -> int:
    """Write a folder with config.json as on the hub, and a head of its own; returns the tensors that are not text."""
    torch.manual_seed(0)
    text, config_class, model_class, vision, _ = MODELS[model_type]
    whole = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    model = model_class(config_class(**json.loads(json.dumps(whole))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.3) if parameter.ndim == 1 else parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(folder)
    config = whole | {
        "architectures": [model_class.__name__],
        "model_type": model_type,
        "text_config": text | (change or {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    return sum("language_model." not in name and name != "lm_head.weight" for name in stored)


@pytest.mark.parametrize("model_type", MODELS)
def test_the_text_part_becomes_a_folder_of_its_own(model_type, tmp_path, capsys):
    num_others = published(model_type, tmp_path / "whole")
    line = check_folder(model_in(tmp_path / "whole"), None)
    assert line.count(f"{num_others} tensors are part of the vision tower") == 1
    assert main(["hf_to_megatron", str(tmp_path / "whole"), str(tmp_path / "mcore"), "--workers", "1"]) == 0
    printed = capsys.readouterr()
    printed = " ".join((printed.out + printed.err).split())
    assert num_others > 8 and printed.count(f"skipped: {num_others} tensors (") == 1
    assert main(["megatron_to_hf", str(tmp_path / "mcore"), str(tmp_path / "text"), "--workers", "1"]) == 0
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["model_type"] == MODELS[model_type][-1] and "mrope" not in json.dumps(config)
    whole = MODELS[model_type][2].from_pretrained(tmp_path / "whole", dtype=torch.float32, attn_implementation="eager")
    alone, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    model = HfFolder.open(tmp_path / "text").model
    with torch.no_grad():
        expected = [[whole(input_ids=tokens[None]).logits[0] for tokens in pack] for pack in sequences(model)]
        for pack, logits in zip(sequences(model), expected, strict=True):
            for tokens, of_whole in zip(pack, logits, strict=True):
                assert torch.equal(alone(tokens[None]).logits[0], of_whole)
    assert expected[0][1].std() > 0.3
    (result,) = run_ranks(1, trainer_logits, model, {"world_size": 1}, str(tmp_path / "text"))
    assert_logits_equal(result, expected, **LOGITS_FLOAT32)


@pytest.mark.parametrize(
    ("model_type", "change", "problem"),
    [
        ("mistral3", {"model_type": "ministral3"}, "'ministral3' is not .* grows with the position"),
        ("mistral3", {"model_type": "mistral4"}, "'mistral4' .* is not supported; supported are"),
        ("mistral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1, "rope_type": "yarn"}}, "llama_4_scaling_beta"),
        ("qwen3_vl", {"model_type": "qwen3_vl_moe_text"}, "'qwen3_vl_moe_text' .* is not supported; supported are"),
        ("qwen3_vl", {"rope_scaling": AXES | {"rope_type": "dynamic"}}, "rope_type = 'dynamic' is not supported"),
    ],
)
def test_a_text_part_of_another_kind_is_refused(model_type, change, problem, tmp_path):
    published(model_type, tmp_path / "whole", change)
    with pytest.raises(CheckpointError, match=problem):
        HfFolder.open(tmp_path / "whole")
