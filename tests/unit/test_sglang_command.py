"""The command line of SGLang servers, for the versions slime knows, without SGLang."""

import json

import pytest

from slime.backends.sglang_utils.command import (
    Node,
    installed_options,
    nodes_of_engine,
    server_command,
)
from slime.config.flags.engine_options import OWNED, known_version, sglang_argv
from slime.config.flags.registry import all_flags
from slime.config.installed import SGLangInstall
from slime.core.errors import ConfigError, UserError
from slime.utils.addresses import Ports, find_ports, says_port_taken
from slime.weights.fp8 import Fp8Format, declaration
from tests.args import make_args
from tests.tiny import make_tiny_checkpoint
from tests.tiny_vision import make_vision_checkpoint

OLD, NEW = "0.5.16", "0.5.23"

# The FP8 configuration of the 355B example: 32 GPUs per engine on nodes of 8.
SEED = {
    "rollout_engine": "sglang",
    "rollout_num_gpus": 64,
    "rollout_num_gpus_per_engine": 32,
    "num_gpus_per_node": 8,
    "sglang_mem_fraction_static": 0.7,
    "sglang_enable_dp_attention": True,
    "sglang_dp_size": 32,
    "sglang_ep_size": 32,
    "sglang_moe_dense_tp_size": 1,
    "sglang_enable_dp_lm_head": True,
    "sglang_cuda_graph_bs": [1, 2, 4, 8, *range(16, 129, 8)],
    "sglang_moe_a2a_backend": "deepep",
    "sglang_deepep_mode": "auto",
    "sglang_speculative_algorithm": "EAGLE",
}


