"""Which kernels an engine needs, and that they are compiled once, by many processes, whatever happens to one."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace

import pytest

from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.rollout import deep_gemm_warmup, vllm_args
from model_configs.qwen3 import grpo_qwen3_8b, grpo_qwen3_30b_a3b

# In place of a process that multiplies: notes its share; share 0 fails while there is a file "fail".
STAND_IN = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
share = next(word for word in sys.argv if word.startswith("--share="))
time.sleep(0.2)
if (folder / "fail").exists() and share == "--share=0":
    sys.exit(3)
with open(folder / "log", "a") as log:
    log.write(" ".join(sys.argv[2:]) + "\\n")
"""


def test_sizes_are_those_of_vllms_fused_linears():
    dense = grpo_qwen3_8b()
    dense = replace(dense, rollout=replace(dense.rollout, tensor=1))
    assert deep_gemm_warmup.linear_sizes(dense) == [(4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096)]
    halves = replace(dense, rollout=replace(dense.rollout, tensor=2))
    assert deep_gemm_warmup.linear_sizes(halves) == [(3072, 4096), (4096, 2048), (4096, 6144), (12288, 4096)]
    experts = grpo_qwen3_30b_a3b()
    wide = replace(experts, rollout=replace(experts.rollout, tensor=1, expert=1))
    assert deep_gemm_warmup.linear_sizes(wide) == [(2048, 4096), (5120, 2048)]
    shared = replace(experts, rollout=replace(experts.rollout, tensor=8, expert=8))
    assert deep_gemm_warmup.linear_sizes(shared) == [(768, 2048), (2048, 512)]  # four KV heads on eight ranks


def test_shares_hold_every_size_once():
    sizes = [(6144, 4096), (4096, 4096)]
    dealt = deep_gemm_warmup.shares(sizes, 8192, 132, 16)
    items = [item for share in dealt for item in share]
    assert len(items) == len(set(items)) and max(map(len, dealt)) - min(map(len, dealt)) <= 6
    assert {item[:2] for item in items} == set(sizes) and {item[2] for item in items} >= {1, 64, 256, 8192}
    assert all(1 <= tokens <= 8192 for _, _, tokens in items)


def environment_on(generation: str, cfg) -> dict[str, str]:
    return vllm_args.engine_environment(cfg, KernelChoice.of(cfg, Hardware(generation)))


def test_only_engines_on_deep_gemms_linears_are_told(monkeypatch):
    cfg = grpo_qwen3_8b()
    fp8 = replace(cfg, precision=replace(cfg.precision, rollout="blockwise"))
    fp8 = replace(fp8, rollout=replace(fp8.rollout, start_deadline_s=100.0))
    said = environment_on("hopper", fp8)[deep_gemm_warmup.LINEARS_VARIABLE]
    assert said.split()[:2] == ["40", "4096,4096"]
    asked: list = []
    monkeypatch.setattr(deep_gemm_warmup, "ensure", lambda *words, **more: asked.append((*words, more)))
    deep_gemm_warmup.precompile_from_env(8192)
    monkeypatch.setenv(deep_gemm_warmup.LINEARS_VARIABLE, said)
    deep_gemm_warmup.precompile_from_env(8192)
    assert asked == [(deep_gemm_warmup.linear_sizes(fp8), 8192, {"deadline_s": 40.0})]
    fp32 = replace(fp8.precision, scales="fp32")
    other = replace(fp8, precision=fp32, rollout=replace(fp8.rollout, linear_backend="cutlass"))
    bf16 = replace(cfg, precision=replace(cfg.precision, rollout="bf16"))
    for told in (environment_on("hopper", c) for c in (other, bf16)):
        assert deep_gemm_warmup.LINEARS_VARIABLE not in told
    assert deep_gemm_warmup.LINEARS_VARIABLE not in environment_on("cpu", fp8)


@pytest.fixture
def compile_in(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)

    def run(sizes, **options) -> bool:
        settings = dict(folder=tmp_path, identity="a GPU", deadline_s=60.0) | options
        return deep_gemm_warmup.ensure(
            sizes, 64, command=lambda words: [sys.executable, "-c", STAND_IN, str(tmp_path), *words], **settings
        )

    return run


def test_what_is_compiled_is_not_compiled_again(compile_in, tmp_path, capfd):
    assert compile_in([(256, 128), (128, 128)])
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(line.split()[-1] for line in lines) == ["--share=0", "--share=1", "--share=2"]
    assert all(line.startswith("--sizes 256,128 128,128 --max-tokens=64 --of=3") for line in lines)
    assert compile_in([(128, 128)]) and len((tmp_path / "log").read_text().splitlines()) == 3
    assert compile_in([(128, 128), (384, 128)])
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("--sizes 384,128 --max")
    assert compile_in([(128, 128)], identity="another GPU")
    assert len((tmp_path / "log").read_text().splitlines()) == 9
    assert set(json.loads((tmp_path / "fp8rl.json").read_text())) == {"a GPU", "another GPU"}
    assert "compiling DeepGEMM's kernels of 256x128 to 64, 128x128 to 64 tokens" in capfd.readouterr().out


def test_an_engine_starts_where_nobody_tells_the_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(deep_gemm_warmup, "package", lambda: "json")
    assert deep_gemm_warmup._identity().startswith("GPU, ")


def test_a_failed_share_is_told_and_tried_again(compile_in, tmp_path, capfd):
    (tmp_path / "fail").touch()
    assert not compile_in([(128, 128)]) and not (tmp_path / "fp8rl.json").exists()
    assert "1 of 3 processes" in capfd.readouterr().err
    (tmp_path / "fail").unlink()
    assert compile_in([(128, 128)]) and (tmp_path / "fp8rl.json").exists()


def test_replicas_that_share_a_folder_compile_once(compile_in, tmp_path):
    results: list[bool] = []
    replicas = [threading.Thread(target=lambda: results.append(compile_in([(128, 128)]))) for _ in range(4)]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join(60)
    assert results == [True] * 4 and len((tmp_path / "log").read_text().splitlines()) == 3


def test_slow_processes_end_at_the_deadline(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    began = time.monotonic()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    done = deep_gemm_warmup.ensure(
        [(128, 128)], 64, folder=tmp_path, identity="a GPU", command=lambda words: sleep, deadline_s=1.0
    )
    assert not done and time.monotonic() - began < 20 and "2 of 2 processes" in capfd.readouterr().err
