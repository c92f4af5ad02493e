"""A lock of a folder that processes on several nodes share. Uses only the standard library.

The owner locks a file with flock, writes its name into the file, and touches the file every few seconds (heartbeat).
flock ends with the process. On some file systems it works only within a node, or not at all, and a lost node may leave
its lock behind. Then the heartbeat decides. Another process takes over the lock of an owner without a heartbeat. An
owner that was only suspended notices this and ends before it writes again.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

RUN_LOCK = "run.lock"  # in the folder of a run, held by its trainer
BEAT_S = 5.0
DYING_S = 5.0  # time for the last processes of a killed owner to end and release the lock
SILENT_S = 20.0  # without a heartbeat for this long, an owner on another node is dead, if it does not hold flock
HELD_SILENT_S = 120.0  # the same for an owner whose flock is still held: a network file system may release it later
_LOST = 2  # exit status of an owner whose lock another process has taken over

_Flock = Literal["free", "held", "unsupported"]


class InUseError(Exception):
    """Another process owns the lock; the message describes the process."""


@contextlib.contextmanager
def hold(
    path: Path, *, is_restart: bool = False, on_loss: Callable[[], None] = lambda: os._exit(_LOST)
) -> Iterator[None]:
    """Own the lock file during the block.

    Args:
        is_restart: The scheduler has ended the earlier attempt of this job before this one, so its lock is void.
        on_loss: Called in a thread, after a message, if another process has taken over the lock.

    Raises:
        InUseError: another process owns it.
        OSError: the file cannot be written.
    """
    file = _acquired(path, is_restart)
    with file:
        me = _me()
        _write(file, json.dumps(me))
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(file, path, me, ended, on_loss), name="folder lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            with contextlib.suppress(OSError):
                if not _is_taken(file, path, me):
                    _write(file, "")


def owner(path: Path, *, waits: bool = True) -> str:
    """Describe the process that owns the lock; empty if none does. ``waits``: watch the heartbeat of an owner on
    another node, for up to two minutes if it has died. Otherwise only a process of this host is recognized."""
    try:
        file = path.open("rb", buffering=0)
    except OSError:
        return ""
    with file:
        flock = _flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        if not waits and (flock != "held" or not _is_here(_read(path), has_flock=True)):
            return ""
        return _living_owner(path, flock, is_restart=False)


def _acquired(path: Path, is_restart: bool) -> IO[bytes]:
    """The locked file, after its earlier owner has released it or has died. Raises InUseError."""
    while True:
        file = path.open("a+b", buffering=0)
        try:
            flock = _flock(file, fcntl.LOCK_EX)
            if living := _living_owner(path, flock, is_restart):
                raise InUseError(living)
            if flock == "held":
                return _replacement(path)
            if flock == "unsupported" or _is_same(file, path):
                kept, file = file, None
                return kept
        finally:
            if file is not None:
                file.close()


def _replacement(path: Path) -> IO[bytes]:
    """A locked file in place of one whose dead owner's lock the file system keeps."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    file = temporary.open("a+b", buffering=0)
    _flock(file, fcntl.LOCK_EX)
    os.replace(temporary, path)
    return file


def _flock(file: IO[bytes], kind: int) -> _Flock:
    end = time.monotonic() + DYING_S
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return "free"
        except BlockingIOError:
            if time.monotonic() > end:
                return "held"
            time.sleep(0.2)
        except OSError:
            return "unsupported"


def _living_owner(path: Path, flock: _Flock, is_restart: bool) -> str:
    """Describe the owner if it is alive; empty otherwise."""
    named = _read(path)
    if flock == "held":
        if not named or _is_here(named, has_flock=True):
            return _described(named)
    elif not named or (flock == "free" and _is_here(named, has_flock=False)):
        return ""
    if is_restart and named.get("job") and named.get("job") == _me()["job"]:
        return ""
    # Watch for a change instead of comparing times: clocks of two nodes may differ.
    before, end = _beat_of(path), time.monotonic() + (HELD_SILENT_S if flock == "held" else SILENT_S)
    while time.monotonic() < end:
        time.sleep(0.5)
        if (now := _beat_of(path)) is None:
            return ""
        if now != before:
            return _described(_read(path) or named)
    return ""


def _beat_of(path: Path) -> tuple[int, int] | None:
    """(file, time of the last heartbeat). The file is opened, because a network file system then asks its server."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            return status.st_ino, status.st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError:
        return 0, 0


def _is_same(file: IO[bytes], path: Path) -> bool:
    """Whether the open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _is_here(named: dict[str, Any], *, has_flock: bool) -> bool:
    """Whether a process is on this machine. Containers of one machine share the kernel, and so the locks that are held,
    but may differ in their host names."""
    me = _me()
    is_kernel = named.get("boot", me["boot"]) == me["boot"]
    return is_kernel and (named.get("host") == me["host"] or (has_flock and bool(named.get("boot"))))


def _is_taken(file: IO[bytes], path: Path, me: dict[str, str]) -> bool:
    """Whether another process has taken over the lock. False if the file was removed."""
    try:
        named = _read(path)
        return bool(named and named != me) or (path.exists() and not _is_same(file, path))
    except OSError:
        return False


def _beat(file: IO[bytes], path: Path, me: dict[str, str], ended: threading.Event, on_loss: Callable[[], None]) -> None:
    wait_s = min(1.0, BEAT_S)  # two processes may have started at once
    while not ended.wait(wait_s):
        wait_s = BEAT_S
        if _is_taken(file, path, me):
            text = f"{path.parent} is now used by another run: {_described(_read(path))}. This process ends"
            print(text, file=sys.stderr, flush=True)
            on_loss()
            return
        with contextlib.suppress(OSError):
            os.utime(file.fileno())


def _described(named: dict[str, Any]) -> str:
    job = f", job {named['job']}" if named.get("job") else ""
    host = named.get("host", "an unknown host")
    return f"process {named.get('pid', '?')} on {host}{job}, since {named.get('since', '?')}"


def _read(path: Path) -> dict[str, Any]:
    """What the owner wrote; empty without an owner."""
    try:
        named = json.loads(path.read_text() or "{}")
    except (OSError, ValueError):
        return {}
    return named if isinstance(named, dict) else {}


def _write(file: IO[bytes], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text.encode())
    os.fsync(file.fileno())


def _me() -> dict[str, str]:
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "pid": str(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
