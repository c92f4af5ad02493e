"""Rewards that compare an answer with the reference (exact, number, choice, math) or check its form. Pure.

The answer, after the last ``</think>``, is the last ``<answer>`` element, the last ``\\boxed{}``, the text after the
last ``####``, or the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(
    r"[-+]?(?:(?:\d{1,3}(?:[,\u00a0\u202f]\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?"
)
_LONGEST_BARE_ANSWER = 200  # characters of a completion that may be LaTeX without delimiters
_CHOICE = r"(?<![A-Za-z0-9])\(?([{letters}])\)?(?![A-Za-z0-9'])"

Compare = Callable[[str, str], float]  # completion, reference answer


def answer_in(completion: str) -> str:
    """The answer of a completion, stripped."""
    text = completion.rpartition("</think>")[2]
    tagged = _ANSWER_TAG.findall(text)
    if tagged:
        return tagged[-1].strip()
    boxed = _boxed(text)
    if boxed is not None:
        return boxed.strip()
    return text.rpartition("####")[2].strip()


def exact(*, ignore_case: bool = False) -> Compare:
    """1 if the stripped answer equals the reference."""

    def score(completion: str, reference: str) -> float:
        answer, expected = answer_in(completion), reference.strip()
        return float(answer.casefold() == expected.casefold() if ignore_case else answer == expected)

    return score


def number(*, tolerance: float = 0.0) -> Compare:
    """1 if the last number of the answer equals the reference's, within ``tolerance`` times the reference.

    Ignores thousands separators, currencies, units and percent signs: "$1,200.0" is 1200, "50 %" is 50, "3/4" is 0.75.
    """
    tolerance = Fraction(tolerance)

    def score(completion: str, reference: str) -> float:
        answer, expected = last_number(answer_in(completion)), last_number(reference)
        if answer is None or expected is None:
            return 0.0
        return float(abs(answer - expected) <= tolerance * abs(expected))

    return score


def choice(*, letters: str = "ABCDE") -> Compare:
    """1 if the last single letter of the answer equals the reference's: "(B)", "B." and "the answer is B" are B."""
    pattern = re.compile(_CHOICE.format(letters=re.escape(letters)))

    def score(completion: str, reference: str) -> float:
        letters, expected = pattern.findall(answer_in(completion)), pattern.findall(reference)
        return float(bool(letters) and bool(expected) and letters[-1] == expected[-1])

    return score


def math(*, precision: int = 6) -> Compare:
    """1 if math-verify finds answer and reference equal: fractions, sets, intervals, equations, units.

    ``precision``: number of decimals compared.
    """
    import math_verify

    # math-verify's timeout would replace the worker's alarm.
    def parsed(text: str) -> list:
        return math_verify.parse(text, parsing_timeout=None)

    def score(completion: str, reference: str) -> float:
        text = completion.rpartition("</think>")[2]
        tagged = _ANSWER_TAG.findall(text)
        answer = parsed(tagged[-1]) if tagged else parsed(text)
        expected = parsed(reference if "$" in reference or "\\boxed" in reference else f"${reference}$")
        bare = tagged[-1] if tagged else text.strip()
        if not answer and len(bare) < _LONGEST_BARE_ANSWER:
            answer = parsed(f"${bare}$")
        return float(math_verify.verify(expected, answer, float_rounding=precision, timeout_seconds=None))

    return score


def matches(*, pattern: str, whole: bool = False) -> Compare:
    """1 if the regular expression matches in the completion, or with ``whole`` all of it. "." matches any character."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(completion: str, reference: str) -> float:
        return float((compiled.fullmatch if whole else compiled.search)(completion) is not None)

    return score


def length(*, free_characters: int, limit_characters: int) -> Compare:
    """0 up to ``free_characters``, falling linearly to -1 at ``limit_characters``."""
    if not 0 <= free_characters < limit_characters:
        raise ValueError(f"free_characters = {free_characters} is not below limit_characters = {limit_characters}")

    def score(completion: str, reference: str) -> float:
        over = len(completion) - free_characters
        return -min(1.0, max(0.0, over / (limit_characters - free_characters)))

    return score


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None if there is none."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    top, _, bottom = re.sub(r"[\s,\u00a0\u202f]", "", numbers[-1]).partition("/")
    try:
        return Fraction(top) / (Fraction(bottom) if bottom else 1)
    except (ValueError, ZeroDivisionError):
        return None


def _boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}`` whose braces are closed."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : index]
        start = text.rfind("\\boxed{", 0, start)
    return None
