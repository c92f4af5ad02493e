"""Find the answer in a completion, and remove the markup around it. Pure.

The reasoning ends at its last closing mark. The answer is then the last ``<answer>`` element, else the last
``\\boxed{}``, else the line after the last ``####``, else the text after the last "answer is", else the whole text.
"""

import re
from itertools import pairwise
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
# Before a value that is only a bound; after a value that is restricted, doubted or denied.
BOUND = (
    r"(?:\b(?:at (?:most|least)|up to|no (?:more|less|fewer) than|below|above|under|over|beyond|within|nearly|almost"
    r"|exceed(?:s|ing)?|(?:maximum|minimum) of|or equal to)(?:\s+(?:about|around))?)"
)
TAIL = (
    r"(?:(?<!whether )\b(?:and/)?or\s+(?:maybe|perhaps|possibly|probably|not|none|neither|nothing|something|another"
    r"|else|otherwise)\b|\b(?:or|and)\s+(?:more|less|fewer|greater|larger|smaller|higher|lower|above|below|over|under|up)\b"
    r"|\b(?:if|unless|otherwise|at (?:most|least)|give or take)\b"
    r"|[,;.\u2026\u2014-]\s*(?:wait|actually)\b|[,;\u2026]\s*no\b(?! other)|\u2014\s*no,)"
)
FALSE = (
    r"(?:\b(?:is|are|was|were|seems?|looks?|would be)(?:\s+(?:also|clearly|definitely|probably|simply|just|therefore))?"
    r"(?:n.t|\s*(?:not|wrong|incorrect|false|impossible|excluded|invalid|too)\b)"
    r"|[(,:;-]\s*(?:(?:that|which) is\s+)?(?:wrong|incorrect)\b)"
)
# Words for an operation before and after a value, which is then a part of an expression.
OPERATION_BEFORE = (
    r"(?:\b(?:minus|negative|plus|twice|thrice|half(?: of)?|doubled?|triple|quarter of|(?:square|cube)? ?root of"
    r"|(?:square|cube) of|times|(?:divided|multiplied) by|(?:reject|exclud|discard|eliminat)(?:e?s?|ed|ing)"
    r"|(?:cannot|not|n't|never) (?:be )?equal(?: to)?))"
)
OPERATION_AFTER = (
    r"(?:\b(?:plus|minus|squared|cubed|divided|multiplied|and an?)\b|\btimes (?:[-$(\\]*\d|as\b|the\b|larger|more)"
    r"|\b(?:more|less|fewer|greater|larger|smaller|higher|lower) than [-$(\\]*\d|\bout of [-$(\\]*\d"
    r"|(?:%|\bpercent)\s+of\s+[-$(\\]*\d|\((?:or|and|plus|minus)\b"
    r"|\b(?:does|do|did|can|could|will|would)(?:n.t|\s*not)\b)"
)
# A relation that gives no value: not equal, less, greater.
RELATION = (
    r"(?:\u2260|(?<![\d)])!=|=/=|<(?!-)|(?<![-=])>|[\u2264\u2265]"
    r"|\\n(?:eq?|ot)(?![a-zA-Z])|\\[lg](?:e|eq|t|eqslant)(?![a-zA-Z]))"
)
_CONDITION = re.compile(
    r"\b(?:whether|if|unless|assum(?:e|ing)|suppos(?:e|ing))\b[^.!?;,\n]*\Z"
    r"|\b(?:wrong|incorrect|false|bad|poor|worst|unlikely|least\s+\w+)\s+(?:\w+\s+)?\Z"
    r"|\b(?:(?:do|does|did|would|can)(?:n't| ?not) (?:think|believe|say)|doubts?|(?:false|not true|wrong|unlikely) that"
    r"|mistake|tempting|(?:some|someone|somebody|people|others?|another|one|many|you|they|students?)(?: \w+)?"
    r" (?:say|says|said|think|thinks|believe|claims?|argue|guess|asked|assume))\b[^.!?;,\n]*\Z",
    re.IGNORECASE,
)
# The start of a sentence that takes back the answer before it.
_RETRACTION = re.compile(
    r"[\s$.,;)*\]\\\u2026-]*(?:(?:hmm+|oh|hold on|but|ah|sorry)\b[\s,.!\u2026]*)*"
    r"(?:no(?:\s*[,.!\u2026]|\s+(?:wait|it|that|this)\b)|wait\b(?!\s+(?:for|until)\b)|actually\b"
    r"|or (?:maybe |perhaps |possibly )?not\b"
    r"|(?:that|this|it)(?:'s|\s+(?:is|was|seems))\s+(?:(?:not|n't) (?:right|correct|true)"
    r"|(?:wrong|incorrect)(?=\s*(?:[.,;!]|because\b|as\b|since\b|\Z)))"
    r"|(?:that|this|it)\s+(?:can't be|cannot be|isn't|wasn't)\s+(?:right|correct|true|possible)"
    r"|scratch that|correction\b|on second thought|oops\b|sorry\b"
    r"|let me (?:reconsider|redo|recalculate|correct|rethink))",
    re.IGNORECASE,
)
# "B. Wait" and "B?", but not "B. No" and "B. A good conductor".
_RETRACTED_LABEL = re.compile(
    rf"\w(?:\?(?=\s|$)|[.!](?!\s+no\b(?!,?\s+(?:wait|actually)))(?={_RETRACTION.pattern}))", re.IGNORECASE
)
_NEW_VALUE = re.compile(
    r"\b(?:it|this|that)(?:'s|\s+(?:is|should be|must be|would be))(?:\s+(?:actually|really|rather|in fact))?\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?。](?=\s|$)")
