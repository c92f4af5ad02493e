"""The reward ``judge``: a model at an OpenAI-compatible URL grades the completion.

The reward is the grade divided by the highest grade: "8/10", "8 out of 10" and "80 %" are 0.8. An answer without a
grade, with different grades, or with a grade out of range is a failed score. The API key is never logged.
"""

import os
import re
from collections.abc import Callable

from megatron_fp8rl.envs.rewards.extraction import after_reasoning, with_plain_signs, without_markup
from megatron_fp8rl.net.ask import ask
from megatron_fp8rl.types import Prompt

_RUBRIC = (
    "Grade the answer to the question from 0 to {highest}: {highest} is fully right, 0 is wrong.\n\n"
    "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to grade:\n{completion}\n\nGive the grade alone."
)
_WAIT_S = 0.5  # before the first retry; doubled for each further one
_NUMBER = r"(?<![\w.,])[-+]?\d+(?:\.\d+)?(?!\w|[.,]\d)"
_GRADE = rf"({_NUMBER})(?:\s*(%)|\s*(?:/|\bout\s+of\b)\s*({_NUMBER}))?(?:\s+points?\b)?"
_RANGE = re.compile(
    rf"{_NUMBER}\s*(?:-|\bto\b|\band\b|\bor\b)\s*{_NUMBER}|(?<!\d)(?<!\d\s)\bout\s+of\s+{_NUMBER}", re.I
)
_NAMED = re.compile(
    r"\b(?:(final|overall|total)\b *(?:grade|score|rating|mark)?|(?:grade|score|rating|mark))\b"
    rf"[\"'*_)\]\s]*(?:\([^)]*\)\s*)?(?:is|of|was|would be|:|=|->)?[\"'*_(\[\s:]*{_GRADE}",
    re.IGNORECASE,
)


def judge(
    *,
    url: str,
    model: str,
    rubric: str = _RUBRIC,
    highest: float = 1.0,
    key_env: str = "",
    num_retries: int = 3,
    deadline_s: float = 20.0,
    max_tokens: int = 64,
) -> Callable[[Prompt, str], float]:
    """Build the reward.

    Args:
        url: up to /chat/completions, as in ``http://host:8000/v1``.
        rubric: may use the fields prompt, completion, answer and highest.
        key_env: environment variable with the API key.

    Raises ValueError if the variable is not set, the rubric has other fields, or ``highest`` is not above 0.
    """
    if not highest > 0:
        raise ValueError(f"highest = {highest} is not above 0")
    if key_env and not os.environ.get(key_env):
        raise ValueError(f"key_env = {key_env!r}: this environment variable is not set where completions are scored")
    try:
        rubric.format(prompt="", completion="", answer="", highest=highest)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"rubric: unknown field {error!r}; use prompt, completion, answer and highest") from error
    key, address = os.environ[key_env] if key_env else "", f"{url.rstrip('/')}/chat/completions"
    waits_s = [0.0, *(_WAIT_S * 2**attempt for attempt in range(num_retries))]

    def score(prompt: Prompt, completion: str) -> float:
        content = rubric.format(prompt=prompt.text, completion=completion, answer=prompt.answer, highest=highest)
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        answer = ask(address, body, key=key, deadline_s=deadline_s, waits_s=waits_s)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (LookupError, TypeError) as error:
            raise ValueError(f"{address}: it did not answer as a chat model does ({error!r})") from None
        try:
            return share_in(text, highest)
        except ValueError as error:
            raise ValueError(f"{model} {error}: {text[:100]!r}") from None

    return score


def share_in(text: str, highest: float) -> float:
    """The grade in a text as a share of the highest, from 0 to 1.

    The grade is named ("Score: 7"), or alone on the first or last line, or the only number with a scale ("7/10"), or
    the only number. Raises ValueError if there is none, if there are several, or if it is out of range.
    """
    text = _RANGE.sub(" ", without_markup(with_plain_signs(after_reasoning(text))))
    named = [match.groups() for match in _NAMED.finditer(text)]
    final = [grade for is_final, *grade in named if is_final]
    lines = [line.strip(" .[]()\"'") for line in text.splitlines() if line.strip()]
    alone = [match.groups() for line in (*lines[:1], *lines[-1:]) if (match := re.fullmatch(_GRADE, line))]
    every = [match.groups() for match in re.finditer(_GRADE, text)]
    with_scale = [grade for grade in every if grade[1] or grade[2]]
    grades = final[-1:] or [grade for _, *grade in named] or alone or with_scale or every
    shares = {_share(*grade, highest) for grade in grades}
    if len(shares) != 1:
        raise ValueError("gave several grades" if shares else "gave no grade")
    share = shares.pop()
    if not 0 <= share <= 1:
        raise ValueError(f"gave a grade that is not from 0 to {highest:g}")
    return share


def _share(number: str, percent: str | None, scale: str | None, highest: float) -> float:
    """Raises ValueError for a scale that ends at another number than the highest grade, unless that is 1."""
    if scale and float(scale) != highest and (highest != 1 or float(scale) <= 0):
        raise ValueError(f"gave a grade out of {scale}, which is not {highest:g}")
    return float(number) / (100 if percent else float(scale) if scale else highest)
