"""A sound run, of which tests change single fields."""

from dataclasses import replace

from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.preflight.findings import apply
from megatron_fp8rl.preflight.rules import check
from tests.helpers import plans

DENSE = replace(plans.DENSE, vocab_size=512)
MOE = replace(DENSE, family="qwen3_moe", ffn_hidden_size=0, num_experts=8, experts_per_token=2, moe_ffn_hidden_size=256)


def make(model: ModelConfig = DENSE, **changes) -> RunConfig:
    """A sound run with single fields changed: ``make(parallel__tensor=2)``."""
    return apply(RunConfig(name="run", model=model), [(path.replace("__", "."), v) for path, v in changes.items()])


def fields_of(cfg: RunConfig, accelerator="cpu") -> list[str]:
    return [violation.field for violation in check(cfg, accelerator=accelerator)]
