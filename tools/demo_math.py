"""Write the data of `make demo-math`: a tiny model's config.json and tokenizer, and two files of word problems.

    python tools/demo_math.py FOLDER [--seed 1]

In: nothing. Out: ``FOLDER/model`` (config.json of a Qwen3 of two layers; a BPE tokenizer with a chat template),
``FOLDER/train.jsonl`` and ``FOLDER/test.jsonl``. The problems of the two files have no pair of numbers in common.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

_PEOPLE = ("Ann", "Ben", "Eva", "Jim", "Lea", "Max", "Sue", "Tom")
_THINGS = ("apples", "books", "coins", "eggs", "keys", "nuts", "pens", "stamps")
_STORIES = {
    1: ("{who} has {a} {things} and buys {b} more. How many?", "{who} finds {b} {things} and had {a}. How many?"),
    -1: ("{who} has {a} {things} and loses {b}. How many?", "{who} gives away {b} of {a} {things}. How many are left?"),
}
_NUM_ROWS, _HELD_OUT_ONE_IN = 6000, 8
_VOCABULARY = 384


def problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(rows to train on, held-out rows): one eighth of the sums and differences, which never change the tens."""
    rng = random.Random(seed)
    pairs = [
        (a, b, sign) for a in range(10, 100) for b in range(1, 10) for sign in _STORIES if 0 <= a % 10 + sign * b < 10
    ]
    rng.shuffle(pairs)
    num_held_out = len(pairs) // _HELD_OUT_ONE_IN

    def row(a: int, b: int, sign: int) -> dict[str, str]:
        story = rng.choice(_STORIES[sign])
        text = story.format(who=rng.choice(_PEOPLE), things=rng.choice(_THINGS), a=a, b=b)
        return {"question": text, "answer": str(a + sign * b)}

    train = [row(*rng.choice(pairs[num_held_out:])) for _ in range(_NUM_ROWS)]
    return train, [row(*pair) for pair in pairs[:num_held_out]]


def write_model(folder: Path, texts: list[str]) -> None:
    """config.json and a tokenizer, without weights: BPE over bytes, with digits by themselves, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    plain = Tokenizer(models.BPE())
    digits, by_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Sequence([digits, by_bytes]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    train, held_out = problems(options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (options.folder / f"{name}.jsonl").write_text(text)
    write_model(options.folder / "model", [row["question"] for row in train])
    print(f"{options.folder}: {len(train):,} problems to train on, {len(held_out):,} held out")


if __name__ == "__main__":
    main()
