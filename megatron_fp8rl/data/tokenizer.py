"""Tokenizers: a built-in character tokenizer, or a Hugging Face tokenizer from a directory. Never downloads.

The character tokenizer makes runs possible without a network. Transformers and vLLM can load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.data.dropped import RowError

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"  # ids 0 to 3 of the character tokenizer
PRINTABLE_ASCII = "\n" + "".join(chr(code) for code in range(32, 127))
_VOCAB_MULTIPLE = 128  # divisible by FP8 blocks and by any tensor-parallel degree up to 128


class UnknownCharacterError(RowError):
    """The tokenizer cannot represent a character of the text."""


def character_tokenizer(
    alphabet: str = PRINTABLE_ASCII, *, vocab_multiple: int = _VOCAB_MULTIPLE, max_length: int = 1 << 20
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
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``DataConfig.tokenizer``: "character", or a directory in the Hugging Face format.

    Raises:
        FileNotFoundError: no such directory, with near matches.
        ValueError: no EOS token; completions would only end at the length limit.
    """
    if spec == "character":
        return character_tokenizer()
    path = Path(spec)
    if not path.is_dir():
        parent = path.parent
        hint = near_matches(path.name, [e.name for e in parent.iterdir() if e.is_dir()] if parent.is_dir() else [])
        raise FileNotFoundError(f"data.tokenizer = {spec!r} is neither 'character' nor a directory{hint}")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"data.tokenizer = {spec!r} has no end token; set eos_token in its tokenizer_config.json")
    return tokenizer


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


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Text of token ids, without special tokens."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True)
