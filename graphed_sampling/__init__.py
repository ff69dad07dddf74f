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
from graphed_sampling.statistics import (
    GROUP_SIZE,
    WINDOW_SIZE,
    group_stats,
    group_stats_shape,
)
from graphed_sampling.step.batch import PrefillChunk, StepBatch
from graphed_sampling.step.futures import GraphSignal, HostStream, gpu_future
from graphed_sampling.step.loop import StepLoop, StepResult
from graphed_sampling.step.requests import (
    Delta,
    DeltaStream,
    Matcher,
    QueueFullError,
    StepLoopError,
    TokenLogprobs,
)
from graphed_sampling.step.ring import OutputRing, OutputSlot
from graphed_sampling.step.text import IncrementalDecoder, TokenDecoder
from graphed_sampling.step.trace import LagProbe, LoopTotals, Tracer
from graphed_sampling.table import AdmittedRequest, RequestTable, TableFullError

__version__: str = build_info()["version"]

__all__ = [
    "GROUP_SIZE",
    "WINDOW_SIZE",
    "AdmittedRequest",
    "CaptureReport",
    "Delta",
    "DeltaStream",
    "FinishReason",
    "GraphSignal",
    "GraphedSampler",
    "HostStream",
    "IncrementalDecoder",
    "LagProbe",
    "LoopTotals",
    "Matcher",
    "OutputRing",
    "OutputSlot",
    "PrefillChunk",
    "PromptLogprobs",
    "QueueFullError",
    "RequestTable",
    "RowFlags",
    "Sampler",
    "SamplingParams",
    "StepBatch",
    "StepLoop",
    "StepLoopError",
    "StepOutput",
    "StepResult",
    "TableFullError",
    "TokenDecoder",
    "TokenLogprobs",
    "Tracer",
    "UnsupportedFeatureError",
    "build_info",
    "canonical_order",
    "gpu_future",
    "group_stats",
    "group_stats_shape",
    "linear_logprobs",
    "new_output",
    "new_prompt_output",
    "new_scratch",
    "next_token_ids",
    "prompt_logprobs",
]
