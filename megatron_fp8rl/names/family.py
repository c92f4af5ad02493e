"""The description of a model family, and the conversion between config.json and ModelConfig. Pure; no torch.

Every field of config.json must map to a field of ModelConfig, have the only supported value, or be known not to change
the model (``neutral_keys.py``). Other fields are errors.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_fp8rl.config import QK_NORM_FAMILIES, GdnConfig, MlaConfig, ModelConfig, RouterConfig
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.names import neutral_keys, rope
from megatron_fp8rl.names.table import Row

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MISSING = object()

# config.json key -> field of ModelConfig, in every family.
COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
GROUPED_QUERY = {"num_key_value_heads": "num_key_value_heads", "head_dim": "head_dim"}
DENSE = COMMON | GROUPED_QUERY | {"intermediate_size": "ffn_hidden_size"}
# Models in which all layers have experts.
LOCAL_EXPERTS = {
    "intermediate_size": "moe_ffn_hidden_size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
}
# Layers with a window of attention among others, which may have another rotary base.
WINDOWS = {"sliding_window": "sliding_window", "layer_types": "layer_types", "rope_local_base_freq": "local_rope_theta"}

_WHEN_ABSENT = {"initializer_range": 0.02, "tie_word_embeddings": False, "num_nextn_predict_layers": 0}
_WHEN_NULL = {
    "sliding_window": None,
    "q_lora_rank": None,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}

# Keys that do not change the function of the model: training, saving, generation, special tokens.
_IGNORED = frozenset(
    """
    _name_or_path architectures auto_map dtype torch_dtype transformers_version torchscript use_bfloat16 use_cache
    attention_dropout attn_implementation _attn_implementation aux_loss_alpha chunk_size_feed_forward ep_size
    experts_implementation output_attentions output_hidden_states output_router_logits pretraining_tp return_dict
    router_aux_loss_coef router_jitter_noise seq_aux bos_token_id eos_token_id pad_token_id sep_token_id
    cls_token_id mask_token_id unk_token_id decoder_start_token_id prefix id2label label2id num_labels problem_type
    task_specific_params tokenizer_class max_window_layers is_encoder_decoder is_decoder cross_attention_hidden_size
    temperature top_k top_p do_sample max_length min_length max_new_tokens num_beams repetition_penalty
    length_penalty typical_p num_beam_groups num_return_sequences _attn_implementation_autoset unsloth_fixed
    unsloth_version transformers.js_config output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    bad_words_ids pruned_heads tf_legacy_loss finetuning_task add_cross_attention tie_encoder_decoder
    exponential_decay_length_penalty begin_suppress_tokens suppress_tokens remove_invalid_values early_stopping
    encoder_no_repeat_ngram_size no_repeat_ngram_size diversity_penalty
    """.split()
)

_NEEDED = {
    "hidden_act": "another activation in the feed-forward of trainer and engine",
    "attention_bias": "biases in the family's table and in the trainer's attention",
    "mlp_bias": "biases in the feed-forward rows of the table and in the trainer's feed-forward",
    "use_mrope": "a rotary embedding of several axes",
    "is_causal": "attention in both directions in trainer and engine",
    "use_sliding_window": "attention over a window in some layers of the trainer",
    "layer_types": "layers of several kinds of attention in the trainer",
    **dict.fromkeys(
        ("mlp_only_layers", "decoder_sparse_step", "moe_layer_freq"), "experts in some layers only: ModelConfig.layers"
    ),
    "scoring_func": "another score in RouterConfig and in the trainer's router",
    "topk_method": "another choice of experts in RouterConfig and in the trainer's router",
    "rope_interleave": "rotation of the two halves in the trainer's latent attention",
    "num_key_value_heads": "fewer key/value heads than query heads, which latent attention does not have",
    "quantization_config": "weights that are dequantized first: checkpoint_tools reads block FP8 and Kimi-K2's INT4",
}
_UNKNOWN = "a check: if it does not change the model, remove it from config.json, or list it in names/neutral_keys.py"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One Hugging Face architecture. ``fields`` maps keys of config.json to fields of ModelConfig; ``router.x``,
    ``mla.x`` and ``gdn.x`` are fields of its parts."""

    model_type: str
    architecture: str  # class in transformers
    rows: Callable[[ModelConfig], tuple[Row, ...]]  # every weight outside multi-token prediction layers
    fields: Mapping[str, str]
    fixed: Mapping[str, Any] = _NOTHING  # key -> the only supported value; a missing key means this value too
    implied: Mapping[str, Any] = _NOTHING  # field -> the value in every model of the family
    defaults: Mapping[str, Any] = _NOTHING  # key -> the value that transformers assumes if it is missing
    aliases: Mapping[str, str] = _NOTHING  # key used by some releases -> key in ``fields``
    ignored: frozenset[str] = frozenset()  # further keys that follow from others
    routing: Mapping[str, Any] = _NOTHING  # keys of other families' routers -> values that mean this family's router
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")  # with a field for it
    rope_scalings: tuple[str, ...] = ("llama3", "yarn", "linear")  # kinds of RopeScaling
    yarn_options: tuple[str, ...] = ()  # optional keys of YaRN that vLLM requires
    rope_theta: float = 10_000.0  # if missing
    rotary_fraction: float | None = None  # if missing; None: the family always rotates whole heads
    complete: Callable[[dict[str, Any]], dict[str, Any]] = dict  # adds keys that config.json expresses by others
    unwritten: frozenset[str] = frozenset()  # keys that only ``complete`` adds
    derived: Mapping[str, tuple[str, Callable[[ModelConfig], Any]]] = _NOTHING  # key -> the keys that it repeats, value
    written: Mapping[str, Any] = _NOTHING  # further keys of the files that this library writes
    for_engines: tuple[str, ...] = ()  # keys that engines get as ``write`` has them, whatever a folder says
    mtp: tuple[Row, ...] = field(default=())  # the weights of a multi-token prediction layer besides its decoder layer
    fp32_router: bool = False  # the engine multiplies by the router's weight in FP32
    module_prefixes: tuple[str, str] = ("", "")  # in the checkpoint, and for the same modules in quantization_config
    zero_centred_norms: bool = False  # norms multiply by 1 + weight
    activation: str = "silu"  # of the gate
    scales_embedding: bool = False  # by the root of hidden_size, rounded to the dtype of the weights
    # A checkpoint has one tensor for all experts of a layer, BF16 or MXFP4; gate and up take turns in its columns. The
    # experts have biases and a clamped SwiGLU.
    fused_experts: bool = False
    fused_rows: bool = False  # a checkpoint has one tensor for queries, keys and values, and one for gate and up
    derives_head_dim: bool = False  # the engine takes hidden_size / num_attention_heads, whatever config.json says

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.fields.values()

    @property
    def is_latent(self) -> bool:
        return any(name.startswith("mla.") for name in self.fields.values())


