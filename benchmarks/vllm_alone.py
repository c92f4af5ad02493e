"""The baseline of ``rollout_speed``: vLLM by itself, through the ``LLM`` class of its offline API.

    python -m benchmarks.rollout_speed --engine vllm --model qwen3_8b --precision bf16 fp8 --shape long

The same model, precision, prompts and memory; what a run asks for besides is absent: no server, no seeds, no text, and
log-probabilities before temperature and top-p. Kernels are those that vLLM takes without DeepGEMM, which would compile
for minutes before it starts. The engine runs in a process that ends with the measurement.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import failure_in, run_logged

_RESULT = "ALONE "
_WARM_TOKENS = 16


def measure(arguments: dict[str, Any], shapes: dict[str, Sequence[int]], log: Path, limit_s: float) -> dict[str, Any]:
    """Seconds by shape (tokens in, tokens out, sequences) and until the engine had started, ``start_s``.

    ``arguments`` go to ``LLM``. Raises RuntimeError with the log's first error when the engine fails or takes too long.
    """
    command = [sys.executable, "-m", "benchmarks.vllm_alone", json.dumps({"arguments": arguments, "shapes": shapes})]
    if not run_logged(command, log, limit_s, VLLM_USE_DEEP_GEMM="0", VLLM_USE_FLASHINFER_SAMPLER="0"):
        raise RuntimeError(failure_in(log, limit_s))
    (line,) = [line for line in log.read_text().splitlines() if line.startswith(_RESULT)]
    return json.loads(line.removeprefix(_RESULT))


def main() -> None:
    asked = json.loads(sys.argv[1])
    started = time.perf_counter()
    from vllm import LLM, SamplingParams

    engine = LLM(**asked["arguments"])
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1), "seconds": {}}
    draw = random.Random(0)
    for name, (prompt_tokens, completion_tokens, num_sequences) in asked["shapes"].items():

        def sample(max_tokens: int, length: int = prompt_tokens, count: int = num_sequences) -> float:
            prompts = [{"prompt_token_ids": [draw.randrange(100, 30_000) for _ in range(length)]} for _ in range(count)]
            sampling = SamplingParams(
                max_tokens=max_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0
            )
            began = time.perf_counter()
            answers = engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - began
            if any(len(answer.outputs[0].token_ids) != max_tokens for answer in answers):
                raise RuntimeError(f"{name}: a completion has not {max_tokens} tokens")
            return seconds

        sample(min(_WARM_TOKENS, completion_tokens))
        found["seconds"][name] = sample(completion_tokens)
    print(f"{_RESULT}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
