"""Settings of the tests of preflight."""

import pytest

from megatron_fp8rl.preflight import auto_layout


@pytest.fixture(autouse=True)
def search_ends_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of assessments bounds a search, not the second that a busy machine may not have."""
    monkeypatch.setattr(auto_layout, "_DEADLINE_S", 120.0)
