"""Every figure of the README's claims about GPUs is in the rows that the claim names, of the run that it names."""

import json
import re
import statistics
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = re.compile(r"\| `(\w+)`(?:, run ([A-Z]+))? \|$", re.M)
FIGURE = re.compile(
    r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?= (?:and \d[\d.,]* )?(?:s|ms|GB|nats|tokens/s)\b|x\b|\)| sampled)"
)


def claims() -> list[tuple[str, str, str | None]]:
    """(row of the table, file of rows, letter of the run) of each claim."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [(line.partition("|")[2], *match.groups()) for line in lines if (match := SOURCE.search(line))]


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        yield statistics.median(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers_in(inner)


def missing(text: str, rows: list[dict[str, Any]]) -> list[str]:
    """Figures that differ from the rows at their precision; an "x" is a ratio of median steps."""
    actual = [number for row in rows for number in numbers_in(row)]
    actual += [number / 1e9 for number in actual if number > 1e8]
    steps = [statistics.median(row["step_s"]) for row in rows if row.get("step_s")]
    ratios = [a / b for one, other in combinations(steps, 2) for a, b in ((one, other), (other, one))]
    wrong = []
    for match in FIGURE.finditer(text):
        figure, is_ratio = match[1].rstrip(","), text[match.end() : match.end() + 1] == "x"
        digits = len(figure.partition(".")[2])
        value = float(figure.replace(",", ""))
        if not any(abs(number - value) <= 0.5000001 * 10**-digits for number in (ratios if is_ratio else actual)):
            wrong.append(figure)
    return wrong


def rows_of(name: str, letter: str | None) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if letter is None or row.get("run") == letter]


@pytest.mark.parametrize(("text", "name", "letter"), claims(), ids=[name for _, name, _ in claims()])
def test_figures_are_in_the_rows(text: str, name: str, letter: str | None):
    assert FIGURE.search(text), "a claim has a figure"
    assert missing(text, rows_of(name, letter)) == []


def test_a_wrong_figure_and_a_ratio_of_two_runs_are_found():
    rows = [{"run": "A", "step_s": [1.5, 2.0, 9.0]}, {"run": "A", "step_s": [1.0], "speed": 5142.4}]
    assert missing("2.00 s, 1.0 s (2.00x), 5,142 tokens/s", rows) == []
    assert missing("2.01 s (1.9x), 5,143 tokens/s", rows) == ["2.01", "1.9", "5,143"]
    assert missing("(2.0x)", rows[:1]) == ["2.0"]
