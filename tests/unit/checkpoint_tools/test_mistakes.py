"""Mistakes of users are refused with a message: overwritten folders, lost data, invalid options."""

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_tools import __main__ as program
from checkpoint_tools import hf_to_megatron, verify
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.torch_dist import append
from checkpoint_tools.workers import WorkerOptions
from megatron_fp8rl.names import registry
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.checkpoints import random_tensors, read_tensors, save_with_transformers, write_folder
from tests.helpers.families import MODELS

MODEL = replace(tiny_qwen3_moe().model, num_experts=2, vocab_size=100)
ONE_WORKER = WorkerOptions(workers=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", random_tensors(MODEL), registry.to_hf_config(MODEL))


def run(*args: object) -> int:
    return program.main([*map(str, args), "--workers", "1"])


def refused(capsys, *args: object) -> str:
    assert run(*args) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (".", "is or contains the source {}; choose another name"),
        ("..", "is or contains the source {}; choose another name"),
        ("link", "is or contains the source {}; choose another name"),
        ("out", "is inside the source {}; choose another folder"),
    ],
)
def test_a_source_is_not_overwritten(target, message, source, capsys):
    (source / "link").symlink_to(source)
    before = sorted(path.name for path in source.iterdir())
    assert message.format(source) in refused(capsys, "hf_to_megatron", source, source / target, "--overwrite")
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_target_may_be_a_link_and_be_overwritten_again(source, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    for options in ((), ("--overwrite",), ("--overwrite",)):
        assert run("hf_to_megatron", source, tmp_path / "link", *options) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "real").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "hf", "link"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_scales_of_another_type_are_refused(tmp_path, capsys):
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = random_tensors(MODEL)
    blocks = tuple(-(-n // 128) for n in tensors[name].shape)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.full(blocks, 127, dtype=torch.int32)
    folder = write_folder(tmp_path / "odd", tensors, registry.to_hf_config(MODEL))
    said = refused(capsys, "hf_to_megatron", folder, tmp_path / "out")
    assert f"{name}_scale_inv: type torch.int32; supported scales are BF16, FP16, FP32 and E8M0" in said


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_what_the_tools_did_not_make_is_not_overwritten(make, source, tmp_path, capsys):
    target = tmp_path / "home"
    make(target)
    if target.is_dir():
        (target / "thesis.tex").write_text("x")
    assert "these tools did not write it" in refused(capsys, "hf_to_fp8", source, target, "--overwrite")
    assert target.exists() and (target.is_file() or (target / "thesis.tex").exists())


def test_a_folder_that_cannot_be_made_is_refused_by_name(source, tmp_path, capsys):
    (tmp_path / "file").touch()
    said = refused(capsys, "hf_to_megatron", source, tmp_path / "file" / "target")
    assert "cannot be written" in said and "Not a directory. Choose another folder" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hf_to_fp8", "--tensor", "0"], "--tensor 0: at least 1 is needed"),
        (["hf_to_fp8", "--bf16_first_layers", "-1"], "--bf16_first_layers -1: at least 0 is needed"),
        (["hf_to_fp8", "--bf16_last_layers", "9"], "no matrix would be FP8"),
        (["hf_to_fp8", "--shard_gb", "nan"], "--shard_gb nan: expected GB of a file, more than 0"),
        (["hf_to_megatron", "--workers", "0"], "--workers 0: at least 1 is needed"),
        (["hf_to_megatron", "--max_memory", "1M"], "--max_memory '1M': at least 64M are needed"),
        (["verify", "--num_tokens", "0"], "--num_tokens 0: at least 1 is needed"),
    ],
)
def test_options_without_a_meaning_are_refused(args, message, source, tmp_path, capsys):
    command, *options = args
    try:
        assert program.main([command, str(source), str(tmp_path / "target"), *options]) == 2
    except SystemExit as end:  # of tyro, which reads the options
        assert end.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("equal", [True, False])
def test_a_stored_head_is_left_out_only_if_it_is_the_embedding(equal, tmp_path):
    """Fine-tuning may untie a head and leave config.json as it was; to drop such a head would be another model."""
    tied = replace(MODEL, tie_embeddings=True)
    tensors = random_tensors(tied)
    head = tensors["model.embed_tokens.weight"].clone()
    if not equal:
        head[-1, -1] += 1
    folder = write_folder(tmp_path / "hf", tensors | {"lm_head.weight": head}, registry.to_hf_config(tied))
    error = r"model-0000\d-of-00002.safetensors:\n  lm_head.weight: differs from"
    with nullcontext() if equal else pytest.raises(CheckpointError, match=error):
        hf_to_megatron.convert(HfFolder.open(folder), tmp_path / "megatron", ONE_WORKER)


