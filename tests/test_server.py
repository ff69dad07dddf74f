"""The example server, asked by OpenAI's own client over a real socket."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from loop_model import EOS, LETTERS, VOCAB_SIZE, LoopModel, decode, usual_loop

for package, extra in [
    ("fastapi", "server"),
    ("uvicorn", "server"),
    ("prometheus_client", "server"),
    ("openai", "test"),
]:
    pytest.importorskip(package, reason=f"{package}, of the {extra} extra, is not installed")

import openai  # noqa: E402
import uvicorn  # noqa: E402

from graphed_sampling import (  # noqa: E402
    IncrementalDecoder,
    RequestTable,
    Sampler,
    SamplingParams,
    StepLoop,
)
from graphed_sampling.demo.server import JsonGrammars, Limits, make_app, make_server  # noqa: E402

MODEL = "letters"
PATIENCE = 4.0  # seconds: it takes one on an idle machine
CAPACITY = 64


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(
            "</s>" if i == EOS and not skip_special_tokens else LETTERS[i] for i in token_ids
        )


class Running:
    """A server in a thread, on a port that was free."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        grammars: Any = None,
        port: int = 0,
        drain_seconds: float = 0,
        max_waiting: int = 20,
    ) -> None:
        self.table = RequestTable(num_slots, VOCAB_SIZE, device="cpu", eos_token_ids=[EOS], seed=1)
        self.model = LoopModel(num_slots)
        self.loop = StepLoop(
            self.table,
            Sampler(self.table, "torch"),
            self.model,
            max_length=CAPACITY,
            max_waiting=max_waiting,
            new_decoder=lambda: IncrementalDecoder(decode),
        )
        app = make_app(
            self.loop,
            Letters(),
            model_name=MODEL,
            grammars=grammars,
            limits=Limits(body_bytes=20_000, choices=20, schema_bytes=2000),
        )
        self.server: uvicorn.Server = make_server(
            app, self.loop, host="127.0.0.1", port=port, drain_seconds=drain_seconds
        )
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.005)
        return self

    def __exit__(self, *error: object) -> None:
        self.model.gate.set()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30
        )

    def get(self, path: str) -> tuple[int, str]:
        response = self.client()._client.get(self.url + path)
        return response.status_code, response.text

    def post(self, body: bytes | Iterator[bytes]) -> tuple[int, Any]:
        response = self.client()._client.post(
            f"{self.url}/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        return response.status_code, response.json()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running() as running:
        yield running


def ids(text: str) -> list[int]:
    return Letters().encode(text, add_special_tokens=False)


def test_a_completion(server: Running) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt="hello", max_tokens=12, temperature=0.7, top_p=0.9, seed=5
    )
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=12)
    tokens, _, reason = usual_loop(ids("hello"), params)
    (choice,) = answer.choices
    assert choice.text == decode(tokens)
    assert choice.finish_reason == reason.name.lower() and choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(tokens))
    assert (answer.object, answer.model) == ("text_completion", MODEL)


