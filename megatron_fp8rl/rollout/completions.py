"""Partial completions: the segments returned by an engine, joined into a :class:`~megatron_fp8rl.types.Completion`.

In: answers to sampling requests. Out: completions with version spans. Pure. Trainer rank 0 reads and joins answers; the
replica's server writes them (``rollout/vllm_plugin/generate_route.py``).

An answer is JSON in which rows of numbers are base64 of little-endian int32 (tokens) and float32 (log-probabilities),
so that a server spends no time per token on encoding, and each log-probability arrives exactly as computed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pybase64

from megatron_fp8rl.token_rows import Row
from megatron_fp8rl.types import Completion

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.client import Sampling

FinishReason = Literal["stop", "length", "abort"]
GENERATE_PATH = "/fp8rl/generate"  # of the sampling request

_TOKEN, _LOGPROB = np.dtype("<i4"), np.dtype("<f4")
_MAX_SEED = (1 << 63) - 1
_SEED_STRIDE = 1 << 40  # between the segments of one completion; far more than completions per prompt


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens that one request sampled for one completion."""

    token_ids: Row  # [C]
    rollout_logprobs: Row  # [C]
    finish_reason: FinishReason
    routed_experts: np.ndarray | None  # [prompt + C - 1, num_layers, top_k], with the prompt of that request


def write_choice(
    token_ids: Sequence[int], logprobs: Sequence[float] | None, finish_reason: str | None, experts: np.ndarray | None
) -> dict[str, Any]:
    """Encode what one request sampled for one completion; the inverse of :func:`read_choice`."""
    buffer = io.BytesIO()
    if experts is not None:
        np.save(buffer, experts, allow_pickle=False)
    return {
        "token_ids": _write_row(token_ids, _TOKEN),
        "logprobs": _write_row(logprobs or (), _LOGPROB),
        "finish_reason": finish_reason,
        "routed_experts": None if experts is None else pybase64.b64encode(buffer.getvalue()).decode(),
    }


def write_answer(
    choices: list[dict[str, Any]], *, num_cached_tokens: int = 0, prompt_logprobs: Sequence[float] | None = None
) -> dict[str, Any]:
    """The answer to a request. ``prompt_logprobs``, if requested: of each prompt token but the first."""
    rows = {} if prompt_logprobs is None else {"prompt_logprobs": _write_row(prompt_logprobs, _LOGPROB)}
    return {"choices": choices, "num_cached_tokens": num_cached_tokens} | rows


def read_choice(choice: dict[str, Any]) -> Segment:
    """Decode one choice. Raises ValueError for a missing log-probability or an unknown finish reason."""
    reason = choice["finish_reason"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"the engine ended a completion with {reason!r}; expected stop, length or abort")
    token_ids, logprobs = _read_row(choice["token_ids"], _TOKEN), _read_row(choice["logprobs"], _LOGPROB)
    if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
        raise ValueError(f"the engine returned {len(token_ids)} tokens but not the log-probability of each")
    encoded = choice["routed_experts"]
    experts = None if encoded is None else np.load(io.BytesIO(pybase64.b64decode(encoded)), allow_pickle=False)
    return Segment(
        token_ids=Row(token_ids), rollout_logprobs=Row(logprobs), finish_reason=reason, routed_experts=experts
    )


def read_prompt_logprobs(answer: dict[str, Any], num_tokens: int) -> list[float]:
    """Log-probabilities of a prompt of ``num_tokens``, [num_tokens - 1]. Raises ValueError if some are missing."""
    logprobs = _read_row(answer["prompt_logprobs"], _LOGPROB)
    if len(logprobs) != num_tokens - 1:
        raise ValueError(f"the engine returned {len(logprobs)} log-probabilities of a prompt of {num_tokens} tokens")
    return logprobs.tolist()


def _write_row(numbers: Sequence[float], dtype: np.dtype) -> str:
    return pybase64.b64encode(np.asarray(numbers, dtype).tobytes()).decode()


