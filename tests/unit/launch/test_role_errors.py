"""The error of a role, cut out of its log, where output of ranks lies between the lines of a traceback."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from launch.roles import Failure, _one_error
from tests.helpers.role_processes import process_of

TRACEBACK = """\
Traceback (most recent call last):
  File "/shared/crash.py", line 4, in <module>
    raise RuntimeError("the disk is full")
RuntimeError: the disk is full""".splitlines()


@pytest.mark.parametrize("output", ["step 7 loss 0.5", "saved: step_00000007", "done", "{'reward': 1}"])
@pytest.mark.parametrize("at", [1, 2])
def test_output_of_the_rank_within_a_traceback_is_left_out(output: str, at: int):
    """Below its head, and between two frames. What follows the message is no part of it either."""
    frames = [*TRACEBACK[:1], '  File "/shared/main.py", line 9, in main', *TRACEBACK[1:], "the next line of output"]
    assert _one_error([*frames[:at], output, *frames[at:]]) == frames[:-1]


def test_a_message_of_several_lines_is_kept_to_its_end():
    said = ["ConfigError: 2 mistakes:", "  1. --seed = -1: is negative.", "plain text", "=== job 7, attempt 1 ==="]
    assert _one_error([*TRACEBACK[:3], *said]) == [*TRACEBACK[:3], *said[:3]]


def test_a_traceback_that_was_cut_off_is_shown_as_far_as_it_goes():
    assert _one_error(TRACEBACK[:3]) == TRACEBACK[:3]
    assert _one_error(["(the log has lost it)"]) == ["(the log has lost it)"]


def failure_of(folder: Path, log: list[str]) -> Failure:
    """What a role says of its failure whose output was ``log``."""
    process = process_of(folder)
    process.log.parent.mkdir(parents=True)
    process._listen(io.BytesIO("".join(f"{line}\n" for line in log).encode()))
    return process.failure()


def test_lines_of_other_ranks_are_no_part_of_an_error_of_one(tmp_path: Path):
    log = [f"[rank 3] {line}" for line in TRACEBACK]
    log[1:1] = ["[rank 2] Traceback (most recent call last):", "[rank 3] step: 7", "[rank 30]   File", "torchrun: late"]
    failure = failure_of(tmp_path, ["[rank 2] begins", *log, "[rank 2] ValueError: a later one"])
    assert failure.rank == 3 and failure.text.splitlines() == TRACEBACK
    assert failure.time > 0


def test_what_torch_puts_before_its_lines_is_taken_away(tmp_path: Path):
    failure = failure_of(tmp_path, [f"[rank 1] [rank1]: {line}" for line in TRACEBACK])
    assert failure.rank == 1 and failure.text.splitlines() == TRACEBACK
