"""Folders of models as users have them: each is read, or refused in one sentence before anything starts."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fp8rl import cli
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.commands import train
from megatron_fp8rl.commands.ranks import run_with_status
from megatron_fp8rl.data.tokenizer import character_tokenizer, load_tokenizer
from megatron_fp8rl.names import registry
from megatron_fp8rl.preflight.data_check import check_data
from tests.helpers.checkpoints import random_tensors
from tests.helpers.models import small_model

MODEL = small_model((2, 128, 4, 2, 32, 128), ffn=256, tie_embeddings=True)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q, DOWN, EMBEDDING, HEAD = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DELETED = object()


def edit(name: str, **fields):
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        content = {key: value for key, value in (content | fields).items() if value is not DELETED}
        (folder / name).write_text(json.dumps(content))

    return change


def write(name: str, content):
    return lambda folder: (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def config(**fields):
    return edit("config.json", **fields)


def quantization(**fields):
    return config(quantization_config=fields)


def tensors(change):
    def apply(folder: Path) -> None:
        loaded = load_file(folder / SINGLE)
        change(loaded)
        loaded = {name: tensor.clone() for name, tensor in loaded.items()}
        save_file(loaded, folder / SINGLE, metadata={"format": "pt"})

    return apply


def renamed(rename):
    def change(loaded: dict) -> None:
        for name in list(loaded):
            loaded[rename(name)] = loaded.pop(name)

    return tensors(change)


def cast(dtype: torch.dtype, *names: str):
    def change(loaded: dict) -> None:
        for name in names or list(loaded):
            loaded[name] = loaded[name].to(dtype)

    return tensors(change)


def added(**shapes):
    """Tensors of ones; "__" stands for "."."""
    return tensors(
        lambda loaded: loaded.update({name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()})
    )


def untied(folder: Path) -> None:
    tensors(lambda loaded: loaded.update({HEAD: loaded[EMBEDDING].flip(0)}))(folder)


def quantized(*endings: str):
    """The query matrix of one layer as a quantizer writes it."""

    def change(loaded: dict) -> None:
        del loaded[Q]
        for ending in endings:
            loaded[Q.removesuffix("weight") + ending] = torch.zeros(16, 16, dtype=torch.int32)

    return tensors(change)


def fused(loaded: dict) -> None:
    parts = [loaded.pop(Q.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
    loaded[Q.replace("q_proj", "qkv_proj")] = torch.cat(parts)


def sharded(num: int = 2, *, index: bool = True, twice: bool = False, then=lambda folder, content: None):
    def change(folder: Path) -> None:
        loaded = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        names, files = sorted(loaded), {}
        for shard in range(num):
            file = f"model-{shard + 1:05}-of-{num:05}.safetensors"
            part = {name: loaded[name] for name in names[shard::num]} | ({names[0]: loaded[names[0]]} if twice else {})
            save_file(part, folder / file)
            files |= dict.fromkeys(part, file)
        content = {"metadata": {}, "weight_map": files}
        then(folder, content)
        if index:
            (folder / INDEX).write_text(json.dumps(content))

    return change


def without(file: str):
    return lambda folder, content: (folder / file).unlink()


def tokenizer(change):
    def apply(folder: Path) -> None:
        loaded = load_tokenizer(str(folder))
        change(loaded)
        loaded.save_pretrained(folder)

    return apply


def moved(old: str, new: str):
    return lambda folder: (folder / old).rename(folder / new)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def adapter(folder: Path) -> None:
    write("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"})(folder)
    moved(SINGLE, "adapter_model.safetensors")(folder)


def linked(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(folder / "blobs" / "gone")


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


SPECIAL = {"additional_special_tokens": ["<think>", "</think>"]}
NO_WEIGHTS = "neither model.safetensors nor model.safetensors.index.json exists"
ROPE = {"rope_type": "default", "rope_theta": 1e4}

READ = {
    "as it is saved": lambda folder: None,
    "a tied head that is stored, too": tensors(lambda loaded: loaded.update({HEAD: loaded[EMBEDDING]})),
    "untied": both(config(tie_word_embeddings=False), untied),
    "untied by default": both(config(tie_word_embeddings=DELETED), untied),
    "FP32": cast(torch.float32),
    "FP16": cast(torch.float16),
    "one matrix in FP32": cast(torch.float32, Q),
    "torch_dtype": config(dtype=DELETED, torch_dtype="float16"),
    "no quantization": config(quantization_config=None),
    "empty quantization": config(quantization_config={}),
    "two shards": sharded(),
    "three shards without an index": sharded(3, index=False),
    "a shard that no index lists": sharded(
        then=lambda folder, _: save_file({Q: torch.ones(2)}, folder / "model-00009-of-00009.safetensors")
    ),
    "Mistral's file beside": lambda folder: shutil.copy(folder / SINGLE, folder / "consolidated.safetensors"),
    "a pickle beside": write("pytorch_model.bin", "x"),
    "padded vocabulary": both(
        config(vocab_size=192), tensors(lambda loaded: loaded.update({EMBEDDING: torch.randn(192, 128)}))
    ),
    "tokens in reserved rows": both(
        config(vocab_size=192),
        tensors(lambda loaded: loaded.update({EMBEDDING: torch.randn(192, 128)})),
        tokenizer(lambda t: t.add_special_tokens(SPECIAL)),
    ),
    "frequencies": added(model__rotary_emb__inv_freq=16, model__layers__0__self_attn__rotary_emb__inv_freq=16),
    "no architectures": config(architectures=DELETED),
    "remote code": config(auto_map={"AutoModelForCausalLM": "modeling.Model"}),
    "templates in a list": edit(
        "tokenizer_config.json",
        chat_template=[{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}],
    ),
    "template in a file": write("chat_template.jinja", TEMPLATE),
    "template in both": both(
        write("chat_template.jinja", TEMPLATE), edit("tokenizer_config.json", chat_template=TEMPLATE)
    ),
    "no template": edit("tokenizer_config.json", chat_template=None),
    "unknown class of tokenizer": edit("tokenizer_config.json", tokenizer_class="OurTokenizer"),
    "end ids in a list": config(eos_token_id=[2, 3]),
    "no end id in config.json": config(eos_token_id=DELETED),
    "odd values for sampling": write("generation_config.json", {"temperature": 0.0, "top_p": 2.0, "bos_token_id": [1]}),
    "no end id in generation_config.json": write("generation_config.json", {"eos_token_id": None}),
    "no padding": config(pad_token_id=None),
}
# The option that is named, and the sentence.
REFUSED = {
    "tied, without saying so": (config(tie_word_embeddings=DELETED), 'missing; .*set "tie_word_embeddings" to true'),
    "head of another model": (untied, f"{HEAD}: differs from {EMBEDDING}"),
    "null": (config(tie_word_embeddings=None), r"tie_word_embeddings is missing \(it is null\)"),
    "text for true": (config(tie_word_embeddings="true"), "tie_word_embeddings = 'true' is not true or false"),
    "FP64": (cast(torch.float64, Q), f"{Q}: type torch.float64; supported are BF16"),
    "E5M2": (cast(torch.float8_e5m2, Q), f"{Q}: type torch.float8_e5m2; supported are BF16"),
    "no type": (config(dtype="float7"), "dtype = 'float7' is no type of torch"),
    "GPTQ": (quantization(quant_method="gptq", bits=4), "quantization_config = 'gptq' is not supported"),
    "AWQ": (quantization(quant_method="awq", bits=4), "quantization_config = 'awq' is not supported"),
    "bitsandbytes": (quantization(quant_method="bitsandbytes", load_in_4bit=True), "= 'bitsandbytes' is not supported"),
    "bitsandbytes without method": (quantization(load_in_8bit=True, load_in_4bit=False), "{'load_in_8bit': True} is n"),
    "compressed-tensors": (quantization(quant_method="compressed-tensors"), "'compressed-tensors' is not supported"),
    "its older key": (config(compression_config={"quant_method": "sparse"}), "name the model before quantization"),
    "FP8 by tensor": (quantization(quant_method="fp8"), r"weight_block_size is None, not \[128, 128\]"),
    "FP8 in other blocks": (quantization(quant_method="fp8", weight_block_size=[64, 64]), r"\[64, 64\], not \[128"),
    "MXFP4": (quantization(quant_method="mxfp4"), "= 'mxfp4' is not supported"),
    "FP8 in config.json only": (
        quantization(quant_method="fp8", weight_block_size=[128, 128]),
        "quantization_config says that the weights are FP8, and no tensor is",
    ),
    "ModelOpt": (write("hf_quant_config.json", {"quantization": {}}), "hf_quant_config.json: says that ModelOpt"),
    "GPTQ in the file only": (quantized("qweight", "qzeros", "scales"), "qweight: .* that GPTQ or AWQ quantized"),
    "bitsandbytes in the file only": (added(**{f"{Q.replace('.', '__')}__absmax": 4}), "bitsandbytes quantized"),
    "compressed-tensors in the file": (quantized("weight_packed"), "weight_packed: .* compressed-tensors quantized"),
    "a shard is missing": (
        sharded(then=without("model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors: the file is missing",
    ),
    "a shard is missing, no index": (
        sharded(3, index=False, then=without("model-00003-of-00003.safetensors")),
        "model-00003-of-00003.safetensors: the file is missing",
    ),
    "an index of missing files": (
        sharded(then=lambda _, content: content["weight_map"].update({Q: "model-00003-of-00003.safetensors"})),
        "model-00003-of-00003.safetensors: the file is missing",
    ),
    "an index of missing tensors": (
        sharded(then=lambda _, content: content["weight_map"].update(extra="model-00001-of-00002.safetensors")),
        "extra: model.safetensors.index.json says model-00001-of-00002.safetensors, which lacks it",
    ),
    "an index of folders": (
        sharded(then=lambda _, content: content["weight_map"].update({Q: "../other.safetensors"})),
        "model.safetensors.index.json: damaged: weight_map names '../other.safetensors'",
    ),
    "an empty index": (
        sharded(then=lambda _, content: content["weight_map"].clear()),
        "model.safetensors.index.json: damaged: weight_map is empty",
    ),
    "an index that is no JSON": (both(sharded(), write(INDEX, "{")), f"{INDEX}: damaged: .*Fetch the file again"),
    "a tensor in two shards": (sharded(twice=True, index=False), "in model-00002-.* and in model-00001-"),
    "old shards beside": (
        both(sharded(), lambda folder: save_file({}, folder / SINGLE)),
        f"{SINGLE} exists, but {INDEX} does not list it",
    ),
    "another file name": (moved(SINGLE, "weights.safetensors"), "If weights.safetensors .* rename it"),
    "Mistral's file only": (moved(SINGLE, "consolidated.safetensors"), "has Mistral's own names"),
    "torch only": (pickled, "Convert pytorch_model.bin with transformers"),
    "torch index only": (both(moved(SINGLE, "x"), write("pytorch_model.bin.index.json", {})), "Convert pytorch_model"),
    "GGUF": (moved(SINGLE, "model.gguf"), "Name the GGUF file itself: .*model.gguf"),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), NO_WEIGHTS),
    "an adapter": (both(adapter, lambda f: (f / "config.json").unlink()), "is an adapter of org/base, without the mod"),
    "an adapter with config.json": (adapter, "is an adapter of org/base, without the model; merge both"),
    "cut": (lambda folder: os.truncate(folder / SINGLE, 500_000), "has 500000 bytes instead of"),
    "empty": (lambda folder: (folder / SINGLE).write_bytes(b""), "its 0 bytes hold no header"),
    "an error page": (write(SINGLE, "<!doctype html><title>404</title>"), "is truncated or no safetensors file"),
    "Git LFS": (write(SINGLE, "version https://git-lfs.github.com/spec/v1\n"), "is a pointer of Git LFS"),
    "a broken link": (linked, f"{SINGLE} cannot be read: No such file"),
    "a folder": (both(moved(SINGLE, "x"), lambda f: (f / SINGLE).mkdir()), f"{SINGLE} cannot be read: Is a directory"),
    "more rows": (
        tensors(lambda loaded: loaded.update({EMBEDDING: torch.randn(192, 128)})),
        rf"{EMBEDDING}: shape \(192, 128\) in model.safetensors, but config.json says \(128, 128\)",
    ),
    "more tokens than rows": (
        tokenizer(lambda t: t.add_tokens(["<a>", "<b>"])),
        "has 130 tokens, model.vocab_size is only 128; resize the embedding",
    ),
    "more special tokens than rows": (tokenizer(lambda t: t.add_special_tokens(SPECIAL)), "has 130 tokens, model.voc"),
    "wrapped by torch.compile": (renamed("_orig_mod.{}".format), "24 tensors begin with '_orig_mod.' too many"),
    "wrapped by DDP": (renamed("module.{}".format), "24 tensors begin with 'module.' too many"),
    "the base model only": (renamed(lambda name: name.removeprefix("model.")), "24 tensors lack 'model.'"),
    "part of a multimodal model": (renamed("language_model.{}".format), "begin with 'language_model.' too many"),
    "another name": (
        renamed(lambda name: name.replace("1.mlp.down_proj", "1.mlp.w2")),
        f"mlp.w2.weight: not a tensor of this qwen3 model; is it {DOWN}, which is missing",
    ),
    "fused queries, keys and values": (tensors(fused), "qkv_proj.weight: .*split it into q_proj, k_proj and v_proj"),
    "a value head": (added(v_head__weight=(1, 128)), "v_head.weight: .* output of a reward or value model"),
    "a classifier": (added(score__weight=(1, 128)), "score.weight: .* output of a reward or value model"),
    "flat": (tensors(lambda loaded: loaded.update({Q: loaded[Q].reshape(-1)})), rf"{Q}: shape \(16384,\) in"),
    "transposed": (
        tensors(lambda loaded: loaded.update({DOWN: loaded[DOWN].T.contiguous()})),
        rf"{DOWN}: shape \(256, 128\) in",
    ),
    "NaN": (tensors(lambda loaded: loaded[DOWN][5, 6].fill_(float("nan"))), f"{DOWN}: NaN or infinity in {SINGLE}"),
    "a class for sequences": (
        config(architectures=["Qwen3ForSequenceClassification"]),
        r"architectures = \['Qwen3ForSequenceClassification'\], which engines build; .* needs \[\"Qwen3ForCausalLM\"\]",
    ),
    "the class of the base model": (config(architectures=["Qwen3Model"]), "which engines build"),
    "another family": (config(model_type="qwen2", architectures=["Qwen2ForCausalLM"]), "not a tensor of this qwen2 m"),
    "an unknown family": (config(model_type="mamba2"), "model_type 'mamba2' .* is not supported"),
    "no family": (config(model_type=DELETED), "model_type None .* is not supported"),
    "a list for an object": (write("config.json", []), "config.json is not a JSON object"),
    "text for a number": (config(vocab_size="128"), "vocab_size = '128' is not a whole number"),
    "other widths": (config(hidden_size=256), "but config.json says"),
    "no width of a head": (config(head_dim=DELETED), rf"{Q.replace('1', '0')}: shape \(128, 128\) in"),
    "another activation": (config(hidden_act="gelu_pytorch_tanh"), "hidden_act = 'gelu_pytorch_tanh' is not supported"),
    "scaled positions": (
        config(rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0}),
        "rope_type = 'dynamic'",
    ),
    "infinite rotary base": (config(rope_parameters=ROPE | {"rope_theta": float("inf")}), "rope_theta = inf is infin"),
    "infinite epsilon": (config(rms_norm_eps=float("inf")), "rms_norm_eps = inf is not a number"),
    "a window": (config(use_sliding_window=True, sliding_window=64), "use_sliding_window = True is not supported"),
    "a shorter length": (config(seq_length=64), "seq_length = 64, and vLLM computes no longer sequences"),
    "begin ids in a list": (config(bos_token_id=[1]), r"bos_token_id = \[1\] is not a whole number"),
    "text as end id": (config(eos_token_id="2"), "eos_token_id = '2' is not a whole number"),
    "negative end id": (config(eos_token_id=-1), "eos_token_id = -1 contains -1, which is not a token id"),
    "a fraction as end id": (
        write("generation_config.json", {"eos_token_id": 2.5}),
        "contains 2.5, which is not a tok",
    ),
    "generation_config.json as a list": (write("generation_config.json", [2]), "generation_config.json is not a JSON"),
    "no end token": (
        both(edit("tokenizer_config.json", eos_token=None), config(eos_token_id=None)),
        "has no end token; set eos_token in its tokenizer_config.json",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
    "a damaged tokenizer": (write("tokenizer.json", "{"), "the tokenizer in .* cannot be loaded: JSONDecodeError"),
    "templates without default": (
        edit("tokenizer_config.json", chat_template=[{"name": "rag", "template": TEMPLATE}]),
        "chat templates rag, and none has the name default",
    ),
    "template files without default": (
        both(lambda f: (f / "additional_chat_templates").mkdir(), write("additional_chat_templates/rag.jinja", "x")),
        "chat templates rag, and none has the name default",
    ),
    "a list of texts as template": (edit("tokenizer_config.json", chat_template=[TEMPLATE]), "cannot be loaded: Type"),
    "a template that is not valid": (write("chat_template.jinja", "a\n{% for m in %}"), "is not valid .line 2: "),
    "a template without the question": (write("chat_template.jinja", "Hello"), "leaves out the message of the user"),
    "a template for lists of parts": (
        write(
            "chat_template.jinja", "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
        ),
        "leaves out the message of the user",
    ),
    "a template that refuses everything": (
        write("chat_template.jinja", "{{ raise_exception('tools only') }}"),
        "12 of 12 prompts cannot be used, .*tools only",
    ),
    "an adapter beside": (
        both(write("adapter_config.json", {}), lambda f: shutil.copy(f / SINGLE, f / "adapter_model.safetensors")),
        "an adapter beside the weights, which transformers adds to them",
    ),
    "the template of a processor": (write("chat_template.json", {"chat_template": TEMPLATE}), "is the template of a p"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    character_tokenizer().save_pretrained(folder)
    content = registry.to_hf_config(MODEL) | {"eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(content))
    loaded = {name: tensor.clone() for name, tensor in random_tensors(MODEL).items()}
    save_file(loaded, folder / SINGLE, metadata={"format": "pt"})
    return folder


@pytest.fixture
def started(saved, tmp_path, monkeypatch, capsys):
    """Change a copy of the folder and start ``grpo``; (exit status, stdout, lines of stderr)."""

    def start(change) -> tuple[int, str, list[str]]:
        folder = tmp_path / "model"
        shutil.copytree(saved, folder)
        change(folder)
        (tmp_path / "rows.jsonl").write_text(
            "".join(f'{{"question": "{i}+2?", "answer": "{i + 2}"}}\n' for i in range(12))
        )
        status = cli.main(
            COMMANDS, ["grpo", "--model", str(folder), *"--data rows.jsonl --reward number --gpus 0".split()]
        )
        output = capsys.readouterr()
        return status, output.out, output.err.strip().splitlines()

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8RL_DATA_SEEN", raising=False)
    monkeypatch.setattr(train, "on_every_rank", lambda cfg, program: run_with_status(partial(check_data, cfg)))
    monkeypatch.setattr("megatron_fp8rl.data.inspection.check_rewards", lambda *args: [])
    return start


@pytest.mark.parametrize("name", READ)
def test_a_folder_is_read(name, started):
    status, shown, errors = started(READ[name])
    assert (status, errors) == (0, [])
    assert "12 rows" in shown and "completions end at <eos> (2)" in shown and "WARNING" not in shown
    assert ("first: 'user: 0+2?\\nassistant: '" in shown) == name.startswith("template")


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_is_refused_in_one_sentence(name, started, tmp_path):
    change, message = REFUSED[name]
    status, _, errors = started(change)
    errors = [line for line in errors if not line.startswith("[transformers]")]
    assert status == 2 and len(errors) == 2 and "1 mistake in the configuration" in errors[0], errors
    assert re.search(message, errors[1]), errors[1]
    assert errors[1].startswith("  1. --") and not (tmp_path / "runs").exists()


def test_a_dry_run_reads_the_folder_too(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_fp8rl.data.inspection.check_rewards", lambda *args: [])
    (tmp_path / "rows.jsonl").write_text('{"question": "1+2?", "answer": "3"}\n' * 4)
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    args = ["grpo", "--model", str(folder), *"--data rows.jsonl --reward number --gpus 0 --dry-run".split()]
    assert cli.main(COMMANDS, args) == 0 and "4 rows" in capsys.readouterr().out
    renamed("_orig_mod.{}".format)(folder)
    assert cli.main(COMMANDS, args) == 2
    shown = capsys.readouterr()
    assert f"ERROR: --model.hf_path = '{folder}': the names of 24 tensors begin with '_orig_mod.' too many" in shown.err
    assert "4 rows" not in shown.out
