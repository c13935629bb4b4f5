"""An OpenAI-compatible endpoint that records conversations, to train agents written with the `openai` client.

    async def generate(args, sample, sampling_params):          # --custom-generate-function-path
        return await record_agent(args, sample, sampling_params, my_agent)

    def my_agent(base_url, sample):                              # or async def
        client = OpenAI(base_url=base_url, api_key="none")
        client.chat.completions.create(model="policy", messages=sample.messages)

    agent ──/v1/chat/completions──▶ Session: exact tokens so far ──/generate──▶ SGLang or the embedded engine

Temperature, top-p and top-k are those of the run, because the trainer computes log-probs at the run's
temperature. The client's values are accepted and ignored, except `max_tokens` and `stop`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data import openai_replies as replies
from slime.data.images import load_image_processor, placeholders_of
from slime.data.openai_encode import (
    Tools,
    check_template_kwargs,
    encode_messages,
    refuse_control_tokens,
    render_after_answer,
    render_chat,
)
from slime.data.openai_replies import Answer, TokenLogProb, parse_tool_calls
from slime.data.openai_requests import ApiError, ChatRequest, Message, parse_chat
from slime.data.tokenizer import load_tokenizer
from slime.rollout.agents.recording import Session, Turn, give_row_images, images_in, keep_images
from slime.rollout.context import RolloutContext
from slime.rollout.engine_pool import EngineRefusedError
from slime.rollout.hook_calls import in_thread, on_hook_loop
from slime.rollout.sampling import SamplingParams, generate
from slime.utils.http_guard import (
    BodyReader,
    GuardedServer,
    Handler,
    HttpLimits,
    Refused,
    check_browser,
    check_media_type,
)
from slime.utils.load_function import is_async

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime.config.arguments import Args

_MAX_BLOCKING_AGENTS = 512  # that run concurrently
_HOST = "127.0.0.1"
_LIMITS = HttpLimits()
_INLINE_CHARS = 1 << 16  # tokenized on the event loop; longer text on a thread

_Endpoints = dict[str, asyncio.Task["RecordingEndpoint"]]  # by the settings that they use
Agent = Callable[[str, Sample], Any] | Callable[[str, Sample], Coroutine[Any, Any, Any]]


async def record_agent(
    args: Args, sample: Sample, sampling_params: SamplingParams, agent: Agent
) -> list[Sample]:
    """Run the agent and return its conversations as samples of one trajectory.

    The agent's return value is stored in `metadata["agent_result"]` of each.
    """
    endpoint = await _endpoint(args)
    context = RolloutContext.current()
    session = Session(sample=sample, sampling_params=dict(sampling_params), context=context)
    given = sample.clone().messages  # the agent may append its turns to the sample's own list
    endpoint.sessions[session.id] = session
    base_url = f"{endpoint.url}/sessions/{session.id}/v1"
    try:
        call = (
            on_hook_loop(agent(base_url, sample))
            if is_async(agent)
            else in_thread(agent, base_url, sample, num_threads=_MAX_BLOCKING_AGENTS)
        )
        result = await call
    except Exception:
        if session.error is None and not session.aborted:
            raise
        result = None  # the agent only reports that its request failed or was aborted
    finally:
        del endpoint.sessions[session.id]
        sample.messages = given
    if session.error is not None:
        raise session.error
    if session.aborted:
        # A conversation cannot be continued in the middle: it is restarted.
        sample.status = Status.ABORTED
        return [sample]
    if not session.segments:
        raise RuntimeError("the agent ended without a request to the model")
    samples = session.samples()
    tokenizer = load_tokenizer(args.hf_checkpoint)
    for one in samples:
        one.metadata["agent_result"] = result
        seen = one.tokens[: len(one.tokens) - one.response_length]
        one.metadata["rendered_prompt"] = str(tokenizer.decode(seen))
    return samples


class RecordingEndpoint:
    """The HTTP server of a run, on the main event loop, bound to loopback."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.sessions: dict[str, Session] = {}
        self.url = ""
        self._bodies = BodyReader(_LIMITS)
        self._server: GuardedServer | None = None

    async def start(self) -> RecordingEndpoint:
        app = web.Application(middlewares=[self._guard])
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        listener = socket.create_server((_HOST, 0), backlog=4096)
        self._server = GuardedServer(app, _LIMITS, cancel_with_client=False)
        await self._server.start(listener)
        self.url = f"http://{_HOST}:{listener.getsockname()[1]}"
        return self

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_browser(request, _HOST)
            check_media_type(request)
            return await handler(request)
        except Refused as refusal:
            return _refusal(ApiError(str(refusal), refusal.status))

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        session = self.sessions.get(http.match_info["session"])
        if session is None:
            return _refusal(ApiError("this session has ended", 404))
        try:
            body = _parse_json(await self._bodies.read(http))
            give_row_images(body, session.sample.image_files)
            request = parse_chat(body, images=bool(self.args.multimodal_keys))
            if request.images:
                await asyncio.to_thread(keep_images, request, session.images)
            if request.sampling.get("n", 1) != 1:
                raise ApiError("`n` above 1 is not supported: send several requests")
            if request.num_top_log_probs or request.sampling.keys() & {"json_schema", "regex"}:
                raise ApiError("`top_logprobs` and `response_format` are not supported here")
            answer, num_prompt = await self._answer(session, request)
        except ApiError as error:
            return _refusal(error)
        except (UserError, EngineRefusedError) as error:
            if isinstance(error, UserError):  # ends the run, however the agent handles the reply
                session.error = error
            return _refusal(ApiError(str(error)))
        name, model = f"chatcmpl-{secrets.token_hex(12)}", request.model or "policy"
        if request.stream:
            return await _stream(http, request, answer, name, model, num_prompt)
        return _json(replies.chat_reply(name, model, [answer], num_prompt))

    async def _models(self, http: web.Request) -> web.Response:
        data = [{"id": "policy", "object": "model", "created": 0, "owned_by": "slime"}]
        return _json({"object": "list", "data": data})

    async def _answer(self, session: Session, request: ChatRequest) -> tuple[Answer, int]:
        """Generate one answer and record it as a turn."""
        tokenizer = load_tokenizer(self.args.hf_checkpoint)
        kwargs = {**self.args.apply_chat_template_kwargs, **request.template_kwargs}
        place = session.find_segment(request.messages, request.tools)
        check_template_kwargs(tokenizer, request.template_kwargs)
        refuse_control_tokens(self.args.hf_checkpoint, request.template_kwargs)
        past = None if place is None else place[0].turns[place[1] - 1]
        if past is None and self.args.apply_chat_template:
            _refuse_rendered_prompt(session.sample.prompt, request.messages)
        if past is not None and past.output_ids[-1] in placeholders_of(self.args.hf_checkpoint):
            raise ApiError(
                "the last answer ends with the placeholder of an image, after which nothing can be generated",
                code="context_length_exceeded",
            )
        ids = await self._encode(session, past, request, kwargs)
        used = 0 if place is None else len(ids) - len(place[0].turns[0].prompt_ids)
        sample = await self._generate(session, request, ids, used)
        answer = _to_answer(tokenizer, sample, request)
        message = {"role": "assistant", "content": answer.message()["content"] or ""}
        if answer.calls:
            message["tool_calls"] = [call.to_json() for call in answer.calls]
        assert sample.rollout_log_probs is not None
        turn = Turn(
            messages=[*request.messages, message],
            tools=request.tools,
            prompt_ids=ids,
            output_ids=sample.tokens[len(ids) :],
            log_probs=sample.rollout_log_probs,
            weight_versions=sample.weight_versions,
            status=sample.status,
            text=sample.response,
        )
        session.record(place, turn)
        return answer, len(ids)

    async def _encode(
        self, session: Session, past: Turn | None, request: ChatRequest, kwargs: dict[str, Any]
    ) -> list[int]:
        """Return the token ids of the request; long texts and images are tokenized on a thread."""
        path = self.args.hf_checkpoint
        size = len(orjson.dumps([request.messages, request.tools]))
        new = request.messages[0 if past is None else len(past.messages) :]
        images = images_in(new, session.images)
        if size <= _INLINE_CHARS and not images:
            return _encode_turn(path, past, request, kwargs, [])
        return await asyncio.to_thread(_encode_turn, path, past, request, kwargs, images)

    async def _generate(
        self, session: Session, request: ChatRequest, ids: list[int], used: int
    ) -> Sample:
        """Generate one answer; `used` tokens after the segment's first prompt count towards the length limit."""
        params, limit = {**session.sampling_params}, session.sampling_params["max_new_tokens"]
        room = None if limit is None else limit - used
        wanted = [n for n in (room, request.max_tokens) if n is not None]
        params["max_new_tokens"] = min(wanted) if wanted else None
        if "stop" in request.sampling:
            params |= {"stop": request.sampling["stop"], "no_stop_trim": True}
        one = Sample(
            tokens=list(ids), index=session.sample.index, group_index=session.sample.group_index,
            session_id=session.id,
        )  # fmt: skip
        files = images_in(request.messages, session.images)
        limit = self.args.limit_mm_data_per_request.get("image")
        if limit is not None and len(files) > limit:
            raise ApiError(f"{len(files)} images; --limit-mm-data-per-request allows {limit}")
        one.multimodal_inputs = {"images": files} if files else None
        if room is None or room > 0:
            with session.context.active():
                one = await generate(self.args, one, params)
        if one.status == Status.ABORTED:
            session.aborted = True
            raise ApiError(
                "the rollout is ending: this conversation will be restarted", 503, "aborted"
            )
        if one.response_length == 0:
            raise ApiError(
                f"{len(ids)} tokens leave no room for an answer", code="context_length_exceeded"
            )
        return one


