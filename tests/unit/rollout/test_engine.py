"""Arguments of the engines."""

import json
import os
from dataclasses import replace

import pytest

from megatron_fp8rl.config import ConfigError, PrecisionConfig, RopeScaling, RunConfig
from megatron_fp8rl.names.registry import from_hf_config, hf_tensors, to_hf_config
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice, choose
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.rollout import fleet as fleet_module
from megatron_fp8rl.rollout import placement, replicas, server_process, vllm_args
from megatron_fp8rl.rollout.fleet import Fleet
from model_configs.tiny import tiny_qwen3, tiny_qwen3_5_moe, tiny_qwen3_moe, tiny_qwen3_next

CPU, HOPPER = Hardware("cpu"), Hardware("hopper")
WITHOUT_FLASHINFER = Hardware("hopper", frozenset({"transformer_engine", "deep_gemm"}))


def arguments_on(hardware: Hardware, cfg) -> dict:
    return vllm_args.engine_arguments(cfg, "model", KernelChoice.of(cfg, hardware))


def environment_on(hardware: Hardware, cfg) -> dict[str, str]:
    return vllm_args.engine_environment(cfg, KernelChoice.of(cfg, hardware))


PRECISIONS = {
    "fp8": PrecisionConfig(),
    "edges": PrecisionConfig(bf16_first_layers=1),
    "bf16": PrecisionConfig(trainer="bf16", rollout="bf16"),
}


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("cfg", [tiny_qwen3(), tiny_qwen3_moe()], ids=lambda cfg: cfg.name)
def test_exceptions_are_the_complement_of_the_layer_table(cfg, precision):
    table = LayerTable.build(cfg.model, precision)
    listed = set(vllm_args.modules_not_converted(cfg.model, precision))
    for name, shape in hf_tensors(cfg.model).items():
        if len(shape) == 2:
            assert (name.removesuffix(".weight") in listed) != table.rollout_format(name).is_quantized, name
    assert {"model.embed_tokens", "lm_head"} <= listed
    if cfg.model.is_moe:
        assert {f"model.layers.{i}.mlp.gate" for i in range(cfg.model.num_layers)} <= listed


def test_a_bf16_engine_is_quantized_on_a_cpu_in_name_only():
    cfg = replace(tiny_qwen3_moe(), precision=PRECISIONS["bf16"])
    on_cpu = arguments_on(CPU, cfg)["hf-overrides"]["quantization_config"]
    assert len(on_cpu["modules_to_not_convert"]) == sum(len(shape) == 2 for shape in hf_tensors(cfg.model).values())
    assert "hf-overrides" not in arguments_on(HOPPER, cfg)