def test_eight_concurrent_streams_with_logprobs(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        stream = await client.completions.create(
            model=MODEL,
            prompt=LETTERS[1 : 2 + number],
            max_tokens=20 + number,
            seed=number,
            logprobs=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_p": 0.01, "ignore_eos": True},
        )
        text, tokens, logprobs, tops, reasons, usages = "", [], [], [], [], []
        async for chunk in stream:
            if chunk.usage is not None:
                usages.append(chunk.usage.completion_tokens)
                continue
            (choice,) = chunk.choices
            text += choice.text
            reasons.append(choice.finish_reason)
            assert choice.logprobs is not None
            tokens += choice.logprobs.token_ids  # type: ignore[attr-defined]
            logprobs += choice.logprobs.token_logprobs or []
            tops += choice.logprobs.top_logprobs or []
        params = SamplingParams(
            seed=number, max_tokens=20 + number, logprobs=3, min_p=0.01, ignore_eos=True
        )
        expected, expected_logprobs, reason = usual_loop(ids(LETTERS[1 : 2 + number]), params)
        assert tokens == expected and text == decode(expected)
        assert logprobs == expected_logprobs, "not the library's, to the last bit"
        assert reasons == [None] * (len(expected) - 1) + [reason.name.lower()]
        assert all(len(top) == 3 for top in tops) and usages == [len(expected)]

    async def main() -> None:
        async with server.async_client() as client:
            await asyncio.gather(*(one(client, number) for number in range(8)))

    asyncio.run(main())


def test_n_and_several_prompts(server: Running) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt=["abc", "xyz"], n=2, seed=3, max_tokens=9
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    params = SamplingParams(seed=3, max_tokens=9)
    for number, prompt in enumerate(["abc", "xyz"]):
        for sample in range(2):
            own = params.child(2**32 + number).child(sample)
            tokens = usual_loop(ids(prompt), own)[0]
            assert answer.choices[2 * number + sample].text == decode(tokens)
    single = server.client().completions.create(model=MODEL, prompt=ids("abc"), n=3, seed=3)
    for sample, choice in enumerate(single.choices):
        tokens = usual_loop(ids("abc"), SamplingParams(seed=3, max_tokens=16).child(sample))[0]
        assert choice.text == decode(tokens)


def test_stop_strings(server: Running) -> None:
    whole = (
        server.client()
        .completions.create(
            model=MODEL, prompt="q", temperature=0, max_tokens=30, extra_body={"ignore_eos": True}
        )
        .choices[0]
        .text
    )
    stop = whole[9:11]
    answer = server.client().completions.create(
        model=MODEL,
        prompt="q",
        temperature=0,
        max_tokens=30,
        stop=[stop, "..."],
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_are_json_where_they_are_infinite(server: Running) -> None:
    answer = server.client().completions.create(
        model=MODEL,
        prompt="q",
        logprobs=2,
        max_tokens=3,
        temperature=0,
        extra_body={"logprobs_mode": "processed"},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs == [0.0] * len(logprobs.tokens or [])
    tops = [list(top.values()) for top in logprobs.top_logprobs or []]
    assert all(math.isfinite(value) for top in tops for value in top)
    assert logprobs.text_offset == list(range(len(logprobs.tokens or [])))


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": []}, "prompt", "at least one token"),
        ({"prompt": [[1], []]}, "prompt", "at least one token"),
        ({"prompt": 3}, "prompt", "prompt: "),
        ({"prompt": "a\ud800"}, "prompt", "prompt is no text"),
        ({"prompt": ["a", "\udc00"]}, "prompt", "prompt is no text"),
        ({"prompt": [VOCAB_SIZE]}, "prompt", f"holds the id {VOCAB_SIZE}"),
        ({"prompt": [1] * CAPACITY}, "prompt", "must fit into 64 tokens"),
        ({"max_tokens": CAPACITY}, "max_tokens", "must fit into 64 tokens"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens = 0 is not accepted"),
        ({"max_tokens": "many"}, "max_tokens", "max_tokens: "),
        ({"temperature": -1}, "temperature", "temperature = -1"),
        ({"top_p": 0}, "top_p", "top_p = 0"),
        ({"top_p": 2}, "top_p", "top_p = 2"),
        ({"n": 0}, "n", "n = 0"),
        ({"n": 21}, "n", "n = 21"),
        ({"n": True}, "n", "n: "),
        ({"prompt": ["a", "b"], "n": 11}, "n", "n = 11"),
        ({"best_of": 2}, "best_of", "best_of = 2"),
        ({"echo": True}, "echo", "echo: "),
        ({"logprobs": 21}, "logprobs", "logprobs = 21"),
        ({"logprobs": -1}, "logprobs", "logprobs = -1"),
        ({"stop": [""]}, "stop", "stop = "),
        ({"stop": list("abcdefghijklmnopq")}, "stop", "at most 16 strings"),
        ({"stop": 3}, "stop", "stop: "),
        ({"stop": ["a", "b" * 257]}, "stop", "at most 256 characters"),
        ({"seed": 2**64}, "seed", "seed = "),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty = 3"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: "),
        ({"logit_bias": {"99": 1}}, "logit_bias", "logit_bias holds the id 99"),
        ({"min_tokens": 17}, "max_tokens", "max_tokens = 16 is not accepted"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format: "),
        ({"response_format": {"type": "json_object"}}, "response_format", "no xgrammar"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "goes with stream"),
        ({"nonsense": 1}, "nonsense", "nonsense: "),
        ({"nonsense": None}, "nonsense", "nonsense: "),
        ({"prompt": None}, "prompt", "prompt: "),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_input_gets_400_with_the_field(
    server: Running, changes: dict[str, Any], field: str, message: str
) -> None:
    before = server.loop.totals.requests
    status, answer = server.post(json.dumps({"model": MODEL, "prompt": "ab"} | changes).encode())
    assert status == 400
    assert answer["error"]["param"] == field and message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert server.loop.totals.requests == before or server.loop.num_active == 0


def test_null_is_as_good_as_nothing(server: Running) -> None:
    names = ["temperature", "top_p", "n", "max_tokens", "stream", "echo", "frequency_penalty"]
    names += ["presence_penalty", "logit_bias", "model", "stop", "top_k", "stop_token_ids"]
    asked = {"prompt": "ab", "seed": 5}
    answers = [
        server.post(json.dumps(asked | dict.fromkeys(nulls)).encode()) for nulls in ([], names)
    ]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"] == answers[1][1]["choices"]


def test_a_body_that_is_not_said_to_be_json(server: Running) -> None:
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        response = server.client()._client.post(
            f"{server.url}/v1/completions", content=b'{"prompt": "ab"}', headers=headers
        )
        assert response.status_code == 415
        assert "Content-Type is" in response.json()["error"]["message"]
        assert "application/json" in response.json()["error"]["message"]


def test_other_refusals(server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        server.client().completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model=MODEL, prompt="a", top_p=7)
    assert caught.value.param == "top_p"
    for body, message in [
        (b"{", "the body is not JSON: "),
        (b"\xff", "parsing the body"),
        (b"[]", "body: "),
        (b"", "body: "),
    ]:
        status, answer = server.post(body)
        assert (status, answer["error"]["param"]) == (400, None)
        assert answer["error"]["message"].startswith(message) or body == b"\xff"
        assert message in answer["error"]["message"]
    for path, expected in [("/nowhere", 404), ("/v1/completions", 405)]:
        status, text = server.get(path)
        assert status == expected and json.loads(text)["error"]["param"] is None
    status, answer = server.post(b'{"prompt": "' + b"a" * 20_000 + b'"}')
    assert status == 413 and "more than 20000 bytes" in answer["error"]["message"]
    status, answer = server.post(iter([b'{"prompt": "'] + [b"a" * 1000] * 30 + [b'"}']))
    assert status == 413
    status, answer = server.post(iter([b'{"prompt": ', b'"abc", "max_tokens": 1}']))
    assert status == 200 and answer["usage"]["prompt_tokens"] == 3


def test_health_models_metrics(server: Running) -> None:
    server.client().completions.create(model=MODEL, prompt="ab", max_tokens=2)
    assert server.get("/health") == (200, '{"status":"ok"}')
    assert [model.id for model in server.client().models.list()] == [MODEL]
    assert server.client().models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'some/model' is not served here") as caught:
        server.client().models.retrieve("some/model")
    assert caught.value.param == "model"
    status, text = server.get("/metrics")
    assert status == 200
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    prefix = "graphed_sampling_"
    assert float(values[f"{prefix}step_seconds_count"]) == server.loop.totals.steps > 0
    assert float(values[f"{prefix}tokens_total"]) == server.loop.totals.tokens > 0
    for name in ("step_seconds_sum", "gpu_idle_seconds_total", "queue", "active"):
        assert float(values[prefix + name]) >= 0
    assert float(values[f'{prefix}loop_lag_seconds{{quantile="0.99"}}']) > 0


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_client_that_goes_away_frees_its_slots() -> None:
    with Running(num_slots=2) as server:
        client = server.client()
        server.model.gate.clear()  # no step ends
        stream = client.completions.create(
            model=MODEL, prompt="ab", max_tokens=60, stream=True, n=2
        )
        until(lambda: server.loop.num_active == 2)
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).completions.create(
                model=MODEL, prompt="ab", max_tokens=60
            )
        until(lambda: server.loop.totals.cancelled == 2)
        server.model.gate.set()
        until(lambda: server.table.num_free_slots == 2 and server.loop.num_waiting == 0)


def test_a_full_queue_gets_429() -> None:
    with Running(num_slots=1) as server:
        client = server.client()
        server.model.gate.clear()
        streams = [
            client.completions.create(model=MODEL, prompt="ab", max_tokens=5, stream=True, n=n)
            for n in (1, 19)
        ]
        with pytest.raises(openai.RateLimitError, match="would wait for a slot"):
            client.completions.create(model=MODEL, prompt="ab", n=3)
        server.model.gate.set()
        for stream in streams:
            assert list(stream)


def test_more_samples_than_the_server_ever_holds_get_400() -> None:
    with Running(num_slots=1, max_waiting=2) as server:
        create = server.client().completions.create
        for options in ({"prompt": "ab", "n": 4}, {"prompt": ["a", "b"], "n": 2}):
            with pytest.raises(openai.BadRequestError, match="at most 3") as caught:
                create(model=MODEL, **options)  # type: ignore[call-overload]
            assert caught.value.param == "n"
        assert len(create(model=MODEL, prompt="ab", n=3, max_tokens=2).choices) == 3


def test_a_failed_loop_is_unwell_and_says_so() -> None:
    with Running() as server:
        server.model.fail_at = 2
        with pytest.raises(openai.APIError, match="device-side assert"):
            list(server.client().completions.create(model=MODEL, prompt="ab", stream=True))
        with pytest.raises(openai.InternalServerError, match="device-side assert") as caught:
            server.client().completions.create(model=MODEL, prompt="ab")
        assert caught.value.status_code == 503
        assert server.get("/health")[0] == 503


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "held NaN"), (-math.inf, "no token was left")]
)
@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"]], ids=["one", "two"])
def test_rows_that_are_none_are_no_answers(value: float, message: str, prompt: Any) -> None:
    with Running() as server:
        server.model.logits[:] = value
        create = server.client().completions.create
        with pytest.raises(openai.InternalServerError, match=message) as caught:
            create(model=MODEL, prompt=prompt)
        assert caught.value.status_code == 500
        chunks = []
        with pytest.raises(openai.APIError, match=message):
            for chunk in create(model=MODEL, prompt=prompt, stream=True):
                chunks.append(chunk)
        assert chunks == []
        until(lambda: server.table.num_free_slots == 4)
        server.model.logits[:] = 0
        assert create(model=MODEL, prompt="ab").choices


