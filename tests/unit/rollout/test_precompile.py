"""Which kernels an engine needs, and that they are compiled once, by many processes, whatever happens to one."""

import json
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.rollout import deep_gemm_warmup, vllm_args
from megatron_fp8rl.rollout.deep_gemm_warmup import Linear
from model_configs.qwen3 import grpo_qwen3_8b, grpo_qwen3_30b_a3b


def stand_in(folder: Path, linears: list[Linear], share: int, num_shares: int) -> None:
    """In place of multiplying: notes its share; share 0 fails while there is a file "fail"."""
    time.sleep(0.2)
    if (folder / "fail").exists() and share == 0:
        sys.exit(3)
    with open(folder / "log", "a") as log:
        log.write(f"{', '.join(map(str, linears))}: {share} of {num_shares}\n")


def test_sizes_are_those_of_vllms_fused_linears():
    dense = grpo_qwen3_8b()
    dense = replace(dense, engine=replace(dense.engine, tensor=1))
    assert deep_gemm_warmup.linear_sizes(dense.model, dense.precision, dense.engine) == [
        (4096, 4096),
        (4096, 12288),
        (6144, 4096),
        (24576, 4096),
    ]
    halves = replace(dense, engine=replace(dense.engine, tensor=2))
    assert deep_gemm_warmup.linear_sizes(halves.model, halves.precision, halves.engine) == [
        (3072, 4096),
        (4096, 2048),
        (4096, 6144),
        (12288, 4096),
    ]
    experts = grpo_qwen3_30b_a3b()
    wide = replace(experts, engine=replace(experts.engine, tensor=1, expert=1))
    assert deep_gemm_warmup.linear_sizes(wide.model, wide.precision, wide.engine) == [(2048, 4096), (5120, 2048)]
    shared = replace(experts, engine=replace(experts.engine, tensor=8, expert=8))
    assert deep_gemm_warmup.linear_sizes(shared.model, shared.precision, shared.engine) == [
        (768, 2048),
        (2048, 512),
    ]  # four KV heads on eight ranks


def test_the_trainers_sizes_are_megatrons_fused_linears():
    """The same as vLLM's."""
    dense = grpo_qwen3_8b()
    for tensor in (1, 2):
        cfg = replace(dense, engine=replace(dense.engine, tensor=tensor))
        expected = deep_gemm_warmup.linear_sizes(cfg.model, cfg.precision, cfg.engine)
        assert deep_gemm_warmup.trainer_sizes(cfg.model, cfg.precision, tensor) == expected
    bf16 = replace(dense, precision=replace(dense.precision, trainer="bf16"))
    assert deep_gemm_warmup.trainer_sizes(bf16.model, bf16.precision, 1) == []


def test_shares_hold_every_size_once():
    sizes = [(6144, 4096), (4096, 4096)]
    linears = [*(Linear(*size, 8192) for size in sizes), Linear(256, 128, 1024, is_trained=True)]
    dealt = deep_gemm_warmup.shares(linears, 132, 16)
    items = [item for share in dealt for item in share]
    assert len(items) == len(set(items)) and max(map(len, dealt)) - min(map(len, dealt)) <= 6
    of_size = {size: [item for item in items if item[1:3] == size] for size in {item[1:3] for item in items}}
    assert set(of_size) == {*sizes, (256, 128), (128, 256)}
    assert [item for item in items if item[0] == "dw"] == [("dw", 256, 128, 1024)]
    for size, found in of_size.items():  # an update's last microbatch may have any number of tokens
        counts = {tokens for kind, *_, tokens in found if kind == "y"}
        assert min(counts) == 1 and max(counts) == (8192 if size in sizes else 1024) and counts >= {64, 256, 384}


def environment_on(generation: str, cfg) -> dict[str, str]:
    return vllm_args.engine_environment(cfg, KernelChoice.of(cfg, Hardware(generation)))


