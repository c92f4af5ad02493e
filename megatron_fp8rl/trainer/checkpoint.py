"""Save and restore training checkpoints: weights, optimizer, FP8 scaling and RNG states.

In: a :class:`Policy` and a small dictionary, such as the data position. Out: one folder per checkpoint, readable by any
parallel layout. Runs on: every trainer rank; only rank 0 commits a checkpoint.

    step_00000040/            complete: only complete checkpoints have this name
        *.distcp, .metadata   Megatron-Core's distributed checkpoint (torch_dist), sharded by global tensor
        state.json            step, the caller's dictionary, configuration, and size and CRC-32 of every file
    .partial_00000080/        being written, or left over from a killed run
    damaged_step_00000040/    renamed at a start because a file's size or CRC-32 was wrong

A checkpoint is copied to host memory, written by a thread, synced, verified and renamed; files are verified on loading.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_fp8rl import upstream
from megatron_fp8rl.data import resumed_config
from megatron_fp8rl.data.checkpoint_dir import (
    PARTIAL_PREFIX,
    STATE_FILE,
    complete,
    damaged,
    damaged_files,
    digests_of,
    latest,
    make_folder,
    missing_part,
    set_aside,
    sync_to_disk,
)
from megatron_fp8rl.data.checkpoint_pickle import require_only_data
from megatron_fp8rl.kernels.fp8_parameter import is_fp8, plain
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.trainer.compat.megatron_saving import (
    StagedShards,
    gathered_on_device,
    live_storages,
    padded_buckets,
)
from megatron_fp8rl.trainer.model.lora import sharded_adapters
from megatron_fp8rl.trainer.policy import Policy

_FORMAT = 1
_WRITE_S = 3600.0  # for one rank's files
_CLOSE_S = 60.0  # a thread that writes while the process ends could end it by a signal


__all__ = ["CheckpointError", "Saver", "latest", "restore", "resume", "save"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or does not match the run that reads it."""


class DamagedError(CheckpointError):
    """A checkpoint lacks files, or a file's size or CRC-32 is wrong."""


def save(folder: str | Path, step: int, policy: Policy, extra: dict[str, Any]) -> Path:
    """Collective: write a checkpoint to ``folder`` and return its path, once it is on disk. See :class:`Saver`."""
    with closing(Saver(folder, policy)) as saver:
        saver.begin(step, extra)
        return saver.finish()


