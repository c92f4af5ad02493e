"""Find the answer in a completion, and remove the markup around it. Pure.

The reasoning ends at its last closing mark. The answer is then the last ``<answer>`` element, else the last
``\\boxed{}``, else the line after the last ``####``, else the text after the last "answer is", else the whole text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s${}\\]+)")
# LaTeX commands that change only how their argument looks; the argument may have two levels of braces.
_BRACED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_STYLE = (
    r"\\(?:text(?:bf|rm|it|sf|tt|sl|sc|md|up|normal)?|math(?:rm|bf|it|sf|tt|normal|strut)?|mbox|hbox|emph|underline"
    rf"|operatorname\*?|bold(?:symbol)?|bm|pmb)\s*{_BRACED}"
)
_STYLED = re.compile(_STYLE)
_BOLD = re.compile(rf"\\(?:bold(?:symbol)?|bm|pmb|mathbf|mathit|underline)\s*{_BRACED}|\\mathrm\s*\{{([a-z])\}}")
_SPACE = re.compile(
    r"\\[,;:! ]|~|\\(?:q?quad|displaystyle|textstyle|left|right|limits)(?![a-zA-Z])|\\[bB]ig+[lr]?(?![a-zA-Z])"
)


def phrase_of(noun: str, others: str = "") -> re.Pattern[str]:
    """The pattern of "the NOUN is", "NOUN: " and similar, with marks of emphasis; ``others``: alternatives."""
    where = r"(?:\s+(?:to|for|of|in|from|among|that)\b[^.:=\n]{0,60}?)?"
    adverb = r"(?-i:therefore|thus|then|clearly|simply|definitely|now|just|probably|most likely|likely)"
    verb = r"\b(?:is|are|was|equals|must be|should be|would be)\b"
    return re.compile(
        rf"\b{noun}\b[*_]*{where}[*_]*\s*(?:{verb}(?:\s+{adverb}\b)?|:|=)[*_]*\s*:?"
        rf"|答案\s*(?:应该是|是|为|[:\uff1a]){others}",
        re.IGNORECASE,
    )


_PHRASE = phrase_of("answer")
_HEADING = re.compile(
    r"^[#*_ \t]*(?:(?:the|my)\s+)?(?:(?:final|correct)\s+)?answer[*_ \t]*\n\s*(?P<line>[^\n]*\S)",
    re.IGNORECASE | re.MULTILINE,
)
# Words before a value that is not the answer, or not certainly.
DENIAL = (
    r"(?:\b(?:not|unclear|unknown|uncertain|cannot|never|neither|nor|either|none of|anything but|rather than|except"
    r"|instead of|other than|unlike|(?:larger|greater|smaller|lower|higher|more|less|fewer) than)\b|n't\b)"
)
_CONDITION = re.compile(r"\b(?:whether|if|unless|assum(?:e|ing)|suppos(?:e|ing))\b[^.!?;,\n]*\Z", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?。](?=\s|$)")
_OPENING = re.compile(r"(?:\s*(?:\\\[|\\\(|\$\$?|\*\*|__)[ \t]*\n)*\s*")  # lines before a formula

# Marks of models and chat templates around reasoning.
_REASONING = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning", "seed:think")),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)

# The characters that other scripts, word processors and LaTeX use for signs and digits.
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\ufe62\uff0b", "+"),
        **dict.fromkeys("\u00d7\u22c5\u2219\u00b7\u2217", "*"),
        **dict.fromkeys("\u00f7\u2044\u2215\uff0f", "/"),
        **dict.fromkeys("\u2019\u02bc", "'"),
        **dict.fromkeys("\uff0e\u3002", "."),
        "\uff0c": ",",
        "\uff05": "%",
        "\uff1a": ":",
        "\uff1d": "=",
        "\uff08": "(",
        "\uff09": ")",
        "\u066b": ".",
        "\u066c": ",",
        **{chr(0xFF21 + i): chr(ord("A") + i) for i in range(26)},
        **{chr(0xFF41 + i): chr(ord("a") + i) for i in range(26)},
    }
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_LOWERED = str.maketrans(_SUPERSCRIPTS, "0123456789-+")
_VULGAR = dict(
    zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "1/2 1/3 2/3 1/4 3/4 1/5 2/5 3/5 4/5 1/6 5/6 1/8 3/8 5/8 7/8".split(), strict=True)
)
_EMPHASIS = re.compile(
    r"(?<![\w*])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])|(?<![\w_])_(?=[^\s_])([^_\n]*[^\s_])_(?![\w_])"
)

_WRAPPED = re.compile(
    r"(\*\*\*|\*\*|__|\*|_|`+|\$\$?|\"|')(?=\S)((?:(?!\1).)+)\1|\\\((.+)\\\)|\\\[(.+)\\\]|\u201c(.+)\u201d|\u2018(.+)\u2019"
    rf"|{_STYLE}",
    re.DOTALL,
)


class Answer(NamedTuple):
    """An extracted answer."""

    text: str
    is_marked: bool  # whether a tag, a box, "####" or a phrase marks the text; otherwise it is the whole text
    is_phrase: bool = False  # the text follows "answer is", and may continue after the answer


def answer_in(completion: str) -> str:
    """The text of the answer, stripped; a phrase such as "the answer is" is not looked for."""
    return (_marked(after_reasoning(completion)) or after_reasoning(completion)).strip()


def find_answer(completion: str) -> Answer:
    """The answer of a completion."""
    text = after_reasoning(completion)
    marked = _marked(text)
    if marked is not None and not phrases_in(marked, _PHRASE):
        return Answer(marked.strip(), True)
    text = text if marked is None else marked
    phrases = phrases_in(text, _PHRASE)
    if phrases is None:
        return Answer("", True, True)
    line = line_below_heading(text, phrases[-1].end() if phrases else 0)
    if line and len(re.findall(r"[A-Za-z]{2,}", line)) <= 2:  # otherwise a sentence
        return Answer(line, True, True)
    if phrases:
        rest = text[phrases[-1].end() :]
        rest = rest[_OPENING.match(rest).end() :]
        line = rest.partition("\n")[0]
        end = _SENTENCE_END.search(line, 2)  # "A. text" and "5. text" may begin with a label
        sentence = line if end is None else line[: end.start()]
        if sentence.count("**") % 2:
            sentence = sentence.strip().removesuffix("**")  # "**Answer: 5**"
        if sentence.strip():
            return Answer(sentence.strip(), True, True)
    return Answer(text.strip(), False)


def line_below_heading(text: str, start: int) -> str:
    """The line below the last heading "Answer" or "Final answer" after ``start``; empty if there is none."""
    headings = list(_HEADING.finditer(text, start))
    return headings[-1]["line"].strip().removesuffix(".") if headings else ""


def phrases_in(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]] | None:
    """The phrases of a text without those in a condition ("if the answer is 5"); None if it ends in a condition."""
    every = list(pattern.finditer(text))
    stated = [match for match in every if not _CONDITION.search(text[max(0, match.start() - 60) : match.start()])]
    if every and not stated:
        end = _SENTENCE_END.search(text, every[-1].end() + 2)
        return [] if end and text[end.end() :].strip() else None
    return stated


def after_reasoning(completion: str) -> str:
    """The text after the reasoning; empty if the reasoning does not end."""
    for opening, closing in _REASONING:
        completion = completion.rpartition(closing)[2]
        if opening in completion:
            return ""
    return completion


def is_unfinished(prompt_text: str, completion: str) -> bool:
    """Whether the completion ends within its reasoning, which the prompt may have begun."""
    prompt_text = prompt_text.rstrip()
    begun = any(prompt_text.endswith(opening) and closing not in completion for opening, closing in _REASONING)
    return begun or any(opening in completion.rpartition(closing)[2] for opening, closing in _REASONING)


def without_markup(text: str) -> str:
    """Text without Markdown emphasis, HTML tags, code marks and the delimiters of formulas."""
    text = re.sub(r"<sup>([^<]*)</sup>", r"^{\1}", text)
    text = re.sub(r"\\\(|\\\)|\\\[|\\\]|(?<!\\)\$|</?[a-zA-Z][a-zA-Z0-9]*/?>", "", without_emphasis(text))
    return _EMPHASIS.sub(lambda match: match[1] or match[2], text).strip()


def without_styles(text: str) -> str:
    """Text without LaTeX commands for fonts and spaces: ``\\boldsymbol{5}\\,kg`` becomes `` 5  kg``."""
    for _ in range(3):
        text = _STYLED.sub(r" \1 ", text)
    return _SPACE.sub(" ", text)


def without_bold(text: str) -> str:
    """A formula without commands for bold and italic letters, which change no value."""
    return _BOLD.sub(lambda match: f"{{{match[1] or match[2]}}}", text)


def without_emphasis(text: str) -> str:
    """Text without Markdown emphasis and code marks; ``x**2`` stays."""
    text = re.sub(r"(?<![\w)])(?:\*\*|__)|(?:\*\*|__)(?![\w(])|`", "", text)
    return _EMPHASIS.sub(lambda match: match[1] or match[2], text).strip()


def unwrapped(text: str) -> str:
    """Text without the marks that enclose all of it: emphasis, code marks, quotes, formula delimiters, ``\\text{}``."""
    while match := _WRAPPED.fullmatch(text):
        text = next(filter(None, match.groups()[1:])).strip()
    return text


def with_plain_signs(text: str) -> str:
    """Text with ASCII digits and signs: U+2212 becomes "-", "½" becomes "1/2", and "²" becomes "^{2}"."""
    text = text.translate(_SIGNS)
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(_LOWERED) + "}", text)
    for sign, fraction in _VULGAR.items():
        text = text.replace(sign, f" {fraction}")
    return "".join(str(int(c)) if c.isdecimal() and not c.isascii() else c for c in text)


def _marked(text: str) -> str | None:
    """The content of the last element, box or "####" line; None without any."""
    if "</answer>" in text and "<answer>" not in text:
        text = f"<answer>{text}"  # the prompt has the opening tag
    if "<answer>" in text:
        start, end = text.rfind("<answer>", 0, text.rfind("</answer>") + 1), text.rfind("</answer>")
        # Without a closing tag, generation stopped there.
        inside = text.rpartition("<answer>")[2] if start < 0 else text[start + len("<answer>") : end]
        boxed = _box(inside)
        return inside if boxed is None else boxed
    if (boxed := _box(text)) is not None:
        return boxed
    line, _, rest = text.rpartition("####")[2].partition("\n") if "####" in text else ("", "", "")
    is_result = not rest.strip() or re.match(r"\W*\d", line)  # otherwise a heading
    return line if line.strip() and is_result else None


def _box(text: str) -> str | None:
    """The content of the last ``\\boxed{}`` whose braces are closed."""
    starts = {match.end() - 1: match.end() for match in _BOX.finditer(text)}
    if not starts:
        bare = _BARE_BOX.findall(text)
        return bare[-1] if bare else None
    last: tuple[int, int] | None = None
    opened: list[int] = []
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (start := starts.get(opened.pop())) is not None and (last is None or start > last[1]):
            last = start, brace.start()
    return None if last is None else text[slice(*last)]