def _refuse_rendered_prompt(prompt: Any, messages: list[Message]) -> None:
    """Raise UserError if a message holds the prompt that --apply-chat-template has rendered already."""
    contents = [m["content"] for m in messages if m["role"] in ("user", "system", "developer")]
    texts = [
        text if isinstance(text, str) else "".join(str(part.get("text", "")) for part in text or ())
        for text in contents
    ]
    rendered = prompt.strip() if isinstance(prompt, str) else ""
    if rendered and any(rendered in text for text in texts):
        raise UserError(
            "the agent sends sample.prompt, which --apply-chat-template has rendered, in a message: the template would "
            "be applied twice. Send messages=sample.messages, which are never rendered"
        )


def _encode_turn(
    path: str,
    past: Turn | None,
    request: ChatRequest,
    kwargs: dict[str, Any],
    images: list[bytes],
) -> list[int]:
    """Return the token ids of the conversation; a continued one keeps the exact ids of its past.

    Text of a message never becomes a control token. `images` are those of the new messages.
    """
    tokenizer = load_tokenizer(path)

    def render(messages: list[Message], tools: Tools) -> str:
        if past is None:
            return render_chat(tokenizer, messages, tools, kwargs)
        text = render_after_answer(tokenizer, past.messages, messages, kwargs)
        end = str(tokenizer.decode([past.output_ids[-1]]))
        written = past.status == Status.COMPLETED and text.startswith(end)  # the model generated it
        return text[len(end) :] if written else text

    new = request.messages[0 if past is None else len(past.messages) :]
    ids = encode_messages(path, new, request.tools if past is None else [], render)
    if images:
        ids = load_image_processor(path).expand(ids, images)
    return ids if past is None else [*past.tokens, *ids]