class Saver:
    """Saves checkpoints while training goes on, one at a time, and keeps the newest ``cfg.checkpoint.keep``.

    A step waits for the copy to host memory. A thread writes and syncs; a later :meth:`poll` names the checkpoint when
    all ranks have written. All methods are collective but :meth:`close`, which is due also after an error.
    """

    def __init__(self, folder: str | Path, policy: Policy):
        self._folder, self._policy = Path(folder), policy
        self._open: _Writing | None = None
        self._newest: Path | None = None

    def begin(self, step: int, extra: dict[str, Any]) -> None:
        """Copy the present state and begin to write it, after the checkpoint before is on disk.

        ``extra`` is JSON that :func:`restore` returns. Saving a step again writes a new checkpoint before removing the
        old one. Raises CheckpointError if ``extra`` is not JSON, or if the checkpoint before could not be written.
        """
        self.finish()
        policy = self._policy
        policy.require_weights()
        state = _describe(policy, step, extra)
        partial = self._folder / f"{PARTIAL_PREFIX}{step:08d}"
        if policy.parallel.rank == 0:
            make_folder(self._folder)
            for left in self._folder.glob(f"{PARTIAL_PREFIX}*"):
                shutil.rmtree(left)
            partial.mkdir()
        policy.parallel.barrier("checkpoint folder")
        with policy.offload.resident():
            policy.optimizer.set_num_updates(policy.step)
            request = dist_checkpointing.save(
                _sharded_state(policy, with_rng=True), str(partial), async_sharded_save=True, async_strategy="mcore"
            )
            models = [*policy.models, *(policy.reference or ())]
            staged = StagedShards(request, live=live_storages(models, policy.optimizer.megatron))
        self._open = _Writing(partial, state, staged)

    def poll(self) -> None:
        """Name the checkpoint if all ranks have written it; raise CheckpointError on all ranks if a rank could not."""
        if self._open is not None and all(self._policy.parallel.gather_from_all(self._open.is_done)):
            with span("checkpoint"):
                self.finish()

    def finish(self) -> Path | None:
        """Wait for the current write; returns the path of this saver's newest checkpoint, or None. Raises
        CheckpointError, on all ranks, if a rank could not write its part."""
        if self._open is None:
            return self._newest
        parallel, writing, self._open = self._policy.parallel, self._open, None
        part = writing.wait()
        parallel.barrier("checkpoint shards")
        parts = parallel.gather_from_all(part)
        self._raise([f"rank {rank}: {error}" for rank, (_, error) in enumerate(parts) if error], writing)
        final, error = None, ""
        try:
            writing.staged.finalize()
        except OSError as failure:  # of rank 0, for which the others wait inside
            self._raise([f"rank 0: {failure}"], writing)
        if parallel.rank == 0:
            digests = {name: digest for part, _ in parts for name, digest in part.items()}
            try:
                final = _commit(self._folder, writing.partial, writing.state, digests)
                _prune(self._folder, max(1, self._policy.cfg.checkpoint.keep), final)
            except OSError as failure:
                error = f"rank 0: {failure}"
        self._newest, error = parallel.broadcast_object((final, error))
        self._raise([error] if error else [], writing)
        return self._newest

    def _raise(self, errors: Sequence[str], writing: _Writing) -> None:
        if errors:
            raise CheckpointError(
                f"cannot write the checkpoint of step {writing.state['step']} to {writing.partial}. {'; '.join(errors)}"
                ". Check free space and quota; complete checkpoints are unchanged"
            )

    def close(self) -> None:
        """Abandon an unfinished checkpoint; returns when its thread has ended, or after a minute."""
        if self._open is not None:
            self._open.wait(_CLOSE_S)
            self._open = None


class _Writing:
    def __init__(self, partial: Path, state: dict[str, Any], staged: StagedShards):
        self.partial, self.state, self.staged = partial, state, staged
        self._digests: dict[str, str] = {}
        self._error = "not written within the deadline"
        self._thread = threading.Thread(target=self._write, name="write checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float = _WRITE_S) -> tuple[dict[str, str], str]:
        """(CRC-32 of this rank's files by name, error text; empty without an error)."""
        self._thread.join(seconds)
        return self._digests, self._error

    def _write(self) -> None:
        try:
            self._digests = digests_of(self.partial, self.staged.write())
            self._error = ""
        except Exception as error:  # raised on the ranks' main threads
            self._error = str(error) or repr(error)


def resume(folder: str | Path, policy: Policy, say: Callable[[str], None]) -> tuple[int, dict[str, Any]] | None:
    """Collective: restore the newest complete checkpoint of ``folder``; returns (step, extra), or None without any.

    Renames damaged checkpoints. ``say`` gets a line for each, a line with the step from which the run continues, and a
    line for each field of the configuration that differs from the checkpoint's.
    Raises CheckpointError if all checkpoints are damaged, because a start at step 0 would overwrite the run's records.
    """
    folder, parallel = Path(folder), policy.parallel
    while (newest := parallel.broadcast_object(next(reversed(complete(folder)), None))) is not None:
        try:
            step, extra = restore(newest, policy)
        except DamagedError as error:
            aside = set_aside(newest) if parallel.rank == 0 else newest
            parallel.barrier("damaged checkpoint")
            say(f"{error}. It is set aside as {aside.name}")
            continue
        say(f"continues after step {step}, from {newest}")
        before = json.loads((newest / STATE_FILE).read_text())["config"]
        for change in resumed_config.changes(before, policy.cfg):
            say(f"changed since then: {change.text}")
        return step, extra
    if left := parallel.broadcast_object([path.name for path in damaged(folder)]):
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged ({', '.join(left)}), and a start at step 0 would replace the "
            "run's records. Restore one from a backup, choose another --output_dir, or delete them to start over"
        )
    say(f"starts at step 0: {folder} contains no checkpoint")
    return None


