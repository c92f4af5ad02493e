"""Read the number of an answer as an exact fraction, or reject the answer. Pure.

Read: signs, separators of thousands, currencies, units, percent signs, fractions, mixed numbers, powers, powers of ten,
and their LaTeX. An expression such as ``3x``, ``10 - 3`` or ``(3, 4)`` is not a number and is rejected.
"""

import re
from fractions import Fraction

from megatron_fp8rl.envs.rewards.extraction import (
    BOUND,
    DENIAL,
    FALSE,
    OPERATION_AFTER,
    OPERATION_BEFORE,
    RELATION,
    TAIL,
    find_answer,
    with_plain_signs,
    without_markup,
    without_styles,
)

_INTEGER = re.compile(r"-?[0-9]{1,15}")
_LONGEST_TEXT = 4000  # characters at the end of an unmarked answer that are searched
_LARGEST_EXPONENT = 400
_CONTEXT = 100  # characters before a number that are examined
_GROUPS = r"\d{1,3}(?:(?:,|'|\u00a0|\u202f|\u2009| )\d{3})+(?!\d)"
_PLAIN = rf"(?:(?:{_GROUPS}|\d+(?:_\d{{3}})*)(?:\.\d+|\.(?=[eE][-+]?\d))?|(?<!\d)\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]\s*)?(?:(?P<whole>\d+)\s+\(?(?P<part>\d+)\)?\s*/\s*\(?(?P<parts>\d+)\)?(?![\d.])"
    rf"|\(?(?P<top>[-+]?{_PLAIN})\)?(?:[eE](?P<exponent>[-+]?\d+)|\s*(?:\^|\*\*)\s*[{{(]?(?P<power>[-+]?\d+)[}})]?)?"
    r"(?:\s*(?:\*|x)\s*10\s*(?:\^|\*\*)\s*[{(]?(?P<ten>[-+]?\d+)[})]?)?"
    rf"(?:\s*/\s*\(?(?P<bottom>[-+]?{_PLAIN})\)?)?)"
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\s*-?({'|'.join(_SCALES)})s?\b", re.IGNORECASE)
_UNITS = (
    r"[kcmdnµμ]?m|in|ft|yd|mi|s|sec|min|h|hr|kg|g|inch(?:es)?|feet|foot|yards?|miles?|units?|seconds?|hours?"
    r"|(?:centi|milli|kilo|deci)?met(?:er|re)s?"
)
_UNIT_POWER = re.compile(rf"(?<![A-Za-z])({_UNITS})\s*\^\s*\{{?[-+]?\d\}}?")
_CURRENCY = r"(?:\\?[$€£¥₹₩]|\\(?:pounds|euro))"

# Units of amounts such as "5 ft 6 in" and "5 dollars and 30 cents", which have several numbers.
_COMPOUND = (
    r"(?:h|hrs?|hours?|m|mins?|minutes?|s|secs?|seconds?|days?|weeks?|months?|years?|ft|feet|foot|in|inch|inches|yd"
    r"|yards?|k?m|met(?:er|re)s?|lbs?|pounds?|oz|ounces?|k?g|dollars?|euros?|degrees?)\.?,?\s*(?:and\s+)?"
)

_MONTH = (  # a day or a year of a date is no number
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)

