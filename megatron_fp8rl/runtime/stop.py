"""Early stop on request: finish the update or discard the rollouts, save a checkpoint, exit with status 85.

In: SIGUSR1, SIGTERM or a first Ctrl-C in any trainer rank, or a file written by a launcher. Out: :class:`RunStopped` on
every rank at the same boundary. Runs on: every trainer rank; installed before the rank starts any other process.

Schedulers announce a time limit by SIGUSR1 to every process of a job. Each rank handles and blocks it: child processes
inherit the block, so engines and score workers stay alive until the rank has saved. A launcher sets LAUNCH_DIR to a
folder and watches these files:

    stop.json             written by the launcher: request to save and end
    stopped.json          written by rank 0: {"step", "checkpoint"}
    error-rank<i>.json    written by a failing rank, immediately: {"time", "role", "node", "rank", "text", "log"}
    .bell                 grows with every written file; readers list the folder only if it grew
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megatron_fp8rl.net.parent import end_with_thread
from megatron_fp8rl.runtime.watchdog import ASKED_FILE

if TYPE_CHECKING:
    import psutil

    from megatron_fp8rl.config import EngineConfig
    from megatron_fp8rl.trainer.parallel import Parallel

SAVED = 85  # exit status: not finished; start again to continue
FOLDER_VARIABLE = "LAUNCH_DIR"
STILL_VARIABLE = "FP8RL_STILL_DIR"  # folder where ranks that are asked to end note how long they have stood still
_STOP, _STOPPED = "stop.json", "stopped.json"
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_LOOK_S = 1.0


class ChangeFlag:
    """Detects writes to a folder by the size of one file, because listing a shared folder is slow."""

    _EVERY_S = 30.0  # interval of listings without a change, for writers that do not call :meth:`mark`

    def __init__(self, folder: Path) -> None:
        self._file = folder / ".bell"
        self._seen: object = None
        self._listed_s = float("-inf")

    def has_changed(self) -> bool:
        """Whether :meth:`mark` was called since the last call; also True at first, after 30 s, and without the file."""
        try:
            with open(self._file, "rb") as file:  # opening asks the server, also on NFS
                state = os.fstat(file.fileno())
        except OSError:
            return True
        seen, now = (state.st_size, state.st_mtime_ns), time.monotonic()
        if seen == self._seen and now < self._listed_s + self._EVERY_S:
            return False
        self._seen, self._listed_s = seen, now
        return True

    @staticmethod
    def mark(folder: Path) -> None:
        with contextlib.suppress(OSError), open(folder / ".bell", "ab") as file:
            file.write(b".")


class RunStopped(SystemExit):
    """Ends a run that was asked to stop and can be resumed. Neither a failure nor a completed run."""

    def __init__(self, step: int, status: int) -> None:
        super().__init__(status)
        self.step = step


class StopRequest:
    """Pending stop request. Call :meth:`install` in the main thread, before starting threads and processes."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self._is_signalled = False
        self._first_step: int | None = None
        self._changes = None if folder is None else ChangeFlag(folder)
        self._was_told = False
        self._looked_s = float("-inf")

    @classmethod
    def install(cls) -> StopRequest:
        """Install the signal handlers; read the launcher's folder and this rank from the environment."""
        folder = os.environ.get(FOLDER_VARIABLE)
        request = cls(Path(folder) if folder else None, int(os.environ.get("RANK", "0")))
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, request._note_signal)
            signal.signal(signal.SIGINT, request._note_interrupt)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a launcher may block it for torchrun
        return request

    def at_boundary(
        self, parallel: Parallel, step: int, save: Callable[[int], Path | None] = lambda step: None
    ) -> None:
        """Collective: if any rank was asked to stop, call ``save(step)`` and raise RunStopped on all ranks.

        ``step`` is the number of finished steps. ``save`` returns the checkpoint; it is not called if this process
        finished no step.
        """
        if self._first_step is None:
            self._first_step = step
        if not self._agreed(parallel):
            return
        self._end(parallel, step, save(step) if step > self._first_step else None)

    def at_start(self, parallel: Parallel) -> None:
        """Collective: :meth:`at_boundary` before the run knows its step, and has anything to save."""
        if self._agreed(parallel):
            self._end(parallel, 0, None)

    def _end(self, parallel: Parallel, step: int, checkpoint: Path | None) -> NoReturn:
        if self.folder is not None and parallel.rank == 0:
            self._write(_STOPPED, {"step": step, "checkpoint": checkpoint and str(checkpoint)})
        parallel.barrier("stop")
        # torchrun treats a nonzero status as a crash and kills the ranks that are still closing their engines.
        is_told = self.folder is not None and "RANK" in os.environ
        raise RunStopped(step, 0 if is_told else SAVED)

    def watched(self, engine: EngineConfig, wait_s: float) -> contextlib.AbstractContextManager[None]:
        """End this rank if it stands still during the block. ``wait_s``: the longest wait between trainer ranks."""
        from megatron_fp8rl.runtime.watch import watched

        still = os.environ.get(STILL_VARIABLE)
        return watched(engine, wait_s, self._was_asked, folder=self.folder, still_folder=still, error=self._origin())

    @contextlib.contextmanager
    def errors_noted(self) -> Iterator[None]:
        """Report an exception to the launcher as it propagates, before any cleanup that it causes. The error of a
        collective operation gets a note with this rank and the operation."""
        from megatron_fp8rl.runtime.watch import waited_for_ranks

        try:
            yield
        except Exception as error:
            if (note := waited_for_ranks(error, self.rank)) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            name = f"error-rank{self.rank}.json"
            if self.folder is not None and not (self.folder / name).exists():
                with contextlib.suppress(OSError):  # the error itself matters more
                    self._write(name, self._describe(error))
            raise

    def is_asked(self) -> bool:
        """Whether this rank was asked to stop; rank 0 checks a launcher's folder once a second."""
        return self._is_signalled or signal.SIGUSR1 in signal.sigpending() or self._is_told()

    def _was_asked(self) -> bool:
        """:meth:`is_asked` for another thread: does not look into the folder."""
        return self._is_signalled or self._was_told or signal.SIGUSR1 in signal.sigpending()

    def _agreed(self, parallel: Parallel) -> bool:
        """Collective: whether any rank was asked to stop."""
        is_asked = self.is_asked() or self._is_told(is_at_boundary=True)
        if parallel.world_size == 1:
            return is_asked
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(is_asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=parallel.control_group)
        return bool(flag.item())

    def _is_told(self, is_at_boundary: bool = False) -> bool:
        if self._changes is None or self.rank or self._was_told:
            return self._was_told
        now = time.monotonic()
        if is_at_boundary or now > self._looked_s + _LOOK_S:
            self._looked_s = now
            # On a network file system, a listing shows new files of other nodes earlier than a query of the file.
            with contextlib.suppress(OSError):  # the file system may be unreachable for a moment
                self._was_told = (self._changes.has_changed() or is_at_boundary) and _STOP in os.listdir(self.folder)
        return self._was_told

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_signalled:
            raise KeyboardInterrupt
        self._is_signalled = True
        print("saving a checkpoint, then ending; a second Ctrl-C ends at once", flush=True)

    def _describe(self, error: BaseException) -> dict[str, object]:
        return {"time": time.time(), "rank": self.rank, "text": _text_of(error), **self._origin()}

    @staticmethod
    def _origin() -> dict[str, object]:
        return {
            "role": os.environ.get("LAUNCH_ROLE", "trainer"),
            "node": int(os.environ.get("LAUNCH_NODE", "0")),
            "log": os.environ.get("LAUNCH_LOG", "the output of this rank"),
        }

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        temporary = self.folder / f".{name}.{self.rank}"
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self.folder / name)
        ChangeFlag.mark(self.folder)


