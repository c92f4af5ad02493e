"""Reference answers of rows: integers that count choices, lists of accepted answers, and what a warm start learns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RewardConfig, RunConfig, SamplingConfig
from megatron_fp8rl.data.dropped import RowError, TooManyDroppedError
from megatron_fp8rl.data.inspection import SourceReport, check_rewards, inspect_sources, require_usable
from megatron_fp8rl.data.prompts import PromptStream
from megatron_fp8rl.data.sft import SftSource
from megatron_fp8rl.data.tokenizer import character_tokenizer
from tests.helpers.models import small_model

TOKENIZER = character_tokenizer()
MMLU = {"question": "Who?", "subject": "law", "choices": ["Ann", "Bob", "Cid", "Dan"]}
TEMPLATE = "{question}\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\nD. {choices[3]}"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_FP8RL_CACHE", str(tmp_path_factory.mktemp("cache")))


def config(folder: Path, rows: list[dict], reward: RewardConfig, template: str = "{question}") -> RunConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = EnvironmentConfig(dataset=str(path), rewards=(reward,), template=template)
    model = small_model((1, 8, 1, 1, 8, 128))
    sampling = SamplingConfig(max_prompt_tokens=200, max_completion_tokens=24)
    return RunConfig(name="x", model=model, data=DataConfig(environments=(source,)), sampling=sampling)


def report_of(folder: Path, rows: list[dict], reward: str = "choice", template: str = TEMPLATE, **options):
    cfg = config(folder, rows, RewardConfig(function=reward, options=options), template)
    (report,) = inspect_sources(cfg, TOKENIZER)
    return cfg, report


def reason(report: SourceReport) -> str:
    with pytest.raises(TooManyDroppedError) as caught:
        require_usable([report], 0.01)
    return str(caught.value)


@pytest.mark.parametrize("kind", [int, float])
def test_integers_count_the_choices_from_0(tmp_path, kind):
    rows = [{**MMLU, "question": f"Who is {i}?", "answer": kind(i)} for i in (0, 1, 2, 3)]
    cfg, report = report_of(tmp_path, rows)
    assert [prompt.answer for prompt in report.prompts] == ["A", "B", "C", "D"]
    assert "  integers in 'answer' count 'choices' from 0: 0 is A, 1 is B" in list(report.lines())
    assert list(report.warnings()) == []
    (check,) = check_rewards(cfg.data, cfg.scoring.deadline_s, [report])
    assert check.reference == (1.0,) * 4 and check.warnings() == []
    prompts = PromptStream(cfg, TOKENIZER).next_prompts(4)
    assert [prompt.answer for prompt in prompts] == ["ABCD"[prompt.metadata["row"]] for prompt in prompts]


def test_other_rewards_compare_the_integer(tmp_path):
    _, report = report_of(tmp_path, [{**MMLU, "answer": 2}], "number")
    assert [prompt.answer for prompt in report.prompts] == ["2"]
    assert not any("count" in line for line in report.lines())


def test_letters_beside_choices_stay(tmp_path):
    _, report = report_of(tmp_path, [{**MMLU, "answer": "B"}, {**MMLU, "answer": "(C)"}])
    assert [prompt.answer for prompt in report.prompts] == ["B", "(C)"]


def test_integers_that_count_from_1_are_refused(tmp_path):
    _, report = report_of(tmp_path, [{**MMLU, "answer": i} for i in (1, 2, 3, 4)])
    assert "has the answer 4 and 4 members in 'choices', which integers count from 0; write letters" in reason(report)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Who?", "answer": 2},
        {"question": "Who?", "answer": "2", "choices": ["Ann", "Bob", "Cid", "Dan"]},
        {"question": "Who?", "answer": 2, "options": {"A": "Ann", "B": "Bob"}},
        {"question": "Who?", "answer": 1, "choices": {"text": ["Ann", "Bob"], "label": ["1", "2"]}},
        {"question": "Who?", "answer": True},
        {"question": "Who?", "answer": "Cid"},
        {"question": "Who?", "answer": "G"},
        {"question": "Who?", "answer": ["A", "2"]},
    ],
)
def test_references_that_name_no_letter_are_refused(tmp_path, row):
    _, report = report_of(tmp_path, [row] * 3, template="{question}")
    assert "and the reward 'choice' compares letters of ABCDE. Write the letter, or set options.letters" in reason(
        report
    )


@pytest.mark.parametrize("answer", ["x + 1", "(3, 4)", "three", "5 or 6", ["a", "b"], "2\\sqrt{3}"])
def test_references_without_a_number_are_refused(tmp_path, answer):
    rows = [{"question": "1 + 1", "answer": answer}] * 3
    _, report = report_of(tmp_path, rows, "number", template="{question}")
    assert "and the reward 'number' reads no single number in it. Use the reward math or exact" in reason(report)
    _, report = report_of(tmp_path, rows, "math", template="{question}")
    assert not report.dropped


@pytest.mark.parametrize(
    "answer", ["$1,200", "3/4", "\\frac{3}{4}", "-5 m", "The sum is 7. #### 7", ["x", "2"], 1e-3, 0]
)
def test_references_with_a_number(tmp_path, answer):
    _, report = report_of(tmp_path, [{"question": "1 + 1", "answer": answer}], "number", template="{question}")
    assert not report.dropped


def test_more_letters(tmp_path):
    _, report = report_of(tmp_path, [{"question": "Who?", "answer": "I"}], template="{question}", letters="ABCDEFGHIJ")
    assert [prompt.answer for prompt in report.prompts] == ["I"] and not report.dropped


@pytest.mark.parametrize("question", ["Who?", "Is it Ann?"])
def test_a_prompt_without_the_choices_is_a_warning(tmp_path, question):
    _, report = report_of(tmp_path, [{**MMLU, "question": question, "answer": 2}], template="{question}")
    (warning,) = report.warnings()
    assert warning == (
        r"the prompts of rows lack the options in 'choices'; set template to {question}\nA. {choices[0]}"
        r"\nB. {choices[1]} and so on"
    )


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"options": ["Ann", "Bob"]}, ("options[0]", "options[1]")),  # MMLU-Pro
        ({"choices": {"text": ["Ann", "Bob"], "label": ["A", "B"]}}, ("choices[text][0]", "choices[text][1]")),  # ARC
        ({"options": {"A": "Ann", "B": "Bob", "C": None}}, ("options[A]", "options[B]")),  # MedQA
    ],
)
def test_options_of_every_shape_belong_into_the_prompt(tmp_path, options, fields):
    rows = [{"question": "Who?", "answer": "B", **options}]
    template = rf"{{question}}\nA. {{{fields[0]}}}\nB. {{{fields[1]}}}"
    _, report = report_of(tmp_path, rows, template="{question}")
    (warning,) = report.warnings()
    assert warning.endswith(f"lack the options in {next(iter(options))!r}; set template to {template} and so on")
    _, report = report_of(tmp_path, rows, template=template.replace(r"\n", "\n"))
    assert report.prompts[0].text == "Who?\nA. Ann\nB. Bob" and list(report.warnings()) == []


@pytest.mark.parametrize(
    ("answer", "reward", "learned"),
    [
        (["2.0", "2"], "number", "2.0"),
        ([None, "two", "2"], "exact", "two"),
        (["", "B"], "choice", "B"),
        ([1, 2], "exact", "[1, 2]"),  # a vector
        ("x #### 7", "number", "7"),
        ([1, 2], "length", "[1, 2]"),
        ("[a]", "length", "[a]"),
    ],
)
def test_the_warm_start_learns_an_accepted_answer(tmp_path, answer, reward, learned):
    options = {"free_characters": 9, "limit_characters": 10} if reward == "length" else {}
    cfg = config(tmp_path, [{"question": "1 + 1", "answer": answer}], RewardConfig(function=reward, options=options))
    cfg = replace(cfg, warm_start=replace(cfg.warm_start, batch_size=1))
    (sample,) = SftSource(cfg, TOKENIZER).samples(0)
    assert TOKENIZER.decode(list(sample.segments[1].token_ids)[:-1]) == learned


@pytest.mark.parametrize("answer", [["a", "b"], [1, "b"], '["a", "b"]'])
def test_the_warm_start_refuses_texts_that_may_be_alternatives_or_one_answer(tmp_path, answer):
    reward = RewardConfig(function="length", options={"free_characters": 9, "limit_characters": 10})
    cfg = config(tmp_path, [{"question": "1 + 1", "answer": answer}], reward)
    with pytest.raises((RowError, TooManyDroppedError), match=r"as reference answer, and no reward compares with it"):
        SftSource(cfg, TOKENIZER).samples(0)
