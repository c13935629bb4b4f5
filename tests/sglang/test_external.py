"""What is found out about a real SGLang server that somebody else runs, before it is trained with."""

from __future__ import annotations

from slime.config.installed import find_sglang
from slime.serving.external import find_external
from tests.external import check_refusals, external


def test_kind_and_version_are_asked_for(sglang_checkpoint, server):
    [info] = find_external(external(sglang_checkpoint, server.url.removeprefix("http://")))
    install = find_sglang()
    assert install is not None
    assert (info.kind, info.version, info.url) == ("sglang", install.version, server.url)


def test_another_model_and_another_tokenizer_are_refused(server, tmp_path):
    check_refusals(server.url, tmp_path)
