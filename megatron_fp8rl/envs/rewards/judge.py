"""The reward ``judge``: a model at an OpenAI-compatible URL grades the completion.

The reward is the last number in the model's answer divided by the highest grade. The API key is never logged.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from megatron_fp8rl.envs.rewards.numbers import last_number
from megatron_fp8rl.types import Prompt

_RUBRIC = (
    "Grade the answer to the question from 0 to {highest}: {highest} is fully right, 0 is wrong.\n\n"
    "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to grade:\n{completion}\n\nGive the grade alone."
)
_RETRIED = (408, 409, 429, 500, 502, 503, 504)
_WAIT_S = 0.5  # before the first retry; doubled for each further one


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

    Raises ValueError if the variable is not set or the rubric has other fields.
    """
    if key_env and not os.environ.get(key_env):
        raise ValueError(f"key_env = {key_env!r}: this environment variable is not set where completions are scored")
    try:
        rubric.format(prompt="", completion="", answer="", highest=highest)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"rubric: unknown field {error!r}; use prompt, completion, answer and highest") from error
    headers = {"Content-Type": "application/json"}
    if key_env:
        headers["Authorization"] = f"Bearer {os.environ[key_env]}"

    def score(prompt: Prompt, completion: str) -> float:
        content = rubric.format(prompt=prompt.text, completion=completion, answer=prompt.answer, highest=highest)
        messages = [{"role": "user", "content": content}]
        body = json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}).encode()
        text = _ask(f"{url.rstrip('/')}/chat/completions", body, headers, deadline_s, num_retries)
        grade = last_number(text)
        if grade is None:
            raise ValueError(f"{model} gave no grade: {text[:100]!r}")
        return min(1.0, max(0.0, float(grade) / highest))

    return score


def _ask(url: str, body: bytes, headers: dict[str, str], deadline_s: float, num_retries: int) -> str:
    for attempt in range(num_retries + 1):
        if attempt:
            time.sleep(_WAIT_S * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=deadline_s) as answer:
                return json.load(answer)["choices"][0]["message"]["content"] or ""
        except urllib.error.HTTPError as error:
            failure = f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
            if error.code not in _RETRIED:
                break
        except (OSError, http.client.HTTPException) as error:
            failure = f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError) as error:
            failure = f"it did not answer as a chat model does ({error!r})"
            break
    raise ValueError(f"{url}: {failure}")