@pytest.fixture(autouse=True)
def sglang_somewhere(monkeypatch, tmp_path):
    """An interpreter that says it has SGLang: the checks ask one for its version and nothing else."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {NEW}\n")
    python.chmod(0o755)
    monkeypatch.setenv("SLIME_SGLANG_PYTHON", str(python))


def options(argv: list[str]) -> dict[str, list[str]]:
    """{"--tp-size": ["32"], ...}; an option given twice is a mistake."""
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            found[word] = []
        elif found:
            found[list(found)[-1]].append(word)
    return found


def command(args, version, *, rank=0, on_gpu=True):
    nodes = nodes_of_engine(args.rollout_num_gpus_per_engine, args.num_gpus_per_node)
    argv = server_command(
        args,
        index=1,
        node=Node(host=f"10.0.0.{rank}", rank=rank, count=len(nodes)),
        ports=Ports(server=21000, rendezvous=22000),
        rendezvous_host="10.0.0.0",
        install=SGLangInstall(python="/env/bin/python", version=version),
        on_gpu=on_gpu,
        label="start-1",
    )
    assert argv[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    return options(argv[3:])


@pytest.mark.parametrize("version", [OLD, NEW])
def test_an_engine_of_32_gpus_is_four_processes_that_differ_in_rank_only(version):
    args = make_args(**SEED)
    ranks = [command(args, version, rank=rank) for rank in range(4)]
    for rank, found in enumerate(ranks):
        assert found.pop("--node-rank") == [str(rank)]
        assert found.pop("--host") == [f"10.0.0.{rank}"]
        assert found.pop("--port") == [str(21000 + rank)]
        assert found == ranks[0]
    first = ranks[0]
    assert first["--tp-size"] == ["32"]
    assert first["--nnodes"] == ["4"]
    assert first["--dist-init-addr"] == ["10.0.0.0:22000"]
    assert first["--mem-fraction-static"] == ["0.7"]
    assert first["--ep-size"] == ["32"]
    assert first["--moe-dense-tp-size"] == ["1"]
    assert first["--enable-dp-lm-head"] == []
    assert first["--moe-a2a-backend"] == ["deepep"]
    assert first["--deepep-mode"] == ["auto"]
    assert first["--speculative-algorithm"] == ["EAGLE"]
    assert first["--speculative-num-draft-tokens"] == ["4"]
    assert first["--random-seed"] == [str(args.rollout_seed + 1)]


def test_the_seeds_spellings_in_the_words_of_each_version():
    sizes = [str(n) for n in (1, 2, 4, 8, *range(16, 129, 8))]
    old, new = (command(make_args(**SEED), version) for version in (OLD, NEW))
    assert old["--cuda-graph-bs"] == sizes and "--cuda-graph-bs-decode" not in old
    assert new["--cuda-graph-bs-decode"] == sizes and "--cuda-graph-bs" not in new
    assert old["--enable-dp-attention"] == [] and old["--dp-size"] == ["32"]
    assert new["--attn-dp-size"] == ["32"]
    assert "--enable-dp-attention" not in new and "--dp-size" not in new


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_run_with_lora_starts_servers_with_slots_for_its_adapter(version, tmp_path):
    model = str(make_tiny_checkpoint(tmp_path / "model"))
    run = {"rollout_engine": "sglang", "hf_checkpoint": model, "lora_rank": 12}
    found = command(make_args(**run), version)
    assert found["--enable-lora"] == [] and found["--max-lora-rank"] == ["12"]
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert found["--lora-target-modules"] == every
    assert "--lora-strict-loading" in found and "--lora-backend" not in found
    few = make_args(**run, lora_target_modules=["q_proj", "self_attn.v_proj"])
    found = command(few, version, on_gpu=False)
    assert found["--lora-target-modules"] == ["q_proj", "v_proj"]
    assert found["--lora-backend"] == ["torch_native"]  # the others are kernels for GPUs
    merged = command(make_args(**run, lora_merge_for_rollout=True), version)
    assert not any("lora" in option for option in merged)


@pytest.mark.parametrize("version", [OLD, NEW])
def test_servers_of_a_run_with_images_read_them_as_the_trainer_does(version, tmp_path):
    model = str(make_vision_checkpoint(tmp_path / "model"))
    run = {"rollout_engine": "sglang", "hf_checkpoint": model}
    needed = {"--disable-fast-image-processor", "--enable-precise-embedding-interpolation"}
    assert not needed & command(make_args(**run), version).keys()
    with_images = make_args(**run, multimodal_keys={"image": "images"})
    assert needed <= command(with_images, version).keys()


@pytest.mark.parametrize("version", [OLD, NEW])
def test_every_option_that_is_written_exists_in_that_version(version):
    """Each flag of the table with some value, one by one; what a version lacks is refused by name."""
    exists = {
        "--" + option.removeprefix("--sglang-")
        for flag in all_flags().values()
        if flag.family == "sglang" and version in flag.versions
        for option in flag.options
    }
    some = {"bool": True, "int": 3, "float": 0.5, "str": "x", "json": {"a": 1}, "size": 7}
    refused = []
    for name, flag in all_flags().items():
        if flag.family != "sglang":
            continue
        value = [some[flag.kind]] if flag.many else some[flag.kind]
        try:
            argv = sglang_argv({name.removeprefix("sglang_"): value}, version)
        except ConfigError as error:
            assert flag.option in str(error) and version in str(error)
            assert version not in flag.versions
            refused.append(name)
            continue
        assert {word for word in argv if word.startswith("--")} <= exists, name
    assert len(refused) > 5


def test_values_are_written_as_sglang_parses_them():
    argv = sglang_argv(
        {
            "preferred_sampling_params": {"top_k": 5},
            "enable_lora": False,
            "dllm_fdfo": False,
            "context_length": 4096,
        },
        NEW,
    )
    assert argv == [
        *("--preferred-sampling-params", '{"top_k": 5}'),
        "--no-dllm-fdfo",  # on unless it is turned off
        *("--context-length", "4096"),
    ]


def test_one_gpu_needs_no_nodes_and_a_cpu_the_paths_that_run_there():
    args = make_args(rollout_engine="sglang", sglang_attention_backend="triton")
    on_gpu, on_cpu = (command(args, NEW, on_gpu=gpu) for gpu in (True, False))
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & on_gpu.keys()
    assert "--device" not in on_gpu
    assert on_cpu["--device"] == ["cpu"] and on_cpu["--sampling-backend"] == ["pytorch"]
    assert on_cpu["--attention-backend"] == ["triton"]  # what the user says goes
    assert on_gpu["--dtype"] == ["float32"] and on_gpu["--weight-version"] == ["start-1"]
    assert "--enable-memory-saver" not in on_gpu
    colocated = make_args(rollout_engine="sglang", colocate=True)
    assert command(colocated, NEW)["--enable-memory-saver"] == []


def test_pipeline_stages_share_the_gpus_of_an_engine():
    args = make_args(
        rollout_engine="sglang",
        rollout_num_gpus=8,
        rollout_num_gpus_per_engine=8,
        sglang_pp_size=2,
    )
    found = command(args, NEW)
    assert found["--tp-size"] == ["4"] and found["--pp-size"] == ["2"]


@pytest.mark.parametrize(
    ("gpus", "per_node", "expected"),
    [
        (1, 8, [[0]]),
        (4, 8, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (3, 1, [[0], [1], [2]]),
    ],
)
def test_nodes_of_an_engine(gpus, per_node, expected):
    assert nodes_of_engine(gpus, per_node) == expected


def refusal(**overrides) -> str:
    with pytest.raises(ConfigError) as error:
        make_args(rollout_engine="sglang", **overrides)
    return str(error.value)


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_slime_sets_is_refused_with_what_to_use(name):
    flag = all_flags()[f"sglang_{name}"]
    value = {"bool": True, "int": 3, "str": "x"}[flag.kind]
    message = refusal(**{f"sglang_{name}": value})
    assert message == f"{flag.option} is set by slime: {OWNED[name]}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rollout_num_gpus_per_engine": 12, "rollout_num_gpus": 12}, ["12", "whole nodes", "8"]),
        ({"sglang_dp_size": 2, "rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 2},
         ["--sglang-dp-size 2", "--sglang-enable-dp-attention"]),
        ({"sglang_ep_size": 3, "rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 2},
         ["--sglang-ep-size 3", "2 GPUs"]),
        ({"sglang_torchao_config": "int8wo"}, ["--sglang-torchao-config", NEW, OLD]),
        ({"router_port": 1}, ["--router-port", "--sglang-router-port"]),
    ],
)  # fmt: skip
def test_refused(overrides, words):
    message = refusal(**overrides)
    assert all(word in message for word in words), message


def test_without_sglang_the_run_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("SLIME_SGLANG_PYTHON", "/no/such/python")
    assert "/no/such/python" in refusal()
    monkeypatch.delenv("SLIME_SGLANG_PYTHON")
    assert "SLIME_SGLANG_PYTHON" in refusal()
    assert any("needs the package sglang" in w for w in
               make_args(rollout_engine="sglang", dry_run=True).warnings)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "refused"),
    [("block", False), ("channel", True), ("tensor", True)],
)
def test_fp8_that_sglang_cannot_update_is_refused(tmp_path, layout, refused):
    quantized = declaration(Fp8Format(strategy=layout), [])
    config = {"model_type": "qwen3", "quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = {"rollout_engine": "sglang", "hf_checkpoint": str(tmp_path)}
    if refused:
        with pytest.raises(ConfigError, match="--strategy block"):
            make_args(**values)
        make_args(**values, debug_rollout_only=True)
    else:
        make_args(**values)


def test_stale_draft_weights_are_reported():
    eagle = make_args(rollout_engine="sglang", sglang_speculative_algorithm="EAGLE")
    assert any("draft" in warning and "EAGLE" in warning for warning in eagle.warnings)
    ngram = make_args(rollout_engine="sglang", sglang_speculative_algorithm="NGRAM")
    assert not any("draft" in warning for warning in ngram.warnings)


@pytest.mark.parametrize(
    ("installed", "known"),
    [("0.5.2", OLD), (OLD, OLD), ("0.5.22.post1", OLD), (NEW, NEW), ("0.6.0rc1", NEW)],
)
def test_other_versions_are_spelled_as_the_nearest_older_one(installed, known):
    assert known_version(installed) == known


def test_ports_are_free_and_apart():
    ports = find_ports("127.0.0.1")
    assert abs(ports.server - ports.rendezvous) > 200


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use", True),
        ("ValueError: dist_init_port at 30000 is not available; it is already in use", True),
        ("The server is fired up and ready to roll!", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)  # fmt: skip
def test_a_taken_port_is_recognised(text, taken):
    assert says_port_taken(text) is taken


def external(**overrides) -> dict:
    return {
        "rollout_engine": None,
        "rollout_external": True,
        "rollout_external_engine_addrs": ["a:1", "b:2"],
        **overrides,
    }


def test_external_engines_are_sglang_and_fed_by_disk_unless_told_otherwise():
    args = make_args(**external())
    assert args.rollout_engine == "sglang" and args.update_weight_transport == "disk"
    assert not args.colocate and args.rollout_num_gpus == 2
    make_args(**external(update_weight_transport="distributed", sglang_dtype="float32"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (external(rollout_external_engine_addrs=None), ["--rollout-external-engine-addrs HOST"]),
        (external(rollout_external=False), ["--no-rollout-external", "remove one"]),
        (external(rollout_external_engine_addrs=["http://a:b"]), ["http://a:b", "HOST:PORT"]),
        (external(rollout_external_engine_addrs=["ftp://a:1"]), ["ftp://a:1", "HOST:PORT"]),
        (external(rollout_external_engine_addrs=["a b:1"]), ["a b:1", "HOST:PORT"]),
        (external(rollout_external_engine_addrs=["a:1", "http://a:1/"]), ["twice", "http://a:1/"]),
        (external(colocate=True), ["--colocate"]),
        (external(update_weight_transport="tensor"), ["tensor", "disk"]),
        (external(sglang_mem_fraction_static=0.7), ["--sglang-mem-fraction-static", "themselves"]),
        (external(router_policy="random"), ["--router-policy", "themselves"]),
    ],
)
def test_what_external_engines_do_not_go_with(overrides, words):
    with pytest.raises(ConfigError) as error:
        make_args(**overrides)
    assert all(word in str(error.value) for word in words), error.value


def test_an_interpreter_that_dies_without_a_word_is_named(tmp_path):
    python = tmp_path / "dies"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    install = SGLangInstall(python=str(python), version=NEW)
    with pytest.raises(UserError, match=f"{python}: it ended with status 3: no message"):
        installed_options(install, "sglang")
