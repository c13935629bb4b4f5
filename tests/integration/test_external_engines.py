"""Engines that somebody else runs: checked first, then trained with."""

from __future__ import annotations

import socketserver
import threading
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

import slime
from slime.core.errors import UserError
from slime.core.types import EngineInfo, Probe
from slime.data.tokenizer import load_tokenizer
from slime.serving.external import _TEXT, find_external, missing_image_options, version_warning
from slime.serving.servers import check_probe
from slime.utils.addresses import engine_url
from slime.utils.engine_keys import remember_key
from slime.utils.sync_http import HttpError
from tests.engines import engine_server
from tests.external import check_refusals, external, serve_replies
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def server(model):
    with engine_server(model) as server:
        yield server


def test_an_engine_is_found_by_its_address(model, server):
    [info] = find_external(external(model, server.url.removeprefix("http://") + "/"))
    assert info.url == server.url and info.kind == "slime" and len(info.device_ids) == 1
    assert info.version == slime.__version__
    assert engine_url("http://a:1/") == engine_url("a:1") == "http://a:1"


def test_engines_of_two_versions_are_named():
    old, new = (
        EngineInfo(url=f"http://{host}", kind="sglang", version=version)
        for host, version in (("a", "0.5.16"), ("b", "0.5.23"))
    )
    assert version_warning([old, old]) is None
    text = version_warning([old, new])
    assert text and "http://a is sglang 0.5.16" in text and "http://b is sglang 0.5.23" in text


@pytest.mark.parametrize(
    ("server", "missing"),
    [
        ({"image_processor_backend": "pil", "enable_precise_embedding_interpolation": True}, []),
        (
            {"disable_fast_image_processor": True, "enable_precise_embedding_interpolation": False},
            ["--enable-precise-embedding-interpolation"],
        ),
        (
            {"image_processor_backend": "auto", "enable_precise_embedding_interpolation": True},
            ["--disable-fast-image-processor"],
        ),
    ],
)
def test_a_server_that_reads_images_otherwise_is_refused_with_what_it_lacks(server, missing):
    assert missing_image_options(server) == missing


def test_an_address_without_an_engine(model):
    with pytest.raises(UserError, match=r"127.0.0.1:9: no engine answers there.*cannot connect"):
        find_external(external(model, "127.0.0.1:9"))


def test_an_engine_of_another_size(server, tmp_path):
    larger = make_tiny_checkpoint(tmp_path / "larger", intermediate_size=192)
    with pytest.raises(
        UserError, match=r"with intermediate_size \d+, but .* has 192: start it with"
    ):
        find_external(external(larger, server.url))


def test_one_engine_by_two_names(model, server):
    other = server.url.replace("127.0.0.1", "localhost")
    with pytest.raises(UserError, match="the engine requires its API key: set SLIME_ENGINE_TOKEN"):
        find_external(external(model, server.url, other))
    remember_key([other], server.token)
    with pytest.raises(UserError, match=rf"{server.url} and {other} are the same engine"):
        find_external(external(model, server.url, other))


def test_an_address_of_another_kind_of_server(model):
    with socketserver.TCPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        address = f"127.0.0.1:{other.server_address[1]}"
        with pytest.raises(UserError, match=rf"{address}: this is a server, but not SGLang's"):
            find_external(external(model, address))
        other.shutdown()


@pytest.mark.parametrize("server_info", [[], None, "ok"])
def test_a_server_info_that_is_no_object_is_refused(model, server_info):
    tokens = [[0.0, token] for token in load_tokenizer(str(model)).encode(_TEXT)]
    replies = {
        "/model_info": {"weight_version": "0", "model_path": str(model)},
        "/server_info": server_info,
        "/generate": {"meta_info": {"input_token_logprobs": tokens}},
    }
    with (
        serve_replies(replies) as url,
        pytest.raises(UserError, match=rf"{url}: this is a server, but not SGLang's"),
    ):
        find_external(external(model, url))


@pytest.mark.parametrize(
    "reply",
    [
        [{"meta_info": {}}],
        [{"meta_info": {"output_token_ids_logprobs": []}}],
        [{"meta_info": {"output_token_ids_logprobs": [[["-0.5 nats", 7, None]]]}}],
        [],
        {"error": "out of memory"},
        None,
    ],
)
def test_a_probe_reply_without_log_probs_names_the_engine(reply):
    probe = Probe(tokens=(5, 7), log_probs=(-0.5,), temperature=1.0, tolerance=0.1)
    right = [{"meta_info": {"output_token_ids_logprobs": [[[-0.5, 7, None]]]}}]
    with serve_replies({"/generate": right}) as url:
        check_probe(EngineInfo(url=url), probe)
    with (
        serve_replies({"/generate": reply}) as url,
        pytest.raises(HttpError, match=f"engine {url} replied without the log-probs of the probe"),
    ):
        check_probe(EngineInfo(url=url), probe)


def test_another_model_and_another_tokenizer_are_refused(server, tmp_path):
    check_refusals(server.url, tmp_path)
