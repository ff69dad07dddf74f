"""The demo from the model file to the closing table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from graphed_sampling import SamplingParams, backends
from graphed_sampling.demo import screen
from graphed_sampling.demo.engine import Engine, Generation, Request
from graphed_sampling.demo.model import (
    SlottedModel,
    cache_bytes,
    check_capacity,
    find_model,
    load_config,
    load_network,
    load_tokenizer,
)
from graphed_sampling.demo.prompts import builtin_requests, make_request


class OptionError(Exception):
    """An option asks for what cannot be had here."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says.

    prompts: instead of the built-in ones; all of them with `params`. device: "auto" is the GPU
    where there is one. seed: of the requests whose parameters bring none.
    """

    prompts: Sequence[str] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 64
    seed: int = 0
    slots: int = 8
    device: str = "auto"
    backend: str = "auto"
    plain: bool = False


def run_demo(options: Options) -> list[Generation]:
    """Answer all prompts; the result is in the order in which they were given.

    ModelMissingError without the package that carries the model; OptionError for a device or a
    backend that is not there, for prompts that are too long and for more slots than memory has.
    """
    device = pick_device(options.device)
    backend = pick_backend(options.backend, device)
    plain = options.plain
    console = screen.new_console(plain=plain)
    began = time.perf_counter()
    path = find_model()
    with screen.stage("Reading SmolLM2-135M-Instruct: the tokenizer", console, plain=plain):
        tokenizer = load_tokenizer(path)
        config = load_config(path)
    requests = _requests(tokenizer, options)
    requests = _leave_out_refused(requests, backend, device, console)
    capacity = max((request.max_length for request in requests), default=1)
    check_sizes(config, device, options.slots, capacity)
    text = "Reading SmolLM2-135M-Instruct: the weights, which takes about half a minute"
    with screen.stage(text, console, plain=plain):
        network = load_network(path, config, device)
    with allocation_of(options.slots):
        model = SlottedModel(network, num_slots=options.slots, capacity=capacity)
    text = "Preparing the sampler"
    if backend in ("cpu", "triton", "flashinfer"):
        text += ", which may compile for about a minute the first time"
    with screen.stage(text, console, plain=plain), allocation_of(options.slots):
        engine = Engine(
            model,
            num_slots=options.slots,
            eos_token_ids=[tokenizer.eos_token_id],
            backend=backend,
            seed=options.seed,
        )
    console.print(
        f"Ready after {time.perf_counter() - began:.1f} s: {len(requests)} requests for "
        f"{options.slots} slots, model on {device}, sampler backend {backend}\n",
        soft_wrap=True,
    )
    began = time.perf_counter()
    generations = _answer(requests, engine, tokenizer, console, plain=plain)
    seconds = time.perf_counter() - began
    screen.print_summary(console, generations)
    screen.print_totals(console, engine, len(generations), seconds)
    return generations


def _answer(
    requests: Sequence[Request],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    *,
    plain: bool,
) -> list[Generation]:
    with screen.Screen(tokenizer, console, plain=plain) as display:

        async def watch() -> None:
            while True:
                display.show_running(engine)
                await asyncio.sleep(1 / screen.REFRESHES_PER_SECOND)

        async def answer() -> list[Generation]:
            watching = asyncio.create_task(watch())
            generations = await engine.answer(requests, display.show_answer)
            watching.cancel()
            return generations

        return asyncio.run(answer())


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("device 'cuda' is not there: torch sees no GPU")
    if name not in ("cuda", "cpu"):
        raise OptionError(f"device {name!r} is not known: auto, cpu or cuda")
    return torch.device(name)


def pick_backend(name: str, device: torch.device) -> str:
    try:
        return backends.resolve(name, device)
    except ValueError as error:
        raise OptionError(str(error)) from error


def check_sizes(config: PreTrainedConfig, device: torch.device, slots: int, capacity: int) -> None:
    """Before the weights are read, which takes longer than anyone waits for an error."""
    try:
        check_capacity(config, capacity)
    except ValueError as error:
        raise OptionError(str(error)) from error
    needed = cache_bytes(config, device, num_slots=slots, capacity=capacity)
    there = _free_memory(device)
    if there is not None and needed > there:
        raise OptionError(
            f"--slots {slots} needs {needed:,} bytes for its cache of {capacity} tokens a slot; "
            f"{device} has {there:,} bytes free"
        )


def _free_memory(device: torch.device) -> int | None:
    """In bytes; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kibibytes = dict(line.split(":", 1) for line in lines)["MemAvailable"]
        return 1024 * int(kibibytes.split()[0])
    except (OSError, KeyError, ValueError):
        return None


@contextmanager
def allocation_of(slots: int) -> Iterator[None]:
    """For what the check of sizes lets through: memory that others took, or a process's limit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).split("\n")[0]
        # A GPU's has a type of its own, the CPU's is named in the text alone.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocat" in text:
            raise OptionError(f"--slots {slots} needs more memory than there is: {text}") from error
        raise


def _requests(tokenizer: PreTrainedTokenizerBase, options: Options) -> list[Request]:
    if not options.prompts:
        return builtin_requests(tokenizer, max_tokens=options.max_tokens)
    return [
        make_request(
            tokenizer, f"prompt {i}", prompt, options.params, max_tokens=options.max_tokens
        )
        for i, prompt in enumerate(options.prompts, start=1)
    ]


def _leave_out_refused(
    requests: Sequence[Request], backend: str, device: torch.device, console: Console
) -> list[Request]:
    refuses = next(info.refuses for info in backends.describe(device) if info.name == backend)
    served = []
    for request in requests:
        asked = request.params.features()
        if request.params.seed is not None and not request.params.is_greedy:
            asked |= {"seed"}
        if lacking := sorted(asked & set(refuses)):
            note = f"{request.title!r} is left out: backend {backend} refuses {', '.join(lacking)}"
            console.print(Text(note), soft_wrap=True)
        else:
            served.append(request)
    return served
