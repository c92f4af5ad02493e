"""Rewards that compare an answer with the reference (exact, number, choice, math) or check its form. Pure.

``extraction.py`` finds the answer in a completion. The reference is read as the answer is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from megatron_fp8rl.envs.rewards.choices import letters_of
from megatron_fp8rl.envs.rewards.extraction import answer_in
from megatron_fp8rl.envs.rewards.numbers import number_of

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LONGEST_BARE_ANSWER = 200  # characters of a completion that may be LaTeX without delimiters

Compare = Callable[[str, str], float]  # completion, reference answer


def exact(*, ignore_case: bool = False) -> Compare:
    """1 if the stripped answer equals the reference."""

    def score(completion: str, reference: str) -> float:
        answer, expected = answer_in(completion), reference.strip()
        return float(answer.casefold() == expected.casefold() if ignore_case else answer == expected)

    return score


def number(*, tolerance: float = 0.0) -> Compare:
    """1 if the number of the answer equals the reference's, within ``tolerance`` times the reference.

    Ignores separators of thousands, currencies, units and percent signs: "$1,200.0" is 1200, "50 %" is 50, "3/4" is
    0.75. Expressions and several numbers are no number and score 0.
    """
    tolerance = Fraction(tolerance)

    def score(completion: str, reference: str) -> float:
        answer, expected = number_of(completion), number_of(reference)
        if answer is None or expected is None:
            return 0.0
        return float(abs(answer - expected) <= tolerance * abs(expected))

    return score


def choice(*, letters: str = "ABCDE") -> Compare:
    """1 if the chosen letter equals the reference's: "(B)", "B. Copper" and "the answer is B because ..." are B."""
    if not letters.isalpha():
        raise ValueError(f"letters = {letters!r} must consist of letters, such as ABCDE")

    def score(completion: str, reference: str) -> float:
        chosen, expected = (letters_of(text, letters.upper()) for text in (completion, reference))
        return float(bool(expected) and chosen == expected)

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
