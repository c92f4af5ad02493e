"""A run that is asked to end early: it finishes its step, saves a checkpoint, and says with exit status 85 that it did.

In: SIGUSR1 or SIGTERM in any trainer rank, or a file that a launcher leaves. Out: :class:`RunStopped` on every rank at
the end of the same step. Which process: every trainer rank, from before it starts any other process.

Schedulers warn of a time limit by sending SIGUSR1 to every process of a job, whoever started it; an ordinary process
dies of that. So a rank blocks the signal besides handling it: what it starts inherits the block (not the handler), and
engines and score workers live on until the rank has saved.

A launcher names a folder in LAUNCH_DIR and watches files in it:

    stop.json             by the launcher: save and end, please
    stopped.json          by rank 0: {"step", "checkpoint"}
    error-rank<i>.json    by a rank that fails, at once: {"time", "role", "node", "rank", "text", "log"}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel

SAVED = 85  # exit status: not finished; start again to go on
FOLDER_VARIABLE = "LAUNCH_DIR"
_STOP, _STOPPED = "stop.json", "stopped.json"
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class RunStopped(SystemExit):
    """Ends a run that was asked to stop and left all that is needed to go on. Neither a failure nor the end."""

    def __init__(self, step: int, status: int) -> None:
        super().__init__(status)
        self.step = step


class StopRequest:
    """Build with :meth:`install` in the main thread, before threads and processes that are to survive a SIGUSR1."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self._is_signalled = False
        self._first_step: int | None = None

    @classmethod
    def install(cls) -> StopRequest:
        """Handle the signals, and read the launcher's folder and this rank from the environment."""
        folder = os.environ.get(FOLDER_VARIABLE)
        request = cls(Path(folder) if folder else None, int(os.environ.get("RANK", "0")))
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, request._note_signal)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a launcher may block it for torchrun
        return request

    def at_boundary(
        self, parallel: Parallel, step: int, save: Callable[[int], Path | None] = lambda step: None
    ) -> None:
        """Collective: go on unless any rank was asked to stop; then ``save(step)``, and raise RunStopped on all.

        ``step`` steps are finished. Nothing is saved when it is where this process began: there is nothing new.
        ``save`` returns the checkpoint of that step.
        """
        if self._first_step is None:
            self._first_step = step
        if not self._agreed(parallel):
            return
        checkpoint = save(step) if step > self._first_step else None
        if self.folder is not None and parallel.rank == 0:
            self._write(_STOPPED, {"step": step, "checkpoint": checkpoint and str(checkpoint)})
        parallel.barrier("stop")
        # torchrun takes a status other than 0 for a crash, and ends the ranks that still close their engines.
        is_told = self.folder is not None and "RANK" in os.environ
        raise RunStopped(step, 0 if is_told else SAVED)

    @contextlib.contextmanager
    def errors_noted(self) -> Iterator[None]:
        """Tell the launcher of an exception when it passes, before whatever is closed or written because of it."""
        try:
            yield
        except Exception as error:
            name = f"error-rank{self.rank}.json"
            if self.folder is not None and not (self.folder / name).exists():
                with contextlib.suppress(OSError):  # the error itself matters more
                    self._write(name, self._describe(error))
            raise

    def _agreed(self, parallel: Parallel) -> bool:
        """Collective: whether any rank was asked to stop."""
        is_asked = self._is_signalled or signal.SIGUSR1 in signal.sigpending() or self._is_told()
        if parallel.world_size == 1:
            return is_asked
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(is_asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=parallel.control_group)
        return bool(flag.item())

    def _is_told(self) -> bool:
        # One rank looks, and by listing the folder: on a network file system that shows what other nodes wrote.
        return self.folder is not None and self.rank == 0 and _STOP in os.listdir(self.folder)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True

    def _describe(self, error: BaseException) -> dict[str, object]:
        return {
            "time": time.time(),
            "role": os.environ.get("LAUNCH_ROLE", "trainer"),
            "node": int(os.environ.get("LAUNCH_NODE", "0")),
            "rank": self.rank,
            "text": "".join(traceback.format_exception(error))[-8000:].rstrip(),
            "log": os.environ.get("LAUNCH_LOG", "the output of this rank"),
        }

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        temporary = self.folder / f".{name}.{self.rank}"
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self.folder / name)


def run_ranks(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run torchrun on this machine and pass on a request to stop; its exit status, or SAVED when its ranks saved.

    torchrun itself knows of neither: it would kill its ranks half a minute after a SIGTERM, and die of a SIGUSR1.
    """
    with tempfile.TemporaryDirectory(prefix="stop-") as own:
        folder = Path(environment.get(FOLDER_VARIABLE, own))

        def ask(number: int, frame: FrameType | None) -> None:
            (folder / _STOP).write_text(json.dumps({"reason": signal.Signals(number).name}))

        # What is blocked now, the ranks inherit; they handle it when they are ready.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        process = subprocess.Popen(command, env={**environment, FOLDER_VARIABLE: str(folder)})
        for number in _SIGNALS:
            signal.signal(number, ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            status = process.wait()  # torchrun got it too
        return SAVED if status == 0 and (folder / _STOPPED).exists() else status
