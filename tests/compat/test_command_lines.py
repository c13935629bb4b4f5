"""Published command lines: those of models that are trained resolve, all others are answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config.arguments import Args, resolve
from slime.config.flags.draft import Draft
from slime.config.flags.parser import read_command_line
from slime.core.errors import ConfigError
from tests.compat.command_lines import COMMON, FILES, LAUNCHERS, SCRIPTS, rows
from tests.parity.model_facts import MODELS
from tests.parity.test_model_scripts import model_args

ROWS = [*rows(SCRIPTS), *rows(LAUNCHERS)]
TRAINED = [row for row in ROWS if ":" not in row[1]]


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
    kimi = {"model_type": "kimi_k2"} if name.startswith("kimi") else {}
    return {**MODELS[name]().to_dict(), **kimi}


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
    TRAINED,
)
def test_a_line_of_a_model_that_is_trained_resolves(folder, name, model, words):
    assert resolved(folder, model, words).hf_checkpoint == str(folder / model)


@pytest.mark.parametrize(("name", "model", "words"), [row for row in ROWS if ":" in row[1]])
def test_any_other_line_is_answered_with_what_to_do(folder, name, model, words):
    with pytest.raises(ConfigError) as error:
        resolved(folder, model, words)
    assert "did you mean" not in str(error.value)


def test_the_counts_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    for title, block in (("run scripts", SCRIPTS), ("launchers", LAUNCHERS)):
        every = rows(block)
        parses = [name for name, model, _ in every if ":" not in model]
        assert f"| {title} | {len(every)} | {len(parses)} |" in text
