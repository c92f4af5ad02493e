"""Ends a trainer rank that stands still, with its name and the place, wherever the rank was started.

In: limits in seconds. Out: a process beside each rank (``watchdog.py``), which gets the place of the rank's main thread
once a second. Runs on: every trainer rank, under this program's command, a launcher or the user's torchrun.

    a rank is stopped by SIGSTOP                        ends after ``stopped_s``, or at once if it is asked to end
    a user's loss or advantage function does not end    ends after ``user_s``, or ``asked_s`` if it is asked to end
    a rank is in one call of a library                  ends after ``wait_s``, or ``user_s`` if it is asked to end
    a rank waits for other ranks, or for engines        ends by the deadline of that wait
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType

from megatron_fp8rl.algo import load_function
from megatron_fp8rl.config import EngineConfig

_EVERY_S = 1.0
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_COLLECTIVE = f"{os.sep}torch{os.sep}distributed{os.sep}"
# Parts of this package whose waits have deadlines of their own, or depend on a disk.
_KINDS = {"rollout/": "engines", "weight_sync/": "engines", "trainer/checkpoint": "saves"}


@contextlib.contextmanager
def watched(
    engine: EngineConfig,
    wait_s: float,
    is_asked: Callable[[], bool],
    *,
    folder: Path | None = None,
    still_folder: str | None = None,
    error: Mapping[str, object] | None = None,
) -> Iterator[None]:
    """Watch the main thread of this rank during the block. Call in the main thread.

    Args:
        wait_s: the longest wait between trainer ranks; a rank that stands still ends before the others time out.
        is_asked: whether the run was asked to end.
        folder: a launcher's folder, where the error of this rank is written.
        still_folder: a rank that is asked to end notes there how long it has stood still.
        error: further fields of the error file.
    """
    rank = int(os.environ.get("RANK", "0"))
    with tempfile.TemporaryFile() as dumps, contextlib.ExitStack() as stack:
        options = {
            "pid": os.getpid(),
            "rank": rank,
            "stopped_s": engine.update_s,
            "user_s": engine.update_s,
            "asked_s": engine.hang_s,
            "wait_s": 0.9 * wait_s,
            "dump_fd": dumps.fileno(),
            "caller": os.path.join("algo", "load_function.py"),
            "still_file": str(Path(still_folder, f"still-rank{rank}.json")) if still_folder else "",
            "error_file": str(folder / f"error-rank{rank}.json") if folder else "",
            "error": dict(error or {}),
        }
        command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("watchdog.py")), json.dumps(options)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(dumps.fileno(),), bufsize=0)
        stack.callback(_end, process)
        lines = process.stdin.fileno()
        os.set_blocking(lines, False)
        faulthandler.register(signal.SIGUSR2, dumps, all_threads=False)
        stack.callback(faulthandler.unregister, signal.SIGUSR2)
        before = signal.set_wakeup_fd(
            lines, warn_on_full_buffer=False
        )  # written even while one call blocks all threads
        stack.callback(signal.set_wakeup_fd, before)
        ended = threading.Event()
        thread = threading.Thread(target=_tell, args=(lines, is_asked, ended), name="rank-watch", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        yield


def _end(process: subprocess.Popen[bytes]) -> None:
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)
        return
    process.kill()  # a signal has stopped it
    process.wait()


def _tell(lines: int, is_asked: Callable[[], bool], ended: threading.Event) -> None:
    """Write the place of the main thread once a second."""
    main = threading.main_thread().ident
    while not ended.wait(_EVERY_S):
        kind, at, place = where(sys._current_frames().get(main))
        line = {"kind": kind, "at": at, "place": place, "asked": is_asked()}
        try:
            os.write(lines, json.dumps(line).encode() + b"\n")
        except BlockingIOError:  # the watching process is stopped
            continue
        except OSError:
            return


def where(frame: FrameType | None) -> tuple[str, int, str]:
    """(kind of work, number that changes when the thread moves, place in words) of a thread with this frame."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    files = [item.f_code.co_filename for item in frames]
    place = _place([(item.f_code.co_filename, item.f_lineno, item.f_code.co_name) for item in frames])
    num_above = next((i for i, file in enumerate(files) if file.startswith(_PACKAGE)), len(files))
    at = hash(tuple((id(item), item.f_lasti) for item in frames))
    call = load_function.running_call
    if any(_COLLECTIVE in file for file in files[:num_above]):
        return "collective", at, place
    if call is not None:
        return "user", call.number, f"{call.field} = {call.name}, {place}"
    own = [file.removeprefix(_PACKAGE) for file in files if file.startswith(_PACKAGE)]
    kind = next((kind for file in own for part, kind in _KINDS.items() if file.startswith(part)), "works")
    return kind, at, place


def _place(frames: list[tuple[str, int, str]]) -> str:
    """The innermost function, and the innermost one outside of libraries that called it."""
    if not frames:
        return "no Python code"
    callers = [item for item in frames if not item[0].startswith((*_LIBRARIES, "<"))]
    inner, caller = frames[0], (callers or frames)[0]
    text = f"{caller[2]} ({caller[0]}:{caller[1]})"
    return text if inner is caller else f"{inner[2]}, called by {text}"


def waited_for_ranks(error: BaseException, rank: int) -> str:
    """What a rank waited for when a collective operation raised ``error``; empty for other errors."""
    frames: list[tuple[str, int, str]] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.insert(0, (code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    num_above = next((i for i, item in enumerate(frames) if item[0].startswith(_PACKAGE)), len(frames))
    inner = [item for item in frames[:num_above] if _COLLECTIVE in item[0] and item[2] != "wrapper"]
    if not isinstance(error, RuntimeError) or not inner:
        return ""
    callers = [item for item in frames[frames.index(inner[-1]) + 1 :] if not item[0].startswith(_LIBRARIES)]
    return (
        f"trainer rank {rank} waited for other ranks in {inner[-1][2]}, called by {_place(callers)}. "
        "Look for the first error of another rank: it failed, stands still, or has left this operation"
    )
