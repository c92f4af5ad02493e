"""The error of a role, cut out of its log, where output of ranks lies between the lines of a traceback."""

import dataclasses
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


def failure_of(folder: Path, log: list[str], **role) -> Failure:
    """What a role says of its failure whose output was ``log``."""
    process = process_of(folder)
    process.role = dataclasses.replace(process.role, **role)
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


def torchrun_output(*ends: tuple[int, int]) -> list[str]:
    """What torchrun itself prints of (local rank, exit code)."""
    place = "torch/distributed/elastic/multiprocessing/api.py:986]"
    return [
        *(
            f"E1129 11:55:28 861 {place} failed (exitcode: {code}) local_rank: {rank} (pid: 865) of binary: python"
            for rank, code in ends
        ),
        "Traceback (most recent call last):",
        '  File "<frozen runpy>", line 198, in _run_module_as_main',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "Root Cause (first observed failure):",
    ]


def failure_of_ranks(folder: Path, log: list[str]) -> Failure:
    """The failure of the second node of a trainer with two ranks on each node."""
    return failure_of(folder, log, kind="torchrun", nodes=(1, 0), processes_per_node=2)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            ["python -m megatron_fp8rl: configuration 'my_run:model': No module named 'my_run'."],
            "python -m megatron_fp8rl: configuration 'my_run:model': No module named 'my_run'.",
        ),
        (
            [
                "step 1",
                "python -m megatron_fp8rl: 1 mistake in the configuration:",
                "  1. --seed = -1: is negative.",
                "late",
            ],
            "python -m megatron_fp8rl: 1 mistake in the configuration:\n  1. --seed = -1: is negative.",
        ),
        (["no weights"], "ended with exit status 2 and no traceback; its last lines:\nno weights"),
        ([], "ended with exit status 2 and no traceback; its last lines:\n(it wrote nothing)"),
    ],
)
def test_the_sentence_of_a_program_is_its_error_and_not_that_torchrun_has_failed(
    tmp_path: Path, said: list[str], shown: str
):
    output = [
        "[rank 2] loads",
        *(f"[rank 3] {line}" for line in said),
        "[rank 2] python -m x: other",
        *torchrun_output((1, 2)),
    ]
    failure = failure_of_ranks(tmp_path, output)
    assert (failure.text, failure.rank) == (shown, 3)


def test_a_rank_that_was_killed_is_named_with_its_signal(tmp_path: Path):
    failure = failure_of_ranks(tmp_path, ["[rank 2] step 7", *torchrun_output((0, -9), (1, -15))])
    assert failure.text == "ended with signal SIGKILL and no traceback; its last lines:\nstep 7" and failure.rank == 2


def test_a_traceback_of_a_rank_counts_before_that_of_torchrun_and_that_before_none(tmp_path: Path):
    log = [*torchrun_output((0, 1)), *(f"[rank 2] {line}" for line in TRACEBACK)]
    assert failure_of_ranks(tmp_path / "rank", log).text.splitlines() == TRACEBACK
    failure = failure_of_ranks(tmp_path / "torchrun", torchrun_output())
    assert "ChildFailedError" in failure.text and failure.rank is None