class Grammars:
    """Of one grammar, its own matcher: it allows anything, and then may refuse what was drawn."""

    def __init__(self, accepts: bool) -> None:
        self._accepts = accepts

    async def compile(self, schema: object) -> Any:
        return lambda: self

    def accept_token(self, token_id: int, /) -> bool:
        return self._accepts

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0, /) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False


@pytest.mark.parametrize("wrong", ["row", "grammar", "decoder"])
def test_what_goes_wrong_with_one_request_is_no_failure_of_the_loop(wrong: str) -> None:
    class Broken:
        def push(self, token_id: int) -> str:
            raise ValueError("no such token in the decoder")

        def flush(self) -> str:
            return ""

    messages = {
        "row": "no token was left to draw",
        "grammar": "the grammar does not allow",
        "decoder": "no such token in the decoder",
    }
    with Running(grammars=Grammars(accepts=wrong != "grammar")) as server:
        if wrong == "row":
            server.model.logits[:] = -math.inf
        if wrong == "decoder":
            server.loop._new_decoder = Broken
        asked = {"prompt": "ab", "response_format": {"type": "json_object"}}
        status, answer = server.post(json.dumps(asked).encode())
        assert status == 500 and messages[wrong] in answer["error"]["message"]
        assert server.get("/health")[0] == 200


