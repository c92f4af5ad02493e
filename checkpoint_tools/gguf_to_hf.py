"""GGUF file of llama.cpp -> Hugging Face checkpoint: dequantized weights, tokenizer, chat template and end tokens.

In:  one file.
Out: a folder in the type of the file, or in BF16 if the file is quantized.
Runs on: this process; memory holds the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from checkpoint_tools.errors import CheckpointError
from megatron_fp8rl.data import gguf_folder


@dataclass(frozen=True, kw_only=True)
class Options:
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """GGUF file."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to create."""
    tokenizer: Path | None = None
    """Folder with the tokenizer and the chat template to use instead of those of the file."""


def run(options: Options) -> int:
    """Convert and print notes; returns 0."""
    if options.target.exists():
        raise CheckpointError(options.target, "exists already; choose another name")
    notes = gguf_folder.convert(options.source, options.target, options.tokenizer)
    print(f"{options.source} -> {options.target}")
    for note in notes:
        print(f"  {note}")
    return 0
