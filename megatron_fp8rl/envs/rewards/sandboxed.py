"""Run a user's reward function in a persistent sandbox process that reads only the function's folder."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_fp8rl.config import RewardConfig
from megatron_fp8rl.envs import sandbox
from megatron_fp8rl.envs.rewards.functions import RewardError, parse
from megatron_fp8rl.types import Prompt

_PACKAGE = Path(__file__).resolve().parents[2]
# Imports the package by its path: the environment of a sandbox is empty.
_START = (
    f"import sys; sys.path.insert(0, {str(_PACKAGE.parent)!r}); "
    "from megatron_fp8rl.envs.score_worker import main; main()"
)
_LIMITS = sandbox.Limits(memory_bytes=4 << 30, num_processes=64, cpu_s=10**6)


class SandboxedReward:
    """Calls the function in a sandbox and restarts the sandbox if it ended."""

    def __init__(self, cfg: RewardConfig):
        """Raises SandboxError, or RewardError if the function cannot be loaded."""
        sandbox.require()
        path, name = parse(cfg.function)
        # The caller applies the weight.
        self._cfg = dataclasses.replace(cfg, function=f"{path.resolve()}:{name}", sandbox=False, weight=1.0)
        self._process = self._started()

    def __call__(self, prompt: Prompt, completion: str) -> Any:
        """Raises RuntimeError with what the function raised, or how its process ended."""
        if self._process.poll() is not None:
            self._process = self._started()
        prompts = [prompt.fields() | {"environment": "rows"}]
        reply = self._ask(self._process, {"prompts": prompts, "texts": [completion], "deadline_s": 10**6})
        if "error" in reply:
            raise RuntimeError(reply["error"])
        (score,) = reply["scores"]
        return {**score["parts"], "reward": score["reward"]}

    def _started(self) -> subprocess.Popen:
        folder = str(parse(self._cfg.function)[0].parent)
        argv = [sys.executable, "-I", "-c", _START]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = sandbox.command(argv, _LIMITS, readable=(str(_PACKAGE), folder))
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env={})
        source = {"dataset": "rows.jsonl", "rewards": [dataclasses.asdict(self._cfg)]}
        reply = self._ask(process, {"environments": {"rows": source}})
        if "error" in reply:
            raise RewardError(f"in its sandbox {reply['error']}")
        return process

    def _ask(self, process: subprocess.Popen, request: dict[str, Any]) -> dict[str, Any]:
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        process.kill()
        status = process.wait()
        self._errors.seek(0)
        tail = self._errors.read()[-300:].decode(errors="replace")
        return {"error": f"its sandbox ended with status {status}: {tail}"}
