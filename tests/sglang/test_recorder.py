"""The endpoint that records an agent's tokens, in front of the real SGLang."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")

from slime.rollout.context import RolloutContext
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import EnginePool
from slime.rollout.sglang_rollout import generate_rollout
from tests.conformance.reference import log_probs
from tests.integration.test_rollout_openai_endpoint import AGENTS, TEMPLATE
from tests.prompts import flat, make_tokenizer_folder, rollout_args
from tests.tiny import make_byte_tokenizer

pytestmark = pytest.mark.timeout(1800)


def test_an_agent_is_recorded_with_the_tokens_and_log_probs_of_sglang(
    sglang_checkpoint, server, tmp_path
):
    body = {"model_path": str(sglang_checkpoint)}
    assert server.post("/update_weights_from_disk", body)["success"]
    make_tokenizer_folder(tmp_path / "model", TEMPLATE)
    args = rollout_args(
        tmp_path,
        [{"input": "2+3=", "label": "5"}],
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        custom_generate_function_path=f"{AGENTS}.two_questions",
        rollout_max_response_len=64,
    )
    with RolloutContext(pool=EnginePool([server.url])).active():
        samples = flat(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)))
    assert len(samples) == 2
    for sample in samples:
        text = make_byte_tokenizer().decode(sample.tokens[: -sample.response_length])
        assert text.startswith("[user]2+3=") and text.endswith("[assistant]")
        assert set(sample.loss_mask) == {0, 1}  # answers, and the second question between them
        table = log_probs(sglang_checkpoint, sample.tokens)
        start = len(sample.tokens) - sample.response_length
        for place, (mask, value) in enumerate(
            zip(sample.loss_mask, sample.rollout_log_probs, strict=True), start
        ):
            if mask:
                expected = float(table[place - 1, sample.tokens[place]])
                assert value == pytest.approx(expected, abs=1e-4)
