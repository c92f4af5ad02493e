"""Decides how an attempt ended, and whether the job is tried again.

In: the errors of all nodes, and the outcomes of earlier attempts. Out: an exit status with a reason, ``outcome.json``,
``done`` and, after a failure, ``first_error.txt``. Runs in every agent; the first that writes its outcome decides for
all. Uses only the standard library and the names of checkpoints.

A failed attempt is repeated if the run has finished a step, and the same error did not end the previous attempt at the
same checkpoint. It is also repeated if an agent has died, as after the loss of a node. Three failures without a new
checkpoint end the job; its error is the first, because later errors are often consequences.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from launch.peers import Board, Place
from launch.spec import SAVED, JobSpec, attempt_dir
from megatron_fp8rl.data import checkpoint_dir

CANCELLED = 130
FAILED = 1
MAX_FAILURES = 3  # in a row, without a new checkpoint
MAX_SAME_FAILURES = 2  # in a row, with the same message
_PARTS = ("", "warm_start")  # folders of a run with checkpoints/ and metrics.jsonl

Result = Literal["done", "saved", "cancelled", "failed", "unsaved", "refused"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    attempt: int
    result: Result
    status: int  # exit status of the agents: 0, SAVED to be restarted, or a failure
    reason: str  # one sentence
    checkpoint: str  # names of the newest checkpoints at the end of the attempt
    signature: str = ""  # equal for equal failures
    error: str = ""  # content of first_error.txt


def conclude(spec: JobSpec, board: Board, result: Result, reason: str) -> Outcome:
    """Decide the outcome, or read the outcome that another node has written. Call after all roles have ended."""
    place = board.place
    outcome = _decide(spec, board, result, reason)
    if not board.put("outcome.json", asdict(outcome), once=True):
        outcome = read_outcome(spec.run_dir, place.job, place.attempt) or outcome
    if "done" not in board.names():  # the deciding agent may have been killed before it wrote this
        if outcome.error:
            board.put("first_error.txt", outcome.error + "\n")
        board.put("done", f"{outcome.status}\n")
    return outcome


def read_outcome(run_dir: str | Path, job: str, attempt: int) -> Outcome | None:
    """The outcome of an attempt; None while it runs, or if its nodes were lost before they wrote it."""
    try:
        return Outcome(**json.loads((attempt_dir(run_dir, job, attempt) / "outcome.json").read_text()))
    except FileNotFoundError:
        return None


def refusal(spec: JobSpec, place: Place) -> Outcome | None:
    """The outcome that forbids this attempt: the job is over, or max_restarts is reached. None if it may start."""
    earlier = _earlier(spec, place)
    final = next((outcome for outcome in reversed(earlier) if outcome.status not in (0, SAVED)), None)
    if final is not None or place.attempt <= spec.max_restarts:
        return final
    return Outcome(
        attempt=place.attempt,
        result="failed",
        status=FAILED,
        reason=f"attempt {place.attempt} is not started: max_restarts = {spec.max_restarts}. Submit the run again",
        checkpoint=newest_checkpoint(spec.run_dir),
        error=next((outcome.error for outcome in earlier if outcome.error), ""),
    )


def newest_checkpoint(run_dir: str | Path) -> str:
    """Names of the newest checkpoints of the run and its warm start, or an empty string."""
    folders = [Path(run_dir, part, "checkpoints") for part in _PARTS]
    return " ".join(paths[-1].name for folder in folders if (paths := checkpoint_dir.complete(folder)))


def first_error(errors: Sequence[dict[str, Any]], hosts: dict[int, str]) -> str:
    """The earliest error with role, node, rank and log file. ``errors``: contents of error files of all nodes."""
    if not errors:
        return "no role left an error: see the output of the agents and the batch script"
    error = min(errors, key=lambda error: error["time"])
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error["time"]))
    rank = "" if error.get("rank") is None else f", rank {error['rank']}"
    host = hosts.get(error["node"])
    where = f"role {error['role']}, node {error['node']}" + (f" ({host})" if host else "") + rank
    return f"{where}, at {when}, in {error['log']}:\n{error['text']}"


def _decide(spec: JobSpec, board: Board, result: Result, reason: str) -> Outcome:
    checkpoint = newest_checkpoint(spec.run_dir)
    place = board.place
    if result in ("done", "saved", "cancelled"):
        status = {"done": 0, "saved": SAVED, "cancelled": CANCELLED}[result]
        return Outcome(attempt=place.attempt, result=result, status=status, reason=reason, checkpoint=checkpoint)
    if result == "refused":
        return Outcome(
            attempt=place.attempt, result=result, status=FAILED, reason=reason, checkpoint=checkpoint, error=reason
        )
    # The death of a replica that was restarted did not cause later failures.
    lost = {
        name.removeprefix("role-").rpartition(".node")[0]
        for name, role in board.all("role-").items()
        if role["state"] in ("dead", "given up")
    }
    errors = [e for e in board.all("error-").values() if not e.get("is_restarted") or e["role"] in lost]
    hosts = {int(name[5:-5]): peer["host"] for name, peer in board.all("node-").items()}
    error = first_error(errors, hosts) if errors or result == "failed" else reason
    signature = _signature(error)
    loop: list[Outcome] = []  # earlier failures at the same checkpoint, oldest first
    for earlier in reversed(_earlier(spec, place)):
        if earlier.result not in ("failed", "unsaved") or earlier.checkpoint != checkpoint:
            break
        loop.insert(0, earlier)
    status = SAVED
    metrics = [Path(spec.run_dir, part, "metrics.jsonl") for part in _PARTS]
    is_lost = any(e.get("is_lost") for e in errors)
    if not (is_lost or checkpoint or any(path.exists() and path.stat().st_size for path in metrics)):
        status, reason = FAILED, f"{reason}; no step was ever finished, so it is not tried again"
    elif len(loop) + 1 >= MAX_FAILURES or (
        not is_lost and [o.signature for o in loop].count(signature) + 1 >= MAX_SAME_FAILURES
    ):
        attempts = ", ".join(str(outcome.attempt) for outcome in loop)
        reason = f"{reason}; a crash loop: attempt(s) {attempts} failed at the same checkpoint. The first error counts"
        status, error = FAILED, loop[0].error
    elif place.attempt >= spec.max_restarts:
        status, reason = FAILED, f"{reason}; max_restarts = {spec.max_restarts} attempts are used up"
    else:
        reason = f"{reason}; to be tried again from {checkpoint or 'the start'}"
    return Outcome(
        attempt=place.attempt,
        result=result,
        status=status,
        reason=reason,
        checkpoint=checkpoint,
        signature=signature,
        error=error,
    )


def _earlier(spec: JobSpec, place: Place) -> list[Outcome]:
    """Outcomes of earlier attempts, oldest first. Attempts whose nodes were lost have none."""
    outcomes = (read_outcome(spec.run_dir, place.job, attempt) for attempt in range(place.attempt))
    return [outcome for outcome in outcomes if outcome is not None]


def _signature(error: str) -> str:
    """The message of an error without location and numbers, which differ between equal failures."""
    lines = [line for line in error.splitlines()[1:] if line and not line.startswith((" ", "Traceback"))]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", lines[0] if lines else error.partition("\n")[0])[:300]
