"""Rotary embedding in config.json: transformers 5 writes ``rope_parameters``, earlier releases two or three keys."""

from __future__ import annotations

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

    Args:
        config: content of config.json.
        default_theta: ``rope_theta`` if it is missing.
        default_fraction: rotated fraction of a head if it is missing; None: the family always rotates whole heads.
        scalings: supported kinds of RopeScaling.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        return {}, [f"rope_parameters = {found!r} is not supported; needed is one rotary embedding for all layers"]
    problems = _disagreements(config)
    found = dict(found)
    kind = found.pop("rope_type", None) or found.pop("type", "default")
    found.pop("type", None)
    theta = found.pop("rope_theta", None)
    theta = config.get("rope_theta") if theta is None else theta
    theta = default_theta if theta is None else theta
    fraction = found.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    fraction = fraction or default_fraction or 1.0
    for name, number in (("rope_theta", theta), ("partial_rotary_factor", fraction)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            return {}, [*problems, f"{name} = {number!r} is not a number above 0"]
    values: dict[str, Any] = {"rope_theta": float(theta), "rotary_fraction": float(fraction)}
    if default_fraction is None and fraction != 1.0:
        problems.append(
            f"partial_rotary_factor = {fraction} is not supported (supported is 1.0); needed is a family that rotates "
            "parts of heads"
        )
    if kind in scalings:
        values["rope_scaling"], wrong = _read_scaling(kind, found, config)
        problems += wrong
    elif kind != "default":
        supported = ", ".join(("default", *scalings))
        problems.append(
            f"rope_type = {kind!r} is not supported (supported: {supported}); needed is its formula in the trainer's "
            "rotary embedding and a kind of RopeScaling"
        )
    return values, problems


def _disagreements(config: Mapping[str, Any]) -> list[str]:
    """What config.json says twice and differently: releases of transformers obey one or the other."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    problems = []
    if isinstance(new, dict) and isinstance(old, dict) and new and old:
        said = [{**one, "rope_type": one.get("rope_type", one.get("type", "default"))} for one in (new, old)]
        for one in said:
            one.pop("type", None)
            one.setdefault("rope_theta", config.get("rope_theta"))
            one.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
        if said[0] != said[1]:
            problems.append(
                f"rope_scaling = {old!r} disagrees with rope_parameters = {new!r}; needed is one of them, or both alike"
            )
    whole = config.get("original_max_position_embeddings")
    for name, said in (("rope_parameters", new), ("rope_scaling", old)):
        inner = said.get("original_max_position_embeddings") if isinstance(said, dict) else None
        if None not in (whole, inner) and whole != inner:
            problems.append(
                f"original_max_position_embeddings = {whole!r} disagrees with that of {name}, {inner!r}; needed is one"
            )
    if whole is not None and not new and not old:
        problems.append(f"original_max_position_embeddings = {whole!r} stands without rope_parameters; needed are both")
    return problems


def _read_scaling(kind: str, found: dict[str, Any], config: Mapping[str, Any]) -> tuple[RopeScaling | None, list[str]]:
    original = config.get("original_max_position_embeddings")
    if original is not None:
        found.setdefault("original_max_position_embeddings", original)
    given = {name: found.pop(name) for name in _FIELDS[kind] if found.get(name) is not None}
    required = _LLAMA3 if kind == "llama3" else _YARN[:2]
    problems = [f"rope_parameters.{name} is missing" for name in required if name not in given]
    neutral = {"truncate": True}
    problems += [
        f"rope_parameters.{name} = {value!r} is not supported; needed is its part of the {kind} formula in the trainer"
        for name, value in found.items()
        if value is not None and value != neutral.get(name)
    ]
    if kind == "yarn" and not problems:
        problems += _unify_mscale(given)
    if problems:
        return None, problems
    whole = {"original_max_position_embeddings": int(given.pop("original_max_position_embeddings"))}
    return RopeScaling(kind=kind, **whole, **{k: float(v) for k, v in given.items()}), []  # type: ignore[arg-type]


def _unify_mscale(given: dict[str, Any]) -> list[str]:
    """transformers multiplies the rotated parts by m(mscale) / m(mscale_all_dim) if both are set, else by m(1)."""
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and all_dim:
        return []
    given |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    if all_dim:
        return ["rope_parameters.mscale is missing beside mscale_all_dim; needed is the value that it was trained with"]
    return []


def write(model: ModelConfig, *, has_fraction: bool) -> dict[str, Any]:
    """The config.json keys for the rotary embedding of ``model``, for transformers 5 and earlier releases.

    ``has_fraction``: write the rotated fraction of a head also if it is 1.
    """
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    config: dict[str, Any] = {"rope_theta": model.rope_theta}
    scaling = model.rope_scaling
    if scaling is not None:
        stretch = {name: getattr(scaling, name) for name in _FIELDS[scaling.kind]}
        parameters |= {"rope_type": scaling.kind, **stretch}
        config["rope_scaling"] = {"rope_type": scaling.kind, **stretch}
    if has_fraction or model.rotary_fraction != 1.0:
        parameters["partial_rotary_factor"] = config["partial_rotary_factor"] = model.rotary_fraction
    return config | {"rope_parameters": parameters}
