"""Kind of a data source, from its name: rows of files, a hub dataset, a class, or a generator. Pure."""

import glob
import re
from pathlib import Path
from typing import Literal

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.config import RunConfig

Kind = Literal["rows", "hub", "class", "generator"]

HUB, CLASS = "hub:", "env:"
VERIFIERS = "verifiers:"  # a taskset of that library, on the command line
SUPERVISED = ("sft", "dpo")  # values of algo.loss
_SPLIT = re.compile(r"(?:train|test|valid(?:ation)?|val|dev|eval)(?![a-z])", re.IGNORECASE)  # begins a name
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


def kind_of(dataset: str) -> Kind:
    """The kind of ``EnvironmentConfig.dataset``. A name that looks like a path is "rows", even if it does not exist."""
    if dataset.startswith(HUB):
        return "hub"
    if dataset.startswith((CLASS, VERIFIERS)):
        return "class"
    looks_like_path = dataset.endswith(SUFFIXES) or "/" in dataset or glob.has_magic(dataset)
    if looks_like_path or Path(dataset).exists():
        return "rows"
    return "class" if ":" in dataset else "generator"


def has_rows(dataset: str) -> bool:
    """Whether the source is a finite list of rows, whose rewards are configured separately."""
    return kind_of(dataset) in ("rows", "hub")


def is_supervised(cfg: RunConfig) -> bool:
    """Whether a run learns its rows as they are (commands sft and dpo): nothing samples answers or scores them."""
    sources = cfg.data.environments
    return cfg.algo.loss in SUPERVISED and all(
        has_rows(source.dataset) and not source.rewards and not source.agent for source in sources
    )


def job_of(cfg: RunConfig) -> Literal["rl", "distill", "sft", "dpo"]:
    """The training job that a configuration describes."""
    if is_supervised(cfg):
        return "dpo" if cfg.algo.loss == "dpo" else "sft"
    return "distill" if any(source.teacher for source in cfg.data.environments) else "rl"


def short_name(dataset: str) -> str:
    """A name for metrics and prompt ids: of files and hub names, the last path component without suffix."""
    if dataset.startswith(VERIFIERS):
        return VERIFIERS + dataset.removeprefix(VERIFIERS).rpartition("/")[2]
    if not has_rows(dataset):
        return dataset.removeprefix(CLASS)
    name = Path(dataset.removeprefix(HUB)).name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return re.sub(r"[^\w.-]+", "_", name).strip("_") or "rows"


def files_of(dataset: str) -> list[Path]:
    """The sorted files of a source of rows. A folder written by ``datasets.save_to_disk`` counts as one file, and
    hidden files do not count. Raises FileNotFoundError with near matches, or if the files are of several splits."""
    path = Path(dataset).expanduser()
    if glob.has_magic(str(path)):
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if name.endswith(SUFFIXES)]
    elif path.is_dir():
        if is_saved(path):
            return [path]
        files = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES)]
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    else:
        files = [path] if path.is_file() and path.name.endswith(SUFFIXES) else []
    if not files:
        raise FileNotFoundError(f"{dataset}: {_why_nothing(path)}")
    names = {part for file in files for part in (file.relative_to(path).parts if path.is_dir() else (file.name,))}
    splits = sorted({match[0].lower() for name in names if (match := _SPLIT.match(name))})
    if len(splits) > 1:
        raise FileNotFoundError(f"{dataset}: has files of the splits {' and '.join(splits)}; name those of one split")
    return sorted(files)


def is_saved(path: Path) -> bool:
    """Whether ``datasets.save_to_disk`` wrote this folder."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _why_nothing(path: Path) -> str:
    kinds = ", ".join(SUFFIXES)
    if path.is_file():
        return f"unsupported file type; supported: {kinds}"
    if glob.has_magic(str(path)):
        return f"no file matches with a suffix of {kinds}"
    if path.is_dir():
        return f"the folder has no file with a suffix of {kinds}"
    if not path.parent.is_dir():
        return f"{path.parent} does not exist"
    return "no such file or folder" + near_matches(path.name, [entry.name for entry in path.parent.iterdir()])
