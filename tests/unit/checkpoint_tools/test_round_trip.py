"""Hugging Face to Megatron-Core and back, bit for bit, for every family; FP8 sources; what else is in a folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_tools import __main__ as program
from checkpoint_tools import digests, hf_to_megatron, megatron_to_hf
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder, side_files
from checkpoint_tools.megatron_folder import MegatronFolder
from checkpoint_tools.workers import WorkerOptions
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.fused_experts import fuse, split
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.names import registry
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.checkpoints import (
    assert_same_tensors,
    random_tensors,
    read_tensors,
    save_with_transformers,
    write_folder,
)
from tests.helpers.families import MODELS

ONE_WORKER = WorkerOptions(workers=1)
_QWEN3 = dict(
    num_layers=3,
    hidden_size=40,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=20,
    vocab_size=131,
    max_position_embeddings=64,
)
FAMILIES = MODELS | {
    "qwen3": ModelConfig(family="qwen3", ffn_hidden_size=56, tie_embeddings=True, **_QWEN3),
    "qwen3_moe": ModelConfig(family="qwen3_moe", num_experts=6, experts_per_token=2, moe_ffn_hidden_size=24, **_QWEN3),
}
TINY = replace(tiny_qwen3_moe().model, num_experts=4, vocab_size=100)
MTP = replace(FAMILIES["deepseek_v3"], num_mtp_layers=1)


def there_and_back(source: Path, folder: Path, *, keep_mtp: bool = False) -> Path:
    """Convert to Megatron-Core and back; the folder of the result."""
    hf_to_megatron.convert(HfFolder.open(source, keep_mtp=keep_mtp), folder / "megatron", ONE_WORKER)
    back = folder / "back"
    megatron_to_hf.convert(
        MegatronFolder.open(folder / "megatron"), back, ONE_WORKER, folder / "megatron", shard_gb=5e-5
    )
    return back


@pytest.mark.parametrize(("dtype", "shard"), [(torch.bfloat16, "60KB"), (torch.float32, "5GB")], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_bit_for_bit(family, dtype, shard, tmp_path):
    source = save_with_transformers(FAMILIES[family], tmp_path / "hf", dtype, shard)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard == "60KB")
    back = there_and_back(source, tmp_path)
    assert_same_tensors(read_tensors(back), read_tensors(source))
    assert len(list(back.glob("*.safetensors"))) > 1
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (back, source))
    assert ours == theirs
    assert {file.name for file in side_files(back)} == {file.name for file in side_files(source)}


def test_published_mxfp4_experts_are_read_as_bf16(tmp_path):
    """Compared with transformers; what comes back is BF16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = replace(FAMILIES["gpt_oss"], hidden_size=64, moe_ffn_hidden_size=32)
    expected = random_tensors(model)
    stored, generator = fuse(expected), torch.Generator().manual_seed(2)
    for name in [name for name in stored if name.endswith(".experts.gate_up_proj") or name.endswith("s.down_proj")]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(100, 140, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected |= dict(split(name, convert_moe_packed_tensors(blocks, scales)))
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = registry.to_hf_config(model) | {"quantization_config": quantization}
    source = write_folder(tmp_path / "hf", stored, config)
    back = there_and_back(source, tmp_path)
    assert_same_tensors(read_tensors(back), expected)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_mxfp4_blocks_without_scales_are_refused_by_the_name_of_the_scales(tmp_path):
    model = replace(FAMILIES["gpt_oss"], hidden_size=64, moe_ffn_hidden_size=32)
    stored = fuse(random_tensors(model))
    name = "model.layers.0.mlp.experts.down_proj"
    experts, columns, rows = stored.pop(name).shape
    stored[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
    source = write_folder(tmp_path / "hf", stored, registry.to_hf_config(model))
    with pytest.raises(CheckpointError) as error:
        HfFolder.open(source)
    assert error.value.problems == [f"{name}_scales: missing; {name}_blocks is MXFP4 and needs its scales"]


def test_matrices_of_an_unreadable_file_are_not_called_missing(tmp_path):
    model = FAMILIES["phi3"]
    source = save_with_transformers(model, tmp_path / "hf", torch.bfloat16, "60KB")
    where = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    damaged = where["model.layers.1.mlp.gate_up_proj.weight"]
    (source / damaged).write_bytes(b"\0" * 7)
    with pytest.raises(CheckpointError) as error:
        HfFolder.open(source)
    assert damaged in str(error.value) and "missing; no file holds it" not in str(error.value)


def test_transformers_loads_what_came_back(tmp_path):
    from transformers import AutoModelForCausalLM

    source = save_with_transformers(FAMILIES["qwen3_moe"], tmp_path / "hf", torch.bfloat16)
    back = there_and_back(source, tmp_path)
    tokens = torch.arange(20)[None]
    first, second = (AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, back))
    assert torch.equal(first, second)


def test_megatron_tensors_are_those_of_the_name_table(tmp_path):
    """Strips put together are what the name table builds from whole tensors."""
    tensors = random_tensors(TINY)
    source = write_folder(tmp_path / "hf", tensors, registry.to_hf_config(TINY))
    hf_to_megatron.convert(HfFolder.open(source), tmp_path / "megatron", ONE_WORKER)
    converted = MegatronFolder.open(tmp_path / "megatron")
    for name, weight in registry.weights(TINY).items():
        expected = registry.from_hf(name, tensors.__getitem__, TINY)
        assert torch.equal(converted.rows(weight, 0, weight.shape[0]), expected), name
        middle = weight.shape[0] // 3, weight.shape[0] // 2
        assert torch.equal(converted.rows(weight, *middle), expected[slice(*middle)]), name


def test_types_can_be_changed(tmp_path):
    model = FAMILIES["deepseek_v3"]
    source = save_with_transformers(model, tmp_path / "hf", torch.float32)
    hf_to_megatron.convert(HfFolder.open(source), tmp_path / "megatron", ONE_WORKER, dtype="bfloat16")
    megatron = MegatronFolder.open(tmp_path / "megatron")
    megatron_to_hf.convert(megatron, tmp_path / "back", ONE_WORKER, tmp_path / "megatron")
    for name, tensor in read_tensors(tmp_path / "back").items():
        # The correction bias of a router stays FP32: it is a sum of many small steps.
        expected = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == expected, name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("model", "scale_dtype"),
    [(TINY, torch.float32), (TINY, torch.bfloat16), (FAMILIES["minimax_m2"], torch.float32)],
    ids=["deepseek_v3", "qwen3_fp8", "minimax_m2"],
)
def test_official_fp8_checkpoints_are_read(model, scale_dtype, tmp_path):
    """Block FP8 with FP32 scales as DeepSeek and MiniMax publish it, and with BF16 scales as Qwen3-FP8 has them."""
    tensors = random_tensors(model)
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            stored[name] = expected[name] = tensor
            continue
        data, scale = quantize_weight(tensor, "fp32")
        scale = scale.to(scale_dtype)
        stored |= {name: data, f"{name}_scale_inv": scale}
        expected[name] = torch.empty_like(tensor)
        for row in range(scale.shape[0]):  # block by block, as the published code defines it
            for column in range(scale.shape[1]):
                block = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
                expected[name][block] = (data[block].float() * scale[row, column].float()).bfloat16()
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    if model.family == "minimax_m2":
        quantization["modules_to_not_convert"] = ["gate", "e_score_correction_bias", "lm_head"]
    config = registry.to_hf_config(model) | {"quantization_config": quantization}
    back = there_and_back(write_folder(tmp_path / "hf", stored, config), tmp_path)
    assert_same_tensors(read_tensors(back), expected)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