# What may not stand before or after a number, because the number is then part of an expression or a list.
_BEFORE = re.compile(
    r"(?:[\d)}%]\s*[-+*/^]\s*|[A-Za-z][-+*/]\s*|[A-Za-z}]\s+[-+*/]\s+|[-+]\s*"  # operators
    r"|[\^√±<>≤≥]\s*[{(]?\s*|[A-Za-z)}]\s*_\{?|\}\s*\{|\\[a-zA-Z]+\s*(?:\[[^\]]*\])?[\s{(]*"  # LaTeX
    rf"|(?:{RELATION}|[<>]=|=[<>])\s*|\b(?:mod|base)\s*|(?i:{DENIAL}|{BOUND}|{OPERATION_BEFORE})\s+(?:be\s+)?"
    r"|(?i:\b(?:if|unless|except|(?:wrong|incorrect|false|invalid|fails?) (?:for|when|with|at)))\s+(?:\w\s*=\s*)?"
    rf"|{_MONTH}\s+|\d(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH},?\s+|\d[\s%]*(?:,|;|&|\bor\b|\band\b|\bto\b)\s*|\d[.,:']|\d\s+:\s*"
    rf"|\d\s*{_COMPOUND}|\d\s+[A-Za-z]+\s+and\s+)\Z"
)
_AFTER = re.compile(
    r"[)\]}]*\s*(?:[+*^]\s*[\w({\\√π]|[√π±<>≤≥]|\\[a-zA-Z]|-\s*[\d(\\]|/\s*[\d(\\]|/\s*[A-Za-z]\b|(?:mod|base)\b)"
    r"|[)\]}]*(?:_|\([-\d\\a-z]|[.,:']\d)"
    r"|\s?(?:[a-fijnp-rt-zXYZθ]|[kKMBT]|bn|mn|pi|sqrt|sin|cos|tan|log|ln|exp|x\w*)\b(?!['’])"
    r"|[\s%]*(?:,|;|&|\bor\b|\band\b|\bto\b)\s*[-+]?\d|\s+(?:or|and)\s+[-+]?\(\d|\s+and\s+an?\b"
    rf"|\s*{_COMPOUND}\d|\s+[A-Za-z]+\s+and\s+\d|\s?[+?]|-?ish\b|(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}\b"
    rf"|[\s%)]*(?:(?!because|since)[A-Za-z]+)?\s*,?\s*(?i:{TAIL}|{FALSE}|{OPERATION_AFTER})"
)
_ARTICLES = re.compile(r"\s(?:a|A)\b")
_REMARK = re.compile(r"(?<=\s)\((?!\s*(?:mod|base|or|and|plus|minus)\b)[^()]*[A-Za-z]{2}[^()]*\)")
_TUPLE = re.compile(r"[(\[{][^()\[\]{}]*\d[^()\[\]{}]*[,;]\s*[-+]?\Z")


def number_of(text: str) -> Fraction | None:
    """The number of an answer or a reference; None if there is none, several, or an expression."""
    if _INTEGER.fullmatch(text):  # most references
        return Fraction(text)
    answer = find_answer(text)
    if not answer.is_marked:
        return last_number(answer.text)
    plain = _without_remarks(_plain(answer.text[:_LONGEST_TEXT]))
    if re.search(RELATION, re.split(r"\d", plain)[0] if answer.is_phrase else plain):
        return None
    left, equal, right = plain.rpartition("=")
    if equal and re.search(r"\d", right):
        if not answer.is_phrase and re.search(r"(?:[,;]|\band\b|\bor\b)\s*\w+\s*\Z", left) and re.search(r"\d", left):
            return None  # "x = 2, y = 3"
        plain = right
    elif equal:
        plain = left
    matches = _matches(plain)
    if not matches or (len(matches) > 1 and not answer.is_phrase):
        return None
    if not answer.is_phrase and re.search(r"[!?]|\\[a-zA-Z]", plain):
        return None
    return _value(plain, matches[0])