_BEFORE_DENIED_BOX = re.compile(
    r"(?:\b(?:not(?:\s+equal\s+to)?|never|neither|nor|cannot be|rather than|instead of|except)|n't(?:\s+be)?"
    r"|\\n(?:eq?|ot\s*=)|\u2260|!=)[\s$:*({\\]*\Z",
    re.IGNORECASE,
)
_BETWEEN_BOXES = re.compile(r"[\s$.]*(?P<word>,|;|&|(?:,\s*)?(?:and/or|and|or)\b)[\s$]*", re.IGNORECASE)
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


_LONGEST_RETRACTION = 500  # characters after an answer
_BOXES = 20  # the last boxes that are read


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
    if not phrases:
        text = after_conditions(text, _PHRASE)
    line = line_below_heading(text, phrases[-1].end() if phrases else 0)
    if line and len(re.findall(r"[A-Za-z]{2,}", line)) <= 2:  # otherwise a sentence
        return Answer(line, True, True)
    if phrases:
        rest = text[phrases[-1].end() :]
        rest = rest[_OPENING.match(rest).end() :]
        line = rest.partition("\n")[0]
        sentence, new = stated(line, rest)
        if new is not None:
            return Answer(new, True, True)
        if sentence.count("**") % 2:
            sentence = sentence.strip().removesuffix("**")  # "**Answer: 5**"
        if sentence.strip():
            return Answer(sentence.strip(), True, True)
    return Answer(text.strip(), False)


def stated(line: str, rest: str, sentence_end: re.Pattern[str] = _SENTENCE_END) -> tuple[str, str | None]:
    """(first sentence of a line, what replaces it); ``rest``: the text that begins with the line."""
    label = _RETRACTED_LABEL.match(line)
    end = sentence_end.search(line, 1 if label else 2)  # "A. text" and "5. text" may begin with a label
    sentence = line if end is None else line[: end.start()]
    is_asked = end is not None and end[0] == "?"
    return sentence, replacement(rest[len(sentence) :].lstrip(".!"), is_retracted=is_asked)


def replacement(text: str, *, is_retracted: bool = False) -> str | None:
    """The value that replaces the answer before a text: empty without a new value; None if the answer stays. "Wait,
    that's wrong. It should be 7." replaces the answer by 7. ``is_retracted``: the answer does not stay."""
    text = text[:_LONGEST_RETRACTION]
    if not is_retracted and not _RETRACTION.match(text):
        return None
    values = list(_NEW_VALUE.finditer(text))
    if not values:
        return ""
    new = text[values[-1].end() :].strip()
    end = _SENTENCE_END.search(new, 2)
    return new if end is None else new[: end.start()] if end[0] != "?" else ""


def line_below_heading(text: str, start: int) -> str:
    """The line below the last heading "Answer" or "Final answer" after ``start``; empty if there is none."""
    headings = list(_HEADING.finditer(text, start))
    return headings[-1]["line"].strip().removesuffix(".") if headings else ""


def phrases_in(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]] | None:
    """The phrases of a text without those in a condition ("if the answer is 5"); None if it ends in a condition."""
    every = list(pattern.finditer(text))
    stated = [match for match in every if not _CONDITION.search(text[max(0, match.start() - 60) : match.start()])]
    if every and not stated:
        end = _SENTENCE_END.search(text, every[-1].end() + 1)
        return [] if end and text[end.end() :].strip() else None
    return stated


def after_conditions(text: str, pattern: re.Pattern[str]) -> str:
    """The text after the sentence with the last phrase, all of which are conditional, denied or reported."""
    every = list(pattern.finditer(text))
    end = _SENTENCE_END.search(text, every[-1].end() + 1) if every else None
    return text if end is None else text[end.end() :]


def after_reasoning(completion: str) -> str:
    """The text after the reasoning; empty if the reasoning does not end."""
    for opening, closing in _REASONING:
        completion = completion.rpartition(closing)[2]
        if opening in completion:
            return ""
    return completion


def after_hashes(text: str) -> str:
    """The text after the last "####" (GSM8K), stripped; empty without one, or if it is the heading of a text."""
    last = text.rpartition("####")[2].strip() if "####" in text else ""
    return last if "\n" not in last or re.match(r"\W*\d", last) else ""


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
    last = after_hashes(text)
    return last.partition("\n")[0] if last else None


def _box(text: str) -> str | None:
    """The content of the last ``\\boxed{}`` whose braces are closed, or of several that "and" or "or" connects. A box
    after "not" is ignored. The text is empty if all are, or if the next sentence takes the last one back."""
    starts = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    if not starts:
        bare = list(_BARE_BOX.finditer(text))
        boxes = [(match.start(), match.end(), match[1]) for match in bare]
    else:
        boxes = []
        opened: list[int] = []
        for brace in re.finditer(r"(?<!\\)[{}]", text):
            if brace[0] == "{":
                opened.append(brace.start())
            elif opened and (start := starts.get(brace_start := opened.pop())) is not None:
                boxes.append((start, brace.end(), text[brace_start + 1 : brace.start()]))
        boxes.sort()
    if not boxes:
        return None
    kept = [box for box in boxes[-_BOXES:] if not _BEFORE_DENIED_BOX.search(text[max(0, box[0] - 40) : box[0]])]
    if not kept:
        return ""
    content = kept[-1][2]
    for (_, end, earlier), (start, _, _) in reversed(list(pairwise(kept))):
        between = _BETWEEN_BOXES.fullmatch(text[end:start]) if end <= start else None
        if between is None:
            break
        content = f"{earlier} or {content}" if "or" in between["word"].lower() else f"{earlier}, {content}"
    new = replacement(text[kept[-1][1] :]) if kept[-1] is boxes[-1] else None
    return content if new is None else new
