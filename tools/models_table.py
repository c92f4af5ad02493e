"""The table of docs/models_and_layouts.md: the shipped runs of real models, what they need, and where they were run.

    python tools/models_table.py --write

Sizes and layouts come from the doctor. ``RAN``, written by hand, says which configurations were run: only what rows of
benchmarks/results show counts. ``tests/unit/test_model_configs.py`` compares the page with this program.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models_and_layouts.md"
BEGIN, END = "<!-- begin table -->", "<!-- end table -->"
RAN = {
    "grpo_qwen3_8b": "never as it is; its shape: 8 of 36 layers on one H200",
    "grpo_qwen3_30b_a3b": "never as it is; its shape: all 48 layers on one H200 for exactness, 5 for mismatch",
    "grpo_qwen3_30b_a3b_colocated": "never as it is; its shape: all 48 layers on four H200s",
    "grpo_qwen25_7b": "never as it is; its shape: 4 of 28 layers on one H200",
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


def page(text: str) -> str:
    """``text`` with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/models_and_layouts.md instead of printing")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print(table())
