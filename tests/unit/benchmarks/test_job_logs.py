"""What is read from the log of a job."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as program
from benchmarks.job_logs import MAX_LINES, MAX_WIDTH, Outcome, read, telling

COUNTS = "1 failed, 48 passed, 1 skipped, 3 warnings in 79.05s"
FAILED_TESTS = f"""\
dB 31.2
tests/gpu/test_a.py:88: in test_bits
    assert torch.equal(packed, decoded)
E   AssertionError: rows: 7 of 9 differ
E   RuntimeError: CUDA error: an illegal memory access
=========================== short test summary info ============================
SKIPPED [1] tests/gpu/test_a.py:9: needs DeepGEMM
FAILED tests/gpu/test_a.py::test_bits - AssertionError: rows
{COUNTS} (0:01:19)
[W1121 20:11:49.58] Producer process has been terminated
"""


@pytest.mark.parametrize(
    "text, code, status, note",
    [
        (FAILED_TESTS, 1, "failed", f"{COUNTS}: AssertionError: rows: 7 of 9 differ"),
        ("..s\n2 passed, 1 skipped in 3.10s\n", 0, "passed", "2 passed, 1 skipped in 3.10s"),
        ("ss\n====== 2 skipped in 1.00s ======\n", 0, "failed", "no test ran: 2 skipped in 1.00s"),
        ("no tests ran in 0.01s\n", 5, "failed", "exit status 5; no tests ran in 0.01s"),
        ("step 1\n", -11, "failed", "exit status -11; step 1"),
        ('RESULT {"a": 1}\nRESULT {"a": 2}\nother\n', 0, "passed", "2 rows"),
        ('RESULT {"a": 1}\nSKIPPED b: 570 s are nearly over; x\n', 0, "part", "1 row; 1 left for the next call"),
        ("SKIPPED x y: 12 s are left; run the same command again\n", 0, "part", None),
        ("SKIPPED x: needs 4 GPUs, 1 are here\n", 0, "passed", None),
        ("FAILED small fp8: RuntimeError: no port\n", 0, "failed", "FAILED small fp8: RuntimeError: no port"),
        ('RESULT {"a": 1, "outcome": "FAILED"}\n', 1, "failed", 'row failed: {"a": 1, "outcome": "FAILED"}'),
        ("ValueError: x\nFutureWarning: y\n", 1, "failed", "ValueError: x"),
    ],
)  # fmt: skip
def test_status_and_note(text, code, status, note):
    outcome = read("job", text, code, 3.0)
    assert outcome.status == status
    assert note is None or outcome.note == note


def test_what_was_late_or_cut():
    assert read("job", FAILED_TESTS, 0, 3.0, late="no end within 9 s").note.endswith("no end within 9 s")
    assert read("job", "step 7\n", -15, 3.0, cut=True) == Outcome("job", "cut", 3.0, "step 7")


def test_telling_lines_are_few_and_differ():
    lines = [f"RuntimeError: rank {i}" for i in range(50)] + ["x" * 999] + [f"E   {chr(97 + i)}" for i in range(26)]
    found = telling(lines)
    assert len(found) == MAX_LINES and found[0] == "RuntimeError: rank 0" and found[-1] == "E   z"
    assert sum("RuntimeError" in line for line in found) == 1
    assert telling(FAILED_TESTS.splitlines())[0] == "tests/gpu/test_a.py:88: in test_bits"


@pytest.mark.parametrize("num_failed", [1, 12, 45])
def test_a_summary_fits_what_is_seen_of_an_output(num_failed):
    draw = random.Random(0)
    lines = tuple("".join(draw.choices("abc ", k=MAX_WIDTH)) for _ in range(MAX_LINES))
    outcomes = [Outcome(f"job{i}", "failed", 9.0, "n" * MAX_WIDTH, lines) for i in range(num_failed)]
    runner = SimpleNamespace(outcomes=[Outcome("good", "passed", 1.0, "1 row"), *outcomes], left_out={})
    text = program.summary(runner, [], "1 GPU", 10.0)
    assert len(text) <= program.MAX_SUMMARY and text.count("passed  good") == 1
    if num_failed < 13:
        assert text.count("\nFAILED job") == num_failed and lines[0] in text
