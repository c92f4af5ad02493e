"""``python -m checkpoint_tools COMMAND ...``: the command line of the checkpoint tools.

A command is a module of this package with a dataclass ``Options``, which tyro parses, and ``run(options)``, which
returns the exit status; 2: a wrong command line or an unusable checkpoint. Modules are imported on use, so ``--help``
is fast.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from checkpoint_tools.errors import CheckpointError

COMMANDS = {  # module name: line of help
    "hf_to_megatron": "Hugging Face checkpoint (also block FP8) to a Megatron-Core checkpoint for any parallel layout",
    "megatron_to_hf": "Megatron-Core checkpoint of any layout, or a run's newest one, to a Hugging Face checkpoint",
    "gguf_to_hf": "GGUF file of llama.cpp to a Hugging Face checkpoint",
    "hf_to_fp8": "quantize a Hugging Face checkpoint to block FP8 or MXFP8 for vLLM and transformers",
    "widen": "the same function with larger sizes, so that FP8 blocks tile every matrix",
    "upcycle": "dense Hugging Face checkpoint to a mixture of experts that starts from it",
    "verify": "check a conversion: the digest of every tensor, and logits against transformers",
    "inspect": "list tensors with shapes, types and sizes, and count parameters; reads no weights",
    "diff": "compare two checkpoints of any kind, tensor by tensor",
}

_PROGRAM = "python -m checkpoint_tools"


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0 if args else 2
    name = args[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        print(f"{_PROGRAM}: unknown command {name!r}{hint}. Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return _run(name, args[1:])
    except (CheckpointError, ValueError) as error:
        print(f"{_PROGRAM} {name}: {error}", file=sys.stderr)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"{_PROGRAM} {name}: {message}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{_PROGRAM} {name}: interrupted; run the same command again to continue a conversion", file=sys.stderr)
        return 130
    return 2


def _run(name: str, args: Sequence[str]) -> int:
    import tyro

    module = importlib.import_module(f"checkpoint_tools.{name}")
    options = tyro.cli(
        module.Options,
        prog=f"{_PROGRAM} {name}",
        description=COMMANDS[name],
        args=args,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
    )
    return module.run(options)


def overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"usage: {_PROGRAM} COMMAND ...", "", "commands:"]
    lines += [f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items()]
    return "\n".join([*lines, "", f"{_PROGRAM} COMMAND --help lists a command's options."])


if __name__ == "__main__":
    sys.exit(main())
