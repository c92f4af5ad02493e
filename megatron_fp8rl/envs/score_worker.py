"""Scoring worker process: ``python -m megatron_fp8rl.envs.score_worker``, supervised by envs/scorer_process.py.

Reads one JSON object per line from standard input and answers each with one line:

    {"environments": {key: EnvironmentConfig}, "memory_bytes": n}   ->  {"ready": true} | {"error": text}
    {"prompts": [Prompt], "texts": [str], "deadline_s": s}
                                 ->  {"scores": [{"reward": number, "parts": {name: number}}]} | {"error": text}

All prompts of a request belong to one environment. Every reply has the "number" of its request, "address_bytes" and
"is_exhausted". The last says whether memory, threads or files that earlier scores have kept may be the cause of the
error. A forked child of a scorer exits without a reply. Imports neither torch nor transformers, to start fast.
"""

import json
import os
import signal
import sys
import traceback
from typing import Any, TextIO

from megatron_fp8rl.config import EnvironmentConfig, RewardConfig
from megatron_fp8rl.envs.environment import Environment, build_environment
from megatron_fp8rl.envs.rewards.configured import RowRewards, reward_and_parts
from megatron_fp8rl.envs.source_kind import has_rows
from megatron_fp8rl.envs.worker_memory import RESERVE_BYTES, AddressSpace, is_exhausted
from megatron_fp8rl.types import Prompt

_ALARM_MARGIN_S = 5.0


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until end of file."""
    environments: dict[str, Environment | RowRewards] = {}
    pid = os.getpid()
    reserve: bytearray | None = bytearray(RESERVE_BYTES)
    memory = AddressSpace()
    for line in requests:
        request = json.loads(line)
        try:
            if "environments" in request:
                memory.limit(request.get("memory_bytes"))
                for key, fields in request["environments"].items():
                    environments[key] = _built(fields)
                reply = {"ready": True}
            else:
                reply = {"scores": _scores(environments, request)}
        except Exception as error:
            reserve = None if (has_used_up := is_exhausted(error)) else reserve
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}", "is_exhausted": has_used_up}
        if os.getpid() != pid:
            os._exit(0)
        reply |= {"number": request.get("number"), "address_bytes": memory.num_bytes()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _built(fields: dict[str, Any]) -> Environment | RowRewards:
    """The scorer of a source; for rows, only their rewards."""
    rewards = tuple(RewardConfig(**reward) for reward in fields.get("rewards", ()))
    cfg = EnvironmentConfig(**{**fields, "rewards": rewards})
    return RowRewards(cfg.rewards) if has_rows(cfg.dataset) else build_environment(cfg)


def _scores(environments: dict[str, Environment | RowRewards], request: dict[str, Any]) -> list[dict[str, Any]]:
    prompts = [Prompt(**{**fields, "token_ids": tuple(fields["token_ids"])}) for fields in request["prompts"]]
    name = prompts[0].environment
    scorer = environments[name]
    # The pool kills a worker that misses the deadline. If the pool is gone, the kernel's timer kills the worker, even
    # while an extension module holds the GIL.
    signal.setitimer(signal.ITIMER_REAL, request["deadline_s"] + _ALARM_MARGIN_S)
    try:
        if isinstance(scorer, RowRewards):
            values = scorer.score_many(prompts, request["texts"])
        else:
            values = [scorer.score(*pair) for pair in zip(prompts, request["texts"], strict=True)]
        return [dict(zip(("reward", "parts"), reward_and_parts(value, name), strict=True)) for value in values]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the trainer closes the pool
    # Scorers may print: reserve standard output for replies and redirect their output to standard error.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
