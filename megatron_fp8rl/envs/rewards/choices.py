"""Read the chosen letters of an answer to a multiple-choice question, or reject the answer. Pure.

Read: a letter alone ("B", "(B)", "b)"), a letter before the option's text ("B. A good conductor"), a letter after a
phrase ("The correct option is (C). A photon has no mass."), and a letter that ends the text ("... so B."). The word "A"
in a sentence is an article. Several different letters are an answer only as a list ("A, C").
"""

import re

from megatron_fp8rl.envs.rewards.extraction import (
    BOUND,
    DENIAL,
    FALSE,
    RELATION,
    TAIL,
    after_conditions,
    after_reasoning,
    find_answer,
    line_below_heading,
    phrase_of,
    phrases_in,
    stated,
    with_plain_signs,
    without_markup,
    without_styles,
)

_ENDING = 200  # characters at the end of a text that are searched for a letter
_SENTENCE = 500  # characters after a phrase that are read
_PHRASES = 8  # the last phrases that are read
_PHRASE = phrase_of(
    "(?:answers?|options?|choices?|letters?|selection)",
    r"|\bI(?:\s+would|'d|\s+will|'ll)?\s+(?:choose|pick|select|go with)\b|(?:故选|应选|选择|选)\s*:?",
)
_SENTENCE_END = re.compile(r"(?<=[\w)\]])[.!?。;](?=\s|$)")
_NEGATION = re.compile(
    rf"{DENIAL}|{RELATION}|\\(?:neg|lnot)(?![a-z])"
    r"|\b(?:might|may|could|eliminates?|wrong|incorrect|rules? out|unless|whether)\b",
    re.IGNORECASE,
)
# Before a letter that is not the choice.
_NO_CHOICE = re.compile(
    rf"{_NEGATION.pattern}|{BOUND}|(?:around|about|approximately|roughly|close to|near|similar to)\b|[!~\u00ac\u2248]",
    re.IGNORECASE,
)
_COMPLEMENT = re.compile(
    r"\\(?:overline|bar|cancel|[bx]cancel|sout|complement)(?![a-z])|~~|\A[^'\"\w]*[A-Za-z]'+[^\w']*\Z"
)
_INSTEAD = re.compile(  # "not A but B" is B
    r"\bnot\s+(?:option\s+)?\(?[A-Z]\)?\s*,?\s+but\s+(?:(?:rather|instead|it is|it's)\s+)*", re.IGNORECASE
)
# A sentence that goes on after "A": otherwise the letter is an article.
_AFTER_A = r"(?:because|since|as|due|for|and|or|is|which|that|with|the|from|by|based|according|instead|rather)\b"
_LETTER_WORDS = frozenset(
    (
        "is are be was it's option choice answer letter choose pick select so therefore thus hence because then think"
    ).split()
)


def letters_of(text: str, letters: str) -> frozenset[str]:
    """The chosen letters of an answer or a reference; empty if there are none, or if they are not certain."""
    answer = find_answer(text)
    plain = _plain(answer.text)
    if answer.is_marked and not answer.is_phrase:
        plain = _INSTEAD.sub("", plain)
        is_denied = _NO_CHOICE.match(plain) or _COMPLEMENT.search(answer.text)
        return frozenset() if is_denied else _read(plain, letters, is_marked=True)
    whole = _INSTEAD.sub("", _plain(after_reasoning(text)))
    phrases = phrases_in(whole, _PHRASE)
    if phrases is None:
        return frozenset()
    if line := line_below_heading(whole, phrases[-1].end() if phrases else 0):
        return _read(line, letters, is_marked=True)
    for match in reversed(phrases[-_PHRASES:]):
        rest = whole[match.end() : match.end() + _SENTENCE].lstrip(" \n:*")
        sentence, new = stated(rest.partition("\n\n")[0], rest, _SENTENCE_END)
        also = rf"[.;]\s*\(?[{letters}]\)?\s+(?:is|could be|may be|might be)\s+(?:also|equally|just as)\b"
        if re.match(also, rest[len(sentence) :]):
            return frozenset()
        sentence = sentence if new is None else new
        if _NO_CHOICE.match(sentence.strip()) or _leading(sentence.strip(), letters, is_marked=True) == "":
            return frozenset()
        if chosen := _read(sentence.strip(" \n\"'"), letters, is_marked=True):
            return chosen
        if new is not None:
            return frozenset()
    right = re.findall(
        rf"\(?\b([{letters}])\b\)?\s+(?:is|must be|seems)\s+(?:therefore\s+)?(?:the\s+)?(?:right|correct|best|true)\b",
        whole,
    )
    if right:
        return frozenset(right) if len(set(right)) == 1 else frozenset()
    whole = whole if phrases else after_conditions(whole, _PHRASE)
    last = whole.rpartition("? ")[2]
    return _read(last if last.strip() else whole, letters, is_marked=False)


