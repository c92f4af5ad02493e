"""Data types of one reinforcement-learning step.

    Prompt -> Completion -> Trajectory -> Rollout -> RolloutGroup -> Sample -> Microbatch -> TrainBatch

A :class:`Trajectory` is a list of segments: context or completions. All classes are frozen.
Shapes: L = tokens of one sequence (all segments of a trajectory), C = tokens of one completion,
T = tokens of one packed microbatch, S = sequences of one packed microbatch.

Log-probabilities are natural logarithms at the sampling temperature, by source: ``rollout_`` (engine), ``old_``
(trainer at the start of the step), ``trainer_`` (trainer, with gradient) or ``ref_`` (reference model).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch

    from megatron_fp8rl.config import AlgoConfig
    from megatron_fp8rl.kept_entries import KeptEntries
    from megatron_fp8rl.token_array import TokenArray

type KVScales = dict[int, tuple[float, float, float]]
"""Layer index -> (q, k, v) scales: the divisors before the cast to E4M3, exactly representable in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, tokenized once; the engine and the trainer get the same token ids."""

    prompt_id: str  # unique in a run and stable across resumes: "<environment>/<position>"
    environment: str  # key of the environment that generated the prompt and scores its completions
    token_ids: tuple[int, ...]
    text: str
    answer: str  # reference answer, used for the supervised warm start and shown in reports
    metadata: dict[str, Any] = field(default_factory=dict)  # JSON-serializable; the environment's input for scoring
    messages: tuple[dict[str, str], ...] = ()  # role and content, which a chat template rendered as ``text``

    def fields(self) -> dict[str, Any]:
        """The fields by name, not copied."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A sampled segment: the engine's answer to one request. Converts sequences to :class:`TokenArray`."""

    token_ids: TokenArray  # [C] includes the EOS token, if any
    rollout_logprobs: TokenArray  # [C] of the sampled tokens
    finish_reason: Literal["stop", "length", "abort"]
    min_version: int  # policy version that sampled the first token
    max_version: int  # policy version that sampled the last token
    version_spans: tuple[tuple[int, int], ...] = ()  # (first token index, version), one entry per version, ascending
    # uint8/uint16 [N, num_layers, top_k] of the N tokens since the end of the previous completion, without this one's
    # last token; None: not recorded.
    routed_experts: np.ndarray | None = None
    kept: KeptEntries | None = None  # [C] of the vocabulary, by top-k, top-p and min-p; None: the whole vocabulary
    text: str = ""
    num_prompt_tokens: int = 0  # context tokens, summed over all requests for this completion
    num_cached_tokens: int = 0  # those in the engine's prefix cache
    num_draft_tokens: int = 0  # drafts that the engine verified (engine.speculation)
    num_accepted_tokens: int = 0  # drafts among ``token_ids``

    def __post_init__(self) -> None:
        from megatron_fp8rl.token_array import TokenArray  # imports NumPy, which not every program has

        object.__setattr__(self, "token_ids", TokenArray.from_ids(self.token_ids))
        object.__setattr__(self, "rollout_logprobs", TokenArray.from_floats(self.rollout_logprobs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """A segment that was not sampled: a prompt, a message of a user, tool or environment, or parts of a template."""

    token_ids: tuple[int, ...]
    role: str  # "prompt", or the role of the message: system, user, tool, assistant, environment
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One training sequence: segments in order. The loss covers its completions."""

    segments: tuple[Context | Completion, ...]

    @property
    def token_ids(self) -> TokenArray:  # [L]
        return _joined(segment.token_ids for segment in self.segments)

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The sampled segments: the turns of the policy."""
        return tuple([segment for segment in self.segments if isinstance(segment, Completion)])

    @property
    def text(self) -> str:
        """The text after the first segment."""
        return "".join(segment.text for segment in self.segments[1:])


def single_turn(prompt: Prompt, completion: Completion) -> tuple[Trajectory, ...]:
    """The trajectory of one completion of a prompt, as ``Rollout.branches``."""
    context = Context(token_ids=prompt.token_ids, role="prompt", text=prompt.text)
    return (Trajectory(segments=(context, completion)),)


IS_RIGHT = "is_right"  # part of a reward: 1 if the answer is right, otherwise 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A scored trajectory. It has several branches if a chat template rewrote history. A token that was sampled in one
    branch is context in the others. A lost session has no branches."""

    prompt: Prompt
    index: int  # position among the rollouts of its prompt
    branches: tuple[Trajectory, ...]
    reward: float
    status: Literal["scored", "truncated", "score_failed"]
    detail: str = ""  # why scoring failed; empty otherwise
    reward_parts: dict[str, float] = field(default_factory=dict)  # unweighted, by the reward's name; may be empty
    seed: int = 0  # the engine's sampling seed of the first completion
    turn_rewards: tuple[float, ...] = ()  # parts of ``reward``, by completion; empty: only the end has a reward
    turn_order: tuple[int, ...] = ()  # position in time of each completion, from 0; empty: they are in order of time
    seconds: dict[str, float] = field(default_factory=dict)  # where a session's time went: model, tools, queue

    @property
    def name(self) -> str:
        """Identifies the rollout in logs, alarms and records."""
        return f"{self.prompt.prompt_id}#{self.index}"

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The completions of all branches, branch by branch."""
        return tuple([completion for branch in self.branches for completion in branch.completions])

    @property
    def last_completion(self) -> Completion | None:
        """The completion that was sampled last, in any branch."""
        completions = self.completions
        return (
            completions[self.turn_order.index(len(completions) - 1) if self.turn_order else -1] if completions else None
        )

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def finish_reason(self) -> Literal["stop", "length", "abort"]:
        """How the last completion ended; "abort" if nothing was sampled."""
        return "abort" if (last := self.last_completion) is None else last.finish_reason

    @property
    def answer_text(self) -> str:
        """The text of the last completion."""
        return "" if (last := self.last_completion) is None else last.text


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All scored rollouts of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


class Segment(NamedTuple):
    """Consecutive tokens of a sample: all context or all sampled, with one advantage."""

    token_ids: TokenArray  # [N]
    rollout_logprobs: TokenArray | None = None  # [N] of sampled tokens
    advantage: float = 0.0  # of each token
    is_trained: bool = False  # whether its tokens carry loss
    kept: KeptEntries | None = None  # [N] of the vocabulary; None: the whole vocabulary
    num_stale: int = 0  # first tokens, which older weights sampled than those at the start of the step


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training sequence. Its arrays are those of the completions; packing copies them."""

    name: str
    environment: str
    segments: tuple[Segment, ...]  # up to the last sampled token
    staleness: int = 0  # trainer version at the start of the step minus the smallest Completion.min_version
    routed_experts: np.ndarray | None = None  # [L - 1, num_layers, top_k]

    @property
    def num_tokens(self) -> int:  # L
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first one that was sampled or is trained."""
        return sum(len(segment.token_ids) for segment in itertools.takewhile(_is_context, self.segments))

    @property
    def num_loss_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.is_trained)

    @property
    def token_ids(self) -> TokenArray:  # [L]
        return _joined(segment.token_ids for segment in self.segments)


def _is_context(segment: Segment) -> bool:
    return segment.rollout_logprobs is None and not segment.is_trained


def _joined(parts: Iterable[Sequence[int]]) -> TokenArray:
    """Token ids, one part after another, int32."""
    import numpy as np

    from megatron_fp8rl.token_array import TokenArray

    return TokenArray(np.concatenate([np.empty(0, np.int32), *(TokenArray.from_ids(part).array for part in parts)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Packed sequences, each padded at its end; identical on all ranks of a data-parallel replica. Position t predicts
    ``targets_T[t]``, the next token of its sequence; all other per-token fields refer to it."""

    tokens_T: torch.Tensor  # int64 [T]
    targets_T: torch.Tensor  # int64 [T]
    positions_T: torch.Tensor  # int64 [T] restart at 0 for every sequence
    cu_seqlens_S: torch.Tensor  # int32 [S + 1] start offsets of the padded sequences, then T
    sequence_ids_T: torch.Tensor  # int64 [T] index into names; padding has the id of the sequence that it pads
    loss_mask_T: torch.Tensor  # bool [T] False at padding and at the last position of a sequence
    rollout_logprobs_T: torch.Tensor  # float32 [T]
    advantages_T: torch.Tensor  # float32 [T]
    names: tuple[str, ...]  # [S] Sample.name; empty string for a filler sequence
    environments: tuple[str, ...]  # [S]
    completion_positions_T: torch.Tensor  # int64 [T] index of the target after the prompt; -1 outside
    stale_T: torch.Tensor | None = None  # bool [T] Segment.num_stale; None: no target is stale
    old_logprobs_T: torch.Tensor | None = None  # float32 [T]
    ref_logprobs_T: torch.Tensor | None = None  # float32 [T]
    routed_experts_T: torch.Tensor | None = None  # int16 [T, num_layers, top_k] at t: engine's or old pass's
    kept: KeptEntries | None = None  # [T] of the vocabulary; None: the whole vocabulary, for every token
    taught: tuple[Taught, ...] = ()  # of a distillation by more than sampled tokens, on ranks of the last stage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taught:
    """A teacher's distributions at n positions of a microbatch: K most likely tokens, or last hidden states."""

    positions_n: torch.Tensor  # int64, on the host
    ids_nK: torch.Tensor | None = None  # int64
    logprobs_nK: torch.Tensor | None = None  # float32
    hidden_nH: torch.Tensor | None = None
    head: torch.Tensor | None = None  # vocabulary rows of this tensor-parallel rank


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """Input of one optimizer update: this data-parallel rank's microbatches and the global denominators."""

    microbatches: tuple[Microbatch, ...]  # the same number on every data-parallel rank
    num_loss_tokens: int  # over all data-parallel ranks
    num_sequences: int  # over all data-parallel ranks; sequences with at least one loss token


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Inputs of a loss function: one whole packed microbatch, whatever the model's parallel layout."""

    mb: Microbatch
    batch: TrainBatch  # has the denominators of the global batch
    trainer_logprobs_T: torch.Tensor  # float32 [T] with gradient; 0 outside the loss mask
    entropy_T: torch.Tensor  # float32 [T] nats; has a gradient only with ``cfg.entropy_coef``; 0 outside the loss mask
    cfg: AlgoConfig
    max_completion_tokens: int  # sampling.max_completion_tokens
    divergence_T: torch.Tensor | None = None  # float32 [T] KL(trainer || teacher) with gradient; 0 outside the mask


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """Contents and cost of one weight update."""

    version: int
    num_tensors: int
    num_fp8_tensors: int
    num_bytes: int  # sent to one replica
    seconds: float  # the whole weight update
    pause_s: float  # how long the engines were paused
    checksum: str  # digest over the digests of all engine ranks' shards; the same for any trainer layout and transport
    connect_s: float = 0.0  # before the pause: connecting to new engines
    prepare_s: float = 0.0  # before the pause: finding all tensors at both ends, once
    pack_s: float = 0.0  # gather and quantize, host time of rank 0 (GPU time shows up in send_s)
    send_s: float = 0.0  # waiting until the data in flight has arrived and is loaded
    load_s: float = 0.0  # receive and write time of the slowest engine worker; 0 if the update was not verified
    verify_s: float = 0.0  # computing and comparing digests of the weights that the engines hold
