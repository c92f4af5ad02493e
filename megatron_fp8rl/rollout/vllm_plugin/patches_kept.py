"""The vocabulary entries from which vLLM sampled each token, returned with its log-probability.

Each process of an engine that truncates (``sampling.top_p``, ``top_k``, ``min_p``) calls :func:`report_kept_entries`.
After temperature, min-p, top-k and top-p, the sampler's logits are -inf for dropped entries. The kept entries travel as
columns after the sampled token's id in vLLM's ``LogprobsLists``. These are the vocabulary's size, the number of words,
and the words of a :class:`KeptEntries`. The V1 sampler runs on CPUs, and on GPUs with recorded experts, which is not
measured yet; the V2 sampler runs on GPUs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.upstream import patches

_HEAD = 2  # columns before the words


@patches(
    "vllm",
    why="vLLM reports log-probabilities after top-k, top-p and min-p, but not the entries that they keep "
    "(Sampler.sample, compute_topk_scores of the V2 runner, LogprobsProcessor)",
    remove_when="vLLM returns a sampled token's kept entries",
    optional=True,
)
def report_kept_entries() -> None:
    """Patch vLLM's samplers and the server's collection of log-probabilities in this process."""
    sample, forward, collect = Sampler.sample, Sampler.forward, LogprobsProcessor._update_sample_logprobs

    def sample_and_remember(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled, self.processed_logprobs = sample(self, *args, **kwargs)
        return sampled, self.processed_logprobs

    def forward_with_kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, processed = forward(self, *args, **kwargs), self.processed_logprobs
        self.processed_logprobs = None
        if output.logprobs_tensors is not None and processed is not None:
            output.logprobs_tensors = with_kept(output.logprobs_tensors, processed)
        return output

    def collect_with_kept(self: Any, lists: LogprobsLists) -> None:
        columns = lists.logprob_token_ids
        if columns.shape[1] > _HEAD:
            if isinstance(self.logprobs, FlatLogprobs):  # as our route requests them
                vars(self.logprobs).setdefault("kept", []).append(_from_columns(columns[:, 1:]))
            lists = lists._replace(logprob_token_ids=columns[:, :1])
        collect(self, lists)

    Sampler.sample, Sampler.forward = sample_and_remember, forward_with_kept
    LogprobsProcessor._update_sample_logprobs = collect_with_kept
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        from vllm.v1.worker.gpu.sample import sampler

        scores = sampler.compute_topk_scores
        sampler.compute_topk_scores = lambda logits, *args, **kwargs: with_kept(scores(logits, *args, **kwargs), logits)


def kept_entries_of(logprobs: Any) -> KeptEntries | None:
    """The entries of a completion's tokens from its log-probabilities; None if the engine does not report them."""
    parts = getattr(logprobs, "kept", [])
    return KeptEntries.join(parts, list(map(len, parts)))


@patches(
    "vllm",
    why="adds kept entries to the arrays of log-probabilities (LogprobsTensors.to_cpu_nonblocking, filter, tolists)",
    remove_when="vLLM returns a sampled token's kept entries",
    optional=True,
)
class TensorsWithKept(LogprobsTensors):
    """After each sampled token's id, ``logprob_token_ids`` has the size of the vocabulary and a bit mask."""

    __slots__ = ()

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        return type(self)(*super().to_cpu_nonblocking())

    def filter(self, mask: Any) -> LogprobsTensors:
        return type(self)(*super().filter(mask))

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> LogprobsLists:
        lists = super().tolists(cu_num_generated_tokens)
        ids, vocab_sizes, masks = np.split(lists.logprob_token_ids, [1, 2], axis=1)
        kept = KeptEntries.from_bits(np.ascontiguousarray(masks).view(np.uint8), int(vocab_sizes.max(initial=0)))
        return lists._replace(logprob_token_ids=np.concatenate([ids, _to_columns(kept)], axis=1))


def with_kept(tensors: LogprobsTensors, processed_nV: Tensor) -> LogprobsTensors:
    """The log-probabilities of sampled tokens with the kept entries: those whose processed logit is not -inf."""
    num, vocab_size = processed_nV.shape
    are_kept = torch.nn.functional.pad(processed_nV != -torch.inf, (0, -vocab_size % 32)).view(torch.uint8)
    bits = are_kept.view(num, -1, 8) << torch.arange(8, dtype=torch.uint8, device=are_kept.device)
    masks = bits.sum(dim=-1, dtype=torch.uint8).view(torch.int32)
    ids = tensors.logprob_token_ids[:, :1].int()
    columns = torch.cat([ids, torch.full_like(ids, vocab_size), masks], dim=1)
    return TensorsWithKept(columns, *tensors[1:])


def stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of ids and kept entries, one part after another, padded to equal lengths."""
    rows = np.zeros((sum(map(len, parts)), max(part.shape[1] for part in parts)), np.int32)
    start = 0
    for part in parts:
        rows[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return rows


def _to_columns(kept: KeptEntries) -> np.ndarray:
    """int32 [C, 2 + most words of a token]."""
    rows = np.zeros((len(kept), _HEAD + int(kept.lengths.max(initial=0))), np.int32)
    rows[:, 0], rows[:, 1] = kept.vocab_size, kept.lengths
    rows[:, _HEAD:][np.arange(rows.shape[1] - _HEAD) < kept.lengths[:, None]] = kept.words
    return rows


def _from_columns(rows: np.ndarray) -> KeptEntries:
    words = rows[:, _HEAD:]
    words = words[np.arange(words.shape[1]) < rows[:, 1:2]]
    return KeptEntries(words=words, lengths=rows[:, 1].astype(np.int32), vocab_size=int(rows[:, 0].max(initial=0)))
