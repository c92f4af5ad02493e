"""Every command that the doctor prints as a remedy makes the run work; where it prints none, it says what it tried."""

import json
import shlex
from dataclasses import replace

import pytest

from megatron_fp8rl import __main__ as program
from megatron_fp8rl import cli
from megatron_fp8rl.config import EngineConfig, OptimConfig, ParallelConfig, RunConfig, SamplingConfig
from megatron_fp8rl.names.registry import from_hf_config
from megatron_fp8rl.preflight import auto_layout, doctor, findings
from megatron_fp8rl.preflight.assessment import DoctorOptions, assess, gpus_wanted
from megatron_fp8rl.preflight.diagnosis import diagnose
from model_configs.deepseek import grpo_deepseek_v3
from tests.unit.names.test_published import DEEPSEEK_V3, GLM45_AIR, LLAMA31_8B, MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN25_7B
from tests.unit.test_model_configs import QWEN3_8B, QWEN3_235B_A22B

# Fields of a published config.json (Hugging Face: mistralai).
MISTRAL_SMALL_24B = json.loads("""{
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 131072, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 100000000.0,
    "sliding_window": null, "hidden_act": "silu", "tie_word_embeddings": false
}""")


def larger(config: dict, hidden: int, ffn: int, layers: int, heads: int, **fields: int) -> dict:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return config | dict(zip(names, (hidden, ffn, layers, heads), strict=True)) | fields


PUBLISHED = {
    "llama31_8b": LLAMA31_8B,
    "llama31_70b": larger(LLAMA31_8B, 8192, 28672, 80, 64),
    "qwen25_7b": QWEN25_7B,
    "qwen25_72b": larger(QWEN25_7B, 8192, 29568, 80, 64, num_key_value_heads=8),
    "qwen3_8b": QWEN3_8B,
    "qwen3_32b": larger(QWEN3_8B, 5120, 25600, 64, 64),
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "qwen3_235b_a22b": QWEN3_235B_A22B,
    "glm45_air": GLM45_AIR,
    "mixtral_8x7b": MIXTRAL_8X7B,
    "mixtral_8x22b": larger(MIXTRAL_8X7B, 6144, 16384, 56, 48, vocab_size=32768, max_position_embeddings=65536),
    "mistral_small_24b": MISTRAL_SMALL_24B,
    "deepseek_v3": DEEPSEEK_V3,
}


def run(name: str, trainer: dict, engines: dict, **more) -> RunConfig:
    """A run of a published model with completions of 4,096 tokens."""
    model = replace(from_hf_config(PUBLISHED[name], fp8_weights=True), num_mtp_layers=0)
    lengths = dict(max_prompt_tokens=1024, max_completion_tokens=4096)
    engine = EngineConfig(placement=more.pop("placement", "separate"), **engines)
    optim = replace(more.pop("optim", OptimConfig()), max_tokens_per_microbatch=8192)
    sampling, parallel = SamplingConfig(**lengths), ParallelConfig(**trainer)
    return RunConfig(name=name, model=model, parallel=parallel, optim=optim, engine=engine, sampling=sampling, **more)


