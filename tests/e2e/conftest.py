"""Engines for end-to-end tests. Starting one takes 10 to 40 s, so that the whole session shares it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_weights import RECORDS_EXPERTS, write_hf_dir

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.rollout.fleet import Fleet
from model_configs.tiny import tiny_qwen3_moe


@pytest.fixture(scope="session")
def engine_cfg() -> RunConfig:
    """Layer 0 in FP8, layer 1 in BF16: both kinds of linear and of expert in one engine."""
    cfg = tiny_qwen3_moe()
    return replace(
        cfg,
        name="engine_test",
        model=replace(cfg.model, max_position_embeddings=1024),
        precision=replace(cfg.precision, bf16_last_layers=1),
        sampling=replace(cfg.sampling, max_prompt_tokens=64, max_completion_tokens=512),
        engine=replace(cfg.engine, record_routed_experts=RECORDS_EXPERTS, deadline_scale=0.5),
    )


@pytest.fixture(scope="session")
def fleet(engine_cfg: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One running engine with dummy weights. Tests that need weights publish them."""
    hf_dir = write_hf_dir(engine_cfg, tmp_path_factory.mktemp("hf"))
    with Fleet.start(engine_cfg, hf_dir, tmp_path_factory.mktemp("run")) as running:
        yield running