def test_a_json_schema() -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar, of the grammar extra, is missing")
    vocabulary = ["</s>", '{"', '":', "}", '"', ",", ":", "age", *"0123456789", " ", *LETTERS]
    info = xgrammar.TokenizerInfo(
        vocabulary[:VOCAB_SIZE], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS]
    )
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["age"],
        "additionalProperties": False,
    }
    with Running(grammars=JsonGrammars(info, VOCAB_SIZE)) as server:
        create = server.client().completions.create
        for seed in range(4):
            answer = create(
                model=MODEL,
                prompt="ab",
                max_tokens=40,
                seed=seed,
                logprobs=0,
                extra_body={
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "person", "schema": schema},
                    }
                },
            )
            (choice,) = answer.choices
            assert choice.logprobs is not None and choice.finish_reason == "stop"
            token_ids = choice.logprobs.token_ids  # type: ignore[attr-defined]
            value = json.loads("".join(vocabulary[i] for i in token_ids if i != EOS))
            assert set(value) == {"age"} and 0 <= value["age"] <= 999
        for bad, message in [
            ({"type": "json_schema"}, "goes with type 'json_schema'"),
            ({"type": "json_object", "json_schema": {"schema": {}}}, "goes with type"),
            ({"type": "json_schema", "json_schema": {"schema": {"type": 7}}}, "not accepted"),
            ({"type": "json_schema", "json_schema": {"schema": {"x": "y" * 3000}}}, "2000 bytes"),
        ]:
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                create(model=MODEL, prompt="ab", extra_body={"response_format": bad})
            assert caught.value.param == "response_format"


