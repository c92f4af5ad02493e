"""The launcher of all tests in this folder: results by rank, failures by name, and an end to every wait."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.dist import RankError, run_ranks


def _sum_of_ranks(offset: int) -> torch.Tensor:
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return total + dist.get_rank()


def _second_fails() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("tensor layer.3 is missing")
    dist.barrier()


def _second_hangs() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    """The first ranks of a session wait for the server's imports; the timing excludes them."""
    run_ranks(1, _sum_of_ranks, 0)


def test_results_come_back_by_rank():
    results = run_ranks(3, _sum_of_ranks, 10)
    assert [float(r) for r in results] == [33.0, 34.0, 35.0]


def test_a_failing_rank_is_named_with_its_traceback():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2:.*_second_fails.*tensor layer\.3 is missing"):
        run_ranks(2, _second_fails)
    assert time.monotonic() - start < 100, "a quarter of the deadline"


def test_a_hanging_rank_is_named_with_its_stack():
    with pytest.raises(RankError, match=r"(?s)after 15 s.*rank 1:.*_second_hangs"):
        run_ranks(2, _second_hangs, deadline_s=15)
