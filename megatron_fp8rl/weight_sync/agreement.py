"""Make all trainer ranks fail together, so that none waits in a collective for a rank that raised an error."""

import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist


class TrainerRankError(RuntimeError):
    """An error on another trainer rank that could not be pickled; the message quotes it."""


def together[Result](work: Callable[[], Result], group: dist.ProcessGroup | None) -> Result:
    """Collective: run ``work`` on every rank; if any rank fails, all raise the error of the lowest failing rank.
    ``group`` is a CPU group; None means a single rank."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # of any kind: the other ranks must fail too
        error = caught
    if group is None:
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return result  # type: ignore[return-value]
    errors: list[bytes | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, _pickled(error), group=group)
    rank, first = next((rank, e) for rank, e in enumerate(errors) if e is not None)
    if rank == dist.get_rank(group):
        raise error  # type: ignore[misc]
    raise pickle.loads(first) from error


def _pickled(error: Exception | None) -> bytes | None:
    """Pickle an error for other ranks; replace one that cannot be pickled by its text."""
    if error is None:
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # some classes cannot be rebuilt from their arguments
        data = pickle.dumps(TrainerRankError(f"{type(error).__name__}: {error}"))
    return data
