"""Rewards that compare answers: tables of cases in ``cases/``, and random references in common phrasings."""

import json
import random
import time
from pathlib import Path

import pytest

from megatron_fp8rl.config import RewardConfig
from megatron_fp8rl.envs.rewards.configured import build
from megatron_fp8rl.envs.rewards.numbers import number_of
from megatron_fp8rl.types import Prompt

CASES = {name: Path(__file__).with_name("cases") / f"{name}.jsonl" for name in ("exact", "number", "choice", "math")}
# "reference" is replaced; no phrasing has another answer after it.
PHRASINGS = (
    "{}",
    "The answer is {}.",
    "**{}**",
    "`{}`",
    r"\boxed{{{}}}",
    r"So we get $\boxed{{{}}}$.",
    "<answer>{}</answer>",
    "<think>Perhaps 7, or (B)?</think>\n{}",
    "This took 3 steps.\n#### {}",
    "Answer: {}",
    "**Final answer:** {}",
    "The final answer is **{}**. I hope it is correct.",
    "### Final Answer\n{}",
    "**Answer**\n\n{}",
    "<answer>The answer is {}</answer>",
    "{}</answer>",
    "Not every case works. The correct answer is:\n**{}**",
    "Let me see if the answer is plausible. It is.\n\n\\boxed{{{}}}",
    "We verify whether the answer is consistent. The answer is {}. I am not sure.",
    "The answer is {}. No other answer fits.",
    "The answer is {}.\n\nThis is because the others fail.",
    "So the result is \\boxed{{{}}}. It isn't unusual.",
    "The wrong answers are easy to find. The answer is {}.",
    "The answer is 99. Wait, that's wrong. It should be {}.",
    "At most 99 are possible, so the answer is {}.",
)
# "right" is no answer in these texts, and "other" is another answer.
DENIALS = (
    "{right} is wrong. The answer is {other}.",
    "I first thought {right}, but the answer is {other}.",
    "Answer: {other} (not {right})",
    "\\boxed{{{other}}} (not {right})",
    "The answer is {other}, not {right}.",
    "<answer>{other}</answer> {right}",
    "Is it {right}? No.\nFinal answer: {other}",
    "{right}? No, {other}.",
    "Either {right} or {other}.",
    "The answer is either {right} or {other}.",
    "The answer is {right} or {other}.",
    "The answer is unclear: {right} or {other}",
    "Final answer: none of {right}, {other}",
    "The answer is neither {right} nor {other}.",
    "The answer is not {right}.",
    "The answer isn't {right}.",
    "The correct answer isn't {right}; it is {other}.",
    "It is not {right}.",
    "The answer cannot be {right}.",
    "The answer can't be {right}",
    "The answer is definitely not {right}",
    "The answer is anything but {right}.",
    "I don't know whether the answer is {right}.",
    "If the answer is {right}, then it fails. So the answer is {other}.",
    "{other} rather than {right}",
    "{other} instead of {right}.",
    "**Answer:** {other}\n\nSome say {right}, which is false.",
    "\\boxed{{{right} \\text{{ or }} {other}}}",
    "\\boxed{{{right}, {other}}}",
    "\\boxed{{\\text{{not }}{right}}}",
    "The answer is {right}. Wait, the answer is {other}.",
    "answer is {other}. Note: {right}",
    "The answer is at most {right}.",
    "The answer is nearly {right}",
    "The answer is {right} or maybe not.",
    "The answer is {right}, or perhaps {other}.",
    "The answer is {right}?",
    "The answer is {right}? No, it is {other}.",
    "The answer is {right}. Wait, that's wrong.",
    "The answer is {right}. Hmm, actually no, it is {other}.",
    "The answer is {right}. Or not.",
    "The answer is {right} if n is even, otherwise {other}.",
    "The answer is {right} unless n is odd.",
    "The wrong answer is {right}.",
    "I don't think the answer is {right}.",
    "It is false that the answer is {right}.",
    "Some say the answer is {right}. I am not sure.",
    "The answer is not \\boxed{{{right}}}.",
    "\\boxed{{\\neq {right}}}",
    "\\boxed{{\\text{{at most }} {right}}}",
    "\\boxed{{{right}}} or \\boxed{{{other}}}",
    "\\boxed{{{other}}} or \\boxed{{{right}}}",
    "\\boxed{{{other}}}, not \\boxed{{{right}}}",
    "\\boxed{{{right}}}. Wait, that's wrong. It should be {other}.",
    "<answer>not {right}</answer>",
    "<answer>{right} or {other}</answer>",
)


def score(reward: str, completion: str, reference: str) -> float:
    prompt = Prompt(prompt_id="t/0", environment="t", token_ids=(), text="?", answer=reference)
    return build(RewardConfig(function=reward))([prompt], [completion])[0]


def cases() -> list:
    rows = [(name, json.loads(line)) for name, path in CASES.items() for line in path.read_text().splitlines()]
    return [pytest.param(name, row, id=f"{name}-{number}") for number, (name, row) in enumerate(rows)]


def random_number(rng: random.Random) -> str:
    n, d = rng.randrange(1, 10 ** rng.randrange(1, 7)), rng.randrange(2, 50)
    forms = (f"{n}", f"-{n}", f"{n:,}", f"{n / 100:.2f}", f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}", f"\u2212{n}")
    return rng.choice(forms)


