"""Published command lines: those of models that are trained resolve, all others are answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config.arguments import Args, resolve
from slime.config.flags.draft import Draft
from slime.config.flags.parser import read_command_line
from slime.core.errors import ConfigError
from tests.compat.command_lines import LAUNCHERS, REFUSED, SCRIPTS, rows
from tests.parity.model_facts import MODELS
from tests.parity.test_model_scripts import model_args

ROWS = [*rows(SCRIPTS), *rows(LAUNCHERS)]
TRAINED = [row for row in ROWS if ":" not in row[1]]
COMMON = """
--prompt-data DATA --input-key input --label-key label --apply-chat-template --rollout-shuffle
--num-rollout 3 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024
--rollout-temperature 1 --global-batch-size 256 --balance-data --rm-type math --use-dynamic-batch-size
--max-tokens-per-gpu 4096 --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --colocate
--attention-softmax-in-fp32 --attention-backend flash --rollout-engine sglang --actor-num-gpus-per-node 8
"""
FILES = {
    "EVAL": "eval:\n  datasets:\n    - {name: a, path: DATA, n_samples_per_eval_prompt: 4}\n",
    "ROLES": "critic: {lr: 1.0e-5}\n",
    "HOOKS": "tis_mode_of_mine: mask\n",
    "ENGINES": "sglang:\n  - name: actor\n    server_groups:\n"
    "      - {worker_type: regular, num_gpus: 8, num_gpus_per_engine: 1}\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("lines")
    (base / "DATA").write_text('{"input": "1+1=", "label": "2"}\n')
    for name, text in FILES.items():
        (base / name).write_text(text.replace("DATA", str(base / "DATA")))
    for model in {row[1] for row in ROWS}:
        kind, _, name = model.rpartition(":")
        config = {"model_type": name, "num_hidden_layers": 2} if kind == "type" else facts(name)
        if kind == "int4":
            config["quantization_config"] = {"quant_method": "compressed-tensors"}
        (base / model).mkdir()
        (base / model / "config.json").write_text(json.dumps(config))
    return base


def facts(name: str) -> dict:
    mtp = {"num_nextn_predict_layers": 1} if name.startswith("mimo") else {}
    kimi = {"model_type": "kimi_k2"} if name.startswith("kimi") else {}
    return {**MODELS[name]().to_dict(), **mtp, **kimi}


def resolved(folder: Path, model: str, words: list[str]) -> Args:
    files = {name: str(folder / name) for name in (*FILES, "DATA")} | {"MODEL": str(folder / model)}
    own = model_args(model) if ":" not in model else []
    colocated = [word for word in COMMON.split() if word != "--colocate"]
    external = "--rollout-external-engine-addrs" in words
    common = colocated if external or "--debug-rollout-only" in words else COMMON.split()
    argv = ["--hf-checkpoint", str(folder / model), *own, *common, *words]
    if "--debug-rollout-only" in words:
        argv += ["--rollout-num-gpus", "8"]
    given = read_command_line([files.get(word, word) for word in argv])
    origins = dict.fromkeys(given, "command line")
    return resolve(Draft(given, origins, gpus=8, offline=True))


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [row for row in TRAINED if row[0] not in REFUSED],
)
def test_a_line_of_a_model_that_is_trained_resolves(folder, name, model, words):
    assert resolved(folder, model, words).hf_checkpoint == str(folder / model)


@pytest.mark.parametrize(
    ("name", "model", "words"), [row for row in ROWS if row[0] in REFUSED or ":" in row[1]]
)
def test_any_other_line_is_answered_with_what_to_do(folder, name, model, words):
    with pytest.raises(ConfigError) as error:
        resolved(folder, model, words)
    text = str(error.value)
    assert REFUSED.get(name, "") in text and "did you mean" not in text


def test_the_counts_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    for title, block in (("run scripts", SCRIPTS), ("launchers", LAUNCHERS)):
        every = rows(block)
        parses = [name for name, model, _ in every if ":" not in model and name not in REFUSED]
        assert f"| {title} | {len(every)} | {len(parses)} |" in text
