"""Tokenizers: a built-in character tokenizer, or a Hugging Face tokenizer from a directory. Never downloads.

The character tokenizer makes runs possible without a network. Transformers and vLLM can load it.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.data.dropped import RowError

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"  # ids 0 to 3 of the character tokenizer
PRINTABLE_ASCII = "\n" + "".join(chr(code) for code in range(32, 127))
_END_FILES = "config.json", "generation_config.json"  # with eos_token_id
_MAX_REASON = 300  # characters of a library's error that are shown
_VOCAB_MULTIPLE = 128  # divisible by FP8 blocks and by any tensor-parallel degree up to 128


class UnknownCharacterError(RowError):
    """The tokenizer cannot represent a character of the text."""


def character_tokenizer(
    alphabet: str = PRINTABLE_ASCII, *, vocab_multiple: int = _VOCAB_MULTIPLE
) -> PreTrainedTokenizerFast:
    """One token per character of ``alphabet``, after ``<pad>``, ``<bos>``, ``<eos>`` and ``<unk>``.

    ``<reserved_i>`` entries pad the vocabulary to a multiple of ``vocab_multiple``. Encoding puts ``<bos>`` first
    unless ``add_special_tokens=False``.
    """
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"the alphabet repeats characters: {alphabet!r}")
    tokens = [PAD, BOS, EOS, UNK, *alphabet]
    tokens += [f"<reserved_{i}>" for i in range(-len(tokens) % vocab_multiple)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # Byte-pair encoding without merges: single characters, in one pass over the text.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=1 << 20,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``DataConfig.tokenizer``: "character", or a directory in the Hugging Face format.

    Raises:
        FileNotFoundError: no such directory, with near matches.
        ValueError: no end token, so completions would only end at the length limit, or an invalid ``eos_token_id``.
    """
    if spec == "character":
        return character_tokenizer()
    path = Path(spec)
    if not path.is_dir():
        parent = path.parent
        hint = near_matches(path.name, [e.name for e in parent.iterdir() if e.is_dir()] if parent.is_dir() else [])
        raise FileNotFoundError(f"data.tokenizer = {spec!r} is neither 'character' nor a directory{hint}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of transformers, tokenizers or huggingface_hub, for damaged files of many kinds
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise ValueError(
            f"the tokenizer in {spec!r} cannot be loaded: {type(error).__name__}: {reason}; copy its files again"
        ) from error
    if not end_ids(tokenizer):
        raise ValueError(
            f"the tokenizer in {spec!r} has no end token; set eos_token in its tokenizer_config.json, or "
            "eos_token_id in its generation_config.json"
        )
    return tokenizer


def end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of all tokens that end a completion of a model.

    The tokenizer's EOS token comes first. Then follow the ids of ``eos_token_id`` in config.json and in
    generation_config.json of the tokenizer's folder.

    Raises:
        ValueError: an entry is not a token id, or a file is not JSON.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for file in _END_FILES if tokenizer.name_or_path else ():
        ids += _listed_ids(Path(tokenizer.name_or_path) / file)
    return tuple(dict.fromkeys(ids))


def _listed_ids(file: Path) -> list[int]:
    """The ids of ``eos_token_id`` in a file; empty without the file or the field."""
    if not file.is_file():
        return []
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}; copy the file of the model again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object; copy the file of the model again")
    value = content.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if wrong := [token for token in ids if type(token) is not int or token < 0]:
        raise ValueError(f"{file}: eos_token_id = {value!r} contains {wrong[0]!r}, which is not a token id; correct it")
    return ids


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | list[int]]:
    """Ids of begin, end and padding tokens under their names in config.json; a list if there are several end tokens."""
    ends = end_ids(tokenizer)
    ids: dict[str, int | list[int] | None] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def is_special(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bool:
    """Whether the tokenizer marks a token as special."""
    added = tokenizer.added_tokens_decoder.get(token_id)
    return token_id in tokenizer.all_special_ids or (added is not None and added.special)


def dropped_ids(tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int] = ()) -> frozenset[int]:
    """Ids of the tokens that are not part of a completion's text. These are end and padding tokens, and those of
    ``stop_token_ids`` that the tokenizer marks as special."""
    padding = () if tokenizer.pad_token_id is None else (tokenizer.pad_token_id,)
    stops = (token for token in stop_token_ids if is_special(tokenizer, token))
    return frozenset((*end_ids(tokenizer), *padding, *stops))


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Token ids of a text. Raises UnknownCharacterError, which lists characters that encode to the unknown token."""
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        pieces = {c: tokenizer.encode(c, add_special_tokens=False) for c in sorted(set(text))}
        unknown = [repr(c) for c, piece in pieces.items() if tokenizer.unk_token_id in piece]
        raise UnknownCharacterError(
            f"the tokenizer does not know {', '.join(unknown) or 'a part'} of {text!r}; use a tokenizer that does, or "
            "change the environment's template"
        )
    return tuple(ids)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], dropped: Collection[int] | None = None) -> str:
    """Text of token ids without the ``dropped`` tokens; None: without end and padding tokens. All other special tokens,
    such as ``<think>``, are part of the text."""
    dropped = dropped_ids(tokenizer) if dropped is None else dropped
    return tokenizer.decode([token for token in token_ids if token not in dropped], skip_special_tokens=False)
