"""Small GGUF files, as llama.cpp's converter writes them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from megatron_fp8rl.config import ModelConfig
from tests.helpers.checkpoints import random_tensors

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NAMES = {  # of a layer's tensors
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def byte_tokens() -> list[str]:
    """Special tokens, all bytes, and some longer tokens; 384 in all."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "123", "1234", "Ġa"]
    return [*tokens, *(f"<unused{i}>" for i in range(384 - len(tokens)))]


MERGES = ["1 2", "12 3", "123 4", "Ġ a"]


def tokenizer_metadata(**changes: Any) -> dict[str, Any]:
    tokens = byte_tokens()
    kinds = [3 if token in SPECIAL or token.startswith("<unused") else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    } | {f"tokenizer.{key}": value for key, value in changes.items()}


_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    file: Path,
    model: ModelConfig,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    quantized: bool = False,
    metadata: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """``model`` with Hugging Face tensors, in F32 or Q8_0.

    Args:
        file: the file to write.
        model: its architecture.
        tensors: weights; None: random ones.
        quantized: whether matrices are Q8_0.
        metadata: further or changed entries; None as a value leaves an entry out.
        more: further tensors, by GGUF names.
    """
    tensors = random_tensors(model, torch.float32) if tensors is None else tensors
    name = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}.get(model.family, model.family)
    entries = {
        f"{name}.block_count": model.num_layers,
        f"{name}.context_length": model.max_position_embeddings,
        f"{name}.embedding_length": model.hidden_size,
        f"{name}.feed_forward_length": model.ffn_hidden_size,
        f"{name}.attention.head_count": model.num_attention_heads,
        f"{name}.attention.head_count_kv": model.num_key_value_heads,
        f"{name}.attention.key_length": model.head_dim,
        f"{name}.attention.value_length": model.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": model.norm_eps,
        f"{name}.rope.freq_base": model.rope_theta,
        "general.name": "Test",
    }
    if model.family == "gemma3_text":
        entries[f"{name}.attention.sliding_window"] = model.sliding_window
    if model.is_moe:
        entries |= {
            f"{name}.expert_count": model.num_experts,
            f"{name}.expert_used_count": model.experts_per_token,
            f"{name}.expert_feed_forward_length": model.moe_ffn_hidden_size,
        }
    entries |= tokenizer_metadata() | dict(metadata or {})
    writer = gguf.GGUFWriter(file, entries.pop("general.architecture", name))
    for key, value in entries.items():
        if value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
    stacked = {_stored_name(key, model): array for key, array in _stacked(tensors).items()}
    for key, array in (stacked | dict(more or {})).items():
        if model.family == "llama" and key.endswith(("attn_q.weight", "attn_k.weight")):
            array = _neighbours(array, model.head_dim)
        if model.family == "gemma3_text" and array.ndim == 1:
            array = array + np.float32(1.0)
        if quantized and array.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(key, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _neighbours(array: np.ndarray, head_dim: int) -> np.ndarray:
    """The two halves of each head interleaved: rows 0, D / 2, 1, D / 2 + 1, ..."""
    half = head_dim // 2
    order = [half * (i % 2) + i // 2 for i in range(head_dim)]
    heads = array.reshape(-1, head_dim, *array.shape[1:])
    return np.ascontiguousarray(heads[:, order].reshape(array.shape))


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Arrays, with the experts of a layer in one."""
    arrays: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if match := _EXPERTS.fullmatch(name):
            arrays.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", []).append(tensor.numpy())
        else:
            arrays[name] = tensor.numpy()
    return {name: np.stack(array) if isinstance(array, list) else array for name, array in arrays.items()}


def _stored_name(name: str, model: ModelConfig) -> str:
    module, _, leaf = name.rpartition(".")
    if name.startswith("blk."):
        return name
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{leaf}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    part = (_GEMMA_NAMES if model.family == "gemma3_text" else _NAMES)[part]
    return f"blk.{layer}.{part}.{leaf}"
