"""Groups of a step that a run was asked to stop in: kept on disk, and used by the run that goes on from the same step.

In: finished groups of batches in progress, on trainer rank 0. Out: ``unfinished/step_<version + 1>.parquet`` in the run's
folder, and the same groups again. A group is used only by a run at the same policy version and with the same sampling:
it is then what that run would sample itself. Prompts whose completions were still being sampled are sampled again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.observe.recording import RolloutWriter, read_step, steps_of
from megatron_fp8rl.types import Prompt, RolloutGroup

FOLDER = "unfinished"
_KEY = "sampling"  # the file with the digest of what decides how completions are sampled and scored


class UnfinishedGroups:
    """Finished groups by prompt, of batches that are not trained on yet."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self._folder = Path(cfg.run_dir) / FOLDER
        self._groups: dict[str, RolloutGroup] = {}
        # Routed experts are large, and the scales of an FP8 cache are measured again: such runs sample again.
        self._is_used = (
            cfg.algo.router_replay != "rollout" and cfg.rollout.kv_cache_dtype != "fp8" and cfg.rollout.replay is None
        )

    def add(self, group: RolloutGroup, is_trained_on: bool = True) -> RolloutGroup:
        """Note a finished group of a batch in progress, unless it is of an evaluation; returns it."""
        if self._is_used and is_trained_on:
            self._groups[group.prompt.prompt_id] = group
        return group

    def forget(self, groups: Iterable[RolloutGroup]) -> None:
        """They are trained on."""
        for group in groups:
            self._groups.pop(group.prompt.prompt_id, None)

    def of(self, prompt: Prompt, num_completions: int) -> RolloutGroup | None:
        """The group that an earlier run finished for this prompt; None without one of this size."""
        group = self._groups.get(prompt.prompt_id)
        fits = (
            group is not None and group.prompt.token_ids == prompt.token_ids and len(group.rollouts) == num_completions
        )
        return replace(group, prompt=prompt) if fits else None

    def save(self, version: int) -> int:
        """Write the groups of a run that ends at a policy version; how many there are."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._groups:
            writer = RolloutWriter(self._folder)
            writer.write(version + 1, tuple(self._groups.values()))
            writer.close()
            (self._folder / _KEY).write_text(self._digest())
        return len(self._groups)

    def load(self, version: int) -> int:
        """Take up the groups that a run left at this version, and remove all that is left; how many were taken."""
        if self._is_used and self._folder.is_dir():
            path = steps_of(self._folder).get(version + 1)
            key = self._folder / _KEY
            if path is not None and key.is_file() and key.read_text() == self._digest():
                self._groups = {group.prompt.prompt_id: group for group in read_step(path)}
        if self._folder.is_dir():
            shutil.rmtree(self._folder)
        return len(self._groups)

    def _digest(self) -> str:
        """Of everything in a configuration that decides a completion or its score."""
        cfg = self._cfg
        rollout = dataclasses.replace(cfg.rollout, num_replicas=1)
        parts = (cfg.seed, cfg.model, cfg.precision, cfg.data, rollout)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
