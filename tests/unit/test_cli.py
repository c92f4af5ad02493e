"""Words to configurations: typed, checked, complete, and without torch."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_fp8rl import cli, config
from megatron_fp8rl.commands import eval as eval_command
from megatron_fp8rl.commands import study as study_command
from megatron_fp8rl.config import ConfigError, EnvironmentConfig, RewardConfig, RunConfig
from tests.helpers.own_model import make_model

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Own options of a command."""

    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of every arm


@dataclass(frozen=True, kw_only=True)
class TwoFolders:
    run_dir: str = "runs/x"
    other_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Own options of a command without configuration."""

    run_dir: str = "runs/demo"


COMMANDS = {
    command.name: command
    for command in (
        cli.Command(name="rl", summary="Train.", run=lambda _: 0),
        cli.Command(name="demo", summary="Show.", run=lambda _: 3, default_config="tiny_qwen3_moe"),
        cli.Command(name="study", summary="Compare.", run=lambda _: 0, options=StudyOptions),
        cli.Command(name="compare", summary="Compare.", run=lambda _: 0, takes_config=False, options=TwoFolders),
        cli.Command(name="report", summary="Draw.", run=lambda _: 0, takes_config=False, options=ReportOptions),
    )
}


def test_overrides_are_typed_and_hyphens_read_like_underscores():
    invocation = cli.parse(
        "rl tiny_qwen3 --sampling.max-staleness 2 --algo.veto_below None --checkpoint.export_hf False".split(), COMMANDS
    )
    assert invocation.config_name == "tiny_qwen3"
    assert invocation.cfg.sampling.max_staleness == 2
    assert invocation.cfg.algo.veto_below is None
    assert invocation.cfg.checkpoint.export_hf is False
    assert invocation.cfg.model == cli.load_config("tiny_qwen3").model


def test_own_options_stand_apart_from_overrides():
    words = "study tiny_qwen3 --seeds 4 5 --num_steps 7 --set data.environments.0.options.max_terms=4".split()
    invocation = cli.parse(words, COMMANDS)
    assert invocation.options == StudyOptions(seeds=(4, 5))
    assert invocation.overrides == ("--num_steps", "7", "--set", "data.environments.0.options.max_terms=4")
    assert cli.parse_overrides(cli.load_config("tiny_qwen3"), invocation.overrides) == invocation.cfg
    assert cli.parse(["report", "--run-dir", "x"], COMMANDS).options == ReportOptions(run_dir="x")


def test_generator_options_may_be_new():
    before = cli.load_config("tiny_qwen3").data.environments[0].options
    words = [
        "--set",
        "data.environments.0.options.max_terms=5",
        '--set=data.environments.0.options.operators=["+", "-"]',
    ]
    options = cli.parse(["rl", "tiny_qwen3", *words], COMMANDS).cfg.data.environments[0].options
    assert options == {**before, "max_terms": 5, "operators": ["+", "-"]}


def test_kernels_are_chosen_together_or_by_role():
    together = ["--set", 'precision.kernels={"experts": "te", "trainer": "te"}']
    by_role = ["--precision.kernels.experts", "te", "--precision.kernels.trainer=te"]
    for args in (together, by_role, ["--set", "precision.kernels.experts=te", *by_role[2:]]):
        cfg = cli.parse_overrides(cli.load_config("tiny_qwen3"), args)
        assert cfg.precision.kernels == {"experts": "te", "trainer": "te"}
        assert (cfg.precision.kernel("experts"), cfg.precision.kernel("linears")) == ("te", "auto")
    for args, message in (
        (["--precision.kernels.experts", "cutlass"], "--precision.kernels.experts = 'cutlass'.*Choose one of auto, te"),
        (
            ["--precision.kernels.expert", "te"],
            "--precision.kernels = .*'expert' is no role. Use one of trainer, linears",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            cli.parse(["rl", "tiny_qwen3", *args], COMMANDS)


def test_options_of_a_loss_are_set_one_by_one():
    words = "--algo.loss gspo --set algo.loss_options.dual_clip=3 --set algo.loss_options.aggregate=token".split()
    algo = cli.parse(["rl", "tiny_qwen3", *words], COMMANDS).cfg.algo
    assert (algo.loss, algo.loss_options) == ("gspo", {"dual_clip": 3, "aggregate": "token"})
    with pytest.raises(ConfigError, match=r"--algo.loss_options.dual_clip = 'much': has to lie above 1"):
        cli.parse(["rl", "tiny_qwen3", *words, "--set", "algo.loss_options.dual_clip=much"], COMMANDS)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--algo.loss_options.dual_clip"], "--algo.loss_options.dual_clip needs a value"),
        (["--set", "num_steps=3"], "'num_steps' is not an entry of a dictionary.*--num_steps VALUE"),
        (["--set", "data.environments.7.options.x=3"], "'7' is not an entry"),
        (["--set", "seed"], "needs PATH=VALUE"),
        (["--set"], "needs PATH=VALUE"),
    ],
)
def test_wrong_paths_name_the_remedy(args, message):
    with pytest.raises(cli.UsageError, match=message):
        cli.parse(["rl", "tiny_qwen3", *args], COMMANDS)


@pytest.mark.parametrize("words", [["runs/a run"], ["--run_dir", "runs/a run"]])
def test_a_command_without_configuration_takes_its_subject_as_a_bare_word(words):
    assert cli.parse(["report", *words], COMMANDS).options.run_dir == "runs/a run"


@pytest.mark.parametrize("words", [["a", "b c"], ["a", "--other_dir", "b c"], ["--run_dir", "a", "--other_dir", "b c"]])
def test_bare_words_set_the_options_in_order(words):
    assert cli.parse(["compare", *words], COMMANDS).options == TwoFolders(run_dir="a", other_dir="b c")


def test_a_bare_word_too_many_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.parse(["compare", "a", "b", "c"], COMMANDS)
    assert ended.value.code == 2 and "c" in capsys.readouterr().err


def test_a_report_of_no_run_says_so_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "megatron_fp8rl", "report", str(tmp_path / "nothing")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"report: {tmp_path / 'nothing'} has neither metrics.jsonl nor config.json nor evaluations. "
        "Name the folder of a run: report RUN_DIR"
    )


def test_a_default_configuration_serves_when_none_is_named():
    invocation = cli.parse(["demo", "--num_steps", "3"], COMMANDS)
    assert (invocation.config_name, invocation.cfg.num_steps) == ("tiny_qwen3_moe", 3)


@pytest.mark.parametrize("words", [["--parallel.tensr", "2"], ["--parallel.tensor", "two"], ["stray"]])
def test_unknown_and_ill_typed_options_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.parse(["rl", "tiny_qwen3", *words], COMMANDS)
    assert stop.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_unknown_names_list_near_matches():
    with pytest.raises(cli.UsageError, match=r"did you mean tiny_qwen3_moe or tiny_qwen3"):
        cli.parse(["rl", "tiny_qwen3_mo"], COMMANDS)
    with pytest.raises(cli.UsageError, match=r"did you mean study\?"):
        cli.parse(["studdy"], COMMANDS)
    with pytest.raises(cli.UsageError, match="has no 'tiny'.*did you mean"):
        cli.load_config("model_configs.tiny:tiny")
    with pytest.raises(cli.UsageError, match="No module named 'nowhere'"):
        cli.load_config("nowhere:run")
    with pytest.raises(cli.UsageError, match="rl needs a CONFIG"):
        cli.parse(["rl"], COMMANDS)


def test_module_and_function_name_a_configuration():
    assert isinstance(cli.load_config("model_configs.tiny:tiny_qwen3"), RunConfig)
    with pytest.raises(cli.UsageError, match="returned str"):
        cli.load_config("os:getcwd")


def test_all_mistakes_are_reported_and_nothing_runs(capsys):
    words = ["demo", "--algo.clip_low", "-1", "--sampling.completions_per_prompt", "1"]
    with pytest.raises(ConfigError) as error:
        cli.parse(words, COMMANDS)
    assert [v.field for v in error.value.violations] == ["--sampling.completions_per_prompt", "--algo.clip_low"]
    assert cli.main(list(COMMANDS.values()), words) == 2
    assert "2 mistakes in the configuration" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--sampling.stop_token_ids", "--sampling.stop-token-ids"])
def test_a_list_that_is_typed_twice_is_refused(name, capsys):
    words = ["demo", name, "2", "3", "--seed", "1", "--seed", "2"]
    assert cli.main(list(COMMANDS.values()), words) == 3  # of other options the last one counts
    assert cli.main(list(COMMANDS.values()), [*words, f"{name}=4"]) == 2
    assert f"{name} is typed twice, and is a list; write all its values behind one {name}" in capsys.readouterr().err


def test_main_runs_the_command_and_returns_its_status():
    assert cli.main(list(COMMANDS.values()), ["demo"]) == 3


def test_dry_run_prints_the_resolved_configuration(capsys):
    assert cli.main(list(COMMANDS.values()), ["rl", "tiny_qwen3", "--dry-run", "--seed", "9"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["name"], printed["seed"]) == ("tiny_qwen3", 9)


class TestDryRunShowsTheData:
    def run(
        self, folder: Path, monkeypatch, *, as_function: bool = False, broken: int = 0, command=None, options=()
    ) -> int:
        """A dry run of the demo with rows of a file instead of its generator."""
        monkeypatch.setenv("MEGATRON_FP8RL_CACHE", str(folder / "cache"))
        rows = [json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1), "level": "easy"}) for i in range(20)]
        (folder / "train.jsonl").write_text("\n".join([*rows, *["{"] * broken]) + "\n")
        source = EnvironmentConfig(dataset=str(folder / "train.jsonl"), rewards=(RewardConfig(function="number"),))
        demo = cli.load_config("tiny_qwen3_moe")
        cfg = dataclasses.replace(demo, data=dataclasses.replace(demo.data, environments=(source,)))
        monkeypatch.setattr(cli, "load_config", lambda target: cfg)
        if command is not None:
            return cli.main([command], [command.name, "demo", "--dry-run", *options])
        command = cli.Command(
            name="mine",
            summary="",
            run=lambda _: 3,
            default_config="demo",
            configure=(lambda options, override: (cfg, ["a note"])) if as_function else None,
            options=StudyOptions if as_function else None,
            reads_data=True,
        )
        return cli.main([command], ["mine", "--dry-run"])

    LINES = (
        "train: 20 rows",
        "prompt in 'question', answer in 'answer'",
        "  prompt tokens 8 ",
        "  first prompt, as the model reads it, 8 tokens:",
        "    | 0 + 1 =",
        "  its reference answer: '1'",
        "  its columns, for rewards and the template: question, level",
        "train: reference answers score 1, empty answers 0",
    )

    def test_as_comments_of_a_function(self, tmp_path, monkeypatch, capsys):
        assert self.run(tmp_path, monkeypatch, as_function=True) == 0
        printed = capsys.readouterr()
        assert all(line in printed.out for line in self.LINES), printed.out
        compile(printed.out, "kept.py", "exec")  # the output can be saved as a file of Python

    def test_beside_json(self, tmp_path, monkeypatch, capsys):
        assert self.run(tmp_path, monkeypatch, as_function=False) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["name"] == "tiny_qwen3_moe"
        assert all(line in printed.err for line in self.LINES), printed.err

    @pytest.mark.parametrize("name", ["eval", "study"])
    def test_for_an_evaluation_and_a_study(self, name, tmp_path, monkeypatch, capsys):
        command = {"eval": eval_command, "study": study_command}[name].COMMAND
        options = ["--checkpoint", str(tmp_path / "weights")] if name == "eval" else ["--seeds", "1"]
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / ".metadata").touch()
        assert self.run(tmp_path, monkeypatch, command=command, options=options) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["name"] == "tiny_qwen3_moe"
        assert all(line in printed.err for line in self.LINES), printed.err
        wrong = ["--checkpoint", "nowhere"] if name == "eval" else ["--arms", "fp16"]
        assert self.run(tmp_path, monkeypatch, command=command, options=wrong) == 2
        problem = "is not a folder" if name == "eval" else "is not a pair of precisions"
        assert problem in capsys.readouterr().err

    def test_data_that_cannot_be_used_end_with_status_2(self, tmp_path, monkeypatch, capsys):
        assert self.run(tmp_path, monkeypatch, as_function=True, broken=5) == 2
        printed = capsys.readouterr()
        assert "ERROR: " in printed.err and "5 of 25 prompts cannot be used" in printed.err
        assert "left out: row 20 of train: is not JSON" in printed.out and "RunConfig(" in printed.out


def test_help_lists_commands_configurations_and_field_comments(capsys):
    for words in ([], ["--help"], ["rl", "--help"]):
        with pytest.raises(SystemExit):
            cli.parse(words, COMMANDS)
        assert "tiny_qwen3_moe" in capsys.readouterr().out
    for option, is_all in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as stop:
            cli.parse(["study", "tiny_qwen3", option], COMMANDS)
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert "trainer ranks over all nodes" in shown
        assert "seeds of every arm" in shown
        assert ("--optim.beta1" in shown) == is_all
    architecture = shown.index("architecture of the model")
    assert shown.index("--model.hf_path") < shown.index("--observe.display") < architecture
    assert architecture < shown.index("--model.num_layers") < shown.index("--model.router.score")
    assert "compiled | plain | none" in shown


def test_configuration_needs_no_torch():
    program = (
        "import sys, megatron_fp8rl.config, megatron_fp8rl.cli as cli, megatron_fp8rl.preflight.rules\n"
        "rl = cli.Command(name='rl', summary='', run=lambda _: 0)\n"
        "assert cli.main([rl], ['rl', 'tiny_qwen3_moe', '--dry-run', '--seed', '5']) == 0\n"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seed"] == 5


def test_words_that_were_parsed_once_say_the_same_of_other_configurations():
    words = (
        "--optim.lr 3e-4 --sampling.stop_token_ids 7 8 --num_steps=9 --set data.environments.0.options.x=2"
    ).split()
    override = cli.overriding(words)
    first, second = cli.load_config("tiny_qwen3"), cli.load_config("tiny_qwen3_moe")
    for cfg in (first, second, first):
        assert override(cfg) == cli.parse_overrides(cfg, words)
    assert cli.overriding(["--model.router.scaling_factor", "2.0"])(second).model.router.scaling_factor == 2.0
    nested = cli.overriding(["--model.router.scaling_factor", "2.0", "--num_steps", "3"])
    assert nested(second) == nested(second) != second


def test_an_environment_without_the_engines_says_what_to_install(monkeypatch, capsys):
    from megatron_fp8rl import __main__ as program

    def lacks(name: str):
        def main(commands):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return main

    monkeypatch.setattr(program.cli, "main", lacks("torch.distributed"))
    assert program.main() == 2
    assert "torch is not installed here" in capsys.readouterr().err
    monkeypatch.setattr(program.cli, "main", lacks("megatron_fp8rl.nothing"))
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        program.main()


def test_an_environment_without_any_package_says_what_to_install():
    command = [sys.executable, "-S", "-m", "megatron_fp8rl", "show", "tiny_qwen3_moe"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": ""})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "packaging is not installed here. Install the wheel with its requirements" in done.stderr


PRINTING = """
import sys
from megatron_fp8rl import __main__ as program
program.cli.main = lambda commands: print({text}) or 0
sys.exit(program.main())
"""


def test_a_reader_that_stops_reading_ends_the_command_without_a_traceback():
    for text in ("'a short line'", "'line' * 1_000_000"):
        command = [sys.executable, "-c", PRINTING.format(text=text)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 141


def test_a_terminal_without_the_signs_of_a_bar_gets_question_marks():
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", PRINTING.format(text="'7 \u2588'")]
    assert subprocess.run(command, capture_output=True, env=environment, cwd=ROOT, check=True).stdout == b"7 ?\n"


def test_a_dry_run_for_gpus_does_not_warn_that_this_machine_has_none(capsys, monkeypatch, tmp_path):
    from megatron_fp8rl import __main__ as program
    from megatron_fp8rl.preflight import data_check

    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    make_model(folder, ["What is 1 plus 1?"])
    rows.write_text('{"question": "What is 1 plus 1?", "answer": "2"}\n' * 8)
    monkeypatch.setattr(data_check, "local_accelerator", lambda: "cpu")
    args = ["grpo", "--model", str(folder), "--data", str(rows), "--reward", "number", "--engine.sleep_level", "2"]
    for gpus, is_warned in ((["--gpus", "0"], True), (["--gpus", "8", "--gpu", "h100"], False)):
        assert cli.main(program.COMMANDS, [*args, *gpus, "--dry-run"]) == 0
        printed = capsys.readouterr()
        assert ("has no effect without a GPU" in printed.err) == is_warned and "sleep_level=2" in printed.out


@pytest.mark.parametrize("name", list(cli.config_functions()))
def test_a_runs_folder_is_a_configuration(name, tmp_path):
    cfg = cli.load_config(name)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    assert cli.load_config(str(tmp_path)) == cfg


def test_other_folders_are_refused_by_what_is_wrong(tmp_path):
    with pytest.raises(cli.UsageError, match="config.json: No such file or directory. Name the folder of a run"):
        cli.load_config(str(tmp_path))
    read = dataclasses.asdict(cli.load_config("tiny_qwen3"))
    wrong = {
        "name: Field required": {"architectures": ["LlamaForCausalLM"], "hidden_size": 64},  # of a model
        "kind is no field": read | {"kind": 1},
        "engine.color is no field": read | {"engine": read["engine"] | {"color": "red"}},
        "optim.lr: Input should be a valid number": read | {"optim": read["optim"] | {"lr": "fast"}},
    }
    for message, content in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(cli.UsageError, match=message):
            cli.load_config(str(tmp_path))


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch, capsys):
    from megatron_fp8rl import __main__ as program

    def interrupted(commands):
        raise KeyboardInterrupt

    for variable in ("RANK", program.STARTED):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(program.cli, "main", interrupted)
    assert program.main() == 130 and capsys.readouterr().err == "interrupted\n"


def test_no_option_is_explained_by_the_comment_of_the_option_above():
    """The parser gives a comment above a field also to the next field, unless that has a comment of its own."""
    lines = [line.strip() for line in Path(config.__file__).read_text().splitlines()]
    is_field = [re.match(r"\w+: [A-Z\w]", line) is not None for line in lines]
    is_bare = [field and " # " not in line for field, line in zip(is_field, lines, strict=True)]
    assert not [
        lines[i] for i in range(2, len(lines)) if is_bare[i] and is_bare[i - 1] and lines[i - 2].startswith("# ")
    ]
