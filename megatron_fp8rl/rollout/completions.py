"""Join the segments that an engine returns into a :class:`~megatron_fp8rl.types.Completion`.

In: answers to sampling requests. Out: completions with version spans. Trainer rank 0 reads and joins answers; the
replica's server writes them (``rollout/vllm_plugin/generate_route.py``).

An answer is JSON followed by arrays as bytes: little-endian int32 (tokens), float32 (log-probabilities), experts, and
kept entries. So no loop over tokens is needed, and log-probabilities arrive exactly as computed. The replica also
decodes the text, because one process would need minutes for the texts of a thousand replicas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron_fp8rl.config import SamplingConfig
from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Completion

FinishReason = Literal["stop", "length", "abort"]
GENERATE_PATH = "/fp8rl/generate"  # path of the sampling request

_TOKEN, _LOGPROB, _LENGTH, _BYTE = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<i8"), np.dtype("u1")
_MAX_SEED = (1 << 63) - 1
_SEED_STRIDE = 1 << 40  # between the segments of one completion; far more than completions per prompt


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 truncate nothing; temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    min_p: float = 0.0
    dropped_token_ids: tuple[int, ...] = ()  # not part of the text: end and padding tokens

    @classmethod
    def of(cls, sampling: SamplingConfig, end_ids: Iterable[int], dropped_ids: Iterable[int]) -> Sampling:
        """Read the configuration and add the model's end tokens to the stop tokens."""
        return cls(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_completion_tokens,
            stop_token_ids=tuple(dict.fromkeys((*end_ids, *sampling.stop_token_ids))),
            stop_strings=sampling.stop_strings,
            dropped_token_ids=tuple(sorted(dropped_ids)),
        )


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens that one request sampled for one completion."""

    token_ids: TokenArray  # [C]
    rollout_logprobs: TokenArray  # [C]
    finish_reason: FinishReason
    routed_experts: np.ndarray | None  # [prompt + C - 1, num_layers, top_k], where prompt is that of the request
    text: str | None = None  # of the whole completion up to here; None if it continues
    kept: KeptEntries | None = None  # [C] of the vocabulary; None: the whole vocabulary
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    segments: list[Segment]
    num_cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None  # float32, [prompt - 1]; None if not requested


def write_answer(answer: Answer) -> bytes:
    """Encode an answer for :func:`read_answer`. Missing log-probabilities stay missing."""
    choices, numbers, others = [], [], []
    for segment in answer.segments:
        numbers += [np.asarray(segment.token_ids, _TOKEN), np.asarray(segment.rollout_logprobs, _LOGPROB)]
        recorded = segment.routed_experts
        choice: dict[str, Any] = {
            "num_tokens": len(segment.token_ids),
            "num_logprobs": len(segment.rollout_logprobs),
            "drafts": [segment.num_draft_tokens, segment.num_accepted_tokens],
        }
        choices.append(choice | {"finish_reason": segment.finish_reason, "text": segment.text, "experts": None})
        if recorded is not None:
            choices[-1]["experts"] = [recorded.dtype.str, *recorded.shape]
            others.append(recorded)
        if segment.kept is not None:
            others.append(np.frombuffer(segment.kept.to_bytes(), np.uint8))
            choices[-1]["kept"] = len(others[-1])
    prompt = () if answer.prompt_logprobs is None else [np.asarray(answer.prompt_logprobs, _LOGPROB)]
    head = {
        "choices": choices,
        "num_cached_tokens": answer.num_cached_tokens,
        "num_prompt_logprobs": len(prompt[0]) if prompt else None,
    }
    rows = [*numbers, *prompt, *others]
    content = json.dumps(head, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return b"".join([np.array(len(content), _LENGTH).tobytes(), content, *(row.tobytes() for row in rows)])


def read_answer(content: bytes) -> Answer:
    """Decode an answer. Raises ValueError for a missing log-probability or an unknown finish reason."""
    start = _LENGTH.itemsize + int(np.frombuffer(content, _LENGTH, 1)[0])
    head = json.loads(content[_LENGTH.itemsize : start])
    numbers = np.frombuffer(content, np.uint8, offset=start).copy()  # aligned, and without the text
    start = 0

    def take(dtype: np.dtype, count: int, *item: int) -> np.ndarray:
        nonlocal start
        first, start = start, start + count * math.prod(item) * dtype.itemsize
        return numbers[first:start].view(dtype).reshape(count, *item)

    rows = [(take(_TOKEN, choice["num_tokens"]), take(_LOGPROB, choice["num_logprobs"])) for choice in head["choices"]]
    count = head["num_prompt_logprobs"]
    prompt_logprobs = None if count is None else take(_LOGPROB, count)
    segments = []
    for choice, (token_ids, logprobs) in zip(head["choices"], rows, strict=True):
        reason, experts = choice["finish_reason"], None
        if reason not in ("stop", "length", "abort"):
            raise ValueError(
                f"the engine ended a completion with finish_reason {reason!r}; expected stop, length or abort"
            )
        if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
            raise ValueError(f"the engine returned {len(token_ids)} tokens without a log-probability for each")
        if choice["experts"] is not None:
            dtype, *shape = choice["experts"]
            experts = take(np.dtype(dtype), *shape)
        kept = KeptEntries.from_bytes(take(_BYTE, choice["kept"]).tobytes()) if "kept" in choice else None
        if kept is not None and len(kept) != len(token_ids):
            raise ValueError(f"the engine returned kept entries of {len(kept)} tokens for {len(token_ids)} tokens")
        num_drafts, num_accepted = choice["drafts"]
        segments.append(
            Segment(
                token_ids=TokenArray(token_ids),
                rollout_logprobs=TokenArray(logprobs),
                finish_reason=reason,
                routed_experts=experts,
                text=choice["text"],
                kept=kept,
                num_draft_tokens=num_drafts,
                num_accepted_tokens=num_accepted,
            )
        )
    return Answer(segments=segments, num_cached_tokens=head["num_cached_tokens"], prompt_logprobs=prompt_logprobs)


def read_prompt_logprobs(answer: Answer, num_tokens: int) -> list[float]:
    """Return the prompt's log-probabilities, [num_tokens - 1]. Raises ValueError if some are missing."""
    logprobs = () if answer.prompt_logprobs is None else answer.prompt_logprobs
    if len(logprobs) != num_tokens - 1:
        raise ValueError(f"the engine returned {len(logprobs)} log-probabilities for a prompt of {num_tokens} tokens")
    return logprobs.tolist() if len(logprobs) else []


