"""Which tokens end a completion, and which are part of its text, for model folders as they are published."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.inspection import inspect_ends, require_template
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.data.prompts import ProblemSource
from megatron_fp8rl.data.sft import SftSource
from megatron_fp8rl.data.tokenizer import character_tokenizer, decode, dropped_ids, end_ids, load_tokenizer, special_ids
from model_configs.tiny import tiny_qwen3
from tests.helpers.chat_templates import TEMPLATES

# The EOS token and the end tokens of config.json and generation_config.json, as on the models' cards.
FOLDERS = {
    "llama3": ("<|eot_id|>", "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "llama3, first release": ("<|end_of_text|>", "<|end_of_text|>", ["<|end_of_text|>", "<|eot_id|>"]),
    "glm45": ("<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"], None),
    "phi3": ("<|endoftext|>", "<|endoftext|>", ["<|endoftext|>", "<|assistant|>", "<|end|>"]),
    "qwen3": ("<|im_end|>", "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "mistral": ("</s>", "</s>", "</s>"),
    "no EOS token": (None, None, ["<|im_end|>", "<|endoftext|>"]),
}
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = (
    "<|end_of_text|> <|eom_id|> <|eot_id|> <|endoftext|> <|user|> <|observation|> <|assistant|> <|end|> <|im_start|> "
    "<|im_end|> </s> <s> <think> </think> <answer> </answer> [INST] [/INST] [gMASK] <sop> <|begin_of_text|> "
    "<|start_header_id|> <|end_header_id|>"
).split()


def folder_of(path: Path, name: str) -> Path:
    eos, config, generation = FOLDERS[name]
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.eos_token = eos
    family = name.partition(",")[0]
    tokenizer.chat_template = PHI3 if family == "phi3" else TEMPLATES.get(family)
    tokenizer.save_pretrained(path)
    ids = tokenizer.convert_tokens_to_ids
    write(path / "config.json", ids(config) if config else None)
    write(path / "generation_config.json", ids(generation) if generation else None)
    return path


def write(file: Path, eos) -> None:
    file.write_text(json.dumps({"eos_token_id": eos}))


def config(path: Path, **sampling):
    cfg = tiny_qwen3()
    return replace(
        cfg,
        model=replace(cfg.model, vocab_size=256),
        data=replace(cfg.data, tokenizer=str(path)),
        sampling=replace(cfg.sampling, max_prompt_tokens=200, max_completion_tokens=60, **sampling),
    )


def tokens(tokenizer, ids) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(ids))


@pytest.mark.parametrize("name", FOLDERS)
def test_every_listed_id_ends_a_completion_and_the_copies_of_a_folder_list_it(name, tmp_path):
    eos, listed, generated = FOLDERS[name]
    tokenizer = load_tokenizer(str(folder_of(tmp_path / "model", name)))
    expected = {
        token for entry in (eos, listed, generated) for token in ([entry] if isinstance(entry, str) else entry or ())
    }
    ends = end_ids(tokenizer)
    assert set(tokens(tokenizer, ends)) == expected and len(set(ends)) == len(ends)
    assert eos is None or ends[0] == tokenizer.eos_token_id
    cfg = config(tmp_path / "model", stop_token_ids=(70,))
    assert ProblemSource.from_run(cfg, tokenizer).chat_format.stop_ids == {*ends, 70}
    copied = load_tokenizer(str(write_model_dir(cfg, tmp_path / "copy")))
    assert set(end_ids(copied)) == set(ends)
    assert special_ids(copied)["eos_token_id"] == (ends[0] if len(ends) == 1 else list(end_ids(copied)))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("llama3", "<|eot_id|>"),
        ("llama3, first release", "<|eot_id|>"),
        ("glm45", "<|user|>"),
        ("phi3", "<|end|>"),
        ("qwen3", "<|im_end|>"),
        ("mistral", "</s>"),
        ("no EOS token", "<|im_end|>"),
    ],
)
def test_the_warm_start_trains_the_end_token_of_the_chat_template(name, end, tmp_path):
    tokenizer = load_tokenizer(str(folder_of(tmp_path, name)))
    sample = SftSource(config(tmp_path), tokenizer).samples(0)[0]
    assert tokens(tokenizer, sample.token_ids[-1:]) == [end]
    assert sample.segments[-1].is_trained and sample.segments[-1].token_ids[-1] == sample.token_ids[-1]


def test_without_a_template_the_warm_start_trains_the_eos_token(tmp_path):
    path = folder_of(tmp_path, "llama3, first release")
    (path / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(str(path))
    assert SftSource(config(path), tokenizer).samples(0)[0].token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
def test_a_turn_may_end_with_any_end_token(end, tmp_path):
    tokenizer = load_tokenizer(str(folder_of(tmp_path, "llama3")))
    chat = ProblemSource.from_run(config(tmp_path), tokenizer).chat_format
    question = {"role": "user", "content": "a"}
    begun = chat.begin([question])
    sampled = tokenizer.encode(f"bc{end}", add_special_tokens=False)
    past = [question, {"role": "assistant", "content": "bc"}]
    added = chat.extend(begun.text, past, sampled, [question])
    assert tokenizer.decode(added.new_ids).startswith("<|start_header_id|>user")


def test_only_end_and_padding_tokens_are_left_out_of_a_text(tmp_path):
    tokenizer = load_tokenizer(str(folder_of(tmp_path, "llama3")))
    text = "<think>17</think><answer>42</answer>"
    sampled = tokenizer.encode(f"{text}<|im_end|><|eom_id|><pad><|eot_id|>", add_special_tokens=False)
    assert decode(tokenizer, sampled) == f"{text}<|im_end|>"
    im_end, letter = tokenizer.convert_tokens_to_ids(["<|im_end|>", "4"])
    assert decode(tokenizer, sampled, dropped_ids(tokenizer, (im_end, letter))) == text
    assert decode(tokenizer, []) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"eos_token_id": ["</s>"]}',
            "generation_config.json: eos_token_id .*'</s>', which is not a token id; correct it",
        ),
        ('{"eos_token_id": -1}', "generation_config.json: eos_token_id = -1 contains -1"),
        ('{"eos_token_id": [2, true]}', "contains True"),
        ('{"eos_token_id": [[2]]}', r"contains \[2\]"),
        ("{", "generation_config.json is not JSON"),
    ],
)
def test_an_eos_token_id_that_is_no_token_id_is_refused(content, message, tmp_path):
    folder_of(tmp_path, "qwen3")
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(tmp_path))


def test_end_tokens_are_listed_and_doubtful_ones_warned_about(tmp_path):
    tokenizer = load_tokenizer(str(folder_of(tmp_path / "qwen3", "qwen3")))
    im_end, end_of_text, four = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "4"])
    line, warnings = inspect_ends(config(tmp_path / "qwen3"), tokenizer)
    assert line == f"completions end at <|im_end|> ({im_end}), <|endoftext|> ({end_of_text})" and not warnings
    write(tmp_path / "qwen3" / "config.json", four)
    _, (warning,) = inspect_ends(config(tmp_path / "qwen3"), tokenizer)
    assert f"eos_token_id {four} in {tmp_path}" in warning and "is '4' of its tokenizer" in warning
    write(tmp_path / "qwen3" / "config.json", 151_645)
    line, (warning,) = inspect_ends(config(tmp_path / "qwen3"), tokenizer)
    assert (
        "no token (151645)" in line and "eos_token_id 151645" in warning and "is no token of its tokenizer" in warning
    )

    base = load_tokenizer(str(folder_of(tmp_path / "base", "qwen3")))
    base.eos_token = "<|endoftext|>"
    for file in ("config.json", "generation_config.json"):
        write(tmp_path / "base" / file, end_of_text)
    _, (warning,) = inspect_ends(config(tmp_path / "base"), base)
    assert warning.endswith(f"set --sampling.stop_token_ids {im_end}")
    assert inspect_ends(config(tmp_path / "base", stop_token_ids=(im_end,)), base)[1] == []
    base.chat_template = base.chat_template.replace("<|im_end|>", "<|eot|>")  # no token of this tokenizer
    _, (warning,) = inspect_ends(config(tmp_path / "base"), base)
    assert "the chat template ends an answer with '<|eot|>', which begins with no special token" in warning


def test_the_end_token_of_a_template_is_found_without_the_characters_of_a_question(tmp_path):
    tokenizer = character_tokenizer("0123456789=")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    chat = ChatFormat(tokenizer, True)
    assert tokens(tokenizer, [chat.closing_id()]) == ["<|im_end|>"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert chat.closing_id() is None  # "?" is unknown


def test_an_argument_that_the_template_does_not_use_is_refused(tmp_path):
    tokenizer = load_tokenizer(str(folder_of(tmp_path / "qwen3", "qwen3")))
    cfg = config(tmp_path / "qwen3")
    cfg = replace(cfg, data=replace(cfg.data, chat_template_arguments={"enable_thinking": False}))
    with pytest.raises(ValueError, match="has no argument 'enable_thinking'; leave it out"):
        require_template(cfg, tokenizer)
    tokenizer.chat_template += "{{ enable_thinking }}"
    require_template(cfg, tokenizer)
