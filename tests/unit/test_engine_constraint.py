"""Constrained decoding: texts that other libraries accept, log-probs without the constraint, hostile schemas."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import orjson
import pytest
import torch

from slime.engine.scheduler.constraint import Constraints
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import sample
from slime.engine.scheduler.sampling_params import RequestError, parse_sampling_params
from slime.engine.scheduler.speculation import Drafter
from slime.engine.server.app import constrains
from slime.engine.server.text import TextCodec
from tests.tiny import make_byte_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

TOKENIZER = make_byte_tokenizer()
END = TOKENIZER.eos_token_id
VOCAB = len(TOKENIZER) + 40  # padded, as models have it


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(TOKENIZER, VOCAB, frozenset({END}))


def make_request(constraints: Constraints, seed: int = 0, **params) -> Request:
    parsed = parse_sampling_params({"max_new_tokens": 400, **params})
    return Request(
        rid="r",
        token_ids=[1],
        prompt_len=1,
        params=parsed,
        seed=seed,
        eos_ids=frozenset({END}),
        constraint=constraints.make(parsed).copy(),
    )


def generate(requests: list[Request]) -> list[str]:
    """Sample from random logits, all requests in one batch, until each has finished."""
    generator = torch.Generator().manual_seed(0)
    while running := [request for request in requests if request.finish is None]:
        logits = torch.randn(len(running), VOCAB, generator=generator) * 3
        sampled = sample(logits, running)
        plain = torch.log_softmax(logits, dim=-1)
        for i, (request, token, value) in enumerate(
            zip(running, sampled.tokens, sampled.log_probs, strict=True)
        ):
            assert value == pytest.approx(plain[i, token].item(), abs=1e-5)
            assert not (request.constraint and request.constraint.error)
            request.append(token, value, "1")
    return [TOKENIZER.decode(r.output_ids, skip_special_tokens=True) for r in requests]


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 20}},
     "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 2, "maxItems": 4},
    {"$defs": {"t": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}]}},
     "$ref": "#/$defs/t"},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_texts_are_valid_under_the_schema(constraints, schema):
    text = json.dumps(schema)
    requests = [make_request(constraints, seed, json_schema=text) for seed in range(20)]
    texts = generate(requests)
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > 2
    assert all(r.finish and r.finish.matched == END for r in requests)


@pytest.mark.parametrize("regex", ["[0-9]{3}-[a-f]+x", "(yes|no)( maybe)?"])
def test_texts_match_the_regular_expression(constraints, regex):
    for text in generate([make_request(constraints, seed, regex=regex) for seed in range(10)]):
        assert re.fullmatch(regex, text)


def test_greedy_takes_the_most_likely_of_the_allowed_tokens(constraints):
    request = make_request(constraints, regex="[bc]", temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    a, b, c = (TOKENIZER.encode(letter)[0] for letter in "abc")
    logits[0, a], logits[0, b], logits[0, c] = 9.0, 1.0, 2.0
    assert sample(logits, [request]).tokens == [c]
    request.append(c, 0.0, "1")
    assert sample(logits, [request]).tokens == [END]  # nothing else may follow


def test_no_drafts_are_made_for_constrained_requests(constraints):
    request = make_request(constraints, regex="(ab)+")
    request.token_ids = [1, 5, 6, 5, 6, 5, 6]
    assert Drafter(8).draft(request, 4) == []
    request.params, request.num_top_log_probs = parse_sampling_params({}), 1
    assert Drafter(8).draft(request, 4) == []
    request.num_top_log_probs = 0
    assert Drafter(8).draft(request, 4) == [5, 6, 5, 6]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": "nonsense"}'}, "Invalid type"),
        ({"json_schema": '{"not": {}, "x-guidance": {"lenient": true}}'}, "Unimplemented keys"),
        ({"json_schema": "false"}, "json_schema: "),
        ({"json_schema": '{"$ref": "http://169.254.169.254/x"}'}, "not present"),
        ({"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000}, "recursion limit"),
        ({"regex": "(?=a)b"}, "invalid regex"),
        ({"regex": "(a"}, "regex"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(constraints, params, reason):
    with pytest.raises(RequestError, match=reason) as error:
        constraints.make(parse_sampling_params(params))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


HOSTILE = {
    "nested counts": {"regex": "(a{1000}){1000}"},
    "stars": {"regex": "((a*)*)*b"},
    "exponential states": {"regex": "(.*a.{60}){20}"},
    "alternatives": {"regex": "|".join(f"a{i}.*{i}" for i in range(400))},
    "references": {"json_schema": json.dumps({
        "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}}}
                  for i in range(30)} | {"d30": {"type": "integer"}}, "$ref": "#/$defs/d0"})},
    "a loop": {"json_schema": '{"$ref": "#"}'},
    "all of any": {"json_schema": json.dumps({"allOf": [{"anyOf": [
        {"properties": {f"k{i}_{j}": {"type": "integer"}}} for j in range(10)]} for i in range(8)]})},
    "items": {"json_schema": json.dumps({"type": "array", "minItems": 10**9, "items": {"pattern": "(a|b)*c.{99}"}})},
    "properties": {"json_schema": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}})},
}  # fmt: skip


@pytest.mark.parametrize("params", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_costs_little_time(constraints, params):
    """It is refused, fails with a message or is followed; no token takes the engine's thread long, under load."""
    started = time.process_time()
    try:
        constraint = constraints.make(parse_sampling_params(params))
    except RequestError:
        constraint = None
    assert time.process_time() - started < 5
    output: list[int] = []
    while constraint is not None and not constraint.error and len(output) < 60:
        started = time.process_time()
        allowed = np.flatnonzero(constraint.allowed(output, VOCAB))
        assert time.process_time() - started < 0.5
        output.append(int(allowed[len(allowed) // 3]))
        if output[-1] == END:
            break


def test_the_slow_first_mask_is_not_for_the_engines_thread(constraints):
    started = time.process_time()
    constraint = constraints.make(parse_sampling_params({"regex": "(a{1000}){1000}"}))
    made = time.process_time() - started
    constraint.copy().allowed([], VOCAB)
    assert time.process_time() - started - made < made / 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"sampling_params": {"json\\u005fschema": "{}"}}',  # as JSON spells json_schema too
        b'{"sampling_params": [{}, {"\\u0072egex": "a"}]}',
    ],
)
def test_no_spelling_is_compiled_on_the_event_loop(body):
    assert constrains(orjson.loads(body))
    assert not constrains({"text": "json_schema", "sampling_params": [None, 7]})


def test_one_call_compiles_few_constraints(constraints):
    codec = TextCodec(TOKENIZER)
    many = [parse_sampling_params({"regex": "a" * i}) for i in range(1, 10)]
    with pytest.raises(RequestError, match="9 schemas in one call; at most 8"):
        codec.constrain(many, VOCAB, frozenset({END}))
    assert len(codec.constrain(many[:1] * 50, VOCAB, frozenset({END}))) == 1
    with pytest.raises(RequestError, match="needs a tokenizer"):
        TextCodec(None).constrain(many[:1], VOCAB, frozenset({END}))
