"""Programs that a cluster starts with few open files have as many requests in flight as the system allows."""

import subprocess
import sys

PROGRAM = """
import resource, socket
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
assert most > 200
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
from megatron_fp8rl.rollout.agents.requests import Requests
Requests(None)
print(len([socket.socket() for _ in range(200)]), resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))
"""


def test_whoever_asks_engines_may_open_what_the_system_allows():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout == "200 True\n", done.stderr
