"""Read a GGUF file: architecture, tokenizer and dequantized tensors.

In:  one file of llama.cpp, quantized or not, of the architectures llama, qwen2, qwen3, qwen3moe and gemma3.
Out: the content of config.json and generation_config.json, a tokenizer, and tensors by their Hugging Face names.

The package gguf reads, names and dequantizes. transformers' own reader is not used: it drops head sizes, expert sizes
and rotary scaling, splits digits otherwise than the model's tokenizer, and takes the begin token for the end token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.checkpoint_error import CheckpointError
from megatron_fp8rl.names import registry

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
_CONFIG = {  # key of the metadata, after the architecture -> key of config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)  # of releases: 3.1 has 8, 3.2 has 32
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
# Splits of the text before byte pairs are merged, by ``tokenizer.ggml.pre``; None: GPT-2's.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "qwen2": _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),
    "smollm": None,
    "gpt-2": None,
    "default": None,
}
_DIGITS = {"smollm"}  # each digit by itself
_OTHER_TOKENIZER = "Name the original model's folder: python -m checkpoint_tools gguf_to_hf FILE FOLDER --tokenizer DIR"
_END_OF_TURN_PROBE = "marks the answer"


@dataclass
class GgufFile:
    """A file, from :meth:`open`; weights stay in the file until :meth:`tensors`."""

    path: Path
    metadata: dict[str, Any]
    model: ModelConfig
    _reader: Any

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the metadata.

        Raises:
            CheckpointError: the file is damaged, or its model is not supported; says which part.
        """
        if not path.is_file():
            raise CheckpointError(path, "there is no such file")
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise CheckpointError(path, "the package gguf is missing; install the pinned one: make install") from error
        try:
            reader = GGUFReader(path)
            metadata = {name: entry.contents() for name, entry in reader.fields.items()}
        except Exception as error:  # of numpy and of the package, for damaged files of many kinds
            raise CheckpointError(path, f"cannot be read as GGUF ({error}). Fetch the file again") from error
        names = {tensor.name for tensor in reader.tensors}
        factors = next((t.data.tolist() for t in reader.tensors if t.name == _ROPE_FACTORS), None)
        return cls(path, metadata, _model(path, metadata, "output.weight" not in names, factors), reader)

    @property
    def dtype(self) -> str:
        """The type of the result: that of a file that is not quantized, else BF16."""
        kinds = {tensor.tensor_type.name for tensor in self._reader.tensors if len(tensor.shape) > 1}
        return "float32" if kinds == {"F32"} else "float16" if kinds <= {"F32", "F16"} else "bfloat16"

    def config(self, end_ids: list[int]) -> dict[str, Any]:
        """The content of config.json."""
        return registry.to_hf_config(self.model) | self.generation_config(end_ids) | {"dtype": self.dtype}

    def generation_config(self, end_ids: list[int]) -> dict[str, Any]:
        """The content of generation_config.json."""
        ids = {"bos_token_id": self._token_id("bos"), "pad_token_id": self._token_id("padding")}
        ends = {"eos_token_id": end_ids if len(end_ids) > 1 else end_ids[0]}
        return {key: value for key, value in ids.items() if value is not None} | ends

    def _token_id(self, kind: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return None if value is None or value >= self.model.vocab_size else int(value)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, dequantized, as the name table has them.

        Raises:
            CheckpointError: tensors are missing, have another shape, or are not known in this family.
        """
        import torch
        from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map

        architecture = self.metadata["general.architecture"]
        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
        names = get_tensor_name_map(kind, self.model.num_layers)
        stored = {tensor.name: tensor for tensor in self._reader.tensors}
        unused, problems = stored.keys() - {_ROPE_FACTORS}, []
        tensors: dict[str, Tensor] = {}
        for name, shape in registry.hf_tensors(self.model).items():
            module, _, leaf = name.rpartition(".")
            expert = _EXPERT.search(module)
            stored_name = f"{names.get_name(_EXPERT.sub('.experts.', module))}.{leaf}"
            unused -= {stored_name}
            if stored_name not in stored:
                problems.append(f"{stored_name}: missing")
                continue
            source = stored[stored_name]
            data = source.data if expert is None else source.data[int(expert[1])]
            try:
                values = dequantize(data, source.tensor_type)
            except (NotImplementedError, ValueError) as error:
                problems.append(f"{stored_name}: {source.tensor_type.name} cannot be dequantized ({error})")
                continue
            if values.shape != shape:
                problems.append(f"{stored_name}: shape {values.shape} instead of {shape}")
                continue
            if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                # llama.cpp rotates neighbours, transformers the two halves of a head.
                values = values.reshape(-1, self.model.head_dim // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
            if registry.FAMILIES[self.model.family].zero_centred_norms and len(shape) == 1:
                values = values - 1.0  # llama.cpp stores the factor
            tensors[name] = torch.tensor(values, dtype=getattr(torch, self.dtype))
        problems += [f"{name}: not a tensor of a {self.model.family} model" for name in sorted(unused)]
        if problems:
            raise CheckpointError(self.path, problems)
        return tensors

    def tokenizer(self) -> tuple[PreTrainedTokenizerFast, list[int], list[str]]:
        """(tokenizer with the chat template, ids of all end tokens, notes for the user).

        End tokens are those of the metadata, and the token that ends an answer in the chat template.

        Raises:
            CheckpointError: the split of the text is unknown, or no end token is.
        """
        from transformers import PreTrainedTokenizerFast

        names = self.metadata.get("tokenizer.ggml.tokens")
        if not names:
            raise CheckpointError(self.path, f"tokenizer.ggml.tokens: missing. {_OTHER_TOKENIZER}")

        def name(kind: str) -> str | None:
            token = self._token_id(kind)
            return None if token is None else names[token]

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self._backend(names),
            bos_token=name("bos"),
            eos_token=name("eos"),
            pad_token=name("padding"),
            unk_token=name("unknown"),
            model_max_length=self.model.max_position_embeddings,
            clean_up_tokenization_spaces=False,
        )
        notes = []
        if template := self.metadata.get("tokenizer.chat_template"):
            tokenizer.chat_template = template
        else:
            notes.append("no chat template in the file: prompts are the plain text of the questions")
        ends = [token for kind in ("eos", "eot", "eom") if (token := self._token_id(kind)) is not None]
        answer_end = _end_of_answer(tokenizer) if template else None
        if answer_end is not None and answer_end not in ends:
            ends.append(answer_end)
            notes.append(f"end token {names[answer_end]!r}: from the chat template; the metadata does not name it")
        if not ends:
            raise CheckpointError(
                self.path,
                f"tokenizer.ggml.eos_token_id: missing, and no chat template ends answers. {_OTHER_TOKENIZER}",
            )
        if tokenizer.eos_token is None:
            tokenizer.eos_token = names[ends[0]]
        return tokenizer, list(dict.fromkeys(ends)), notes

    def _backend(self, names: list[str]):
        """The tokenizer of the library ``tokenizers``, without names of special tokens."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

        kind = self.metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            split = self.metadata.get("tokenizer.ggml.pre", "default")
            if split not in _SPLITS:
                known = ", ".join(_SPLITS)
                problem = f"tokenizer.ggml.pre = {split!r}: not known (known: {known}). {_OTHER_TOKENIZER}"
                raise CheckpointError(self.path, problem)
            merges = [tuple(merge.split(" ")) for merge in self.metadata.get("tokenizer.ggml.merges", ())]
            vocabulary = {name: token for token, name in enumerate(names)}
            backend = Tokenizer(
                models.BPE(vocab=vocabulary, merges=merges, ignore_merges=_SPLITS[split] == _LLAMA3_SPLIT)
            )
            pattern, digits = _SPLITS[split], pre_tokenizers.Digits(individual_digits=True)
            before = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
            before += [digits] if split in _DIGITS else []
            last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
            backend.decoder = decoders.ByteLevel()
            if split == "qwen2":
                backend.normalizer = normalizers.NFC()
        elif kind == "llama" and self.model.family == "gemma3_text":
            vocabulary = {name: token for token, name in enumerate(names)}
            backend = Tokenizer(
                models.BPE(vocab=vocabulary, merges=self._merges(vocabulary), fuse_unk=True, byte_fallback=True)
            )
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        elif kind == "llama":
            from transformers import AutoTokenizer

            backend = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)._tokenizer
        else:
            raise CheckpointError(self.path, f"tokenizer.ggml.model = {kind!r}: not known. {_OTHER_TOKENIZER}")
        for token, token_kind in zip(names, self.metadata.get("tokenizer.ggml.token_type", ())):
            if token_kind == _CONTROL:
                backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            elif token_kind == _USER_DEFINED:
                backend.add_tokens([AddedToken(token, normalized="▁" in token)])
        begin = self._token_id("bos")
        if self.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and begin is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{names[begin]} $A",
                pair=f"{names[begin]} $A {names[begin]} $B",
                special_tokens=[(names[begin], begin)],
            )
        return backend

    def _merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """Pairs in the order of the scores of what they form; transformers' reader would take Gemma's for a unigram
        model."""
        scores, kinds = (self.metadata[f"tokenizer.ggml.{name}"] for name in ("scores", "token_type"))
        ranked = [
            (-scores[token], vocabulary[name[:end]], vocabulary[name[end:]], name, end)
            for name, token in vocabulary.items()
            if kinds[token] != _CONTROL
            for end in range(1, len(name))
            if name[:end] in vocabulary and name[end:] in vocabulary
        ]
        return [(name[:end], name[end:]) for *_, name, end in sorted(ranked)]


