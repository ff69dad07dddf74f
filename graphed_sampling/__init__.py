"""graphed_sampling: LLM sampling as one captured pipeline over per-request device records."""

import graphed_sampling.ops  # noqa: F401  # defines the torch ops, which no module names otherwise
from graphed_sampling._build_info import build_info
from graphed_sampling.backends import canonical_order
from graphed_sampling.graph import CaptureReport, GraphedSampler
from graphed_sampling.layout import FinishReason, RowFlags
from graphed_sampling.logprobs import (
    PromptLogprobs,
    linear_logprobs,
    new_prompt_output,
    next_token_ids,
    prompt_logprobs,
)
from graphed_sampling.params import SamplingParams, UnsupportedFeatureError
from graphed_sampling.sampler import Sampler, StepOutput, new_output, new_scratch
from graphed_sampling.table import AdmittedRequest, RequestTable, TableFullError

__version__: str = build_info()["version"]

__all__ = [
    "AdmittedRequest",
    "CaptureReport",
    "FinishReason",
    "GraphedSampler",
    "PromptLogprobs",
    "RequestTable",
    "RowFlags",
    "Sampler",
    "SamplingParams",
    "StepOutput",
    "TableFullError",
    "UnsupportedFeatureError",
    "build_info",
    "canonical_order",
    "linear_logprobs",
    "new_output",
    "new_prompt_output",
    "new_scratch",
    "next_token_ids",
    "prompt_logprobs",
]