def _read_row(row: str, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(pybase64.b64decode(row), dtype)


@dataclass
class PartialCompletion:
    """A completion in progress."""

    seed: int
    token_ids: Row = Row(np.empty(0, _TOKEN))
    rollout_logprobs: Row = Row(np.empty(0, _LOGPROB))
    finish_reason: FinishReason | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first token index, version)
    routed_experts: np.ndarray | None = None
    num_prompt_tokens: int = 0  # over all requests of its own, as the next
    num_cached_tokens: int = 0
    _num_requests: int = 0
    _version: int = 0

    def next_seed(self) -> int:
        """Seed of the next request; the first request uses the completion's own seed."""
        return self.seed + self._num_requests * _SEED_STRIDE

    def extend(self, segment: Segment | None, version: int, *, give_up: bool) -> None:
        """Append the result of one request; None if it was withdrawn. ``give_up``: treat an interruption as final."""
        self._version = version
        reason = "abort"
        if segment is not None:
            reason = segment.finish_reason
            self._num_requests += 1
            if segment.token_ids and (not self.spans or self.spans[-1][1] != version):
                self.spans.append((len(self.token_ids), version))
            self.token_ids += segment.token_ids
            self.rollout_logprobs += segment.rollout_logprobs
            self._extend_routed_experts(segment.routed_experts)
        self.finish_reason = reason if reason != "abort" or give_up else None

    def _extend_routed_experts(self, experts: np.ndarray | None) -> None:
        """Keep the experts of the forward pass that sampled; a later request recomputes its prefix with new weights."""
        if experts is None:
            return
        if self.routed_experts is not None:
            experts = np.concatenate([self.routed_experts, experts[len(self.routed_experts) :]])
        self.routed_experts = experts

    def complete(self, decode: Callable[[Sequence[int]], str], stop_strings: tuple[str, ...]) -> Completion:
        """The finished completion."""
        if self.finish_reason is None:
            raise ValueError(f"the completion with seed {self.seed} is not finished")
        if self._num_requests > 1 and stop_strings:
            self._cut_at_stop_string(decode, stop_strings)
        versions = [version for _, version in self.spans] or [self._version]
        return Completion(
            token_ids=self.token_ids,
            rollout_logprobs=self.rollout_logprobs,
            finish_reason=self.finish_reason,
            min_version=versions[0],
            max_version=versions[-1],
            version_spans=tuple(self.spans),
            routed_experts=self.routed_experts,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            text=decode(self.token_ids),
        )

    def _cut_at_stop_string(self, decode: Callable[[Sequence[int]], str], stop_strings: tuple[str, ...]) -> None:
        """End at a stop string that the engine could not see because an interruption split it."""
        token_ids = list(self.token_ids)
        for length in range(1, len(token_ids)):
            text = decode(token_ids[:length])
            if any(stop in text for stop in stop_strings):
                dropped = len(token_ids) - length
                self.token_ids, self.rollout_logprobs = self.token_ids[:length], self.rollout_logprobs[:length]
                self.spans = [span for span in self.spans if span[0] < length]
                if self.routed_experts is not None:
                    self.routed_experts = self.routed_experts[:-dropped]
                self.finish_reason = "stop"
                return


def write_request(prompt: Sequence[int], parts: list[PartialCompletion], sampling: Sampling) -> dict[str, Any]:
    """The body of a request for the rest of ``parts``."""
    done = parts[0].token_ids
    return {
        "token_ids": [*prompt, *done],
        "sampling_params": {
            "n": len(parts),
            "seed": parts[0].next_seed() & _MAX_SEED,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens - len(done),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the EOS token is in the list above; nothing else stops
            "stop": list(sampling.stop_strings),
            "detokenize": bool(sampling.stop_strings),  # vLLM needs text to find stop strings, and only then
            "logprobs": 0,  # of the sampled token only
        },
    }
