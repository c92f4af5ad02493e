"""Every key has its sentence, unknown keys are refused, and the page in docs/ is the glossary."""

import re
from pathlib import Path

import pytest

from megatron_fp8rl.observe import metrics
from megatron_fp8rl.observe.metrics import GLOSSARY, PHASES, UnknownMetricError, check_keys, key_part, meaning

ROOT = Path(__file__).parents[3]


def test_docs_are_the_glossary():
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text() == metrics.markdown(), "run: python -m megatron_fp8rl.observe.metrics > docs/metrics.md"


def test_every_meaning_is_one_sentence():
    for key, text in (entry for section in GLOSSARY.values() for entry in section.items()):
        assert re.fullmatch(r"\S.*\.", text) and ". " not in text, key


def test_unknown_keys_are_refused_with_near_matches():
    check_keys(["reward/score/mean", "reward/score_chain_sum/mean", "time/any_span/s"])
    with pytest.raises(UnknownMetricError, match="'mismatch/kl_k2/mean'.*Did you mean mismatch/kl_k"):
        check_keys(["mismatch/kl_k2/mean"])
    assert meaning("reward/score_/mean") is None
    assert meaning("reward/score_a/max") is None


def test_phases_have_their_own_entry():
    for phase in PHASES:
        assert meaning(f"time/{phase}/s") != meaning("time/any_other/s")


def test_names_become_parts_of_keys():
    assert key_part("Chain-Sum v2!") == "chain_sum_v2"


def test_every_key_in_the_library_is_listed():
    """Keys are written as literals, so a new metric without its sentence fails here and not in the middle of a run."""
    literal = re.compile(r"""["']([a-z_]+/[a-z0-9_]+/(?:mean|std|min|max|sum|s))["']""")
    for path in sorted((ROOT / "megatron_fp8rl").rglob("*.py")):
        for key in literal.findall(path.read_text()):
            assert meaning(key) is not None, f"{path.relative_to(ROOT)} writes {key!r}, which observe/metrics.py lacks"