def _text_of(error: BaseException) -> str:
    """The end of the traceback; the message alone if the user's configuration or data are wrong."""
    from megatron_fp8rl.config import ConfigError  # not in the agents, which import this module

    return str(error) if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))[-8000:].rstrip()


def run_ranks(command: Sequence[str], environment: Mapping[str, str], *, hang_s: float = 30.0) -> int:
    """Run torchrun on this machine and forward stop requests; return its exit status, or SAVED if its ranks saved.

    torchrun kills its ranks 30 s after a SIGTERM, and a SIGUSR1 kills it. It ends with this process.

    Ranks that were asked to end by SIGTERM or Ctrl-C are killed if all of them wait for each other, at the same places
    for ``hang_s``. A rank that stands still elsewhere ends by itself (:mod:`.watch`). A second SIGTERM or Ctrl-C ends
    all ranks at once.
    """
    with tempfile.TemporaryDirectory(prefix="stop-") as temporary:
        folder = Path(environment.get(FOLDER_VARIABLE, temporary))
        asked_to_end: list[int] = []

        def ask(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGUSR1:
                asked_to_end.append(number)
            if len(asked_to_end) > 1:
                process.send_signal(signal.SIGINT)
                return
            (folder / _STOP).write_text(json.dumps({"reason": signal.Signals(number).name}))
            ChangeFlag.mark(folder)

        # The ranks inherit the blocked signals and unblock them once their handlers are installed.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # In a separate process group, so that Ctrl-C reaches only this process, which asks the ranks to save.
        environment = {**environment, FOLDER_VARIABLE: str(folder), STILL_VARIABLE: temporary}
        process = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=end_with_thread)
        for number in (*_SIGNALS, signal.SIGINT):
            signal.signal(number, ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        ranks = _AskedRanks(process, Path(temporary), hang_s)
        while True:
            try:
                status = process.wait(_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if asked_to_end:
                    ranks.end(at_once=len(asked_to_end) > 1)
        return SAVED if status == 0 and (folder / _STOPPED).exists() else status


class _AskedRanks:
    """The ranks of a torchrun on this machine that were asked to end. Times are counted in calls of :meth:`end`."""

    _KILL_CALLS = 10  # until ranks that were to end at once are killed
    _STOPPED_CALLS = 4  # until a stopped process is killed that no other process watches

    def __init__(self, torchrun: subprocess.Popen[bytes], still_folder: Path, hang_s: float) -> None:
        self._torchrun, self._folder, self._hang_s = torchrun, still_folder, hang_s
        self._told: set[int] = set()
        self._num_stopped: dict[int, int] = {}
        self._num_at_once = 0

    def end(self, *, at_once: bool) -> None:
        """Call once a second: tell new ranks to end, and kill those that cannot."""
        import psutil

        (self._folder / ASKED_FILE).touch()
        ranks: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            torchrun = psutil.Process(self._torchrun.pid)
            for child in torchrun.children():
                with contextlib.suppress(psutil.Error):
                    if "RANK" in child.environ():
                        ranks.append(child)
            self._kill_stopped([torchrun, *ranks])
        for rank in ranks:
            if rank.pid not in self._told:
                self._told.add(rank.pid)
                with contextlib.suppress(psutil.Error):
                    rank.terminate()  # the rank notes it, and stands still for a shorter time at most
        self._num_at_once += at_once
        if self._num_at_once > self._KILL_CALLS or self._wait_for_each_other(len(ranks)):
            for rank in ranks:
                with contextlib.suppress(psutil.Error):
                    rank.kill()

    def _kill_stopped(self, processes: Sequence[psutil.Process]) -> None:
        """Kill torchrun, or a rank at its very start, if a signal has stopped it."""
        import psutil

        for process in processes:
            with contextlib.suppress(psutil.Error):
                is_stopped = process.status() == psutil.STATUS_STOPPED
                self._num_stopped[process.pid] = self._num_stopped.get(process.pid, 0) + 1 if is_stopped else 0
                if self._num_stopped[process.pid] > self._STOPPED_CALLS:
                    print(f"process {process.pid} was stopped by a signal, and is killed", file=sys.stderr, flush=True)
                    process.kill()

    def _wait_for_each_other(self, num_ranks: int) -> bool:
        """Whether no rank can go on; prints where each one waits."""
        still = {}
        for file in sorted(self._folder.glob("still-rank*.json")):
            with contextlib.suppress(OSError, ValueError):
                still[file.stem.removeprefix("still-rank")] = json.loads(file.read_text())
        if not still or len(still) < num_ranks:
            return False
        if any(rank["kind"] != "collective" or rank["still_s"] < self._hang_s for rank in still.values()):
            return False
        places = "; ".join(f"rank {rank} in {still[rank]['place']}" for rank in sorted(still, key=int))
        print(f"all trainer ranks wait for each other and are killed: {places}", file=sys.stderr, flush=True)
        return True