def _plain(text: str) -> str:
    text = re.sub(r"[-=]+>", " ", text)
    return without_markup(with_plain_signs(without_styles(text))).strip(" \n\t{}\"'\u201c\u201d")


def _read(text: str, letters: str, *, is_marked: bool) -> frozenset[str]:
    """The letters of a text that is an answer, or of a text that contains one."""
    one = f"[{letters}{letters.lower()}]"
    alone = re.fullmatch(rf"(?:option|choice|answer)?\s*[(\[]?\s*({one})\s*[)\]]?\s*[.:,;!)]*", text, re.IGNORECASE)
    if alone:
        return frozenset(alone[1].upper())
    listed = re.fullmatch(
        rf"[(\[{{]?\s*\(?{one}\)?(?:\s*(?:,|;|/|&|\band\b|,\s*and\b)\s*\(?{one}\)?)+\s*[)\]}}]?\.?", text
    )
    if listed:
        return frozenset(re.sub(r"\band\b|[^A-Za-z]", "", text).upper())
    if re.fullmatch(rf"[{letters}]{{2,}}\.?", text) and list(text.rstrip(".")) == sorted(set(text.rstrip("."))):
        return frozenset(text.rstrip("."))
    chosen = _leading(text, letters, is_marked=is_marked)
    return _ending(text, letters) if chosen is None else frozenset(chosen)


def _leading(text: str, letters: str, *, is_marked: bool) -> str | None:
    """The letter before the text of an option, or at the start of a sentence about the choice. None if there is none,
    and empty if another letter follows or the sentence denies it."""
    match = re.match(
        rf"(?:(?:the|my)\s+)?(?:(?:correct|right|best)\s+)?(?:option|choice|letter|answer)?\s*"
        rf"(?:\(\s*([{letters}{letters.lower()}])\s*\)|\[([{letters}])\]|([{letters}])(?=[.):,;\n]|\s*[-=\u2014]\s|\s))",
        text,
    )
    if not match:
        return None
    letter, after = next(filter(None, match.groups())).upper(), text[match.end() :]
    if match[3] and after[:1].isspace() and not after.startswith("\n") and not re.match(r"\s*[-=(\u2014]", after):
        is_word = not re.match(rf"\s+{_AFTER_A}", after)
        if is_word and (letter in "AI" or not is_marked):
            return None
    also = r"(?:(?:possibly|maybe|perhaps|probably|also|or|and|even)\s+)*"
    joined = r"or|and|to|through|,?\s*but\s+(?:maybe|possibly|perhaps)|[,/&+]"
    if re.match(rf"[).]?\s*(?:{joined})\s*{also}\(?[{letters}]\b(?!')", after):
        return ""  # several letters
    if re.match(rf"[).]?\s*{FALSE}|[).]?\s*(?:not\b|n't\b|can.?not\b|can.t\b)|\)?\s*,?\s*{TAIL}", after):
        return ""
    if re.search(
        r"\bunless\b|(?<!whether )\bor\s+(?:maybe|perhaps|possibly|not|none|something|another)\b",
        after.partition("\n")[0],
    ):
        return ""
    after = re.sub(r"\b(?:both|neither|either|all of|none of)\b[^.;\n]*", "", after, flags=re.IGNORECASE)
    label = (
        rf"\(([{letters}])\)|^\s*([{letters}])(?:[.):]|\s*$)"
        rf"|(?:\bor|\botherwise|[,;])\s+\(?([{letters}])(?:[.):]\s+\S|\)?\s*\Z)"
    )
    labels = ["".join(groups) for groups in re.findall(label, after, re.MULTILINE)]
    return letter if set(labels) <= {letter} else ""


def _ending(text: str, letters: str) -> frozenset[str]:
    """The letter at the end of a text, or its only letter in parentheses."""
    end = text[-_ENDING:]
    match = re.search(rf"(\S*)[\s:]*(?<![A-Za-z0-9'])(?:\(([{letters}])\)|([{letters}]))\s*[.!]?\s*\Z", end)
    if match:
        start, word = max(0, match.start(2 if match[2] else 3) - 60), match[1].strip("\"'*(").rstrip(",:;.").lower()
        clause = re.split(r"[.!?;\n]|,", end[start : match.end() - 1])[-1]
        if _NEGATION.search(clause) or re.search(
            rf"[{letters}]\)?\s*(?:,?\s*(?:or|and)|/|,|to)\s*\(?[{letters}]\)?[.!]?\s*\Z", end
        ):
            return frozenset()
        is_separate = not word or not match[1][-1:].isalnum()
        if match[2] or is_separate or word in _LETTER_WORDS:
            return frozenset(match[2] or match[3])
        return frozenset()
    labels = set(re.findall(rf"\(([{letters}])\)", text))
    if len(labels) == 1 and not _NEGATION.search(text):
        return frozenset(labels)
    return frozenset()
