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


def waiting_share(failures_per_hour: float, repair_s: float, spare_nodes: int) -> float:
    """Share of the time in which more nodes are lost than there are spares, so that the job cannot run.

    The number of nodes in repair is Poisson with mean rate x repair time, whatever the distribution of that time (the
    M/G/infinity queue).
    """
    mean = failures_per_hour * repair_s / 3600.0
    term = total = math.exp(-mean)
    for lost in range(1, spare_nodes + 1):
        term *= mean / lost
        total += term
    return max(0.0, 1.0 - total)


def spares_for(failures_per_hour: float, repair_s: float, share: float = 0.01) -> int:
    """The smallest number of spare nodes with which the job waits for less than ``share`` of the time."""
    spares = 0
    while waiting_share(failures_per_hour, repair_s, spares) >= share:
        spares += 1
    return spares


def loss(
    interval_s: float, *, failures_per_hour: float, save_s: float, restart: Restart, repair_s: float, spare_nodes: int
) -> Loss:
    """``save_s``: for which a step waits. ``repair_s``: until a lost node is back, on average."""
    waiting = waiting_share(failures_per_hour, repair_s, spare_nodes)
    running = 1.0 - waiting
    per_day = 24.0 * failures_per_hour * running
    return Loss(
        interval_s=interval_s,
        saving=_DAY_S * running / interval_s * save_s,
        repeated=per_day * interval_s / 2,
        restarting=per_day * restart.total,
        waiting=_DAY_S * waiting,
    )


def best_interval_s(failures_per_hour: float, save_s: float) -> float:
    """The interval that loses least."""
    return math.sqrt(2.0 * save_s * 3600.0 / failures_per_hour)
