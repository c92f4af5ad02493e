"""The load of many engines on trainer rank 0: CPU time, memory and latency of a step, with simulated engines.

    python -m benchmarks.driver --engines 8 64 512 --sequences 16384 --tokens 512

Simulated engines speak the real protocol on loopback and run in separate processes. They answer with random tokens;
lengths and delays have a long-tailed distribution. The client, the metrics, the samples, their division among
``--data-ranks`` data-parallel ranks and the messages are the library's. Scores are random, and messages are not sent.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fp8rl.algo.load_function import load_advantage
from megatron_fp8rl.algo.samples import to_samples
from megatron_fp8rl.data.packing import divide
from megatron_fp8rl.net import open_files
from megatron_fp8rl.observe.groups import group_metrics
from megatron_fp8rl.observe.observer import Observer, StepLog
from megatron_fp8rl.rollout.client import EngineClient
from megatron_fp8rl.rollout.completions import GENERATE_PATH, Answer, Sampling, Segment, write_answer
from megatron_fp8rl.rollout.replicas import Replica
from megatron_fp8rl.trainer.messages import pack, unpack
from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup, single_turn
from model_configs.tiny import tiny_qwen3

_PER_PROCESS = 64  # engines per process
_PER_PROMPT = 16
_LONGEST = 8  # longest completion, in means
_BYTES_A_TOKEN = 4  # bytes of text, typical of English
_WORDS = "and so it is " * (1 << 18)


def draw_length(draw: random.Random, mean: float) -> int:
    """An exponential length, cut at :data:`_LONGEST` means."""
    return max(1, min(int(draw.expovariate(1 / mean)), int(_LONGEST * mean)))


def simulated_engine(sockets: Sequence[socket.socket], mean_tokens: float, mean_delay_s: float, life_s: float) -> None:
    from aiohttp import web

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        sampling, draw = body["sampling_params"], random.Random(body["sampling_params"]["seed"])
        lengths = [min(draw_length(draw, mean_tokens), sampling["max_tokens"]) for _ in range(sampling["n"])]
        numbers = np.random.default_rng(sampling["seed"])
        await asyncio.sleep(mean_delay_s * max(lengths) / mean_tokens)
        segments = [
            Segment(
                token_ids=numbers.integers(0, 150_000, n, np.int32),
                rollout_logprobs=-numbers.random(n, np.float32),
                finish_reason="length",
                routed_experts=None,
                text=_WORDS[: _BYTES_A_TOKEN * n],
            )
            for n in lengths
        ]
        return web.Response(body=write_answer(Answer(segments=segments)))

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post(GENERATE_PATH, generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for server in sockets:
            await web.SockSite(runner, server).start()
        await asyncio.sleep(life_s)

    asyncio.run(serve())


def _memory_gb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 1e9


async def drive(urls: Sequence[str], sequences: int, mean_tokens: float) -> tuple[list[Completion], dict[str, float]]:
    """Ask all engines at once, as a step does: (completions, costs)."""
    loop = asyncio.get_running_loop()
    sampling = Sampling(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=int(_LONGEST * mean_tokens), stop_token_ids=(), stop_strings=()
    )
    clients = [
        EngineClient(
            Replica(
                name=f"rollout-{i}", url=url, log_path=Path(os.devnull), process_group=0, exited=loop.create_future()
            ),
            sampling=sampling,
            decode=lambda ids: " ".join(map(str, ids[:8])),
            request_deadline_s=300.0,
            update_deadline_s=60.0,
        )
        for i, url in enumerate(urls)
    ]
    prompt = list(range(512))
    late: list[float] = []

    async def watch() -> None:  # how long a ready task waits for the interpreter
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            late.append(time.perf_counter() - before - 0.01)

    watching = asyncio.ensure_future(watch())
    before, cpu, started = _memory_gb(), time.process_time(), time.perf_counter()
    asked = (
        clients[i % len(clients)].generate(prompt, _PER_PROMPT, _PER_PROMPT * i)
        for i in range(sequences // _PER_PROMPT)
    )
    completions = [completion for group in await asyncio.gather(*asked) for completion in group]
    took = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu, "gb": _memory_gb() - before}
    watching.cancel()
    for client in clients:
        await client.close()
    return completions, took | {"latency_mean_s": sum(late) / len(late), "latency_max_s": max(late)}


def divided(completions: Sequence[Completion], mean_tokens: float, data_ranks: int) -> dict[str, float]:
    """Costs of making samples from the completions and messages for each data-parallel rank."""
    cfg = tiny_qwen3()
    draw, groups = random.Random(1), []
    for first in range(0, len(completions), _PER_PROMPT):
        prompt = Prompt(prompt_id=f"p/{first}", environment="p", token_ids=tuple(range(512)), text="", answer="")
        rollouts = [
            Rollout(
                prompt=prompt, index=i, branches=single_turn(prompt, completion), reward=draw.random(), status="scored"
            )
            for i, completion in enumerate(completions[first : first + _PER_PROMPT])
        ]
        groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)))
    took, log = {}, StepLog(Observer(cfg, is_writer=False), 1)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        cpu = time.process_time()
        result = call()
        took[name] = time.process_time() - cpu
        return result

    before = _memory_gb()
    gc.disable()  # as in a run
    samples = timed("samples_s", lambda: to_samples(groups, load_advantage(cfg.algo), cfg.algo, cfg.sampling, 0))
    timed("metrics_s", lambda: (log.update(group_metrics(groups)), log.samples(samples)))
    longest = 1024 * (1 + int((512 + _LONGEST * mean_tokens) // 1024))
    shares = timed("divide_s", lambda: divide(samples, data_size=data_ranks, max_tokens=longest, alignment=16))
    took["samples_gb"] = _memory_gb() - before
    sizes = timed("messages_s", lambda: [sum(part.numel() for part in pack(share)) for share in shares])
    message = pack(shares[0])
    share = timed("read_share_s", lambda: unpack(message))
    gc.enable()
    return took | {"sent_gb": sum(sizes) / 1e9, "share_gb": sum(part.numel() for part in pack(share)) / 1e9}


def measure(engines: int, sequences: int, mean_tokens: float, mean_delay_s: float, data_ranks: int) -> dict[str, Any]:
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(engines)]
    urls = [f"http://127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    context = multiprocessing.get_context("fork")
    parts = [sockets[i : i + _PER_PROCESS] for i in range(0, engines, _PER_PROCESS)]
    processes = [
        context.Process(target=simulated_engine, args=(p, mean_tokens, mean_delay_s, 300.0), daemon=True) for p in parts
    ]
    try:
        for process in processes:
            process.start()
        time.sleep(1.0)
        completions, took = asyncio.run(drive(urls, sequences, mean_tokens))
        tokens = sum(len(completion.token_ids) for completion in completions)
        took |= divided(completions, mean_tokens, data_ranks)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for server in sockets:
            server.close()
    return {"engines": engines, "completions": len(completions), "tokens": tokens, **took}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--tokens", type=float, default=512.0)
    parser.add_argument("--data-ranks", type=int, default=16, help="data-parallel ranks of the trainer")
    parser.add_argument("--delay-s", type=float, default=1.0, help="delay of an answer of mean length")
    options = parser.parse_args()
    if options.sequences * options.tokens > 4e7 or max(options.engines) > 1024:
        parser.error("the limits are 40 million for --sequences x --tokens, and 1024 for --engines")
    open_files.raise_limit()
    for engines in options.engines:
        row = measure(engines, options.sequences, options.tokens, options.delay_s, options.data_ranks)
        print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
