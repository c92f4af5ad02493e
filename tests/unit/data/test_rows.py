"""Rows of files: what other libraries read from the same bytes, the columns of known data sets, order, and bad rows."""

import datetime
import gzip
import json
import random
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

import pyarrow.parquet
import pytest

from megatron_fp8rl.config import (
    DataConfig,
    EnvironmentConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    WarmStartConfig,
)
from megatron_fp8rl.data.columns import ColumnError, find_columns
from megatron_fp8rl.data.dropped import RowError, TooManyDroppedError
from megatron_fp8rl.data.inspection import check_rewards, inspect_sources, require_usable
from megatron_fp8rl.data.prompts import ProblemSource, PromptStream
from megatron_fp8rl.data.rows import open_rows
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.envs.rewards.configured import RowRewards
from megatron_fp8rl.envs.source_kind import files_of, kind_of
from tests.helpers.models import small_model

TOKENIZER = character_tokenizer()
ROWS = [{"question": f"{i} + 1 = ", "answer": str(i + 1), "level": i % 3} for i in range(25)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_FP8RL_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(path: Path, rows: list[dict] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(folder: Path, *sources: EnvironmentConfig, seed: int = 1, **data) -> RunConfig:
    model = small_model((1, 8, 1, 1, 8, 128))
    sampling = SamplingConfig(max_prompt_tokens=40, max_completion_tokens=8)
    data = DataConfig(environments=sources, **data)
    return RunConfig(name="x", model=model, seed=seed, data=data, sampling=sampling, output_dir=str(folder / "run"))


class TestFiles:
    def test_every_kind_of_file_holds_the_same_rows(self, tmp_path):
        import datasets
        import pyarrow
        import pyarrow.parquet
        import zstandard

        text = Path(write(tmp_path / "a.jsonl")).read_bytes()
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text))
        (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(text))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
        datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
        for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "saved"):
            for _ in range(2):  # the second time from the cache
                rows = open_rows(str(tmp_path / name), {})
                assert [dict(rows[i]) for i in range(len(rows))] == ROWS, name

    def test_folders_and_globs_join_their_files(self, tmp_path):
        write(tmp_path / "2.jsonl", ROWS[10:])
        write(tmp_path / "1.jsonl", ROWS[:10])
        for name in (tmp_path, tmp_path / "*.jsonl"):
            rows = open_rows(str(name), {})
            assert [rows[i] for i in range(len(rows))] == ROWS

    @pytest.mark.parametrize("names", [("train-0.jsonl", "test-0.jsonl"), ("train/a.jsonl", "validation/a.jsonl")])
    def test_files_of_several_splits_are_not_joined(self, tmp_path, names):
        for name in (*names, "training.jsonl", ".ipynb_checkpoints/test-0.jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            write(tmp_path / name)
        first, second = (name.replace("/", "-").partition("-")[0] for name in sorted(names))
        message = f"has files of the splits {first} and {second}; name those of one split"
        for name in (tmp_path, tmp_path / "*.jsonl")[: 2 - ("/" in names[0])]:
            with pytest.raises(FileNotFoundError, match=message):
                open_rows(str(name), {})
        (tmp_path / names[1]).unlink()
        assert len(open_rows(str(tmp_path), {})) == 2 * len(ROWS)  # without the hidden file

    def test_splits_of_a_saved_folder(self, tmp_path):
        import datasets

        splits = {"train": datasets.Dataset.from_list(ROWS[:20]), "test": datasets.Dataset.from_list(ROWS[20:])}
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
        assert [len(open_rows(str(tmp_path / "saved"), options)) for options in ({}, {"split": "test"})] == [20, 5]
        with pytest.raises(ValueError, match="the splits train, test and no 'val'"):
            open_rows(str(tmp_path / "saved"), {"split": "val"})

    def test_a_changed_file_is_read_again(self, tmp_path):
        path = write(tmp_path / "a.jsonl", ROWS[:3])
        assert len(open_rows(path, {})) == 3
        write(tmp_path / "a.jsonl", ROWS)
        assert len(open_rows(path, {})) == 25

    def test_a_bad_line_costs_one_row(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"question": "1"}\n\n  \n{"question": \n[1]\n{"question": "2"}')
        rows = open_rows(str(tmp_path / "a.jsonl"), {})
        assert len(rows) == 4 and rows[0] == {"question": "1"} and rows[3] == {"question": "2"}
        with pytest.raises(RowError, match="is not JSON"):
            rows[1]
        with pytest.raises(RowError, match="is a JSON list"):
            rows[2]

    @pytest.mark.parametrize(
        "line", ['{"answer": "1", "question": "1", "answer": "2"}', '{"a": {"answer": 1, "answer": 1}}']
    )
    def test_a_repeated_key_costs_one_row(self, tmp_path, line):
        (tmp_path / "a.jsonl").write_text(f'{{"question": "1"}}\n{line}\n')
        rows = open_rows(str(tmp_path / "a.jsonl"), {})
        assert rows[0] == {"question": "1"}
        with pytest.raises(RowError, match="^has the key 'answer' twice in one object$"):
            rows[1]
        (tmp_path / "b.json").write_text(f"[{line}]")
        with pytest.raises(ValueError, match=r"b\.json cannot be read: has the key 'answer' twice"):
            open_rows(str(tmp_path / "b.json"), {})

    def test_a_missing_file_names_its_neighbours(self, tmp_path):
        write(tmp_path / "train.jsonl")
        with pytest.raises(FileNotFoundError, match="did you mean train.jsonl"):
            open_rows(str(tmp_path / "trian.jsonl"), {})
        (tmp_path / "a.csv").write_text("x")
        with pytest.raises(FileNotFoundError, match="unsupported file type"):
            open_rows(str(tmp_path / "a.csv"), {})
        with pytest.raises(FileNotFoundError, match="no file matches"):
            open_rows(str(tmp_path / "*.parquet"), {})


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
KNOWN = {
    "GSM8K": ({"question": "q", "answer": "Two.\n#### 2"}, "q", "2"),
    "a solution under headings": (
        {"problem": "p", "answer": "#### Steps\n\\boxed{4}\n#### Check\n7 - 3 = 4, without 9"},
        "p",
        "#### Steps\n\\boxed{4}\n#### Check\n7 - 3 = 4, without 9",
    ),
    "MetaMathQA": ({"query": "q", "response": "Two.\n#### 2\nThe answer is: 2"}, "q", "2\nThe answer is: 2"),
    "DAPO-Math-17k": ({"data_source": "x", "prompt": ASKED, "reward_model": {"ground_truth": "2"}}, "1 + 1?", "2"),
    "OpenR1-Math": ({"problem": "p", "solution": "long", "answer": "2"}, "p", "2"),
    "MATH-500": ({"problem": "p", "solution": "long", "answer": "\\frac12", "level": 1}, "p", "\\frac12"),
    "AIME": ({"ID": "I-1", "Problem": "p", "Solution": "long", "Answer": 204}, "p", "204"),
    "verl": ({"prompt": ASKED, "reward_model": {"style": "rule", "ground_truth": 2}, "extra_info": {}}, "1 + 1?", "2"),
    "conversations": ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "h", "g"),
    "messages": ({"messages": [*ASKED, {"role": "assistant", "content": "2"}]}, "1 + 1?", "2"),
    "Alpaca": ({"instruction": "Add.", "input": "1 + 1", "output": "2"}, "Add.\n\n1 + 1", "2"),
    "Alpaca without input": ({"instruction": "Say 2.", "input": "", "output": "2"}, "Say 2.", "2"),
    "Alpaca in capitals": ({"Instruction": "Add.", "Input": "1 + 1", "Output": "2"}, "Add.\n\n1 + 1", "2"),
    "Dolly": ({"instruction": "i", "context": "c", "response": "r", "category": "x"}, "i\n\nc", "r"),
    "an instruction with notes": ({"instruction": "i", "context": "for the reward", "output": "r"}, "i", "r"),
    "input and output": ({"input": "i", "output": "o"}, "i", "o"),
    "completion": ({"prompt": "p", "completion": "c"}, "p", "c"),
    "response": ({"query": "q", "response": "r"}, "q", "r"),
    "solution and response": ({"problem": "p", "response": "long", "solution": "2"}, "p", "2"),
    "messages in both": ({"prompt": ASKED, "completion": [{"role": "assistant", "content": "2"}]}, "1 + 1?", "2"),
    "parts": ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1 "}, "+ 1?"]}]}, "1 + 1?", ""),
    "one message": ({"prompt": {"role": "user", "content": "1 + 1?"}, "answer": "2"}, "1 + 1?", "2"),
    "JSON text": ({"prompt": json.dumps(ASKED), "answer": "2"}, "1 + 1?", "2"),
    "JSON text with an answer": (
        {"messages": json.dumps([*ASKED, {"role": "assistant", "content": "2"}])},
        "1 + 1?",
        "2",
    ),
    "JSON text of an object": ({"prompt": json.dumps({"messages": ASKED}), "answer": "2"}, "1 + 1?", "2"),
    "a Python literal": ({"prompt": repr(ASKED), "answer": "2"}, "1 + 1?", "2"),
    "JSON text of the reference": ({"prompt": "p", "reward_model": json.dumps({"ground_truth": "2"})}, "p", "2"),
    "text about JSON": (
        {"prompt": '[{"value": 1}, {"value": 2}] has which sum?'},
        '[{"value": 1}, {"value": 2}] has which sum?',
        "",
    ),
    "an answer in JSON": ({"prompt": "p", "answer": '[{"role": 1}]'}, "p", '[{"role": 1}]'),
    "an object as answer": ({"prompt": "p", "answer": {"from": 1, "to": 2}}, "p", '{"from": 1, "to": 2}'),
}


@pytest.mark.parametrize("name", KNOWN)
def test_columns_of_known_data_are_found(name):
    row, question, answer = KNOWN[name]
    problem = find_columns(row).problem(row)
    assert (problem.question, problem.answer) == (question, answer)
    if name == "GSM8K":
        assert problem.metadata["full_answer"] == "Two.\n#### 2"
    if name in ("verl", "DAPO-Math-17k"):
        assert [message["role"] for message in problem.messages] == ["system", "user"]
        assert "reward_model" in problem.metadata and "prompt" not in problem.metadata


def test_the_columns_of_an_instruction_stay_for_templates_and_rewards():
    row = {"instruction": "Add.", "input": "1 + 1", "response": "2"}
    assert find_columns(row).problem(row).metadata == row
    for template in ("{instruction}: {question}", "{instruction}: {question!s:>8}"):  # the template has the instruction
        assert find_columns(row, template=template).problem(row).question == "1 + 1"
    assert find_columns(row, prompt="instruction").problem(row).question == "Add."
    assert find_columns(row).problem({"instruction": "Add."}).question == "Add."
    first = {"instruction": "Say 2.", "output": "2"}
    later = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
    assert find_columns(first).problem(first).metadata == first
    assert find_columns(first).problem(later).question == "Add.\n\n1 + 1"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "Add.", "input": [1, 1]}, "input belongs to the prompt and is no text"),
        ({"instruction": " ", "input": ""}, "instruction is empty"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "prompt contains a part of type 'image_url'; only text can be used",
        ),
        ({"prompt": json.dumps(ASKED)[:-9]}, "prompt begins like messages in JSON and is not JSON"),
        ({"prompt": [{"role": "user", "content": None}]}, "prompt contains a message without role or text"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
                    {"role": "user", "content": "b"},
                ]
            },
            "messages contains a call of a tool",
        ),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(row, message):
    with pytest.raises(RowError, match=message):
        find_columns(row).problem(row)