def random_choice(rng: random.Random) -> str:
    letter = rng.choice("ABCDE")
    return rng.choice((letter, f"({letter})", f"{letter}. A good conductor", f"{letter}) 12 apples"))


def random_formula(rng: random.Random) -> str:
    a, b = rng.randrange(2, 30), rng.randrange(2, 30)
    forms = (
        rf"{a}\sqrt{{{rng.choice((2, 3, 5, 7))}}}",
        rf"\frac{{{a}}}{{{b}}}",
        f"x^2+{a}x-{b}",
        f"({a}, {a + b})",
        f"-{a}",
    )
    return rng.choice(forms)


def random_text(rng: random.Random) -> str:
    words = ("Paris", "Rome", "New York", "a whale", "1912", "3.5 km", "yes", "no", "[1, 2]")
    return rng.choice(words)


RANDOM = {"number": random_number, "choice": random_choice, "math": random_formula, "exact": random_text}


@pytest.mark.parametrize(("reward", "row"), cases())
def test_cases(reward, row):
    assert score(reward, row["completion"], row["reference"]) == row["score"]


def test_each_table_has_sixty_cases():
    for path in CASES.values():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        keys = {(row["completion"], row["reference"]) for row in rows}
        assert len(keys) == len(rows) >= 60
        assert {row["score"] for row in rows} == {0, 1}


@pytest.mark.parametrize(
    "opening", ["<think>", "<think>\n", "<|im_start|>assistant\n<think>\n", "[THINK]", "<reasoning>"]
)
@pytest.mark.parametrize("reward", ["exact", "choice"])
def test_a_template_that_opens_the_reasoning(reward, opening):
    closing = opening.strip().rpartition("\n")[2].replace("<", "</").replace("[", "[/")
    reward_of = build(RewardConfig(function=reward))

    def score_after(text: str, completion: str) -> float:
        return reward_of([Prompt(prompt_id="t/0", environment="t", token_ids=(), text=text, answer="B")], [completion])[
            0
        ]

    assert score_after("Q" + opening, r"so \boxed{{B}}") == 0
    assert score_after("Q" + opening, rf"so{closing}\boxed{{B}}") == 1
    assert score_after(f"Q{opening}{closing}\n", r"\boxed{B}") == 1
    assert score_after(f"Use {opening} first. A:", r"\boxed{B}") == 1


@pytest.mark.parametrize("reward", RANDOM)
def test_random_references_in_common_phrasings(reward):
    rng = random.Random(47)
    for _ in range(15):
        reference, other = RANDOM[reward](rng), RANDOM[reward](rng)
        for phrasing in PHRASINGS:
            completion = phrasing.format(reference)
            assert score(reward, completion, reference) == 1, (completion, reference)
            if not score(reward, other, reference):
                assert score(reward, completion, other) == 0, (completion, other)


@pytest.mark.parametrize("reward", RANDOM)
def test_answers_that_are_denied_or_doubtful_score_0(reward):
    rng, num_tried = random.Random(5), 0
    while num_tried < 12:
        right, other = RANDOM[reward](rng), RANDOM[reward](rng)
        if score(reward, other, right) or score(reward, right, other):
            continue
        num_tried += 1
        for text in DENIALS:
            completion = text.format(right=right, other=other)
            assert score(reward, completion, right) == 0, (completion, right)


@pytest.mark.parametrize("reward", RANDOM)
@pytest.mark.parametrize(
    "text",
    [
        "1",
        "1,",
        "(",
        "a_1 ",
        "x=1,",
        r"\boxed{",
        "<answer>",
        "####",
        "answer is ",
        " *1",
        r"\text{a",
        " (ab",
        "<a>",
        "5 and ",
    ],
)
def test_long_completions_are_read_fast(reward, text):
    start = time.monotonic()
    score(reward, text * 20_000, "3")
    assert time.monotonic() - start < 20


def documented_cases(reward: str) -> str:
    """The table of docs/rewards.md with the main cases of a reward."""
    rows = [json.loads(line) for line in CASES[reward].read_text().splitlines()]
    cells = [
        (row["main"], _cell(row["completion"]), _cell(row["reference"]), row["score"]) for row in rows if "main" in row
    ]
    lines = ["| rule | completion | reference | reward |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in cells])


def _cell(text: str) -> str:
    text = text.replace("\n", " ⏎ ").replace("|", "\\|")
    return f"`` {text} ``" if text else "(empty)"


@pytest.mark.parametrize("reward", CASES)
def test_the_documentation_shows_the_main_cases(reward):
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    assert f"## {reward}\n\n{documented_cases(reward)}\n" in page


def test_an_integer_alone_is_read_as_with_a_space_before_it():
    texts = ["0", "-0", "007", "-12", "1000", "999999999999999", "-999999999999999", "1" * 16, "-", "--5", "1,000", "٣"]
    texts += map(str, random.Random(5).sample(range(-(10**12), 10**12), 200))
    assert [number_of(text) for text in texts] == [number_of(f" {text}") for text in texts]
    assert number_of("-12") == -12
