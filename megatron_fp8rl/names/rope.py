"""Rotary embedding in config.json: transformers 5 writes ``rope_parameters``, earlier releases two or three keys."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fp8rl.config import ModelConfig, RopeScaling

KEYS = frozenset(
    ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
)
_LLAMA3 = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_ENGINE_KEYS = ("attn_factor", "apply_yarn_scaling")  # vLLM's names of YaRN's attention factor
_MAGNITUDES = ("short_mscale", "long_mscale")  # vLLM's names of longrope's
_YARN_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_LISTS = ("short_factor", "long_factor")
_FIELDS = {"llama3": _LLAMA3, "yarn": _LLAMA3[:2], "linear": _LLAMA3[:1], "longrope": (*_LISTS, _LLAMA3[1])}
_LONGROPE_OPTIONS = ("factor", "attention_factor", *_MAGNITUDES)
_NEUTRAL = {"truncate": True, "attn_factor": 1, "extrapolation_factor": 1, "apply_yarn_scaling": True}


def read(
    config: Mapping[str, Any],
    *,
    default_theta: float,
    default_fraction: float | None,
    scalings: Sequence[str],
    is_latent: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """(fields of ModelConfig, unsupported features) of the rotary embedding in a config.json.

    ``default_theta``: ``rope_theta`` if it is missing. ``default_fraction``: rotated fraction of a head if it is
    missing; None: the family always rotates whole heads. ``scalings``: supported kinds of RopeScaling. ``is_latent``:
    the family has latent attention, whose YaRN in vLLM has no attention factor and rounds the ramp.
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
    if kind == "linear" and rope.get("factor") == 1:
        return values, problems
    if kind in scalings:
        values["rope_scaling"], errors = _read_scaling(kind, rope, config, is_latent)
        problems += errors
    elif kind != "default":
        supported = ", ".join(("default", *scalings))
        problems.append(
            f"rope_type = {kind!r} is not supported (supported: {supported}); it needs its formula in the trainer's "
            "rotary embedding and a kind of RopeScaling"
        )
    return values, problems


def of_full_layers(config: dict[str, Any], local_theta: float) -> dict[str, Any]:
    """``config`` with the rotary embedding of layers with full attention as the only one, and the base of layers with a
    window as ``rope_local_base_freq``, by default ``local_theta``. Unchanged if the latter scale their positions."""
    rope = config.get("rope_parameters")
    local: dict[str, Any] = {}
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        local = rope.get("sliding_attention") or {}
        if set(rope) - {"full_attention", "sliding_attention"} or not isinstance(local, dict):
            return config
        if set(local) - {"rope_type", "rope_theta"} or local.get("rope_type", "default") != "default":
            return config
        config = {**config, "rope_parameters": rope["full_attention"]}
    theta = local.get("rope_theta") or config.get("rope_local_base_freq") or local_theta
    return {**config, "rope_local_base_freq": theta}


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
    for key in ("original_max_position_embeddings", "rope_theta", "partial_rotary_factor"):
        whole = config.get(key)
        for name, rope in (("rope_parameters", new), ("rope_scaling", old)):
            inner = rope.get(key) if isinstance(rope, dict) else None
            if None not in (whole, inner) and whole != inner:
                problems.append(f"{key} = {whole!r} disagrees with {inner!r} in {name}; remove one")
    whole = config.get("original_max_position_embeddings")
    if whole is not None and not new and not old:
        problems.append(f"original_max_position_embeddings = {whole!r} is set without rope_parameters; set both")
    return problems


