"""Every import name that hooks of earlier versions use: it exists and does what they expect of it."""

import asyncio
import importlib
import threading

import pytest

from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample, Status
from slime.rollout.base_types import DataSource, as_eval_output
from slime.rollout.context import GenerationState, RolloutContext
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import EnginePool
from slime.utils.load_function import load_class
from tests.fake_engine import FakeEngine, Reply
from tests.prompts import flat, make_tokenizer_folder, rollout_args

NAMES = {
    "slime.rollout.base_types": "DataSource DynamicFilterOutput RolloutFnEvalOutput RolloutFnTrainOutput call_rollout_fn",
    "slime.rollout.data_source": "DataSource RolloutDataSource RolloutDataSourceWithBuffer",
    "slime.rollout.filter_hub.base_types": "DynamicFilterOutput",
    "slime.rollout.filter_hub.dynamic_sampling_filters": (
        "check_reward_nonzero_std check_reward_nonzero_std_with_fallback"
    ),
    "slime.rollout.fully_async_rollout": "generate_rollout_fully_async",
    "slime.rollout.on_policy_distillation": "post_process_rewards reward_func",
    "slime.rollout.rm_hub": "async_rm batched_async_rm",
    "slime.rollout.rm_hub.math_dapo_utils": "compute_score",
    "slime.rollout.rm_hub.math_utils": (
        "extract_answer grade_answer_mathd grade_answer_sympy grade_answer_verl"
    ),
    "slime.rollout.sft_rollout": "generate_rollout",
    "slime.rollout.sglang_rollout": (
        "GenerateState generate generate_and_rm generate_and_rm_group generate_rollout"
    ),
    "slime.utils.arguments": "parse_args",
    "slime.utils.async_utils": "run",
    "slime.utils.http_utils": "get post",
    "slime.utils.mask_utils": "MultiTurnLossMaskGenerator",
    "slime.utils.misc": "SingletonMeta load_function",
    "slime.utils.processing_utils": "load_processor load_tokenizer",
    "slime.utils.types": "Sample",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_can_be_imported(module):
    loaded = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(loaded, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = loaded.no_such_name


@pytest.fixture
def engines():
    with FakeEngine(lambda request: Reply(text="7")) as one, FakeEngine() as two:
        yield [one, two]


def test_a_post_to_the_first_engine_is_spread_over_all(engines):
    from slime.utils.async_utils import run
    from slime.utils.http_utils import post

    urls = [engine.url for engine in engines]
    payload = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}

    async def eight():
        with RolloutContext(pool=EnginePool(urls)).active():
            return await asyncio.gather(*(post(f"{urls[0]}/generate", payload) for _ in range(8)))

    assert len(run(eight())) == 8
    assert all(engine.requests for engine in engines)
    seen = [len(engine.requests) for engine in engines]

    async def one_session():
        headers = {"X-SMG-Routing-Key": "session-1"}
        with RolloutContext(pool=EnginePool(urls)).active():
            calls = (post(f"{urls[0]}/generate", payload, headers=headers) for _ in range(4))
            await asyncio.gather(*calls)

    run(one_session())
    grown = [len(engine.requests) - before for engine, before in zip(engines, seen, strict=True)]
    assert sorted(grown) == [0, 4]


def test_a_post_elsewhere_and_without_a_run(engines):
    from slime.utils.async_utils import run
    from slime.utils.http_utils import post

    payload = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    url = engines[0].url
    assert run(post(f"{url}/generate", payload, max_retries=3))["text"] == "7"
    with pytest.raises(Exception, match="404"):
        run(post(f"{url}/no_such_route", {}, max_retries=1))


def test_generate_state(tmp_path):
    from slime.compat.loading import SingletonMeta
    from slime.rollout.sglang_rollout import GenerateState

    args = rollout_args(tmp_path, sglang_server_concurrency=3)
    SingletonMeta._instances.pop(GenerateState, None)
    state = GenerateState(args)
    assert GenerateState(args) is state and state.args is args and state.processor is None
    assert state.tokenizer.decode(state.tokenizer.encode("a")) == "a"
    assert state.sampling_params["max_new_tokens"] == 32

    async def limit():
        assert state.semaphore is state.semaphore
        return state.semaphore._value

    assert asyncio.run(limit()) == 3 * args.rollout_num_gpus
    assert not state.aborted
    context = RolloutContext(pool=EnginePool([]), generation=GenerationState(aborting=True))
    with context.active():
        assert state.aborted
    SingletonMeta._instances.pop(GenerateState)


def test_generate_and_rm(tmp_path, engines):
    from slime.rollout.sglang_rollout import generate_and_rm, generate_and_rm_group
    from slime.utils.async_utils import run

    args = rollout_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    params = {"max_new_tokens": 8, "temperature": 1.0}

    async def both():
        with RolloutContext(pool=EnginePool([engines[0].url])).active():
            one = await generate_and_rm(args, source.get_samples(1)[0][0], params)
            return one, await generate_and_rm_group(args, source.get_samples(1)[0], params)

    one, group = run(both())
    assert (one.response, one.status) == ("7", Status.COMPLETED) and one.reward in (0.0, 1.0)
    assert [sample.response for sample in group] == ["7", "7"]


def test_call_rollout_fn():
    from slime.rollout.base_types import call_rollout_fn

    def rollout(args, rollout_id, *, evaluation):
        result = {"rewards": [1.0], "truncated": [False], "samples": []}
        return {"own": result} if evaluation else [[Sample(index=rollout_id)]]

    assert call_rollout_fn(rollout, None, 3, evaluation=False).samples[0][0].index == 3
    assert call_rollout_fn(rollout, None, 3, evaluation=True).data["own"].rewards == [1.0]
    with pytest.raises(UserError, match="expected RolloutFnTrainOutput"):
        call_rollout_fn(lambda *_, evaluation: 5, None, evaluation=False)


def test_evaluations_of_dictionaries():
    from slime.rollout.base_types import RolloutFnEvalOutput

    result = {"rewards": [1.0, 0.0], "truncated": [False, True]}
    output = as_eval_output(RolloutFnEvalOutput(data={"a": result}, metrics={"x": 1.0}), "my.fn")
    assert output.data["a"].rewards == output.data["a"]["rewards"] == [1.0, 0.0]
    assert output.metrics == {"x": 1.0}
    with pytest.raises(UserError, match="expected EvalResult or a dictionary"):
        as_eval_output(RolloutFnEvalOutput(data={"a": [1.0]}), "my.fn")


class WithoutSave(DataSource):
    def get_samples(self, num_samples):
        return []

    def add_samples(self, samples): ...
    def load(self, rollout_id=None): ...
    def __len__(self):
        return 0


class Whole(WithoutSave):
    def save(self, rollout_id): ...


def test_a_data_source_that_lacks_a_method_of_its_base():
    flag = "--data-source-path"
    assert load_class(f"{__name__}.Whole", flag=flag, protocol=DataSource) is Whole
    with pytest.raises(ConfigError, match="has no method save"):
        load_class(f"{__name__}.WithoutSave", flag=flag, protocol=DataSource)


def always_fallback(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    keep = samples[0].group_index in (1, 5)
    return DynamicFilterOutput(keep=keep, reason="dull", keep_when_insufficient=True)


@pytest.mark.parametrize(("module", "most"), [("sglang_rollout", 6), ("fully_async_rollout", 12)])
def test_a_fallback_fills_the_batch(tmp_path, engines, module, most):
    """Six groups are started for a batch of four: two are kept, and two of the others fill it."""
    args = rollout_args(
        tmp_path,
        rollout_batch_size=4,
        over_sampling_batch_size=6,
        dynamic_sampling_filter_path=f"{__name__}.always_fallback",
    )
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout = importlib.import_module(f"slime.rollout.{module}").generate_rollout
    with RolloutContext(pool=EnginePool([engines[0].url])).active():
        output = generate_rollout(args, 0, source)
    kept = [group[0].group_index for group in output.samples]
    assert len(kept) == 4 and kept == sorted(kept) and {1, 5} <= set(kept)
    assert output.metrics["rollout/dropped_dull"] == 2
    assert source.next_group_index <= most and len(flat(output)) == 8


def test_the_fallback_of_equal_rewards(tmp_path):
    from slime.rollout.filter_hub.dynamic_sampling_filters import (
        check_reward_nonzero_std_with_fallback as check,
    )

    args = rollout_args(tmp_path)
    same = [Sample(reward=1.0), Sample(reward=1.0)]
    assert (check(args, same).keep, check(args, same).keep_when_insufficient) == (False, True)
    assert check(args, [Sample(reward=1.0), Sample(reward=0.0)]).keep


def test_distillation_normalises_as_without_a_hook(tmp_path):
    from slime.rollout.on_policy_distillation import post_process_rewards

    path = "slime.rollout.on_policy_distillation.post_process_rewards"
    args = rollout_args(
        tmp_path, custom_reward_post_process_path=path, disable_grpo_std_normalization=True
    )
    samples = [Sample(group_index=0, index=i, reward=float(i)) for i in range(3)]
    assert post_process_rewards(args, samples) == ([0.0, 1.0, 2.0], [-1.0, 0.0, 1.0])


def test_fully_async_under_its_former_name():
    from slime.rollout import fully_async_rollout

    assert fully_async_rollout.generate_rollout_fully_async.never_stops


def test_loss_masks_of_a_conversation(tmp_path):
    from slime.data.sft_loss_mask import masked_conversation
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator
    from slime.utils.processing_utils import load_tokenizer

    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = make_tokenizer_folder(tmp_path / "model", template)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=True)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen")
    tokens, mask = generator.get_loss_mask(messages)
    assert (tokens, mask) == masked_conversation(tokenizer, messages, kind="qwen")
    assert generator.get_response_lengths([mask, [0, 0]]) == [len(mask) - mask.index(1), 0]
    assert generator.get_text_from_loss_mask(tokens, mask) == ["Hello<|im_end|>"]
    with pytest.raises(ConfigError, match="take no use_fast"):
        load_tokenizer(str(folder), use_fast=False)


def test_singletons_and_functions_by_path():
    from slime.utils.misc import SingletonMeta, load_function

    class Counter(metaclass=SingletonMeta):
        def __init__(self, start):
            self.start = start

    assert Counter(1) is Counter(2) and Counter(3).start == 1
    assert load_function("os.path.join") is importlib.import_module("os.path").join
    with pytest.raises(AttributeError):
        load_function("os.path.no_such_name")


def test_graders_of_mathematics():
    from slime.rollout.rm_hub.math_dapo_utils import compute_score
    from slime.rollout.rm_hub.math_utils import (
        extract_answer,
        grade_answer_mathd,
        grade_answer_sympy,
        grade_answer_verl,
    )

    assert compute_score("so Answer: 42", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert compute_score("so Answer: 43", "42")["score"] == -1.0
    assert compute_score(r"\boxed{42}", "42", strict_box_verify=True)["acc"]
    assert not compute_score("Answer: 42", "42", strict_box_verify=True)["acc"]
    assert extract_answer(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert extract_answer("none") is None
    assert grade_answer_mathd(r"\dfrac12", r"\frac{1}{2}") and not grade_answer_mathd("1", "2")
    assert grade_answer_verl(r"so \boxed{\dfrac{1}{2}}", r"\frac{1}{2}")
    assert not grade_answer_verl("no box", "1")
    assert grade_answer_sympy("x+x", "2x") and not grade_answer_sympy("x+x", "3x")

    async def on_a_loop():  # as a hook calls them
        return grade_answer_sympy("x+x+x", "3x")

    from slime.utils.async_utils import run

    assert run(on_a_loop()) is True and threading.current_thread() is threading.main_thread()
