"""Host memory for the state that a colocated trainer offloads."""

import torch

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.preflight.memory import GPUS, copied_bytes, gpu_in
from megatron_fp8rl.preflight.trainer_memory import worst_rank
from megatron_fp8rl.trainer.optimizer.offload import HostMemory


def host_memory(cfg: RunConfig, device: torch.device) -> HostMemory | None:
    """Host memory for what this rank will offload, allocated while engines start; None if nothing is."""
    if cfg.engine.placement != "colocated" or cfg.sampling.replay is not None or not cfg.optim.offload:
        return None
    gpu = gpu_in(torch.cuda.get_device_name(device) if device.type == "cuda" else "") or GPUS["h200"]
    sizes = copied_bytes(cfg, worst_rank(cfg, gpu, gpu.memory_bytes))
    # More than is counted, for the alignment of buffers.
    return HostMemory({part: num_bytes + num_bytes // 100 + (16 << 20) for part, num_bytes in sizes.items()}, device)
