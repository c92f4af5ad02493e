"""What ``show`` says of each group of layers, against what is known of models and of kernels."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import __main__ as program
from megatron_fp8rl import cli
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice, choose
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.parameters import entries
from megatron_fp8rl.preflight.findings import apply
from megatron_fp8rl.preflight.precision_table import kind_of
from megatron_fp8rl.preflight.show import Group, groups
from model_configs.deepseek import grpo_deepseek_v3
from model_configs.dense import grpo_qwen3_4b
from model_configs.qwen3 import grpo_qwen3_8b, grpo_qwen3_30b_a3b
from model_configs.tiny import tiny_qwen3_moe

ROOT = Path(__file__).parents[3]
CPU, HOPPER = Hardware("cpu"), Hardware("hopper")


def change(cfg, **fields):
    return apply(cfg, tuple((path.replace("__", "."), value) for path, value in fields.items()))


def shown(cfg, hardware: Hardware = HOPPER) -> dict[tuple[str, str], Group]:
    return {(group.name, group.layers): group for group in groups(cfg, choose(cfg, hardware))}


def said(capsys, *args: str) -> tuple[int, str]:
    status = cli.main(program.COMMANDS, ["show", *args])
    return status, capsys.readouterr().out


def test_groups_of_a_mixture_of_experts_on_a_hopper_gpu():
    rows = shown(change(grpo_qwen3_30b_a3b(), precision__exact=False))
    assert list(rows) == [
        ("embedding", "-"),
        ("attention projections", "0-47"),
        ("routed experts", "0-47"),
        ("router", "0-47"),
        ("norms, biases", "0-47"),
        ("attention", "0-47"),
        ("output head", "-"),
    ]
    assert rows["routed experts", "0-47"] == Group(
        name="routed experts",
        layers="0-47",
        trainer="FP8 blockwise",
        trainer_kernel="DeepGEMM (grouped)",
        wire="E4M3 + pow2 scales",
        engine_kernel="Triton",
    )
    linears = rows["attention projections", "0-47"]
    assert linears.trainer_kernel == linears.engine_kernel == "DeepGEMM" and linears.wire == "E4M3 + pow2 scales"
    assert rows["router", "0-47"].trainer == rows["embedding", "-"].wire == rows["output head", "-"].wire == "BF16"
    assert rows["attention", "0-47"].trainer_kernel == "cuDNN" and rows["attention", "0-47"].wire == "-"


def test_show_says_whether_the_run_is_exact_and_which_field_forbids_it(capsys):
    _, text = said(capsys, "grpo_qwen3_30b_a3b")
    assert "precision.exact: on: --engine.kv_cache_dtype fp8 would make it faster" in text
    status, text = said(capsys, "grpo_qwen3_30b_a3b", "--precision.scales", "fp32")
    assert "precision.exact: off: precision.scales = 'fp32': " in text and status == 0


def test_first_and_last_layers_are_groups_of_their_own():
    rows = shown(change(grpo_qwen3_30b_a3b(), precision__bf16_first_layers=2, precision__bf16_last_layers=1))
    for kind in ("attention projections", "routed experts"):
        formats = {layers: (g.trainer, g.wire) for (name, layers), g in rows.items() if name == kind}
        assert formats == {
            "0-1": ("BF16", "BF16"),
            "2-46": ("FP8 blockwise", "E4M3 + pow2 scales"),
            "47": ("BF16", "BF16"),
        }
    assert rows["attention projections", "0-1"].trainer_kernel == "PyTorch"
    assert rows["routed experts", "47"].trainer_kernel == "DeepGEMM (grouped)"  # in BF16, too
    assert ("norms, biases", "0-47") in rows and list(rows)[1:3] == [
        ("attention projections", "0-1"),
        ("routed experts", "0-1"),
    ]


@pytest.mark.parametrize("exact, kernels", [("auto", ("Triton, invariant",) * 2), (False, ("PyTorch", "vLLM"))])
def test_edge_layers_of_an_exact_run_have_the_products_of_batch_invariant_engines(exact, kernels):
    edges = {"precision__bf16_first_layers": 1, "precision__bf16_last_layers": 2}
    rows = shown(change(grpo_qwen3_4b(), precision__exact=exact, **edges))
    for layers in ("0", "34-35"):
        for kind in ("attention projections", "feed-forward, dense"):
            group = rows[kind, layers]
            assert (group.trainer, group.trainer_kernel, group.engine_kernel) == ("BF16", *kernels)
    assert rows["feed-forward, dense", "1-33"].engine_kernel == "DeepGEMM"


def test_both_ends_may_differ_in_format_and_the_wire_is_the_engine_s():
    rows = shown(change(grpo_qwen3_8b(), precision__trainer="delayed", precision__scales="fp32"))
    group = rows["feed-forward, dense", "0-35"]
    assert (group.trainer, group.trainer_kernel) == ("FP8 delayed", "Transformer Engine")
    assert (group.wire, group.engine_kernel) == ("E4M3 + fp32 scales", "DeepGEMM")
    bf16 = shown(change(grpo_qwen3_8b(), precision__trainer="bf16", precision__rollout="bf16"))
    assert {(g.trainer, g.wire) for g in bf16.values()} == {("BF16", "BF16"), ("BF16", "-")}


def test_a_matrix_that_deep_gemm_does_not_multiply_shows_the_other_kernel():
    cfg = grpo_deepseek_v3()
    mla = replace(cfg.model.mla, qk_rope_head_dim=48)  # kv_a_proj_with_mqa has 560 rows
    cfg = replace(cfg, model=replace(cfg.model, mla=mla))
    rows = shown(cfg)
    assert rows["attention projections", "0-60"].trainer_kernel == "DeepGEMM, Transformer Engine"
    for key in (("shared experts", "3-60"), ("feed-forward, dense", "0-2")):
        assert rows[key].trainer_kernel == "DeepGEMM"


def test_a_cpu_computes_in_torch():
    rows = shown(tiny_qwen3_moe(), CPU)
    assert {g.trainer_kernel for g in rows.values()} == {"PyTorch", "PyTorch (emulated)"}
    assert rows["routed experts", "0-1"].engine_kernel == "PyTorch (emulated)"
    edge = replace(tiny_qwen3_moe(), precision=replace(tiny_qwen3_moe().precision, bf16_last_layers=1))
    assert shown(edge, CPU)["routed experts", "1"].engine_kernel == "PyTorch"


@pytest.mark.parametrize("name", cli.config_functions())
def test_formats_are_those_of_the_layer_table_for_every_configuration(name):
    """Tensor by tensor, not layer by layer."""
    cfg = cli.config_functions()[name]()
    rows, table = groups(cfg, KernelChoice.of(cfg, HOPPER)), LayerTable.build(cfg.model, cfg.precision)
    tensors: dict[str, list[str]] = {}
    for entry in entries(cfg.model):
        for tensor, shape in entry.weight.parts:
            tensors.setdefault(kind_of(tensor, len(shape)), []).append(tensor)
    for kind, names in tensors.items():
        mine = [g for g in rows if g.name == kind]
        assert mine, kind
        in_fp8 = any(table.trainer_format(tensor).is_quantized for tensor in names)
        assert any(g.trainer.startswith("FP8") for g in mine) == in_fp8, kind
        in_fp8 = any(table.rollout_format(tensor).is_quantized for tensor in names)
        assert any(g.wire.startswith("E4M3") for g in mine) == in_fp8, kind


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "cpu"])
def test_it_is_narrow_and_says_why(gpu, capsys):
    for name in cli.config_functions():
        _, text = said(capsys, name, "--gpu", gpu)
        assert max(map(len, text.splitlines())) <= 120, name
    status, text = said(capsys, "tiny_qwen3_moe", "--gpu", "cpu")
    assert status == 0 and "engine, experts: PyTorch (emulated): there is no GPU" in text and "Refused" not in text


def test_fields_of_the_command_line_and_their_reasons_are_shown(capsys):
    status, text = said(capsys, "grpo_qwen3_30b_a3b", "--precision.kernels.engine_attention", "TRITON_ATTN")
    assert status == 0 and "engine, attention: Triton: precision.kernels.engine_attention = TRITON_ATTN" in text


def test_refused_configurations_show_the_refusals(capsys):
    status, text = said(capsys, "grpo_qwen3_30b_a3b", "--gpu", "b200", "--precision.kernels.linears", "deep_gemm")
    assert status == 2 and "embedding" in text
    refused = text.partition("Refused\n")[2]
    assert " ".join(refused.split()) == (
        "--precision.kernels.linears = 'deep_gemm': DeepGEMM's linear kernels need Hopper; this machine is "
        "'blackwell'. Choose te."
    )
    status, text = said(capsys, "grpo_qwen3_30b_a3b", "--parallel.tensor", "3")  # divides nothing: no group
    assert status == 2 and text.startswith("Refused") and "does not divide the 32 attention heads" in text


def test_mxfp8_is_shown_with_its_scales_and_as_never_run(capsys):
    mxfp8 = ("--precision.trainer", "mxfp8", "--precision.rollout", "mxfp8")
    status, text = said(capsys, "grpo_qwen3_30b_a3b", "--gpu", "b200", *mxfp8)
    assert status == 0 and "E4M3 + e8m0 scales" in text and "one for 32 values of a row" in text
    assert "FlashInfer CUTLASS" in text and "MXFP8 has never run on hardware" in text
    status, text = said(capsys, "tiny_qwen3_moe", "--gpu", "cpu", *mxfp8)
    assert status == 0 and "never run" not in text.lower()
    status, text = said(capsys, "grpo_qwen3_30b_a3b", *mxfp8)
    assert status == 2 and "only Blackwell's tensor cores read a scale for 32 values" in " ".join(text.split())


def test_it_needs_no_torch():
    code = (
        "import sys; from megatron_fp8rl import __main__ as p, cli; "
        "cli.main(p.COMMANDS, ['show', 'tiny_qwen3_moe', '--gpu', 'cpu']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
