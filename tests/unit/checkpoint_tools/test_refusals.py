"""Damaged, incomplete and misnamed checkpoints are refused by file or tensor name; no half result is left."""

import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools import __main__ as program
from checkpoint_tools import hf_to_fp8, hf_to_megatron, megatron_to_hf
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.megatron_folder import MegatronFolder
from checkpoint_tools.workers import WorkerOptions
from megatron_fp8rl.names import registry
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.checkpoints import assert_same_tensors, random_tensors, read_tensors, write_folder

ONE_WORKER = WorkerOptions(workers=1)
MODEL = replace(tiny_qwen3_moe().model, num_experts=4, vocab_size=100)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    """hf (two files), megatron, and back (with digests)."""
    folder = tmp_path_factory.mktemp("healthy")
    source = write_folder(folder / "hf", random_tensors(MODEL), registry.to_hf_config(MODEL))
    hf_to_megatron.convert(HfFolder.open(source), folder / "megatron", ONE_WORKER)
    megatron_to_hf.convert(MegatronFolder.open(folder / "megatron"), folder / "back", ONE_WORKER, folder / "megatron")
    return folder


@pytest.fixture
def copy(healthy: Path, tmp_path: Path) -> Path:
    shutil.copytree(healthy, tmp_path / "copy")
    return tmp_path / "copy"


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def rewrite(folder: Path, name: str, change) -> None:
    """Apply ``change`` to the tensors of the file that holds ``name``."""
    file = file_of(folder, name)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_config(folder: Path, **fields) -> None:
    edit_json(folder / "config.json", lambda config: config.update(fields))


def edit_expert(folder: Path, change) -> None:
    """Replace the tensor of an expert."""
    rewrite(folder, EXPERT, lambda tensors: tensors.update({EXPERT: change(tensors[EXPERT])}))


def edit_json(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:-num_bytes])


def rename_tensor(folder: Path) -> None:
    new = EXPERT.replace("down_proj", "downproj")
    rewrite(folder, EXPERT, lambda tensors: tensors.update({new: tensors.pop(EXPERT)}))
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({new: index["weight_map"].pop(EXPERT)}))


HF_DAMAGES = {
    "truncated": (lambda f: cut(f / FIRST, 5), rf"{FIRST}: truncated: \d+ bytes instead of the \d+"),
    "no_header": (lambda f: (f / FIRST).write_bytes(b"\0" * 4), rf"{FIRST}: truncated: 4 bytes do not hold its header"),
    "header": (
        lambda f: (f / FIRST).write_bytes((b := (f / FIRST).read_bytes())[:8] + b"#" + b[9:]),
        rf"{FIRST}: damaged: its header cannot be read",
    ),
    "longer": (lambda f: (f / FIRST).open("ab").write(b"\0"), rf"{FIRST}: damaged: \d+ bytes instead of"),
    "missing_shard": (lambda f: (f / SECOND).unlink(), rf"{SECOND}: the file is missing"),
    "missing_shard_without_index": (
        lambda f: ((f / SECOND).unlink(), (f / INDEX).unlink()),
        rf"{SECOND}: the file is missing",
    ),
    "swapped_shards": (
        lambda f: ((f / FIRST).rename(f / "x"), (f / SECOND).rename(f / FIRST), (f / "x").rename(f / SECOND)),
        rf"{INDEX} says {FIRST}, which lacks it",
    ),
    "missing_tensor": (lambda f: rewrite(f, EXPERT, lambda t: t.pop(EXPERT)), rf"{EXPERT}: {INDEX} says"),
    "misnamed_tensor": (
        rename_tensor,
        r"model.layers.1.mlp.experts.2.downproj.weight: not a tensor of this qwen3_moe model.*"
        rf"is it {re.escape(EXPERT)}, which is missing\?",
    ),
    "misshaped_tensor": (
        lambda f: edit_expert(f, lambda t: t[1:].clone()),
        rf"{EXPERT}: shape \(\d+, \d+\) in model-\S+, but config.json says",
    ),
    "integers": (lambda f: edit_expert(f, lambda t: t.to(torch.int32)), rf"{EXPERT}: type torch.int32; supported are"),
    "fp8_without_scale": (
        lambda f: edit_expert(f, lambda t: t.to(torch.float8_e4m3fn)),
        rf"{EXPERT}_scale_inv: missing",
    ),
    "folder_for_file": (
        lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()),
        rf"{FIRST}: cannot be read: Is a directory",
    ),
    "git_lfs": (
        lambda f: (f / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        rf"{FIRST}: a pointer of Git LFS instead of the file. Fetch it with git lfs pull",
    ),
    "twice": (
        lambda f: save_file(load_file(f / FIRST) | load_file(f / SECOND), f / SECOND),
        rf"in {SECOND} and in {FIRST}",
    ),
    "two_sources": (
        lambda f: shutil.copy(f / FIRST, f / "model.safetensors"),
        rf"model.safetensors exists, but {INDEX} does not list it",
    ),
    "index_of_lists": (lambda f: edit_json(f / INDEX, lambda i: i.update(weight_map=[1])), rf"{INDEX}:\n  damaged"),
    "index_of_numbers": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({EXPERT: 3})),
        rf"{INDEX}:\n  damaged",
    ),
    "config_list": (lambda f: (f / "config.json").write_text("[]"), "config.json:\n  damaged: it is not a JSON object"),
    "pickled": (
        lambda f: ([p.unlink() for p in f.glob("model*")], torch.save({}, f / "pytorch_model.bin")),
        "other weight formats are not supported. Convert pytorch_model.bin .*save_pretrained",
    ),
    "index": (lambda f: (f / INDEX).write_text("{"), rf"{INDEX}:\n  damaged"),
    "config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no_weights": (lambda f: [p.unlink() for p in f.glob("model*")], "neither model.safetensors nor"),
    "unknown_family": (lambda f: edit_config(f, model_type="gpt_neox"), "model_type 'gpt_neox'.* is not supported"),
    "unsupported_field": (lambda f: edit_config(f, attention_bias=True), "attention_bias = True is not supported"),
    "layers": (
        lambda f: edit_config(f, num_hidden_layers=MODEL.num_layers + 1),
        rf"model.layers.{MODEL.num_layers}.self_attn.q_proj.weight: missing; no file holds it",
    ),
}