@pytest.mark.parametrize("keep", [False, True])
def test_prediction_layers_are_kept_or_left_out_by_choice(keep, tmp_path):
    tensors = random_tensors(MTP)
    source = write_folder(tmp_path / "hf", tensors, registry.to_hf_config(MTP))
    folder = HfFolder.open(source, keep_mtp=keep)
    extra = {name for name in tensors if name.startswith("model.layers.3.")}
    assert set(folder.skipped) == (set() if keep else extra)
    back = there_and_back(source, tmp_path, keep_mtp=keep)
    assert_same_tensors(read_tensors(back), {n: t for n, t in tensors.items() if keep or n not in extra})
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == int(keep)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_prediction_layers_that_only_config_json_has_are_not_missed(family, tmp_path, capsys):
    """transformers saves a fine-tuned model without them, and leaves their number in config.json."""
    model = FAMILIES[family]
    config = registry.to_hf_config(model) | {"num_nextn_predict_layers": 1}
    tensors = random_tensors(model)
    source = write_folder(tmp_path / "hf", tensors, config)
    back = there_and_back(source, tmp_path)
    assert_same_tensors(read_tensors(back), tensors)
    for converted in (tmp_path / "megatron", back):
        args = ["verify", str(source), str(converted), "--logits", "no", "--workers", "1"]
        assert program.main(args) == 0
    assert program.main(["inspect", str(source)]) == 0
    assert "but no file has their tensors" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"model.layers.3.eh_proj.weight: missing"):
        HfFolder.open(source, keep_mtp=True)
    part = write_folder(tmp_path / "part", tensors | {"model.layers.3.enorm.weight": torch.ones(40)}, config)
    with pytest.raises(CheckpointError, match=r"model.layers.3.eh_proj.weight: missing"):
        HfFolder.open(part, keep_mtp=None)


