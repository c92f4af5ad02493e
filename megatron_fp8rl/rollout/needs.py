"""What a stream of rollouts needs of prompts, of a scorer and of the trainer ranks."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.types import Prompt


class PromptSource(Protocol):
    """The source of prompts; setting ``position`` resumes it."""

    position: Any
    num_dropped: int  # prompts left out so far
    chat_format: ChatFormat  # for sources with agents

    def next_prompts(self, count: int) -> list[Prompt]: ...


class Scorer(Protocol):
    """Scores one completion, possibly in another process."""

    def score(self, prompt: Prompt, text: str) -> Awaitable[Score]: ...


class Broadcaster(Protocol):
    """The trainer ranks, as far as a stream needs them."""

    rank: int

    def broadcast_object(self, value: Any) -> Any:
        """Collective: the value of rank 0."""