def _model(path: Path, metadata: Mapping[str, Any], is_tied: bool, factors: list[float] | None) -> ModelConfig:
    """The architecture. Raises CheckpointError with the part that is not supported."""
    architecture = metadata.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise CheckpointError(
            path, f"general.architecture = {architecture!r}: not supported (supported: {known}); use its safetensors"
        )
    values = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    config: dict[str, Any] = {"model_type": _MODEL_TYPES[architecture]}
    config |= {name: _clean(values[key]) for key, name in _CONFIG.items() if key in values}
    if architecture == "llama" and config.pop("num_experts", 0):
        raise CheckpointError(
            path, "llama.expert_count: experts of this architecture (Mixtral) cannot be read; use its safetensors"
        )
    if architecture != "qwen3moe":
        config.pop("num_experts_per_tok", None)
    else:
        config["norm_topk_prob"] = True  # as llama.cpp computes
    kind, factor = values.get("rope.scaling.type", "none"), values.get("rope.scaling.factor", 1.0)
    if kind != "none" and factor != 1.0:
        problem = f"{architecture}.rope.scaling.type = {kind!r}: not supported; use its safetensors"
        raise CheckpointError(path, problem)
    width = values.get("rope.dimension_count")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if width is not None and width != head_dim:
        raise CheckpointError(
            path, f"{architecture}.rope.dimension_count = {width}: a part of heads of {head_dim}; use its safetensors"
        )
    config |= {"head_dim": head_dim, "tie_word_embeddings": is_tied}
    config["vocab_size"] = values.get("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    if window := values.get("attention.sliding_window"):
        config |= {"model_type": "mistral"} if architecture == "llama" else {}
        config |= {"sliding_window": window} if architecture in ("llama", "gemma3") else {}
    if architecture == "gemma3":  # as llama.cpp scales scores: the 27B model by another rule
        heads, is_27b = config["num_attention_heads"], config.get("num_hidden_layers") == 62
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_27b else head_dim
    if factors is not None:
        config["rope_scaling"] = _llama3_scaling(path, factors, config)
    try:
        return registry.from_hf_config(config)
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error


def _clean(value: Any) -> Any:
    """A float32 of the metadata as the shortest decimal number that rounds to it."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _llama3_scaling(path: Path, factors: list[float], config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary scaling that has these divisors of the frequencies. Raises CheckpointError if no release has them."""
    theta, dim = config["rope_theta"], config["head_dim"]
    for factor in _LLAMA3_FACTORS:
        rope = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        original = 8192
        expected = []
        for i in range(len(factors)):
            wavelength = 2 * math.pi * theta ** (2 * i / dim)
            share = (original / wavelength - 1.0) / (4.0 - 1.0)
            share = min(max(share, 0.0), 1.0)
            expected.append(1 / ((1 - share) / factor + share))
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return {"rope_type": "llama3", "original_max_position_embeddings": original, **rope}
    raise CheckpointError(path, f"{_ROPE_FACTORS}: frequencies of no known rotary scaling; use its safetensors")


def _end_of_answer(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The special token directly after an answer in the chat template; None if there is none."""
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _END_OF_TURN_PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template raises what it likes for messages that it does not accept
        return None
    after = str(text).rpartition(_END_OF_TURN_PROBE)[2]
    ids = tokenizer.encode(after.lstrip(), add_special_tokens=False)
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return ids[0] if ids and tokenizer.convert_ids_to_tokens(ids[0]) in special else None