def whole_number(text: str) -> Fraction | None:
    """The number if the text consists of one number without a unit; otherwise None."""
    plain = "" if "%" in text else _plain(text[:_LONGEST_TEXT]).strip()
    match = _NUMBER.fullmatch(plain)
    return _value(plain, match) if match else None


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None if there is none, or if the last is part of an expression."""
    plain = _without_remarks(_plain(text[-_LONGEST_TEXT:]))
    matches = _matches(plain)
    return _value(plain, matches[-1]) if matches and not plain.endswith("?") else None


def _without_remarks(text: str) -> str:
    """Text without parentheses with words after a number: "42 (in 3 steps)" becomes "42 "."""
    first = re.search(r"\d", text)
    return text if first is None else text[: first.end()] + _REMARK.sub("", text[first.end() :])


def _plain(text: str) -> str:
    """Text without markup and LaTeX commands that do not change a number."""
    text = re.sub(r"\{\s*,\s*\}", ",", text)  # 1{,}200
    text = re.sub(r"(?<=\d)\\[,!](?=\d{3})", ",", text)
    text = without_styles(text)
    text = re.sub(r"\\(?:times|cdot|ast)(?![a-zA-Z])", "*", text)
    text = re.sub(r"\\(?:approx|simeq|equiv|implies|Rightarrow|rightarrow|to)(?![a-zA-Z])|[≈≡⇒→]|~=|[-=]>", "=", text)
    text = re.sub(r"\\div(?![a-zA-Z])", "/", text)
    text = re.sub(r"(\A\s*|\b(?:is|are|be|equals|get|gives)\s+|[=:(]\s*)(?:minus|negative)\s+(?=[\d.])", r"\1-", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\%|%", " % ", text)
    text = re.sub(rf"([-+])\s*{_CURRENCY}\s*(?=[\d.])", r"\1", text)
    text = re.sub(rf"({_CURRENCY}\s*[\d.,]+)\s?m\b", r"\1 M", text)  # millions
    text = re.sub(rf"{_CURRENCY}(?=\s*-?[\d.])|\\\$", " ", text)
    text = re.sub(r"\\[dtc]?frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([-+]?[\d.,]+)\s*\}", r" (\1)/(\2) ", text)
    text = re.sub(r"\\[dtc]?frac\s*(\d)\s*(\d)", r" (\1)/(\2) ", text)
    text = re.sub(r"([-+])\s+(?=\(\d)", r"\1", text)
    text = with_plain_signs(without_markup(text))
    return _UNIT_POWER.sub(r"\1", text)


def _matches(text: str) -> list[re.Match[str]]:
    """The numbers in a text, without digits in names such as x1 or H2O."""
    matches = []
    for match in _NUMBER.finditer(text):
        before = text[max(0, match.start() - _CONTEXT) : match.start()]
        is_in_name = match["sign"] is None and re.search(r"[A-Za-z]_?\{?\Z", before) and not before.endswith("\\")
        if is_in_name and not match[0].startswith("(") and not re.search(r"\\[a-zA-Z]+\Z", before):
            continue
        matches.append(match)
    return matches


def _value(text: str, match: re.Match[str]) -> Fraction | None:
    """The value of a number in a text; None if it is part of an expression."""
    before, after = text[max(0, match.start() - _CONTEXT) : match.start()], text[match.end() :]
    sign = match["sign"] or ""
    if (match[0].startswith("(") and before[-1:].isalpha()) or (match[0].startswith("-") and before.endswith("|")):
        return None  # the argument of a function, or an absolute value
    if sign.endswith((" ", "\n")) and before.strip() and before.rstrip()[-1] not in "=:(":
        return None  # subtraction, or a dash
    glued = before[-1:]
    if (sign and glued and (glued.isalnum() or glued in ")}%-+")) or (sign and re.search(r"[\d)}%]\s*\Z", before)):
        return None
    if _BEFORE.search(before) or _TUPLE.search(before):
        return None
    scale = _SCALE.match(after)
    if scale is None and _AFTER.match(after) and not _ARTICLES.match(after):
        return None
    try:
        value = _whole(match)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    if scale:
        value *= _SCALES[scale[1].lower()]
    return -value if sign.startswith("-") else value


def _whole(match: re.Match[str]) -> Fraction:
    """The value of a match without its sign. Raises ValueError for exponents above the limit."""
    if match["whole"]:
        if int(match["part"]) >= int(match["parts"]):
            raise ValueError(f"{match[0]} is not a mixed number")
        return Fraction(int(match["whole"])) + Fraction(int(match["part"]), int(match["parts"]))
    exponents = [int(match[name] or 0) for name in ("exponent", "power", "ten")]
    if max(map(abs, exponents)) > _LARGEST_EXPONENT:
        raise ValueError(f"the exponents {exponents} exceed {_LARGEST_EXPONENT}")
    value = _fraction(match["top"]) * Fraction(10) ** exponents[0]
    if match["power"]:
        value **= exponents[1]
    value *= Fraction(10) ** exponents[2]
    return value / _fraction(match["bottom"]) if match["bottom"] else value


def _fraction(text: str) -> Fraction:
    return Fraction(re.sub(r"[,'_\s\u00a0\u202f\u2009]", "", text))