def with_layer_types(config: dict[str, Any], every: int, others: str = "sliding_attention") -> dict[str, Any]:
    """``config`` with ``layer_types``; if they are missing, one of ``every`` layers has full attention."""
    layers = config.get("num_hidden_layers")
    if config.get("layer_types") is not None or not isinstance(layers, int) or not isinstance(every, int):
        return config
    types = ["full_attention" if every and (layer + 1) % every == 0 else others for layer in range(layers)]
    return {**config, "layer_types": types}


def read(
    family: Family, config: Mapping[str, Any], *, keep_mtp: bool, fp8_weights: bool, checks_numbers: bool = True
) -> ModelConfig:
    """The architecture in a config.json. Raises ValueError with every missing, unsupported or contradictory field;
    ``checks_numbers``: also contradictory numbers."""
    config = family.complete({family.aliases.get(key, key): value for key, value in config.items()})
    problems = _unsupported(family, config, fp8_weights)
    defaults = {"default_theta": family.rope_theta, "default_fraction": family.rotary_fraction}
    values, errors = rope.read(
        {**family.defaults, **config}, **defaults, scalings=family.rope_scalings, is_latent=family.is_latent
    )
    problems += errors
    for key, name in family.fields.items():
        value = _value(key, config, {**_WHEN_ABSENT, **family.defaults})
        if value is _MISSING:
            problems.append(f"{key} is missing{' (it is null)' if key in config else ''}")
        elif not _is_of_type(name, value):
            problems.append(f"{key} = {value!r} is not {_TYPES[_type_of(name)][1]}")
        values[name] = tuple(value) if isinstance(value, list) else value
    if checks_numbers and not problems:
        problems = _contradictions(family, values)
    if problems:
        raise ValueError(f"config.json of a {family.model_type} model: " + "; ".join(problems))
    if not keep_mtp:
        values.pop("num_mtp_layers", None)
    model = _build(family, values | dict(family.implied))
    wrong = [
        f"{key} = {config[key]!r:.80} disagrees with {others}; correct one of them"
        for key, (others, value) in family.derived.items()
        if config.get(key) not in (None, value(model))
    ]
    if wrong:
        raise ValueError(f"config.json of a {family.model_type} model: " + "; ".join(wrong))
    return model


