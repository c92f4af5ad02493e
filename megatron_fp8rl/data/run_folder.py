"""Lock the folder of a run, on trainer rank 0, and check its content.

``run.lock`` is locked with flock, which ends with the process. On file systems where flock works only within a node,
the owner also touches the file every few seconds (heartbeat).

Stopped processes (debugger, SIGSTOP) can outlive a killed run. All its processes inherit an environment variable with
the folder's name, so that the next run in the folder can kill them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.data import resumed_config
from megatron_fp8rl.data.checkpoint_dir import STATE_FILE, complete, damaged, latest, make_folder
from megatron_fp8rl.net import sockets

LOCK = "run.lock"
_MARKS = (LOCK, "versions.json", "launch/jobs", "launch/jobs.jsonl")  # every run folder contains at least one
_HARMLESS = ("logs",)  # may exist before a run
_BEAT_S = 5.0
_OWNER = "FP8RL_RUN_DIR"  # environment variable of all processes of a run on its host: the folder
_DYING_S = 5.0  # time for the last processes of a killed run to end and release the lock
_SILENT_S = 20.0  # without a heartbeat for this long, an owner on another node counts as dead


def violations(cfg: RunConfig) -> list[Violation]:
    """Reasons not to use the folder: no run wrote it, or a run would overwrite its checkpoints."""
    folder = Path(cfg.run_dir)
    if not folder.is_dir():
        return []
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in _HARMLESS)
    if others and not any((folder / mark).exists() for mark in _MARKS):
        some = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        problem = f"{folder} is not empty and not a run folder: it contains {some}"
        return [Violation("--output_dir", cfg.run_dir, problem, "Name another folder")]
    if not cfg.checkpoint.resume:
        for part in (folder / "checkpoints", folder / "warm_start" / "checkpoints"):
            if kept := [*complete(part), *damaged(part)]:
                problem = f"{part} contains {kept[-1].name}, which a run from step 0 would overwrite"
                remedy = "Name another output_dir, or remove the checkpoints"
                return [Violation("--checkpoint.resume", False, problem, remedy)]
    return []


def resume_violations(cfg: RunConfig) -> list[Violation]:
    """Changed fields that a training run which resumes in the folder could not apply."""
    folder = Path(cfg.run_dir)
    if not cfg.checkpoint.resume:
        return []
    newest = latest(folder / "checkpoints")
    if newest is None:
        return resumed_config.finished_warm_start_refusals(folder / "warm_start", cfg)
    state = json.loads((newest / STATE_FILE).read_text())
    if cfg.warm_start.steps and cfg.model.hf_path is None:  # its weights are in the folder of the run
        cfg = replace(cfg, model=replace(cfg.model, hf_path=state["config"]["model"]["hf_path"]))
    errors = resumed_config.refusals(state["config"], cfg, newest, steps=state["step"])
    if cfg.algo.kl_coef > 0 and cfg.model.hf_path is None and not state.get("has_reference"):
        problem = f"needs a reference model, which {newest} does not have: the run started from random weights with 0"
        remedy = "Set 0, or name another output_dir for a new run"
        errors.append(Violation("--algo.kl_coef", cfg.algo.kl_coef, problem, remedy))
    return errors


@contextlib.contextmanager
def locked(cfg: RunConfig) -> Iterator[None]:
    """Lock the folder for a training run. Raises ConfigError if it cannot be used or resumed, or is in use."""
    if errors := violations(cfg) or resume_violations(cfg):
        raise ConfigError(errors)
    folder = Path(cfg.run_dir)
    make_folder(folder)
    with (folder / LOCK).open("a+b", buffering=0) as file:
        if owner := _other_owner(file):
            remedy = "Wait for it or stop it, or name another output_dir"
            raise ConfigError([Violation("--output_dir", cfg.run_dir, f"another run uses it: {owner}", remedy)])
        try:
            _write(file, json.dumps(_me()))
        except OSError as error:
            problem, remedy = f"{folder / LOCK} cannot be written: {error.strerror}", "Check free space and quota"
            raise ConfigError([Violation("--output_dir", cfg.run_dir, problem, remedy)]) from error
        _kill_left_processes(str(folder.resolve()))
        sockets.remove_stale()
        os.environ[_OWNER] = str(folder.resolve())
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(file, ended), name="run lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            os.environ.pop(_OWNER)
            sockets.remove_stale()
            with contextlib.suppress(OSError):
                _write(file, "")


def _kill_left_processes(folder: str) -> None:
    """Kill processes on this host that an earlier run in the folder started."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(_OWNER) == folder:
                process.kill()


def _other_owner(file: IO[bytes]) -> str:
    """Describe the owner of the lock; empty once this process owns it."""
    end = time.monotonic() + _DYING_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                return _described(file)
            time.sleep(0.2)
        except OSError:
            break  # no locks on this file system; rely on the heartbeat
    file.seek(0)
    before = _read(file)
    if before and before.get("host") != socket.gethostname():
        # Watch for a change instead of comparing times: clocks of two nodes may differ.
        touched, end = os.fstat(file.fileno()).st_mtime, time.monotonic() + _SILENT_S
        while time.monotonic() < end:
            time.sleep(0.5)
            if os.fstat(file.fileno()).st_mtime != touched:
                return _described(file)
    return ""


def _described(file: IO[bytes]) -> str:
    owner = _read(file)
    job = f", job {owner['job']}" if owner.get("job") else ""
    host = owner.get("host", "an unknown host")
    return f"process {owner.get('pid', '?')} on {host}{job}, since {owner.get('since', '?')}"


def _read(file: IO[bytes]) -> dict[str, str]:
    file.seek(0)
    try:
        return json.loads(file.read() or "{}")
    except ValueError:
        return {}


def _write(file: IO[bytes], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text.encode())


def _me() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _beat(file: IO[bytes], ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(file.fileno())
