"""The command line: `graphed-sampling demo`, `serve`, `trace` and `doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(
        "the command line needs a few more packages; in a checkout of the source:  "
        'pip install --no-build-isolation ".[demo]"'
    ) from None

_MOST_THREADS = 4 * (os.cpu_count() or 1)  # more cannot help, and thousands do not start
_DEMO_PACKAGES = ("transformers", "accelerate", "gguf", "rich")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from graphed_sampling import __version__

        typer.echo(f"graphed-sampling {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """LLM sampling from logits to tokens, in tensors, captured in CUDA graphs."""


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Asked instead of the built-in prompts; may be given several times."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=2**31 - 1, help="Length of an answer.")
    ] = 64,
    temperature: Annotated[
        float | None, typer.Option(help="Of your prompts; 0 is greedy. Default 0.7.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Of your prompts; 0, the default, is off.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Of your prompts; 1 is off. Default 0.9.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Of your prompts; 0, the default, is off.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    slots: Annotated[int, typer.Option(min=1, help="Answers in the making at once.")] = 8,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="The sampler's; see doctor.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=_MOST_THREADS, help="CPU threads of torch.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No live display, no colour.")] = False,
) -> None:
    """Watch a small language model answer many prompts at once, each with its own parameters."""
    _need("The demo", _DEMO_PACKAGES, "demo")

    import torch

    from graphed_sampling import SamplingParams
    from graphed_sampling.demo.model import ModelMissingError
    from graphed_sampling.demo.run import OptionError, Options, run_demo

    own = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    if given and not prompt:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter(f"{names}: goes with --prompt; built-in prompts have their own")
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        params = replace(SamplingParams(temperature=0.7, top_p=0.9), **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    options = Options(
        prompts=prompt or (),
        params=params,
        max_tokens=max_tokens,
        seed=seed,
        slots=slots,
        device=device,
        backend=backend,
        plain=plain,
    )
    try:
        run_demo(options)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    except ModelMissingError as error:
        _fail(str(error))


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="To listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    slots: Annotated[int, typer.Option(min=1, help="Answers in the making at once.")] = 8,
    max_length: Annotated[
        int, typer.Option(min=2, help="Tokens of a prompt and its answer.")
    ] = 1024,
    max_waiting: Annotated[int, typer.Option(min=1, help="Answers that may wait for a slot.")] = 64,
    depth: Annotated[int, typer.Option(min=0, help="Steps ahead; 0 overlaps nothing.")] = 1,
    drain: Annotated[int, typer.Option(min=0, help="Seconds for requests at the end.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="The sampler's; see doctor.")] = "auto",
    seed: Annotated[
        int | None, typer.Option(help="Of requests that bring none; default: the system's.")
    ] = None,
) -> None:
    """Serve the demo's model as OpenAI's /v1/completions do: an example of a server."""
    _need("The server", (*_DEMO_PACKAGES, "fastapi", "uvicorn", "prometheus_client"), "demo,server")

    from graphed_sampling.demo.model import ModelMissingError
    from graphed_sampling.demo.run import OptionError
    from graphed_sampling.demo.serve import ServerOptions, serve_model

    options = ServerOptions(
        host=host,
        port=port,
        slots=slots,
        max_length=max_length,
        max_waiting=max_waiting,
        depth=depth,
        drain_seconds=drain,
        device=device,
        backend=backend,
        seed=seed,
    )
    try:
        serve_model(options)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    except ModelMissingError as error:
        _fail(str(error))


@app.command()
def trace(
    out: Annotated[Path, typer.Option(help="The files, without .json and .png.")] = Path("trace"),
    steps: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    requests: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 16,
    depth: Annotated[int, typer.Option(min=0, help="Steps ahead; 0 overlaps nothing.")] = 1,
    size: Annotated[str, typer.Option(help="Of the random model: tiny, 135m or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="The sampler's; see doctor.")] = "auto",
) -> None:
    """Run steps of a loop, and write what GPU, CPU and event loop did when.

    A trace for ui.perfetto.dev, and a picture of some steps from the middle.
    """
    _need("The trace", (*_DEMO_PACKAGES, "matplotlib"), "demo,trace")

    from graphed_sampling.demo.random_model import SHAPES
    from graphed_sampling.demo.run import OptionError
    from graphed_sampling.demo.trace import TraceOptions, run_trace

    if size not in ("auto", *SHAPES):
        raise typer.BadParameter(f"--size {size}: one of auto, {', '.join(SHAPES)}")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"--out {out}: there is no folder {out.parent}")
    options = TraceOptions(
        out=out,
        steps=steps,
        requests=requests,
        depth=depth,
        size=size,
        device=device,
        backend=backend,
    )
    try:
        summary = run_trace(options)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"{summary.steps} steps, {summary.tokens} tokens; the device idle {summary.idle:.1%} of "
        f"the time; loop lag {1000 * summary.lag_p50:.2f} ms, p99 {1000 * summary.lag_p99:.2f} ms\n"
        f"{options.files[0]} for ui.perfetto.dev, {options.files[1]}"
    )


@app.command()
def doctor() -> None:
    """Say what is installed here, and which backends can be used."""
    import torch

    from graphed_sampling import backends, build_info

    info = build_info()
    native = "loaded"
    if not info["loaded"]:
        native = f"not in use: {info['load_error'] or info['reason']}"
    built = "nothing native"
    if info["native"]:
        architectures = ", ".join(f"sm_{number}" for number in info["architectures"]) or "no GPU"
        built = f"torch {info['torch']}, nvcc {info['nvcc'] or 'none'}, for {architectures}"
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())]
    rows = [
        ("graphed-sampling", info["version"]),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("cuda of torch", torch.version.cuda or "none"),
        *(("GPU", gpu) for gpu in gpus or ["none"]),
        ("native library", native),
        ("built with", built),
    ]
    for name, value in rows:
        typer.echo(f"{name:<18}{value}")
    device = "cuda" if gpus else "cpu"
    typer.echo(f"\nbackends, on {device}")
    for backend in backends.describe(device):
        state = "usable" if backend.usable else f"not usable: {backend.reason}"
        typer.echo(f"  {backend.name:<16}{state}")
        typer.echo(f"  {'':<16}auto takes it for {backend.chosen_for}")
        typer.echo(f"  {'':<16}refuses {', '.join(backend.refuses) or 'nothing'}")


def _gpu(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )


def _need(what: str, packages: tuple[str, ...], extras: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        _fail(
            f"{what} needs {', '.join(missing)}; in a checkout of the source:  "
            f'pip install --no-build-isolation ".[{extras}]"'
        )


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    main()
