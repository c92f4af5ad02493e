"""inspect and diff: counts, differences by name and number, and damaged checkpoints refused by name."""

import json
import shutil
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools import __main__ as program
from checkpoint_tools import diff, inspect, torch_dist
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_keys import trainer_key
from checkpoint_tools.views import HfView, MegatronView, open_view
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.kernels.blockwise import dequantize_weight, quantize_weight
from megatron_fp8rl.names import registry
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.checkpoints import random_tensors, write_folder

MODEL = replace(tiny_qwen3_moe().model, num_experts=4, vocab_size=100)
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


def write_hf(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 2) -> Path:
    return write_folder(folder, tensors, registry.to_hf_config(MODEL), num_files)


def write_megatron(folder: Path, tensors: dict[str, torch.Tensor], model: ModelConfig = MODEL) -> Path:
    """A distributed checkpoint as Megatron-Core lays it out, layers and experts stacked, by torch's own writer."""
    stacked: dict[str, torch.Tensor] = {}
    for name, weight in registry.weights(model).items():
        full = registry.from_hf(name, tensors.__getitem__, model)
        where = trainer_key(weight, model)
        stacked.setdefault(where.key, torch.zeros(*where.sizes, *full.shape, dtype=full.dtype))[where.index] = full
    moments = {f"optimizer.state.exp_avg.{key}": tensor.float() for key, tensor in stacked.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it saves in one process, which is meant
        torch.distributed.checkpoint.save(stacked | moments, checkpoint_id=folder, no_dist=True)
    (folder / "state.json").write_text(json.dumps({"config": {"model": asdict(model)}, "files": {}}))
    return folder


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors(MODEL)


@pytest.fixture
def hf(tmp_path, tensors) -> Path:
    return write_hf(tmp_path / "hf", tensors)


def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stored = dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        stored[name], stored[name + "_scale_inv"] = quantize_weight(tensors[name], "pow2")
    return stored


def test_inspect_counts_parameters_by_kind(hf, tensors):
    contents = inspect.read(hf)
    assert contents.num_parameters == sum(t.numel() for t in tensors.values())
    table = {line.name: line for line in inspect.lines(contents)}
    experts = table["model.layers.{0-1}.mlp.experts.{0-3}.down_proj.weight"]
    assert (experts.count, experts.shape, experts.dtype) == (8, (128, 256), "bfloat16")
    assert (experts.num_parameters, experts.num_bytes) == (8 * 128 * 256, 2 * 8 * 128 * 256)
    assert len(inspect.lines(contents, every=True, pattern="*layers.1.self_attn*")) == 6


def test_inspect_tells_scales_from_parameters(tmp_path, tensors):
    stored = quantized(tensors)
    contents = inspect.read(write_hf(tmp_path / "fp8", stored))
    assert contents.num_parameters == sum(t.numel() for t in tensors.values())
    assert {line.dtype for line in inspect.lines(contents)} == {"bfloat16", "float8_e4m3fn", "float32"}
    assert any("no parameters" in line for line in inspect.summary(contents))


def test_inspect_reads_distributed_checkpoints(tmp_path, tensors):
    contents = inspect.read(write_megatron(tmp_path / "megatron", tensors))
    assert contents.num_parameters == sum(t.numel() for t in tensors.values())
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert next(t for t in contents.tensors if t.name == key).shape == (2, 4, 512, 128)
    assert not any(line.name.startswith("optimizer") for line in inspect.lines(contents))
    assert inspect.lines(contents, pattern="optimizer*")


def test_inspect_lists_what_it_does_not_know(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    save_file({"a.0.weight": torch.ones(2, 3), "a.1.weight": torch.ones(2, 3)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "smollm3"}')
    contents = inspect.read(folder)
    assert contents.num_parameters == 12 and contents.model is None
    assert "smollm3" in contents.notes[0]
    assert [line.name for line in inspect.lines(contents)] == ["a.{0-1}.weight"]


def test_damaged_checkpoints_are_refused_by_name(hf, capsys):
    file = hf / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert program.main(["inspect", str(hf)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"{hf}:\n  {file.name}: truncated" in captured.err


def test_damaged_distributed_checkpoints_are_refused_by_name(tmp_path, tensors):
    folder = write_megatron(tmp_path / "megatron", tensors)
    file = next(folder.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"{file.name}: truncated"):
        inspect.read(folder)
    flipped = bytearray(content)
    key = "embedding.word_embeddings.weight"
    piece = torch_dist.read_metadata(folder)[key].pieces[0]
    flipped[piece.position + piece.length // 2] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=rf"{file.name}:\n  {key}: damaged"):
        diff.compare(open_view(folder), open_view(folder))
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata:\n  the file is missing"):
        inspect.read(folder)


def test_equal_checkpoints_are_equal_whatever_their_files(tmp_path, hf, tensors):
    one = write_hf(tmp_path / "one", tensors, num_files=1)
    result = diff.compare(open_view(hf), open_view(one))
    assert result.is_equal
    assert result.num_compared == len(tensors)
    assert result.num_numbers == sum(t.numel() for t in tensors.values())


def test_a_distributed_checkpoint_equals_what_it_was_made_of(tmp_path, hf, tensors):
    folder = write_megatron(tmp_path / "megatron", tensors)
    a, b = open_view(hf), open_view(folder)
    assert isinstance(a, HfView) and isinstance(b, MegatronView)
    # A small bound makes strips of 128 rows, which cut query groups and gate from up.
    assert diff.compare(a, b, memory_bytes=1).is_equal
    assert diff.compare(open_view(folder, by_key=True), open_view(folder, by_key=True), memory_bytes=1).is_equal


def test_differences_are_named_with_place_and_size(tmp_path, hf, tensors):
    changed = dict(tensors)
    changed[DOWN] = tensors[DOWN].clone()
    changed[DOWN][100, 7] += 2.0
    changed[DOWN][101, 9] = float("nan")
    del changed["model.norm.weight"]
    changed["lm_head.weight"] = tensors["lm_head.weight"].float()
    other = write_hf(tmp_path / "other", changed)
    found = {d.name: d for d in diff.compare(open_view(hf), open_view(other), memory_bytes=1).differences}
    assert set(found) == {DOWN, "model.norm.weight", "lm_head.weight"}
    assert (found[DOWN].kind, found[DOWN].num_different, found[DOWN].first) == ("values", 2, (100, 7))
    assert found[DOWN].max_abs == float("inf")
    assert found["model.norm.weight"].kind == "missing"
    # Equal values in another type differ in type alone.
    assert (found["lm_head.weight"].kind, found["lm_head.weight"].detail) == ("type", "bfloat16 and float32")
    back = {d.name: d.kind for d in diff.compare(open_view(other), open_view(hf)).differences}
    assert back["model.norm.weight"] == "extra"


def test_a_negative_zero_is_a_difference_of_bits(tmp_path, tensors):
    a, b = dict(tensors), dict(tensors)
    a[DOWN], b[DOWN] = torch.zeros_like(tensors[DOWN]), torch.zeros_like(tensors[DOWN])
    b[DOWN][0, 0] = -0.0
    views = (open_view(write_hf(tmp_path / name, stored)) for name, stored in (("a", a), ("b", b)))
    (found,) = diff.compare(*views).differences
    assert (found.max_abs, found.num_different) == (0.0, 1)


def test_fp8_is_compared_by_what_it_stands_for_on_request(tmp_path, hf, tensors):
    folder = write_hf(tmp_path / "fp8", quantized(tensors))
    raw = diff.compare(open_view(hf), open_view(folder))
    assert {d.kind for d in raw.differences} == {"type", "extra"}
    meant = diff.compare(open_view(hf), open_view(folder, dequantize=True), memory_bytes=1)
    values = {d.name: d for d in meant.differences if d.kind == "values"}
    assert set(values) == {name for name in tensors if "_proj" in name}
    # E4M3 has 3 bits of mantissa: half a unit in the last place of the largest number, which scales put below 448.
    for name, difference in values.items():
        assert 0 < difference.max_abs <= 2.0**-4 * float(tensors[name].abs().max())


def test_fp8_and_what_it_stands_for_are_equal(tmp_path, tensors):
    stored = quantized(tensors)
    fp8 = write_hf(tmp_path / "fp8", stored)
    meant = {name: x for name, x in stored.items() if not name.endswith("_scale_inv")}
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        meant[weight] = dequantize_weight(stored[weight], stored[name])
        assert torch.equal(meant[weight], meant[weight].bfloat16().float())  # powers of two: nothing is rounded
        meant[weight] = meant[weight].bfloat16()
    plain = write_hf(tmp_path / "bf16", meant)
    assert diff.compare(open_view(plain), open_view(fp8, dequantize=True)).is_equal


@pytest.mark.parametrize("other", ["same", "changed"])
def test_exit_status_and_text(tmp_path, hf, tensors, other, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(hf, copy)
    if other == "changed":
        file = copy / "model-00001-of-00002.safetensors"
        stored = load_file(file)
        name = sorted(stored)[3]
        stored[name] = stored[name] + 1
        save_file(stored, file)
        (copy / "config.json").write_text(json.dumps(registry.to_hf_config(replace(MODEL, rope_theta=5.0))))
    status = program.main(["diff", str(hf), str(copy)])
    text = capsys.readouterr().out
    if other == "same":
        assert status == 0 and "equal: " in text and "bit for bit" in text
    else:
        assert status == 1 and f"values: {name}" in text
        assert "config.json: rope_theta: 1000000.0 and 5.0" in text
        assert f"first different tensor: {name}" in text


def test_commands_and_their_mistakes(tmp_path, capsys):
    assert program.main(["--help"]) == 0
    assert "inspect" in capsys.readouterr().out
    assert program.main(["inspekt"]) == 2
    assert "did you mean inspect?" in capsys.readouterr().err
    assert program.main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