def _read_scaling(
    kind: str, rope: Mapping[str, Any], config: Mapping[str, Any], is_latent: bool
) -> tuple[RopeScaling | None, list[str]]:
    original = config.get("original_max_position_embeddings") if kind != "linear" else None
    values = {"original_max_position_embeddings": original, **rope}
    values = {name: value for name, value in values.items() if value not in (None, _NEUTRAL.get(name))}
    yarn = _YARN_OPTIONS[:4] if is_latent else (*_YARN_OPTIONS, *_ENGINE_KEYS)
    known = {*_FIELDS[kind], *{"yarn": yarn, "longrope": _LONGROPE_OPTIONS}.get(kind, ())}
    problems = [f"rope_parameters.{name} is missing" for name in _FIELDS[kind] if name not in values]
    for name, value in values.items():
        if name not in known:
            needed = f"it needs its part of the {kind} formula in the trainer"
            problems.append(f"rope_parameters.{name} = {value!r} is not supported; {needed}")
        elif error := _wrong_value(name, value):
            problems.append(f"rope_parameters.{name} = {value!r} is {error}")
    if values.get("mscale_all_dim") and not values.get("mscale"):
        problems.append("rope_parameters.mscale is missing beside mscale_all_dim; set it as in training")
    if problems:
        return None, problems
    if not values.get("mscale_all_dim"):
        values.pop("mscale", None)  # transformers reads neither without the other
    length = values.pop("original_max_position_embeddings", None) or config.get("max_position_embeddings", 0)
    engine = {name: values.pop(name) for name in (*_ENGINE_KEYS, *_MAGNITUDES) if name in values}
    if kind == "longrope":
        if length < 2:
            return None, [f"original_max_position_embeddings = {length} is below 2, whose logarithm would divide"]
        values.setdefault("factor", config.get("max_position_embeddings", 0) / length)
    kept = ("truncate", *_LISTS)
    numbers = {name: value if name in kept else float(value) for name, value in values.items()}
    scaling = RopeScaling(kind=kind, original_max_position_embeddings=length, **numbers)  # type: ignore[arg-type]
    if kind == "longrope":
        wrong = [f"{name} = {value:g}" for name, value in engine.items() if not math.isclose(value, scaling.amplitude)]
        problem = f"rope_parameters: vLLM multiplies by {' and '.join(wrong)}, transformers by {scaling.amplitude:g}; "
        return scaling, [problem + "set attention_factor as in training, and remove the others"] if wrong else []
    factor = engine.get("attn_factor", 1.0) * (scaling.magnitude(1.0) if engine.get("apply_yarn_scaling", True) else 1)
    if engine and not math.isclose(factor, scaling.amplitude):
        problem = f"rope_parameters: vLLM multiplies by {factor:g} ({' and '.join(engine)}), transformers by "
        return None, [f"{problem}{scaling.amplitude:g}; set attention_factor as in training, and remove the others"]
    return scaling, []


def _wrong_value(name: str, value: Any) -> str:
    """Why a number or flag of a rotary scaling is none; empty if it is one."""
    if name in _LISTS:
        numbers = value if isinstance(value, list | tuple) else [None]
        wrong = any(isinstance(n, bool) or not isinstance(n, int | float) or not 0 < n < math.inf for n in numbers)
        return "not a list of numbers above 0" if wrong else ""
    if name in ("truncate", "apply_yarn_scaling"):
        return "" if isinstance(value, bool) else "not true or false"
    kinds, expected = ((int,), "whole number") if name == _LLAMA3[1] else ((int, float), "number")
    least = 1 if name == "factor" else 0
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
        return f"not a {expected} of at least {least}"
    return "" if value or name.startswith("mscale") else f"not a {expected} above 0"


def write(model: ModelConfig, *, has_fraction: bool, yarn_options: Sequence[str] = ()) -> dict[str, Any]:
    """The config.json keys for the rotary embedding of ``model``, for transformers 5 and earlier releases.
    ``has_fraction``: write the rotated fraction of a head also if it is 1."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    config: dict[str, Any] = {"rope_theta": model.rope_theta}
    scaling = model.rope_scaling
    if scaling is not None:
        factors = {name: getattr(scaling, name) for name in _FIELDS[scaling.kind]}
        if scaling.kind == "longrope":
            factors |= {name: list(factors[name]) for name in _LISTS} | _longrope_options(scaling, model)
        else:
            factors |= _options(scaling, model, yarn_options)
            factors["factor"] = float(scaling.factor)  # vLLM reads a whole number as a list
        parameters |= {"rope_type": scaling.kind, **factors}
        config["rope_scaling"] = {"rope_type": scaling.kind, **factors}
    if has_fraction or model.rotary_fraction != 1.0:
        parameters["partial_rotary_factor"] = config["partial_rotary_factor"] = model.rotary_fraction
    if model.local_rope_theta is not None:
        local = {"rope_type": "default", "rope_theta": model.local_rope_theta}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    return config | {"rope_parameters": parameters}


def _longrope_options(scaling: RopeScaling, model: ModelConfig) -> dict[str, float]:
    """The optional keys of longrope whose values do not follow from others, also under vLLM's names."""
    plain = model.max_position_embeddings / max(1, scaling.original_max_position_embeddings)
    options = {} if scaling.factor == plain else {"factor": scaling.factor}
    if scaling.attention_factor is not None:
        options["attention_factor"] = scaling.attention_factor
    return options | (dict.fromkeys(_MAGNITUDES, scaling.amplitude) if options else {})


def _options(scaling: RopeScaling, model: ModelConfig, always: Sequence[str]) -> dict[str, Any]:
    """The optional keys of YaRN that differ from their defaults, or are written ``always``; of latent attention, as
    DeepSeek writes them."""
    if scaling.kind != "yarn":
        return {}
    names = {name for name in _YARN_OPTIONS if getattr(scaling, name) != getattr(RopeScaling, name)} | {*always}
    names |= set(_YARN_OPTIONS[:4]) if model.mla is not None else {"mscale"} if scaling.mscale_all_dim else set()
    options = {name: getattr(scaling, name) for name in _YARN_OPTIONS if name in names}
    if model.mla is None and scaling.amplitude != scaling.magnitude(1.0):  # else what vLLM computes by itself
        options |= {"attn_factor": scaling.amplitude, "apply_yarn_scaling": False}
    return options