def _to_answer(tokenizer: PreTrainedTokenizerBase, sample: Sample, request: ChatRequest) -> Answer:
    tokens = sample.tokens[-sample.response_length :]
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    stops = request.sampling.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop, 1)[0]
    text, calls = parse_tool_calls(text, secrets.token_hex(6)) if request.tools else (text, [])
    return Answer(
        text=text,
        finish="length" if sample.status == Status.TRUNCATED else "stop",
        num_tokens=len(tokens),
        calls=calls,
        log_probs=_log_probs(tokenizer, sample) if request.log_probs else None,
        weight_version=str(sample.weight_versions[-1]),
    )


def _log_probs(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[TokenLogProb]:
    assert sample.rollout_log_probs is not None
    tokens = sample.tokens[-sample.response_length :]
    return [
        TokenLogProb(token=str(tokenizer.decode([token])), log_prob=value)
        for token, value in zip(tokens, sample.rollout_log_probs, strict=True)
    ]


async def _stream(
    http: web.Request, request: ChatRequest, answer: Answer, name: str, model: str, num_prompt: int
) -> web.StreamResponse:
    """Send the finished answer in the chunks that a streaming client expects."""
    delta: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        delta["tool_calls"] = replies.tool_call_deltas(answer.calls)
    first = replies.chat_chunk(name, model, 0, delta)
    if answer.log_probs is not None:
        first["choices"][0]["logprobs"] = replies.chat_log_probs(answer.log_probs)
    chunks = [first, replies.chat_chunk(name, model, 0, {}, answer)]
    if request.include_usage:
        chunks.append(
            replies.usage_chunk(name, model, "chat.completion.chunk", num_prompt, [answer])
        )
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    for chunk in chunks:
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _endpoint(args: Args) -> RecordingEndpoint:
    """Start the endpoint on first use, in a separate task, which an abort of one sample does not cancel."""
    key = f"{args.hf_checkpoint} {args.rollout_max_context_len} {args.apply_chat_template_kwargs}"
    endpoints = RolloutContext.current().shared(RecordingEndpoint, _Endpoints)
    if key not in endpoints:
        endpoints[key] = asyncio.ensure_future(RecordingEndpoint(args).start())
    try:
        return await asyncio.shield(endpoints[key])
    except OSError:
        endpoints.pop(key, None)  # the next sample retries
        raise


def _parse_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from error


def _refusal(error: ApiError) -> web.Response:
    return _json(error.body(), error.status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
