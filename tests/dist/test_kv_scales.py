"""Largest queries, keys and values of a batch: those of transformers' model, in every layout, and without padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_fp8rl.names import registry
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.trainer import kv_scales
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Prompt, Sample, Segment
from tests.helpers.dist import run_ranks
from tests.helpers.measured_attention import measure_attention
from tests.helpers.training import DENSE, make_batch, make_loss, make_samples, run_config
from tests.tolerances import LAYOUT_FLOAT32, TRANSFORMERS_FLOAT32

LAYOUTS = {
    "small_microbatches": dict(max_tokens=32),
    "tp2": dict(world_size=2, tensor=2),
    "pp2": dict(world_size=2, pipeline=2),
    "pp2_vpp2": dict(world_size=2, pipeline=2, virtual_stages=2),
    "cp2": dict(world_size=2, context=2),
    "dp2": dict(world_size=2),
}


def _samples() -> list[Sample]:
    """No sample contains token 0, which is padding."""

    def without_it(segment: Segment) -> Segment:
        return segment._replace(token_ids=TokenArray(np.maximum(segment.token_ids, 1)))

    return [replace(s, segments=tuple(map(without_it, s.segments))) for s in make_samples()]


def _prompts() -> list[Prompt]:
    return [Prompt(prompt_id=s.name, environment="test", token_ids=s.token_ids, text="", answer="") for s in _samples()]


def _save_reference(folder: str) -> torch.Tensor:
    """Save a checkpoint whose padding has far larger values than tokens; [layers, 3] by transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**registry.to_hf_config(DENSE))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    amax = measure_attention(model, DENSE.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.1)
        model.model.embed_tokens.weight[0] = 10.0 * model.model.layers[0].self_attn.v_proj.weight[0]
        model.save_pretrained(folder)
        for sample in _samples():
            model(torch.tensor([list(sample.token_ids)]))
        measured = amax.clone()
        model(torch.tensor([[0]]))
        assert amax[0, 2] > 2 * measured[0, 2]  # padding would show
    return measured


def _measure(overrides: dict, folder: str) -> dict:
    """Runs on a rank: scales from log-probabilities, scales from prompts, and state that an update must not change."""
    cfg = run_config(model=replace(DENSE, hf_path=folder), **overrides)
    cfg = replace(cfg, engine=replace(cfg.engine, kv_cache_dtype="fp8"))
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    amax, max_over_ranks = [], kv_scales.max_over_ranks

    def record(*arguments) -> list[list[float]]:
        amax.append(max_over_ranks(*arguments))
        return amax[-1]

    kv_scales.max_over_ranks = record
    kv_scales.set_scales = lambda *_: None  # later passes measure unrounded keys and values, as the reference does
    before = policy.kv_scales()
    policy.calibrate_kv(_prompts())
    policy.kv_scales()
    batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank, _samples()))
    policy.update(batch, make_loss(cfg))  # its forward passes count for nothing
    sampled, again = policy.kv_scales(), policy.kv_scales()
    parallel.barrier("done")
    prompts_amax, sampled_amax = map(torch.tensor, amax)
    return {"before": before, "prompts": prompts_amax, "sampled": sampled_amax, "scales": sampled, "again": again}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[str, torch.Tensor]:
    folder = str(tmp_path_factory.mktemp("measured"))
    return folder, run_ranks(1, _save_reference, folder)[0]


@pytest.fixture(scope="module")
def one_rank(reference) -> dict:
    return run_ranks(1, _measure, {}, reference[0])[0]


def test_magnitudes_are_those_of_transformers(reference, one_rank):
    assert one_rank["before"] is None
    torch.testing.assert_close(one_rank["sampled"], reference[1], **TRANSFORMERS_FLOAT32)
    assert one_rank["again"] == one_rank["scales"]  # nothing ran in between


def test_scales_are_powers_of_two_with_room(one_rank):
    scales = torch.tensor([one_rank["scales"][layer] for layer in range(DENSE.num_layers)])
    assert torch.equal(scales.log2(), scales.log2().round())
    room = scales * 448.0 / one_rank["sampled"]
    assert (room >= 2).all() and (room < 4).all()


def test_calibration_sees_every_token_of_a_prompt(reference, one_rank):
    torch.testing.assert_close(one_rank["prompts"], reference[1], **TRANSFORMERS_FLOAT32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_measure_alike(layout, reference, one_rank):
    overrides = LAYOUTS[layout]
    ranks = run_ranks(overrides.get("world_size", 1), _measure, overrides, reference[0])
    assert all(torch.equal(rank["sampled"], ranks[0]["sampled"]) for rank in ranks)
    assert all(rank["scales"] == one_rank["scales"] for rank in ranks)
    torch.testing.assert_close(ranks[0]["sampled"], one_rank["sampled"], **LAYOUT_FLOAT32)
    torch.testing.assert_close(ranks[0]["prompts"], one_rank["prompts"], **LAYOUT_FLOAT32)
