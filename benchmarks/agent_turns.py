"""Sessions of eight turns on a GPU: difference between trainer and engine by turn, and where the time goes.

    python -m benchmarks.agent_turns                                          # talk_qwen3_1_7b on this machine's GPU
    python -m benchmarks.agent_turns --config tiny_calculator --fields --model.random True --data.sft_steps 0 ...

Trains a few steps of a configuration with an agent, and prints for its last step: d = old - rollout by turn, prompt tokens
that the prefix cache held, and the seconds of a session in the model, in tools and in the queue.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_SHOWN = ("mismatch/abs_logprob_diff", "session/", "rollout/prefill", "rollout/tokens_per_s", "rollout/length/mean", "time/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="talk_qwen3_1_7b")
    parser.add_argument("--deadline-s", type=float, default=560.0)
    parser.add_argument("--fields", nargs=argparse.REMAINDER, default=[], help="fields of the configuration, last")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megatron_fp8rl", "train", options.config, "--output_dir", f"{folder}/{{name}}"]
        command += ["--observe.display", "plain", *options.fields]
        done = subprocess.run(command, timeout=options.deadline_s)
        (records,) = Path(folder).glob("*/metrics.jsonl")
        last = json.loads(records.read_text().splitlines()[-1])
    for key in sorted(last):
        if key.startswith(_SHOWN):
            print(f"{key} | {last[key]:.6g}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
