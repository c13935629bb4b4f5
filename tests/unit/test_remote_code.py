"""Python code in a model folder is never run, whatever is typed at a prompt."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from pathlib import Path
Path(__file__).parent.joinpath("pwned").touch()
Path({folder!r}).joinpath("pwned").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "evil"
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    make_byte_tokenizer().save_pretrained(model)
    (model / "evil.py").write_text(CODE.format(folder=str(model)))
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    path = model / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "tokenizer_class": "Tokens"}
    settings["auto_map"] = {"AutoTokenizer": [None, "evil.Tokens"]}
    path.write_text(json.dumps(settings))
    return model


def test_the_prompt_of_transformers_never_comes(folder: Path):
    program = (
        "import sys\n"
        "from slime.core.errors import UserError\n"
        "from slime.data.tokenizer import load_hf_config, load_tokenizer\n"
        "for load in (load_hf_config, load_tokenizer):\n"
        "    try:\n"
        "        print('loaded', load(sys.argv[1]))\n"
        "    except UserError as error:\n"
        "        print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        input="y\n" * 20,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert "which slime does not run" in done.stdout
    assert "[y/N]" not in done.stdout + done.stderr
    assert not (folder / "pwned").exists()


def test_every_call_says_so():
    """`from_pretrained` and `from_config` of the Auto classes, in everything a run or a tool executes."""
    missing = []
    for path in [*ROOT.glob("slime/**/*.py"), *ROOT.glob("tools/**/*.py"), ROOT / "train.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            if not (isinstance(owner, ast.Name) and owner.id.startswith("Auto")):
                continue
            names = [keyword.arg for keyword in node.keywords]
            given = "trust_remote_code" in names or None in names  # None: **options
            if node.func.attr in ("from_pretrained", "from_config") and not given:
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not missing
