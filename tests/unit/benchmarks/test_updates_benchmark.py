"""The parts of benchmarks/updates.py that need no engine: what is measured, how answers are compared, what is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import light_policy, updates
from benchmarks.runner import parse
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.names import registry
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.rollout import vllm_args


UPDATES = updates.Updates()


def arms_of(*words: str) -> list[dict]:
    return list(UPDATES.arms(parse(UPDATES, words)))


def test_every_linear_for_dense_models_and_every_choice_for_experts():
    assert [(arm["model"], arm["linear"], arm["moe"]) for arm in arms_of()] == [
        ("small", "deep_gemm", "auto"),
        ("small", "cutlass", "auto"),
        ("small", "triton", "auto"),
        ("small_moe", "deep_gemm", "triton"),
        ("small_moe", "deep_gemm", "deep_gemm"),
    ]


def test_arms_are_configurations_that_runs_may_have():
    found = arms_of("--linear", "deep_gemm")
    found += arms_of("--model", "small", "--linear", "cutlass", "triton", "--scales", "fp32")
    assert len(found) == 5
    for arm in found:
        assert rules.check(updates.run_config(arm), accelerator="hopper") == [], arm


def test_answers_differ_by_their_worst_token():
    expected = [((5, 6), (-1.0, -2.0)), ((7,), (-3.0,))]
    assert updates.difference(expected, expected) == 0.0
    assert updates.difference([((5, 6), (-1.0, -2.25)), ((7,), (-3.0,))], expected) == 0.25
    assert math.isinf(updates.difference([((5, 6), (-1.0, -2.0)), ((8,), (-3.0,))], expected))


def test_the_checkpoint_is_whole_and_names_what_is_not_fp8(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    cfg = updates.run_config({"model": "tiny_moe", "linear": "auto", "moe": "auto", "scales": "pow2"})
    parallel = SimpleNamespace(
        device=torch.device("cpu"), pp_rank=0, ep_rank=0, tp_size=1, tp_rank=0, etp_size=1, etp_rank=0
    )
    policy = light_policy.light_policy(cfg, parallel)
    folder = updates.write_checkpoint(cfg, policy, write_model_dir(cfg), Path("weights"))
    content = load_file(folder / "model.safetensors")
    assert {name for name in content if not name.endswith("_scale_inv")} == set(registry.hf_tensors(cfg.model))
    fp8 = {name for name, tensor in content.items() if tensor.dtype == torch.float8_e4m3fn}
    assert fp8 == {name.removesuffix("_scale_inv") for name in content if name.endswith("_scale_inv")}
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert written == vllm_args.quantization_config(cfg.model, cfg.precision)
    assert {name.removesuffix(".weight") for name in registry.hf_tensors(cfg.model)} - {
        name.removesuffix(".weight") for name in fp8
    } >= set(written["modules_to_not_convert"])


def test_lines_say_what_ran_and_why_not():
    keys = {"linear": "triton", "moe": "auto", "scales": "pow2", "device": "x"}
    passed = {"model": "small", **keys, "kernels": {"linear": "A"}, "outcome": "pass", "reason": "", "rounds_equal": 5}
    refused = {"model": "small_moe", **keys, "kernels": {}, "outcome": "refused", "reason": "E: why"}
    dense, moe = map(UPDATES.line, UPDATES.order([refused, passed]))
    assert (dense["rounds equal"], dense["kernels that ran"], dense["expert kernels"]) == ("5 of 5", "linear A", "-")
    assert (moe["outcome"], moe["reason"], moe["expert kernels"]) == ("refused", "E: why", "auto")
    assert not UPDATES.is_wrong(refused) and UPDATES.is_wrong(passed | {"outcome": "FAILED"})