def starts(name: str, num_gpus: int) -> list[RunConfig]:
    """What people begin with: data parallel on half of the GPUs, one of the usual layouts, or everything colocated."""
    half, moe = num_gpus // 2, "num_experts" in str(PUBLISHED[name]) or "n_routed_experts" in PUBLISHED[name]
    usual = dict(world_size=half, tensor=2, pipeline=2, **({"expert": min(8, half // 2)} if moe else {}))
    configs = [
        run(name, dict(world_size=half), dict(num_replicas=half)),
        run(name, usual, dict(num_replicas=max(1, half // 4), tensor=4), optim=OptimConfig(recompute="full")),
    ]
    if num_gpus in (8, 64):
        configs.append(run(name, dict(world_size=num_gpus), dict(num_replicas=num_gpus), placement="colocated"))
    return configs


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_printed_as_a_remedy_works(name, gpu):
    for num_gpus in (8, 16, 32, 64, 128, 256):
        options = DoctorOptions(gpu=gpu, num_gpus=num_gpus)
        for cfg in starts(name, num_gpus):
            diagnosis = diagnose(cfg, options)
            if diagnosis.status < 2:
                continue
            assert bool(diagnosis.change) != bool(diagnosis.tried), (num_gpus, cfg.parallel)
            if not diagnosis.change:
                assert f"layouts on at most {num_gpus} GPUs" in diagnosis.tried
                continue
            changed = findings.apply(cfg, diagnosis.change)
            assert changed.model == cfg.model  # an architecture is no remedy
            assert assess(changed, options).works and gpus_wanted(changed) <= num_gpus
            proposed = [finding for finding in diagnosis.findings if finding.change]
            assert all(assess(findings.apply(cfg, f.change), options).works for f in proposed)


GLM_LAYOUT = dict(world_size=32, pipeline=2, expert=16), dict(num_replicas=4, tensor=2, expert=2)


def fixed(cfg: RunConfig, **options) -> RunConfig:
    diagnosis = diagnose(cfg, DoctorOptions(**options))
    assert diagnosis.change, diagnosis.tried
    return findings.apply(cfg, diagnosis.change)


def test_a_model_of_which_only_the_first_layers_do_not_tile_keeps_these_in_bf16():
    """10,944 columns of GLM-4.5-Air's dense layer are 85.5 blocks."""
    glm = run("glm45_air", *GLM_LAYOUT)
    assert "model.ffn_hidden_size" in {f.subject[2:] for f in diagnose(glm).findings}
    assert fixed(glm).precision.bf16_first_layers == 1


def test_a_degree_that_tiles_is_no_remedy_where_memory_is_short():
    """29,568 columns of Qwen2.5-72B are 231 blocks: tensor parallelism is left out, and a pipeline takes its place."""
    cfg = fixed(run("qwen25_72b", dict(world_size=16, tensor=8, pipeline=2), dict(num_replicas=4, tensor=4)))
    assert cfg.parallel.tensor == 1 and cfg.parallel.pipeline >= 8
    # A whole copy of the weights in FP8 leaves an H100 no room, so the engines can be divided in BF16 alone.
    cfg = fixed(run("qwen25_72b", dict(world_size=32), dict(num_replicas=4)), gpu="h100", num_gpus=64)
    assert cfg.precision.rollout == cfg.precision.trainer == "bf16" and cfg.engine.tensor > 1


def test_a_pipeline_is_tried():
    layout = dict(world_size=16, tensor=2, pipeline=2, expert=8)
    cfg = run("mixtral_8x22b", layout, dict(num_replicas=2, tensor=4), optim=OptimConfig(recompute="full"))
    assert fixed(cfg).parallel.world_size > 16
    assert fixed(cfg, num_gpus=40).parallel.world_size <= 32


@pytest.mark.slow
def test_commands_do_not_undo_each_other():
    options = DoctorOptions(gpu="h100")
    first = diagnose(grpo_deepseek_v3(), options)
    after = diagnose(findings.apply(first.cfg, first.change), options)
    assert after.status < 2
    for finding in after.findings:
        assert not finding.change or assess(findings.apply(after.cfg, finding.change), options).works


def test_the_search_reads_no_text(monkeypatch):
    """Without problems and remedies in words the proposed change is the same."""
    untiled, cfg = run("glm45_air", *GLM_LAYOUT), grpo_deepseek_v3()
    kernels = {"linears": "deep_gemm", "engine_experts": "deep_gemm"}
    cfg = replace(
        cfg,
        algo=replace(cfg.algo, updates_per_step=10**6),
        precision=replace(cfg.precision, kernels=kernels, gradients="e5m2"),
        weight_sync=replace(cfg.weight_sync, transport="ipc"),
    )
    options = DoctorOptions()

    def without_text(cfg: RunConfig, machines: DoctorOptions):
        result = assess(cfg, machines)
        return replace(result, findings=tuple(replace(f, problem="", remedy="") for f in result.findings))

    changes = [diagnose(start, options).change for start in (untiled, cfg)]
    monkeypatch.setattr(auto_layout, "assess", without_text)
    assert all(changes) and changes == [auto_layout.nearest(start, options).change for start in (untiled, cfg)]


def test_what_was_tried_is_said(monkeypatch):
    diagnosis = diagnose(run("deepseek_v3", dict(world_size=8), dict()), DoctorOptions(num_gpus=16))
    assert diagnosis.status == 2 and not diagnosis.command and "0 layouts of the trainer" in diagnosis.tried
    assert "No automatic fix found. Tried: " in doctor.plain(diagnosis)
    cfg = grpo_deepseek_v3()
    diagnosis = diagnose(replace(cfg, data=replace(cfg.data, tokenizer="no/such/folder")))
    assert diagnosis.tried == "no value could be proposed for --data.tokenizer"
    monkeypatch.setattr(auto_layout, "_DEADLINE_S", 0.0)
    diagnosis = diagnose(cfg, DoctorOptions(gpu="h100"))
    assert diagnosis.status == 2 and not diagnosis.command and diagnosis.tried


def test_a_command_can_be_typed_again():
    cfg = grpo_deepseek_v3()
    diagnosis = diagnose(cfg, DoctorOptions(gpu="h100"), config_name="grpo_deepseek_v3", overrides=["--seed", "3"])
    parsed = cli.parse(shlex.split(diagnosis.command)[3:], {command.name: command for command in program.COMMANDS})
    assert parsed.options.gpu == "h100" and parsed.cfg == findings.apply(replace(cfg, seed=3), diagnosis.change)
