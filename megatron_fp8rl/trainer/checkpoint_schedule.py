"""Decides after which steps a run saves a checkpoint."""

import time

from megatron_fp8rl.config import CheckpointConfig
from megatron_fp8rl.trainer.parallel import Parallel


class CheckpointSchedule:
    """Every ``every_steps`` steps, every ``every_minutes`` by the clock of rank 0, and after step ``num_steps``."""

    def __init__(self, cfg: CheckpointConfig, num_steps: int, parallel: Parallel) -> None:
        self._cfg, self._num_steps, self._parallel = cfg, num_steps, parallel
        self.begin(-1)

    def begin(self, step: int) -> None:
        """Count the minutes from now, when the checkpoint of a step begins."""
        self._step, self._begin_s = step, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Collective: whether to save at the end of a step."""
        return self._is_regular(step) or self._is_due_by_time()

    def is_missing(self, step: int) -> bool:
        """Whether a run that ends early after a step still has to save it."""
        return not self._is_regular(step) and self._step != step

    def _is_regular(self, step: int) -> bool:
        every = self._cfg.every_steps
        return step == self._num_steps or (every > 0 and step % every == 0)

    def _is_due_by_time(self) -> bool:
        every_s = 60.0 * self._cfg.every_minutes
        is_over = time.monotonic() > self._begin_s + every_s
        return every_s > 0 and self._parallel.broadcast_object(is_over)
