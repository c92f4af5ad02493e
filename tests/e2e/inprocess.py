"""vLLM engines inside test processes: forked from one process that has imported vLLM, which takes 12 s, once.

An engine here is vLLM's own LLM in the calling process, configured by ``rollout/vllm_args.py``, with a client that has
the methods of ``EngineClient``; what is left out is HTTP.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.names import registry as names
from megatron_fp8rl.precision.formats import engine_format
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import choose
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.trainer.compat import megatron_on_cpu

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the calling process
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "MEGATRON_FP8RL_FORMAT": "blockwise_pow2",
}
PRELOAD = (
    "transformers vllm.entrypoints.llm vllm.v1.worker.cpu_worker vllm.model_executor.models.qwen3_moe "
    "megatron_fp8rl.rollout.vllm_plugin.cpu.cpu_layers megatron_fp8rl.rollout.vllm_plugin.worker "
    "megatron_fp8rl.weight_sync.publish"
).split()
PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 40)]


def call(function: Callable[..., Any], *args: Any, timeout_s: float = 500.0) -> Any:
    """Result of a module-level function in a new process that may build engines."""
    return _host().call(function, args, timeout_s)


@functools.cache
def _host() -> Host:
    host = Host()
    atexit.register(host.close)
    return host


class Host:
    """A process that has imported vLLM and forks itself for every call. Not multiprocessing's fork server: there is one
    of those per program, and tests of the trainer use it."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", f"import inprocess; inprocess.serve({theirs.fileno()})"]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        self._pipe.send((function.__module__, function.__name__, args))
        if not self._pipe.poll(timeout_s):
            self.close()
            _host.cache_clear()
            raise TimeoutError(f"{function.__name__} took longer than {timeout_s:g} s")
        # Plain pickle: torch's own would hand over file descriptors that end with the forked process.
        result, failure = pickle.loads(self._pipe.recv_bytes())
        if failure is not None:
            raise AssertionError(f"in the engine's process:\n{failure}")
        return result

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def serve(descriptor: int) -> None:
    """The host's main function: import once, then one forked child per call."""
    torch.set_num_threads(1)
    megatron_on_cpu.install()  # before publish imports Megatron-Core
    for module in PRELOAD:
        importlib.import_module(module)
    pipe = Connection(descriptor)
    while True:
        module, name, args = pipe.recv()
        pid = os.fork()
        if pid == 0:
            try:
                answer = getattr(importlib.import_module(module), name)(*args), None
            except BaseException:
                answer = None, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            code = os.waitstatus_to_exitcode(status)
            pipe.send_bytes(pickle.dumps((None, f"the process ended with exit code {code}")))


