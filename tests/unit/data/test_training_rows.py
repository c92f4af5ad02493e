"""Conversations and pairs as training samples: what is trained, what makes several samples, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_fp8rl.config import AlgoConfig, DataConfig, EnvironmentConfig, RunConfig, SamplingConfig
from megatron_fp8rl.data.dropped import RowError
from megatron_fp8rl.data.inspection import inspect_training_rows, repetition
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.data.training_rows import TrainingRows
from megatron_fp8rl.types import Sample
from model_configs import tiny_qwen3
from tests.helpers.chat_templates import DEEPSEEK_V3, LLAMA3, QWEN3

CHATML = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}{% generation %}{{- m.content + '<|im_end|>' -}}{% endgeneration %}{{- '\\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
PLAIN_CHATML = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ENDS = {QWEN3: "<|im_end|>", LLAMA3: "<|eot_id|>", DEEPSEEK_V3: "<|end_of_sentence|>"}
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "It is 4"},
]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = character_tokenizer(vocab_multiple=256)
    special = "<|im_start|> <|im_end|> <|eot_id|> <|begin_of_text|> <|begin_of_sentence|> <|end_of_sentence|>"
    made.add_special_tokens(
        {"eos_token": ENDS.get(template, "<|im_end|>"), "additional_special_tokens": special.split()}
    )
    made.chat_template = template
    return made


def rows_of(folder: Path, template: str, *rows: dict, loss: str = "sft", **source: str) -> TrainingRows:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return TrainingRows(config(folder, loss, **source), tokenizer(template))


def config(folder: Path, loss: str = "sft", **source: str) -> RunConfig:
    tiny = tiny_qwen3()
    return replace(
        tiny,
        model=replace(tiny.model, vocab_size=512),
        data=DataConfig(environments=(EnvironmentConfig(dataset=str(folder / "rows.jsonl"), **source),)),
        sampling=SamplingConfig(prompts_per_step=2, max_prompt_tokens=150, max_completion_tokens=150),
        algo=AlgoConfig(loss=loss),
        output_dir=str(folder / "run"),
    )


def trained(rows: TrainingRows, sample: Sample) -> list[str]:
    decode = rows._source.tokenizer.decode
    return [decode(part.token_ids.array.tolist()) for part in sample.segments if part.is_trained]


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML, LLAMA3, DEEPSEEK_V3])
def test_every_turn_of_the_assistant_is_trained_with_its_end_token(tmp_path, template):
    rows = rows_of(tmp_path, template, {"messages": CHAT})
    (sample,) = rows.samples("rows", 0)
    end = ENDS.get(template, "<|im_end|>")
    assert trained(rows, sample) == [f"2{end}", f"It is 4{end}"]
    whole = rows._source.tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    ids = sample.token_ids.array.tolist()
    assert ids == whole[: len(ids)] and len(whole) - len(ids) <= 1  # the line break after the last end token


def test_markers_and_text_give_the_same_tokens_as_transformers_marks(tmp_path):
    made = {}
    for name, template in (("marked", CHATML), ("plain", PLAIN_CHATML)):
        (sample,) = rows_of(tmp_path, template, {"messages": CHAT}).samples("rows", 0)
        made[name] = [(part.token_ids.array.tolist(), part.is_trained) for part in sample.segments]
    assert made["marked"][: len(made["plain"])] == made["plain"]
    reference = tokenizer(CHATML).apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = [int(is_trained) for ids, is_trained in made["marked"] for _ in ids]
    assert mask == reference["assistant_masks"]


def test_a_template_that_drops_earlier_reasoning_gives_a_sample_for_each_turn(tmp_path):
    chat = [dict(message) for message in CHAT]
    for message in (chat[2], chat[4]):
        message["content"] = "<think>so</think>\n\n" + message["content"]
    rows = rows_of(tmp_path, QWEN3, {"messages": chat})
    first, second = rows.samples("rows", 0)
    assert trained(rows, first) == ["<think>so</think>\n\n2<|im_end|>"]
    assert trained(rows, second) == ["<think>so</think>\n\nIt is 4<|im_end|>"]
    assert "so</think>" not in rows._source.tokenizer.decode(second.segments[0].token_ids.array.tolist())
    assert {first.name, second.name} == {"rows/0", "rows/0/1"}


@pytest.mark.parametrize(
    ("row", "source"),
    [
        ({"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}, {}),
        ({"prompt": "1+1?", "completion": "2"}, {}),
        ({"prompt": [{"role": "user", "content": "1+1?"}], "completion": [{"role": "assistant", "content": "2"}]}, {}),
        ({"instruction": "1+1?", "input": "", "output": "2"}, {}),
        ({"problem": "1+1?", "solution": "2", "answer": "B"}, {}),
        ({"prompt": "1+1?", "completion": "2", "label": True}, {}),
        ({"problem": "1?", "solution": "3", "answer": "3", "messages": CHAT[1:3]}, {}),
        ({"prompt": "1?", "messages": CHAT[1:2], "response": "2", "answer": "B"}, {}),
        ({"question": "1+1?", "solution": "3", "answer": "2"}, {"answer_column": "answer"}),
        ({"ask": "1+1?", "reply": 2}, {"prompt_column": "ask", "answer_column": "reply"}),
    ],
)
def test_rows_of_known_forms_are_conversations(tmp_path, row, source):
    rows = rows_of(tmp_path, PLAIN_CHATML, row, **source)
    (sample,) = rows.samples("rows", 0)
    text = rows._source.tokenizer.decode(sample.token_ids.array.tolist())
    assert text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"


SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}], "system": "Be short."},
        {"messages": CHAT[1:3], "system_prompt": "Be short."},
        {"messages": CHAT[:3], "system_prompt": "Be long."},
        {"prompt": "1+1?", "completion": "2", "system_prompt": "Be short."},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "system_prompt": "Be short."},
        {"prompt": CHAT[1:2], "chosen": "2", "rejected": "3", "system_prompt": "Be short."},
        {"chosen": CHAT[1:3], "rejected": [CHAT[1], CHAT[4]], "system_prompt": "Be short."},
        {"instruction": "1+1?", "chosen": "2", "rejected": "3", "system": "Be short.", "prompt": "1+1?"},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "system": "Be short."},
    ],
)
@pytest.mark.parametrize("where", ["row", "source"])
def test_a_system_prompt_beside_messages_and_pairs_is_used(tmp_path, row, where):
    """Of the row, as in files for LLaMA-Factory, or else of the source."""
    loss, source = "dpo" if "chosen" in row else "sft", {}
    if where == "source":
        row = {key: value for key, value in row.items() if not key.startswith("system")}
        source = {"system_prompt": "Be short."}
    rows = rows_of(tmp_path, PLAIN_CHATML, row, loss=loss, **source)
    (first, *_) = rows.samples("rows", 0)
    expected = tokenizer(PLAIN_CHATML).apply_chat_template([SYSTEM, *CHAT[1:3]], tokenize=False).rstrip()
    assert rows._source.tokenizer.decode(first.token_ids.array.tolist()) == expected


def test_a_history_before_a_pair_is_used(tmp_path):
    row = {"prompt": "And 2+2?", "history": [["1+1?", "2"]], "chosen": "It is 4", "rejected": "5"}
    rows = rows_of(tmp_path, PLAIN_CHATML, row, loss="dpo")
    chosen, _ = rows.samples("rows", 0)
    expected = tokenizer(PLAIN_CHATML).apply_chat_template(CHAT[1:], tokenize=False).rstrip()
    assert rows._source.tokenizer.decode(chosen.token_ids.array.tolist()) == expected
    row = {"chosen": CHAT[1:3], "rejected": [CHAT[1], CHAT[4]], "history": [["0?", "0"]]}
    with pytest.raises(RowError, match="history and chosen both contain messages"):
        rows_of(tmp_path, PLAIN_CHATML, row, loss="dpo").samples("rows", 0)


OPEN_THINK = PLAIN_CHATML.replace(
    "'<|im_start|>assistant\\n' -}}{%- endif", "'<|im_start|>assistant\\n<t>' -}}{%- endif"
)


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (PLAIN_CHATML, {"messages": CHAT[:2]}, "has no message of the assistant"),
        (PLAIN_CHATML, {"messages": [*CHAT[:4], {"role": "assistant", "content": " "}]}, "message 4 of the assistant"),
        (PLAIN_CHATML, {"messages": CHAT[2:]}, "begins with a message of the assistant"),
        (PLAIN_CHATML, {"messages": [*CHAT, {"content": 3}]}, "a message without role or text"),
        (
            PLAIN_CHATML,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, *CHAT]},
            "a part of type 'image'",
        ),
        (
            PLAIN_CHATML,
            {"messages": [{"role": "user", "content": "x" * 300}, CHAT[2]]},
            "has 3.. tokens, more than 300",
        ),
        (OPEN_THINK, {"messages": CHAT}, "the turn of message 2 cannot be marked"),
        (CHATML.replace("m.role == 'assistant'", "loop.last"), {"messages": CHAT}, "marks 1 parts, and there are 2"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, template, row, message):
    rows = rows_of(tmp_path, template, {"messages": CHAT}, row)
    with pytest.raises(RowError, match=message):
        rows.samples("rows", 1)


def test_rows_come_once_an_epoch_and_too_many_bad_ones_are_named(tmp_path):
    made = [{"prompt": f"{i}?", "completion": str(i)} for i in range(6)]
    rows = rows_of(tmp_path, PLAIN_CHATML, *made)
    names = [sample.name for sample in (*rows.next(4), *rows.next(8))]
    assert rows.position == 12 and sorted(names[:6]) == sorted(names[6:]) == [f"rows/{i}" for i in range(6)]
    assert names[:6] != names[6:]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*made, {"prompt": "7?", "completion": ""}])) + "\n")
    with pytest.raises(ValueError, match=r"1 of 7 prompts cannot be used.*row 6 of rows: completion is empty"):
        inspect_training_rows(config(tmp_path), tokenizer(PLAIN_CHATML))


QUESTION = [{"role": "user", "content": "1+1?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": QUESTION, "chosen": said("2"), "rejected": said("3")},
        {"chosen": [*QUESTION, *said("2")], "rejected": [*QUESTION, *said("3")]},
        {"prompt": "1+1?", "chosen": [*QUESTION, *said("2")], "rejected": [*QUESTION, *said("3")]},
        {"question": "1+1", "chosen": [*QUESTION, *said("2")], "rejected": [*QUESTION, *said("3")]},
        {"question": "1+1?", "chosen": "2", "rejected": "3", "chosen_score": 2, "rejected_score": 1},
    ],
)
def test_pairs_of_texts_and_messages_are_two_samples(tmp_path, row):
    rows = rows_of(tmp_path, PLAIN_CHATML, row, loss="dpo")
    pair = rows.samples("rows", 0)
    assert [sample.name for sample in pair] == ["rows/0/chosen", "rows/0/rejected"]
    assert [trained(rows, sample) for sample in pair] == [["2<|im_end|>"], ["3<|im_end|>"]]
    assert rows.all_samples() == pair


def test_the_input_of_an_instruction_belongs_to_a_pair(tmp_path):
    row = {"instruction": "Add.", "input": "1+1", "chosen": "2", "rejected": "3"}
    rows = rows_of(tmp_path, PLAIN_CHATML, row, loss="dpo")
    text = rows._source.tokenizer.decode(rows.samples("rows", 0)[0].segments[0].token_ids.array.tolist())
    assert text == "<|im_start|>user\nAdd.\n\n1+1<|im_end|>\n<|im_start|>assistant\n"


def test_only_the_answers_of_a_pair_are_trained(tmp_path):
    history = [*QUESTION, *said("2"), {"role": "user", "content": "Sure?"}]
    for template in (CHATML, PLAIN_CHATML):
        rows = rows_of(tmp_path, template, {"prompt": history, "chosen": "Yes", "rejected": "No"}, loss="dpo")
        assert [trained(rows, sample) for sample in rows.samples("rows", 0)] == [["Yes<|im_end|>"], ["No<|im_end|>"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1?", "chosen": "", "rejected": "3"}, "chosen is empty"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": None}, "rejected is empty"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": []}, "rejected is empty"),
        ({"prompt": "1+1?", "chosen": float("nan"), "rejected": "3"}, "chosen is empty"),
        ({"prompt": "1+1?", "chosen": said(" "), "rejected": "3"}, "message 1 of the assistant is empty"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": "2"}, "chosen and rejected are equal"),
        (
            {"chosen": [*QUESTION, *said("2")], "rejected": [{"role": "user", "content": "2+2?"}, *said("3")]},
            "different",
        ),
        ({"prompt": "5+5?", "chosen": [*QUESTION, *said("2")], "rejected": [*QUESTION, *said("3")]}, "another prompt"),
        ({"chosen": "2", "rejected": "3"}, "has no prompt: neither a column 'prompt'"),
        (
            {"prompt": "1+1?", "chosen": "3", "rejected": "2", "score_chosen": 4.5, "score_rejected": 8},
            "score_chosen 4.5 is below score_rejected 8",
        ),
        (
            {"prompt": "1+1?", "chosen": "3", "rejected": "2", "chosen-rating": 1.0, "rejected-rating": 3.0},
            "chosen-rating 1.0 is below rejected-rating 3.0",
        ),
        ({"prompt": "1+1?", "chosen": "3", "rejected": False}, "rejected is neither text nor a list of messages"),
    ],
)
def test_pairs_that_compare_nothing_are_refused(tmp_path, row, message):
    good = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    with pytest.raises(RowError, match=message):
        rows_of(tmp_path, PLAIN_CHATML, good, row, loss="dpo").samples("rows", 1)


def test_rows_without_sides_are_no_pairs(tmp_path):
    with pytest.raises(ValueError, match="pairs need the columns chosen and rejected.*columns: prompt, chosen"):
        rows_of(tmp_path, PLAIN_CHATML, {"prompt": "1", "chosen": "2"}, loss="dpo")


def test_fields_that_the_template_does_not_write_are_refused_or_told(tmp_path):
    """A lost tool call would train an empty answer."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = rows_of(
        tmp_path,
        PLAIN_CHATML,
        {"messages": [*QUESTION, call]},
        {"messages": [*QUESTION, {**said("2")[0], "reasoning_content": "1 and 1"}]},
        {"messages": [*QUESTION, *said("2")], "tools": [{"type": "function"}]},
        *({"messages": [*QUESTION, {**said(str(i))[0], "weight": 0}]} for i in range(4)),
    )
    for index, name in enumerate(("tool_calls", "reasoning_content", "tools")):
        with pytest.raises(RowError, match=f"has '{name}', which the chat template does not write"):
            rows.samples("rows", index)
    cfg = config(tmp_path)
    cfg = replace(cfg, data=replace(cfg.data, max_dropped=0.5))
    _, (warning,) = inspect_training_rows(cfg, tokenizer(PLAIN_CHATML))
    assert warning == "messages of rows have 'weight', which neither the chat template nor the loss uses"


