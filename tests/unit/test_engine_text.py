"""Stop strings in a growing output, against a search in all of its text."""

from __future__ import annotations

import random

from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import parse_sampling_params
from slime.engine.server.text import TextCodec
from tests.tiny import PAD_ID, make_byte_tokenizer

PIECES = ["a", "b", "ab", " ", "\n", "é", "😀"]  # up to four tokens for one character


def test_a_stop_string_is_found_with_its_last_token():
    tokenizer = make_byte_tokenizer()
    codec, rng = TextCodec(tokenizer), random.Random(0)
    num_found = 0
    for _ in range(300):
        stop = "".join(rng.choices(PIECES, k=rng.randint(1, 3)))
        output = tokenizer.encode("".join(rng.choices(PIECES, k=20)))
        for _ in range(rng.randint(0, 12)):  # tokens without text, between any two bytes
            output.insert(rng.randrange(len(output)), PAD_ID)
        request = Request(
            rid="r",
            token_ids=[1],
            prompt_len=1,
            params=parse_sampling_params({"stop": stop}),
            seed=0,
        )
        for token in output:
            request.token_ids.append(token)
            text = tokenizer.decode(request.output_ids, skip_special_tokens=True)
            found = codec.find_stop(request)
            assert (found is not None) == (stop in text)
            if found is not None:
                num_found += 1
                break
    assert 50 < num_found < 300
