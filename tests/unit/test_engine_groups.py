"""Engine groups of --sglang-config and --prefill-num-servers: reading, refusals, layout, options of each engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from slime.config.arguments import parse_args, placement_lines
from slime.config.engine_groups import default_model, engines_of, models_of
from slime.core.errors import ConfigError, UserError
from slime.ray.engine_actor import engine_command
from slime.ray.placement_group import Node, node_of_bundle, plan_layout
from slime.rollout.context import RolloutContext
from slime.rollout.engine_pool import EnginePool
from tests.args import make_args, make_argv

REGULAR = {"worker_type": "regular", "num_gpus": 1}


@pytest.fixture
def judge(tmp_path: Path) -> str:
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(folder)


def write(tmp_path: Path, *models: object, **more: object) -> str:
    path = tmp_path / "engines.yaml"
    path.write_text(yaml.safe_dump({"sglang": list(models), **more}))
    return str(path)


def policy(*groups: dict, **more: object) -> dict:
    return {"name": "policy", "server_groups": list(groups) or [REGULAR], **more}


def refusal(tmp_path: Path, *models: object, flags: dict | None = None, **more: object) -> str:
    path = write(tmp_path, *models, **more)
    with pytest.raises(ConfigError) as caught:
        make_args(sglang_config=path, **(flags or {}))
    return str(caught.value)


def test_a_file_without_flags_decides_the_gpus_and_the_models(tmp_path, judge):
    path = write(
        tmp_path,
        {"name": "judge", "model_path": judge, "server_groups": [REGULAR]},
        {"name": "free", "server_groups": [{"worker_type": "placeholder", "num_gpus": 2}]},
        policy({**REGULAR, "num_gpus": 2}, {**REGULAR, "overrides": {"max-running-requests": "8"}}),
    )
    args = make_args(sglang_config=path, actor_num_gpus_per_node=1)
    assert args.rollout_num_gpus == 1 + 2 + 2 + 1
    specs = engines_of(args)
    assert [(s.model, s.update_weights, list(s.gpus)) for s in specs] == [
        ("judge", False, [0]),
        ("policy", True, [3]),
        ("policy", True, [4]),
        ("policy", True, [5]),
    ]
    assert default_model(args).name == "policy"
    assert [s.args.sglang_max_running_requests for s in specs] == [None, None, None, 8]
    assert [s.args.hf_checkpoint for s in specs] == [judge, *[args.hf_checkpoint] * 3]
    layout = plan_layout(args)
    assert layout.trainer == [0] and layout.engines == [[1], [4], [5], [6]]
    assert layout.num_bundles == 7
    assert "judge (frozen): 1 regular of 1 CPU process each" in placement_lines(args)[1]


def test_without_a_file_there_is_one_model_and_its_engines_have_the_flags_of_the_run():
    args = make_args(rollout_num_gpus=2)
    assert [model.name for model in models_of(args)] == ["default"]
    assert [spec.args for spec in engines_of(args)] == [args, args]
    assert args.engine_models == []


def test_options_of_a_group_reach_the_command_of_its_engines_only(tmp_path):
    path = write(
        tmp_path,
        policy(REGULAR, {**REGULAR, "overrides": {"page_size": 32, "disable_radix_cache": True}}),
    )
    args = make_args(sglang_config=path, sglang_page_size=8)
    commands = [
        engine_command(spec.args, index=i, host="127.0.0.1", port_file=tmp_path / "port")
        for i, spec in enumerate(engines_of(args))
    ]
    pages = [command[command.index("--page-size") + 1] for command in commands]
    assert pages == ["8", "32"]
    assert ["--disable-radix-cache" in command for command in commands] == [False, True]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([], "sglang must be a list with at least one model"),
        ([{"server_groups": [REGULAR]}], "sglang[0]: name is missing"),
        ([{"name": "a"}], "sglang[0]: server_groups is missing"),
        ([policy(model="x")], "there is no key 'model'; did you mean model_path?"),
        ([policy({"num_gpus": 1})], "server_groups[0]: worker_type is missing"),
        ([policy({**REGULAR, "gpus": 1})], "there is no key 'gpus'"),
        ([policy({**REGULAR, "worker_type": "prefil"})], "did you mean prefill?"),
        ([policy({**REGULAR, "num_gpus": "many"})], "'many' is not a whole number"),
        ([policy({**REGULAR, "num_gpus": -1})], "must be at least 1"),
        ([policy({**REGULAR, "num_gpus": 3, "num_gpus_per_engine": 2})], "cannot be split"),
        ([policy(), policy()], "two models are named 'policy'"),
        ([policy(name="Qwen/Qwen3-4B")], "use letters, digits"),
        ([policy(update_weights=False)], "no engine would receive the trained weights"),
        (
            [policy({"worker_type": "placeholder", "num_gpus": 1})],
            "no engine would receive the trained weights",
        ),
        ([policy({**REGULAR, "overrides": {"max_runing_requests": 1}})], "max_running_requests"),
        ([policy({**REGULAR, "overrides": {"tp_size": 2}})], "use num_gpus_per_engine"),
        ([policy({**REGULAR, "overrides": {"model_path": "/x"}})], "another model_path"),
        ([policy({**REGULAR, "overrides": {"api_key": "x"}})], "is set by slime"),
        ([policy({**REGULAR, "overrides": {"dtype": "float16"}})], "use --sglang-dtype"),
        ([policy({**REGULAR, "overrides": {"disaggregation_mode": "decode"}})], "use worker_type"),
        ([policy({**REGULAR, "overrides": ["page_size"]})], "overrides"),
        (
            [policy({**REGULAR, "worker_type": "prefill"})],
            "either all regular, or prefill and decode",
        ),
        (
            [policy(REGULAR, {**REGULAR, "worker_type": "prefill"})],
            "either all regular, or prefill and decode",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_the_place_in_it(tmp_path, models, said):
    message = refusal(tmp_path, *models)
    assert said in message and "engines.yaml" in message


def test_a_key_beside_the_models_is_refused(tmp_path):
    assert "there is no key 'models'" in refusal(tmp_path, policy(), models=[])


def test_the_embedded_engine_refuses_by_group_what_it_does_not_do(tmp_path):
    message = refusal(tmp_path, policy({**REGULAR, "overrides": {"enable_eplb": True}}))
    assert "policy, regular" in message and "--sglang-enable-eplb is not supported" in message
    halves = [{**REGULAR, "worker_type": role} for role in ("prefill", "decode")]
    assert "the embedded engine has no disaggregation" in refusal(tmp_path, policy(*halves))
    two = {**REGULAR, "num_gpus": 2, "num_gpus_per_engine": 2}
    assert "no tensor parallelism" in refusal(tmp_path, policy(two))


def test_gpus_must_add_up_to_those_of_the_flags(tmp_path):
    message = refusal(tmp_path, policy(), flags={"rollout_num_gpus": 2})
    assert "1 GPUs in all and --rollout-num-gpus is 2" in message and "placeholder" in message
    colocated = {"colocate": True, "actor_num_gpus_per_node": 2}
    assert "the training GPUs are 2" in refusal(tmp_path, policy(), flags=colocated)


def test_weights_are_sent_only_to_the_model_that_is_trained(tmp_path, judge):
    message = refusal(tmp_path, policy(model_path=judge, update_weights=True))
    assert "needs the model that is trained" in message
    gone = {"name": "judge", "model_path": str(tmp_path / "no"), "server_groups": [REGULAR]}
    assert "judge" in (message := refusal(tmp_path, policy(), gone))
    assert "does not exist" in message


def test_frozen_engines_may_stand_beside_the_colocated_ones_and_keep_their_memory(tmp_path, judge):
    frozen = {"name": "judge", "model_path": judge, "server_groups": [REGULAR]}
    flags = {"colocate": True, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 2}
    args = make_args(sglang_config=write(tmp_path, policy(), frozen), **flags)
    assert [spec.args.offload_rollout for spec in engines_of(args)] == [True, False]
    layout = plan_layout(args)
    assert (layout.engines, layout.num_bundles) == ([[0], [1]], 2)
    message = refusal(tmp_path, frozen, policy(), flags=flags)
    assert "move frozen models behind them" in message


def test_engines_of_one_group_share_a_node_and_several_spread_over_nodes(tmp_path):
    path = write(tmp_path, policy({**REGULAR, "num_gpus": 3}))
    args = make_args(sglang_config=path, actor_num_nodes=2, actor_num_gpus_per_node=1)
    nodes = [Node(id=str(i), address=f"10.0.0.{i}") for i in range(4)]
    ids = [node.id for node in node_of_bundle(plan_layout(args), nodes)]
    assert ids == ["0", "1", "2", "3", "2"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sglang_router_ip": "10.0.0.1"}, "the embedded engine has no router"),
        ({"rollout_engine": "sglang", "sglang_router_ip": "10.0.0.1"}, "--sglang-router-port"),
        ({"rollout_engine": "sglang", "sglang_router_port": 70000}, "between 1 and 65535"),
        ({"rollout_engine": "sglang", "router_port": 3000}, "use --sglang-router-port"),
        (
            {"prefill_num_servers": 1, "rollout_external_engine_addrs": ["10.0.0.1:1"]},
            "for engines that slime starts",
        ),
        (
            {"prefill_num_servers": 1, "rollout_num_gpus": 2},
            "the embedded engine has no",
        ),
        ({"rollout_engine": "sglang", "prefill_num_servers": 2, "rollout_num_gpus": 2}, "decode"),
        ({"rollout_engine": "sglang", "sglang_disaggregation_mode": "decode"}, "--prefill-num-s"),
    ],
)
def test_flags_of_routers_and_prefill_are_refused_where_they_have_no_meaning(flags, said):
    with pytest.raises(ConfigError, match=said):
        make_args(**flags)


def test_one_external_router_does_not_serve_two_models(tmp_path, judge):
    frozen = {"name": "judge", "model_path": judge, "server_groups": [REGULAR]}
    flags = {"rollout_engine": "sglang", "sglang_router_ip": "::1", "sglang_router_port": 30000}
    assert "each model" in refusal(tmp_path, policy(), frozen, flags=flags)


def test_prefill_servers_come_first_and_the_rest_decodes():
    words = make_argv(
        rollout_engine="sglang", prefill_num_servers=1, rollout_num_gpus=6,
        rollout_num_gpus_per_engine=2,
    )  # fmt: skip
    args = parse_args(words, offline=True)
    specs = engines_of(args)
    assert [(s.worker_type, list(s.gpus)) for s in specs] == [
        ("prefill", [0, 1]),
        ("decode", [2, 3]),
        ("decode", [4, 5]),
    ]
    modes = [spec.args.sglang_disaggregation_mode for spec in specs]
    assert modes == ["prefill", "decode", "decode"]
    fake = [*words, "--sglang-disaggregation-transfer-backend", "fake"]
    with pytest.raises(ConfigError, match="transfers no KV cache"):
        parse_args(fake, offline=True)


def test_a_frozen_sglang_engine_that_sleeps_keeps_a_copy_of_its_weights(tmp_path, judge):
    """SGLang drops released weights, and nobody sends a frozen model new ones."""
    frozen = {"name": "judge", "model_path": judge, "server_groups": [REGULAR]}
    words = make_argv(
        sglang_config=write(tmp_path, policy(), frozen),
        rollout_engine="sglang",
        colocate=True,
        actor_num_gpus_per_node=2,
    )
    specs = engines_of(parse_args(words, offline=True))
    assert [spec.args.sglang_enable_weights_cpu_backup for spec in specs] == [None, True]


def test_addresses_of_a_model_take_turns_and_none_is_no_error_of_the_user():
    """A hook may ask while its only engine is replaced: its sample fails, the run goes on."""
    pool = EnginePool(["http://a", "http://b"])
    assert {pool.next_url() for _ in range(2)} == {"http://a", "http://b"}
    pool.set_urls(["http://a", "http://b"], "http://router")
    assert pool.next_url() == "http://router"
    pool.set_urls([])
    with pytest.raises(ConnectionError) as caught:
        pool.next_url()
    assert not isinstance(caught.value, UserError)
    context = RolloutContext(pool=pool, models={"policy": pool})
    assert context.model("policy") is pool
    with pytest.raises(UserError, match="no engine serves a model named 'judge'; models: policy"):
        context.model("judge")
