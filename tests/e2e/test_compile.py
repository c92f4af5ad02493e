"""``doctor CONFIG --compile`` on a GPU: two steps of the configuration, whose kernels are kept and counted."""

from megatron_fp8rl import __main__, cli
from megatron_fp8rl.commands import compile_kernels
from megatron_fp8rl.kernels import c_code, compile_cache
from megatron_fp8rl.precision.hardware import Hardware


def test_two_steps_fill_the_folder_of_kernels(tmp_path, monkeypatch, capfd):
    for name in (*compile_cache.FOLDERS, compile_cache.FOLDER_VARIABLE, compile_cache.RECORD_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MEGATRON_FP8RL_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_kernels, "local_hardware", lambda: Hardware("hopper"))  # the two steps run on the CPU
    fields = ["--sampling.prompts_per_step", "4", "--num_steps", "900"]
    assert cli.main(__main__.COMMANDS, ["doctor", "tiny_qwen3", "--compile", *fields]) in (0, 1)
    said, kept = capfd.readouterr(), list(tmp_path.glob("kernels/*/c/*.so"))
    assert f"kernels are kept in {tmp_path / 'kernels'}" in said.out and "ended with status" not in said.err
    assert not kept or f"c: {len(kept)} kernels in" in said.out
    assert len(kept) == len([name for name in c_code._NAMES if c_code.library(name) is not None])
    remote = ["doctor", "tiny_qwen3", "--compile", "--engine.placement", "remote"]
    assert cli.main(__main__.COMMANDS, remote) == 2 and "Set colocated or separate" in capfd.readouterr().err
