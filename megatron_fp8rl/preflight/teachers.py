"""The teachers of a distillation (``data.environments[i].teacher``), and whether they fit the student.

:func:`violations` is light. :func:`check` reads tokenizers and asks servers, before anything starts.
"""

import json
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.config import ConfigError, DataConfig, RunConfig, Violation
from megatron_fp8rl.names.registry import from_hf_config
from megatron_fp8rl.preflight.findings import Checks
from megatron_fp8rl.preflight.shapes import check_degrees, check_model
from megatron_fp8rl.preflight.tiling import check_tiling

_SAME = "Name a teacher with the tokenizer of the student"
# Texts that tokenizers of different families divide in different ways.
_PROBES = ("1234567 + 89 = ?", "def f(x):\n    return x**2  # ", "Grüße, 世界 🙂", " \t\n\n  don't", "ABCxyz" * 3)


def teachers_of(data: DataConfig) -> dict[str, str]:
    """The teacher of each source by the source's key: a folder or a URL."""
    from megatron_fp8rl.envs.environment import environments_by_key  # imports libraries

    return {key: source.teacher for key, source in environments_by_key(data.environments).items()}


def is_served(teacher: str) -> bool:
    """Whether a server scores for the teacher; otherwise the trainer's ranks do."""
    return "://" in teacher


def student_of(cfg: RunConfig, folder: str) -> RunConfig:
    """The configuration of the run with the model of a teacher's folder. Raises ValueError."""
    file = Path(folder).expanduser() / "config.json"
    if not file.is_file():
        raise ValueError("is not a folder with config.json")
    try:
        model = from_hf_config(json.loads(file.read_text()), fp8_weights=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"config.json cannot be used: {error}") from None
    return replace(cfg, model=replace(model, hf_path=str(file.parent.resolve())))


def violations(cfg: RunConfig) -> list[Violation]:
    """Mistakes in the choice of teachers that the configuration and config.json of their folders show."""
    errors = []
    sources = cfg.data.environments
    for index, source in enumerate(sources if any(source.teacher for source in sources) else ()):
        problem, remedy = _problem(cfg, source.teacher)
        if problem:
            errors.append(Violation(f"--data.environments.{index}.teacher", source.teacher, problem, remedy))
    if any(source.teacher for source in sources) and cfg.algo.kl_coef == 0:
        errors.append(Violation("--algo.kl_coef", 0, "ignores the teachers", "Set 1, or name no teacher"))
    kind, num, vocab_size = cfg.algo.teacher_kl, cfg.algo.teacher_top_k, cfg.model.vocab_size
    if kind != "sampled" and not any(source.teacher for source in sources):
        errors.append(Violation("--algo.teacher_kl", kind, "there is no teacher", "Use distill, or set sampled"))
    if kind == "top_k" and not 0 < num < vocab_size:
        problem = f"is not between 1 and {vocab_size - 1}, the vocabulary less one"
        errors.append(Violation("--algo.teacher_top_k", num, problem, "Set 64, or --algo.teacher_kl full"))
    return errors


def _problem(cfg: RunConfig, teacher: str) -> tuple[str, str]:
    """(problem, remedy); empty texts if there is none."""
    if not teacher:
        return "names nothing, and another source has a teacher", "Name a folder or a URL for every source"
    if is_served(teacher):
        if cfg.algo.teacher_kl == "full":
            return (
                "a server returns a few tokens, not the full vocabulary",
                "Set --algo.teacher_kl top_k, or name a folder",
            )
        if cfg.sampling.temperature != 1:
            problem = f"a server scores at temperature 1, and sampling.temperature is {cfg.sampling.temperature:g}"
            return problem, "Set --sampling.temperature 1, or name a folder"
        if cfg.sampling.truncates:
            problem = "a server scores over the whole vocabulary, and sampling keeps a part of it"
            return problem, "Remove top_p, top_k and min_p, or name a folder"
        return "", ""
    try:
        other = student_of(cfg, teacher)
    except ValueError as error:
        return str(error), "Name the folder of a Hugging Face model, or a URL"
    checks = Checks(other)
    if check_degrees(checks, check_model(checks)):
        check_tiling(checks)
    if checks.violations:
        return f"in the layout of the trainer: {checks.violations[0]}", "Change the layout or precision, or serve it"
    if other.model.vocab_size < cfg.model.vocab_size:
        return f"has {other.model.vocab_size} tokens, and the student has {cfg.model.vocab_size}", _SAME
    if cfg.algo.teacher_kl == "full" and cfg.parallel.tensor > 1 and other.model.vocab_size != cfg.model.vocab_size:
        problem = f"has {other.model.vocab_size} tokens, and the student has {cfg.model.vocab_size}: tensor-parallel "
        return problem + "ranks have other tokens of both", "Set --algo.teacher_kl top_k, or --parallel.tensor 1"
    if other.model.max_sequence_tokens < cfg.max_sequence_tokens:
        problem = f"reads {other.model.max_sequence_tokens} tokens, and a sequence has {cfg.max_sequence_tokens}"
        return problem, "Lower --sampling.max_completion_tokens"
    return "", ""


def check(cfg: RunConfig, tokenizer_dir: str) -> None:
    """Compare tokenizers, and weights with config.json. Raises ConfigError with the mistakes of all teachers."""
    from megatron_fp8rl.data.tokenizer import load_tokenizer
    from megatron_fp8rl.preflight.folder_check import check_folder
    from megatron_fp8rl.rollout.teacher_client import TeacherError, ask_tokens, ask_top_tokens, ask_window

    student, errors = load_tokenizer(tokenizer_dir), []
    for index, source in enumerate(cfg.data.environments):
        field, teacher = f"--data.environments.{index}.teacher", source.teacher
        try:
            if is_served(teacher):
                if (window := ask_window(teacher)) < (longest := cfg.max_sequence_tokens + 1):
                    raise TeacherError(f"reads {window} tokens (--max-model-len), and a sequence needs {longest}")
                if cfg.algo.teacher_kl == "top_k":
                    try:
                        ask_top_tokens(teacher, cfg.algo.teacher_top_k)
                    except TeacherError as error:
                        remedy = "Start vllm serve with --max-logprobs of at least this number, or lower it"
                        errors.append(Violation("--algo.teacher_top_k", cfg.algo.teacher_top_k, str(error), remedy))
                        continue
                probes = [text for text in _PROBES if student.unk_token_id not in student.encode(text)]
                is_same = all(
                    ask_tokens(teacher, text) == student.encode(text, add_special_tokens=False) for text in probes
                )
            else:
                check_folder(student_of(cfg, teacher).model, Path(teacher).expanduser(), field=field, reads_fp8=True)
                is_same = load_tokenizer(str(Path(teacher).expanduser())).get_vocab() == student.get_vocab()
        except (TeacherError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            errors.append(Violation(field, teacher, str(error), "Correct it, or name another teacher"))
            continue
        if not is_same:
            errors.append(Violation(field, teacher, "has another tokenizer than the student", _SAME))
    if errors:
        raise ConfigError(errors)
