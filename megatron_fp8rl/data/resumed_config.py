"""Compare the configuration of a checkpoint with the one of the run that resumes: what changed, what is refused.

A resumed run applies every changed field from its next step on. Fields that could not take effect any more are refused.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fp8rl.config import RunConfig, Violation
from megatron_fp8rl.data.unchanged import DataFile, digest_of
from megatron_fp8rl.data.weight_files import TOKENIZER_FILES
from megatron_fp8rl.envs.rewards import functions

_MAX_CHARACTERS = 60  # of a value in a message
_MAX_MODEL_FIELDS = 3  # that are refused one by one
_SAMPLED_BLOCKS, _BLOCK_BYTES = 16, 1 << 16  # of each file of weights
_NOT_THERE = object()
# They describe how the first weights are found or drawn; everything else in ``model`` is the architecture.
_INITIAL_WEIGHTS = ("model.hf_path", "model.random", "model.initializer_range", "model.embedding_range")
_SAME = "Set it back, or name another output_dir for a new run"


class Change(NamedTuple):
    """A field whose value differs from the checkpoint's; ``text`` is a line for people."""

    field: str
    before: Any
    now: Any

    @property
    def text(self) -> str:
        return f"{self.field} was {_short(self.before)}, now {_short(self.now)}{_EFFECTS.get(self.field, '')}"


_EFFECTS = {
    "optim.states": "; moments of the checkpoint are rounded to it",
    "seed": "; the rows of the data are in another order, so some of this epoch may repeat",
    "model.hf_path": "; the weights come from the checkpoint, and only a reference model is read from this folder",
}


def changes(before: Mapping[str, Any], cfg: RunConfig) -> list[Change]:
    """All fields that differ from the configuration of a checkpoint, in the order of the configuration. ``before``: the
    configuration as JSON. Fields that only another release of the program knows are left out."""
    now = json.loads(json.dumps(dataclasses.asdict(cfg)))
    return list(_differing("", before, now))


def refusals(before: Mapping[str, Any], cfg: RunConfig, where: Path, *, steps: int | None = None) -> list[Violation]:
    """The changed fields that could not take effect on a resume. ``where``: the checkpoint's folder. ``steps``: its
    finished steps of reinforcement learning; None in a warm start."""
    errors = []
    for change in changes(before, cfg):
        if change.field.startswith("model.") and (problem := _model_problem(change, where)):
            errors.append(Violation(f"--{change.field}", change.now, problem, _SAME))
        elif change.field.startswith("lora."):
            problem = f"was {_short(change.before)} in {where}, whose trained weights it defines"
            errors.append(Violation(f"--{change.field}", change.now, problem, _SAME))
        elif change.field == "optim.optimizer":
            problem = f"was {_short(change.before)} in {where}, whose states have another meaning"
            errors.append(Violation(f"--{change.field}", change.now, problem, _SAME))
        elif change.field.startswith("warm_start.") and steps is not None:
            problem = f"was {_short(change.before)} in the warm start, which is finished, so a change has no effect"
            errors.append(Violation(f"--{change.field}", change.now, problem, _SAME))
    if problem := _other_frequencies(before, cfg):
        remedy = "Set sampling.max_completion_tokens back, or name another output_dir for a new run"
        errors.append(
            Violation("--sampling.max_completion_tokens", cfg.sampling.max_completion_tokens, problem, remedy)
        )
    of_model = [error for error in errors if error.field.startswith("--model.")]
    if len(of_model) > _MAX_MODEL_FIELDS:  # not a changed field, but another model
        problem = f"{where} is of another model: {len(of_model)} fields differ, such as {of_model[0].field}"
        errors = [Violation("--output_dir", cfg.run_dir, problem, "Give the new run another --name or --output_dir")]
    if steps is not None and cfg.num_steps < steps:
        problem = f"the run has already finished step {steps}: {where}"
        errors.append(Violation("--num_steps", cfg.num_steps, problem, f"Set {steps} or more"))
    return errors


