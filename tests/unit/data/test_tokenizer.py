"""The character tokenizer in memory, on disk, and through transformers' AutoTokenizer."""

import random

import pytest
from transformers import AutoTokenizer

from megatron_fp8rl.data.tokenizer import (
    PRINTABLE_ASCII,
    UnknownCharacterError,
    character_tokenizer,
    decode,
    encode,
    load_tokenizer,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    load_tokenizer("character").save_pretrained(path)
    return path


def test_ids_and_sizes():
    tokenizer = character_tokenizer()
    assert len(tokenizer) == tokenizer.vocab_size == 128
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert encode(tokenizer, "\n 1") == (1, 4, 5, 22)  # <bos>, then the alphabet from id 4 on
    assert encode(tokenizer, "1 + 2", add_special_tokens=False) == tuple(5 + ord(c) - 32 for c in "1 + 2")
    assert len(character_tokenizer("01+-=", vocab_multiple=16)) == 16


def test_round_trip_of_random_text_through_auto_tokenizer(saved):
    own, loaded = load_tokenizer("character"), AutoTokenizer.from_pretrained(saved)
    assert load_tokenizer(str(saved)).get_vocab() == loaded.get_vocab() == own.get_vocab()
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choices(PRINTABLE_ASCII, k=rng.randint(0, 60)))
        ids = encode(loaded, text)
        assert ids == encode(own, text) and len(ids) == len(text) + 1
        assert decode(loaded, ids) == decode(own, [*ids, 2, 0]) == f"<bos>{text}"


def test_every_id_decodes():
    tokenizer = character_tokenizer()
    texts = [decode(tokenizer, [i]) for i in range(len(tokenizer))]
    assert texts[:4] == ["", "<bos>", "", "<unk>"]
    assert "".join(texts[4:100]) == PRINTABLE_ASCII
    assert texts[100] == "<reserved_0>" and len(set(texts[4:])) == 124


def test_unknown_characters_are_named():
    with pytest.raises(UnknownCharacterError, match="'×', 'é' of '2 × é'"):
        encode(character_tokenizer(), "2 × é")


def test_bad_specs(tmp_path):
    (tmp_path / "qwen3_tokenizer").mkdir()
    with pytest.raises(FileNotFoundError, match=r"did you mean .*qwen3_tokenizer"):
        load_tokenizer(str(tmp_path / "qwen3_tokeniser"))
    with pytest.raises(ValueError, match="repeats characters"):
        character_tokenizer("aba")
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="no end token"):
        load_tokenizer(str(tmp_path / "endless"))