def test_tokenizer_and_other_files_travel_along(tmp_path):
    from megatron_fp8rl.data.tokenizer import character_tokenizer

    source = write_folder(tmp_path / "hf", random_tensors(TINY), registry.to_hf_config(TINY))
    character_tokenizer().save_pretrained(source)
    (source / "generation_config.json").write_text('{"top_k": 7}')
    back = there_and_back(source, tmp_path)
    for file in side_files(source):
        assert (back / file.name).read_bytes() == file.read_bytes(), file.name
    assert (back / "tokenizer.json").is_file()


def test_digests_are_those_of_the_bytes(tmp_path):
    import hashlib

    tensors = random_tensors(TINY)
    source = write_folder(tmp_path / "hf", tensors, registry.to_hf_config(TINY))
    back = there_and_back(source, tmp_path)
    recorded = digests.read(back)
    assert recorded == digests.read(tmp_path / "megatron")
    for name, tensor in tensors.items():
        assert recorded[name] == hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest(), name


def test_a_run_may_remove_the_checkpoint_that_is_being_converted(tmp_path, monkeypatch):
    source = write_folder(tmp_path / "hf", random_tensors(TINY), registry.to_hf_config(TINY))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000003"
    hf_to_megatron.convert(HfFolder.open(source), checkpoint, ONE_WORKER)
    convert_bucket = megatron_to_hf.ToHf.run

    def removed_first(self, bucket):
        shutil.rmtree(checkpoint, ignore_errors=True)
        return convert_bucket(self, bucket)

    monkeypatch.setattr(megatron_to_hf.ToHf, "run", removed_first)
    megatron_to_hf.convert(MegatronFolder.open(tmp_path / "run"), tmp_path / "back", ONE_WORKER, source)
    assert not checkpoint.exists()
    assert_same_tensors(read_tensors(tmp_path / "back"), read_tensors(source))


@pytest.mark.slow
def test_several_workers_do_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoint_tools.workers.BUCKET_BYTES", 100_000)
    source = write_folder(tmp_path / "hf", random_tensors(TINY), registry.to_hf_config(TINY))
    work = WorkerOptions(workers=2, max_memory="64M")
    hf_to_megatron.convert(HfFolder.open(source), tmp_path / "megatron", work)
    megatron_to_hf.convert(MegatronFolder.open(tmp_path / "megatron"), tmp_path / "back", work, tmp_path / "megatron")
    assert_same_tensors(read_tensors(tmp_path / "back"), read_tensors(source))
