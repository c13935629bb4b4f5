"""From a command line to read-only arguments: merging, origins, freezing, secrets."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.arguments import parse_args, print_resolved
from slime.core.errors import ConfigError
from tests.args import make_args, make_argv

ROOT = Path(__file__).parents[2]


def refusal(*argv: str, **overrides: object) -> str:
    with pytest.raises(ConfigError) as error:
        parse_args([*make_argv(**overrides), *argv])
    assert error.value.exit_status == 2
    return str(error.value)


def test_values_and_their_origins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 3e-4\nadam-beta2: 0.98\nuse_kl_loss: true\n")
    args = make_args(config=file, adam_beta2=0.95)
    assert (args.lr, args.origin("lr")) == (3e-4, "config")
    assert (args.adam_beta2, args.origin("adam_beta2")) == (0.95, "command line")
    assert (args.adam_beta1, args.origin("adam_beta1")) == (0.9, "default")
    assert (args.global_batch_size, args.origin("global_batch_size")) == (4, "derived")
    assert args.use_kl_loss is True


def test_the_last_of_repeated_flags_wins():
    args = parse_args([*make_argv(), "--lr", "1", "--lr", "2", "--min-lr=0.5"])
    assert (args.lr, args.min_lr) == (2.0, 0.5)


def test_a_switch_is_turned_off_on_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("use-kl-loss: true\nno-check-weight-update-equal: true\n")
    args = make_args(config=file, use_kl_loss=False)
    assert args.use_kl_loss is False
    assert args.check_weight_update_equal is False
    assert make_args().check_weight_update_equal is True
    assert make_args(use_fault_tolerance=False).use_fault_tolerance is False


def test_values_have_the_type_of_their_flag(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "train_env_vars: {A: b}\nrollout_stop_token_ids: [1, 2]\nrollout_stop: end\nclip_grad: 2\n"
    )
    args = make_args(config=file, apply_chat_template_kwargs={"enable_thinking": False})
    assert args.train_env_vars == {"A": "b"}
    assert args.rollout_stop_token_ids == [1, 2]
    assert args.rollout_stop == ["end"]
    assert args.clip_grad == 2.0 and isinstance(args.clip_grad, float)
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert make_args(sglang_context_length="2k").sglang_context_length == 2000
    assert make_args(sglang_context_length="2Ki").sglang_context_length == 2048


def test_arguments_are_read_only():
    args = make_args()
    with pytest.raises(AttributeError, match="replace"):
        args.lr = 1.0
    with pytest.raises(AttributeError):
        del args.lr
    changed = args.replace(lr=0.5)
    assert (args.lr, changed.lr, changed.origin("lr")) == (1e-6, 0.5, "derived")
    assert changed != args and changed.replace(lr=1e-6) != args  # its origin is another
    with pytest.raises(AttributeError, match="rollout_batch_size"):
        args.replace(rolout_batch_size=4)


def test_an_attribute_that_no_flag_sets_is_an_error():
    args = make_args()
    assert args.sglang_dtype is None and args.num_layers is None and args.router_policy is None
    with pytest.raises(AttributeError, match="did you mean rollout_batch_size"):
        _ = args.rollout_batchsize
    with pytest.raises(AttributeError):
        args.origin("nothing_like_it")


def test_arguments_can_be_pickled():
    args = make_args(eval_prompt_data=["a", __file__], eval_interval=1, wandb_key="sesame")
    copy = pickle.loads(pickle.dumps(args))
    assert copy == args
    assert copy.wandb_key == "sesame" and copy.origin("wandb_key") == "command line"
    with pytest.raises(AttributeError):
        copy.lr = 1.0


def test_secrets_are_shown_nowhere(capsys, tmp_path):
    args = make_args(
        use_wandb=True,
        wandb_key="sesame",
        rm_url="http://me:sesame@host/score",
        train_env_vars={"HF_TOKEN": "sesame", "NCCL_DEBUG": "INFO"},
        dry_run=True,
    )
    print_resolved(args)
    shown = [capsys.readouterr().out, repr(args), str(args), repr(args.to_dict())]
    for text in shown:
        assert "sesame" not in text
        assert "***" in text and "NCCL_DEBUG" in text
    assert args.to_dict(redact=False)["wandb_key"] == args.wandb_key == "sesame"


@pytest.mark.parametrize("name", ["sglang_api_key", "sglang_admin_api_key", "router_api_key"])
def test_keys_of_servers_are_secrets(name):
    args = make_args().replace(**{name: "sesame"})
    assert "sesame" not in repr(args) and "sesame" not in repr(args.to_dict())


def test_unknown_flags_name_the_nearest():
    assert "--rollout-batch-size" in refusal("--rolout-batch-size", "4")
    assert "--sglang-mem-fraction-static" in refusal("--sglang-mem-fraction", "0.5")
    assert "--tensor-model-parallel-size" in refusal("--tensor-parallel-size=2")
    assert "did you mean" not in refusal("--qqqqqqqq")
    # SGLang itself would take the beginning of an option for it.
    assert "did you mean --sglang-tp-size?" in refusal("--sglang-tp", "2")


def test_flags_are_not_abbreviated():
    assert "--rollout-batch" in refusal("--rollout-batch", "4")


def test_a_value_without_a_flag_is_refused():
    assert "surplus" in refusal("--lr", "1e-6", "surplus")
    assert "--lr" in refusal("--lr")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lr", "fast"], ["--lr", "'fast'", "number"]),
        (["--lr", "nan"], ["--lr", "number"]),
        (["--num-rollout", "2.5"], ["--num-rollout", "whole number"]),
        (["--train-backend", "fsdq"], ["--train-backend", "fsdq", "did you mean fsdp?"]),
        (["--rollout-stop-token-ids", "1", "x"], ["--rollout-stop-token-ids", "'x'"]),
        (["--train-env-vars", "{"], ["--train-env-vars", "JSON"]),
        (["--train-env-vars", "[1]"], ["--train-env-vars", "JSON object"]),
        (["--sglang-context-length", "2.5Ki5"], ["--sglang-context-length", "whole number"]),
        (["--sglang-context-length", "9" * 400], ["--sglang-context-length", "whole number"]),
        (["--lr", "1e999"], ["--lr", "'1e999' is not a number: it is infinite"]),
        (["--clip-grad", "inf"], ["--clip-grad", "'inf' is not a number: it is infinite"]),
        (["--lr", "nan"], ["--lr", "'nan' is not a number"]),
        (["--phase-timeout-minutes", '{"train": NaN}'], ["--phase-timeout-minutes", "not JSON"]),
        (["--phase-timeout-minutes", '{"train": 1e999}'], ["--phase-timeout-minutes", "not JSON"]),
    ],
)
def test_values_of_the_wrong_kind(argv, words):
    message = refusal(*argv)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: fast", ["lr", "'fast'", "number"]),
        ("use_kl_loss: 3", ["use_kl_loss", "true or false"]),
        ("rolout_batch_size: 3", ["rolout_batch_size", "rollout-batch-size"]),
        ("lr: 1\nlr: 2", ["lr", "twice", "line 1"]),
        ("rope-fusion: true\nno-rope-fusion: true", ["rope-fusion"]),
        ("norm-epsilon: 1\nlayernorm_epsilon: 2", ["--norm-epsilon", "twice"]),
        ("- lr", ["name: value"]),
        ("a: [", ["YAML"]),
        ("config: other.yaml", ["command line"]),
        ("num_rollout: .inf", ["num_rollout", "inf is not a whole number"]),
        ("lr: 1" + "0" * 400, ["lr", "is not a number"]),
        ("lr: .inf", ["lr", "inf is not a number: it is infinite"]),
        ("phase_timeout_minutes: {train: .inf}", ["phase_timeout_minutes", "is not JSON"]),
        ("run_dir: caf\xe9", ["is not YAML: 'utf-8' codec can't decode byte 0xe9"]),
    ],
)
def test_mistakes_in_the_config_file_name_file_and_key(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="latin-1")
    message = refusal(config=file)
    assert str(file) in message
    assert all(word in message for word in words), message


def test_a_config_file_may_hold_a_whole_run(tmp_path):
    args = make_args(sglang_page_size=4, rollout_stop=["a"])
    given = [n for n in args.to_dict() if args.origin(n) == "command line"]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(f"{name}: {getattr(args, name)!r}" for name in given))
    again = parse_args(["--config", str(file)])
    assert {n: getattr(again, n) for n in given} == {n: getattr(args, n) for n in given}
    assert {again.origin(name) for name in given} == {"config"}


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_shows_every_group(option, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_args([option])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    places = [
        text.index(f"\n{group}:\n") for group in ("Mode", "Cluster", "Algorithm", "Optimizer")
    ]
    assert places == sorted(places)
    assert "--no-check-weight-update-equal" in text and "--no-colocate" not in text
    foreign = ("\nMegatron-core 0.16.1:\n", "\nSGLang 0.5.16", "\n  --sglang-page-size ")
    assert [part in text for part in foreign] == [option == "--help-all"] * 3


def test_parsing_needs_no_heavy_package():
    program = (
        "import sys\n"
        "from slime.config.arguments import parse_args\n"
        f"parse_args({make_argv()!r})\n"
        "heavy = {'torch', 'transformers', 'ray', 'sglang', 'megatron', 'numpy'}\n"
        "print(heavy & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_dry_run_prints_origins_placement_and_warnings(capsys, tmp_path):
    missing = tmp_path / "no" / "model"
    args = make_args(
        dry_run=True,
        hf_checkpoint=missing,
        lr=0.5,
        actor_num_nodes=2,
        actor_num_gpus_per_node=4,
        colocate=True,
        rollout_num_gpus=3,
    )
    print_resolved(args)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "lr command line 0.5" in lines
    assert "weight_decay default 0.01" in lines
    assert any(line.startswith("trainer 8") for line in lines)
    assert any(line.startswith("engines 8 of 1") for line in lines)
    assert any("--rollout-num-gpus 3 is not used" in line for line in lines)
    assert any(str(missing) in line and "does not exist" in line for line in lines)
