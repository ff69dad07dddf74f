"""An example server: OpenAI's `/v1/completions` over a `StepLoop`.

    POST /v1/completions   streaming or not; the parameters of OpenAI and those of `SamplingParams`
    GET  /v1/models        the one model; /v1/models/NAME too
    GET  /health           503 once the loop has failed, or takes no more requests
    GET  /metrics          for Prometheus

What is not accepted gets 400 with the field in `param`, a body that is too large 413, one that is
not said to be JSON 415, and a full queue 429. A client that goes away frees its slots.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, Final, Literal, Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from graphed_sampling import (
    Delta,
    DeltaStream,
    FinishReason,
    LagProbe,
    Matcher,
    QueueFullError,
    RowFlags,
    SamplingParams,
    StepLoop,
    StepLoopError,
)
from graphed_sampling.step.requests import message_of

Grammar = Callable[[], Matcher]
_LOWEST_LOGPROB: Final = -9999.0  # JSON has no infinities; it is what OpenAI's answers say


class Tokenizer(Protocol):
    """What is needed of a tokenizer of transformers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Limits:
    """Of one request; how many may wait is the loop's `max_waiting`."""

    body_bytes: int = 2**20
    choices: int = 64
    """Prompts times n."""
    schema_bytes: int = 2**16
    stop_length: int = 256
    """Characters of a stop string; the loop's own limit is higher."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema; its name and description say nothing to a sampler."""

    model_config = ConfigDict(extra="forbid")
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CompletionRequest(BaseModel):
    """OpenAI's fields, then those of `SamplingParams` under their own names.

    Values are checked where they are used: here only their types are. A null is as good as nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = 16
    n: int = 1
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: Literal[False] = False
    stop: str | list[str] | None = None
    suffix: None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Annotated[int, Field(strict=False)], float] = {}  # JSON's keys are strings

    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    bad_words_ids: list[list[int]] = []
    allowed_token_ids: list[int] | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {k: v for k, v in body.items() if v is not None or k not in cls.model_fields}


_NO_PARAMS: Final = {
    *("model", "prompt", "n", "best_of", "stream", "stream_options", "echo", "stop", "suffix"),
    *("user", "response_format"),
}


class FieldError(Exception):
    """A request that is not accepted; becomes an answer of OpenAI's form."""

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


class RowError(Exception):
    """A token was drawn from a row that is none: the answer means nothing from there on."""


def _checked(delta: Delta) -> Delta:
    if delta.flags & RowFlags.NAN:
        raise RowError("the model's logits held NaN")
    if delta.flags & RowFlags.EMPTY:
        raise RowError("no token was left to draw: parameters and logits together allow none")
    return delta


