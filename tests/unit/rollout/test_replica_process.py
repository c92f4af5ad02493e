"""The process above a remote replica's server: it says where the server is, and neither outlives the other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8rl.net.endpoint import Endpoint
from tests.helpers.processes import DEADLINE_S, is_running, until

# A replica with a server that answers at once and does nothing, below an agent that can be killed.
_REPLICA = """
import subprocess, sys
from megatron_fp8rl.rollout import replica
def start_server(arguments, environment, *, host, **_):
    import pathlib
    assert (pathlib.Path(arguments["model"]) / "config.json").exists()
    return subprocess.Popen(["sleep", "300"], start_new_session=True), f"http://{host}:7"
replica.start_server = start_server
replica.is_healthy = lambda url, token: True
from megatron_fp8rl.__main__ import main
sys.exit(main())
"""
_AGENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["agent", "server", "asked"])
def test_replica_and_server_end_together(end, tmp_path):
    path = tmp_path / "replicas" / "rollout-0.json"
    args = ["replica", "tiny_qwen3_moe", "--engine.placement", "remote", "--replica", "0", "--endpoint", str(path)]
    environment = os.environ | {
        "LAUNCH_ADDRESS": "127.0.0.1",
        "LAUNCH_INCARNATION": "2001",
        "LAUNCH_LOG": "/l/rollout-0.log",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    agent = subprocess.Popen([sys.executable, "-c", _AGENT, _REPLICA, *args], env=environment, start_new_session=True)
    try:
        until(lambda: Endpoint.read(path) is not None, "the endpoint file")
        endpoint = Endpoint.read(path)
        assert (endpoint.name, endpoint.url, endpoint.incarnation) == ("rollout-0", "http://127.0.0.1:7", 2001)
        assert endpoint.log == "/l/rollout-0.log" and len(endpoint.token) > 30
        (replica,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        if end == "agent":
            agent.kill()
        elif end == "server":
            os.kill(endpoint.pid, signal.SIGKILL)
            assert agent.wait(DEADLINE_S) == 128 + signal.SIGKILL
        else:
            os.kill(int(replica), signal.SIGUSR1)  # a warning for somebody else
            os.kill(int(replica), signal.SIGTERM)
            assert agent.wait(DEADLINE_S) == 0
        until(lambda: not is_running(int(replica)), "the end of the replica's process")
        until(lambda: not is_running(endpoint.pid), "the end of its server")
        assert not path.exists()
    finally:
        if is_running(agent.pid):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait(DEADLINE_S)
