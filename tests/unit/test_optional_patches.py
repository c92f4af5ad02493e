"""Without its optional patches, the library takes stock code; what stock code cannot give is refused by name."""

from dataclasses import replace

import pytest

from megatron_fp8rl import upstream
from megatron_fp8rl.kernels import compat
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import choose, refusals
from megatron_fp8rl.rollout.vllm_args import engine_arguments
from model_configs.qwen3 import grpo_qwen3_30b_a3b
from tests.helpers.family_configs import GLM
from tests.helpers.fields import set_fields
from tests.helpers.ranges import leave_range
from tests.unit.precision.test_kernel_refusals import EXACT

CPU, HOPPER = Hardware("cpu"), Hardware("hopper")
SCHEDULERS = "megatron_fp8rl.rollout.vllm_plugin.patches_scheduler"


@pytest.fixture
def leave(monkeypatch):
    monkeypatch.delenv(upstream.SKIP, raising=False)
    monkeypatch.setenv(upstream.GO_ON, "1")  # before a test leaves a range, the installed versions do not matter
    yield lambda *packages: leave_range(*packages, set_attribute=monkeypatch.setattr)
    monkeypatch.undo()
    upstream._applies.cache_clear()
    compat.vllm_topk_softmax.cache_clear()


def with_fp8_cache(**fields):
    cfg = grpo_qwen3_30b_a3b()
    return set_fields(cfg, kv_cache_dtype="fp8", **fields)


def test_an_fp8_cache_is_read_by_vllms_attention_and_the_trainer_follows(leave):
    cfg = with_fp8_cache(record_routed_experts=False)
    before = choose(cfg, HOPPER)
    assert before.engine.attention == "FP8_CACHE" and not before.engine.rounds_queries
    leave("vllm")
    after = choose(cfg, HOPPER)
    assert after.engine.attention == "vllm" and after.engine.rounds_queries and not refusals(cfg, HOPPER)
    assert "attention-backend" not in engine_arguments(cfg, "model", after)
    chosen = replace(cfg, precision=replace(cfg.precision, kernels={"engine_attention": "FP8_CACHE"}))
    (refused,) = refusals(chosen, HOPPER)
    assert "--precision.kernels.engine_attention" in str(refused) and "FP8CacheAttention" in str(refused)


def test_engines_have_vllms_scheduler(leave, monkeypatch):
    cfg = with_fp8_cache(record_routed_experts=False)

    def scheduler(hardware):
        return engine_arguments(cfg, "model", choose(cfg, hardware)).get("scheduler-cls")

    assert [scheduler(CPU), scheduler(HOPPER)] == [f"{SCHEDULERS}.BufferingScheduler", f"{SCHEDULERS}.DecodeScheduler"]
    with_drafts = replace(cfg, engine=replace(cfg.engine, speculation="ngram"))
    on_gpu = engine_arguments(with_drafts, "model", choose(with_drafts, HOPPER))
    assert on_gpu["scheduler-cls"] == f"{SCHEDULERS}.BufferingScheduler"
    assert on_gpu["no-async-scheduling"] is True
    assert on_gpu["speculative-config"]["num_speculative_tokens"] == 4
    monkeypatch.setenv(upstream.SKIP, "DecodeScheduler")
    assert scheduler(HOPPER) == f"{SCHEDULERS}.BufferingAsyncScheduler"
    monkeypatch.delenv(upstream.SKIP)
    leave("vllm")
    assert [scheduler(CPU), scheduler(HOPPER)] == [None, None]


def test_exact_runs_and_invariant_engines_name_the_patches_that_they_need(leave):
    cfg = grpo_qwen3_30b_a3b()
    invariant = replace(cfg, engine=replace(cfg.engine, batch_invariant=True))
    assert not refusals(EXACT, HOPPER) and not refusals(invariant, HOPPER)
    sigmoid = replace(EXACT, model=replace(GLM, hidden_size=256, head_dim=128, vocab_size=512))
    assert not refusals(sigmoid, HOPPER)
    leave("vllm")
    assert "route_as_the_trainer" in "\n".join(map(str, refusals(sigmoid, HOPPER)))
    texts = "\n".join(map(str, refusals(EXACT, HOPPER)))
    assert "vllm_topk_softmax" in texts and "not tested with the installed versions" in texts
    texts = "\n".join(map(str, refusals(invariant, HOPPER)))
    assert "engine.batch_invariant" in texts and "fuse_norms" in texts
    assert compat.vllm_topk_softmax() is None
    assert not refusals(EXACT, CPU), "a CPU needs none of them"


def test_tokens_travel_by_megatrons_dispatcher(leave):
    cfg = grpo_qwen3_30b_a3b()
    cfg = replace(cfg, parallel=replace(cfg.parallel, expert=2), precision=replace(cfg.precision, exact=False))
    assert choose(cfg, HOPPER).trainer.dispatch == "gather"
    leave("megatron-core")
    assert choose(cfg, HOPPER).trainer.dispatch == "alltoall"
    (refused,) = refusals(replace(cfg, parallel=replace(cfg.parallel, dispatch="gather")), HOPPER)
    assert "GatherDispatcher" in str(refused)


def test_an_optimizer_quantizes_all_masters_at_once(leave):
    from megatron.core.optimizer import distrib_optimizer

    from megatron_fp8rl.trainer.optimizer.fp8_params import limit_master_copies

    theirs = distrib_optimizer.quantize_param_shard
    with limit_master_copies():
        assert distrib_optimizer.quantize_param_shard is not theirs
    leave("megatron-core")
    with limit_master_copies():
        assert distrib_optimizer.quantize_param_shard is theirs