def test_answers_of_typed_tables_are_texts_without_quotes():
    """Parquet files have decimals, dates and bytes."""

    def answer(value: object) -> str:
        row = {"question": "1?", "answer": value}
        return find_columns(row).problem(row).answer

    assert answer(Decimal("1.50")) == "1.50" and answer(datetime.date(2020, 1, 2)) == "2020-01-02"
    assert [answer(value) for value in (0.1, 1e22, float("nan"))] == ["0.1", "1e+22", ""]
    with pytest.raises(RowError, match="has bytes as answer: b'5'; write text"):
        answer(b"5")


def test_answers_of_an_fp32_column_have_the_digits_of_fp32(tmp_path):
    """0.1 in FP32 is 0.10000000149011612, which no answer equals."""
    values = [0.1, 100000.1, 20.02, 0.0, -0.5, 7.0, None, float("nan"), 16777216.0, 123456792.0]
    expected = ["0.1", "100000.1", "20.02", "0.0", "-0.5", "7.0", "", "", "16777216.0", "123456792.0"]
    columns = {"question": [f"{i}?" for i in range(len(values))]}
    for kind in (pyarrow.float32(), pyarrow.float64()):
        table = pyarrow.table({**columns, "answer": pyarrow.array(values, kind)})
        pyarrow.parquet.write_table(table, tmp_path / f"{kind}.parquet")
        source = ProblemSource.from_run(
            config(tmp_path, EnvironmentConfig(dataset=str(tmp_path / f"{kind}.parquet"))), TOKENIZER
        )
        (rows,) = source.rows.values()
        assert [rows.problem(index).answer for index in range(len(rows))] == expected