class JsonGrammars:
    """Grammars of JSON schemas by xgrammar; each schema is compiled once, in a thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """ModuleNotFoundError where xgrammar is not installed."""
        import xgrammar

        self._xgrammar = xgrammar
        if not isinstance(tokenizer, xgrammar.TokenizerInfo):
            tokenizer = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(tokenizer, cache_limit_bytes=2**28)

    async def compile(self, schema: dict[str, Any] | None) -> Grammar:
        """schema: None is any JSON. ValueError for what is no schema."""

        def work() -> Any:
            try:
                if schema is None:
                    return self._compiler.compile_builtin_json_grammar()
                # Compact: small models dwell on white space.
                return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
            except RuntimeError as error:
                raise ValueError(f"the schema is not accepted: {error}") from error

        compiled = await asyncio.to_thread(work)
        return lambda: self._xgrammar.GrammarMatcher(compiled)


def make_app(
    loop: StepLoop,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    grammars: JsonGrammars | None = None,
    limits: Limits = Limits(),
    probe: LagProbe | None = None,
) -> FastAPI:
    """The application. It closes `loop` when it shuts down.

    grammars: None refuses `response_format`. probe: measures the lag that /metrics shows.
    """
    probe = probe or LagProbe(every=0.01, limit=6000)
    registry = CollectorRegistry()
    registry.register(LoopCollector(loop, probe))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        probe.start()
        async with loop:
            yield
        probe.stop()

    app = FastAPI(title="graphed-sampling", lifespan=lifespan)
    app.add_middleware(_LimitBody, limit=limits.body_bytes)
    service = _Service(loop, tokenizer, model_name, grammars, limits)

    @app.exception_handler(RequestValidationError)
    async def wrong_type(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            reason = first.get("ctx", {}).get("error", first["msg"])
            return _error(400, f"the body is not JSON: {reason}", None)
        if isinstance(error.body, bytes):  # by its header it is something else
            said = request.headers.get("content-type")
            return _error(415, f"Content-Type is {said!r}: it must be application/json", None)
        # ("body", "stop", "list[str]", 0): the field, without the branches of its union.
        names = [str(part) for part in first["loc"][1:2]]
        return _error(
            400, f"{'.'.join(names) or 'body'}: {first['msg']}", names[0] if names else None
        )

    @app.exception_handler(HTTPException)
    async def of_the_framework(_request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), None)

    @app.exception_handler(FieldError)
    async def not_accepted(_request: Request, error: FieldError) -> JSONResponse:
        return _error(error.status, str(error), error.field)

    @app.exception_handler(StepLoopError)
    async def failed(_request: Request, error: StepLoopError) -> JSONResponse:
        # What went wrong with one request is its cause; else it is the loop that serves no one.
        cause = error.__cause__
        of_loop = cause in (None, loop.failure) or isinstance(cause, StepLoopError)
        return _error(503 if of_loop else 500, str(error), None)

    @app.exception_handler(RowError)
    async def no_row(_request: Request, error: RowError) -> JSONResponse:
        return _error(500, str(error), None)

    @app.get("/health")
    async def health() -> Response:
        failure = loop.failure
        if failure is not None:
            return _error(503, f"the loop has failed: {message_of(failure)}", None)
        if not loop.is_open:
            return _error(503, "the loop takes no more requests", None)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    model = {"id": model_name, "object": "model", "created": 0, "owned_by": "graphed-sampling"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        streams, usage = await service.begin(body)
        if body.stream:
            options = body.stream_options or StreamOptions()
            events = service.events(body, streams, usage, options.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        answer = asyncio.ensure_future(service.whole(body, streams, usage))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=499)  # which nobody reads
            return JSONResponse(answer.result())
        finally:
            gone.cancel()
            answer.cancel()
            for stream in streams:
                await stream.aclose()

    return app


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str, field: str | None) -> JSONResponse:
    kind = "invalid_request_error" if status < 429 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    error = {"message": message, "type": kind, "param": field, "code": None}
    return JSONResponse({"error": error}, status_code=status)


@dataclass
class _Usage:
    prompt_tokens: int
    completion_tokens: int = 0

    def as_json(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


class _Service:
    """Requests of HTTP to requests of the loop, and deltas to JSON."""

    def __init__(
        self,
        loop: StepLoop,
        tokenizer: Tokenizer,
        model_name: str,
        grammars: JsonGrammars | None,
        limits: Limits,
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._grammars = grammars
        self._limits = limits

    def check_model(self, name: str) -> None:
        if name != self._model_name:
            raise FieldError("model", f"model {name!r} is not served here", 404)

    async def begin(self, body: CompletionRequest) -> tuple[list[DeltaStream], _Usage]:
        """The streams of all prompts; FieldError, with nothing queued, for what is not accepted."""
        if body.model is not None:
            self.check_model(body.model)
        prompts = self._prompts(body.prompt)
        most = self._limits.choices
        if not 1 <= body.n <= most or len(prompts) * body.n > most:
            raise FieldError("n", f"n = {body.n}: prompts times n must be in [1, {most}]")
        if len(prompts) * body.n > self._loop.max_samples:
            most = self._loop.max_samples
            raise FieldError("n", f"n = {body.n}: prompts times n: the server holds at most {most}")
        if body.best_of not in (None, body.n):
            raise FieldError("best_of", f"best_of = {body.best_of} is not accepted: it must be n")
        if body.stream_options is not None and not body.stream:
            raise FieldError("stream_options", "stream_options goes with stream = true")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        longest_stop = self._limits.stop_length
        if any(len(stop) > longest_stop for stop in stops):
            raise FieldError("stop", f"stop: a stop string has at most {longest_stop} characters")
        capacity = self._loop.max_length
        longest = max(map(len, prompts))
        if capacity is not None and longest + max(body.max_tokens, 1) > capacity:
            field = "prompt" if longest >= capacity else "max_tokens"
            raise FieldError(
                field,
                f"{field}: prompt and answer must fit into {capacity} tokens; the prompt has "
                f"{longest}, max_tokens is {body.max_tokens}",
            )
        asked = body.model_dump(exclude=_NO_PARAMS, exclude_unset=True)
        asked["max_tokens"] = body.max_tokens
        grammar = await self._grammar(body.response_format)
        streams: list[DeltaStream] = []
        try:
            params = SamplingParams(**asked)
            for number, prompt in enumerate(prompts):
                own = params if len(prompts) == 1 else params.child(2**32 + number)
                streams.append(
                    self._loop.generate(
                        prompt, own, n=body.n, stop=body.stop or (), grammar=grammar
                    )
                )
        except BaseException as error:
            for stream in streams:
                await stream.aclose()
            if isinstance(error, ValueError):
                raise FieldError(_field_of(error), str(error)) from error
            if isinstance(error, QueueFullError):
                raise FieldError(None, str(error), 429) from error
            raise
        return streams, _Usage(sum(map(len, prompts)))

    def _prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        several: list[Any] = [prompt] if isinstance(prompt, str) else [*prompt]
        if several and isinstance(several[0], int):
            several = [several]
        prompts: list[list[int]] = [self._encode(p) if isinstance(p, str) else p for p in several]
        if not prompts or not all(prompts):
            raise FieldError("prompt", "prompt must hold at least one token")
        return prompts

    def _encode(self, prompt: str) -> list[int]:
        try:
            prompt.encode()  # JSON can spell halves of characters, which tokenizers choke on
        except UnicodeEncodeError as error:
            raise FieldError("prompt", f"prompt is no text: {error}") from error
        return self._tokenizer.encode(prompt, add_special_tokens=False)

    async def _grammar(self, wanted: ResponseFormat | None) -> Grammar | None:
        if wanted is None or wanted.type == "text":
            return None
        field = "response_format"
        if self._grammars is None:
            raise FieldError(field, f"{field}: this server has no xgrammar")
        if (wanted.json_schema is None) == (wanted.type == "json_schema"):
            raise FieldError(field, f"{field}: json_schema goes with type 'json_schema'")
        schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
        if len(json.dumps(schema)) > self._limits.schema_bytes:
            most = self._limits.schema_bytes
            raise FieldError(field, f"{field}: a schema has at most {most} bytes")
        try:
            return await self._grammars.compile(schema)
        except ValueError as error:
            raise FieldError(field, f"{field}: {error}") from error

    async def events(
        self, body: CompletionRequest, streams: list[DeltaStream], usage: _Usage, tell_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events; whoever stops reading them cancels the request."""
        writer = _Writer(self._tokenizer, body, self._model_name)
        try:
            async for index, delta in _merged(streams, body.n):
                usage.completion_tokens += len(delta.token_ids)
                yield f"data: {json.dumps(writer.chunk(index, delta))}\n\n"
            if tell_usage:
                last = writer.envelope([]) | {"usage": usage.as_json()}
                yield f"data: {json.dumps(last)}\n\n"
            yield "data: [DONE]\n\n"
        except (StepLoopError, RowError) as error:
            wrong = {"message": str(error), "type": "server_error", "param": None, "code": None}
            yield f"data: {json.dumps({'error': wrong})}\n\n"
        finally:
            for stream in streams:
                await stream.aclose()

    async def whole(
        self, body: CompletionRequest, streams: list[DeltaStream], usage: _Usage
    ) -> dict[str, Any]:
        writer = _Writer(self._tokenizer, body, self._model_name)
        choices: dict[int, dict[str, Any]] = {}
        async for index, delta in _merged(streams, body.n):
            usage.completion_tokens += len(delta.token_ids)
            (piece,) = writer.chunk(index, delta)["choices"]
            choice = choices.setdefault(index, piece)
            if choice is piece:
                continue
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                for name, values in piece["logprobs"].items():
                    choice["logprobs"][name] += values
        answer = writer.envelope([choices[index] for index in sorted(choices)])
        return answer | {"usage": usage.as_json()}


