"""The example server over the demo's model: from the model file to the open port."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from dataclasses import dataclass

import uvicorn

from graphed_sampling.demo import model as demo_model
from graphed_sampling.demo import screen
from graphed_sampling.demo.engine import Engine
from graphed_sampling.demo.model import SlottedModel, StreamDecoder
from graphed_sampling.demo.run import allocation_of, check_sizes, pick_backend, pick_device
from graphed_sampling.demo.server import JsonGrammars, make_app, make_server

MODEL_NAME = "smollm2-135m-instruct"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the command line says; `max_waiting`, `depth` are the `StepLoop`'s."""

    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 8
    max_length: int = 1024
    max_waiting: int = 64
    depth: int = 1
    drain_seconds: int = 0
    device: str = "auto"
    backend: str = "auto"
    seed: int | None = None


def serve_model(options: ServerOptions) -> None:
    """Serve until a signal comes. Errors as `run_demo`."""
    server = load_server(options)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again when all is over
        server.run()


def load_server(options: ServerOptions) -> uvicorn.Server:
    """The server over the demo's model; `response_format` where xgrammar is installed. It says
    where it listens once it does."""
    device = pick_device(options.device)
    backend = pick_backend(options.backend, device)
    console = screen.new_console(plain=True)
    path = demo_model.find_model()
    with screen.stage("Reading SmolLM2-135M-Instruct", console, plain=True):
        tokenizer = demo_model.load_tokenizer(path)
        config = demo_model.load_config(path)
        check_sizes(config, device, options.slots, options.max_length)
        network = demo_model.load_network(path, config, device)
    with allocation_of(options.slots):
        model = SlottedModel(network, num_slots=options.slots, capacity=options.max_length)
    with screen.stage("Preparing the sampler", console, plain=True), allocation_of(options.slots):
        engine = Engine(
            model,
            num_slots=options.slots,
            eos_token_ids=[tokenizer.eos_token_id],
            backend=backend,
            seed=options.seed,
            depth=options.depth,
            max_waiting=options.max_waiting,
            new_decoder=lambda: StreamDecoder(tokenizer),
        )
    host = f"[{options.host}]" if ":" in options.host else options.host
    grammars = None
    if importlib.util.find_spec("xgrammar") is not None:
        grammars = JsonGrammars(tokenizer, model.vocab_size)
    app = make_app(engine.loop, tokenizer, model_name=MODEL_NAME, grammars=grammars)
    return make_server(
        app,
        engine.loop,
        host=options.host,
        port=options.port,
        drain_seconds=options.drain_seconds,
        on_listening=lambda port: print(f"Listening at http://{host}:{port}/v1", flush=True),
    )
