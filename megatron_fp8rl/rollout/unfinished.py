"""Complete groups of a step in which a run was asked to stop: kept on disk for the run that continues.

The groups are in ``unfinished/step_<version + 1>.parquet`` in the run's folder. A run uses them only at the same policy
version and with the same sampling, where it would sample the same groups.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.observe.recording import RolloutWriter, read_step, steps_of
from megatron_fp8rl.types import RolloutGroup

FOLDER = "unfinished"
_KEY = "sampling"  # the file with the digest of what decides how completions are sampled and scored


def save(cfg: RunConfig, version: int, groups: Sequence[RolloutGroup]) -> int:
    """Write the groups of a run that ends at a policy version, in place of earlier ones; return how many there are."""
    folder = Path(cfg.run_dir) / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    # Routed experts are large, and the scales of an FP8 cache are measured again: such runs sample again.
    if not groups or cfg.algo.router_replay == "rollout" or cfg.engine.kv_cache_dtype == "fp8":
        return 0
    writer = RolloutWriter(folder)
    writer.write(version + 1, tuple(groups))
    writer.close()
    (folder / _KEY).write_text(_digest(cfg))
    return len(groups)


def load(cfg: RunConfig, version: int) -> dict[str, RolloutGroup]:
    """Remove the saved groups and return, by prompt, those of this policy version and this sampling."""
    folder = Path(cfg.run_dir) / FOLDER
    path, key = steps_of(folder).get(version + 1), folder / _KEY
    is_same = path is not None and cfg.sampling.replay is None and key.is_file() and key.read_text() == _digest(cfg)
    groups = {group.prompt.prompt_id: group for group in read_step(path)} if is_same else {}
    shutil.rmtree(folder, ignore_errors=True)
    return groups


def _digest(cfg: RunConfig) -> str:
    """A digest of everything in a configuration that decides a completion or its score."""
    rollout = dataclasses.replace(cfg.engine, num_replicas=1)
    parts = (cfg.seed, cfg.model, cfg.precision, cfg.data, rollout)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
