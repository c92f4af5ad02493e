"""A folder whose files contradict config.json is refused by ``grpo``, ``train`` and ``eval`` before anything starts."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from megatron_fp8rl import cli
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.commands import train
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import ConfigError, RouterConfig
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.names import registry
from megatron_fp8rl.preflight import folder_check
from megatron_fp8rl.preflight.folder_check import check_folder
from tests.helpers.checkpoints import random_tensors
from tests.helpers.models import small_model

MODEL = small_model((2, 128, 4, 2, 32, 128), ffn=256, tie_embeddings=True)
GLM = small_model(
    (2, 128, 4, 2, 32, 128),
    ffn=256,
    family="glm4_moe",
    experts=(4, 2, 128),
    first_dense_layers=1,
    rotary_fraction=0.5,
    router=RouterConfig(score="sigmoid", correction_bias=True),
)
Q, DOWN, EMBEDDING = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.embed_tokens.weight",
)


def write(folder: Path, change_config=lambda config: None, change_tensors=lambda tensors: None, model=MODEL) -> Path:
    """A folder with config.json, one file of weights and a tokenizer, after both changes."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config, tensors = registry.to_hf_config(model) | {"eos_token_id": tokenizer.eos_token_id}, random_tensors(model)
    change_config(config)
    change_tensors(tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def keep(_) -> None:
    """No change."""


def add(name: str, *shape: int, dtype=torch.bfloat16):
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def adapt(tensors: dict) -> None:
    """An adapter beside its matrix, as peft saves it."""
    tensors[Q.replace("weight", "base_layer.weight")] = tensors.pop(Q)
    tensors[Q.replace("weight", "lora_A.weight")] = torch.ones(8, 128)
    tensors[Q.replace("weight", "lora_B.weight")] = torch.ones(128, 8)


CASES = {
    "fewer_layers": (lambda c: c.update(num_hidden_layers=1), keep, r"layers.1.\S+: config.json says 1 layers"),
    "more_layers": (lambda c: c.update(num_hidden_layers=3), keep, r"model.layers.2.\S+: missing; no file holds it"),
    "adapter": (keep, adapt, r"lora_A.weight: an adapter that is not merged; merge it first"),
    "biases": (keep, add(Q.replace("weight", "bias"), 128), "q_proj.bias: not a tensor of this qwen3 model"),
    "output_bias": (keep, add("lm_head.bias", 128), "lm_head.bias: not a tensor of this qwen3 model"),
    "sinks": (keep, add("model.layers.0.self_attn.sinks", 4), "self_attn.sinks: not a tensor of this qwen3 model"),
    "other_head": (keep, add("lm_head.weight", 128, 128), f"lm_head.weight: differs from {EMBEDDING}"),
    "untied_without_head": (lambda c: c.update(tie_word_embeddings=False), keep, "lm_head.weight: missing"),
    "weight_scale": (keep, add(Q + "_scale", 1), "q_proj.weight_scale: not a tensor"),
    "input_scale": (keep, add(Q.replace("weight", "input_scale"), 1), "q_proj.input_scale: not a tensor"),
    "narrow": (
        lambda c: c.update(intermediate_size=128),
        keep,
        r"mlp.\S+: shape \(\S+ \d+\) in model.safetensors, but",
    ),
    "vocabulary": (lambda c: c.update(vocab_size=256), keep, rf"{EMBEDDING}: shape \(128, 128\) in"),
    "heads": (lambda c: c.update(num_key_value_heads=4), keep, r"k_proj.weight: shape \(64, 128\)"),
    "missing": (keep, lambda t: t.pop(DOWN), f"{DOWN}: missing; no file holds it"),
    "prefix": (keep, lambda t: t.update({f"base_model.model.{Q}": t.pop(Q)}), f"{Q}: missing"),
    "integers": (keep, lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{Q}: type torch.int8; supported are"),
    "fp8_without_scale": (keep, lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"{Q}_scale_inv: missing"),
}
VALUES = {
    "nan": (keep, lambda t: t[DOWN].view(-1)[7].fill_(float("nan")), f"{DOWN}: NaN or infinity in model.safetensors"),
    "infinity": (keep, lambda t: t[EMBEDDING][3].fill_(float("-inf")), f"{EMBEDDING}: NaN or infinity in model.safet"),
    "fp8": (
        keep,
        lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn), Q + "_scale_inv": torch.ones(1, 1)}),
        f"{Q}: torch.float8_e4m3fn, which the trainer does not read; convert it: python -m checkpoint_tools",
    ),
}


@pytest.mark.parametrize("case", [*CASES, *VALUES])
def test_the_run_refuses_what_the_tools_refuse(case, tmp_path):
    change_config, change_tensors, message = (CASES | VALUES)[case]
    folder = write(tmp_path / "model", change_config, change_tensors)
    with pytest.raises(ConfigError, match=message) as error:
        check_folder(model_in(folder), folder)
    assert len(str(error.value).splitlines()) == 2
    if case in CASES and case != "other_head":  # the tools compare the head when they convert
        with pytest.raises(CheckpointError, match=message):
            HfFolder.open(folder)


def test_a_whole_folder_is_accepted(tmp_path):
    folder = write(
        tmp_path / "model",
        lambda c: c.update(is_llama_config=True),
        lambda t: t.update({"lm_head.weight": t[EMBEDDING]}),
    )
    assert check_folder(model_in(folder), folder).endswith("is_llama_config = True")
    assert check_folder(MODEL, None) == ""


