"""Settings of hooks: attributes of args that are no flags, --custom-config-path, own options."""

import copy
import pickle
import subprocess
import sys

import pytest
import yaml

from slime.config.arguments import parse_args, print_resolved
from slime.core.errors import ConfigError
from slime.runlog.run_folder import write_config
from tests.args import make_args, make_argv


def test_a_hook_may_set_names_that_are_no_flags():
    args = make_args()
    args.my_counter = 1
    args.my_counter += 1
    args.loss_fn = print
    assert args.my_counter == getattr(args, "my_counter", 0) == 2
    assert args.replace(lr=1.0).my_counter == 2  # a copy, as evaluation datasets get
    assert copy.deepcopy(args).my_counter == pickle.loads(pickle.dumps(args)).my_counter == 2
    del args.my_counter
    assert getattr(args, "my_counter", None) is None
    with pytest.raises(AttributeError):
        del args.my_counter


@pytest.mark.parametrize(
    "name", ["lr", "sglang_dtype", "precision", "eval_datasets", "replace", "origin"]
)
def test_flags_and_results_stay_read_only(name):
    args = make_args()
    with pytest.raises(AttributeError, match=rf"args\.{name}: flags are read-only"):
        setattr(args, name, 1)
    with pytest.raises(AttributeError):
        delattr(args, name)


def test_the_hints_lead_somewhere():
    args = make_args()
    with pytest.raises(AttributeError, match=r"args\.replace\(lr=\.\.\.\) returns a changed copy"):
        args.lr = 1.0
    assert args.replace(lr=1.0).lr == 1.0
    with pytest.raises(AttributeError, match=r"args\.x is no flag: set it with args\.x = "):
        args.replace(x=1)
    args.x = 1
    assert args.replace(x=2).x == 2


def custom(tmp_path, text):
    file = tmp_path / "custom.yaml"
    file.write_text(text)
    return str(file)


def test_keys_of_the_custom_config_become_attributes(tmp_path, capsys):
    file = custom(tmp_path, "use_rs: true\nrs_bounds: [0.5, 2.0]\nmy_api_key: sesame\n")
    args = make_args(custom_config_path=file, run_dir=str(tmp_path))
    assert (args.use_rs, args.rs_bounds, args.my_api_key) == (True, [0.5, 2.0], "sesame")
    assert args.origin("use_rs") == "custom"
    assert pickle.loads(pickle.dumps(args)).rs_bounds == [0.5, 2.0]
    print_resolved(args)
    shown = capsys.readouterr().out + repr(args)
    assert "rs_bounds" in shown and "sesame" not in shown
    write_config(args, tmp_path)
    written = (tmp_path / "config.yaml").read_text()
    assert "sesame" not in written
    # The file can be given again: it names the custom config, whose keys are not flags.
    assert yaml.safe_load(written)["custom_config_path"] == file
    assert "use_rs" not in yaml.safe_load(written)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1.0e-3", r"custom\.yaml: lr is the flag --lr: give it on the command line"),
        ("num_experts: 8", "num_experts is the flag --num-experts"),
        ("no_dry_run: true", "no_dry_run is the flag --dry-run"),
        ("my key: 1", "'my key' cannot be an attribute"),
        ("_origins: 1", "cannot be an attribute"),
        ("replace: 1", r"args\.replace is already taken"),
        ("precision: 1", r"args\.precision is already taken"),
        ("[1, 2]", "must hold 'name: value' lines"),
        ("a: 1\na: 2", "given twice"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("a: 2026-13-01", r"is not YAML: month must be in"),
        ("a: " + "[" * 5000, "is not YAML: maximum recursion depth"),
    ],
)
def test_a_custom_config_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        make_args(custom_config_path=custom(tmp_path, text))


def test_a_custom_config_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"--custom-config-path: .*nowhere\.yaml does not exist"):
        make_args(custom_config_path=str(tmp_path / "nowhere.yaml"))


def add_arguments(parser):
    parser.add_argument("--my-flag", type=int, default=3)
    group = parser.add_argument_group("mine")
    group.add_argument("--names", nargs="+")
    return parser