def random_weights(cfg: RunConfig, seed: int) -> dict[str, Tensor]:
    """BF16 tensors of a Hugging Face checkpoint; norms are not 1, so that a missing one shows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = names.hf_tensors(cfg.model)
    return {
        name: (torch.randn(shape, generator=generator) * 0.05 + (1.0 if len(shape) == 1 else 0.0)).bfloat16()
        for name, shape in shapes.items()
    }


def write_checkpoint(cfg: RunConfig, tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """The FP8 checkpoint of ``tensors`` as other producers write it, from the layer table."""
    from safetensors.torch import save_file

    from megatron_fp8rl.rollout.vllm_args import quantization_config

    table = LayerTable.build(cfg.model, cfg.precision)
    content = {}
    for name, tensor in tensors.items():
        if table.rollout_format(name).is_quantized:
            content[name], content[f"{name}_scale_inv"] = quantize_weight(tensor, cfg.precision.scales)
        else:
            content[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    config = names.to_hf_config(cfg.model) | {"quantization_config": quantization_config(cfg.model, cfg.precision)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_engine(cfg: RunConfig, folder: Path, *, load_format: str, more: str = "", **limits: Any) -> Any:
    """An engine as in a fleet (``dummy``), or one that loads the checkpoint in ``folder`` (``auto``). ``more``: further
    arguments that it gets as in a fleet. ``limits``: arguments of vLLM."""
    from vllm import LLM

    from megatron_fp8rl.rollout.vllm_args import engine_arguments, engine_environment
    from megatron_fp8rl.rollout.vllm_plugin import plugin

    os.environ[plugin.FORMAT_VARIABLE] = engine_format(cfg.precision).name
    kernels = choose(cfg, Hardware("cpu"))
    passed = (plugin.DELTA_NET_VARIABLE, plugin.LATENT_VARIABLE, plugin.EXPERTS_VARIABLE)
    os.environ.update({k: v for k, v in engine_environment(cfg, kernels).items() if k in passed})
    plugin.register()
    arguments = engine_arguments(cfg, folder, kernels)
    shared = "hf-overrides worker-extension-cls weight-transfer-config dtype max-model-len kv-cache-dtype".split()
    shared += "tensor-parallel-size distributed-executor-backend enable-expert-parallel".split() + more.split()
    shared += "mamba-ssm-cache-dtype enable-lora max-loras max-lora-rank lora-target-modules".split()
    options = {key.replace("-", "_"): arguments[key] for key in shared if key in arguments}
    return LLM(
        model=str(folder),
        load_format=load_format,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=8,
        **{"kv_cache_memory_bytes": 16 << 20} | options | limits,
    )


def prompt_logprobs(llm: Any, adapter: Any = None) -> Tensor:
    """Log-probabilities of the tokens of PROMPTS, one after another, with an adapter that is loaded."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
    return torch.tensor([next(iter(p.values())).logprob for o in outputs for p in o.prompt_logprobs[1:]])


class Client:
    """The methods of EngineClient that the exporter calls; updates pass through JSON as they do over HTTP."""

    name = "rollout-0"

    def __init__(self, llm: Any):
        self.llm = llm
        self.paused = False

    async def proof_layers(self) -> list[dict[str, Any]]:
        return self.llm.collective_rpc("proof_layers")

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": dict(info)})

    async def pause(self, mode: str) -> None:
        assert mode == "keep" and not self.paused
        self.paused = True
        self.llm.reset_prefix_cache()

    async def start_update(self) -> None:
        assert self.paused
        self.llm.start_weight_update()

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        self.llm.update_weights({"update_info": json.loads(json.dumps(info))})

    async def finish_update(self, version: int) -> None:
        self.llm.finish_weight_update()

    async def set_kv_scales(self, scales: Mapping[int, Any]) -> list[dict[str, Any]]:
        carried = json.loads(json.dumps(scales))
        return json.loads(json.dumps(self.llm.collective_rpc("set_kv_scales", kwargs={"scales": carried})))

    async def load_adapter(self, path: str, version: int) -> list[dict[str, Any]]:
        assert self.paused
        return json.loads(
            json.dumps(self.llm.collective_rpc("load_adapter", kwargs={"path": path, "version": version}))
        )

    async def weight_digests(self, *, names: bool = True) -> list[dict[str, Any]]:
        return json.loads(json.dumps(self.llm.collective_rpc("weight_digests", kwargs={"names": names})))

    async def resume(self) -> None:
        self.paused = False


class InProcessFleet:
    def __init__(self, *engines: Any):
        self.clients = tuple(Client(llm) for llm in engines)

    def begin_update(self) -> tuple[Client, ...]:
        return self.clients

    def has_lost_replica(self, clients: Sequence[Client]) -> bool:
        return False

    def sync(self, coroutine: Coroutine[Any, Any, Any], deadline_s: float) -> Any:
        return asyncio.run(asyncio.wait_for(coroutine, deadline_s))


def set_weights(policy: SimpleNamespace, tensors: Mapping[str, Tensor]) -> None:
    """Write new values into the same parameters, as an optimizer step does."""
    for name, parameter in policy.named_tensors():
        parameter.copy_(names.from_hf(name, tensors.__getitem__, policy.cfg.model))


def free_engines() -> None:
    """Free memory for another engine, after the last reference to an engine is gone."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
