"""Where ranks stand, and the collectives for plain values."""

import numpy as np
import pytest

from megatron_fp8rl.config import ParallelConfig
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import RankError, run_ranks

pytestmark = pytest.mark.core  # ranks of this machine, in seconds
_ARRAYS = [np.arange(100_000), np.empty((0, 3), np.float32), np.full((2, 3), 0.5, np.float32)]


def _collectives() -> dict:
    parallel = Parallel.init(ParallelConfig(world_size=4, tensor=2, expert=2, expert_tensor=1), deadline_s=120)
    parallel.barrier("start")
    value = float(parallel.rank)
    own = {"all": value, f"only/{parallel.dp_rank}": 1.0}
    result = dict(
        place=(parallel.tp_rank, parallel.dp_rank, parallel.pp_rank, parallel.ep_rank, parallel.etp_rank),
        sum=parallel.sum(own),
        max=parallel.max(own),
        gathered=parallel.gather({"rank": parallel.rank}),
        broadcast=parallel.broadcast_object({"prompts": [parallel.rank]}),
        share=parallel.scatter_over_data([["a"] * 5, "b"] if parallel.rank == 0 else None),
        arrays=parallel.scatter_over_data([_ARRAYS, _ARRAYS[::-1]] if parallel.rank == 0 else None),
        is_last_stage=parallel.is_last_stage,
    )
    parallel.close()
    return result


def test_reductions_run_over_the_data_axis_and_broadcasts_over_all_ranks():
    results = run_ranks(4, _collectives)
    assert [r["place"] for r in results] == [(0, 0, 0, 0, 0), (1, 0, 0, 1, 0), (0, 1, 0, 0, 0), (1, 1, 0, 1, 0)]
    # Tensor-parallel ranks 0 and 1 are one replica: the data axis joins 0 with 2 and 1 with 3.
    assert [r["sum"]["all"] for r in results] == [2.0, 4.0, 2.0, 4.0]
    assert [r["max"]["all"] for r in results] == [2.0, 3.0, 2.0, 3.0]
    assert all(r["sum"]["only/0"] == r["sum"]["only/1"] == 1.0 for r in results)
    assert results[1]["gathered"] == [{"rank": 1}, {"rank": 3}]
    assert all(r["broadcast"] == {"prompts": [0]} for r in results)
    assert [r["share"] for r in results] == [["a"] * 5, ["a"] * 5, "b", "b"]
    for rank, result in enumerate(results):
        expected = _ARRAYS if rank < 2 else _ARRAYS[::-1]
        assert all(map(np.array_equal, result["arrays"], expected)) and len(result["arrays"]) == 3
    assert all(r["is_last_stage"] for r in results)


def _stages() -> tuple:
    parallel = Parallel.init(ParallelConfig(world_size=4, pipeline=2, context=2), deadline_s=120)
    share = parallel.scatter_over_data(["only"] if parallel.rank == 0 else None)
    return parallel.pp_rank, parallel.cp_rank, parallel.is_last_stage, parallel.dp_size, share


def test_pipeline_is_the_outermost_axis():
    expected = [(0, 0, False, 1, "only"), (0, 1, False, 1, "only"), (1, 0, True, 1, "only"), (1, 1, True, 1, "only")]
    assert run_ranks(4, _stages) == expected


def _one_stays_away() -> None:
    parallel = Parallel.init(ParallelConfig(world_size=2), deadline_s=10)
    if parallel.rank == 1:
        import time

        time.sleep(300)
    parallel.barrier("before the update")


def test_a_barrier_names_itself_and_the_rank_that_did_not_come():
    with pytest.raises(RankError, match=r"(?s)at barrier 'before the update'.*[Rr]ank.*1"):
        run_ranks(2, _one_stays_away)


def _wrong_world() -> None:
    Parallel.init(ParallelConfig(world_size=4), deadline_s=60)


def test_another_number_of_processes_is_refused():
    with pytest.raises(RankError, match="parallel.world_size = 4, but 2 trainer processes were started"):
        run_ranks(2, _wrong_world)
