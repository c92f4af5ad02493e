"""A model folder as users have them: config.json, weights, a BPE tokenizer with a chat template; made on the spot."""

from pathlib import Path


def make_tokenizer(folder: Path, texts: list[str]) -> dict[str, int]:
    """A BPE tokenizer of 384 tokens with a chat template; the ids of its special tokens, by keys of config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def make_model(folder: Path, texts: list[str]) -> None:
    """A Qwen3 of two layers with :func:`make_tokenizer`'s tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    special_ids = make_tokenizer(folder, texts)
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **special_ids,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
