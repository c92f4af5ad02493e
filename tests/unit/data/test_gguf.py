"""GGUF files: every tensor, the architecture, the tokenizer and its end tokens, and the folder beside the file."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint_tools import __main__ as program
from checkpoint_tools.hf_folder import HfFolder
from megatron_fp8rl import cli, evaluate
from megatron_fp8rl.commands import grpo
from megatron_fp8rl.config import ConfigError, RopeScaling
from megatron_fp8rl.data.checkpoint_error import CheckpointError
from megatron_fp8rl.data.gguf_file import GgufFile
from megatron_fp8rl.data.gguf_folder import convert, model_folder
from megatron_fp8rl.data.tokenizer import decode, end_ids, load_tokenizer
from megatron_fp8rl.preflight import rules
from tests.helpers.checkpoints import assert_same_tensors, random_tensors, read_tensors
from tests.helpers.configs import make
from tests.helpers.gguf_files import CHATML, SPECIAL, tokenizer_metadata, write_gguf
from tests.helpers.models import small_model

SHARED = {"rope_theta": 1e5, "norm_eps": 1e-5, "tie_embeddings": True, "max_position_embeddings": 512}
LLAMA = small_model((2, 64, 4, 2, 16, 384), ffn=96, family="llama", **SHARED)
MODELS = {
    "llama": LLAMA,
    "llama_untied": replace(LLAMA, tie_embeddings=False),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32),
    "gemma3": replace(
        LLAMA,
        family="gemma3_text",
        qk_norm=True,
        sliding_window=8,
        layer_types=("sliding_attention",) * 5 + ("full_attention",),
        rope_theta=1e6,
        local_rope_theta=1e4,
        query_pre_attn_scalar=16,
    ),
    "qwen3_moe": replace(
        LLAMA,
        family="qwen3_moe",
        qk_norm=True,
        head_dim=32,
        ffn_hidden_size=128,
        num_experts=4,
        experts_per_token=2,
        moe_ffn_hidden_size=32,
        tie_embeddings=False,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_and_the_architecture_are_read(kind, tmp_path):
    model = MODELS[kind]
    # Norms as published, in BF16: 1 + weight, which the file has, is exact in float32.
    tensors = {n: t if t.ndim > 1 else t.bfloat16().float() for n, t in random_tensors(model, torch.float32).items()}
    folder = model_folder(write_gguf(tmp_path / "a.Q4.gguf", model, tensors))
    assert folder == tmp_path / "a.Q4.hf"
    assert_same_tensors(read_tensors(folder), tensors)
    source = HfFolder.open(folder)
    assert source.model == model and source.config["dtype"] == "float32"


def test_gemma_merges_pairs_in_the_order_of_scores(tmp_path):
    """A unigram model would take "ab" + "c", which has the larger sum, for the pieces of "abc"."""
    pieces = {"<pad>": 0.0, "<eos>": 0.0, "<bos>": 0.0, "<unk>": 0.0, "▁▁": 0.0, "bc": -1.0, "ab": -2.0, "▁a": -3.0}
    pieces |= dict.fromkeys(("▁", "a", "b"), -9.0) | {"c": -0.5}
    model = replace(MODELS["gemma3"], vocab_size=len(pieces))
    metadata = {"model": "llama", "tokens": [*pieces], "scores": [*pieces.values()], "merges": None, "pre": "default"}
    metadata |= {"token_type": [3] * 4 + [4] + [1] * 7, "bos_token_id": 2, "eos_token_id": 1, "eot_token_id": None}
    metadata |= {"chat_template": None, "padding_token_id": 0, "unknown_token_id": 3, "add_bos_token": True}
    named = {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in metadata.items()}
    tokenizer, ends, _ = GgufFile.open(write_gguf(tmp_path / "a.gguf", model, metadata=named)).tokenizer()
    ids = tokenizer("abc ac  b<eos>")["input_ids"]
    assert [[*pieces][token] for token in ids] == ["<bos>", "a", "bc", "▁a", "c", "▁▁", "b", "<eos>"]
    assert ends == [1] and tokenizer.decode(ids, skip_special_tokens=True) == "abc ac  b"


def test_quantized_weights_are_bf16(tmp_path):
    tensors = random_tensors(LLAMA, torch.float32)
    file = write_gguf(tmp_path / "a.gguf", LLAMA, tensors, quantized=True)
    read = read_tensors(model_folder(file))
    for name, tensor in tensors.items():
        assert read[name].dtype == torch.bfloat16
        bound = float(tensor.abs().max()) * (1 / 100 if tensor.ndim > 1 else 1 / 256)
        assert float((read[name].float() - tensor).abs().max()) < bound, name


def _factors(factor: float) -> np.ndarray:
    """Divisors of the frequencies of Llama 3.1 and 3.2, in the words of their configuration."""
    divisors = []
    for i in range(LLAMA.head_dim // 2):
        wavelength = 2 * math.pi * LLAMA.rope_theta ** (i / (LLAMA.head_dim // 2))
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_scaling_of_llama_3_is_recognized(factor, tmp_path):
    file = write_gguf(tmp_path / "a.gguf", LLAMA, more={"rope_freqs.weight": _factors(factor)})
    scaling = RopeScaling(
        kind="llama3", factor=factor, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert GgufFile.open(file).model == replace(LLAMA, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("metadata", "more", "message"),
    [
        ({"general.architecture": "gemma2"}, {}, "general.architecture = 'gemma2': not supported"),
        ({"llama.expert_count": 8}, {}, "llama.expert_count: experts of this architecture"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, {}, "scaling.type = 'yarn'"),
        ({"llama.rope.dimension_count": 8}, {}, "rope.dimension_count = 8"),
        ({"llama.block_count": None}, {}, "num_hidden_layers is missing"),
        ({"llama.feed_forward_length": 128}, {}, "blk.0.ffn_gate.weight: shape (96, 64) instead of (128, 64)"),
        ({"llama.block_count": 3}, {}, "blk.2.attn_norm.weight: missing"),
        ({}, {"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "rope_freqs.weight: frequencies of no known"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "blk.0.attn_q.bias: not a tensor of a llama model"),
    ],
)
def test_what_would_be_another_function_is_refused(metadata, more, message, tmp_path, capsys):
    file = write_gguf(tmp_path / "a.gguf", LLAMA, metadata=metadata, more=more)
    with pytest.raises(CheckpointError) as error:
        model_folder(file)
    assert message in str(error.value)
    assert sorted(tmp_path.iterdir()) == [file]
    assert program.main(["inspect", str(file)]) == 2 and message in capsys.readouterr().err


def test_a_damaged_file_is_named(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", LLAMA)
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        model_folder(file)
    with pytest.raises(CheckpointError, match="there is no such file"):
        model_folder(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
    ],
)
def test_text_is_split_as_by_the_models_tokenizer(split, pieces, tmp_path):
    file = write_gguf(tmp_path / "a.gguf", LLAMA, metadata=tokenizer_metadata(**{"ggml.pre": split}))
    tokenizer = load_tokenizer(str(model_folder(file)))
    assert tokenizer.tokenize("1234") == pieces
    text = "What is 12 + 34 , exactly ? ▁ é\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert decode(tokenizer, ids) == text
    assert "".join(map(str, tokenizer.tokenize("<|im_end|>"))) == "<|im_end|>"


def test_the_begin_token_is_added_where_the_file_says_so(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", LLAMA, metadata={"tokenizer.ggml.add_bos_token": True})
    assert load_tokenizer(str(model_folder(file))).encode("1")[0] == 1
    file = write_gguf(tmp_path / "b.gguf", LLAMA)
    assert len(load_tokenizer(str(model_folder(file))).encode("1")) == 1


@pytest.mark.parametrize(
    ("changes", "ends", "note"),
    [
        ({}, (2,), ""),
        ({"ggml.eos_token_id": 0}, (0, 2), "end token '<|im_end|>': from the chat template"),
        ({"ggml.eos_token_id": None}, (2,), "end token '<|im_end|>': from the chat template"),
        ({"ggml.eos_token_id": 0, "ggml.eot_token_id": 2}, (0, 2), ""),
        ({"ggml.eos_token_id": 999}, (2,), "from the chat template"),
        ({"chat_template": None}, (2,), "no chat template in the file"),
    ],
)
def test_end_tokens_come_from_the_metadata_and_the_chat_template(changes, ends, note, tmp_path, capsys):
    """transformers takes the begin token for the end token."""
    file = write_gguf(tmp_path / "a.gguf", LLAMA, metadata=tokenizer_metadata(**changes))
    folder = model_folder(file)
    tokenizer = load_tokenizer(str(folder))
    assert end_ids(tokenizer) == ends and tokenizer.eos_token == SPECIAL[ends[0]]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert tokenizer.chat_template == (None if "chat_template" in changes else CHATML)
    written = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert written == (list(ends) if len(ends) > 1 else ends[0])
    assert note in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.eos_token_id": None, "chat_template": None}, "tokenizer.ggml.eos_token_id: missing"),
        ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre = 'tekken': not known"),
        ({"ggml.model": "bert"}, "tokenizer.ggml.model = 'bert': not known"),
        ({"ggml.tokens": None}, "tokenizer.ggml.tokens: missing"),
    ],
)
def test_an_unusable_tokenizer_is_replaced_by_the_models(changes, message, tmp_path, capsys):
    metadata = tokenizer_metadata(**changes) | {"llama.vocab_size": 384}
    file = write_gguf(tmp_path / "a.gguf", LLAMA, metadata=metadata)
    with pytest.raises(CheckpointError) as error:
        model_folder(file)
    assert message in str(error.value) and "gguf_to_hf FILE FOLDER --tokenizer DIR" in str(error.value)
    other = model_folder(write_gguf(tmp_path / "other.gguf", LLAMA))
    out = tmp_path / "out"
    assert program.main(["gguf_to_hf", str(file), str(out), "--tokenizer", str(other)]) == 0
    assert end_ids(load_tokenizer(str(out))) == (2,) and HfFolder.open(out).model == LLAMA
    assert program.main(["gguf_to_hf", str(file), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_file_is_converted_once(tmp_path, capsys):
    file = write_gguf(tmp_path / "a.gguf", LLAMA)
    folder = model_folder(file)
    assert f"a.gguf: converting to {folder}, once" in capsys.readouterr().err
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder(file) == folder and capsys.readouterr().err == ""
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    write_gguf(file, replace(LLAMA, ffn_hidden_size=128))  # the file is another one now
    os.utime(file, ns=(1, 1))
    assert HfFolder.open(file).model.ffn_hidden_size == 128
    (folder / "gguf.json").unlink()
    with pytest.raises(CheckpointError, match="was not converted from a.gguf; rename it"):
        model_folder(file)
    assert (folder / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(file, folder)  # a folder that the user made is not replaced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "a.hf"]


def test_the_commands_take_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo, "_local_gpus", lambda: (0, 0.0))
    file = write_gguf(tmp_path / "a.gguf", LLAMA)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    options = grpo.GrpoOptions(model=str(file), data=(str(tmp_path / "rows.jsonl"),), reward=("exact",))
    cfg, notes = grpo.configure(options, cli.overriding([]))
    assert cfg.model.hf_path == cfg.data.tokenizer == str(tmp_path / "a.hf") and cfg.name == "a-rows"
    assert any("checkpoint_tools widen" in note for note in notes)
    assert evaluate._find(str(file)) == (tmp_path / "a.hf", [])
    with pytest.raises(ConfigError, match="there is no such file"):
        grpo.configure(replace(options, model=str(tmp_path / "b.gguf")), cli.overriding([]))
    with pytest.raises(ConfigError, match=f"name the GGUF file itself: {file}"):
        grpo.configure(replace(options, model=str(tmp_path)), cli.overriding([]))
    _, (violation,) = evaluate._find(str(tmp_path / "b.gguf"))
    assert violation.problem == "there is no such file"
    (violation,) = [v for v in rules.check(make(replace(LLAMA, hf_path=str(file)))) if v.field == "--model.hf_path"]
    assert "gguf_to_hf" in violation.remedy
    capsys.readouterr()
    assert program.main(["widen", str(file), str(tmp_path / "wide"), "--workers", "1"]) == 0
    assert program.main(["inspect", str(file)]) == 0
    assert isinstance(HfFolder.open(Path(tmp_path / "wide")), HfFolder)
