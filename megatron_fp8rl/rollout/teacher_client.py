"""Log-probabilities of given tokens from a vLLM server with the OpenAI-compatible API.

In: samples. Out: log-probabilities of the trained tokens by the model of the server, at temperature 1. A request has
the token ids of a sequence and asks for ``prompt_logprobs``. Runs on trainer rank 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_fp8rl.net.ask import ask
from megatron_fp8rl.types import Sample

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel

_REQUESTS = 64  # at once
_WAITS_S = (0.0, 1.0, 4.0, 16.0)  # before each attempt
_KEY = "OPENAI_API_KEY"  # environment variable with the key of the server, if it needs one


class TeacherError(RuntimeError):
    """The server of a teacher cannot be reached, or does not answer as vLLM does."""


class ServedTeacher:
    def __init__(self, url: str, deadline_s: float, parallel: Parallel) -> None:
        self._url, self._deadline_s, self._parallel = url, deadline_s, parallel

    def sample_logprobs(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        """Collective: log-probabilities of the trained tokens of rank 0's ``samples``, FP32, by name, on all ranks.
        Raises TeacherError on all ranks."""
        return {name: values for name, (values, _) in self._scored(samples, 0, 0).items()}

    def top_tokens(
        self, samples: Sequence[Sample], num: int, vocab_size: int
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Collective: (ids int64, log-probabilities FP32) [n, num] of the most likely of ``vocab_size`` tokens, at the
        n trained tokens of rank 0's ``samples``, by name, on all ranks. Raises TeacherError on all ranks."""
        return {name: top for name, (_, top) in self._scored(samples, num, vocab_size).items()}

    def _scored(self, samples: Sequence[Sample], num: int, vocab_size: int) -> dict[str, tuple[np.ndarray, Any]]:
        scored, failure = {}, ""
        if self._parallel.rank == 0:
            try:
                model = _models(self._url)["id"]
                with ThreadPoolExecutor(_REQUESTS) as pool:
                    values = pool.map(lambda sample: self._score(model, sample, num, vocab_size), samples)
                    scored = dict(zip((sample.name for sample in samples), values, strict=True))
            except TeacherError as error:
                failure = str(error)
        scored, failure = self._parallel.broadcast_object((scored, failure))
        if failure:
            raise TeacherError(failure)
        return scored

    def _score(self, model: str, sample: Sample, num: int, vocab_size: int) -> tuple[np.ndarray, Any]:
        """(log-probabilities of the trained tokens, (ids, log-probabilities) of the ``num`` most likely ones)."""
        ids = sample.token_ids.array.tolist()
        body = {"model": model, "prompt": ids, "prompt_logprobs": num, "max_tokens": 1, "temperature": 1.0}
        answer = _ask(self._url, "/v1/completions", body, self._deadline_s)
        try:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            values = [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries, strict=True)]
            pairs = [[(-float(x["logprob"]), int(token)) for token, x in entry.items()] for entry in entries]
            ranked = [sorted(pair for pair in row if pair[1] < vocab_size)[:num] for row in pairs]
            top = np.array(ranked, np.float64).reshape(len(ranked), num, 2)
        except (LookupError, TypeError, ValueError) as error:
            raise TeacherError(f"{self._url} gave no prompt_logprobs for {sample.name}: {error!r}") from None
        if not all(map(math.isfinite, values)):
            raise TeacherError(f"{self._url} gave a log-probability that is not finite for {sample.name}")
        is_trained = np.concatenate([np.full(len(part.token_ids), part.is_trained) for part in sample.segments])
        losses, ids = np.moveaxis(top[is_trained[1:]], 2, 0)
        return np.array(values, np.float32)[is_trained[1:]], (ids.astype(np.int64), -losses.astype(np.float32))


def ask_top_tokens(url: str, num: int) -> None:
    """Raise TeacherError if the server does not return the ``num`` most likely tokens of a prompt's positions."""
    body = {"model": _models(url)["id"], "prompt": [0, 0], "prompt_logprobs": num, "max_tokens": 1}
    _ask(url, "/v1/completions", body, 60.0)


def ask_window(url: str) -> int:
    """The most tokens of a sequence that the server's model reads. Raises TeacherError."""
    return int(_models(url).get("max_model_len") or 0)


def ask_tokens(url: str, text: str) -> list[int]:
    """The token ids of a text by the server's tokenizer, without special tokens. Raises TeacherError."""
    body = {"model": _models(url)["id"], "prompt": text, "add_special_tokens": False}
    return _ask(url, "/tokenize", body, 60.0).get("tokens", [])


def _models(url: str) -> dict[str, Any]:
    try:
        return _ask(url, "/v1/models", None, 60.0)["data"][0]
    except (LookupError, TypeError) as error:
        raise TeacherError(f"{url} lists no model: {error!r}") from None


def _ask(url: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
    """The JSON answer to a request; ``body`` None: GET. Retries what may pass. Raises TeacherError."""
    address = url.rstrip("/").removesuffix("/v1") + path
    try:
        return ask(address, body, key=os.environ.get(_KEY, ""), deadline_s=deadline_s, waits_s=_WAITS_S)
    except ValueError as error:
        raise TeacherError(str(error)) from None
