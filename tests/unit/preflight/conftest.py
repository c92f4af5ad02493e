"""Settings of the tests of preflight."""

from __future__ import annotations

import pytest

from megatron_fp8rl.preflight import layout_search


@pytest.fixture(autouse=True)
def search_ends_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of judgements bounds a search, not the second that a busy machine may not have."""
    monkeypatch.setattr(layout_search, "_DEADLINE_S", 120.0)