def test_a_column_of_the_template_that_is_null_is_refused(tmp_path):
    """Its text would be "None"."""
    rows = [{**row, "hint": "h" if i else None} for i, row in enumerate(ROWS)]
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows), template="{hint} {question}")
    (report,) = inspect_sources(config(tmp_path, source), TOKENIZER)
    ((row, reason),) = report.dropped
    assert row == "row 0 of a" and "'hint' is null; write a text, or remove the row" in reason


def test_columns_that_are_not_found_are_listed():
    with pytest.raises(ColumnError, match=r"set prompt_column \(columns: text, goal\)"):
        find_columns({"text": "a", "goal": "b"})
    with pytest.raises(ColumnError, match="prompt_column = 'txt' is no column; did you mean text"):
        find_columns({"text": "a", "goal": "b"}, prompt="txt")
    problem = find_columns({"text": "a", "goal": {"x": 2}}, prompt="text", answer="goal.x").problem(
        {"text": "a", "goal": {"x": 2}}
    )
    assert problem.answer == "2"


class TestOrder:
    def test_each_row_once_per_epoch_and_other_orders_by_seed_and_epoch(self, tmp_path):
        source = EnvironmentConfig(dataset=write(tmp_path / "train.jsonl"))
        prompts = PromptStream(config(tmp_path, source), TOKENIZER).next_prompts(75)
        epochs = [[p.metadata["row"] for p in prompts[i : i + 25]] for i in (0, 25, 50)]
        assert all(sorted(epoch) == list(range(25)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        other = PromptStream(config(tmp_path, source, seed=2), TOKENIZER).next_prompts(25)
        assert [p.metadata["row"] for p in other] != epochs[0]
        assert prompts[0].environment == "train" and prompts[3].prompt_id == "train/3"

    def test_several_sources_keep_their_shares_and_epochs_and_resume_anywhere(self, tmp_path):
        sources = (
            EnvironmentConfig(dataset=write(tmp_path / "a.jsonl"), weight=3),
            EnvironmentConfig(dataset=write(tmp_path / "b.jsonl", ROWS[:7])),
            EnvironmentConfig(dataset="chain_sum", template="{expression}=", options={"max_digits": 1}),
        )
        cfg = config(tmp_path, *sources)
        whole = PromptStream(cfg, TOKENIZER).next_prompts(1024)
        by_source = {key: [p for p in whole if p.environment == key] for key in ("a", "b", "chain_sum")}
        assert [len(prompts) for prompts in by_source.values()] == [614, 205, 205]
        for key, size in (("a", 25), ("b", 7)):
            rows = [p.metadata["row"] for p in by_source[key]]
            assert all(sorted(rows[i : i + size]) == list(range(size)) for i in range(0, len(rows) - size, size))
        position = random.Random(0).randrange(1000)
        assert PromptStream(cfg, TOKENIZER, position=position).next_prompts(24) == whole[position : position + 24]

    def test_the_same_file_may_be_named_twice(self, tmp_path):
        path = write(tmp_path / "a.jsonl")
        cfg = config(
            tmp_path, EnvironmentConfig(dataset=path), EnvironmentConfig(dataset=path, template="so: {question}")
        )
        assert {p.environment for p in PromptStream(cfg, TOKENIZER).next_prompts(40)} == {"a", "a-2"}


class TestHeldOut:
    def test_rows_hold_out_what_eval_names_and_nothing_else(self, tmp_path):
        train, test = write(tmp_path / "train.jsonl"), write(tmp_path / "test.jsonl", ROWS[20:])
        cfg = config(tmp_path, EnvironmentConfig(dataset=train, eval=test))
        prompts = PromptStream(cfg, TOKENIZER).eval_prompts(10)
        assert sorted(p.answer for p in prompts) == sorted(row["answer"] for row in ROWS[20:])
        assert (
            PromptStream(config(tmp_path, EnvironmentConfig(dataset=train), seed=5), TOKENIZER).eval_prompts(10) == []
        )
        (report,) = inspect_sources(cfg, TOKENIZER)
        assert (report.num_equal, report.num_held_out, report.num_rows) == (5, 5, 25)


class TestDropped:
    BAD: ClassVar = [*ROWS, {"question": "€ 5"}, {"question": "x" * 60}, {"question": "  "}, {"other": 1}]

    def test_bad_rows_are_left_out_and_named_once(self, tmp_path):
        cfg = config(tmp_path, EnvironmentConfig(dataset=write(tmp_path / "t.jsonl", self.BAD)), max_dropped=0.5)
        stream = PromptStream(cfg, TOKENIZER, log=True)
        rows = [p.metadata["row"] for p in stream.next_prompts(75)]
        assert counts_of(rows) == {row: 3 for row in range(25)}
        assert PromptStream(cfg, TOKENIZER, log=True).next_prompts(25)
        lines = [json.loads(line) for line in (tmp_path / "run/data/dropped.jsonl").read_text().splitlines()]
        assert {line["prompt"] for line in lines} == {f"row {i} of t" for i in (25, 26, 27, 28)} and len(lines) == 4
        reasons = " ".join(line["reason"] for line in lines)
        assert "'€'" in reasons and "more than sampling.max_prompt_tokens = 40" in reasons and "is empty" in reasons

    def test_too_many_stop_before_anything_starts(self, tmp_path):
        cfg = config(tmp_path, EnvironmentConfig(dataset=write(tmp_path / "t.jsonl", self.BAD)))
        reports = inspect_sources(cfg, TOKENIZER)
        with pytest.raises(TooManyDroppedError, match="t.jsonl: 4 of 29 prompts.*max_dropped = 0.01.*row 25 of t"):
            require_usable(reports, cfg.data.max_dropped)
        require_usable(reports, 0.2)
        text = "\n".join(reports[0].lines())
        assert (
            "25 rows" not in text and "29 rows" in text and "left out: row 25 of t" in text and "prompt tokens" in text
        )


class TestMessages:
    ROW: ClassVar = [{"prompt": ASKED, "answer": "2"}]

    def test_messages_and_a_system_prompt_need_a_chat_template(self, tmp_path):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}[{{ m['role'][0] }}:{{ m['content'] }}]{% endfor %}{% if think %}T{% endif %}"
        )
        path = write(tmp_path / "chat.jsonl", self.ROW)
        chat = {"chat_template_arguments": {"think": True}}
        source = EnvironmentConfig(dataset=path, template="Q {question}", system_prompt="Never seen.")
        (prompt,) = PromptStream(config(tmp_path, source, **chat), tokenizer).next_prompts(1)
        assert prompt.text == "[s:Be brief.][u:Q 1 + 1?]T"
        plain = EnvironmentConfig(dataset=write(tmp_path / "plain.jsonl"), system_prompt="Add.")
        (prompt,) = PromptStream(config(tmp_path, plain, **chat), tokenizer).next_prompts(1)
        assert prompt.text.startswith("[s:Add.][u:")
        with pytest.raises(TooManyDroppedError, match="needs a tokenizer with a chat template"):
            require_usable(inspect_sources(config(tmp_path, source), TOKENIZER), 0.01)