def restore(path: str | Path, policy: Policy) -> tuple[int, dict[str, Any]]:
    """Collective: load a checkpoint of any parallel layout into ``policy``; returns (step, extra).

    Exact but for RNG states, which are per rank and restored only under the layout that wrote them. Raises, on all
    ranks: DamagedError if a file is missing or its CRC-32 is wrong; UnsafeError if a file could run code;
    CheckpointError if a changed field of the configuration cannot be applied.
    """
    path, parallel = Path(path), policy.parallel
    if (missing := parallel.broadcast_object(missing_part(path))) is not None:
        raise DamagedError(f"{path} is not a complete checkpoint: {missing}")
    damaged = parallel.gather_from_all(damaged_files(path, parallel.rank, parallel.world_size))
    wrong = [name for names in damaged for name in names]
    if wrong:
        raise DamagedError(f"{path} is damaged: the CRC-32 of {', '.join(wrong)} is wrong")
    require_only_data(path, parallel.rank, parallel.world_size)
    parallel.barrier("checkpoint without code")  # a rank loads files that other ranks have checked
    state = json.loads((path / STATE_FILE).read_text())
    if state.get("weights_only"):
        raise CheckpointError(f"{path} has only weights, no training state. Start from it: model.hf_path = {path}")
    _require_resumable(path, state, policy)
    policy.offload.restore()
    same_layout = state["config"]["parallel"] == dataclasses.asdict(policy.cfg.parallel)
    wanted = _sharded_state(policy, with_rng=same_layout, is_loading=True)
    new_histories = {} if _has_same_scaling(state, policy) else _take_scaling_histories(wanted)
    loaded = dist_checkpointing.load(wanted, str(path))
    for name, histories in new_histories.items():
        loaded[name] |= histories
    for index, model in enumerate(policy.models):
        model.load_state_dict(loaded[f"model{index}"], strict=not policy.cfg.lora.rank)
    for index, model in enumerate(policy.reference or ()):
        if _keeps_reference(policy):
            model.load_state_dict(loaded[f"reference{index}"])
    policy.optimizer.load_state(loaded["optimizer"])
    policy.optimizer.rebuild_parameters()  # the two may have had different kinds of parameters
    if same_layout:
        _set_random_state(loaded["rng"])
    policy.step = state["updates"]
    return state["step"], state["extra"]


def _describe(policy: Policy, step: int, extra: dict[str, Any]) -> dict[str, Any]:
    for key, value in extra.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra[{key!r}] cannot be written as JSON: {error}") from error
    return {
        "format": _FORMAT,
        "step": step,
        "updates": policy.step,
        "extra": extra,
        "config": json.loads(json.dumps(dataclasses.asdict(policy.cfg))),
        "has_reference": _keeps_reference(policy),
        "base": policy.base_digest,
    }


def _keeps_reference(policy: Policy) -> bool:
    """A reference loaded from ``hf_path`` can be reloaded; randomly initialized weights exist nowhere else."""
    return policy.reference is not None and policy.cfg.model.hf_path is None


def _sharded_state(policy: Policy, *, with_rng: bool, is_loading: bool = False) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    models = _sharded_models("model", policy.models, metadata)
    if policy.cfg.lora.rank:  # the base is loaded from where it came
        for name, model in zip(models, policy.models, strict=True):
            histories = {key: part for key, part in models[name].items() if key.endswith("fp8.history")}
            models[name] = histories | sharded_adapters(model)
    state = dict(models)
    if _keeps_reference(policy):
        reference = _sharded_models("reference", policy.reference, metadata)
        add_prefix_for_sharding(reference, "reference.")  # on disk; the policy's names have no prefix
        state |= reference
    optimizer = policy.optimizer.megatron
    on_device = not is_loading and upstream.applies("gathered_on_device")
    gathered = gathered_on_device(optimizer) if on_device else nullcontext()
    with policy.optimizer.states.expanded(), padded_buckets(optimizer), gathered:
        state["optimizer"] = optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    _write_in_bf16(models)
    if with_rng:
        rank, world_size = policy.parallel.rank, policy.parallel.world_size
        state["rng"] = ShardedObject("rng", _random_state(), (world_size,), (rank,), replica_id=0)
    return state


