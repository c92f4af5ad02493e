"""A laptop beside the test cluster: it has ``ssh``, and neither Slurm's programs nor the folder of the nodes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from slurm_cluster import ROOT, STATE, Launched

from launch.cluster import Cluster, Tunnel

LOGIN = STATE / "login"  # what cluster.sh writes: keys, known_hosts and the address in it
PROGRAMS = ("bash", "cat", "env", "git", "sh", "sleep", "uname")


def address() -> tuple[str, int]:
    """(host, port) of the login node."""
    host, _, port = (LOGIN / "known_hosts").read_text().split()[0].partition("]:")
    return host.removeprefix("["), int(port)


@dataclass
class Laptop:
    """``folder`` holds its programs, its cluster files and its ssh configuration; ``shared`` is hidden from it."""

    folder: Path
    shared: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        for name in PROGRAMS:
            if (found := shutil.which(name)) is not None:
                (programs / name).symlink_to(found)
        # ssh reads the home folder that the system knows, whatever HOME says.
        config = shlex.quote(str(self.config))
        (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        (programs / "ssh").chmod(0o755)
        shutil.copy(LOGIN / "known_hosts", self.known_hosts)
        self.config.write_text(
            f'Host *\n  UserKnownHostsFile "{self.known_hosts}"\n  GlobalKnownHostsFile /dev/null\n'
            "  IdentitiesOnly yes\n"
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "LAUNCH", "SSH"))}
        self.environment = kept | {"PATH": str(programs), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def cluster_file(self, *, tunnel: dict | None = None, **changes) -> str:
        """Path of a file of the test cluster with a tunnel to its login node."""
        host, port = address()
        python = shutil.which("python3", path="/usr/bin")  # of the system, and often older
        there = dict(host=host, user="root", port=port, identity=str(LOGIN / "user_key"), python=python)
        there |= tunnel or {}
        values = dict(
            run_root=str(self.shared), account="research", partition="main", time_limit="00:20:00", gpu=None,
            gpus_per_node=0, ranks_per_node=1, save_signal_s=60, python=sys.executable,
        ) | changes  # fmt: skip
        cluster = Cluster(**values, tunnel=Tunnel(**there))
        path = self.folder / "it's far.py"
        path.write_text(f"from launch.cluster import Cluster, Tunnel\n\nCLUSTER = {cluster!r}\n")
        return str(path)

    def popen(self, *words: str | Path) -> subprocess.Popen[str]:
        """``python WORDS``, where the cluster's folder cannot be seen."""
        hide = f'{shutil.which("mount")} -t tmpfs tmpfs "$0" && exec "$@"'
        unshare, bash = shutil.which("unshare"), shutil.which("bash")
        return subprocess.Popen(
            [unshare, "--mount", bash, "-c", hide, str(self.shared), sys.executable, *map(str, words)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests that a shell runs in the background would hand on that interrupts are ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def python(self, *words: str | Path, deadline_s: float = 400.0) -> Launched:
        began_s = time.monotonic()
        process = self.popen(*words)
        try:
            output, errors = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Launched(process.returncode, output, errors, time.monotonic() - began_s)

    def launch(self, *words: str | Path, deadline_s: float = 400.0) -> Launched:
        return self.python("-m", "launch", *words, deadline_s=deadline_s)
