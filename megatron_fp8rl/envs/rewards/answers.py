"""Rewards that compare an answer with the reference (exact, number, choice, math) or check its form. Pure.

``extraction.py`` finds the answer in a completion. The reference is read as the answer is.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megatron_fp8rl.envs.rewards.choices import letters_of
from megatron_fp8rl.envs.rewards.extraction import (
    BOUND,
    DENIAL,
    FALSE,
    OPERATION_AFTER,
    OPERATION_BEFORE,
    TAIL,
    answer_in,
    find_answer,
    unwrapped,
    with_plain_signs,
    without_bold,
    without_emphasis,
    without_styles,
)
from megatron_fp8rl.envs.rewards.numbers import number_of, whole_number

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_COMMANDS = {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "±": r"\pm ", "≠": r"\ne "}
_BARE_UNIT = re.compile(r"(?<=\d)\s+(?:[kcm]?m|kg|g|ft|in|s|hr?|min|mi|yd|mph)(?:\^\{?\d\}?)?\Z")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(\d+)")  # of a number such as 101_2
_UNEQUAL = r"\\neq?(?![a-z])|\\not(?![a-z])|(?<![\d)])!=|=/=|<>"
_ORDER = r"(?:<(?![A-Za-z/])|>|\\[lg](?:e|eq|t|eqslant)(?![a-z]))"
_FORMULA = re.compile(r"(?<!\$)\$[^$]+\$(?!\$)")
_TURNED = re.compile(  # "5 = x"
    r"(\$*)\s*((?:\\[a-zA-Z]+|[^=$\\A-Za-z<>]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))*[^=$\s<>!~:])\s*=\s*([A-Za-z])\s*(\$*)"
)
_CONDITION = re.compile(r"\b(?:if|unless|whether|wrong|incorrect|false|fails?)\b", re.IGNORECASE)
LETTERS = "ABCDE"  # of multiple-choice questions
_LONGEST_BARE_ANSWER = 200  # characters of a completion that may be LaTeX without delimiters

Compare = Callable[[str, str], float]  # completion, reference answer


def references(answer: str) -> tuple[str, ...]:
    """The reference answers of a row: the members of a JSON list with texts, else the text itself; without empty ones.
    A list of numbers is one answer, such as a vector."""
    value = decoded(answer)
    members = [answer]
    if isinstance(value, list) and (
        any(isinstance(member, str) for member in value) or set(map(str, value)) <= {"None"}
    ):
        members = [member if isinstance(member, str) else json.dumps(member) for member in value if member is not None]
    return tuple(member.strip() for member in members if member.strip())


def decoded(answer: str) -> Any:
    """The list or object of a JSON text; None for other texts."""
    if answer.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def exact(*, ignore_case: bool = False) -> Compare:
    """1 if the answer equals the reference, without enclosing marks such as ``**`` and without a final period."""

    def form(text: str) -> str:
        text = unicodedata.normalize("NFC", text.strip())
        return text.casefold() if ignore_case else text

    def score(completion: str, reference: str) -> float:
        answers = {find_answer(completion).text, answer_in(completion)}
        answers |= {text.removesuffix(end) for text in answers for end in (".", "\u3002")}
        inner = {unwrapped(text) for text in answers} - answers
        answers |= inner | {text.removesuffix(".") for text in inner}
        expected = {form(reference), form(answer_in(reference))} - {""}
        return float(not expected.isdisjoint(map(form, answers)))

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


def choice(*, letters: str = LETTERS) -> Compare:
    """1 if the chosen letter equals the reference's: "(B)", "B. Copper" and "the answer is B because ..." are B."""
    if not letters.isalpha():
        raise ValueError(f"letters = {letters!r} must consist of letters, such as ABCDE")

    def score(completion: str, reference: str) -> float:
        chosen, expected = (letters_of(text, letters.upper()) for text in (completion, reference))
        return float(bool(expected) and chosen == expected)

    return score


