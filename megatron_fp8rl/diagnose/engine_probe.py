"""Requests a probe from an engine, whose worker (``rollout/vllm_plugin/probe.py``) writes it to a file on its host."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8rl.rollout.client import EngineClient


async def record_prefill(client: EngineClient, prompt_token_ids: Sequence[int], path: Path) -> dict[str, Tensor]:
    """The engine's results for the prompt, by operation name; ``path`` must be on the engine's host. Waits for running
    requests; nothing else may be requested meanwhile. Raises EngineError with the worker's reason."""
    await client.pause("wait")
    await client.resume()
    await client.reset_cache()
    await client.collective_rpc("start_probe", num_tokens=len(prompt_token_ids))
    sampling = replace(client.sampling, max_tokens=1, stop_strings=())
    await client.generate(prompt_token_ids, 1, 0, sampling=sampling)
    await client.collective_rpc("finish_probe", path=str(path))
    return load_probe(path)


def load_probe(path: Path) -> dict[str, Tensor]:
    """The tensors written by ``finish_probe``."""
    from safetensors.torch import load_file

    with torch.inference_mode(False):
        return load_file(path)