def test_held_out_and_rendered_conversations_are_counted(tmp_path):
    made = [{"messages": [{"role": "user", "content": f"{i}?"}, *said(str(i))]} for i in range(4)]
    made.append({"prompt": "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n", "completion": "1"})
    made[4] = {"messages": [{"role": "user", "content": made[4]["prompt"]}, *said("1")]}
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, [made[2], made[1]])) + "\n")
    rows_of(tmp_path, PLAIN_CHATML, *made)
    cfg = config(tmp_path, eval=str(tmp_path / "held.jsonl"))
    _, warnings = inspect_training_rows(cfg, tokenizer(PLAIN_CHATML))
    assert warnings == [
        "1 of 5 read rows of rows contain special tokens that the chat template writes, as if it were applied already; "
        "store messages, or set --data.chat_template False",
        "2 held-out rows of rows are training rows, too",
    ]


def test_the_columns_that_are_learned_are_told(tmp_path):
    rows = rows_of(tmp_path, PLAIN_CHATML, {"problem": "1+1?", "answer": "2", "solution": "It is 2", "messages": None})
    lines, _ = inspect_training_rows(config(tmp_path, prompt_column="problem"), rows._source.tokenizer)
    assert "  columns 'problem', 'solution'" in lines


def test_pairs_with_exchanged_sides_are_counted(tmp_path):
    """Also if one of them is held out; the same pair twice contradicts nothing."""
    pairs = [{"prompt": f"{i}?", "chosen": "2", "rejected": "3"} for i in (0, 1, 1)]
    exchanged = {"prompt": "1?", "chosen": "3", "rejected": "2"}
    (tmp_path / "held.jsonl").write_text(json.dumps(exchanged) + "\n")
    for rows, source, warnings in (
        (pairs, {}, []),
        ([*pairs, exchanged], {}, ["1 pairs of rows are another pair with exchanged sides; remove one of both"]),
        (pairs, {"eval": str(tmp_path / "held.jsonl")}, ["1 pairs of rows are another pair with exchanged sides"]),
    ):
        rows_of(tmp_path, PLAIN_CHATML, *rows, loss="dpo")
        _, actual = inspect_training_rows(config(tmp_path, "dpo", **source), tokenizer(PLAIN_CHATML))
        assert len(actual) == len(warnings) and all(map(str.startswith, actual, warnings))


def test_a_step_of_more_rows_than_there_are_is_told(tmp_path):
    rows_of(tmp_path, PLAIN_CHATML, *({"prompt": f"{i}?", "completion": "2"} for i in range(3)))
    cfg = config(tmp_path)
    _, told = inspect_training_rows(
        replace(cfg, sampling=replace(cfg.sampling, prompts_per_step=4)), tokenizer(PLAIN_CHATML)
    )
    assert told == [
        "a step takes 4 rows and there are 3, so that each step repeats rows; set --sampling.prompts_per_step "
        "(--batch_size of sft and dpo) to 3 or less"
    ]
    assert inspect_training_rows(cfg, tokenizer(PLAIN_CHATML))[1] == []
    assert repetition(cfg, [1, None]) == [] and repetition(cfg, [1, 1]) == [] and len(repetition(cfg, [0, 1])) == 1
