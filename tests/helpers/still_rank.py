"""A trainer rank of nothing but its watch: ``python still_rank.py FAULT SECONDS`` stands still on rank 1.

FAULT: ``regex`` blocks all threads of the interpreter in a user's loss, ``loop`` and ``read`` do not end there,
``library`` is one long call elsewhere, ``stop`` stops the process, ``nothing`` ends well after SECONDS, and ``work``
calls a user's loss again and again for SECONDS.
"""

import os
import re
import signal
import sys
import time
from dataclasses import replace

from megatron_fp8rl.algo.load_function import load_advantage
from megatron_fp8rl.config import AlgoConfig, EngineConfig
from megatron_fp8rl.runtime.stop import StopRequest

WAIT_S = 300.0  # more than a test takes


def stand_still(rewards):
    fault = sys.argv[1]
    if fault == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    while fault == "loop":
        pass
    if fault == "read":
        os.read(os.pipe()[0], 1)
    time.sleep(0.2)
    return rewards


def main() -> None:
    fault, seconds = sys.argv[1], float(sys.argv[2])
    sys.modules["still_rank"] = sys.modules["__main__"]
    stop = StopRequest.install()
    scale = float(os.environ.get("STILL_SCALE", "1"))
    with stop.watched(replace(EngineConfig(), deadline_scale=scale), WAIT_S if fault != "library" else 4.0):
        print("watched", flush=True)
        if os.environ.get("RANK", "1") == "1":
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            call = load_advantage(AlgoConfig(advantage="still_rank:stand_still"))
            end = time.monotonic() + seconds
            while fault not in ("library", "nothing") and time.monotonic() < end and not stop.is_asked():
                call([])
        time.sleep(seconds)


if __name__ == "__main__":
    main()
