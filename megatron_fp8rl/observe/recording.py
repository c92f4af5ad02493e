"""Write every rollout of a run to disk and read it back.

In: the scored groups of a step. Out: ``rollouts/step_00000012.parquet``, one file per step and one row per trajectory;
reading restores every field. Runs on: a thread of the writing trainer rank. Any process may read, also with pandas,
Polars or DuckDB. Files are renamed when complete. A resumed run moves later steps to ``rollouts/_cut``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, count, groupby, pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_fp8rl.data.checkpoint_dir import make_folder, sync_to_disk
from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Completion, Context, Prompt, Rollout, RolloutGroup, Trajectory, single_turn

if TYPE_CHECKING:
    import pyarrow

FOLDER = "rollouts"  # in the folder of a run
_CUT = "_cut"  # readers of Parquet folders skip names with an underscore
_NAME = re.compile(r"step_(\d{8,})\.parquet")
_ROWS_TOKENS = 1 << 21  # tokens of a row group at most, unless one prompt has more: bounds a reader's memory
_PROMPT = tuple(field.name for field in dataclasses.fields(Prompt))
_LISTS = ("prompt_token_ids", "token_ids", "rollout_logprobs")
_INTEGERS = (
    *("step", "seed", "min_version", "max_version", "num_prompt_tokens", "num_cached_tokens"),
    *("num_draft_tokens", "num_accepted_tokens"),
)
_TYPES = {
    **dict.fromkeys(_INTEGERS, "int64"),
    **dict.fromkeys(("group", "index", "branch"), "int32"),
    "reward": "float64",
    "routed_experts": "large_binary",
    "kept": "large_binary",  # KeptEntries.to_bytes of all sampled tokens
}
_ROLLOUT_FIELDS = tuple(field.name for field in dataclasses.fields(Rollout) if field.name not in ("prompt", "branches"))
_COMPLETION_FIELDS = tuple(field.name for field in dataclasses.fields(Completion))
_TRAJECTORY = (*_ROLLOUT_FIELDS, "branch", *_COMPLETION_FIELDS, "routed_experts_layout", "segments")
_AS_JSON = (
    *("prompt_metadata", "prompt_messages", "version_spans", "reward_parts", "turn_rewards", "turn_order"),
    *("seconds", "routed_experts_layout", "segments"),
)
_ARRAYS = ("token_ids", "rollout_logprobs", "routed_experts", "kept")  # fields of a segment in columns of their own


class RolloutWriter:
    """Writes steps to a folder on a background thread. One writer per folder.

    Existing steps from ``first`` on are moved aside. Above ``max_gib``, the oldest steps are removed, moved-aside steps
    first; the first and the newest step stay. The next call raises errors of the thread (OSError with the file's name).
    """

    def __init__(self, folder: Path, first: int = 0, max_gib: float = float("inf")) -> None:
        make_folder(folder)
        _move_aside(folder, first)
        for partial in folder.glob(".*.tmp"):
            partial.unlink()
        self._folder, self._max_bytes = folder, max_gib * 2**30
        kept = [*sorted((folder / _CUT).glob("*.parquet")), *steps_of(folder).values()]
        self._sizes = {path: path.stat().st_size for path in kept}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record rollouts")
        self._open: Future[None] | None = None

    def write(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Queue the groups of a step for writing; waits until the previous step is on disk."""
        self.flush()
        self._open = self._thread.submit(self._write, self._folder / f"step_{step:08d}.parquet", step, tuple(groups))

    def flush(self) -> None:
        written, self._open = self._open, None
        if written is not None:
            written.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _write(self, path: Path, step: int, groups: Sequence[RolloutGroup]) -> None:
        import pyarrow.parquet

        temporary = path.with_name(f".{path.name}.tmp")
        try:
            tables = _tables(step, groups)
            first = next(tables)
            with temporary.open("wb") as file:
                with pyarrow.parquet.ParquetWriter(file, first.schema, **_layout(first.schema)) as writer:
                    for table in chain([first], tables):
                        writer.write_table(table)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_to_disk(self._folder)
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror or error}: cannot record the rollouts of step {step}", str(path)
            ) from error
        self._sizes[path] = path.stat().st_size
        self._remove_old()

    def _remove_old(self) -> None:
        kept = list(self._sizes)
        first = next(path for path in kept if path.parent == self._folder)
        for path in [path for path in kept[:-1] if path != first]:
            if sum(self._sizes.values()) <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            del self._sizes[path]