def counts_of(values: list[int]) -> dict[int, int]:
    return {value: values.count(value) for value in values}


class TestABadRowIsLeftOut:
    """Any content of a row affects only this row, in the warm start too."""

    BAD = (
        '{"question": "half a pair \\ud800", "answer": "1"}',
        '{"question": "fine", "answer": "\\udfff"}',
        '{"question": 17, "answer": "1"}',
        '{"question": {"a": 1}, "answer": "1"}',
        '{"question": [{"role": "user"}], "answer": "1"}',
        '{"question": null}',
        '{"answer": "no question"}',
        '{"question": "no level", "answer": "1"}',
        '{"question": ""}',
        "[" * 5000,
        '{"question": "\x00' + "1" * 50 + '"}',
        "NaN",
        "{}",
    )

    def stream(self, tmp_path, **data) -> PromptStream:
        good = [json.dumps({"question": f"{i} = ", "answer": str(i), "level": i}) for i in range(30)]
        (tmp_path / "a.jsonl").write_text("\n".join([*self.BAD, *good]))
        source = EnvironmentConfig(dataset=str(tmp_path / "a.jsonl"), template="{level}: {question}")
        return config(tmp_path, source, max_dropped=0.5, **data)

    def test_in_training(self, tmp_path):
        cfg = self.stream(tmp_path)
        prompts = PromptStream(cfg, TOKENIZER, log=True)
        names = {prompt.metadata["row"] for prompt in prompts.next_prompts(30)}
        assert names == set(range(len(self.BAD), len(self.BAD) + 30)) and prompts.num_dropped <= len(self.BAD)
        (report,) = inspect_sources(cfg, TOKENIZER)
        assert len(report.dropped) == len(self.BAD) and all(reason for _, reason in report.dropped)

    def test_in_the_warm_start(self, tmp_path):
        from megatron_fp8rl.data.sft import SftSource

        cfg = replace(self.stream(tmp_path), warm_start=WarmStartConfig(batch_size=43))
        samples = SftSource(cfg, TOKENIZER).samples(0)
        assert len(samples) == 30

    def test_by_a_chat_template_that_refuses_its_messages(self, tmp_path):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
            "{{ m.content }}{% endfor %}"
        )
        user = {"role": "user", "content": "1"}
        rows = [{"prompt": [user]}] * 9 + [{"prompt": [{"role": "system", "content": "s"}, user]}]
        source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows))
        (report,) = inspect_sources(config(tmp_path, source), tokenizer)
        assert [name for name, _ in report.dropped] == ["row 9 of a"] and "no system messages" in report.dropped[0][1]

    def test_by_a_generator_that_fails(self, tmp_path):
        source = EnvironmentConfig(dataset="env:tests.unit.envs.misbehaving:Fragile")
        prompts = PromptStream(config(tmp_path, source, max_dropped=0.9), TOKENIZER)
        assert len(prompts.next_prompts(20)) == 20 and prompts.num_dropped

    def test_columns_are_those_of_the_first_row_that_has_them(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text('not JSON\n{"meta": 1}\n{"question": "1", "answer": "2"}\n')
        (report,) = inspect_sources(config(tmp_path, EnvironmentConfig(dataset=str(path))), TOKENIZER)
        assert report.columns.prompt == "question" and len(report.dropped) == 2
        path.write_text("not JSON\n[1]\n")
        with pytest.raises(RowError, match="row 0: is not JSON"):
            inspect_sources(config(tmp_path, EnvironmentConfig(dataset=str(path))), TOKENIZER)


def test_a_json_file_may_be_one_array(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=2))
    rows = open_rows(str(path), {})
    assert [rows[i] for i in range(len(rows))] == ROWS
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert open_rows(str(path), {})[3] == ROWS[3]
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="cannot be read"):
        open_rows(str(path), {})


