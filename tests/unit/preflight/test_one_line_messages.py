"""Mistakes in a model's folder and in names are reported in one line each, all of them at once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.commands import grpo
from megatron_fp8rl.config import ConfigError
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.preflight.rules import check
from megatron_fp8rl.rollout.vllm_args import engine_arguments
from tests.helpers.configs import DENSE, make
from tests.helpers.family_configs import DEEPSEEK, LLAMA


def _tokenizer(folder: Path, templates: object) -> Path:
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    return folder


def test_named_chat_templates_need_a_default_or_a_choice(tmp_path):
    tool, default = {"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}
    named = make(DENSE, data__tokenizer=str(_tokenizer(tmp_path / "named", [tool])))
    (violation,) = check(named, accelerator="cpu")
    assert (
        violation.field == "--data.chat_template_arguments" and "tool_use, and none has the name" in violation.problem
    )
    assert '{"chat_template": "tool_use"}' in violation.remedy
    for data in (
        replace(named.data, chat_template_arguments={"chat_template": "tool_use"}),
        replace(named.data, chat_template=False),
        replace(named.data, tokenizer=str(_tokenizer(tmp_path / "both", [tool, default]))),
        replace(named.data, tokenizer=str(_tokenizer(tmp_path / "one", "a template"))),
    ):
        assert check(replace(named, data=data), accelerator="cpu") == []


def test_the_folder_of_a_run_is_shown_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    cfg = make(DENSE, name="mine", output_dir=f"{tmp_path}/file/{{name}}")
    (violation,) = check(cfg, accelerator="cpu")
    assert (violation.field, violation.value) == ("--output_dir", f"{tmp_path}/file/mine")


def test_mistakes_of_model_data_and_reward_are_named_together(tmp_path):
    options = grpo.GrpoOptions(model=str(tmp_path / "none"), data=(str(tmp_path / "rows.jsonl"),), reward=("numbr",))
    with pytest.raises(ConfigError) as error:
        grpo.configure(options, cli.overriding([]))
    fields = [violation.field for violation in error.value.violations]
    assert fields == ["--model", "--data.environments.0.dataset", "--data.environments.0.rewards.0.function"]
    with pytest.raises(ConfigError) as error:
        grpo.configure(replace(options, reward=()), cli.overriding([]))
    assert [violation.field for violation in error.value.violations][:2] == ["--reward", "--model"]


@pytest.mark.parametrize("generation", ["cpu", "hopper"])
def test_an_engine_learns_what_transformers_does_not_save(generation):
    """transformers leaves the score of DeepSeek-V3's router out of config.json, and vLLM then takes a softmax."""

    def overrides(model):
        cfg = make(model, precision__trainer="bf16", precision__rollout="bf16")
        arguments = engine_arguments(cfg, "model", KernelChoice.of(cfg, Hardware(generation)))
        return {key: value for key, value in arguments.get("hf-overrides", {}).items() if key != "quantization_config"}

    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    scaled = [overrides(replace(model, hf_path="model")) for model in (DEEPSEEK, LLAMA)]
    assert [found.pop("rope_parameters")["factor"] for found in scaled] == [4.0, 8.0]  # vLLM does not read every key
    assert scaled == [expected, {}]
    assert overrides(DEEPSEEK) == {}  # the run writes config.json itself
