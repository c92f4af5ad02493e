"""Verification of drafts that samples the same tokens as decoding without drafts, for equal seeds.

Each worker process of an engine with ``engine.speculation`` calls :func:`verify_in_order`. vLLM's rejection sampler
draws from a request's generator in another order than decoding does, so that equal seeds give other tokens. In vLLM
0.26.0 it also reads uninitialized temperatures on a CPU, and takes log-softmax of a bonus token's log-probabilities.

Here vLLM's ordinary sampler samples the positions of a step one after another. A position is sampled only if the token
before it equals its draft. A draft d is accepted with probability p(d), as by rejection sampling of n-gram drafts.
Temperature, top-p, top-k, log-probabilities and kept entries are those of the ordinary sampler. Drafts of multi-token
prediction layers are their most likely tokens, so the same holds for them.

The counts of drafts travel in the column of ranks, which nothing else reads: see ``drafts.py``. On GPUs
only n-gram drafts were measured.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from megatron_fp8rl.rollout.vllm_plugin.drafts import ACCEPTED, mark
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="RejectionSampler.forward samples other tokens than decoding for equal seeds, and on a CPU with undefined "
    "temperatures (expand_kernel writes into a copy); its bonus tokens get inexact log-probabilities",
    remove_when="vLLM verifies n-gram drafts with a request's generator as decoding uses it",
    optional=True,
)
def verify_in_order() -> None:
    """Replace the verification of drafts in this process."""
    RejectionSampler.forward = _verify


@patches(
    "vllm",
    why="SpecDecodeBaseProposer keeps its model to itself, and weights of both models are published at once",
    remove_when="a weight-transfer engine gets the draft model with the model",
    optional=True,
)
def show_draft_model() -> None:
    """Let a model with a draft model name it (``drafts``), outside its modules, once both are loaded."""
    load = SpecDecodeBaseProposer.load_model

    def load_and_show(self: Any, target_model: Any) -> None:
        load(self, target_model)
        target_model.drafts = (self.model,)

    SpecDecodeBaseProposer.load_model = load_and_show


def _verify(
    self: Any, metadata: SpecDecodeMetadata, draft_probs: Tensor | None, logits: Tensor, sampling: SamplingMetadata
) -> SamplerOutput:
    """Sample one token for each accepted draft of a request, and one more. Raises ValueError for drafts with
    probabilities, and for penalties and masks, which would depend on drafts."""
    if draft_probs is not None or not sampling.no_penalties or sampling.bad_words_token_ids:
        raise ValueError("engine.speculation does not support sampled drafts, penalties and bad_words")
    if sampling.allowed_token_ids_mask is not None:
        raise ValueError("engine.speculation does not support allowed_token_ids")
    counts, device = metadata.num_draft_tokens, logits.device
    drafts = [part.tolist() for part in metadata.draft_token_ids.cpu().split(counts)]
    first_rows = (metadata.bonus_logits_indices.cpu() - torch.tensor(counts)).tolist()
    going, rounds = list(range(len(counts))), []  # requests whose drafts were accepted so far
    while going:
        position = len(rounds)
        rows = torch.tensor([first_rows[i] + position for i in going], device=device)
        output = self.sampler(logits=logits[rows], sampling_metadata=_of_requests(sampling, going))
        rounds.append((torch.tensor(going, device=device), output))
        tokens = dict(zip(going, output.sampled_token_ids[:, 0].tolist(), strict=True))
        going = [i for i in going if position < counts[i] and tokens[i] == drafts[i][position]]
    return _joined(rounds, counts)


def _of_requests(sampling: SamplingMetadata, requests: Sequence[int]) -> SamplingMetadata:
    """The sampling parameters of some requests of a batch."""
    index = torch.tensor(requests)
    rows = {
        name: None if (values := getattr(sampling, name)) is None else values[index.to(values.device)]
        for name in ("temperature", "top_p", "top_k")
    }
    generators = sampling.generators
    of_rows = {row: generators[request] for row, request in enumerate(requests) if request in generators}
    return replace(sampling, generators=of_rows, **rows)


def _joined(rounds: Sequence[tuple[Tensor, SamplerOutput]], counts: Sequence[int]) -> SamplerOutput:
    """The tokens of all rounds, [requests, rounds], as vLLM's ``parse_output`` reads them."""

    def table(columns: Sequence[Tensor], fill: int) -> Tensor:
        result = columns[0].new_full((len(counts), len(rounds), *columns[0].shape[1:]), fill)
        for position, ((requests, _), column) in enumerate(zip(rounds, columns, strict=True)):
            result[requests, position] = column
        return result

    outputs = [output for _, output in rounds]
    tokens = table([output.sampled_token_ids[:, 0] for output in outputs], PLACEHOLDER_TOKEN_ID)
    first = outputs[0].logprobs_tensors
    if first is None:
        return replace(outputs[0], sampled_token_ids=tokens)
    ids, logprobs, ranks = (
        table([output.logprobs_tensors[i] for output in outputs], 0) for i in range(3)
    )  # fields of LogprobsTensors
    num_drafts = torch.tensor(counts, device=ranks.device)
    ranks[:, 0] = torch.where(num_drafts > 0, mark(num_drafts), ranks[:, 0])
    ranks[:, 1:] = ACCEPTED
    of_tokens = type(first)(*(column.flatten(0, 1) for column in (ids, logprobs, ranks)))
    return replace(outputs[0], sampled_token_ids=tokens, logprobs_tensors=of_tokens)