def test_a_script_may_add_options():
    argv = [*make_argv(lr=0.5), "--my-flag", "7", "--names", "a", "b"]
    args = parse_args(argv, add_custom_arguments=add_arguments)
    assert (args.my_flag, args.names, args.lr) == (7, ["a", "b"], 0.5)
    assert parse_args(make_argv(), add_custom_arguments=add_arguments).my_flag == 3
    assert pickle.loads(pickle.dumps(args)).names == ["a", "b"]


def test_a_run_is_repeated_with_the_options_of_its_script(tmp_path):
    """They are in config.yaml, which the same script reads again; the command line has the last word."""
    argv = [*make_argv(run_dir=tmp_path), "--my-flag", "7", "--names", "a", "b"]
    write_config(parse_args(argv, add_custom_arguments=add_arguments), tmp_path)
    again = ["--config", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "again")]
    args = parse_args(again, add_custom_arguments=add_arguments)
    assert (args.my_flag, args.names) == (7, ["a", "b"])
    assert parse_args([*again, "--my-flag", "8"], add_custom_arguments=add_arguments).my_flag == 8
    with pytest.raises(ConfigError, match="there is no flag my_flag"):
        parse_args(again)


def test_the_function_may_return_nothing():
    def add(parser):
        parser.add_argument("--mine", action="store_true")

    assert parse_args([*make_argv(), "--mine"], add_custom_arguments=add).mine is True


@pytest.mark.parametrize("option", ["--lr", "--num-experts", "--no-dry-run"])
def test_options_that_are_flags_already(option):
    def add(parser):
        parser.add_argument(option)

    with pytest.raises(ConfigError, match=f"{option} is already the flag "):
        parse_args(make_argv(), add_custom_arguments=add)


def test_wrong_values_and_unknown_options_beside_own_ones(tmp_path):
    with pytest.raises(ConfigError, match="--my-flag"):
        parse_args([*make_argv(), "--my-flag", "x"], add_custom_arguments=add_arguments)
    with pytest.raises(ConfigError, match="there is no flag --my-flags"):
        parse_args([*make_argv(), "--my-flags", "1"], add_custom_arguments=add_arguments)
    file = custom(tmp_path, "my_flag: 1")
    with pytest.raises(ConfigError, match=r"args\.my_flag is already taken"):
        argv = make_argv(custom_config_path=file)
        parse_args(argv, add_custom_arguments=add_arguments)


@pytest.mark.parametrize(
    ("url", "ip", "port"),
    [("http://10.0.0.3:3000", "10.0.0.3", 3000), ("http://[::1]:81", "[::1]", 81)],
)
def test_the_address_that_hooks_post_to(url, ip, port):
    args = make_args()
    assert args.sglang_router_ip is None
    args.set_router(url)
    assert (args.sglang_router_ip, args.sglang_router_port) == (ip, port)
    assert f"http://{args.sglang_router_ip}:{args.sglang_router_port}" == url
    assert args.replace(lr=1.0).sglang_router_port == port


def test_an_address_without_a_port_has_that_of_its_scheme():
    args = make_args()
    args.set_router("https://engine.example.com")
    assert (args.sglang_router_ip, args.sglang_router_port) == ("engine.example.com", 443)
    args.set_model_routers({"judge": "http://judge.example.com"})
    assert args.sglang_model_routers == {"judge": ("judge.example.com", 80)}


def test_a_plain_run_does_not_import_the_bridge():
    program = """
import sys
import slime.ray.run, slime.ray.rollout, slime.rollout.fully_async_rollout, slime.rollout.sft_rollout
import slime.rollout.on_policy_distillation, slime.backends.fsdp_utils.actor, slime.ray.processes
import slime.rollout.filter_hub.dynamic_sampling_filters, slime.cli, slime.engine.server.__main__
from slime.backends.losses import TrainHooks
from slime.rollout.hooks import check_hooks
from tests.args import make_args
args = make_args()
check_hooks(args)
TrainHooks(args)
sys.exit(any(name.startswith("slime.compat") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
