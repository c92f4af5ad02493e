"""Scoring worker process: ``python -m megatron_fp8rl.envs.score_worker``.

Started and supervised by envs/scoring.py.

Reads one JSON object per line from standard input and answers each with one line:

    {"environments": {key: EnvironmentConfig}}          ->  {"ready": true} | {"error": text}
    {"prompt": Prompt, "text": str, "deadline_s": s}    ->  {"reward": number, "parts": {name: number}} | {"error": text}

Exits at the end of standard input. Imports neither torch nor transformers, so that startup takes only as long as its
environments need.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from megatron_fp8rl.config import EnvironmentConfig, RewardConfig
from megatron_fp8rl.envs.environment import Environment, build_environment
from megatron_fp8rl.envs.rewards.configured import RowRewards, as_number, reward_and_parts
from megatron_fp8rl.envs.source_kind import has_rows
from megatron_fp8rl.types import Prompt

_ALARM_MARGIN_S = 5.0


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until end of file."""
    environments: dict[str, Environment | RowRewards] = {}
    for line in requests:
        request = json.loads(line)
        try:
            if "environments" in request:
                for key, fields in request["environments"].items():
                    environments[key] = _built(fields)
                reply = {"ready": True}
            else:
                reward, parts = _score(environments, request)
                reply = {"reward": reward, "parts": parts}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _built(fields: dict[str, Any]) -> Environment | RowRewards:
    """The scorer of a source: of rows its rewards, without the rows."""
    cfg = EnvironmentConfig(**{**fields, "rewards": tuple(RewardConfig(**one) for one in fields.get("rewards", ()))})
    return RowRewards(cfg.rewards) if has_rows(cfg.dataset) else build_environment(cfg)


def _score(
    environments: dict[str, Environment | RowRewards], request: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    fields = request["prompt"]
    prompt = Prompt(**{**fields, "token_ids": tuple(fields["token_ids"])})
    # The pool kills a worker that misses the deadline. If the pool is gone by then, the kernel kills it, even while an
    # extension module holds the GIL and no Python code can run.
    signal.setitimer(signal.ITIMER_REAL, request["deadline_s"] + _ALARM_MARGIN_S)
    try:
        value = environments[prompt.environment].score(prompt, request["text"])
        if isinstance(value, Mapping):
            return reward_and_parts(value, prompt.environment)
        return as_number(value, prompt.environment), {}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the trainer, which closes the pool
    # A scorer may print: reserve the reply channel for replies and redirect its output to standard error.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