@pytest.mark.parametrize("kind", HF_DAMAGES)
def test_damaged_hugging_face_folders(kind, copy):
    damage, message = HF_DAMAGES[kind]
    damage(copy / "hf")
    with pytest.raises(CheckpointError, match=message) as refused:
        HfFolder.open(copy / "hf")
    assert str(copy / "hf") in str(refused.value)


def test_all_problems_are_named_at_once(copy):
    rename_tensor(copy / "hf")
    other = "model.layers.0.input_layernorm.weight"
    rewrite(copy / "hf", other, lambda t: t.update({other: t[other][1:].clone()}))
    with pytest.raises(CheckpointError) as refused:
        HfFolder.open(copy / "hf")
    assert len(refused.value.problems) == 3
    assert all(part in str(refused.value) for part in ("downproj", other, EXPERT))


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


def tensor_position(file: Path, name: str) -> int:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return 8 + length + json.loads(content[8 : 8 + length])[name]["data_offsets"][0] + 100


@pytest.mark.parametrize("command", [hf_to_megatron, hf_to_fp8])
def test_a_flipped_bit_in_a_tensor_is_found_by_its_digest(command, copy, tmp_path):
    source = copy / "back"
    flip(source / "model.safetensors", tensor_position(source / "model.safetensors", EXPERT))
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match=rf"{EXPERT}: damaged: SHA-256 \w+... instead of \w+"):
        command.run(command.Options(source=source, target=target, workers=1))
    assert not target.exists()


def test_a_flipped_bit_in_a_megatron_file_is_found_by_its_crc(copy, tmp_path):
    """Also in checkpoints of runs, which record no digests."""
    (copy / "megatron" / "digests.json").unlink()
    edit_json(copy / "megatron" / "state.json", lambda state: state["files"].pop("digests.json"))
    file = copy / "megatron" / "__0_0.distcp"
    folder = MegatronFolder.open(copy / "megatron")
    name = "decoder.layers.1.mlp.experts.2.linear_fc2.weight"
    (piece,) = folder._pieces(*folder.locations[name])
    flip(file, piece.position + piece.length // 2)
    with pytest.raises(CheckpointError, match=rf"__0_0.distcp:\n  {name}: damaged piece at byte {piece.position}"):
        megatron_to_hf.convert(folder, tmp_path / "target", ONE_WORKER, copy / "megatron")
    assert not (tmp_path / "target").exists()


def test_exchanged_pieces_are_found_by_digests(copy, tmp_path):
    """Each piece is whole, but they are not where they belong: only the digests know."""
    folder = MegatronFolder.open(copy / "megatron")
    one, other = (f"decoder.layers.1.mlp.experts.{expert}.linear_fc2.weight" for expert in (1, 2))
    folder.locations[one], folder.locations[other] = folder.locations[other], folder.locations[one]
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.experts.1.down_proj.weight: damaged: SHA-256"):
        megatron_to_hf.convert(folder, tmp_path / "target", ONE_WORKER, copy / "megatron")


def _in_the_cache(folder: Path, file: Path, digest: str) -> None:
    blobs = folder / "blobs"
    blobs.mkdir(exist_ok=True)
    file.rename(blobs / digest)
    file.symlink_to(blobs / digest)


def _in_a_folder(folder: Path, file: Path, digest: str) -> None:
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / f"{file.name}.metadata").write_text(f"{'0' * 40}\n{digest}\n{time.time()}\n")