def test_non_finite_weights_are_kept_and_reported(tmp_path, capsys):
    name, tensors = "model.layers.1.self_attn.k_proj.weight", random_tensors(MODEL)
    tensors[name][3, 5] = float("nan")
    source = write_folder(tmp_path / "hf", tensors, registry.to_hf_config(MODEL))
    for args in (["hf_to_megatron", source, tmp_path / "m"], ["megatron_to_hf", tmp_path / "m", tmp_path / "back"]):
        assert run(*args) == 0
        assert f"{args[0]}: warning: 1 tensors have NaN or infinity: {name}\n" in capsys.readouterr().err
    assert torch.equal(read_tensors(tmp_path / "back")[name].view(torch.int16), tensors[name].view(torch.int16))
    assert run("verify", source, tmp_path / "m", "--num_tokens", "8") == 1
    shown = capsys.readouterr().out
    assert "bit for bit" in shown and "are not finite" in shown and "both checkpoints have the same" in shown


def test_code_and_mixed_types_of_a_source_are_said(tmp_path, capsys):
    tensors = random_tensors(MODEL)
    gate = "model.layers.0.mlp.experts.0.gate_proj.weight"
    tensors[gate] = tensors[gate].float()
    config = registry.to_hf_config(MODEL) | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    source = write_folder(tmp_path / "hf", tensors, config)
    (source / "modeling_own.py").write_text("raise SystemExit('this ran')\n")
    assert run("hf_to_megatron", source, tmp_path / "m") == 0
    said = capsys.readouterr().out
    assert "skipped: custom code of the folder (modeling_own.Own, modeling_own.py)" in said
    assert "types: parts of 1 tensors differ; each takes its widest type (decoder.layers." in said


def test_large_numbers_are_not_taken_for_infinity(tmp_path, capsys):
    tensors = random_tensors(MODEL)
    tensors["model.norm.weight"].fill_(torch.finfo(torch.bfloat16).max)  # a sum of them overflows
    source = write_folder(tmp_path / "hf", tensors, registry.to_hf_config(MODEL))
    assert run("hf_to_megatron", source, tmp_path / "m") == 0
    assert "warning" not in capsys.readouterr().err


def test_a_disk_that_fills_up_inside_an_archive_is_called_full():
    """torch.save hides the error of the write behind one of its own."""
    with pytest.raises(OSError) as full, open("/dev/full", "wb") as stream:
        append(stream, torch.zeros(100_000), "file", (0,))
    assert full.value.errno == errno.ENOSPC


def test_the_folder_is_locked_until_it_has_its_name(source, tmp_path, monkeypatch):
    """A second program must not take a complete folder, about to be renamed, for an interrupted one."""
    rename, locked = os.rename, []

    def observed(old: str, new: str) -> None:
        locked.append((Path(old) / ".lock").exists())
        rename(old, new)

    monkeypatch.setattr(os, "rename", observed)
    hf_to_megatron.convert(HfFolder.open(source), tmp_path / "m", ONE_WORKER)
    assert locked[-1] and not (tmp_path / "m" / ".lock").exists()


def test_logits_of_experts_whose_rows_are_no_multiple_of_16_bytes(tmp_path):
    """transformers multiplies experts in groups by a kernel that refuses them, unless told otherwise."""
    folder = save_with_transformers(replace(MODELS["mixtral"], moe_ffn_hidden_size=26), tmp_path / "hf", torch.float32)
    logits = verify._transformers_logits(folder, torch.arange(5))
    assert logits.shape == (5, MODELS["mixtral"].vocab_size) and logits.isfinite().all()


def test_a_single_file_may_have_an_index(tmp_path):
    tensors = random_tensors(MODEL)
    source = write_folder(tmp_path / "hf", tensors, registry.to_hf_config(MODEL))
    for file in source.glob("model*"):
        file.unlink()
    save_file(tensors, source / "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(HfFolder.open(source).entries) == len(tensors)


def test_a_config_of_another_model_is_refused_by_the_fields_that_differ(source, tmp_path, capsys):
    megatron = tmp_path / "megatron"
    hf_to_megatron.convert(HfFolder.open(source), megatron, ONE_WORKER)
    state = json.loads((megatron / "state.json").read_text())
    del state["files"]["config.json"]
    (megatron / "state.json").write_text(json.dumps(state))
    (megatron / "config.json").write_text(json.dumps(registry.to_hf_config(replace(MODEL, rope_theta=5.0))))
    said = refused(capsys, "megatron_to_hf", megatron, tmp_path / "back")
    assert f"describes another model: rope_theta is 5.0 instead of {MODEL.rope_theta}. Set --hf_config" in said