async def _merged(streams: list[DeltaStream], n: int) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all prompts as they come, with the index of their choice."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield delta.sample, _checked(delta)
        return
    waiting: dict[asyncio.Task[Delta], int] = {}

    def ask(number: int) -> None:
        waiting[asyncio.ensure_future(_next(streams[number]))] = number

    try:
        for number in range(len(streams)):
            ask(number)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    delta = task.result()
                except EOFError:
                    continue
                ask(number)
                yield number * n + delta.sample, _checked(delta)
    finally:
        for task in waiting:
            task.cancel()


async def _next(stream: DeltaStream) -> Delta:
    async for delta in stream:
        return delta
    raise EOFError  # a task cannot end with StopAsyncIteration


class _Writer:
    """One answer's JSON."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._logprobs = body.logprobs
        self._envelope = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._offsets: dict[int, int] = {}

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope | {"choices": choices}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs_of(index, delta) if self._logprobs is not None else None
        self._offsets[index] = self._offsets.get(index, 0) + len(delta.text)
        reason = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": reason.get(delta.finish_reason),
        }
        return self.envelope([choice])

    def _logprobs_of(self, index: int, delta: Delta) -> dict[str, Any]:
        """OpenAI's form, and the ids: tokens that look alike are one in a dictionary by text."""
        offset = self._offsets.get(index, 0)
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        result |= {"text_offset": [], "token_ids": [], "top_token_ids": []}
        for token in delta.logprobs:
            top: dict[str, float] = {}
            for token_id, logprob in token.top:
                if token_id >= 0:
                    top.setdefault(self._name(token_id), _finite(logprob))
            result["tokens"].append(self._name(token.token_id))
            result["token_logprobs"].append(_finite(token.logprob))
            result["top_logprobs"].append(top)
            result["text_offset"].append(offset)
            result["token_ids"].append(token.token_id)
            result["top_token_ids"].append([token_id for token_id, _ in token.top])
        return result

    def _name(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def _field_of(error: ValueError) -> str | None:
    """The field that a message of `SamplingParams` or of the table begins with."""
    match = re.match(r"(\w+)", str(error))
    name = match.group(1) if match else None
    name = {"prompt_token_ids": "prompt"}.get(name or "", name)
    return name if name in CompletionRequest.model_fields else None


class _Server(uvicorn.Server):
    """Lets requests end, or ends them, before uvicorn waits for their connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        loop: StepLoop,
        drain_seconds: float,
        on_listening: Callable[[int], None] | None,
    ) -> None:
        super().__init__(config)
        self._loop = loop
        self._drain_seconds = drain_seconds
        self._on_listening = on_listening
        self._hurry = asyncio.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # it is not the first signal
            if self._event_loop is None:
                self._hurry.set()
            else:
                self._event_loop.call_soon_threadsafe(self._hurry.set)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_listening is not None:
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        ends = [
            asyncio.ensure_future(self._loop.drain()),
            asyncio.ensure_future(self._hurry.wait()),
        ]
        await asyncio.wait(ends, timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await self._loop.aclose()
        await super().shutdown(sockets)


def make_server(
    app: FastAPI,
    loop: StepLoop,
    *,
    host: str,
    port: int,
    drain_seconds: float,
    on_listening: Callable[[int], None] | None = None,
) -> uvicorn.Server:
    """A server that, told to end, takes no more requests and gives those that it has
    `drain_seconds`; a second signal ends them.

    on_listening: is called with the port, once clients can connect.
    """
    # What is left of an answer after its request has ended is written within a second, or dropped.
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1
    )
    return _Server(config, loop, drain_seconds, on_listening)


Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class _LimitBody:
    """Answers 413 to bodies above the limit, before they are read into memory."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]], limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _error(413, f"the body has more than {self._limit} bytes", None)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._limit:
            await answer(scope, receive, send)
            return
        # In pieces, no length is declared: they are counted, up to the limit.
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client is gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                await answer(scope, receive, send)
                return
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Any:
            return next(whole, None) or await receive()

        await self._app(scope, replay, send)


class LoopCollector(Collector):
    """A loop's totals for Prometheus."""

    def __init__(self, loop: StepLoop, probe: LagProbe) -> None:
        self._loop = loop
        self._probe = probe

    def collect(self) -> Iterator[Any]:
        loop, totals = self._loop, self._loop.totals
        yield SummaryMetricFamily(
            "graphed_sampling_step_seconds",
            "Time of steps on the device",
            count_value=totals.steps,
            sum_value=totals.gpu_seconds,
        )
        for name, text, value in [
            ("gpu_idle_seconds", "The device's time between steps", totals.gpu_idle_seconds),
            ("tokens", "Tokens given to callers", totals.tokens),
            ("rows", "Row-steps, wasted ones included", totals.rows),
            ("requests", "Requests taken", totals.requests),
            ("cancelled", "Requests cancelled", totals.cancelled),
        ]:
            yield CounterMetricFamily(f"graphed_sampling_{name}", text, value=value)
        for name, text, value in [
            ("queue", "Samples that wait for a slot", loop.num_waiting),
            ("active", "Samples that have a slot", loop.num_active),
        ]:
            yield GaugeMetricFamily(f"graphed_sampling_{name}", text, value=value)
        lag = GaugeMetricFamily(
            "graphed_sampling_loop_lag_seconds", "Of the newest answers", labels=["quantile"]
        )
        for quantile in (0.5, 0.99):
            lag.add_metric([str(quantile)], self._probe.quantile(quantile))
        yield lag