@pytest.mark.parametrize("download", [_in_the_cache, _in_a_folder])
def test_a_flipped_bit_in_a_download_is_found_by_the_hubs_digest(download, copy, tmp_path, capsys):
    source = copy / "hf"
    for file in (source / FIRST, source / SECOND):
        download(source, file, hashlib.sha256(file.read_bytes()).hexdigest())
    args = ["hf_to_megatron", str(source), str(tmp_path / "target"), "--workers", "1"]
    assert program.main(args) == 0
    assert "source: 2 of 2 files have the digest of the Hub" in capsys.readouterr().out
    before = (source / SECOND).stat()
    flip((source / SECOND).resolve(), 5000)
    os.utime(source / SECOND, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that forgets leaves no date
    assert program.main([*args, "--overwrite"]) == 2
    assert re.search(rf"{SECOND}: damaged: SHA-256 \w+... instead of \w+... on the Hub", capsys.readouterr().err)


MEGATRON_DAMAGES = {
    "truncated": (lambda f: cut(f / "__0_0.distcp", 7), r"__0_0.distcp: truncated or damaged: \d+ bytes instead of"),
    "missing": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: the file is missing"),
    "no_metadata": (lambda f: (f / ".metadata").unlink(), ".metadata: the file is missing"),
    "metadata": (lambda f: cut(f / ".metadata", 100), r".metadata: truncated or damaged"),
    "state": (lambda f: (f / "state.json").write_text("{"), "state.json:\n  damaged"),
    "state_list": (lambda f: (f / "state.json").write_text("[]"), "state.json:\n  damaged"),
    "state_model": (
        lambda f: edit_json(f / "state.json", lambda s: s["config"].update(model="x")),
        "state.json does not record the model",
    ),
    "without_sizes": (
        lambda f: (cut(f / "__0_0.distcp", 7), edit_json(f / "state.json", lambda s: s.update(files={}))),
        r"__0_0.distcp: truncated: \d+ bytes instead of",
    ),
    "broken_metadata": (
        lambda f: (cut(f / ".metadata", 100), edit_json(f / "state.json", lambda s: s.update(files={}))),
        r".metadata:\n  damaged",
    ),
    "other_model": (
        lambda f: edit_json(f / "state.json", lambda s: s["config"]["model"].update(num_experts=5)),
        r"has shape \(\d+, 4, .*but the model needs \(\d+, 5,",
    ),
    "more_layers": (
        lambda f: edit_json(f / "state.json", lambda s: s["config"]["model"].update(qk_norm=False)),
        "decoder.layers.self_attention.q_layernorm.weight: not a parameter of a qwen3_moe model",
    ),
}


@pytest.mark.parametrize("kind", MEGATRON_DAMAGES)
def test_damaged_megatron_folders(kind, copy):
    damage, message = MEGATRON_DAMAGES[kind]
    damage(copy / "megatron")
    with pytest.raises(CheckpointError, match=message):
        MegatronFolder.open(copy / "megatron")


def test_existing_results_are_replaced_only_on_demand(copy, capsys):
    args = ["megatron_to_hf", str(copy / "megatron"), str(copy / "back"), "--workers", "1"]
    assert program.main(args) == 2
    assert "exists already" in capsys.readouterr().err
    (copy / "back" / "model.safetensors").write_bytes(b"old")
    assert program.main([*args, "--overwrite"]) == 0
    assert_same_tensors(read_tensors(copy / "back"), read_tensors(copy / "hf"))
    assert sorted(path.name for path in copy.iterdir()) == ["back", "hf", "megatron"]


def test_matrices_that_an_engine_cannot_hold_are_refused(copy, tmp_path, capsys):
    args = ["hf_to_fp8", str(copy / "hf"), str(tmp_path / "fp8"), "--tensor", "4", "--workers", "1"]
    assert program.main(args) == 2
    said = capsys.readouterr().err
    assert "_proj.weight: an engine rank keeps" in said and "lower --tensor or keep its layer BF16" in said
    assert not (tmp_path / "fp8").exists()


def test_a_matrix_that_no_degree_helps_is_refused_with_what_does(tmp_path, capsys):
    odd = replace(MODEL, moe_ffn_hidden_size=200)
    source = write_folder(tmp_path / "hf", random_tensors(odd), registry.to_hf_config(odd))
    assert program.main(["hf_to_fp8", str(source), str(tmp_path / "fp8"), "--workers", "1"]) == 2
    said = capsys.readouterr().err
    assert "experts.0.gate_proj.weight: an engine rank keeps 200 of axis 0" in said
    assert "multiple of 128; keep its layer BF16 (--bf16_first_layers" in said and "lower" not in said
