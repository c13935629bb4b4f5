"""What is found out about a real SGLang server that somebody else runs, before it is trained with."""

from __future__ import annotations

import json

import pytest

from slime.backends.sglang_utils.external import find_external
from slime.utils.errors import UserError
from slime.utils.sglang_install import find_sglang
from tests.args import make_args
from tests.tiny import make_tiny_checkpoint


def external(model, address: str):
    return make_args(
        rollout_engine=None,
        hf_checkpoint=str(model),
        rollout_external=True,
        rollout_external_engine_addrs=[address],
    )


def test_kind_and_version_are_asked_for(sglang_checkpoint, server):
    [info] = find_external(external(sglang_checkpoint, server.url.removeprefix("http://")))
    install = find_sglang()
    assert install is not None
    assert (info.kind, info.version, info.url) == ("sglang", install.version, server.url)


def test_another_model_and_another_tokenizer_are_refused(sglang_checkpoint, server, tmp_path):
    other = make_tiny_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*start it with the model"):
        find_external(external(other, server.url))
    spelled = make_tiny_checkpoint(tmp_path / "spelled")
    path = spelled / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["c"] = vocab["c"], vocab["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="another tokenizer"):
        find_external(external(spelled, server.url))