def _contradictions(family: Family, values: Mapping[str, Any]) -> list[str]:
    keys = {name: key for key, name in family.fields.items()}
    problems = []

    def refuse(name: str, problem: str) -> None:
        problems.append(f"{keys.get(name, name)} = {values.get(name)!r} {problem}")

    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        if values.get(name) is not None and values[name] < 1:
            refuse(name, "is below 1")
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads and groups and heads % groups:
        refuse("num_key_value_heads", f"does not divide num_attention_heads = {heads}")
    experts, chosen = values.get("num_experts") or 0, values.get("experts_per_token") or 0
    if experts and not 1 <= chosen <= experts:
        refuse("experts_per_token", f"is not between 1 and {keys['num_experts']} = {experts}")
    num_groups, used = values.get("router.num_groups") or 1, values.get("router.groups_per_token") or 1
    if experts and experts % num_groups:
        refuse("router.num_groups", f"does not divide {keys['num_experts']} = {experts}")
    if used > num_groups:
        refuse("router.groups_per_token", f"is above {keys['router.num_groups']} = {num_groups}")
    scaling, pairs = values.get("rope_scaling"), int((values.get("head_dim") or 0) * values["rotary_fraction"]) // 2
    for name in ("short_factor", "long_factor") if scaling is not None and scaling.kind == "longrope" else ():
        if (count := len(getattr(scaling, name))) != pairs:
            problems.append(f"rope_parameters.{name} has {count} numbers, and a head has {pairs} rotated pairs")
    if values.get("sliding_window") == 0:
        refuse("sliding_window", "is a window of no tokens")
    return problems


def _value(key: str, config: Mapping[str, Any], when_absent: Mapping[str, Any]) -> Any:
    """The value of a config.json key as transformers reads it; ``_MISSING`` if the key is required and missing."""
    if config.get(key) is not None:
        return config[key]
    if key not in config and key in when_absent:
        return when_absent[key]
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if key == "num_key_value_heads":
        return heads or _MISSING
    if key == "head_dim":
        return hidden // heads if heads and isinstance(heads, int) and isinstance(hidden, int) else _MISSING
    return _WHEN_NULL.get(key, _MISSING) if key in config else _MISSING


# Type of a ModelConfig field -> (types of its value in config.json, description of what is expected)
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number of at least 0"),
    "float": ((int, float), "a number of at least 0"),
    "bool": ((bool,), "true or false"),
    "tuple": ((list, tuple), "a list"),
}


