"""The parts of benchmarks/updates.py that need no engine: what is measured, how answers are compared, what is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import light_policy, updates
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.names import registry
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.rollout import vllm_args


def test_every_linear_for_dense_models_and_every_choice_for_experts():
    cases = list(updates.plan_cases(updates.parse([])))
    assert [(c.model, c.linear, c.moe) for c in cases] == [
        ("small", "deep_gemm", "auto"),
        ("small", "cutlass", "auto"),
        ("small", "triton", "auto"),
        ("small_moe", "deep_gemm", "triton"),
        ("small_moe", "deep_gemm", "deep_gemm"),
    ]
    assert len({case.name for case in cases}) == len(cases)


def test_cases_are_configurations_that_runs_may_have():
    words = ["--linear", "deep_gemm"], ["--model", "small", "--linear", "cutlass", "triton", "--scales", "fp32"]
    cases = [case for some in words for case in updates.plan_cases(updates.parse(some))]
    assert len(cases) == 5
    for case in cases:
        assert rules.check(updates.run_config(case), accelerator="hopper") == [], case


def test_answers_differ_by_their_worst_token():
    expected = [((5, 6), (-1.0, -2.0)), ((7,), (-3.0,))]
    assert updates.difference(expected, expected) == 0.0
    assert updates.difference([((5, 6), (-1.0, -2.25)), ((7,), (-3.0,))], expected) == 0.25
    assert math.isinf(updates.difference([((5, 6), (-1.0, -2.0)), ((8,), (-3.0,))], expected))


def test_the_reason_of_a_refusal_is_the_last_exception_of_its_log():
    log = "replica died; its log ends with\n  File x, line 3\nValueError: first\nRuntimeError: no such kernel\nbye"
    assert updates.reason(RuntimeError(log)) == "RuntimeError: RuntimeError: no such kernel"
    log = "bucket 1: status 500\n(Worker) x.UnwritableKernel: a.weight: why\nvllm.EngineDeadError: it died"
    assert updates.reason(RuntimeError(log)) == "RuntimeError: UnwritableKernel: a.weight: why"
    assert updates.reason(ValueError("linear_backend = 'x': cannot be read")).endswith("cannot be read")


def test_the_checkpoint_is_whole_and_names_what_is_not_fp8(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    cfg = updates.run_config(updates.Case("tiny_moe", "auto", "auto", "pow2"))
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


def test_rows_become_a_table():
    keys = {"linear": "triton", "moe": "auto", "update": "direct", "scales": "pow2", "device": "x"}
    rows = [
        {"model": "small", **keys, "kernels": {"linear": "A"}, "outcome": "pass", "reason": "", "rounds_equal": 5},
        {"model": "small_moe", **keys, "kernels": {}, "outcome": "refused", "reason": "E: why"},
    ]
    dense, moe = updates.table(rows)
    assert (dense["rounds equal"], dense["kernels that ran"], dense["expert kernels"]) == ("5 of 5", "linear A", "-")
    assert (moe["outcome"], moe["reason"], moe["expert kernels"]) == ("refused", "E: why", "auto")