def test_a_server_that_ends_lets_requests_end_and_takes_no_more() -> None:
    with Running(drain_seconds=20) as server:
        client = server.client()
        server.model.gate.clear()
        params = SamplingParams(seed=1, max_tokens=20)
        stream = client.completions.create(
            model=MODEL, prompt="ab", seed=1, max_tokens=20, stream=True
        )
        server.server.should_exit = True
        until(lambda: server.loop._draining)
        with pytest.raises(openai.InternalServerError, match="takes no more requests") as caught:
            client.completions.create(model=MODEL, prompt="ab")
        assert caught.value.status_code == 503
        status, answer = server.get("/health")
        assert status == 503 and "takes no more requests" in answer
        server.model.gate.set()
        text = "".join(chunk.choices[0].text for chunk in stream)
        assert text == decode(usual_loop(ids("ab"), params)[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_signal_ends_the_server_soon(number: int) -> None:
    program = """
        import sys
        from test_server import *

        class Slow(LoopModel):
            def __call__(self, batch):
                time.sleep(0.02)
                return super().__call__(batch)

        running = Running(port=int(sys.argv[1]))
        running.loop._forward = Slow(4)
        running.server.run()
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(port)],
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parent,
    )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=100)
    stream = client.completions.create(
        model=MODEL, prompt="ab", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    begun = time.monotonic()
    process.send_signal(number)
    with pytest.raises(openai.APIError, match="the loop was closed"):
        list(stream)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - begun < PATIENCE
    assert number == signal.SIGINT or not errors


def test_a_second_signal_ends_the_draining() -> None:
    program = """
        from test_server import *

        running = Running(drain_seconds=1000)
        running.loop.max_length = None
        print(running.url, flush=True)
        running.server.run([running.socket])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=100)
    stream = client.completions.create(
        model=MODEL, prompt="ab", max_tokens=20_000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    process.send_signal(signal.SIGTERM)
    until(lambda: client._client.get(f"{url}/health").status_code == 503)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="the loop was closed"):
        list(stream)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - begun < PATIENCE and not errors


def test_a_server_says_where_it_listens_once_it_does() -> None:
    running = Running()
    running.socket.close()
    answers: list[int] = []

    def ask(port: int) -> None:
        assert port > 0 and running.server.started
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            answers.append(port)
        running.server.should_exit = True

    running.server._on_listening = ask  # type: ignore[attr-defined]
    running.server.run()
    assert len(answers) == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = Running(port=taken.getsockname()[1])
        other.socket.close()
        other.server._on_listening = ask  # type: ignore[attr-defined]
        with pytest.raises(SystemExit):
            other.server.run()
    assert len(answers) == 1
