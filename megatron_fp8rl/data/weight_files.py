"""The files of a model's folder: copy its tokenizer, and explain weights that cannot be read. No torch."""

import difflib
import json
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model vocab.json merges.txt
    chat_template.jinja
""".split()
_ADAPTER = "adapter_config.json"
_PREFIXES = ("model.", "module.", "_orig_mod.", "base_model.model.", "language_model.", "transformer.")
# Programs that quantize weights -> the last parts of their tensors' names.
_QUANTIZED = {
    "GPTQ or AWQ": ("qweight", "qzeros", "scales", "g_idx"),
    "bitsandbytes": ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state", "SCB", "weight_format"),
    "compressed-tensors": ("weight_packed", "weight_shape", "weight_zero_point", "weight_global_scale"),
    "ModelOpt or compressed-tensors": ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"),
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED = {
    "qkv_proj": "q_proj, k_proj and v_proj",
    "query_key_value": "q_proj, k_proj and v_proj",
    "W_pack": "q_proj, k_proj and v_proj",
    "gate_up_proj": "gate_proj and up_proj",
}


def copy_tokenizer(source: Path, target: Path) -> set[str]:
    """Copy a folder's tokenizer and generation_config.json; returns the names of the copied files."""
    names = {name for name in (*TOKENIZER_FILES, "generation_config.json") if (source / name).is_file()}
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def no_safetensors(path: Path) -> str:
    """Problem of a folder without readable weights, with a remedy for the format that it has."""
    if (path / _ADAPTER).is_file():
        return adapter_problem(path)
    missing = f"neither {SINGLE} nor {INDEX} exists; other weight formats are not supported"
    if any(path.glob("*.distcp")):
        return f"{missing}. This is a Megatron-Core checkpoint: convert it with megatron_to_hf"
    pickled = sorted(file for pattern in ("*.bin", "*.bin.index.json", "*.pth") for file in path.glob(pattern))
    if pickled:
        model = f'AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")'
        return f"{missing}. Convert {pickled[0].name} with transformers: {model}.save_pretrained(NEW_FOLDER)"
    if (path / "consolidated.safetensors").is_file():
        return f"{missing}. consolidated.safetensors has Mistral's own names: fetch the files of transformers"
    if quantized := sorted(path.glob("*.gguf")):
        return f"{missing}. Name the GGUF file itself: {quantized[0]}"
    if others := sorted(path.glob("*.safetensors")):
        return f"{missing}. If {others[0].name} has the weights of the model, rename it to {SINGLE}"
    return f"{missing}. Fetch the model again, or name its folder"


def is_adapter(path: Path) -> bool:
    """Whether a folder has an adapter and no model."""
    return (path / _ADAPTER).is_file() and not (path / "config.json").is_file()


def adapter_problem(path: Path) -> str:
    """Problem of a folder with an adapter and without the weights of a model."""
    try:
        base = json.loads((path / _ADAPTER).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError):
        base = "its model"
    return f"is an adapter of {base}, without the model; merge both first (peft: merge_and_unload)"


def prefix_problem(unexpected: Sequence[str], missing: Collection[str]) -> str:
    """Problem of a folder in which many names have a prefix too many or too few; empty otherwise."""
    if len(unexpected) < 2 or len(missing) < len(unexpected):
        return ""
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) and name.removeprefix(prefix) in missing for name in unexpected):
            return f"the names of {len(unexpected)} tensors begin with {prefix!r} too many, such as {unexpected[0]}"
        if all(f"{prefix}{name}" in missing for name in unexpected):
            return f"the names of {len(unexpected)} tensors lack {prefix!r}, such as {unexpected[0]}"
    return ""


def explain(name: str, missing: Sequence[str], num_experts: int = 0) -> str:
    """What an unexpected tensor is, as the end of a sentence; empty if its name tells nothing. ``num_experts``: those
    of the model."""
    parts = name.split(".")
    expert = _EXPERT.search(name)
    if expert and 0 < num_experts <= int(expert[1]):
        return f"; config.json says {num_experts} experts"
    if parts[-2:-1] == ["experts"]:
        return "; it contains all experts of a layer: save the model by save_pretrained, which writes each of them"
    for program, endings in _QUANTIZED.items():
        if any(part in endings for part in parts[-2:]):
            return f"; it belongs to weights that {program} quantized; name the model before quantization"
    for part, pieces in _FUSED.items():
        if part in parts:
            return f"; it contains several matrices: split it into {pieces}"
    if parts[0] in ("score", "classifier", "v_head", "value_head", "summary"):
        return "; it is the output of a reward or value model: name a language model, or remove it from the file"
    near = difflib.get_close_matches(name, missing, n=1, cutoff=0.8)
    return f"; is it {near[0]}, which is missing?" if near else ""
