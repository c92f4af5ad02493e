"""Saves complete groups of an unfinished step, for the run that resumes.

They are in ``unfinished/step_<version + 1>.parquet`` in the run's folder. A run uses them only at the same policy
version and with the same sampling, where it would sample the same groups.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.observe.recording import RolloutWriter, read_step, steps_of
from megatron_fp8rl.types import RolloutGroup

FOLDER = "unfinished"
_KEY = "sampling"  # file with the digest of the settings for sampling and scoring


def save(cfg: RunConfig, version: int, groups: Sequence[RolloutGroup]) -> int:
    """Save the groups of a run that ends at a policy version, over earlier ones; return their number."""
    folder = Path(cfg.run_dir) / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    # Not for routed experts, which are large, nor for an FP8 cache, whose scales are measured again.
    if not groups or cfg.algo.router_replay == "rollout" or cfg.engine.kv_cache_dtype == "fp8":
        return 0
    writer = RolloutWriter(folder)
    writer.write(version + 1, tuple(groups))
    writer.close()
    (folder / _KEY).write_text(_digest(cfg))
    return len(groups)


def load(cfg: RunConfig, version: int) -> dict[str, RolloutGroup]:
    """Remove the saved groups; return by prompt those with this policy version and sampling."""
    folder = Path(cfg.run_dir) / FOLDER
    path, key = steps_of(folder).get(version + 1), folder / _KEY
    is_same = path is not None and cfg.sampling.replay is None and key.is_file() and key.read_text() == _digest(cfg)
    groups = {group.prompt.prompt_id: group for group in read_step(path)} if is_same else {}
    shutil.rmtree(folder, ignore_errors=True)
    return groups


def _digest(cfg: RunConfig) -> str:
    """Return a digest of all settings that change a completion or its score."""
    rollout = dataclasses.replace(cfg.engine, num_replicas=1, deadline_scale=1.0)
    parts = (cfg.seed, cfg.model, cfg.precision, cfg.data, cfg.sampling, cfg.session, rollout)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
