"""The folder of compiled kernels: a full disk costs time, and what is compiled is recorded."""

import errno
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8rl.kernels import c_code, compile_cache, float64
from megatron_fp8rl.kernels.compile_cache import FOLDER_VARIABLE, FOLDERS, RECORD_VARIABLE


@pytest.fixture(autouse=True)
def a_new_process(tmp_path, monkeypatch):
    """No variables, no cached answers, and an empty cache."""
    for name in (*FOLDERS, FOLDER_VARIABLE, RECORD_VARIABLE):
        monkeypatch.setenv(name, "")  # restored afterwards, also where the test sets it
        monkeypatch.delenv(name)
    monkeypatch.setenv("MEGATRON_FP8RL_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    forget()


CACHED = (c_code.library, compile_cache.gpus, compile_cache.in_memory)


def forget() -> None:
    for function in CACHED:
        function.cache_clear()


def test_folders_that_a_user_names_stay_and_others_are_those_of_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "gpus", lambda field: ["NVIDIA H200, 580.1"] * 2)
    monkeypatch.setattr(compile_cache, "_wanted_bytes", lambda: 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/shared/triton")
    folder = compile_cache.use()
    assert folder == tmp_path / "cache" / "kernels" / "NVIDIA-H200-580.1"
    assert os.environ["TRITON_CACHE_DIR"] == "/shared/triton"
    assert os.environ["VLLM_CACHE_ROOT"] == str(folder / "vllm")
    monkeypatch.setattr(compile_cache, "root", pytest.fail)  # a child process does not choose again
    assert compile_cache.use() == folder


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("how", ["full", "nearly full", "a file"])
def test_a_full_disk_costs_only_time(how, tmp_path, monkeypatch, capfd):
    if how == "a file":
        (tmp_path / "cache").touch()
    elif how == "full":
        monkeypatch.setattr(compile_cache.tempfile, "TemporaryFile", full)
    else:
        monkeypatch.setattr(compile_cache, "_wanted_bytes", lambda: 1 << 60)
    folder = compile_cache.use()
    said = capfd.readouterr().err
    assert said.count("cannot keep compiled kernels") == 1 and "MEGATRON_FP8RL_CACHE" in said
    assert not folder.is_relative_to(tmp_path) and folder == compile_cache.in_memory()
    assert os.environ["DG_JIT_CACHE_DIR"] == str(folder / "deep_gemm")


def test_c_kernels_are_compiled_once_and_again_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "compiled.jsonl"))
    source = Path(c_code.__file__).with_name("rows.c")
    kept = compile_cache.use() / "c" / f"rows-{c_code._identity(source, os.environ.get('CC', 'cc'))}.so"
    kept.parent.mkdir()
    kept.write_bytes(b"damaged")
    if c_code.library("rows") is None:
        pytest.skip("no C compiler")
    assert kept.stat().st_size > 1000
    c_code.library.cache_clear()
    with monkeypatch.context() as without_compiler:
        without_compiler.setattr(subprocess, "run", pytest.fail)
        assert c_code.library("rows") is not None  # read, as a second process reads it
    monkeypatch.setattr(c_code, "_OPTIONS", [*c_code._OPTIONS, "-DOTHER"])
    c_code.library.cache_clear()
    assert c_code.library("rows") is not None and len(list(kept.parent.glob("rows-*.so"))) == 2
    lines = [json.loads(line) for line in (tmp_path / "compiled.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["name"]) for line in lines] == [("c", "rows")] * 2 and lines[0]["seconds"] > 0


def test_c_kernels_go_to_memory_when_the_disk_is_full_and_give_the_same_results(monkeypatch):
    x, weight = torch.randn(5, 64).bfloat16(), torch.ones(64).bfloat16()
    with monkeypatch.context() as without:
        without.setattr(c_code, "library", lambda name: None)
        expected = float64.rms_norm(x, weight, 1e-6)
    (compile_cache.use() / "c").touch()  # a file, so that no library can be written there
    if (compiled := c_code.library("rows")) is None:
        pytest.skip("no C compiler")
    assert str(compile_cache.in_memory()) in compiled._name
    assert torch.equal(float64.rms_norm(x, weight, 1e-6), expected)


def test_triton_goes_on_in_memory_when_its_disk_fills(tmp_path, monkeypatch):
    cache = pytest.importorskip("triton.runtime.cache")
    from triton import knobs

    from megatron_fp8rl.kernels.triton.cache import CacheWithSpare

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert knobs.cache.dir == str(tmp_path / "triton")
    kernel = CacheWithSpare("kernel")
    first = kernel.put("source", "kernel.ttir")
    replace = os.replace
    monkeypatch.setattr(cache.os, "replace", lambda a, b: full() if str(b).startswith(str(tmp_path)) else replace(a, b))
    second = kernel.put(b"machine code", "kernel.cubin")
    kernel.put_group("kernel.json", {"kernel.ttir": first, "kernel.cubin": second})
    assert second.startswith(str(compile_cache.in_memory())) and first.startswith(str(tmp_path))
    assert kernel.get_group("kernel.json") == {"kernel.ttir": first, "kernel.cubin": second}
    assert CacheWithSpare("kernel").get_group("kernel.json") is None  # the disk has no half of a kernel


def test_kernels_that_triton_compiles_are_recorded(tmp_path, monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    from megatron_fp8rl.kernels.triton import cache

    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "compiled.jsonl"))
    with knobs.compilation.scope(), knobs.cache.scope():
        cache.watch()
        assert knobs.cache.manager_class is cache.CacheWithSpare
        times = knobs.CompileTimes(1_500_000, [("ptx", 400_000)], 100_000)
        source = SimpleNamespace(name="rotate")
        for hit in (False, True):
            knobs.compilation.listener(src=source, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    (line,) = (tmp_path / "compiled.jsonl").read_text().splitlines()
    assert json.loads(line)["seconds"] == 2.0 and json.loads(line)["name"] == "rotate"


def test_the_record_sums_lines_of_all_processes_and_deep_gemms_files(tmp_path, monkeypatch):
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "compiled.jsonl"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    compile_cache.note("triton", "earlier", 9.0)
    record = compile_cache.Record()
    assert record.take_seconds() == 0
    compile_cache.note("triton", "rotate", 1.5)
    with (tmp_path / "compiled.jsonl").open("a") as file:
        file.write('{"kind": "c", "seco')  # of a line that another process is writing
    folder = tmp_path / "cache" / "kernel.1"
    folder.mkdir(parents=True)
    (folder / "kernel.cu").touch()
    (folder / "kernel.cubin").touch()
    ended = (folder / "kernel.cubin").stat().st_mtime
    os.utime(folder / "kernel.cu", (ended - 4, ended - 4))
    assert record.take_seconds() == pytest.approx(5.5, abs=0.01)
    with (tmp_path / "compiled.jsonl").open("a") as file:
        file.write("\n")  # a line that a full disk has cut
    compile_cache.note("triton", "later", 0.5)
    assert record.take_seconds() == 0.5 and record.take_seconds() == 0
    monkeypatch.setattr(compile_cache, "open", full, raising=False)
    compile_cache.note("triton", "lost", 1.0)  # a full disk loses the line


def test_doctor_compiles_the_kernels_of_a_cpu(tmp_path, capfd):
    from megatron_fp8rl import __main__, cli

    arguments = ["doctor", "tiny_qwen3", "--compile"]
    assert cli.main(__main__.COMMANDS, arguments) in (0, 1)
    said = capfd.readouterr().out
    if c_code.library("rows") is None:
        pytest.skip("no C compiler")
    assert "c: 3 kernels in" in said and f"kernels are kept in {tmp_path / 'cache' / 'kernels'}" in said
    assert cli.main(__main__.COMMANDS, arguments) in (0, 1) and "nothing was missing" in capfd.readouterr().out