def test_only_engines_on_deep_gemms_linears_are_told(monkeypatch):
    cfg = grpo_qwen3_8b()
    fp8 = replace(cfg, precision=replace(cfg.precision, rollout="blockwise"))
    output = environment_on("hopper", fp8)[deep_gemm_warmup.LINEARS_VARIABLE]
    asked: list = []
    monkeypatch.setattr(deep_gemm_warmup, "ensure", lambda *words, **more: asked.append((*words, more)) or True)
    monkeypatch.setenv(deep_gemm_warmup.LINEARS_VARIABLE, output)
    assert deep_gemm_warmup.main() == 0
    monkeypatch.delenv(deep_gemm_warmup.LINEARS_VARIABLE)
    linears = [Linear(*size, 8192) for size in deep_gemm_warmup.linear_sizes(fp8.model, fp8.precision, fp8.engine)]
    trained = deep_gemm_warmup.trainer_sizes(fp8.model, fp8.precision, fp8.parallel.tensor)
    assert asked == [([*linears, *(Linear(*size, 8192, is_trained=True) for size in trained)], {"deadline_s": 720.0})]
    assert linears and trained
    remote = replace(fp8, engine=replace(fp8.engine, placement="remote"))
    assert "true" not in environment_on("hopper", remote)[deep_gemm_warmup.LINEARS_VARIABLE]
    assert deep_gemm_warmup.start_from_env() is None
    monkeypatch.setenv(deep_gemm_warmup.LINEARS_VARIABLE, "{}")
    assert deep_gemm_warmup.start_from_env().wait(60) == 1  # it reads the variable
    fp32 = replace(fp8.precision, scales="fp32", kernels={"engine_linears": "cutlass"})
    other = replace(fp8, precision=fp32)
    bf16 = replace(cfg, precision=replace(cfg.precision, rollout="bf16"))
    for told in (environment_on("hopper", c) for c in (other, bf16)):
        assert deep_gemm_warmup.LINEARS_VARIABLE not in told
    assert deep_gemm_warmup.LINEARS_VARIABLE not in environment_on("cpu", fp8)


@pytest.fixture
def compile_in(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(deep_gemm_warmup, "package", lambda: "json")

    def run(*sizes, **options) -> bool:
        settings = dict(folder=tmp_path, identity="a GPU", deadline_s=60.0) | options
        return deep_gemm_warmup.ensure(
            [Linear(*size, 64) for size in sizes], compile_share=partial(stand_in, tmp_path), **settings
        )

    return run


def test_what_is_compiled_is_not_compiled_again(compile_in, tmp_path, capfd):
    assert compile_in((256, 128), (128, 128))
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == [f"256x128 to 64, 128x128 to 64: {i} of 3" for i in range(3)]
    assert compile_in((128, 128)) and len((tmp_path / "log").read_text().splitlines()) == 3
    assert compile_in((128, 128), (384, 128))
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("384x128 to 64:")
    assert compile_in((128, 128), identity="another GPU")
    assert len((tmp_path / "log").read_text().splitlines()) == 9
    assert set(json.loads((tmp_path / "fp8rl.json").read_text())) == {"a GPU", "another GPU"}
    assert "compiling DeepGEMM's kernels of 256x128 to 64, 128x128 to 64 tokens" in capfd.readouterr().out


def test_linears_of_the_trainer_are_listed_by_themselves(compile_in, tmp_path):
    linears = [Linear(128, 128, 64), Linear(128, 128, 1024, is_trained=True)]
    done = {"a GPU": ["128x128 to 64"]}
    (tmp_path / "fp8rl.json").write_text(json.dumps(done))
    share = partial(stand_in, tmp_path)
    assert deep_gemm_warmup.ensure(linears, folder=tmp_path, identity="a GPU", compile_share=share)
    assert (tmp_path / "log").read_text().startswith("128x128 trained to 1024:")
    listed = ["128x128 to 64", "128x128 trained to 1024"]
    assert json.loads((tmp_path / "fp8rl.json").read_text()) == {"a GPU": listed}


def test_an_engine_starts_where_nobody_tells_the_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(deep_gemm_warmup, "package", lambda: "json")
    assert deep_gemm_warmup._identity().startswith("GPU, ")


def test_a_failed_share_is_told_and_tried_again(compile_in, tmp_path, capfd):
    (tmp_path / "fail").touch()
    assert not compile_in((128, 128)) and not (tmp_path / "fp8rl.json").exists()
    assert "1 of 3 processes" in capfd.readouterr().err
    (tmp_path / "fail").unlink()
    assert compile_in((128, 128)) and (tmp_path / "fp8rl.json").exists()


def test_replicas_that_share_a_folder_compile_once(compile_in, tmp_path):
    results: list[bool] = []
    replicas = [threading.Thread(target=lambda: results.append(compile_in((128, 128)))) for _ in range(4)]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join(60)
    assert results == [True] * 4 and len((tmp_path / "log").read_text().splitlines()) == 3


def test_slow_processes_end_at_the_deadline(compile_in, tmp_path, capfd):
    began = time.monotonic()
    done = deep_gemm_warmup.ensure(
        [Linear(128, 128, 64)],
        folder=tmp_path,
        identity="a GPU",
        compile_share=lambda *_: time.sleep(60),
        deadline_s=1.0,
    )
    assert not done and time.monotonic() - began < 20 and "3 of 3 processes" in capfd.readouterr().err
