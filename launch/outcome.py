"""What came of an attempt, and whether another one is worth its nodes.

In: what the nodes wrote about failures, and the outcomes of earlier attempts of the same job. Out: an exit status with a
reason, ``outcome.json``, ``done`` and, after a failure, ``first_error.txt``. Runs in the agents, which all come to the
same verdict: the first to write it decides. The standard library alone, and the names of checkpoints.

A failed attempt is repeated when there is something to win: the run has finished a step before, and the failure is not
one that the last attempt met at the same checkpoint. Three failures without a new checkpoint end the job whatever they
are. What is shown then is the first of them; those that follow are often its consequences.
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
MAX_SAME_FAILURES = 2  # of them, with the same message
_OBSERVED = ("", "warm_start")  # folders of a run with checkpoints/ and metrics.jsonl

Result = Literal["done", "saved", "cancelled", "failed", "unsaved"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one attempt."""

    attempt: int
    result: Result
    status: int  # of the agents: 0, SAVED to be started again, or a failure
    reason: str  # one sentence
    checkpoint: str  # names of the newest checkpoints then: progress
    signature: str = ""  # equal for equal failures
    error: str = ""  # what first_error.txt holds


def conclude(spec: JobSpec, board: Board, result: Result, reason: str) -> Outcome:
    """Judge the attempt, or take what another node has judged already. Call when nothing runs any more."""
    place = board.place
    outcome = _judge(spec, board, result, reason)
    if not board.put("outcome.json", asdict(outcome), once=True):
        outcome = read_outcome(spec.run_dir, place.job, place.attempt) or outcome
    if "done" not in board.names():  # who decided may have been killed before it came to this
        if outcome.error:
            board.put("first_error.txt", outcome.error + "\n")
        board.put("done", f"{outcome.status}\n")
    return outcome


def read_outcome(run_dir: str | Path, job: str, attempt: int) -> Outcome | None:
    """What came of an attempt; None while it runs, or when its nodes were lost before they could say."""
    try:
        return Outcome(**json.loads((attempt_dir(run_dir, job, attempt) / "outcome.json").read_text()))
    except FileNotFoundError:
        return None


def refusal(spec: JobSpec, place: Place) -> Outcome | None:
    """Why this attempt must not start: the job is over, or has used up its attempts. None when it may."""
    earlier = _earlier(spec, place)
    final = next((one for one in reversed(earlier) if one.status not in (0, SAVED)), None)
    if final is not None:
        return final
    if place.attempt > spec.max_restarts:
        error = next((one.error for one in earlier if one.error), "")
        reason = f"attempt {place.attempt} is not started: max_restarts = {spec.max_restarts}. Submit the run again"
        checkpoint = newest_checkpoint(spec.run_dir)
        return Outcome(
            attempt=place.attempt, result="failed", status=FAILED, reason=reason, checkpoint=checkpoint, error=error
        )
    return None


def newest_checkpoint(run_dir: str | Path) -> str:
    """Names of the newest checkpoints of the run and its warm start; empty when there is none."""
    folders = [Path(run_dir, part, "checkpoints") for part in _OBSERVED]
    return " ".join(found[-1].name for folder in folders if (found := checkpoint_dir.complete(folder)))


def first_error(errors: Sequence[dict[str, Any]], hosts: dict[int, str]) -> str:
    """The earliest failure of all nodes, with role, node, rank and file. ``errors`` are contents of error files."""
    if not errors:
        return "no role left an error: look into the job's own log"
    error = min(errors, key=lambda one: one["time"])
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error["time"]))
    rank = "" if error.get("rank") is None else f", rank {error['rank']}"
    host = hosts.get(error["node"])
    where = f"role {error['role']}, node {error['node']}" + (f" ({host})" if host else "") + rank
    return f"{where}, at {when}, in {error['log']}:\n{error['text']}"


def _judge(spec: JobSpec, board: Board, result: Result, reason: str) -> Outcome:
    checkpoint = newest_checkpoint(spec.run_dir)
    place = board.place
    if result in ("done", "saved", "cancelled"):
        status = {"done": 0, "saved": SAVED, "cancelled": CANCELLED}[result]
        return Outcome(attempt=place.attempt, result=result, status=status, reason=reason, checkpoint=checkpoint)
    # A replica that died and came back is no cause of what happened later.
    states = board.all("role-")
    lost = {
        name.removeprefix("role-").rpartition(".node")[0]
        for name, one in states.items()
        if one["state"] in ("dead", "given up")
    }
    errors = [one for one in board.all("error-").values() if not one.get("is_restarted") or one["role"] in lost]
    hosts = {int(name[5:-5]): peer["host"] for name, peer in board.all("node-").items()}
    error = first_error(errors, hosts) if errors or result == "failed" else reason
    signature = _signature(error)
    loop: list[Outcome] = []  # failures before this one, oldest first, since there was a new checkpoint
    for one in reversed(_earlier(spec, place)):
        if one.result not in ("failed", "unsaved") or one.checkpoint != checkpoint:
            break
        loop.insert(0, one)
    status = SAVED
    if not _has_begun(spec.run_dir, checkpoint):
        status, reason = FAILED, f"{reason}; no step was ever finished, so it is not tried again"
    elif [one.signature for one in loop].count(signature) + 1 >= MAX_SAME_FAILURES or len(loop) + 1 >= MAX_FAILURES:
        attempts = ", ".join(str(one.attempt) for one in loop)
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
    """Outcomes of the attempts before this one, oldest first. Attempts whose nodes were lost have none."""
    found = []
    for attempt in range(place.attempt):
        outcome = read_outcome(spec.run_dir, place.job, attempt)
        found += [] if outcome is None else [outcome]
    return found


def _has_begun(run_dir: str | Path, checkpoint: str) -> bool:
    metrics = [Path(run_dir, part, "metrics.jsonl") for part in _OBSERVED]
    return bool(checkpoint) or any(path.exists() and path.stat().st_size for path in metrics)


def _signature(error: str) -> str:
    """The message of an error without place and numbers, which differ between equal failures."""
    lines = [line for line in error.splitlines()[1:] if line and not line.startswith((" ", "Traceback"))]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", lines[0] if lines else error.partition("\n")[0])[:300]