def math(*, precision: int = 6) -> Compare:
    """1 if math-verify finds answer and reference equal: fractions, sets, intervals, equations, units. ``precision``:
    number of decimals compared. Plain numbers are read as the reward ``number`` reads them."""
    import math_verify

    # math-verify's timeout would replace the worker's alarm.
    def parsed(text: str) -> list:
        return _with_imaginary_unit(math_verify.parse(text, parsing_timeout=None))

    def formula(text: str) -> list:
        """The expressions of a text that is an answer."""
        if "$" in text or "\\(" in text or "\\[" in text:
            return parsed(text)
        text = _BARE_UNIT.sub("", text)
        has_words = re.search(r"(?<![\\A-Za-z{])[A-Za-z]{4,}", text)
        return parsed(text if has_words else f"${text}$")

    def score(completion: str, reference: str) -> float:
        expected_text = _latex(answer_in(reference))
        if not expected_text:
            return 0.0
        answer = find_answer(completion)
        text = _latex(answer.text).removesuffix(".")
        text = text if answer.is_marked and not answer.is_phrase else _stated(text)
        if _is_denied(text, expected_text):
            return 0.0
        if _BASE.findall(text) != _BASE.findall(expected_text):
            return 0.0
        numbers = whole_number(text), whole_number(expected_text)
        if None not in numbers:
            actual, expected = numbers
            rounded = round(expected, precision)
            return float(actual == expected or (rounded != 0 and round(actual, precision) == rounded))
        answers = formula(text) if answer.is_marked or len(text) < _LONGEST_BARE_ANSWER else parsed(text)
        wanted = parsed(expected_text if "$" in expected_text else f"${expected_text}$")
        return float(math_verify.verify(wanted, answers, float_rounding=precision, timeout_seconds=None))

    return score


def _with_imaginary_unit(expressions: list) -> list:
    """Expressions in which i is the imaginary unit if it stands in an exponent of e; texts among them stay."""
    import sympy

    def converted(value: Any) -> Any:
        if not isinstance(value, sympy.Expr):
            return value
        symbols = {symbol for power in value.atoms(sympy.exp) for symbol in power.free_symbols & value.free_symbols}
        return value.subs({symbol: sympy.I for symbol in symbols if symbol.name == "i"})

    return list(map(converted, expressions))


def _stated(text: str) -> str:
    """The part of a sentence that states the answer: after a question, and before "because" and "rather than"."""
    last = text.rpartition("? ")[2]
    text = last if last.strip() else text
    end = re.search(r"(?<=[\d})$a-z])[,;]?\s+\(?(?:not|rather than|instead of|because|since)\b", text)
    return text[: end.start()] if end and re.search(r"[\d\\$]", text[: end.start()]) else text


def _is_denied(text: str, expected: str) -> bool:
    """Whether the last sentence of an answer denies its value, or names several where one is expected."""
    formulas = [part for part in re.split(r"(?<=[.!?])\s|\n", text) if re.search(r"[\d\\$]", part)]
    last = without_styles(formulas[-1]) if formulas else ""
    *premises, conclusion = re.split(
        r",\s*(?:so|hence|thus|therefore|then)\b|(?<=[\d$)}])\s+(?:is|equals|makes|gives)\s+(?=[-(]*[\d$\\])", last
    )
    last = conclusion if premises and re.search(r"[\d\\$]", conclusion) else last
    is_one = not re.search(r"\bor\b|[,;{]|\\(?:pm|cup|ne)", expected)
    if is_one and re.search(rf"\bor\b|\bbetween\b|{_UNEQUAL}", last):
        return True
    if is_one and not re.search(_ORDER, expected) and re.match(rf"[\s$]*{_ORDER}", last):
        return True
    start = re.search(r"[\d\\$(]", last)
    head, tail = (last, "") if start is None else (last[: start.start()], last[start.start() :])
    doubt = re.compile(rf"{TAIL}|{FALSE}|{OPERATION_AFTER}|\?[ $.*]*\Z", re.IGNORECASE)
    if doubt.search(tail) and not doubt.search(expected):
        return True
    condition = _CONDITION.search(head.rpartition(",")[2]) and not re.search(r",.*[\d\\$]", tail)
    is_bound = re.search(rf"(?:{BOUND}|{OPERATION_BEFORE})\s*[-+{{]*\s*\Z", head, re.IGNORECASE) and not re.search(
        BOUND, expected, re.IGNORECASE
    )
    return bool(is_bound or condition or re.search(DENIAL, head, re.IGNORECASE))


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


def _latex(text: str) -> str:
    """Text in plain signs, with mixed numbers and mathematical characters as LaTeX, without Markdown."""
    text = with_plain_signs(without_emphasis(without_bold(text)))
    text = re.sub(r"(?<![\d.,/^])(\d+)\s+(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\w+))", lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = "".join(_COMMANDS.get(character, character) for character in text)
    return _FORMULA.sub(lambda formula: _with_variable_first(formula[0]), _with_variable_first(text))


def _with_variable_first(text: str) -> str:
    """An equation such as ``5 = x`` as ``x = 5``; other texts stay."""
    equation = _TURNED.fullmatch(text.strip())
    return text if equation is None or equation[2].isalpha() else equation.expand(r"\1\3 = \2\4")
