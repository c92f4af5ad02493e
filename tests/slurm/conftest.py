"""One Slurm for the whole session. Without root, Linux or its programs these tests are skipped, and say why."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SCRIPT, STATE, SlurmCluster

LOCK_DEADLINE_S = 900.0
PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "ip", "unshare", "nsenter")


def _missing() -> str | None:
    """Why there can be no cluster here; None when there can."""
    if os.environ.get("FP8RL_SLURM_TESTS") != "1":
        return "FP8RL_SLURM_TESTS=1 asks for a real Slurm on this machine"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of several nodes on one machine needs Linux and root"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    gone = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"{', '.join(gone)} missing: run {SCRIPT} install" if gone else None


@pytest.fixture(scope="session")
def slurm_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster that somebody started by hand is used and left as it is; else one is started, and stopped again."""
    if (reason := _missing()) is not None:
        pytest.skip(reason)
    lock = Path(f"{STATE}.lock").open("w")  # noqa: SIM115  one session at a time has the machine's cluster
    end_s = time.monotonic() + LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end_s:
                pytest.skip(f"other tests have had the Slurm of this machine for {LOCK_DEADLINE_S:g} s")
            time.sleep(1.0)
    is_running = subprocess.run([SCRIPT, "running"], timeout=180).returncode == 0
    if not is_running:
        started = subprocess.run([SCRIPT, "start"], capture_output=True, text=True, timeout=400)
        if started.returncode:
            subprocess.run([SCRIPT, "stop"], timeout=300)
            pytest.skip(f"Slurm could not be started here: {started.stderr.strip()[-500:]}")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LAUNCH_"))},
        "SLURM_CONF": str(STATE / "etc" / "slurm.conf"),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield SlurmCluster(shared=STATE / "shared", environment=environment)
    finally:
        if not is_running:
            subprocess.run([SCRIPT, "stop"], check=True, timeout=300)
        lock.close()


@pytest.fixture
def slurm(slurm_session: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster with idle nodes and an empty queue, before and after the test. Other tests do not see it."""
    monkeypatch.setenv("SLURM_CONF", slurm_session.environment["SLURM_CONF"])
    slurm_session.settle()
    yield slurm_session
    slurm_session.settle()


@pytest.fixture
def folder(slurm: SlurmCluster, request: pytest.FixtureRequest) -> Path:
    """An empty folder for one test that all nodes see. Its name needs quotes in a shell, as folders of users do."""
    path = slurm.shared / f'{request.node.name[:60]} it\'s "here"'
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