def steps_of(folder: Path | str) -> dict[int, Path]:
    """The files of a recording by step, ascending; empty if there are none."""
    steps = {int(match[1]): path for path in Path(folder).glob("*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(steps.items()))


def _move_aside(folder: Path, first: int) -> None:
    """Move the steps from ``first`` on to the folder ``_cut``, where no file replaces another."""
    for path in [path for step, path in steps_of(folder).items() if step >= first]:
        (folder / _CUT).mkdir(exist_ok=True)
        names = (f"{path.stem}{end}.parquet" for end in chain([""], map(".{}".format, count(1))))
        os.replace(path, next(new for name in names if not (new := folder / _CUT / name).exists()))


def read_steps(folder: Path | str) -> Iterator[tuple[int, tuple[RolloutGroup, ...]]]:
    """Yield (step, groups), ascending. Raises FileNotFoundError if the folder is missing, and ValueError with the file
    if one cannot be read."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} contains no recorded rollouts")
    for step, path in steps_of(folder).items():
        yield step, read_step(path)


def read_step(path: Path) -> tuple[RolloutGroup, ...]:
    """The groups of one file. Raises ValueError with the file if it cannot be read."""
    import pyarrow.parquet

    groups: list[RolloutGroup] = []
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for index in range(file.num_row_groups):
                rows = _rows(file.read_row_group(index))
                groups += [_group(list(group)) for _, group in groupby(rows, key=lambda row: row["group"])]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not contain a step's rollouts ({type(error).__name__}: {error}); remove it, or record again"
        ) from error
    return tuple(groups)


def lacks(folder: Path | str, column: Literal["routed_experts_layout", "kept"]) -> bool:
    """Whether the first step has completions without routed experts, or without kept entries; False if there is none
    that can be read."""
    import pyarrow.parquet

    for path in steps_of(folder).values():
        try:
            table = pyarrow.parquet.read_table(path, columns=["token_ids", column])
        except (pyarrow.ArrowException, OSError):
            return False  # refused when it is read
        return any(row["token_ids"] and row.get(column) is None for row in table.to_pylist())
    return False


def _tables(step: int, groups: Sequence[RolloutGroup]) -> Iterator[pyarrow.Table]:
    """The rows of a step, cut into tables of a bounded number of tokens; a group stays in one."""
    # float32 holds what engines return, float64 any other number.
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = (completion.rollout_logprobs for rollout in rollouts for completion in rollout.completions)
    float_type = np.float32 if all(row.array.dtype == np.float32 for row in sampled) else np.float64
    parts: list[list[RolloutGroup]] = [[]]
    num_tokens = 0
    for group in groups:
        more = sum(len(s.token_ids) for r in group.rollouts for branch in r.branches for s in branch.segments)
        if parts[-1] and num_tokens + more > _ROWS_TOKENS:
            parts.append([])
            num_tokens = 0
        parts[-1].append(group)
        num_tokens += more
    first = 0
    for part in parts:
        numbered = enumerate(part, first)
        yield _table([{"step": step, "group": i, **row} for i, group in numbered for row in _encode(group)], float_type)
        first += len(part)


def _encode(group: RolloutGroup) -> Iterator[dict[str, Any]]:
    """A row for each trajectory; without any, a row whose ``branch`` (or ``index``, in an empty group) is null."""
    prompt = {name if name == "prompt_id" else f"prompt_{name}": getattr(group.prompt, name) for name in _PROMPT}
    rows = [row for rollout in group.rollouts for row in _encode_rollout(rollout)] or [dict.fromkeys(_TRAJECTORY)]
    for row in rows:
        row = {**prompt, **row}
        yield row | {name: None if row[name] is None else json.dumps(row[name]) for name in _AS_JSON}


def _encode_rollout(rollout: Rollout) -> Iterator[dict[str, Any]]:
    fields = {name: getattr(rollout, name) for name in _ROLLOUT_FIELDS}
    if not rollout.branches:
        yield {**dict.fromkeys(_TRAJECTORY), **fields}
    for number, branch in enumerate(rollout.branches):
        yield {**fields, "branch": number, **_encode_trajectory(rollout.prompt, branch)}


def _encode_trajectory(prompt: Prompt, branch: Trajectory) -> dict[str, Any]:
    """The columns of a trajectory: those of its completion if it has one turn. Otherwise the lists cover all tokens,
    with log-probability 0 for context, and ``segments`` describes each segment."""
    completions = branch.completions
    if len(completions) == 1 and (branch,) == single_turn(prompt, completions[0]):
        values = {name: getattr(completions[0], name) for name in _COMPLETION_FIELDS} | {"segments": None}
    else:
        recorded = [completion.routed_experts for completion in completions]
        is_recorded = bool(recorded) and all(experts is not None for experts in recorded)
        values = dict.fromkeys(_COMPLETION_FIELDS) | {
            "token_ids": branch.token_ids,
            "rollout_logprobs": np.concatenate([_logprobs(segment) for segment in branch.segments]),
            "text": "".join(segment.text for segment in branch.segments),
            "routed_experts": np.concatenate(recorded) if is_recorded else None,
            "kept": KeptEntries.join([c.kept for c in completions], [len(c.token_ids) for c in completions]),
            "segments": [_layout_of(segment) for segment in branch.segments],
        }
    experts, kept = values["routed_experts"], values["kept"]
    return values | {
        "kept": None if kept is None else kept.to_bytes(),
        "routed_experts": None if experts is None else experts.tobytes(),
        "routed_experts_layout": None if experts is None else {"dtype": experts.dtype.str, "shape": experts.shape},
    }


def _logprobs(segment: Context | Completion) -> np.ndarray:
    sampled = isinstance(segment, Completion)
    return np.asarray(segment.rollout_logprobs) if sampled else np.zeros(len(segment.token_ids), np.float32)


def _layout_of(segment: Context | Completion) -> dict[str, Any]:
    """The fields of a segment that are not arrays, and its lengths in the arrays."""
    fields = (field.name for field in dataclasses.fields(segment) if field.name not in _ARRAYS)
    layout = {name: getattr(segment, name) for name in fields} | {"num_tokens": len(segment.token_ids)}
    if isinstance(segment, Completion) and segment.routed_experts is not None:
        layout["num_experts"] = len(segment.routed_experts)
    return layout


def _table(rows: Sequence[Mapping[str, Any]], float_type: type) -> pyarrow.Table:
    import pyarrow

    columns: dict[str, pyarrow.Array] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name in _LISTS:
            columns[name] = _lists(values, float_type if name == "rollout_logprobs" else np.int32)
        elif name in _TYPES:
            columns[name] = pyarrow.array(values, _TYPES[name])
        else:
            # UTF-8 has no lone surrogates.
            texts = [None if value is None else value.encode("utf-8", "replace").decode() for value in values]
            columns[name] = pyarrow.array(texts, "string")
    return pyarrow.table(columns)


def _lists(values: Sequence[Sequence[float] | None], dtype: type) -> pyarrow.Array:
    import pyarrow

    parts = [np.asarray(() if value is None else value, dtype) for value in values]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    nulls = pyarrow.array([value is None for value in values])
    return pyarrow.ListArray.from_arrays(offsets, np.concatenate(parts), mask=nulls)


def _layout(schema: pyarrow.Schema) -> dict[str, Any]:
    """Compression options: log-probabilities are split by bytes; token ids are not, because text repeats itself."""
    split = {"rollout_logprobs.list.element": "BYTE_STREAM_SPLIT"}
    others = [name for name in schema.names if name not in (*_LISTS, "routed_experts", "kept")]
    return {"compression": "zstd", "compression_level": 3, "use_dictionary": others, "column_encoding": split}


def _rows(table: pyarrow.Table) -> Iterator[dict[str, Any]]:
    columns = {name: _column(name, table.column(name).combine_chunks()) for name in table.column_names}
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _column(name: str, values: pyarrow.Array) -> list[Any]:
    if name in _LISTS:
        flat, offsets = values.values.to_numpy(), values.offsets.to_pylist()
        parts = [flat[start:end] for start, end in pairwise(offsets)]
        return [tuple(part.tolist()) if name == "prompt_token_ids" else TokenArray(part.copy()) for part in parts]
    items = values.to_pylist()
    return [None if v is None else json.loads(v) for v in items] if name in _AS_JSON else items


def _group(rows: Sequence[Mapping[str, Any]]) -> RolloutGroup:
    row = rows[0]
    fields = {name: row[name if name == "prompt_id" else f"prompt_{name}"] for name in _PROMPT}
    prompt = Prompt(**{**fields, "messages": tuple(fields["messages"])})
    recorded = groupby((row for row in rows if row["index"] is not None), key=lambda row: row["index"])
    return RolloutGroup(prompt=prompt, rollouts=tuple(_rollout(list(rollout), prompt) for _, rollout in recorded))


def _rollout(rows: Sequence[Mapping[str, Any]], prompt: Prompt) -> Rollout:
    fields = _known(Rollout, rows[0])
    branches = tuple(_trajectory(row, prompt) for row in rows if row.get("branch", 0) is not None)
    by_turn = {name: tuple(fields.get(name, ())) for name in ("turn_rewards", "turn_order")}
    return Rollout(**fields | by_turn, prompt=prompt, branches=branches)


def _trajectory(row: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    experts, layout = row["routed_experts"], row["routed_experts_layout"]
    experts = None if layout is None else np.frombuffer(experts, layout["dtype"]).reshape(layout["shape"])
    kept = None if row.get("kept") is None else KeptEntries.from_bytes(row["kept"])
    if row.get("segments") is None:
        return single_turn(prompt, _completion(row | {"routed_experts": experts, "kept": kept}))[0]
    sampled = [fields["num_tokens"] for fields in row["segments"] if "role" not in fields]
    kept_by_completion = repeat(None) if kept is None else iter(kept.split(sampled))
    segments: list[Context | Completion] = []
    start = start_experts = 0
    for fields in row["segments"]:
        end, end_experts = start + fields["num_tokens"], start_experts + fields.get("num_experts", 0)
        fields |= {"token_ids": row["token_ids"][start:end]}
        if "role" in fields:
            segments.append(Context(**_known(Context, fields | {"token_ids": tuple(fields["token_ids"])})))
        else:
            rollout_logprobs = row["rollout_logprobs"][start:end]
            routed = None if "num_experts" not in fields else experts[start_experts:end_experts]
            arrays = {"rollout_logprobs": rollout_logprobs, "routed_experts": routed, "kept": next(kept_by_completion)}
            segments.append(_completion(fields | arrays))
        start, start_experts = end, end_experts
    return Trajectory(segments=tuple(segments))


def _completion(fields: Mapping[str, Any]) -> Completion:
    return Completion(**_known(Completion, fields) | {"version_spans": tuple(map(tuple, fields["version_spans"]))})


def _known(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``kind`` that are recorded; older recordings lack some."""
    return {field.name: fields[field.name] for field in dataclasses.fields(kind) if field.name in fields}
