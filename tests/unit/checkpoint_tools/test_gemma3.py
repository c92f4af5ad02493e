"""Gemma 3's published folders, which also see images: the text part computes what transformers' whole model does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from checkpoint_tools.__main__ import main
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import RopeScaling
from tests.helpers.dist import run_ranks
from tests.helpers.gemma3 import TEXT, published
from tests.helpers.logits import assert_logits_equal, sequences, trainer_logits
from tests.tolerances import LOGITS_FLOAT32

VOCABULARY = TEXT["vocab_size"]
TOKENS = torch.arange(2 * 24).view(2, 24) * 7 % VOCABULARY


def converted(source: Path, folder: Path) -> Path:
    """The text part, by way of a Megatron checkpoint."""
    assert main(["hf_to_megatron", str(source), str(folder / "mcore"), "--workers", "1"]) == 0
    assert main(["megatron_to_hf", str(folder / "mcore"), str(folder / "text"), "--workers", "1"]) == 0
    return folder / "text"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_becomes_a_folder_of_its_own(prefix, tmp_path, capsys):
    published(tmp_path / "whole", prefix)
    source = HfFolder.open(tmp_path / "whole")
    assert source.model.rope_scaling == RopeScaling(kind="linear", factor=8.0, original_max_position_embeddings=131072)
    assert source.model.max_sequence_tokens == 131072
    text = converted(tmp_path / "whole", tmp_path)
    printed = capsys.readouterr()
    printed = " ".join((printed.out + printed.err).split())
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    of_text = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
    assert len(stored) - len(of_text) == 23 and printed.count("skipped: 23 tensors (") == 1
    assert printed.count("part of the vision tower, which a text model does not have") == 1
    (file,) = text.glob("*.safetensors")
    written = load_file(file)
    assert len(written) == len(of_text)
    for name, tensor in of_text.items():
        alone = written[f"model.{name.removeprefix(prefix)}"]
        assert torch.equal(alone.view(torch.int16), tensor.view(torch.int16)), name
    config = json.loads((text / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert config["eos_token_id"] == [1, 106] and "vision_config" not in config
    reference = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    alone, report = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        expected, actual = reference(input_ids=TOKENS).logits, alone(TOKENS).logits
    assert torch.equal(actual, expected) and expected.std() > 0.3
    # The scaling of positions, the windows and the query scale all reach the logits.
    for change in ({"sliding_window": 12}, {"query_pre_attn_scalar": 64}, {"rope_parameters": None}):
        other = Gemma3Config.from_pretrained(tmp_path / "whole")
        other.text_config = type(other.text_config)(**(other.text_config.to_dict() | change))
        changed = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "whole", config=other, dtype=torch.float32)
        with torch.no_grad():
            assert (changed(input_ids=TOKENS).logits - expected).abs().max() > 0.01, change


def test_the_text_part_in_fp8(tmp_path):
    published(tmp_path / "whole")
    assert main(["hf_to_fp8", str(tmp_path / "whole"), str(tmp_path / "fp8"), "--workers", "1"]) == 0
    model = model_in(tmp_path / "fp8")
    assert replace(model, hf_path=None) == HfFolder.open(tmp_path / "whole").model
    assert replace(model, hf_path=None) == replace(model_in(tmp_path / "whole"), hf_path=None)
    (file,) = (tmp_path / "fp8").glob("*.safetensors")
    in_fp8 = {name for name, tensor in load_file(file).items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(in_fp8) == 6 * 7


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type = 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "factor = '8' is not a number of at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 8"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": 32}, r"q_proj.weight: shape \(2048, 128\) in .* but config.json says \(256, 128\)"),
        ({"num_hidden_layers": 5}, "config.json says 5 layers, so it is in none of them"),
        ({"altup_num_inputs": 4}, "altup_num_inputs = 4 is not known in this family"),
        ({"model_type": "gemma3n_text"}, "model_type 'gemma3n_text' is not supported; it needs embeddings"),
    ],
)
def test_a_text_part_that_is_not_computed_is_refused(change, problem, tmp_path):
    published(tmp_path / "whole")
    file = tmp_path / "whole" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"text_config": config["text_config"] | change}))
    with pytest.raises(CheckpointError, match=problem):
        HfFolder.open(tmp_path / "whole")


def test_the_head_is_the_embedding_unless_the_folder_has_another(tmp_path):
    """transformers 5 writes the head of a whole model that was trained apart beside its embedding."""
    published(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    head = torch.randn(384, 128).bfloat16()
    save_file(tensors | {"language_model.lm_head.weight": head}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match='lm_head.weight: differs from .* set "tie_word_embeddings" to false'):
        HfFolder.open(tmp_path / "whole").require_tied_head(1 << 20)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    source = HfFolder.open(tmp_path / "whole")
    assert torch.equal(source.whole("lm_head.weight"), head) and not source.model.tie_embeddings


@pytest.mark.parametrize("layout", [{"world_size": 1}, {"world_size": 2, "tensor": 2}], ids=["one", "tp2"])
def test_the_trainer_computes_the_logits_of_the_whole_model(layout, tmp_path):
    published(tmp_path / "whole")
    text = converted(tmp_path / "whole", tmp_path)
    model = replace(model_in(text), hf_path=None)
    whole = Gemma3ForConditionalGeneration.from_pretrained(
        tmp_path / "whole", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = [[whole(input_ids=tokens[None]).logits[0] for tokens in pack] for pack in sequences(model)]
    for result in run_ranks(layout["world_size"], trainer_logits, model, layout, str(text)):
        assert_logits_equal(result, expected, **LOGITS_FLOAT32)