def check_of(tmp_path, rows: list[dict], reward: str):
    """What is found about a reward on these rows before a start."""
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows), rewards=(RewardConfig(function=reward),))
    cfg = config(tmp_path, source)
    (check,) = check_rewards(cfg.data, cfg.scoring.deadline_s, inspect_sources(cfg, TOKENIZER))
    return check


def test_a_reward_that_compares_warns_of_rows_without_answers(tmp_path):
    check = check_of(tmp_path, [{"question": "1"}] * 9, "number")
    assert check.warnings() == ["a: its reward compares with reference answers, and the first rows have none"]


def test_a_file_of_another_kind_is_named_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("a,b")
    assert kind_of("a.csv") == "rows" and kind_of("chain_sum") == "generator"
    with pytest.raises(FileNotFoundError, match="unsupported file type"):
        files_of("a.csv")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "has no reference answer; the reward 'number' compares with it"),
        ("", "has no reference answer"),
        (" ", "has no reference answer"),
        ([], "has no reference answer"),
        ([None], "has no reference answer"),
        ([None, None], "has no reference answer"),
        (float("nan"), "has no reference answer"),
        ({"value": "2", "aliases": ["two"]}, "has an object with the keys 'value', 'aliases' as reference answer"),
        ([2, 2.0], "has the list [2, 2.0] as reference answer"),
    ],
)
def test_rows_without_a_reference_to_compare_with_are_dropped_and_counted(tmp_path, answer, reason):
    rows = [{"question": "1 + 1 = ", "answer": "2"}, {"question": "2 = ", "answer": answer}]
    path = write(tmp_path / "a.jsonl", rows)
    number = EnvironmentConfig(dataset=path, rewards=(RewardConfig(function="number"),))
    (report,) = inspect_sources(config(tmp_path, number), TOKENIZER)
    assert [prompt.answer for prompt in report.prompts] == ["2"]
    ((row, text),) = report.dropped
    assert row == "row 1 of a" and text.startswith(reason)
    form = EnvironmentConfig(dataset=path, rewards=(RewardConfig(function="format", options={"pattern": "2"}),))
    (report,) = inspect_sources(config(tmp_path, form), TOKENIZER)
    assert not report.dropped