def test_an_engine_of_a_published_folder_gets_the_rotary_scaling_that_the_trainer_computes():
    """vLLM reads no attention_factor, and no linear factor without a decimal point."""
    cfg = tiny_qwen3_moe()
    scaling = RopeScaling(kind="yarn", factor=2, original_max_position_embeddings=64, attention_factor=1.3)
    cfg = replace(cfg, model=replace(cfg.model, rope_scaling=scaling, hf_path="folder"))
    rope = arguments_on(HOPPER, cfg)["hf-overrides"]["rope_parameters"]
    assert (rope["rope_type"], rope["attn_factor"], rope["apply_yarn_scaling"]) == ("yarn", 1.3, False)
    published = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 10000, "max_position_embeddings": 64}
    model = from_hf_config(to_hf_config(cfg.model) | {"rope_parameters": None, **published})
    assert model.max_sequence_tokens == 128
    rope = arguments_on(HOPPER, replace(cfg, model=replace(model, hf_path="folder")))["hf-overrides"]["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0} and isinstance(rope["factor"], float)


def test_an_engine_of_text_gets_one_axis_of_the_rotary_embedding():
    """vLLM asks a model for positions on three axes if the folder's config.json has an mrope_section."""
    cfg = tiny_qwen3_5_moe()
    published = to_hf_config(cfg.model)
    published["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    model = from_hf_config(published)
    assert model == cfg.model
    rope = arguments_on(CPU, replace(cfg, model=replace(model, hf_path="folder")))["hf-overrides"]["rope_parameters"]
    assert rope == {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}


def test_an_engine_with_delta_nets_takes_kernels_that_need_no_other_package():
    cfg = tiny_qwen3_next()
    on_gpu = arguments_on(HOPPER, replace(cfg, precision=replace(cfg.precision, exact=False)))
    assert (on_gpu["gdn-prefill-backend"], on_gpu["mamba-ssm-cache-dtype"]) == ("triton", "float32")
    assert "gdn-prefill-backend" not in arguments_on(CPU, cfg)


def test_kv_cache_on_a_cpu_holds_every_sequence():
    cfg = tiny_qwen3_moe()
    cfg = replace(cfg, engine=replace(cfg.engine, kv_cache_bytes=None, max_num_sequences=10))
    block_bytes = 128 * (2 * 2 * 2 * 128 * 2)  # tokens * (layers, key and value, heads, head size, BF16)
    assert vllm_args.kv_cache_bytes(cfg, cpu=True) == 11 * block_bytes  # 40 tokens fit into one block
    assert vllm_args.kv_cache_bytes(cfg, cpu=False) is None
    fixed = replace(cfg, engine=replace(cfg.engine, kv_cache_bytes=1 << 20))
    assert vllm_args.kv_cache_bytes(fixed, cpu=True) == 1 << 20


def test_command_line():
    command = vllm_args.server_command(
        {"a-b": 3, "flag": True, "off": False, "none": None, "j": {"x": [1]}}, listen_fd=7
    )
    assert command[1:5] == [
        "-m",
        "megatron_fp8rl.rollout.vllm_plugin.server",
        "--listen-fd=7",
        f"--parent-pid={os.getpid()}",
    ]
    assert command[5:] == ["--a-b", "3", "--flag", "--j", json.dumps({"x": [1]})]


@pytest.mark.parametrize(("scales", "lever"), [("pow2", "1"), ("fp32", "0")])
def test_scale_kind_reaches_every_kernel(scales, lever):
    cfg = replace(tiny_qwen3_moe(), precision=PrecisionConfig(scales=scales))
    environment = environment_on(HOPPER, cfg)
    assert environment["MEGATRON_FP8RL_FORMAT"] == f"blockwise_{scales}"
    assert environment["VLLM_USE_DEEP_GEMM_E8M0"] == lever


def gpu_arguments(cfg, kernels=None, **engine):
    precision = replace(cfg.precision, kernels=kernels or {}, exact=False)
    return arguments_on(HOPPER, replace(cfg, precision=precision, engine=replace(cfg.engine, **engine)))


def test_kernels_are_named_on_a_gpu_and_never_on_a_cpu():
    """Explicit names, so that installed packages do not decide."""
    moe, dense = tiny_qwen3_moe(), tiny_qwen3()
    chosen = gpu_arguments(moe)
    assert (chosen["linear-backend"], chosen["moe-backend"]) == ("deep_gemm", "triton")
    assert "moe-backend" not in gpu_arguments(dense)
    named = gpu_arguments(
        moe, {"engine_linears": "cutlass", "engine_experts": "deep_gemm", "engine_attention": "TRITON_ATTN"}
    )
    names = [named[key] for key in ("linear-backend", "moe-backend", "attention-backend")]
    assert names == ["cutlass", "deep_gemm", "TRITON_ATTN"]
    assert "linear-backend" not in gpu_arguments(replace(moe, precision=PRECISIONS["bf16"]))
    mxfp8 = replace(dense, precision=PrecisionConfig(trainer="bf16", rollout="mxfp8"))
    assert gpu_arguments(mxfp8, {"engine_linears": "emulated"})["linear-backend"] == "emulation"
    on_cpu = arguments_on(CPU, moe)
    assert not {"linear-backend", "moe-backend", "attention-backend", "enable-sleep-mode"} & on_cpu.keys()


def test_graphs_without_a_compiler():
    cfg = tiny_qwen3_moe()
    actual = gpu_arguments(cfg, graphs="plain")["compilation-config"]
    assert actual == {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert "compilation-config" not in gpu_arguments(cfg, graphs="none")
    assert "compilation-config" not in gpu_arguments(cfg, graphs="compiled")
    assert gpu_arguments(cfg, batch_invariant=True, graphs="compiled")["compilation-config"] == actual


def test_sleeping_and_expert_parallelism():
    cfg = tiny_qwen3_moe()
    assert gpu_arguments(cfg, sleep_level=2)["enable-sleep-mode"] is True
    assert gpu_arguments(cfg)["enable-sleep-mode"] is False
    assert gpu_arguments(cfg, tensor=2, expert=2)["enable-expert-parallel"] is True
    assert "enable-expert-parallel" not in gpu_arguments(cfg, tensor=2)


def test_vllm_takes_every_option():
    """Names and values, as far as vLLM reads them without a GPU."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.config.attention import AttentionConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from megatron_fp8rl.rollout.vllm_plugin.vllm_imports import make_arg_parser

    cfg = tiny_qwen3_moe()
    arguments = gpu_arguments(
        cfg, {"engine_attention": "FLASH_ATTN"}, sleep_level=1, tensor=2, expert=2, graphs="plain"
    )
    args = vllm_args.server_command(arguments, listen_fd=3)[5:]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(args)
    assert parsed.enable_sleep_mode and parsed.enable_expert_parallel
    assert (parsed.linear_backend, parsed.moe_backend) == ("deep_gemm", "triton")
    assert AttentionConfig.validate_backend_before(parsed.attention_backend).name == "FLASH_ATTN"
    compilation = parsed.compilation_config
    assert compilation.mode == CompilationMode.NONE
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert parsed.async_scheduling is None  # vLLM decides


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_steps_with_drafts_are_not_scheduled_ahead(method):
    """vLLM hands drafts to a scheduler of its own order of steps only; ours would verify none of them."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from megatron_fp8rl.rollout.vllm_plugin.patches_scheduler import AsyncScheduler, BufferingScheduler
    from megatron_fp8rl.rollout.vllm_plugin.vllm_imports import make_arg_parser

    arguments = gpu_arguments(replace(tiny_qwen3_moe(), precision=PrecisionConfig(exact=False)), speculation=method)
    args = vllm_args.server_command(arguments, listen_fd=3)[5:]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(args)
    assert parsed.async_scheduling is False
    assert parsed.scheduler_cls.endswith(".BufferingScheduler") and not issubclass(BufferingScheduler, AsyncScheduler)


def test_deep_gemm_is_compiled_when_it_is_used():
    cfg = replace(tiny_qwen3_moe(), precision=PrecisionConfig(exact=False))
    environment = environment_on(WITHOUT_FLASHINFER, cfg)
    assert environment["VLLM_DEEP_GEMM_WARMUP"] == "skip" and environment["VLLM_USE_DEEP_GEMM"] == "1"
    assert environment["VLLM_MOE_USE_DEEP_GEMM"] == "0" and environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    experts = replace(cfg, precision=replace(cfg.precision, kernels={"engine_experts": "deep_gemm"}))
    environment = environment_on(HOPPER, experts)
    assert environment["VLLM_MOE_USE_DEEP_GEMM"] == "1" and "VLLM_USE_FLASHINFER_SAMPLER" not in environment
    assert not {"VLLM_USE_DEEP_GEMM", "VLLM_DEEP_GEMM_WARMUP"} & environment_on(CPU, cfg).keys()


@pytest.mark.parametrize(("records", "runner"), [(False, "1"), (True, "0")])
def test_seeds_are_drawn_in_one_kernel_unless_routers_are_recorded(records, runner):
    """The runner that records what routers chose is the one that loops over requests."""
    cfg = tiny_qwen3_moe()
    cfg = replace(cfg, engine=replace(cfg.engine, record_routed_experts=records))
    assert environment_on(HOPPER, cfg)["VLLM_USE_V2_MODEL_RUNNER"] == runner
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment_on(CPU, cfg)


def test_a_kernel_that_is_not_installed_is_refused():
    cfg = tiny_qwen3_moe()
    cfg = replace(cfg, precision=replace(cfg.precision, kernels={"engine_attention": "FLASHINFER"}))
    assert choose(cfg, HOPPER, "engine").engine.attention == "FLASHINFER"
    with pytest.raises(
        ConfigError, match="--precision.kernels.engine_attention = 'FLASHINFER': the package flashinfer"
    ):
        choose(cfg, WITHOUT_FLASHINFER, "engine")


def run(*, world: int, replicas: int, tensor: int, where: str) -> RunConfig:
    cfg = tiny_qwen3()
    engine = replace(cfg.engine, num_replicas=replicas, tensor=tensor, placement=where)
    return replace(cfg, parallel=replace(cfg.parallel, world_size=world), engine=engine)


def gpus(count: int) -> list[str]:
    return [str(i) for i in range(count)]


@pytest.mark.parametrize(
    ("world", "replicas", "tensor", "where", "expected"),
    [
        (4, 4, 1, "colocated", ["0", "1", "2", "3"]),
        (4, 2, 2, "colocated", ["0,1", "2,3"]),
        (4, 1, 2, "colocated", ["0,1"]),
        (2, 2, 1, "separate", ["2", "3"]),
        (2, 3, 2, "separate", ["2,3", "4,5", "6,7"]),
    ],
)
def test_replicas_get_the_trainers_gpus_or_those_behind_them(world, replicas, tensor, where, expected):
    cfg = run(world=world, replicas=replicas, tensor=tensor, where=where)
    assert placement.assign(cfg.engine, gpus(8), local_ranks=world, world_size=cfg.parallel.world_size) == expected


def test_gpus_keep_the_names_of_the_environment():
    listed = {"CUDA_VISIBLE_DEVICES": "GPU-a, 3,GPU-c,7"}
    assert placement.visible_gpus(listed) == ["GPU-a", "3", "GPU-c", "7"]
    cfg = run(world=2, replicas=1, tensor=2, where="separate")
    assert placement.assign(
        cfg.engine, placement.visible_gpus(listed), local_ranks=2, world_size=cfg.parallel.world_size
    ) == ["GPU-c,7"]
    # As CUDA reads it: everything behind an entry that names no GPU is hidden, and an empty list hides all.
    assert placement.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}) == ["0", "1"]
    assert placement.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_only_ranks_of_this_host_count():
    """16 ranks on two hosts: the engines of the first host lie behind its 8."""
    cfg = run(world=16, replicas=1, tensor=2, where="separate")
    assert placement.assign(cfg.engine, gpus(10), local_ranks=8, world_size=cfg.parallel.world_size) == ["8,9"]


@pytest.mark.parametrize(
    ("world", "replicas", "tensor", "where", "shown", "field", "args"),
    [
        (4, 5, 1, "colocated", 8, "--engine.num_replicas = 5", "Lower it to 4, or --engine.placement separate"),
        (1, 1, 2, "colocated", 8, "--engine.num_replicas = 1", "Lower --engine.tensor to 1"),
        (2, 3, 2, "separate", 6, "--engine.num_replicas = 3", "Lower it to 2"),
        (8, 1, 1, "separate", 8, "--engine.num_replicas = 1", "Use --engine.placement colocated"),
        (4, 1, 1, "separate", 2, "--parallel.world_size = 4", "which shows 2 GPUs (0, 1). Lower it to 2"),
    ],
)
def test_too_few_gpus_are_refused_with_a_remedy(world, replicas, tensor, where, shown, field, args):
    cfg = run(world=world, replicas=replicas, tensor=tensor, where=where)
    with pytest.raises(ConfigError) as error:
        placement.assign(cfg.engine, gpus(shown), local_ranks=world, world_size=cfg.parallel.world_size)
    assert field in str(error.value) and args in str(error.value)


def test_an_engine_sees_its_gpus_and_nothing_of_the_trainers_settings(monkeypatch, tmp_path):
    trainer = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    for name, value in trainer.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fleet_module, "local_hardware", lambda: Hardware("hopper"))
    environments: list[dict[str, str]] = []

    def start_server(arguments, environment, *, gpus, token, **unused):
        environments.append(server_process._environment(environment, token, gpus))
        raise FileNotFoundError("no engine is wanted here")

    monkeypatch.setattr(replicas, "start_server", start_server)
    monkeypatch.setattr(Fleet, "_keep_all", lambda self: None)
    cfg = run(world=2, replicas=2, tensor=1, where="separate")
    with Fleet.start(cfg, tmp_path, tmp_path, wait=False) as fleet:
        for index in range(2):
            with pytest.raises(FileNotFoundError):
                fleet._replicas.spawn(index)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["6", "7"]
    assert not environments[0].keys() & (trainer.keys() - {"CUDA_VISIBLE_DEVICES"})
    with pytest.raises(ConfigError, match="this host shows 4"):
        Fleet.start(run(world=2, replicas=3, tensor=1, where="separate"), tmp_path, tmp_path, wait=False)
