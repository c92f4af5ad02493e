"""FP8 checkpoints: the bytes that the exporter publishes, and a config.json that names what is not FP8."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_tools import __main__ as program
from checkpoint_tools import hf_to_fp8, hf_to_megatron, verify
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.workers import WorkerOptions
from megatron_fp8rl.config import MlaConfig, ModelConfig, RouterConfig
from megatron_fp8rl.kernels.blockwise import dequantize_weight
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.digest import digests
from megatron_fp8rl.weight_sync.pack import LocalShards, RoundPacker
from megatron_fp8rl.weight_sync.plan import plan
from megatron_fp8rl.weight_sync.schedule import plan_schedule
from tests.helpers.checkpoints import random_tensors, read_tensors, write_folder

_COMMON = dict(num_layers=3, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=131)
MODELS = {
    "llama": ModelConfig(family="llama", ffn_hidden_size=384, tie_embeddings=True, **_COMMON),
    "qwen2": ModelConfig(family="qwen2", qkv_bias=True, ffn_hidden_size=384, **_COMMON),
    "qwen3_moe": ModelConfig(
        family="qwen3_moe", num_experts=6, experts_per_token=2, moe_ffn_hidden_size=128, **_COMMON
    ),
    "mixtral": ModelConfig(family="mixtral", num_experts=6, experts_per_token=2, moe_ffn_hidden_size=128, **_COMMON),
    "deepseek_v3": ModelConfig(
        family="deepseek_v3",
        num_experts=6,
        experts_per_token=2,
        moe_ffn_hidden_size=128,
        ffn_hidden_size=384,
        num_shared_experts=1,
        first_dense_layers=1,
        mla=MlaConfig(q_lora_rank=128, kv_lora_rank=96, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64),
        router=RouterConfig(score="sigmoid", correction_bias=True),
        **_COMMON | dict(num_key_value_heads=4),
    ),
}


def quantized(model: ModelConfig, folder: Path, dtype: torch.dtype = torch.bfloat16, **options) -> tuple[Path, dict]:
    """(FP8 folder, tensors that it was made of)"""
    tensors = random_tensors(model, dtype)
    source = write_folder(folder / "hf", tensors, registry.to_hf_config(model))
    chosen = hf_to_fp8.Options(source=source, target=folder / "fp8", workers=1, shard_gb=0.0005, **options)
    hf_to_fp8.convert(HfFolder.open(source), folder / "fp8", chosen)
    return folder / "fp8", tensors


def published(model: ModelConfig, tensors: dict, options: hf_to_fp8.Options) -> dict[str, torch.Tensor]:
    """What the exporter of one trainer rank sends, by name."""
    planned = plan(model, LayerTable.build(model, options.precision), TrainerLayout(), EngineLayout())
    parameters = {name: registry.from_hf(name, tensors.__getitem__, model) for name in registry.weights(model)}
    shards = LocalShards(parameters, TrainerLayout(), model, 0)
    sent: dict[str, torch.Tensor] = {}
    for number in plan_schedule(planned, model, bucket_bytes=1 << 40).rounds:
        (message,) = number.messages
        slot = torch.zeros(message.num_bytes, dtype=torch.uint8)
        RoundPacker(number, slot, shards, rank=0, group=None)()
        for part in message.parts:
            data = slot[part.offset : part.offset + part.num_bytes].view(getattr(torch, part.dtype))
            sent[part.name] = data.view(part.shape)
    return sent


@pytest.mark.parametrize(
    ("family", "scales", "dtype"),
    [
        *((family, scales, torch.bfloat16) for family in MODELS for scales in ("pow2", "fp32")),
        ("llama", "pow2", torch.float32),  # is rounded to BF16 first, as by the exporter
        ("qwen3_moe", "mxfp8", torch.bfloat16),
        ("deepseek_v3", "mxfp8", torch.bfloat16),
    ],
)
def test_bytes_are_those_that_the_exporter_publishes(family, scales, dtype, tmp_path):
    model = MODELS[family]
    chosen = {"format": "mxfp8"} if scales == "mxfp8" else {"scales": scales}
    folder, tensors = quantized(model, tmp_path, dtype, bf16_last_layers=1, **chosen)
    options = hf_to_fp8.Options(source=folder, target=folder, bf16_last_layers=1, **chosen)
    expected = published(model, tensors, options)
    found = read_tensors(folder)
    assert found.keys() == expected.keys()
    assert digests([found[name] for name in expected]) == digests(list(expected.values()))
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in found.values()) > 5
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("family", MODELS)
def test_config_names_every_module_that_is_not_fp8(family, tmp_path):
    folder, _ = quantized(MODELS[family], tmp_path, bf16_first_layers=1)
    config = json.loads((folder / "config.json").read_text())
    said = config["quantization_config"]
    assert said["quant_method"] == "fp8" and said["weight_block_size"] == [128, 128]
    assert config["dtype"] == "bfloat16"
    found = read_tensors(folder)
    matrices = {
        name.removesuffix(".weight") for name, tensor in found.items() if tensor.ndim == 2 and "scale" not in name
    }
    in_fp8 = {name.removesuffix(".weight") for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    assert set(said["modules_to_not_convert"]) == matrices - in_fp8
    assert all(f"{name}.weight_scale_inv" in found for name in in_fp8)
    routers = {name for name in matrices if name.endswith((".mlp.gate", ".block_sparse_moe.gate"))}
    assert bool(routers) == MODELS[family].is_moe and routers <= set(said["modules_to_not_convert"])
    assert not any(name.startswith("model.layers.0.") for name in in_fp8)


def test_mxfp8_folders_are_those_of_compressed_tensors(tmp_path):
    folder, tensors = quantized(MODELS["qwen3_moe"], tmp_path, bf16_first_layers=1, format="mxfp8")
    said, found = json.loads((folder / "config.json").read_text())["quantization_config"], read_tensors(folder)
    assert said["quant_method"] == "compressed-tensors" and said["format"] == "mxfp8-quantized"
    in_fp8 = {name.removesuffix(".weight") for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    matrices = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.ndim == 2}
    assert set(said["ignore"]) == matrices - in_fp8 and len(in_fp8) == 2 * (4 + 3 * 6)
    for name in in_fp8:
        data, scale = found[f"{name}.weight"], found[f"{name}.weight_scale"]
        assert scale.dtype == torch.uint8 and scale.shape == (data.shape[0], data.shape[1] // 32)
    with pytest.raises(CheckpointError, match="compressed-tensors"):  # this program reads block FP8 only
        HfFolder.open(folder)


def test_columns_that_are_no_multiple_of_32_have_no_mxfp8(tmp_path):
    model = replace(MODELS["llama"], ffn_hidden_size=336)
    with pytest.raises(CheckpointError, match=r"down_proj.weight: .*336.* not a multiple of 32"):
        quantized(model, tmp_path, format="mxfp8")


def test_fp8_is_read_back_as_what_its_bytes_stand_for(tmp_path):
    folder, _ = quantized(MODELS["qwen3_moe"], tmp_path)
    stored, source = read_tensors(folder), HfFolder.open(folder)
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    expected = dequantize_weight(stored[name], stored[f"{name}_scale_inv"]).bfloat16()
    assert torch.equal(source.rows(name, 0, len(expected)), expected)
    source = HfFolder.open(folder)
    # Rows from the middle of a block need the block's scale, and no row twice in the digest.
    assert torch.equal(torch.cat([source.rows(name, a, b) for a, b in ((0, 50), (50, 100), (100, 128))]), expected)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_verify_proves_fp8_and_names_a_changed_block(scales, tmp_path, capsys):
    folder, _ = quantized(MODELS["qwen3_moe"], tmp_path, scales=scales)
    args = ["verify", str(tmp_path / "hf"), str(folder), "--workers", "1"]
    assert program.main(args) == 0
    assert "FP8 rounds; the rounded source was compared" in capsys.readouterr().out
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    entry = HfFolder.open(folder).entries[name]
    content = bytearray(entry.file.read_bytes())
    content[entry.offset + 77] ^= 1
    entry.file.write_bytes(content)
    assert program.main(args) == 1
    said = capsys.readouterr().out
    assert f"different: {name}\n" in said and "1 of " in said


def test_verify_names_what_differs_after_a_conversion(tmp_path, capsys):
    model = MODELS["llama"]
    tensors = random_tensors(model)
    source = write_folder(tmp_path / "hf", tensors, registry.to_hf_config(model))
    hf_to_megatron.convert(HfFolder.open(source), tmp_path / "megatron", WorkerOptions(workers=1))
    args = ["verify", str(tmp_path / "other"), str(tmp_path / "megatron"), "--workers", "1", "--logits", "no"]
    changed = tensors | {"model.layers.2.self_attn.k_proj.weight": tensors["model.layers.1.self_attn.k_proj.weight"]}
    write_folder(tmp_path / "other", changed, registry.to_hf_config(model))
    assert program.main(args) == 1
    assert capsys.readouterr().out.splitlines()[0] == "different: model.layers.2.self_attn.k_proj.weight"
    wider = replace(model, vocab_size=132)
    write_folder(tmp_path / "wider", random_tensors(wider), registry.to_hf_config(wider))
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight: \(131, 256\) instead of \(132, 256\)"):
        verify.run(verify.Options(source=tmp_path / "wider", converted=tmp_path / "megatron"))


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = MODELS["llama"]
    tensors = random_tensors(model)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        bad = tensors | {name: tensors[name].clone()}
        bad[name].view(-1)[130] = float("inf")
        source = write_folder(tmp_path / name / "hf", bad, registry.to_hf_config(model))
        options = hf_to_fp8.Options(source=source, target=tmp_path / name / "fp8", workers=1)
        with pytest.raises(CheckpointError, match=f"{name}: has NaN or infinity"):
            hf_to_fp8.convert(HfFolder.open(source), options.target, options)
        assert not options.target.exists()
