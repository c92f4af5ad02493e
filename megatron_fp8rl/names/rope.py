"""Rotary embedding in config.json: transformers 5 writes ``rope_parameters``, earlier releases two or three keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fp8rl.config import ModelConfig, RopeScaling

KEYS = frozenset(
    ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
)
_LLAMA3 = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_FIELDS = {"llama3": _LLAMA3, "yarn": _YARN}


def read(
    config: Mapping[str, Any], *, default_theta: float, default_fraction: float | None, scalings: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """(fields of ModelConfig, unsupported features) of the rotary embedding in a config.json.

    ``default_theta``: ``rope_theta`` if it is missing. ``default_fraction``: rotated fraction of a head if it is
    missing; None: the family always rotates whole heads. ``scalings``: supported kinds of RopeScaling.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {}, [f"rope_parameters = {rope!r} is not supported; it needs one rotary embedding for all layers"]
    problems = _disagreements(config)
    rope = dict(rope)
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    theta = rope.pop("rope_theta", None)
    theta = config.get("rope_theta") if theta is None else theta
    theta = default_theta if theta is None else theta
    fraction = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    fraction = fraction or default_fraction or 1.0
    for name, number in (("rope_theta", theta), ("partial_rotary_factor", fraction)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            wrong = "infinite" if number == math.inf else "not a number above 0"
            return {}, [*problems, f"{name} = {number!r} is {wrong}"]
    values: dict[str, Any] = {"rope_theta": float(theta), "rotary_fraction": float(fraction)}
    if default_fraction is None and fraction != 1.0:
        problems.append(
            f"partial_rotary_factor = {fraction} is not supported (supported: 1.0); it needs a family that rotates "
            "parts of heads"
        )
    if kind in scalings:
        values["rope_scaling"], errors = _read_scaling(kind, rope, config)
        problems += errors
    elif kind != "default" and not (kind == "linear" and rope.get("factor") == 1):
        supported = ", ".join(("default", *scalings))
        problems.append(
            f"rope_type = {kind!r} is not supported (supported: {supported}); it needs its formula in the trainer's "
            "rotary embedding and a kind of RopeScaling"
        )
    return values, problems


def _disagreements(config: Mapping[str, Any]) -> list[str]:
    """Contradictory duplicates in config.json, which releases of transformers read differently."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    problems = []
    if isinstance(new, dict) and isinstance(old, dict) and new and old:
        outer = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        both = [
            {**outer, **rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))} for rope in (new, old)
        ]
        for rope in both:
            rope.pop("type", None)
        if both[0] != both[1]:
            problems.append(f"rope_scaling = {old!r} disagrees with rope_parameters = {new!r}; remove one of them")
    whole = config.get("original_max_position_embeddings")
    for name, rope in (("rope_parameters", new), ("rope_scaling", old)):
        inner = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
        if None not in (whole, inner) and whole != inner:
            problems.append(
                f"original_max_position_embeddings = {whole!r} disagrees with {inner!r} in {name}; remove one"
            )
    if whole is not None and not new and not old:
        problems.append(f"original_max_position_embeddings = {whole!r} is set without rope_parameters; set both")
    return problems


def _read_scaling(kind: str, rope: dict[str, Any], config: Mapping[str, Any]) -> tuple[RopeScaling | None, list[str]]:
    original = config.get("original_max_position_embeddings")
    if original is not None:
        rope.setdefault("original_max_position_embeddings", original)
    values = {name: rope.pop(name) for name in _FIELDS[kind] if rope.get(name) is not None}
    required = _LLAMA3 if kind == "llama3" else _YARN[:2]
    problems = [f"rope_parameters.{name} is missing" for name in required if name not in values]
    neutral = {"truncate": True}
    problems += [
        f"rope_parameters.{name} = {value!r} is not supported; it needs its part of the {kind} formula in the trainer"
        for name, value in rope.items()
        if value is not None and value != neutral.get(name)
    ]
    if kind == "yarn" and not problems and not (values.get("mscale") and values.get("mscale_all_dim")):
        # transformers multiplies the rotated parts by m(mscale) / m(mscale_all_dim) if both are set, else by m(1).
        if values.get("mscale_all_dim"):
            problems = ["rope_parameters.mscale is missing beside mscale_all_dim; set it as in training"]
        values |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    if problems:
        return None, problems
    length = int(values.pop("original_max_position_embeddings"))
    floats = {name: float(value) for name, value in values.items()}
    return RopeScaling(kind=kind, original_max_position_embeddings=length, **floats), []  # type: ignore[arg-type]


def write(model: ModelConfig, *, has_fraction: bool) -> dict[str, Any]:
    """The config.json keys for the rotary embedding of ``model``, for transformers 5 and earlier releases.
    ``has_fraction``: write the rotated fraction of a head also if it is 1."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    config: dict[str, Any] = {"rope_theta": model.rope_theta}
    scaling = model.rope_scaling
    if scaling is not None:
        factors = {name: getattr(scaling, name) for name in _FIELDS[scaling.kind]}
        parameters |= {"rope_type": scaling.kind, **factors}
        config["rope_scaling"] = {"rope_type": scaling.kind, **factors}
    if has_fraction or model.rotary_fraction != 1.0:
        parameters["partial_rotary_factor"] = config["partial_rotary_factor"] = model.rotary_fraction
    return config | {"rope_parameters": parameters}
