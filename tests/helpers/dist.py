"""Runs a function on several gloo ranks, each a process of its own, within a deadline.

Ranks are forked from a server process that has imported torch and Megatron-Core once, so starting them takes
milliseconds. They cannot be forked from the test process: torch's autograd does not survive a fork of a process that
has run it.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp8rl.trainer.compat import megatron_on_cpu

megatron_on_cpu.install()  # in ranks, which import this module first

# This module comes before Megatron-Core, for megatron_on_cpu.install(). The last four are what building an optimizer
# and saving import on first use: over a second for each rank.
_PRELOAD = """
    torch tests.helpers.dist numpy megatron_fp8rl.trainer.policy megatron_fp8rl.trainer.checkpoint torch._dynamo
    megatron.core.models.mimo.model.base megatron.core.models.mimo.optimizer
    megatron.core.dist_checkpointing.exchange_utils
""".split()
_GRACE_S = 5.0  # for the other ranks, after one has failed
# With a GPU the packages that would be preloaded touch CUDA, which does not survive a fork.
_context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
if not torch.cuda.is_available():
    _context.set_forkserver_preload(_PRELOAD)


class RankError(AssertionError):
    """A rank raised, died or did not finish in time. The message has its number and its traceback."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, deadline_s: float = 400.0) -> list[Any]:
    """Call ``fn(*args)`` on every rank, with torchrun's environment variables set; the results, by rank.

    ``fn`` is a function at the top level of a module; arguments and results must pickle. Raises RankError when a rank
    fails, naming the first one that did, and after ``deadline_s``, with the stack of every rank still running.
    """
    # The store lives here: no rank has to find a free port. torchrun's agent works the same way.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))
    ends: dict[Connection, int] = {}
    ranks = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            stacks = os.path.join(folder, str(rank))
            spec = (rank, world_size, store.port, deadline_s, stacks, os.getcwd())
            process = _context.Process(
                target=_rank_main, args=(theirs, spec, fn, args), daemon=not torch.cuda.is_available()
            )
            process.start()
            theirs.close()
            ends[ours] = rank
            ranks.append(process)
        try:
            return _collect(ends, deadline_s, [(process.pid, Path(folder, str(i))) for i, process in enumerate(ranks)])
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
                process.close()


def _collect(ends: dict[Connection, int], deadline_s: float, ranks: list[tuple[int, Path]]) -> list[Any]:
    """Results by rank. ``ranks`` holds the process and the file for the stack of each."""
    world_size = len(ends)
    results: dict[int, Any] = {}
    errors: list[str] = []
    end = time.monotonic() + deadline_s + _GRACE_S
    while ends and time.monotonic() < end:
        for connection in wait(list(ends), timeout=max(0.0, end - time.monotonic())):
            rank = ends.pop(connection)
            try:
                # torch.save, because plain pickles made beside Megatron-Core need Megatron-Core to load tensors.
                ok, payload = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
            except EOFError:
                ok, payload = False, "the process died without a word (killed, or out of memory)"
            connection.close()
            if ok:
                results[rank] = payload
            else:
                errors.append(f"rank {rank} of {world_size}:\n{payload}")
                end = min(end, time.monotonic() + _GRACE_S)
    if errors:
        raise RankError("\n".join(errors))
    if ends:
        late = "\n".join(f"rank {rank}:\n{_stack(*ranks[rank])}" for rank in sorted(ends.values()))
        raise RankError(f"after {deadline_s:.0f} s these of {world_size} ranks were still running:\n{late}")
    return [results[rank] for rank in range(world_size)]


def _stack(pid: int, path: Path) -> str:
    """The stack that a rank reports on request."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end and not (path.is_file() and path.stat().st_size):
        time.sleep(0.1)
    time.sleep(0.5)  # until the rest is written
    return path.read_text() if path.is_file() else "(no stack)"


def _dump(message: tuple[bool, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def _rank_main(connection: Connection, spec: tuple, fn: Callable[..., Any], args: tuple) -> None:
    rank, world_size, port, deadline_s, stacks, folder = spec
    os.chdir(folder)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            message = (True, fn(*args))
        except BaseException:
            message = (False, traceback.format_exc())
        try:
            payload = _dump(message)
        except Exception:
            payload = _dump((False, f"the result does not pickle:\n{traceback.format_exc()}"))
        connection.send_bytes(payload)
    if message[0]:
        _stay(deadline_s)
    # Skip the destructors of process groups, which may wait for ranks that are gone.
    os._exit(0)


def _stay(deadline_s: float) -> None:
    """Until the test ends all ranks: a slower one may still be opening connections to this one. A rank that failed ends
    at once, and so tells the others."""
    parent, end = os.getppid(), time.monotonic() + deadline_s
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.1)
