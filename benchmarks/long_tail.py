"""Long-tailed lengths: groups in prompt order or in order of completion, with a simulated engine and trainer.

    python -m benchmarks.long_tail [--steps 100]

The rollout stream is the library's. A clock that jumps to the next event simulates time, so the figures do not depend
on the machine. The engine decodes ``SLOTS`` sequences at a time, one token of each in TOKEN_S. Lengths are lognormal, 1
% at the limit; a tenth of the answers waits for a tool; a step of the trainer takes TRAINER_S. Prints a row for each
arm: trained tokens per simulated second, idle shares of engine and trainer, stale tokens, length bias, and mean
staleness.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import selectors
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_fp8rl.algo.samples import version_runs
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.rollout.completions import Sampling
from megatron_fp8rl.rollout.stream import RolloutStream
from megatron_fp8rl.types import Completion, Prompt
from model_configs.tiny import tiny_qwen3_moe

SLOTS, TOKEN_S = 256, 0.02  # sequences at a time, and simulated seconds per token of each
PIECE = 400  # tokens between looks at the version
MEDIAN, SIGMA, LIMIT = 800, 1.0, 8192  # tokens of an answer
TOOL_S = 20.0  # simulated seconds that a tenth of the answers waits for a tool
PROMPTS, COMPLETIONS, TRAINER_S = 16, 16, 30.0
# (max_staleness, window_groups) of each arm
ARMS = {f"in order, {k} steps ahead": (k, 0) for k in (0, 1, 4, 8)}
ARMS |= {f"window of {n}, at most {k} old": (k, n) for k, n in ((1, 32), (4, 48), (4, 80), (8, 64), (8, 80), (8, 144))}


class Engine:
    """Decodes ``SLOTS`` sequences at a time; counts the slots in use."""

    def __init__(self, seed: int) -> None:
        self.version = 0
        self.num_running = 0
        self.busy_s = 0.0  # slot seconds, simulated
        self.sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=1, stop_token_ids=(), stop_strings=())
        self._slots = asyncio.Semaphore(SLOTS)
        self._seed = seed

    async def generate(self, prompt: Any, n: int, seed: int, *, sampling: Any = None) -> list[Completion]:
        self.num_running += n
        try:
            return await asyncio.gather(*(self._sample(seed + i) for i in range(n)))
        finally:
            self.num_running -= n

    async def _sample(self, seed: int) -> Completion:
        rng = random.Random(f"{self._seed}/{seed}")
        length = LIMIT if rng.random() < 0.01 else min(LIMIT, int(rng.lognormvariate(math.log(MEDIAN), SIGMA)) + 1)
        async with self._slots:
            spans, done = [], 0
            while done < length:  # in pieces, because each token has the version at its sampling
                piece = min(PIECE, length - done)
                if not spans or spans[-1][1] != self.version:
                    spans.append((done, self.version))
                started_s = _CLOCK.time()
                try:
                    await asyncio.sleep(piece * TOKEN_S)
                finally:
                    self.busy_s += _CLOCK.time() - started_s
                done += piece
        if rng.random() < 0.1:
            await asyncio.sleep(TOOL_S)
        ids = (0,) * length
        return Completion(
            token_ids=ids,
            rollout_logprobs=(0.0,) * length,
            finish_reason="length" if length == LIMIT else "stop",
            min_version=spans[0][1],
            max_version=spans[-1][1],
            version_spans=tuple(spans),
        )


class _Jumping(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("no timer is left")
        _Jumping.now_s += timeout
        return super().select(0)


class _Clock(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return _Jumping.now_s


_CLOCK = _Clock(_Jumping())


class _Submitted:
    def __init__(self, coroutine: Any) -> None:
        self.task = _CLOCK.create_task(coroutine)
        self.done, self.cancel = self.task.done, self.task.cancel
        self.cancelled, self.exception = self.task.cancelled, self.task.exception

    def result(self, timeout: float | None = None) -> Any:
        if not self.task.done():
            _CLOCK.run_until_complete(asyncio.wait({self.task}))
        return self.task.result()

    def add_done_callback(self, callback: Any) -> None:
        self.task.add_done_callback(callback)


class _Fleet:
    wants_publication = False

    def __init__(self, seed: int) -> None:
        self.clients = (Engine(seed),)

    def submit(self, coroutine: Any) -> _Submitted:
        return _Submitted(coroutine)

    def wait_for_any(self, submitted: Sequence[_Submitted], timeout_s: float) -> None:
        tasks = {future.task for future in submitted}
        _CLOCK.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for task in asyncio.all_tasks(_CLOCK):
            task.cancel()
        _CLOCK.run_until_complete(asyncio.sleep(0))


class _Prompts:
    position = 0
    num_dropped = 0

    def next_prompts(self, count: int) -> list[Prompt]:
        first, self.position = self.position, self.position + count
        numbers = range(first, first + count)
        return [Prompt(prompt_id=f"p/{i}", environment="p", token_ids=(1,), text="", answer="") for i in numbers]


class _Scorer:
    async def score(self, prompt: Prompt, text: str) -> Score:
        return Score(0.0, "scored")


class _Rank:
    rank = 0

    def broadcast_object(self, value: Any) -> Any:
        return value


def measure(max_staleness: int, window_groups: int, num_steps: int, seed: int) -> dict[str, float]:
    """Figures of an arm. The first fifth of the steps does not count."""
    base = tiny_qwen3_moe()
    sampling = replace(
        base.sampling,
        prompts_per_step=PROMPTS,
        completions_per_prompt=COMPLETIONS,
        max_staleness=max_staleness,
        window_groups=window_groups,
    )
    cfg: RunConfig = replace(base, num_steps=num_steps + max_staleness + 2, sampling=sampling)
    fleet = _Fleet(seed)
    (engine,) = fleet.clients
    stream = RolloutStream(cfg, fleet, _Prompts(), _Scorer(), _Rank())
    skipped, begun_s, tokens, waited_s, staleness = num_steps // 5, 0.0, 0, 0.0, []
    metrics: dict[str, float] = {}
    stale: list[float] = []
    for step in range(num_steps):
        if step == skipped:
            begun_s, tokens, waited_s, engine.busy_s = _CLOCK.time(), 0, 0.0, 0.0
        asked_s = _CLOCK.time()
        groups = stream.next_groups()
        waited_s += _CLOCK.time() - asked_s
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        completions = [completion for rollout in rollouts for completion in rollout.completions]
        for version, length in (run for completion in completions for run in version_runs(completion)):
            if stream.version - version <= max_staleness:  # other tokens are not trained
                tokens += length
                staleness += [stream.version - version] * length
        _CLOCK.run_until_complete(asyncio.sleep(TRAINER_S))
        engine.version = step + 1
        stream.after_update(step + 1)
        metrics = stream.take_metrics()
        stale.append(metrics.get("rollout/window_stale_tokens/mean", 0.0))
    seconds = _CLOCK.time() - begun_s
    fleet.close()
    return {
        "tokens_per_s": tokens / seconds,
        "idle_engine": 1 - engine.busy_s / (SLOTS * seconds),
        "idle_trainer": waited_s / seconds,
        "stale_tokens": statistics.fmean(stale),
        "length_bias": metrics.get("rollout/window_length_bias/mean", 1.0),
        "staleness": statistics.fmean(staleness),
    }


_SHOWN = {
    "tokens_per_s": ",.0f",
    "idle_engine": ".1%",
    "idle_trainer": ".1%",
    "stale_tokens": ".1%",
    "length_bias": ".3f",
    "staleness": ".2f",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run only arms whose name contains this")
    options = parser.parse_args()
    header = ("arm", "tokens/s", "engine idle", "trainer idle", "too old", "length bias", "staleness")
    print(" | ".join(header))
    for name, (max_staleness, window_groups) in ARMS.items():
        if options.only not in name:
            continue
        figures = measure(max_staleness, window_groups, options.steps, options.seed)
        shown = (f"{figures[key]:{form}}" for key, form in _SHOWN.items())
        print(" | ".join((name, *shown)), flush=True)
        print(json.dumps({"arm": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