def test_a_list_of_texts_has_alternative_references(tmp_path):
    rows = [{"question": "1 + 1 = ", "answer": ["2", "2.0"]}]
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows), rewards=(RewardConfig(),))
    (report,) = inspect_sources(config(tmp_path, source), TOKENIZER)
    assert not report.dropped
    rewards = RowRewards(source.rewards)
    assert [rewards.score(report.prompts[0], text)["reward"] for text in ("2", "2.0", "3", "")] == [1, 1, 0, 0]


@pytest.mark.parametrize("reward", ["exact", "number", "choice", "math"])
def test_wrong_answers_are_scored_before_the_start(tmp_path, reward):
    """Built-in rewards reward none of them."""
    answers = ("2", "3", ["2", "2.0"], "A", "B. Copper", "Paris", "Rome", "1/2")
    rows = [{"question": f"{i} + 1 = ", "answer": answer} for i, answer in enumerate(answers)]
    check = check_of(tmp_path, rows, reward)
    assert check.rewarded_wrong == () and not check.failure and max(check.reference) == 1


def test_a_reward_of_wrong_answers_is_reported(tmp_path):
    (tmp_path / "r.py").write_text(
        "def last_digit(completion, answer):\n    return float(completion[-1:] in (answer[-1:], 's'))\n"
    )
    rows = [{"question": f"{i} + 1 = ", "answer": str(i)} for i in (12, 22)]
    check = check_of(tmp_path, rows, f"{tmp_path}/r.py:last_digit")
    assert [wrong for _, wrong, _ in check.rewarded_wrong] == ["pass", "22", "pass", "12"]
    assert "a: 4 wrong answers are rewarded, such as 'pass' by 1 where the reference is '12'" in check.warnings()[0]