def content_digests(cfg: RunConfig, tokenizer_dir: Path) -> dict[str, str]:
    """Digests of the tokenizer's files and of those of reward functions, by name. Their paths stay the same in the
    configuration if their content changes."""
    own = {reward.function for source in cfg.data.environments for reward in source.rewards}
    files = [tokenizer_dir / name for name in TOKENIZER_FILES]
    files += [functions.parse(spec)[0] for spec in sorted(own) if ".py:" in spec]
    return {file.name: digest_of([DataFile(file)]) for file in files if file.is_file()}


def changed_contents(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Lines about files of :func:`content_digests` that are other ones, new or gone. ``before``: empty in checkpoints
    of earlier releases."""
    names = [name for name in {**before, **now} if before and before.get(name) != now.get(name)]
    return [f"the content of {name}; the run goes on with the new one" for name in names]


def finished_warm_start_refusals(folder: Path, cfg: RunConfig) -> list[Violation]:
    """Changed fields of a warm start that is finished; ``folder`` contains its records and weights."""
    try:
        before = json.loads((folder / "config.json").read_text())["warm_start"]
    except (OSError, ValueError, KeyError):
        return []
    return refusals({"warm_start": before}, cfg, folder, steps=0) if (folder / "hf").is_dir() else []


def _other_frequencies(before: Mapping[str, Any], cfg: RunConfig) -> str:
    """Why new lengths would change the function of a model with longrope; empty if they do not."""
    if (scaling := cfg.model.rope_scaling) is None or scaling.kind != "longrope" or "sampling" not in before:
        return ""
    sampling, session = before["sampling"], before.get("session", {})
    longest = max(sampling["max_prompt_tokens"] + sampling["max_completion_tokens"], session.get("max_tokens") or 0)
    if scaling.divisors(longest) == scaling.divisors(cfg.max_sequence_tokens):
        return ""
    now, limit = cfg.max_sequence_tokens, scaling.original_max_position_embeddings
    return f"sequences of {now:,} tokens instead of {longest:,} take other frequencies (limit {limit:,})"


def _model_problem(change: Change, where: Path) -> str:
    """Why a resume cannot apply a changed field of ``model``; empty if it can."""
    if change.field not in _INITIAL_WEIGHTS:
        return f"is {change.before!r} in {where}, which contains a different model"
    if change.field == "model.hf_path" and change.before is not None and change.now is not None:
        before, now = Path(change.before), Path(change.now)
        if not before.is_dir() or _sampled_weights(before) == _sampled_weights(now):
            return ""  # moved or copied
    return f"was {_short(change.before)} when the run started; weights come from {where}, so a change has no effect"


def _sampled_weights(folder: Path) -> dict[str, Any]:
    """Size and some bytes of each file of weights, to distinguish two trained models in a moment."""
    contents: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            blocks = []
            for index in range(_SAMPLED_BLOCKS):
                file.seek(max(0, size - _BLOCK_BYTES) * index // (_SAMPLED_BLOCKS - 1))
                blocks.append(file.read(_BLOCK_BYTES))
        contents[path.name] = (size, blocks)
    return contents


def _differing(path: str, before: Any, now: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        is_free = path.endswith("options") or path.endswith("arguments") or path == "precision.kernels"
        names = [*now, *(name for name in before if is_free and name not in now)]
        for name in names:
            if is_free or name in before:
                below = f"{path}.{name}" if path else name
                yield from _differing(below, before.get(name, _NOT_THERE), now.get(name, _NOT_THERE))
    elif isinstance(before, list) and isinstance(now, list) and any(isinstance(item, Mapping) for item in before + now):
        for index in range(max(len(before), len(now))):
            pair = (items[index] if index < len(items) else _NOT_THERE for items in (before, now))
            yield from _differing(f"{path}[{index}]", *pair)
    elif before is _NOT_THERE or now is _NOT_THERE or before != now:
        yield Change(path, before, now)


def _short(value: Any) -> str:
    if value is _NOT_THERE:
        return "absent"
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
