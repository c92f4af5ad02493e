"""Time that a run loses to failures per day, by how often it saves. Arithmetic; pure.

A lost node costs the steps since the last checkpoint, on average half an interval, and a restart: until the scheduler
notices, the wait for a node unless a spare one is there, and the start of all processes. Saving costs what the step
waits for it. Failures are independent and rare against an interval; the interval that loses least is then
sqrt(2 x cost of a save / rate of failures) (Young, CACM 17(9), 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Seconds from the loss of a node to the first step after it. ``docs/scale.md`` says which are measured."""

    noticed_s: float = 25.0  # by a scheduler that misses a node for 15 s; Slurm's default misses it for 300 s
    queued_s: float = 6.0  # until the job starts again, with a spare node
    start_s: float = 120.0  # imports, engines, model, first publication
    load_s: float = 0.0  # of a checkpoint

    @property
    def total(self) -> float:
        return self.noticed_s + self.queued_s + self.start_s + self.load_s


@dataclass(frozen=True)
class Loss:
    """Seconds lost per day."""

    interval_s: float
    saving: float
    repeated: float  # steps since the last checkpoint
    restarting: float
    waiting: float  # for a node, without a spare one

    @property
    def total(self) -> float:
        return self.saving + self.repeated + self.restarting + self.waiting

    @property
    def share(self) -> float:
        return self.total / _DAY_S


def loss(
    interval_s: float, *, failures_per_hour: float, save_s: float, restart: Restart, repair_s: float, spare_nodes: int
) -> Loss:
    """``save_s``: for which a step waits. ``repair_s``: until a lost node is back; spares run out if more are lost."""
    per_day = 24.0 * failures_per_hour
    missing = max(0.0, failures_per_hour * repair_s / 3600.0 - spare_nodes)  # nodes that nobody replaces, on average
    wait = 0.0 if spare_nodes and not missing else repair_s if not spare_nodes else repair_s * min(1.0, missing)
    return Loss(
        interval_s=interval_s,
        saving=_DAY_S / interval_s * save_s,
        repeated=per_day * interval_s / 2,
        restarting=per_day * restart.total,
        waiting=per_day * wait,
    )


def best_interval_s(failures_per_hour: float, save_s: float) -> float:
    """The interval that loses least."""
    return math.sqrt(2.0 * save_s * 3600.0 / failures_per_hour)