@dataclass
class PartialCompletion:
    seed: int
    token_ids: TokenArray = field(default_factory=lambda: TokenArray(np.empty(0, _TOKEN)))
    rollout_logprobs: TokenArray = field(default_factory=lambda: TokenArray(np.empty(0, _LOGPROB)))
    finish_reason: FinishReason | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first token index, version)
    routed_experts: np.ndarray | None = None
    kept: KeptEntries | None = None
    num_prompt_tokens: int = 0  # sums over all requests of this completion
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    _text: str | None = None  # of all tokens so far, if the engine decoded it
    _num_requests: int = 0
    _version: int = 0

    def next_seed(self) -> int:
        """Seed of the next request; that of the first request is the completion's seed."""
        return self.seed + self._num_requests * _SEED_STRIDE

    def extend(self, segment: Segment | None, version: int, *, give_up: bool) -> None:
        """Append the result of one request; None if it was cancelled. ``give_up``: an interruption is final."""
        self._version = version
        reason = "abort"
        if segment is not None:
            reason = segment.finish_reason
            self._num_requests += 1
            self._text = segment.text
            if segment.token_ids and (not self.spans or self.spans[-1][1] != version):
                self.spans.append((len(self.token_ids), version))
            self.token_ids += segment.token_ids
            self.rollout_logprobs += segment.rollout_logprobs
            self.num_draft_tokens += segment.num_draft_tokens
            self.num_accepted_tokens += segment.num_accepted_tokens
            self._extend_routed_experts(segment.routed_experts)
            if segment.kept is not None:
                num_before = len(self.token_ids) - len(segment.token_ids)
                self.kept = KeptEntries.join([self.kept, segment.kept], [num_before, len(segment.kept)])
        self.finish_reason = reason if reason != "abort" or give_up else None

    def _extend_routed_experts(self, experts: np.ndarray | None) -> None:
        """Append only experts of newly sampled tokens, because later requests recompute the prefix with new weights."""
        if experts is None:
            return
        if self.routed_experts is not None:
            experts = np.concatenate([self.routed_experts, experts[len(self.routed_experts) :]])
        self.routed_experts = experts

    def complete(self, decode: Callable[[Sequence[int]], str], stop_strings: tuple[str, ...]) -> Completion:
        """Return the finished completion. Raises ValueError if it is unfinished."""
        if self.finish_reason is None:
            raise ValueError(f"the completion with seed {self.seed} is not finished")
        if (self._num_requests > 1 or self.num_draft_tokens) and stop_strings:
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
            kept=self.kept,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            text=decode(self.token_ids) if self._text is None else self._text,
        )

    def _cut_at_stop_string(self, decode: Callable[[Sequence[int]], str], stop_strings: tuple[str, ...]) -> None:
        """Cut the completion at a stop string that an interruption hid from the engine, or after which the engine
        sampled more tokens in the same step."""
        token_ids, text = list(self.token_ids), None
        whole = length = len(token_ids)
        while length > 1:
            shorter = decode(token_ids[: length - 1])
            if not any(stop in shorter for stop in stop_strings):
                break
            length, text = length - 1, shorter
        if text is None:
            return
        self.token_ids, self.rollout_logprobs = self.token_ids[:length], self.rollout_logprobs[:length]
        self.spans = [span for span in self.spans if span[0] < length]
        if self.routed_experts is not None:
            self.routed_experts = self.routed_experts[: length - whole]
        self.kept = None if self.kept is None else self.kept[:length]
        self.num_accepted_tokens = min(self.num_accepted_tokens, length)
        self.finish_reason, self._text = "stop", text


def write_request(prompt: Sequence[int], parts: list[PartialCompletion], sampling: Sampling) -> dict[str, Any]:
    done = parts[0].token_ids
    return {
        "token_ids": [*prompt, *done],
        "num_prompt_tokens": len(prompt),  # the text of a completion starts after the prompt
        "dropped_token_ids": list(sampling.dropped_token_ids),
        "sampling_params": {
            "n": len(parts),
            "seed": parts[0].next_seed() & _MAX_SEED,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens - len(done),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the list above contains all end tokens
            "stop": list(sampling.stop_strings),
            "detokenize": bool(sampling.stop_strings),  # vLLM searches the text for stop strings
            "skip_special_tokens": False,  # a stop string may be a special token
            "logprobs": 0,  # only that of the sampled token
        },
    }
