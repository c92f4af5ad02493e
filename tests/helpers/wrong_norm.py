"""A configuration whose import makes the trainer's norms wrong, by one part in 64; engines do not import it."""

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.kernels import float64
from model_configs.tiny import tiny_qwen3_moe

_rms_norm = float64.rms_norm
float64.rms_norm = lambda x, weight_H, eps: _rms_norm(x, weight_H, eps) * (1 + 2.0**-6)


def run() -> RunConfig:
    return tiny_qwen3_moe()
