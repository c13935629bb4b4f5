"""Ids of the Hub: downloaded once by the real client from a Hub made here, then found in the cache."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slime.config.flags.draft import Draft
from slime.config.hub import _dataset, _is_dataset, _missing_shards
from slime.core.errors import ConfigError
from tests.args import make_argv

COMMIT = "a" * 40
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 64,
}
ROWS = b'{"input": "1+1=", "label": "2"}\n'
REPOSITORIES = {
    "models/Qwen/Qwen3-0.6B": {
        "config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"weights",
        "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"weights", "original/model.safetensors": b"weights",
    },
    "models/some/adapter": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "datasets/openai/gsm8k": {
        "main/train-00000-of-00002.jsonl": ROWS, "main/train-00001-of-00002.jsonl": ROWS,
        "main/test-00000-of-00001.jsonl": ROWS, "socratic/train-00000-of-00001.jsonl": ROWS,
        "gsm8k.py": b"raise SystemExit",
    },
    "datasets/some/unclear": {"a/train.jsonl": ROWS, "b/train.jsonl": ROWS},
    "datasets/some/csv": {"train.csv": b"a,b"},
    "datasets/some/single": {"rows.jsonl": ROWS},
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """The three routes of the Hub that a download uses."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        body = self._listing(path) if path.startswith("api/") else self._file(path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", f'"{hashlib.sha1(body or b"").hexdigest()}"')
        asked = re.search(r"(?:resolve|revision|tree)/([0-9a-f]{40})", path)
        self.send_header("X-Repo-Commit", asked[1] if asked else COMMIT)
        self.end_headers()
        if body is not None and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _listing(self, path: str) -> bytes | None:
        name, _, rest = path.removeprefix("api/").partition("/revision/")
        name, _, tree = name.partition("/tree/") if not rest else (name, "", "")
        files = REPOSITORIES.get(name)
        if files is None:
            return None
        rows = [
            {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
            for n, b in files.items()
        ]
        siblings = [{"rfilename": n} for n in files]
        return json.dumps(
            rows if tree else {"id": name, "sha": COMMIT, "siblings": siblings}
        ).encode()

    def _file(self, path: str) -> bytes | None:
        name, _, rest = path.partition("/resolve/")
        name = name if name.startswith("datasets/") else f"models/{name}"
        return REPOSITORIES.get(name, {}).get(rest.partition("/")[2])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


PROGRAM = """
import json, sys
from slime.config.arguments import parse_args
from slime.core.errors import ConfigError
for words in json.loads(sys.argv[1]):
    try:
        args = parse_args(words)
        datasets = [dataset.path for dataset in args.eval_datasets]
        print(json.dumps([args.hf_checkpoint, args.prompt_data, datasets, args.run_dir]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def resolve(home: Path, hub: str | None, *given: dict) -> list:
    """What each of these options resolves to in a new process, or its refusal."""
    lines = [line for line in printed(home, hub, *given) if not line.startswith("--")]
    return [json.loads(line) for line in lines]


def printed(home: Path, hub: str | None, *given: dict) -> list[str]:
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    env |= {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"} if hub else {"HF_HUB_OFFLINE": "1"}
    words = [make_argv(**options) for options in given]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(words)],
        env=env,
        capture_output=True,
        text=True,
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


GOOD = [
    {"hf_checkpoint": "Qwen/Qwen3-0.6B", "run_dir": None},
    {"prompt_data": ["openai/gsm8k"], "eval_prompt_data": ["gsm", "openai/gsm8k"]},
    {"prompt_data": ["hf://datasets/openai/gsm8k/socratic/train-00000-of-00001.jsonl@[0:1]"]},
    {"prompt_data": ["some/single@[0:1]:weight=2"]},
]


def test_ids_are_downloaded_once_and_then_in_the_cache(home, hub):
    found = resolve(home, hub, *GOOD)
    assert resolve(home, None, *GOOD)[1:] == found[1:]  # the first has a time in its run folder
    cache = home / "hub"
    model = cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    assert found[0][0] == str(model) and "/runs/Qwen3-0.6B-" in found[0][3]
    assert sorted(file.name for file in model.iterdir()) == ["config.json", "model.safetensors"]
    gsm8k = cache / "datasets--openai--gsm8k" / "snapshots" / COMMIT
    assert found[1][1] == [str(gsm8k / "main" / f"train-0000{i}-of-00002.jsonl") for i in (0, 1)]
    assert found[1][2] == [str(gsm8k / "main" / "test-00000-of-00001.jsonl")]
    assert found[2][1] == [f"{gsm8k}/socratic/train-00000-of-00001.jsonl@[0:1]"]
    single = cache / "datasets--some--single" / "snapshots" / COMMIT / "rows.jsonl"
    assert found[3][1] == [f"{single}@[0:1]:weight=2"]
    assert not list(cache.rglob("*.py")) and not list(cache.rglob("*.bin"))
    assert all(Path(path).read_bytes() == ROWS for path in found[1][1])


TRAIN = [f"main/train-0000{i}-of-00002.jsonl" for i in (0, 1)]
TEST = "main/test-00000-of-00001.jsonl"


def cache_only(home: Path, *files: str) -> Path:
    """Put these files of openai/gsm8k into the cache, as hf_hub_download does, and return their folder."""
    repository = home / "hub" / "datasets--openai--gsm8k"
    for file in files:
        path = repository / "snapshots" / COMMIT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ROWS)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def test_what_is_downloaded_is_reported_and_what_is_cached_is_not_downloaded(tmp_path, hub):
    cache_only(tmp_path, TEST, TRAIN[0])
    [line, *_] = printed(tmp_path, hub, {"prompt_data": ["openai/gsm8k"]})
    lacking = f"{TRAIN[1]}, socratic/train-00000-of-00001.jsonl"
    assert line == f"--prompt-data: downloading {lacking} of openai/gsm8k from the Hugging Face Hub"
    assert not printed(tmp_path, hub, {"prompt_data": ["openai/gsm8k"]})[0].startswith("--")


@pytest.mark.parametrize("cached", [[TEST], TRAIN[:1], TRAIN[1:]])
def test_a_partly_cached_dataset_is_completed(tmp_path, hub, cached):
    folder = cache_only(tmp_path, *cached)
    [found] = resolve(tmp_path, hub, {"prompt_data": ["openai/gsm8k"]})
    assert found[1] == [str(folder / file) for file in TRAIN]


def test_a_cached_dataset_keeps_its_revision(tmp_path, hub, monkeypatch):
    folder = cache_only(tmp_path, TRAIN[0])
    monkeypatch.setattr(sys.modules[__name__], "COMMIT", "b" * 40)  # the Hub has a newer one
    [found] = resolve(tmp_path, hub, {"prompt_data": ["openai/gsm8k"]})
    assert found[1] == [str(folder / file) for file in TRAIN]


PARTLY_CACHED = [
    ([TEST], f"there is no train file, only {TEST}"),
    ([TEST], f"give --prompt-data hf://datasets/openai/gsm8k/{TEST}"),
    ([TEST, TRAIN[0]], "the cache lacks 1 of the files of main (train-00001-of-00002): run `hf download"),
    ([TRAIN[1]], "the cache lacks 1 of the files of main (train-00000-of-00002"),
]  # fmt: skip


@pytest.mark.parametrize("reachable", ["http://127.0.0.1:9", None])
@pytest.mark.parametrize(("cached", "expected"), PARTLY_CACHED)
def test_a_partly_cached_dataset_is_refused_offline(tmp_path, cached, expected, reachable):
    cache_only(tmp_path, *cached)
    [message] = resolve(tmp_path, reachable, {"prompt_data": ["openai/gsm8k"]})
    assert isinstance(message, str) and expected in message
    assert "run `hf download openai/gsm8k --repo-type dataset`" in message


def test_an_interrupted_download_is_named_offline(tmp_path, hub):
    resolve(tmp_path, hub, {"prompt_data": [f"hf://datasets/openai/gsm8k/{TEST}"]})
    [message] = resolve(tmp_path, None, {"prompt_data": ["openai/gsm8k"]})
    assert "is incomplete here (3 file(s) are missing (main/train-00000-of-00002.jsonl" in message


def test_the_test_file_is_used_where_it_is_named(tmp_path):
    folder = cache_only(tmp_path, TEST)
    named = {"prompt_data": [f"hf://datasets/openai/gsm8k/{TEST}"]}
    evaluated = {"eval_prompt_data": ["gsm", "openai/gsm8k"]}
    assert resolve(tmp_path, None, named)[0][1] == [str(folder / TEST)]
    assert resolve(tmp_path, None, evaluated)[0][2] == [str(folder / TEST)]


def test_a_plan_only_warns_of_missing_files(tmp_path, monkeypatch):
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = cache_only(tmp_path, TRAIN[0])
    draft = Draft({}, {}, gpus=0, offline=True)
    assert _dataset("openai/gsm8k", "--prompt-data", draft) == [str(folder / TRAIN[0])]
    assert "the cache lacks 1 of the files of main" in draft.warnings[0]


def test_shards_may_be_numbered_from_one(tmp_path):
    names = [f"train-0000{i}-of-00003-1a2b.parquet" for i in (1, 3)] + ["train.parquet"]
    assert _missing_shards([tmp_path / name for name in names]) == ["train-00002-of-00003"]


BAD = [
    ({"hf_checkpoint": "some/adapter"}, "no config.json with *.safetensors"),
    ({"hf_checkpoint": "some/missing"}, "run `hf download some/missing`"),
    ({"prompt_data": ["some/missing"]}, "run `hf download some/missing --repo-type dataset`"),
    ({"prompt_data": ["some/unclear"]}, "name one, such as hf://datasets/some/unclear/a/train.jsonl"),
    ({"prompt_data": ["some/csv"]}, "no parquet or jsonl file"),
    ({"prompt_data": ["openai/gsm8k@[0:1]"]}, "it has 2 files: name one, such as hf://datasets/openai/"),
    ({"prompt_data": ["hf://datasets/openai/gsm8k/main/none.jsonl"]}, "is not a parquet or jsonl file"),
]  # fmt: skip


def test_what_is_wrong_is_one_sentence(home, hub):
    for (_, expected), message in zip(
        BAD, resolve(home, hub, *(options for options, _ in BAD)), strict=True
    ):
        assert isinstance(message, str) and expected in message and "\n" not in message


def test_without_a_network_the_command_to_type_is_named(tmp_path):
    given = [{"hf_checkpoint": "Qwen/Qwen3-0.6B"}, {"prompt_data": ["openai/gsm8k"]}]
    for hub, reason in ((None, "HF_HUB_OFFLINE is set"), ("http://127.0.0.1:9", "refused")):
        model, data = resolve(tmp_path, hub, *given)
        assert reason in model and "run `hf download Qwen/Qwen3-0.6B`" in model
        assert "run `hf download openai/gsm8k --repo-type dataset`" in data


@pytest.mark.parametrize("path", ["data/train.jsonl", "data/train.parquet@[0:9]", "a", "/a/b", "a/b/c", "../a"])  # fmt: skip
def test_paths_are_no_ids(path):
    assert not _is_dataset(path)


def test_an_existing_path_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _is_dataset("openai/gsm8k") and _is_dataset("openai/gsm8k@[0:5]")
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert not _is_dataset("openai/gsm8k")


@pytest.mark.parametrize(
    "value",
    ["hf://datasets/", "hf://datasets/a", "hf://datasets/../../x.jsonl", "hf://datasets/a/b/../../x.jsonl"],
)  # fmt: skip
def test_an_address_does_not_leave_its_dataset(value):
    with pytest.raises(ConfigError, match="is not of the form hf://datasets/OWNER/NAME/FILE"):
        _dataset(value, "--prompt-data", Draft({}, {}, gpus=0, offline=True))