class TestMessagesBeforeThePrompt:
    TEMPLATE = "{% for m in messages %}[{{ m['role'][0] }}:{{ m['content'] }}]{% endfor %}"

    def prompts(self, tmp_path, rows: list[dict], **source) -> list[str]:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = self.TEMPLATE
        source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows), **source)
        self.report = inspect_sources(config(tmp_path, source), tokenizer)[0]
        return [prompt.text for prompt in self.report.prompts]

    @pytest.mark.parametrize(
        ("row", "text"),
        [
            ({"system_prompt": "Add.", "question": "1+1"}, "[s:Add.][u:1+1]"),
            ({"system_prompt": "", "question": "1+1"}, "[u:1+1]"),
            ({"system_prompt": None, "question": "1+1"}, "[u:1+1]"),
            ({"system": "Add.", "instruction": "1+1", "input": "now"}, "[s:Add.][u:1+1\n\nnow]"),
            ({"instruction": "2", "history": [["1", "a"], ["3", "b"]]}, "[u:1][a:a][u:3][a:b][u:2]"),
            ({"system": "S", "instruction": "2", "history": [["1", "a"]]}, "[s:S][u:1][a:a][u:2]"),
            ({"question": "2", "history": [{"role": "user", "content": "1"}, {"from": "gpt", "value": "a"}]},
             "[u:1][a:a][u:2]"),
            ({"question": "2", "history": []}, "[u:2]"),
            ({"system_prompt": "A", "messages": [{"role": "user", "content": "1"}]}, "[s:A][u:1]"),
            ({"system_prompt": "A", "messages": [{"role": "system", "content": "B"}, {"role": "user", "content": "1"}]},
             "[s:B][u:1]"),
            ({"system": "pendulum", "question": "1+1"}, "[u:1+1]"),  # a column of another kind
        ],
    )  # fmt: skip
    def test_system_prompts_and_histories(self, tmp_path, row, text):
        assert self.prompts(tmp_path, [{**row, "answer": "2"}]) == [text]
        assert self.report.prompts[0].metadata.get("system_prompt") == row.get("system_prompt")

    def test_the_rows_system_prompt_precedes_that_of_the_source(self, tmp_path):
        rows = [{"question": "1", "system_prompt": text} for text in ("A", "")]
        assert self.prompts(tmp_path, rows, system_prompt="B") == ["[s:A][u:1]", "[s:B][u:1]"]
        assert "  messages before the prompt in 'system_prompt'" in list(self.report.lines())

    def test_columns_that_the_first_row_lacks_are_used(self, tmp_path):
        rows = [{"question": "1"}, {"question": "1", "system_prompt": "A"}, {"question": "1", "history": [["0", "z"]]}]
        assert self.prompts(tmp_path, rows) == ["[u:1]", "[s:A][u:1]", "[u:0][a:z][u:1]"]
        assert "  messages before the prompt in 'system_prompt' and 'history'" in list(self.report.lines())
        assert self.prompts(tmp_path, rows[:1]) == ["[u:1]"]
        assert not any("messages before" in line for line in self.report.lines())

    def test_a_template_with_the_column_uses_it(self, tmp_path):
        rows = [{"question": "1", "system_prompt": "A", "history": [["0", "z"]]}]
        template = "{system_prompt}/{history[0][0]}/{question}"
        assert self.prompts(tmp_path, rows, template=template) == ["[u:A/0/1]"]

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"question": "1", "history": [["0", "z"], ["0"]]}, "history contains .*no question with its answer"),
            ({"question": "1", "history": [["0", "z"], 3]}, "history contains '3', which is no question"),
            ({"question": "1", "history": [["0", "z"], {"a": 1}]}, "history contains a message without role or text"),
            ({"messages": [{"role": "user", "content": "1"}], "history": [["0", "z"]]}, "both contain messages"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, tmp_path, row, reason):
        self.prompts(tmp_path, [row] * 3)
        with pytest.raises(TooManyDroppedError, match=reason):
            require_usable([self.report], 0.01)

    def test_without_a_chat_template_the_rows_are_refused(self, tmp_path):
        source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", [{"question": "1", "system_prompt": "A"}] * 3))
        with pytest.raises(TooManyDroppedError, match="a system prompt, and needs a tokenizer with a chat template"):
            require_usable(inspect_sources(config(tmp_path, source), TOKENIZER), 0.01)

    def test_a_history_in_one_text_is_mentioned(self, tmp_path):
        rows = [{"question": "2", "history": "We had 1."}]
        assert self.prompts(tmp_path, rows) == ["[u:2]"]
        assert list(self.report.warnings()) == [
            "the prompts of a lack the text in 'history'; add {history} to template"
        ]
        assert self.prompts(tmp_path, rows, template="{history} {question}") == ["[u:We had 1. 2]"]
        assert list(self.report.warnings()) == []

    def test_a_system_prompt_that_may_be_another_column_is_mentioned(self, tmp_path):
        rows = [{"question": "2", "system": "Be brief."}]
        assert self.prompts(tmp_path, rows) == ["[u:2]"]
        assert list(self.report.warnings()) == [
            "the prompts of a lack the text in 'system'; if it is a system prompt, rename the column to 'system_prompt'"
        ]


def test_images_beside_the_text_are_refused(tmp_path):
    rows = [{**row, "images": ["a.png"] if i else []} for i, row in enumerate(ROWS)]
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows), rewards=(RewardConfig(function="number"),))
    (report,) = inspect_sources(config(tmp_path, source), TOKENIZER)
    assert len(report.prompts) == 1 and len(report.dropped) == 24
    assert report.dropped[0] == (
        "row 1 of a",
        "has the column 'images', and only text can be used; remove the column, or the row",
    )


def test_a_question_with_two_answers_and_tools_without_an_agent_are_reported(tmp_path):
    rows = [*ROWS, {**ROWS[3], "answer": "77"}, {**ROWS[4], "question": "4  + 1 =\n"}, {**ROWS[5], "tools": [{"a": 1}]}]
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows), rewards=(RewardConfig(function="number"),))
    (report,) = inspect_sources(config(tmp_path, source), TOKENIZER)
    conflict, tools = report.warnings()
    assert conflict.startswith("1 rows of a have the prompt of another row and another reference answer")
    assert tools.startswith("the prompts of a lack the 'tools' of their rows")
    own = replace(source, rewards=(RewardConfig(function="format", options={"pattern": "2"}),), agent="m:f")
    (report,) = inspect_sources(config(tmp_path, own), TOKENIZER)
    assert list(report.warnings()) == []


def test_fields_of_messages_that_no_prompt_shows_are_told(tmp_path):
    user = {"role": "user", "content": "1 + 1 = ", "name": None}
    rows = [{"messages": [user], "answer": "2"}] * 3
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows), rewards=(RewardConfig(),))
    assert list(inspect_sources(config(tmp_path, source), TOKENIZER)[0].warnings()) == []
    rows.append({"messages": json.dumps([{**user, "name": "A", "weight": 0}]), "answer": "2"})
    write(tmp_path / "a.jsonl", rows)
    (told,) = inspect_sources(config(tmp_path, source), TOKENIZER)[0].warnings()
    assert told == "messages of a have 'name', 'weight', which no prompt shows"


