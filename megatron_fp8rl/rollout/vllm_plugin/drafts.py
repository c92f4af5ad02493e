"""Counts of drafts in the column of a sampled token's rank, which nothing else reads. Pure.

vLLM returns a rank of 1 or more with each token. After a step with drafts, an engine returns :func:`mark` of their
number with the first token, and :data:`ACCEPTED` with the others (``patches_speculation.py``).
"""

from collections.abc import Sequence
from typing import Any

ACCEPTED = 0


def mark(num_drafts: Any) -> Any:
    return -1 - num_drafts


def counts_of_drafts(ranks: Sequence[int | None]) -> tuple[int, int]:
    """(drafts that were verified, accepted drafts) of a completion, from the ranks of its tokens."""
    return sum(mark(rank) for rank in ranks if rank is not None and rank < 0), sum(rank == ACCEPTED for rank in ranks)
