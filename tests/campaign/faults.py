"""Faults of a campaign: what can happen to a run's processes, clock, disk, files, rows and reward."""

import contextlib
import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.campaign.run_config import FAILS, LEAKS, ROWS

_SAVE_S = 10.0  # that a fault waits for the beginning of a checkpoint
MARK = "FP8RL_CAMPAIGN"  # environment variable of every process of a run


class Target:
    """A run: its processes by role, its folder, its clock, and the folder of its rows and its reward."""

    def __init__(self, mark: str, folder: Path, clock: Path, data: Path, rng: random.Random):
        self.mark, self.folder, self.clock, self.data, self.rng = mark, folder, clock, data, rng
        self.rows = (data / ROWS).read_bytes()
        self.is_stepping = False  # this start of the run has finished a step
        self._later: list[tuple[float, Callable[[], object]]] = []

    def processes(self) -> list[psutil.Process]:
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environ = process.environ()
                is_of_run = environ.get(MARK) == self.mark or environ.get("FP8RL_RUN_DIR") == str(self.folder)
                if is_of_run and process.status() != psutil.STATUS_ZOMBIE:
                    result.append(process)
        return result

    def of_role(self, role: str) -> list[psutil.Process]:
        return [process for process in self.processes() if _role(process) == role]

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Do something after some seconds; see :meth:`do_what_is_due`."""
        self._later.append((time.monotonic() + seconds, do))

    def at_the_end(self, do: Callable[[], object]) -> None:
        """Do something when the run's command has ended."""
        self.later(float("inf"), do)

    def do_what_is_due(self, *, all_of_it: bool = False) -> None:
        now = time.monotonic()
        due = [do for at, do in self._later if all_of_it or at <= now]
        self._later = [(at, do) for at, do in self._later if not all_of_it and at > now]
        for do in due:
            with contextlib.suppress(psutil.Error, OSError):
                do()

    def newest(self, pattern: str) -> Path | None:
        result = sorted(self.folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
        return result[-1] if result else None


def _role(process: psutil.Process) -> str:
    """launcher, trainer, engine, core (of an engine), scorer, or an empty string."""
    try:
        line, environ = " ".join(process.cmdline()), process.environ()
    except (psutil.Error, OSError):
        return ""
    if "envs.score_worker" in line or "envs/score_worker" in line:
        return "scorer"
    if "vllm_plugin.server" in line or "vllm_plugin/server" in line:
        return "engine"
    if "EngineCore" in line or "EngineCore" in process.name():
        return "core"
    if "megatron_fp8rl rl" in line:
        return "trainer" if "RANK" in environ and "torch.distributed.run" not in line else "launcher"
    return ""


def _signal(role: str, number: int) -> Callable[[Target], str]:
    def strike(target: Target) -> str:
        actual = target.of_role(role)
        if not actual:
            return ""
        victim = target.rng.choice(actual)
        with contextlib.suppress(psutil.Error):
            victim.send_signal(number)
        return f"process {victim.pid}"

    return strike


def _pause(role: str) -> Callable[[Target], str]:
    """A process is suspended for some seconds, less than its deadline."""

    def pause(target: Target) -> str:
        processes = target.of_role(role)
        if not processes:
            return ""
        victim, seconds = target.rng.choice(processes), target.rng.uniform(1, 6)
        with contextlib.suppress(psutil.Error):
            victim.suspend()
            target.later(seconds, victim.resume)
        return f"{seconds:.1f} s"

    return pause


def exhaust_scorer(target: Target) -> str:
    """A scorer gets no more memory, as after a reward that leaks."""
    if not (processes := target.of_role("scorer")):
        return ""
    victim = target.rng.choice(processes)
    with contextlib.suppress(psutil.Error, OSError):
        size = victim.memory_info().vms
        victim.rlimit(psutil.RLIMIT_AS, (size, size))
    return f"process {victim.pid}"


def kill_all_engines(target: Target) -> str:
    processes = [process for role in ("engine", "core") for process in target.of_role(role)]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return f"{len(processes)} processes" if processes else ""


def kill_in_a_save(target: Target) -> str:
    """A rank dies while the next checkpoint is being written."""
    end = time.monotonic() + _SAVE_S
    while time.monotonic() < end and not list(target.folder.glob("checkpoints/.partial_*")):
        time.sleep(0.002)
    if not list(target.folder.glob("checkpoints/.partial_*")):
        return ""
    time.sleep(target.rng.uniform(0, 0.1))
    return _signal("trainer", signal.SIGKILL)(target)


def jump_clock(target: Target) -> str:
    shift = target.rng.choice((-3600.0, -30.0, 30.0, 3600.0, 86400.0))
    with target.clock.open("r+b") as file:
        file.write(struct.pack("d", shift))
    return f"{shift:+.0f} s"


def fill_disk(target: Target) -> str:
    """A full disk for some seconds, if the run's folder is a small file system."""
    if not os.path.ismount(target.folder.parent):
        return ""
    hog = target.folder.parent / "hog"
    if hog.exists():
        return ""
    with contextlib.suppress(OSError), hog.open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
    target.later(target.rng.uniform(2, 6), hog.unlink)
    return "until nothing fitted"


def change_rows(how: str) -> Callable[[Target], str]:
    """The file of rows changes in place; it is restored when the run has ended."""

    def change(target: Target) -> str:
        file = target.data / ROWS
        # A run that starts reads the file as it is then.
        if not target.is_stepping or file.read_bytes() != target.rows:
            return ""
        content = target.rows
        new = content[: len(content) // 3] if how == "truncated" else content.replace(b"1", b"7")
        file.write_bytes(new)
        target.at_the_end(lambda: file.write_bytes(content))
        return f"{len(content)} bytes, then {len(new)}"

    return change


def leak_in_reward(target: Target) -> str:
    """The reward keeps 64 MiB per call for some seconds."""
    file = target.data / LEAKS
    if file.exists():
        return ""
    file.touch()
    seconds = target.rng.uniform(3, 8)
    target.later(seconds, lambda: file.unlink(missing_ok=True))
    return f"{seconds:.1f} s"


def fail_in_reward(target: Target) -> str:
    """Every score of the next start fails; its first step ends the run."""
    (target.data / FAILS).touch()
    target.at_the_end((target.data / FAILS).unlink)
    return "until the run ends"


def file_of_checkpoint(target: Target, is_eligible: Callable[[Path], bool]) -> Path | None:
    """A file of the newest checkpoint, if an older one stays and it has any."""
    if len(list((target.folder / "checkpoints").glob("step_*"))) < 2:
        return None
    files = sorted(filter(is_eligible, target.newest("checkpoints/step_*").iterdir()))
    return target.rng.choice(files) if files else None  # none: damaged before


def flip_checkpoint(target: Target) -> str:
    """A bit of the newest checkpoint; an older one stays."""
    file = file_of_checkpoint(target, lambda path: path.suffix == ".distcp" or path.name == ".metadata")
    if file is None:
        return ""
    content = bytearray(file.read_bytes())
    content[target.rng.randrange(len(content))] ^= 1 << target.rng.randrange(8)
    file.write_bytes(bytes(content))
    return f"{file.parent.name}/{file.name}"


def cut_checkpoint(target: Target) -> str:
    """The newest checkpoint loses a file; an older one stays."""
    file = file_of_checkpoint(target, lambda path: path.is_file() and path.name != "state.json")
    if file is None:
        return ""
    file.unlink()
    return f"{file.parent.name}/{file.name}"


def cut_line(target: Target) -> str:
    """The last line of a record ends in the middle, as after a crash of the machine."""
    file = target.folder / target.rng.choice(("metrics.jsonl", "details.jsonl"))
    if not file.exists() or not (content := file.read_bytes()):
        return ""
    end = content[:-1].rfind(b"\n") + 1
    file.write_bytes(content[: end + (len(content) - end) // 2])
    return file.name


def cut_rollouts(target: Target) -> str:
    """The newest rollout file is cut short, if its step follows the newest checkpoint and is trained again."""
    newest, saved = target.newest("rollouts/step_*.parquet"), target.newest("checkpoints/step_*")
    if newest is None or (saved is not None and int(newest.stem[5:]) <= int(saved.name[5:13])):
        return ""
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    return newest.name


def leave_rubbish(target: Target) -> str:
    """The files that a killed run may leave: a partial checkpoint, a temporary file."""
    partial = target.folder / "checkpoints" / ".partial_00000099"
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "__0_0.distcp").write_bytes(b"half")
    (target.folder / "rollouts").mkdir(exist_ok=True)
    (target.folder / "rollouts" / ".step_00000099.parquet.tmp").write_bytes(b"half")
    return "partial files"


RUNNING: dict[str, tuple[float, Callable[[Target], str]]] = {
    "trainer rank killed": (1.0, _signal("trainer", signal.SIGKILL)),
    "launching process killed": (0.5, _signal("launcher", signal.SIGKILL)),
    "trainer rank killed in a save": (0.7, kill_in_a_save),
    "save and end asked for": (0.7, _signal("launcher", signal.SIGTERM)),
    "engine killed": (1.5, _signal("engine", signal.SIGKILL)),
    "engine core killed": (1.0, _signal("core", signal.SIGKILL)),
    "all engines killed": (0.4, kill_all_engines),
    "engine hangs": (1.0, _signal("engine", signal.SIGSTOP)),
    "engine core hangs": (1.0, _signal("core", signal.SIGSTOP)),
    "scorer killed": (2.0, _signal("scorer", signal.SIGKILL)),
    "scorer is slow": (1.0, _pause("scorer")),
    "scorer hangs": (1.0, _signal("scorer", signal.SIGSTOP)),
    "trainer rank stands still": (2.0, _pause("trainer")),
    "scorer has no memory left": (1.0, exhaust_scorer),
    "trainer rank stopped for good": (0.2, _signal("trainer", signal.SIGSTOP)),
    "reward leaks": (1.0, leak_in_reward),
    "rows truncated": (0.3, change_rows("truncated")),
    "rows rewritten": (0.3, change_rows("rewritten")),
    "clock jumps": (2.0, jump_clock),
    "disk full": (0.7, fill_disk),
}
ENDING = (
    "trainer rank killed",
    "trainer rank killed in a save",
    "trainer rank stopped for good",
    "rows truncated",
    "rows rewritten",
    "launching process killed",
    "save and end asked for",
    "disk full",
)
# What the run says that such a fault ends, unless another one ends it first.
SAYS = {
    "rows truncated": f"{ROWS} was truncated during the run",
    "rows rewritten": f"{ROWS} was rewritten during the run",
    "trainer rank stopped for good": "was stopped by a signal and has stood still for",
    "reward fails always": "the campaign lets every score fail",  # in a step, or at the start after another fault
}
RESTING: dict[str, Callable[[Target], str]] = {
    "checkpoint: bit flipped": flip_checkpoint,
    "checkpoint: file lost": cut_checkpoint,
    "record cut in a line": cut_line,
    "rollouts cut short": cut_rollouts,
    "left-over partial files": leave_rubbish,
    "reward fails always": fail_in_reward,
}


def end_all(target: Target) -> None:
    target.do_what_is_due(all_of_it=True)
    for process in target.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(target.folder, ignore_errors=True)