def test_a_reward_that_fails_for_wrong_answers_alone_is_reported(tmp_path):
    (tmp_path / "r.py").write_text("def f(completion, answer): return float('nan') if completion == 'pass' else 1.0\n")
    check = check_of(tmp_path, ROWS, f"{tmp_path}/r.py:f")
    assert not check.is_broken and check.warnings()[0].startswith("a: scorer of a returned {'f': nan")


def test_held_out_questions_are_compared_without_their_spaces(tmp_path):
    held_out = write(tmp_path / "b.jsonl", [{**ROWS[2], "question": " 2 +  1 = "}, {**ROWS[3], "question": "other"}])
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl"), eval=held_out)
    (report,) = inspect_sources(config(tmp_path, source), TOKENIZER)
    assert report.num_equal == 1


def test_equal_questions_in_other_forms_of_unicode_are_equal(tmp_path):
    """One program writes an accented letter as one character, and another as two."""
    tokenizer = character_tokenizer("\n caf\u00e9\u0301?e12")
    rows = [{"question": f"caf{letter}?", "answer": answer} for letter, answer in (("\u00e9", "1"), ("e\u0301", "2"))]
    source = EnvironmentConfig(
        dataset=write(tmp_path / "a.jsonl", rows),
        eval=write(tmp_path / "b.jsonl", rows[1:]),
        rewards=(RewardConfig(function="number"),),
    )
    (report,) = inspect_sources(config(tmp_path, source), tokenizer)
    assert (report.num_equal, report.num_conflicts, report.dropped) == (1, 1, ())
    source = replace(source, dataset=write(tmp_path / "c.jsonl", rows[:1]))
    (report,) = inspect_sources(config(tmp_path, source), tokenizer)
    assert (report.num_equal, report.num_conflicts) == (1, 0)


def test_a_file_that_is_not_packed_is_not_blamed_on_the_cache(tmp_path):
    for ending, reason in ((".gz", "Not a gzipped file"), (".zst", "Unknown frame descriptor")):
        (tmp_path / f"a.jsonl{ending}").write_text('{"question": "1"}')
        with pytest.raises(ValueError, match=rf"a.jsonl{ending} cannot be read: .*{reason}") as error:
            open_rows(str(tmp_path / f"a.jsonl{ending}"), {})
        assert "cache" not in str(error.value)


def test_a_prompt_that_begins_with_two_begin_tokens_is_refused(tmp_path):
    rows = [{"question": f"<bos>{row['question']}", "answer": row["answer"]} for row in ROWS[:3]]
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl", rows))
    (report,) = inspect_sources(config(tmp_path, source), TOKENIZER)
    assert [reason for _, reason in report.dropped] == [
        "begins with <bos>, which the tokenizer or the chat template adds; remove it from the row"
    ] * 3


@pytest.mark.parametrize("has_answers", [True, False])
def test_a_reward_that_fails_for_every_answer_is_broken(tmp_path, has_answers):
    """Also if no row has a reference answer. A reward that fails for some answers is not."""
    (tmp_path / "r.py").write_text(
        "def f(solution_str): return 1.0\n"
        "def g(completion): return 1.0 / len(completion)\n"
        "def negative(completion, answer): return -float(completion != answer)\n"
    )
    rows = ROWS if has_answers else [{"question": row["question"]} for row in ROWS]
    broken = check_of(tmp_path, rows, f"{tmp_path}/r.py:f")
    (warning,) = broken.warnings()
    assert broken.is_broken and "f has the parameter 'solution_str', which no row has" in warning
    assert not check_of(tmp_path, rows, f"{tmp_path}/r.py:g").is_broken
    assert check_of(tmp_path, ROWS, f"{tmp_path}/r.py:negative").warnings() == []
    (tmp_path / "r.py").write_text("import no_such_package\ndef f(completion): return 1.0\n")
    assert check_of(tmp_path, rows, f"{tmp_path}/r.py:f").is_broken


def test_a_reward_finds_the_columns_of_question_and_answer_by_their_names(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(completion, solution=None, question=''):\n"
        "    return float((completion, solution, question) == ('2', 'Two. #### 2', '1 + 1 = '))\n"
    )
    rows = [{"question": "1 + 1 = ", "solution": "Two. #### 2"}] * 3
    assert check_of(tmp_path, rows, f"{tmp_path}/r.py:f").reference == (1.0,) * 3


def test_held_out_rows_that_cannot_be_used_are_counted_before_the_start(tmp_path):
    held_out = write(tmp_path / "b.jsonl", [{"question": "8 + 1 = ", "answer": "9"}, {"question": "7 + 1 = "}])
    rewards = (RewardConfig(function="number"),)
    source = EnvironmentConfig(dataset=write(tmp_path / "a.jsonl"), eval=held_out, rewards=rewards)
    (report,) = inspect_sources(config(tmp_path, source), TOKENIZER)
    ((row, reason),) = report.held_out_dropped
    assert row == "held-out row 1 of a" and reason.startswith("has no reference answer")
    assert any("left out: held-out row 1 of a" in line for line in report.lines())
    with pytest.raises(TooManyDroppedError, match="1 of 2 held-out prompts cannot be used.*held-out row 1 of a"):
        require_usable([report], 0.01)
    require_usable([report], 0.5)
