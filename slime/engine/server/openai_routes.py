"""OpenAI-compatible routes, /v1/chat/completions and /v1/completions, as SGLang provides them.

Body ──▶ ApiRequest ──▶ token ids and sampling parameters ──▶ the requests of /generate ──▶ choices
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from slime.data import openai_replies as replies
from slime.data.openai_encode import check_template_kwargs, drops_tools, render_chat
from slime.data.openai_replies import Answer, TokenLogProb, parse_tool_calls
from slime.data.openai_requests import (
    ApiError,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from slime.engine.engine import Engine
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import LONGEST_CONSTRAINT, MOST_REQUESTS, RequestError
from slime.engine.server.image_data import expand_prompts, read_images
from slime.engine.server.json_http import INLINE_BODY, json_reply, parse_json, send_events
from slime.engine.server.protocol import Generation, Limits, parse_generate
from slime.engine.server.threads import ReplyHub, Workers
from slime.utils.http_guard import BodyReader, Refused

logger = logging.getLogger(__name__)
Chunk = dict[str, Any]
_LONGEST_MODEL = 8192  # characters; every chunk of a stream repeats the name
_TOOL_CALL = "<tool_call>"
_IMAGES_S = 20.0


class OpenAIRoutes:
    def __init__(
        self, engine: Engine, hub: ReplyHub, limits: Limits, bodies: BodyReader, workers: Workers
    ) -> None:
        self._engine, self._hub, self._limits = engine, hub, limits
        self._bodies, self._workers = bodies, workers
        self._warned = False  # that the chat template drops tools

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        try:
            api = parse_chat(await self._read(http), images=True)
            return await self._answer(http, api, *await self._encode_chat(api))
        except (ApiError, RequestError, Refused) as error:
            return _error(error)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        try:
            api = parse_completion(await self._read(http))
            if len(api.prompts) > MOST_REQUESTS:
                raise ApiError(f"{len(api.prompts)} prompts; at most {MOST_REQUESTS}")
            prompts = [await self._encode_prompt(prompt) for prompt in api.prompts]
            return await self._answer(http, api, prompts)
        except (ApiError, RequestError, Refused) as error:
            return _error(error)

    async def _read(self, http: web.Request) -> Any:
        data = await self._bodies.read(http)
        if len(data) > INLINE_BODY:
            return await self._workers.run(lambda: parse_json(data))
        return parse_json(data)

    async def _encode_chat(self, api: ChatRequest) -> tuple[list[list[int]], list[list[bytes]]]:
        """Return the prompt and its images, computed on worker threads; rendering has a timeout."""
        codec, context_len = self._engine.codec, self._limits.context_len
        if len(api.messages) > context_len:
            raise ApiError(
                f"{len(api.messages)} messages are more than the model's context length of "
                f"{context_len} tokens",
                code="context_length_exceeded",
            )

        def render() -> str:
            tokenizer = codec.require("a chat template")
            check_template_kwargs(tokenizer, api.template_kwargs)
            if api.tools and drops_tools(tokenizer):
                self._warn_tools_dropped()
            return render_chat(tokenizer, api.messages, api.tools, api.template_kwargs)

        text = await self._workers.run(render, interruptible=True)
        ids = await self._workers.run(lambda: codec.encode(text, context_len, rendered=True))
        if not api.images:
            return [ids], []

        def expand() -> tuple[list[list[int]], list[list[bytes]]]:
            known, deadline = self._limits.images, time.monotonic() + _IMAGES_S
            files = [read_images(api.images, known, deadline, context_len)]
            return expand_prompts([ids], {"image_data": files}, known), files

        return await self._workers.run(expand)

    def _warn_tools_dropped(self) -> None:
        """Log once that the model does not see the `tools` of requests."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "the chat template of %s does not mention tools: `tools` of requests are dropped, and "
                "the model does not see them",
                self._engine.model_path,
            )

    async def _encode_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        codec, context_len = self._engine.codec, self._limits.context_len
        return await self._workers.run(lambda: codec.encode(prompt, context_len))

    async def _answer(
        self,
        http: web.Request,
        api: ApiRequest,
        prompts: list[list[int]],
        images: list[list[bytes]] | None = None,
    ) -> web.StreamResponse:
        if len(api.model) > _LONGEST_MODEL:
            raise ApiError(f"`model` may have at most {_LONGEST_MODEL} characters")
        if self._engine.failure is not None:
            raise ApiError(f"the engine stopped: {self._engine.failure!r}", 503)
        # Compiling constraints and decoding images is slow: use a worker thread.
        if images or api.sampling.keys() & LONGEST_CONSTRAINT:
            generation = await self._workers.run(lambda: self._generation(api, prompts, images))
        else:
            generation = self._generation(api, prompts, images)
        self._hub.check_capacity(len(generation.requests))
        name = f"{'chatcmpl' if isinstance(api, ChatRequest) else 'cmpl'}-{secrets.token_hex(12)}"
        num_prompt = sum(len(ids) for ids in prompts)
        if api.stream:
            return await send_events(http, self._chunks(api, generation, name, num_prompt))
        await self._hub.run(generation.requests)
        answers = [self._make_answer(request, api) for request in generation.requests]
        chat = isinstance(api, ChatRequest)
        reply = replies.chat_reply if chat else replies.completion_reply
        return json_reply(reply(name, self._model(api), answers, num_prompt))

    def _generation(
        self, api: ApiRequest, prompts: list[list[int]], images: list[list[bytes]] | None
    ) -> Generation:
        params = {**api.sampling}
        if api.max_tokens is not None or isinstance(api, CompletionRequest):
            params["max_new_tokens"] = api.max_tokens or 16  # what OpenAI's completions default to
        else:
            available = min(self._limits.context_len, self._limits.cache_tokens) - len(prompts[0])
            params["max_new_tokens"] = max(available - 1, 1)
        body = {
            "input_ids": prompts,
            "image_data": images,
            "sampling_params": params,
            "return_logprob": api.log_probs,
            "top_logprobs_num": api.num_top_log_probs,
            "return_text_in_logprobs": True,
            "stream": api.stream,
            "lora_path": self._adapter_name(api),
        }
        return parse_generate(body, self._engine, self._limits)

    def _make_answer(self, request: Request, api: ApiRequest) -> Answer:
        finish = request.finish
        assert finish is not None
        if finish.status_code is not None:
            raise ApiError(finish.message, finish.status_code)
        text, calls = self._engine.codec.decode(request), []
        if isinstance(api, ChatRequest) and api.tools:
            text, calls = parse_tool_calls(text, secrets.token_hex(6))
        return Answer(
            text=text,
            finish=finish.kind,
            matched=finish.matched,
            calls=calls,
            num_tokens=len(request.output_ids),
            log_probs=self._log_probs(request) if api.log_probs else None,
            weight_version=self._engine.version_of(request),
            weight_versions=[asdict(span) for span in request.version_spans],
        )

    def _log_probs(self, request: Request, start: int = 0) -> list[TokenLogProb]:
        """Return the log-probs of the output tokens from `start` on."""

        def entry(token: int, value: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogProb:
            text = self._engine.codec.decode_token(token)
            return TokenLogProb(token=text, log_prob=float(value), top=[entry(*t) for t in top])

        values = request.output_log_probs[start:]
        tops = request.top_log_probs[start:] or [[]] * len(values)
        return [entry(*row) for row in zip(request.output_ids[start:], values, tops, strict=False)]

    async def _chunks(
        self, api: ApiRequest, generation: Generation, name: str, num_prompt: int
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the events of a streamed reply."""
        requests, model = generation.requests, self._model(api)
        chat = isinstance(api, ChatRequest)
        make = _chat_chunk if chat else replies.completion_chunk
        stops = requests[0].params.stop
        tools = isinstance(api, ChatRequest) and bool(api.tools)
        places = {request: index for index, request in enumerate(requests)}
        streams = [TextStream(stops, hold_tool_calls=tools) for _ in requests]
        sent = [SentTokens() for _ in requests]
        answers: list[Answer] = []
        if chat:
            for index in range(len(requests)):
                yield replies.chat_chunk(name, model, index, {"role": "assistant", "content": ""})
        async for request in self._hub.stream(requests):
            index, answer = places[request], None
            if request.finish is not None:
                if request.finish.status_code is not None:
                    yield ApiError(request.finish.message, request.finish.status_code).body()
                    continue
                answer = self._make_answer(request, api)
                answers.append(answer)
            part = streams[index].push(self._engine.codec.decode(request), answer)
            if not part and answer is None:
                continue
            chunk = make(name, model, index, part, answer)
            if api.log_probs:
                tokens = self._log_probs(request, sent[index].count)
                chunk["choices"][0]["logprobs"] = sent[index].push(tokens, chat=chat)
            yield chunk
        if api.include_usage:
            kind = "chat.completion.chunk" if chat else "text_completion"
            yield replies.usage_chunk(name, model, kind, num_prompt, answers)

    def _adapter_name(self, api: ApiRequest) -> str | None:
        """Return the adapter in `model`, given as "adapter" or "base:adapter", else `lora_path`."""
        lora, model = self._engine.lora, api.model
        if lora is None or model in ("", self._engine.args.served_model_name):
            return api.lora_path
        if model in lora.adapters:
            return model
        base = self._engine.args.served_model_name or self._engine.model_path
        if model.startswith(f"{base}:"):
            return model[len(base) + 1 :]
        return model.split(":", 1)[1] if ":" in model else api.lora_path

    def _model(self, api: ApiRequest) -> str:
        return api.model or str(self._engine.args.model_path)


def _chat_chunk(name: str, model: str, index: int, part: str, answer: Answer | None) -> Chunk:
    delta: dict[str, Any] = {"content": part} if part else {}
    if answer is not None and answer.calls:
        delta["tool_calls"] = replies.tool_call_deltas(answer.calls)
    return replies.chat_chunk(name, model, index, delta, answer)


def _error(error: ApiError | RequestError | Refused) -> web.Response:
    if isinstance(error, Refused):
        error = ApiError(str(error), error.status)
    if isinstance(error, RequestError):
        too_long = "context length" in str(error)
        error = ApiError(str(error), code="context_length_exceeded" if too_long else None)
    return json_reply(error.body(), error.status)


class TextStream:
    """Turns the growing text of a response into deltas that never have to be corrected.

    It holds back incomplete characters, a possible beginning of a stop string, and everything from a tool
    call on, which is sent as a tool call instead of text.
    """

    def __init__(self, stops: tuple[str, ...], *, hold_tool_calls: bool) -> None:
        self._marks = (*stops, _TOOL_CALL) if hold_tool_calls else stops
        self._hold_tool_calls = hold_tool_calls
        self._sent = ""

    def push(self, text: str, answer: Answer | None) -> str:
        """Return the part of `text` (everything so far) to send now; `answer` is set for the last part."""
        if answer is not None:
            final = answer.text
            part = final[len(self._sent) :] if final.startswith(self._sent) else ""
        else:
            part = self._safe(text)[len(self._sent) :]
        self._sent += part
        return part

    def _safe(self, text: str) -> str:
        if self._hold_tool_calls and _TOOL_CALL in text:
            return text[: text.index(_TOOL_CALL)].rstrip()
        text = text.rstrip("\ufffd")
        held = max((_overlap(text, mark) for mark in self._marks), default=0)
        text = text[: len(text) - held] if held else text
        return text.rstrip() if self._hold_tool_calls else text


@dataclass(kw_only=True)
class SentTokens:
    """Counts the tokens, and the characters of their texts, whose log-probs a stream has sent."""

    count: int = 0
    characters: int = 0

    def push(self, tokens: list[TokenLogProb], *, chat: bool) -> dict[str, Any]:
        """Return the `logprobs` of a chunk with these tokens, which follow those already sent."""
        position = self.characters
        self.count += len(tokens)
        self.characters += sum(len(token.token) for token in tokens)
        if chat:
            return replies.chat_log_probs(tokens)
        return replies.completion_log_probs(tokens, position)


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `mark`."""
    for size in range(min(len(mark), len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
