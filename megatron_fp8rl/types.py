"""What flows through one reinforcement-learning step.

    Prompt -> Completion -> Rollout -> RolloutGroup -> Sample -> Microbatch -> TrainBatch

Every class is frozen. Nothing else crosses a process boundary or a package boundary.
Shapes: L = tokens of one sequence (prompt and completion), C = tokens of one completion,
T = tokens of one packed microbatch, S = sequences of one packed microbatch.

Log-probabilities are natural logarithms, taken at the sampling temperature, and are never named just "logprobs":
``rollout_`` (the sampler's), ``old_`` (the trainer's at the start of the step), ``trainer_`` (the trainer's, with
gradient) and ``ref_`` (the reference model's).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

KVScales: TypeAlias = dict[int, tuple[float, float, float]]
"""Layer of the model -> what queries, keys and values are divided by before they become E4M3, exact in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, tokenised once; the same ids go to the engine and to the trainer."""

    prompt_id: str  # unique in a run and stable over resumes: "<environment>/<position>"
    environment: str  # key of the environment that made the prompt and scores its completions
    token_ids: tuple[int, ...]
    text: str
    answer: str  # a reference answer, used for supervised warm starts and shown in reports
    metadata: dict[str, Any] = field(default_factory=dict)  # JSON-serialisable; what the environment needs to score


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled continuation, as the engine returned it."""

    token_ids: tuple[int, ...]  # [C] includes the end token when there is one
    rollout_logprobs: tuple[float, ...]  # [C] of the sampled tokens
    finish_reason: Literal["stop", "length", "abort"]
    min_version: int  # policy version that sampled the first token
    max_version: int  # policy version that sampled the last token
    version_spans: tuple[tuple[int, int], ...] = ()  # (first token index, version), one entry per version, ascending
    routed_experts: np.ndarray | None = None  # uint8/uint16 [L - 1, num_layers, top_k]; None when not recorded
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A scored completion."""

    prompt: Prompt
    index: int  # position among the completions of its prompt
    completion: Completion
    reward: float
    status: Literal["scored", "truncated", "score_failed"]
    detail: str = ""  # why scoring failed; empty otherwise
    seed: int = 0  # the engine's sampling seed of this completion

    @property
    def name(self) -> str:
        """Identifies the rollout in logs, alarms and records."""
        return f"{self.prompt.prompt_id}#{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All scored completions of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training sequence. Per-token fields describe the token at the same position; prompt positions hold 0."""

    name: str
    environment: str
    token_ids: tuple[int, ...]  # [L] prompt followed by completion
    num_prompt_tokens: int
    loss_mask: tuple[bool, ...]  # [L] True where the token was sampled and is trained on
    rollout_logprobs: tuple[float, ...]  # [L] 0.0 at prompt positions
    advantages: tuple[float, ...]  # [L] 0.0 at prompt positions
    staleness: int = 0  # trainer version at the start of the step minus Completion.min_version
    routed_experts: np.ndarray | None = None  # [L - 1, num_layers, top_k]


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Packed sequences, one after another, each padded at its end; the same on every rank of a data-parallel replica.

    Position t predicts ``targets_T[t]``, the next token of its sequence. All other per-token fields describe that
    prediction. Padding and the last position of a sequence have ``loss_mask_T`` False.
    """

    tokens_T: torch.Tensor  # int64 [T]
    targets_T: torch.Tensor  # int64 [T]
    positions_T: torch.Tensor  # int64 [T] restart at 0 for every sequence
    cu_seqlens_S: torch.Tensor  # int32 [S + 1] starts of the padded sequences, and T
    sequence_ids_T: torch.Tensor  # int64 [T] index into names; padding belongs to the sequence that it pads
    loss_mask_T: torch.Tensor  # bool [T]
    rollout_logprobs_T: torch.Tensor  # float32 [T]
    advantages_T: torch.Tensor  # float32 [T]
    names: tuple[str, ...]  # [S] Sample.name; empty string for a sequence that only fills space
    environments: tuple[str, ...]  # [S]
    completion_positions_T: torch.Tensor  # int64 [T] index of the target within its completion; -1 outside
    old_logprobs_T: torch.Tensor | None = None  # float32 [T]
    ref_logprobs_T: torch.Tensor | None = None  # float32 [T]
    routed_experts_T: torch.Tensor | None = None  # int16 [T, num_layers, top_k] experts that the engine used at t


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """What one optimizer update reads: this data-parallel rank's microbatches and the global denominators."""

    microbatches: tuple[Microbatch, ...]  # the same number on every data-parallel rank
    num_loss_tokens: int  # over all data-parallel ranks
    num_sequences: int  # over all data-parallel ranks; sequences with at least one loss token


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What one weight publication sent, and what it cost."""

    version: int
    num_tensors: int
    num_fp8_tensors: int
    num_bytes: int  # sent to one replica
    seconds: float  # the whole publication
    pause_s: float  # how long the engines stood still
    checksum: str  # one digest over those of all engine ranks' slices; equal for every trainer layout and transport
    pack_s: float = 0.0  # of it: gathering and quantizing, by the host of rank 0 (a GPU's share shows in send_s)
    send_s: float = 0.0  # waiting for what is on its way to arrive and be loaded
    load_s: float = 0.0  # what the slowest engine worker spent receiving and writing; 0 when nothing was verified
    verify_s: float = 0.0  # digesting what the engines hold, and comparing
