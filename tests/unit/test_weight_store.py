"""The weights of an engine as updates see them: where they are now, however they were moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.engine.scheduler.sampling_params import RequestError
from slime.engine.weights import TensorMeta, WeightStore, parse_metadata
from slime.weights.checksum import tensor_checksum
from slime.weights.ipc import SharedBuffer
from tests.tiny import make_tiny_checkpoint

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", tie_word_embeddings=True)


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture
def store(model: PreTrainedModel):
    store = WeightStore(model)
    store.begin_session()
    yield store
    if store.session_open:
        store.end_session()


def write(store: WeightStore, tensor: torch.Tensor, offset: int = 0, name: str = NORM) -> None:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    buffer = SharedBuffer(offset + data.numel() + 3)  # no whole number of elements
    buffer.tensor[offset : offset + data.numel()] = data
    meta = TensorMeta(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset)
    try:
        store.update_from_buffer(buffer.export(), [meta])
    finally:
        buffer.close()


@pytest.mark.parametrize("moved", ["all", "one"])
def test_weights_that_move_within_a_session_are_followed(model, store, moved: str):
    norm = model.get_parameter(NORM)
    write(store, torch.full_like(norm, 2.0))
    assert (norm == 2).all()
    for name, param in model.named_parameters():
        if moved == "all" or name == NORM:
            param.data = param.data.clone()
    write(store, torch.full_like(norm, 3.0))
    assert (norm == 3).all()
    assert store.checksums()[NORM] == tensor_checksum(NORM, torch.full_like(norm, 3.0))


@pytest.mark.parametrize("let_go", [WeightStore.end_session, WeightStore.invalidate])
def test_memory_is_let_go_of(model, let_go: Callable[[WeightStore], None]):
    """Or a colocated trainer would not get what the engine releases, in a session that was left open too."""
    store, norm = WeightStore(model), model.get_parameter(NORM)
    array = np.ones(norm.numel(), np.float32)
    norm.data = torch.from_numpy(array)
    held = weakref.ref(array)
    del array
    store.begin_session()
    store.checksums()
    let_go(store)
    norm.data = torch.ones(norm.numel())
    assert held() is None


def test_a_tied_weight_is_summed_once_and_may_be_sent_by_either_name(model, store):
    head = torch.randn_like(model.get_input_embeddings().weight)
    write(store, head, name="lm_head.weight")
    assert torch.equal(model.get_input_embeddings().weight, head)
    named = {name: param.detach() for name, param in model.named_parameters()}
    assert store.checksums() == {name: tensor_checksum(name, t) for name, t in named.items()}


@pytest.mark.parametrize("offset", [0, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_may_lie_anywhere_in_its_buffer(model, store, offset: int, dtype: torch.dtype):
    norm = model.get_parameter(NORM)
    sent = torch.randn_like(norm).to(dtype)
    write(store, sent, offset)
    assert torch.equal(norm, sent.to(norm.dtype))


@pytest.mark.parametrize("offset", [-4, 8, 1 << 40])
def test_what_lies_outside_the_buffer_is_refused(model, store, offset: int):
    norm = model.get_parameter(NORM)
    before = norm.detach().clone()
    buffer = SharedBuffer(norm.nbytes + 7)
    meta = TensorMeta(name=NORM, dtype=norm.dtype, shape=tuple(norm.shape), offset=offset)
    with pytest.raises(RequestError, match=rf"{NORM}: bytes {offset}\.\..* outside the buffer"):
        store.update_from_buffer(buffer.export(), [meta])
    buffer.close()
    assert torch.equal(norm, before)


def test_metadata_that_was_read_before_is_told_from_other_metadata():
    first = {"name": NORM, "dtype": "float32", "shape": [4, 2], "offset": 64}
    same = TensorMeta(name=NORM, dtype=torch.float32, shape=(4, 2), offset=64)
    others = [
        {**first, **change}
        for change in ({"name": "x"}, {"dtype": "bfloat16"}, {"shape": [2, 4]}, {"offset": 0})
    ]
    for _ in range(2):
        assert list(parse_metadata([dict(first)])) == [same]
        assert len({parse_metadata([entry])[0] for entry in [first, *others]}) == 5
        with pytest.raises(RequestError, match="unknown dtype 'float3'"):
            parse_metadata([{**first, "dtype": "float3"}])
        with pytest.raises(RequestError, match="metadata must be a list"):
            parse_metadata([{"name": NORM}])