def test_a_layer_beyond_those_of_config_json_is_no_prediction_layer(tmp_path):
    """GLM-4.5 and DeepSeek-V3 have such a layer, which a run leaves out."""
    half = write(tmp_path / "half", lambda c: c.update(num_hidden_layers=1), model=GLM)
    with pytest.raises(ConfigError, match=r"model.layers.1.\S+: config.json says 1 layers"):
        check_folder(model_in(half), half)
    with pytest.raises(CheckpointError, match=r"model.layers.1.\S+: config.json says 1 layers"):
        HfFolder.open(half)
    extra = {f"model.layers.2.{name}.weight": torch.ones(2) for name in ("enorm", "hnorm", "eh_proj", "mlp.gate")}
    whole = write(tmp_path / "whole", change_tensors=lambda tensors: tensors.update(extra), model=GLM)
    assert check_folder(model_in(whole), whole) == ""


def fuse_experts(tensors: dict) -> None:
    experts = "model.layers.1.mlp.experts."
    parts = [tensors.pop(f"{experts}{index}.down_proj.weight") for index in range(4)]
    tensors[f"{experts}down_proj"] = torch.stack(parts)


@pytest.mark.parametrize(
    ("change_config", "change_tensors", "message"),
    [
        (lambda c: c.update(n_routed_experts=2), keep, r"experts.2.\S+: not a tensor .*; config.json says 2 experts"),
        (lambda c: c.update(n_routed_experts=8), keep, r"experts.4.\S+: missing; no file holds it"),
        (keep, lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), r"experts.3.up_proj.weight: missing"),
        (keep, lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), "e_score_correction_bias: missing"),
        (keep, fuse_experts, "experts.down_proj: .* all experts of a layer: save the model by save_pretrained"),
        (lambda c: c.update(moe_intermediate_size=64), keep, r"experts.0.gate_proj.weight: shape \(128, 128\)"),
        (lambda c: c.update(first_k_dense_replace=0), keep, r"layers.0.mlp.\S+: not a tensor of this glm4_moe model"),
    ],
)
def test_experts_that_config_json_does_not_describe(change_config, change_tensors, message, tmp_path):
    folder = write(tmp_path / "model", change_config, change_tensors, model=GLM)
    with pytest.raises(ConfigError, match=message) as error:
        check_folder(model_in(folder), folder)
    assert len(str(error.value).splitlines()) == 2


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    folder = write(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer: neither tokenizer.json"):
        check_folder(model_in(folder), folder)


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    folder = write(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter_config.json: an adapter beside the weights.*merge it first"):
        check_folder(model_in(folder), folder)


def test_a_head_of_another_type_is_compared_by_value(tmp_path):
    folder = write(tmp_path / "model", change_tensors=lambda t: t.update({"lm_head.weight": t[EMBEDDING].float()}))
    assert check_folder(model_in(folder), folder) == ""


@pytest.mark.parametrize("command", ["grpo", "train", "rl", "eval"])
@pytest.mark.parametrize("case", ["adapter", "nan"])
def test_commands_end_in_three_lines_before_anything_starts(command, case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8RL_DATA_SEEN", raising=False)
    started = []
    monkeypatch.setattr(train, "on_every_rank", lambda *args: started.append(args) or 0)
    monkeypatch.setattr("megatron_fp8rl.commands.eval.on_every_rank", lambda *args: started.append(args) or 0)
    _, change, message = (CASES | VALUES)[case]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "2+2?", "answer": "4"}) + "\n")
    folder = write(tmp_path / "model", change_tensors=change)
    fields = [
        f"--model.{name}={value}"
        for name, value in dict(
            family="qwen3",
            num_layers=2,
            hidden_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=128,
            ffn_hidden_size=256,
            tie_embeddings=True,
            rope_theta=MODEL.rope_theta,
            num_experts=0,
        ).items()
    ]
    fields += ["--precision.trainer", "bf16", "--precision.rollout", "bf16"]
    args = {
        "grpo": ["--model", str(folder), "--data", "rows.jsonl", "--reward", "number", "--gpus", "0"],
        "train": ["tiny_qwen3", *fields, "--model.hf_path", str(folder), "--warm_start.steps", "0"],
        "rl": ["tiny_qwen3", *fields, "--model.hf_path", str(folder)],
        "eval": ["tiny_qwen3", *fields, "--checkpoint", str(folder)],
    }[command]
    assert cli.main(COMMANDS, [command, *args]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) <= 3 and re.search(message, lines[-1]), lines
    assert not started and not (tmp_path / "runs").exists()


def test_blocks_of_every_tensor_are_read_if_all_are_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_check, "_MAX_SCANNED_BYTES", 1000)
    monkeypatch.setattr(folder_check, "_SAMPLED_BYTES", 1000)
    monkeypatch.setattr(folder_check, "_BLOCK_BYTES", 512)
    whole = write(tmp_path / "whole")
    line = check_folder(model_in(whole), whole)
    num_tensors = len(random_tensors(MODEL))
    assert f"blocks of {num_tensors} of {num_tensors} tensors; the trainer checks all of them" in line
    for row in (0, -1):
        change = lambda tensors, row=row: tensors[DOWN][row].fill_(float("nan"))  # noqa: E731
        folder = write(tmp_path / f"nan{row}", change_tensors=change)
        with pytest.raises(ConfigError, match=f"{DOWN}: NaN or infinity in model.safetensors"):
            check_folder(model_in(folder), folder)
    folder = write(tmp_path / "one", change_tensors=lambda t: t["model.norm.weight"][5].fill_(float("inf")))
    with pytest.raises(ConfigError, match=r"model.norm.weight: NaN or infinity"):  # small tensors are read whole
        check_folder(model_in(folder), folder)
