"""Settings that all tests share. They must be in the environment before torch is imported."""

import os
import sys
from pathlib import Path

import pytest

# Many ranks share few cores: more than one thread each makes them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing here is worth compiling, and a compiler may be missing.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes minutes, unless it is asked for."""
    if os.environ.get("FP8RL_LONG_TESTS") == "1":
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; FP8RL_LONG_TESTS=1 runs it"))