def _sharded_models(name: str, models: Sequence[torch.nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}{index}": model.sharded_state_dict(metadata=metadata) for index, model in enumerate(models)}


def _write_in_bf16(models: dict[str, dict[str, Any]]) -> None:
    """Replace FP8 parameters in the state dict by their BF16 values in host memory. The checkpoint format is then
    independent of ``precision.params``; :func:`restore` rebuilds FP8 parameters from FP32 master weights. Build the
    optimizer's state dict first: it identifies parameters by the tensors replaced here."""
    for model in models.values():
        for entry in model.values():
            if is_fp8(data := getattr(entry, "data", None)):
                entry.data = plain(data).cpu()


def _has_same_scaling(state: dict[str, Any], policy: Policy) -> bool:
    """Whether the same layers of the run that wrote the checkpoint had FP8 scales from earlier amax values."""
    theirs, ours = state["config"]["precision"], policy.cfg.precision
    return all(theirs[name] == getattr(ours, name) for name in ("trainer", "bf16_first_layers", "bf16_last_layers"))


def _take_scaling_histories(state: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Remove the histories of delayed scaling from a sharded state; returns their present values, by model."""
    taken: dict[str, dict[str, torch.Tensor]] = {}
    for name, entries in state.items():
        if name.startswith(("model", "reference")):
            taken[name] = {key: entries.pop(key).data for key in list(entries) if key.endswith("fp8.history")}
    return taken


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _commit(folder: Path, partial: Path, state: dict[str, Any], digests: dict[str, str]) -> Path:
    """Sync, verify and atomically rename, on rank 0. ``digests``: CRC-32 of shards; other files' are computed here."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in files:
        sync_to_disk(path)
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    digests = digests | digests_of(partial, sizes.keys() - digests.keys())
    state = {**state, "digests": digests, "files": sizes}
    state_file = partial / STATE_FILE
    state_file.write_text(json.dumps(state, indent=1))
    sync_to_disk(state_file)
    sync_to_disk(partial)
    missing = missing_part(partial) if ".metadata" in state["files"] else "file .metadata is missing"
    if missing is not None:
        raise CheckpointError(f"{partial} is incomplete on disk: {missing}. Check its free space and quota")
    name, attempt = f"step_{state['step']:08d}", 1
    final = folder / name
    while final.exists():
        final, attempt = folder / f"{name}_r{attempt}", attempt + 1
    os.rename(partial, final)
    sync_to_disk(folder)
    return final


def _prune(folder: Path, keep: int, written: Path) -> None:
    """Remove all but the newest ``keep`` complete checkpoints by time of writing, but never ``written``. Each is
    renamed to a partial name first, in case the run is killed."""
    whole = [path for path in complete(folder) if missing_part(path) is None and path != written]
    whole.sort(key=lambda path: (path / STATE_FILE).stat().st_mtime_ns)
    for path in whole[: max(0, len(whole) + 1 - keep)]:
        doomed = folder / f"{PARTIAL_PREFIX}{path.name}"
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _require_resumable(path: Path, state: dict[str, Any], policy: Policy) -> None:
    if state["format"] != _FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}; this program reads format {_FORMAT}")
    if errors := resumed_config.refusals(state["config"], policy.cfg, path):
        raise CheckpointError(f"{path} cannot be resumed: {'; '.join(map(str, errors))}")
    if state.get("base", 0) != policy.base_digest:
        raise CheckpointError(
            f"{path} has adapters of another base model than model.hf_path = {policy.cfg.model.hf_path!r}. Name the "
            "folder of the first start, with the same weights, or another output_dir for a new run"
        )
    if _keeps_reference(policy) and not state["has_reference"]:
        raise CheckpointError(
            f"{path} has no reference model, which algo.kl_coef needs. "
            "Set algo.kl_coef 0, or name another output_dir for a new run"
        )