def _type_of(name: str) -> str:
    """Type of a field of ModelConfig or, by its dotted name, of one of its parts, without None."""
    owner, _, leaf = name.rpartition(".")
    part = {"": ModelConfig, "router": RouterConfig, "mla": MlaConfig, "gdn": GdnConfig}[owner]
    return part.__annotations__[leaf].removesuffix(" | None").partition("[")[0]


def _is_of_type(name: str, value: Any) -> bool:
    kinds = _TYPES[_type_of(name)][0]
    if value is None or list in kinds:
        return value is None or isinstance(value, kinds)
    return isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds) and 0 <= value < math.inf


def _build(family: Family, values: dict[str, Any]) -> ModelConfig:
    """A ModelConfig from its fields; fields of its parts have dotted names."""

    def part(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

    plain = {name: value for name, value in values.items() if "." not in name}
    router, mla, gdn = part("router."), part("mla."), part("gdn.")
    if gdn:
        plain["gdn"] = GdnConfig(**gdn)
    if mla:
        plain["mla"] = MlaConfig(**mla)
        plain |= {"head_dim": plain["mla"].qk_head_dim, "num_key_value_heads": plain["num_attention_heads"]}
    return ModelConfig(family=family.model_type, router=RouterConfig(**router), **plain)  # type: ignore[arg-type]


def _unsupported(family: Family, config: Mapping[str, Any], fp8_weights: bool) -> list[str]:
    """Fields of ``config`` that change the function of the model in a way that is not supported."""
    fixed = {"hidden_act": "silu", "is_causal": True, "use_mrope": False, **family.fixed}
    if family.fields.get("num_key_value_heads") is None:
        fixed["num_key_value_heads"] = config.get("num_attention_heads")
    problems = []
    for key, value in fixed.items():
        actual = config.get(key)
        if actual != value and (actual is not None or (key == "is_causal" and key in config)):
            problems.append(_refusal(key, actual, f"supported: {value!r}"))
    layers = config.get("layer_types") or []
    supported = family.layer_types if "layer_types" in family.fields else ("full_attention",)
    kinds = {str(kind) for kind in layers} - {*supported} if isinstance(layers, list | tuple) else {str(layers)}
    if kinds:
        problems.append(_refusal("layer_types", sorted(kinds), f"supported: {' or '.join(map(repr, supported))}"))
    quantization = config.get("quantization_config")
    is_fused = family.fused_experts and _quantization_method(quantization) == "mxfp4"
    if quantization and not is_fused and not (fp8_weights and is_block_fp8(quantization)):
        supported = "supported: BF16, FP16 and FP32 weights"
        if fp8_weights and _quantization_method(quantization) == "fp8":
            supported += f"; its weight_block_size is {quantization.get('weight_block_size')}, not [128, 128]"
        problems.append(_refusal("quantization_config", _quantization_method(quantization), supported))
    return problems + _token_ids(config) + _unknown(family, config)


def _token_ids(config: Mapping[str, Any]) -> list[str]:
    """Token ids that transformers does not read: only end tokens may be several."""
    problems = []
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        value = config.get(key)
        ids = value if key == "eos_token_id" and isinstance(value, list) else [value]
        if value is not None and not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            problems.append(f"{key} = {value!r} is not a whole number, and transformers reads nothing else; set one")
    return problems


def _foreign(family: Family, config: Mapping[str, Any]) -> list[str]:
    known = {"hidden_act", "is_causal", "use_mrope", "num_key_value_heads", "model_type", "layer_types"}
    known |= {"quantization_config", *family.fixed, *family.fields, *family.ignored, *rope.KEYS, *_IGNORED}
    return [key for key in config if key not in known and key not in family.derived]


def _traits(family: Family) -> neutral_keys.Traits:
    return neutral_keys.Traits(
        has_experts=family.has_experts,
        qkv_bias=bool(family.implied.get("qkv_bias")),
        qk_norm=None if family.is_latent else family.model_type in QK_NORM_FAMILIES,
        routing=family.routing,
    )


def without_effect(family: Family, config: Mapping[str, Any]) -> list[str]:
    """The keys of ``config``, each with its value, that the family does not read and that do not change the model."""
    config = {family.aliases.get(key, key): value for key, value in config.items()}
    traits = _traits(family)
    keys = [key for key in _foreign(family, config) if neutral_keys.has_no_effect(key, config, traits)]
    return [f"{key} = {config[key]!r}" for key in keys]


def _unknown(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Keys that the family does not read and that may change the model."""
    traits, problems = _traits(family), []
    for key in _foreign(family, config):
        value = config[key]
        if key == "use_sliding_window" and "sliding_window" in family.fields:
            window = config.get("sliding_window", family.defaults.get("sliding_window"))
            if value is not None and value is not (window is not None):
                problems.append(
                    f"{key} = {value!r} disagrees with sliding_window = {window!r}; remove {key}, which "
                    "transformers does not read in this family"
                )
            continue
        if not neutral_keys.has_no_effect(key, config, traits):
            neutral = neutral_keys.neutral_values(key, config, traits)
            neutral_text = f" (without effect: {' or '.join(map(repr, neutral))})" if neutral else ""
            needed = neutral_keys.NEEDED.get(
                key, "its part of the model in trainer and engine" if neutral else _UNKNOWN
            )
            problems.append(f"{key} = {value!r} is not known in this family{neutral_text}; it needs {needed}")
    return problems


def _refusal(key: str, value: Any, supported: str) -> str:
    return f"{key} = {value!r} is not supported ({supported}); it needs {_NEEDED.get(key, _UNKNOWN)}"


def _quantization_method(quantization: Any) -> Any:
    """The method of a ``quantization_config``; without one, the options that are set."""
    if not isinstance(quantization, dict) or quantization.get("quant_method") is not None:
        return quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    return {name: value for name, value in quantization.items() if value}


def is_block_fp8(quantization: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` means 128x128 blocks of E4M3, as in DeepSeek-V3 and Qwen3-FP8."""
    if not isinstance(quantization, dict):
        return False
    block = quantization.get("weight_block_size")
    return quantization.get("quant_method") == "fp8" and block in ([BLOCK, BLOCK], (BLOCK, BLOCK))


def write(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for a field of ModelConfig that the family cannot express."""
    config: dict[str, Any] = {
        **{"architectures": [family.architecture], "model_type": family.model_type, "dtype": "bfloat16"},
        **{"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True},
        **family.fixed,
        **family.written,
    }
    for key, name in family.fields.items():
        owner, _, leaf = name.rpartition(".")
        part = getattr(model, owner) if owner else model
        if part is None:
            raise ValueError(f"a model of the family {family.model_type} needs {owner}, which is None")
        value = getattr(part, leaf)
        config[key] = list(value) if isinstance(value, tuple) else value
    if "num_key_value_heads" not in family.fields:
        config["num_key_value_heads"] = model.num_attention_heads
    config |= rope.write(model, has_fraction=family.rotary_fraction is not None, yarn_options=family.yarn_options)
    config |= {key: value(model) for key, (_, value) in family.derived.items()}
    again = read(family, config, keep_mtp=True, fp8_weights=False, checks_numbers=False)
    # Not part of the architecture: where the weights come from.
    again = dataclasses.replace(
        again, **{name: getattr(model, name) for name in ("hf_path", "random", "embedding_range")}
    )
    lost = [f.name for f in dataclasses.fields(model) if getattr(model, f.name) != getattr(again, f.name)]
    for key in family.unwritten:
        del config[key]
    if lost:
        fields = ", ".join(f"{name} = {getattr(model, name)!r}" for name in lost)
        raise ValueError(f"config.json of the family {family.model_type} cannot express {fields}")
    return config
