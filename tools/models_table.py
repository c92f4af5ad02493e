"""The table of docs/models_and_layouts.md: the shipped runs of real models, what they need, and where they were run.
The table of docs/models.md: what is known about each family.

    python tools/models_table.py --write

Sizes and layouts come from the doctor, what CPUs show from the tables of tests. ``RAN`` and ``ON_GPUS``, written by
hand, say what was run on GPUs: only what rows of benchmarks/results, docs/performance.md and docs/accuracy.md show
counts. ``tests/unit/test_model_configs.py`` compares the pages with this program.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models_and_layouts.md"
FAMILIES_PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- begin table -->", "<!-- end table -->"
# Family -> (released models, one GPU, several GPUs, learning curve)
ON_GPUS = {
    "llama": ("Llama 2 and 3, SmolLM2, TinyLlama", "4 layers of 3.1-8B, exact", "", ""),
    "mistral": (
        "Mistral 7B, Nemo, Small 3.1 and 3.2 (text)",
        "SmolLM2-135M after `widen`, exact",
        "",
        "[pretrained SmolLM2-135M](accuracy.md), 200 steps",
    ),
    "qwen2": ("Qwen2, Qwen2.5, R1 distillations", "4 layers of 7B, exact", "", ""),
    "qwen3": ("Qwen3, dense; Qwen3-VL, dense (text)", "4B, 8 layers of 8B", "8B on 2", ""),
    "qwen3_moe": ("Qwen3-30B-A3B, 235B-A22B", "30B-A3B, exact", "30B-A3B on 4", "small model, 40 steps"),
    "mixtral": (
        "Mixtral 8x7B, 8x22B",
        "SmolLM2-135M after `upcycle` and `widen`, exact",
        "",
        "[8 experts of SmolLM2-135M](accuracy.md#mixture-of-experts), 100 steps",
    ),
    "deepseek_v3": ("DeepSeek-V3 and R1, Kimi-K2, K2.5 and K2.6 (text)", "", "", ""),
    "glm4_moe": ("GLM-4.5, 4.6 and 4.7", "", "", ""),
    "glm4_moe_lite": ("GLM-4.7-Flash", "2 layers, one step", "", ""),
    "minimax_m2": ("MiniMax-M2", "", "", ""),
    "olmo2": ("OLMo-2", "4 layers of 7B, exact", "", ""),
    "olmo3": ("OLMo-3", "4 layers of 7B, exact", "", ""),
    "gemma3_text": ("Gemma 3 (4B, 12B and 27B: text)", "", "", ""),
    "gpt_oss": ("gpt-oss-20b and 120b", "", "", ""),
    "qwen3_next": ("Qwen3-Next-80B-A3B", "", "", ""),
    "phi3": ("Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini", "4 layers of Phi-4-mini, exact", "", ""),
    "qwen3_5_text": ("Qwen3.5, dense (text)", "", "", ""),
    "qwen3_5_moe_text": ("Qwen3.5-35B-A3B (text)", "", "", ""),
}
RAN = {
    "grpo_qwen3_8b": "never as it is; its shape: 8 of 36 layers on one H200",
    "grpo_qwen3_30b_a3b": "never as it is; its shape: all 48 layers on one H200 for exactness, 5 for mismatch",
    "grpo_qwen3_30b_a3b_colocated": "never as it is; its shape: all 48 layers on four H200s",
    "grpo_qwen25_7b": "never as it is; its shape: 4 of 28 layers on one H200",
    "grpo_olmo2_7b": "never as it is; its shape: 4 of 32 layers on one H200, shared",
    "grpo_olmo3_7b": "never as it is; its shape: 4 of 32 layers on one H200, shared",
    "grpo_phi4_mini": "never as it is; its shape: 4 of 32 layers on one H200, shared",
    "grpo_glm_47_flash": "never as it is; its shape: 2 of 47 layers for one step on one H200, shared",
}


def row(name: str) -> str:
    """One line of the table."""
    sys.path.insert(0, str(ROOT))
    from megatron_fp8rl import cli
    from megatron_fp8rl.preflight.assessment import DoctorOptions
    from megatron_fp8rl.preflight.diagnosis import diagnose
    from megatron_fp8rl.preflight.memory import GIB

    function = cli.config_functions()[name]
    num_gpus, gpu = re.search(r"on (\d+) (H\d+)", function.__doc__).groups()
    found = diagnose(function(), DoctorOptions(gpu=gpu.lower()))
    cfg, count = found.cfg, found.parameters
    size = f"{count.total / 1e9:.1f} B" + (f", {count.active / 1e9:.1f} B active" if cfg.model.is_moe else "")
    parallel = cfg.parallel
    degrees = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "EP": parallel.expert}
    layout = " ".join(f"{key}{value}" for key, value in degrees.items() if value > 1) or "data parallel"
    engines = f"{cfg.engine.num_replicas} x {cfg.engine.tensor}"
    shared = " in turns" if cfg.engine.placement == "colocated" else ""
    trainer, engine = (found.trainer.total_bytes / GIB, found.engine.estimate.total_bytes / GIB)
    return (
        f"| `{name}` | {size} | {num_gpus} {gpu}{shared} | {parallel.world_size}: {layout} | {engines} | "
        f"{trainer:.0f} + {engine:.0f} | {RAN.get(name, 'never')} |"
    )


def table() -> str:
    """The whole table, in Markdown."""
    sys.path.insert(0, str(ROOT))
    from megatron_fp8rl import cli

    head = (
        "| configuration | parameters | GPUs | trainer | engines | GiB a GPU: trainer + engine | ever run |\n"
        "|---|---|---|---|---|---|---|"
    )
    names = sorted(name for name in cli.config_functions() if name.startswith("grpo_"))
    return "\n".join([head, *map(row, names)])


def families_table() -> str:
    """What tests show about each family, and what was run on GPUs, in Markdown."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]
    importlib.import_module("tests.helpers.dist")  # before anything that imports Megatron-Core
    import test_engine_families
    import test_exact_sums

    from megatron_fp8rl.names.registry import FAMILIES
    from tests.dist import test_logits
    from tests.helpers import families
    from tests.unit.names.test_family_tables import CASES

    converted = {family for family, _ in CASES.values()}
    compared = {model.family for model in (*families.MODELS.values(), *test_logits.MODELS.values())}
    engines = {**test_exact_sums.QWEN3, **test_engine_families.MODELS}
    lines = [
        "| `model_type` | models | converts | logits | engine | exact on CPUs | one GPU | several GPUs | learning |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        models, *gpus = ON_GPUS[family]
        tested = [family in converted, family in compared, family in engines]
        refusal = test_exact_sums.refusal(engines[family]) if family in engines else "not tested"
        cells = [models, *("yes" if done else "not tested" for done in tested), f"no: {refusal}" if refusal else "yes"]
        lines.append(f"| `{family}` | {' | '.join([*cells, *(cell or 'never' for cell in gpus)])} |")
    return "\n".join(lines)


def page(text: str, content: str) -> str:
    """``text`` with a table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write both pages instead of printing the tables")
    write = parser.parse_args().write
    for path, content in ((PAGE, table()), (FAMILIES_PAGE, families_table())):
        if write:
            path.write_text(page(path.read_text(), content))
        else:
            print(content)
