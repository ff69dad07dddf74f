"""Requests as words: what the host writes into the records of `graphed_sampling.layout`."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from graphed_sampling.layout import (
    HEADER_WORDS,
    FinishReason,
    Param,
    ParamFlags,
    State,
    TableLayout,
)
from graphed_sampling.params import LOG2_E, SamplingParams, fp32
from graphed_sampling.staging import Segments, Target, Words

PENALTIES: Final = frozenset({"repetition_penalty", "frequency_penalty", "presence_penalty"})
FILTERS: Final = frozenset(
    {"top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff"}
)
BOUNDING_FILTERS: Final = frozenset({"top_k", "min_p", "top_n_sigma"})
"""Filters that need no probability, only logits: those after them see few tokens."""
# Where the fields go that the header holds as fp32 values.
_FP32_FIELDS: Final = {
    "top_p": int(Param.TOP_P),
    "min_p": int(Param.MIN_P),
    "top_n_sigma": int(Param.TOP_N_SIGMA),
    "typical_p": int(Param.TYPICAL_P),
    "epsilon_cutoff": int(Param.EPSILON_CUTOFF),
    "eta_cutoff": int(Param.ETA_CUTOFF),
    "repetition_penalty": int(Param.REPETITION_PENALTY),
    "frequency_penalty": int(Param.FREQUENCY_PENALTY),
    "presence_penalty": int(Param.PRESENCE_PENALTY),
}


def _neutral() -> Words:
    header = np.zeros(HEADER_WORDS, np.int32)
    for word in (Param.TEMPERATURE, Param.TOP_P, Param.TYPICAL_P, Param.REPETITION_PENALTY):
        header.view(np.float32)[word] = 1.0
    header.view(np.float32)[Param.SCALE] = LOG2_E
    header.view(np.float64)[Param.WIDE_SCALE // 2] = LOG2_E
    return header


NEUTRAL_HEADER: Final = _neutral()
"""A parameter record's header with everything off: of a slot that holds no request."""
NEUTRAL_HEADER.flags.writeable = False


def active_features(params: SamplingParams, vocab_size: int) -> frozenset[str]:
    """The fields of `params` that change anything with this vocabulary."""
    features = params.features()
    if params.is_greedy:
        return features - FILTERS
    if params.seed is not None:
        features |= {"seed"}
    if params.top_k >= vocab_size:
        return features - {"top_k"}
    return features


def _is_lowered(params: SamplingParams, active: frozenset[str], flags: int) -> bool:
    raises = (
        params.repetition_penalty < 1.0
        or params.frequency_penalty < 0.0
        or params.presence_penalty < 0.0
    )
    best = params.is_greedy or ("top_k" in active and active & FILTERS <= {"top_k", "top_p"})
    # The best processed logprobs, and a processed rank, take a look at all tokens.
    looks = params.logprobs_mode == "processed" and (bool(params.logprobs) or params.rank)
    return best and not (raises or looks or flags & (ParamFlags.ALLOWED | ParamFlags.LISTS))


def pack_params(
    layout: TableLayout,
    slot: int,
    params: SamplingParams,
    seed: int,
    eos_token_ids: tuple[int, ...],
) -> Segments:
    """The slot's parameter record: its header, and the used part of each list."""
    active = active_features(params, layout.vocab_size)
    header = NEUTRAL_HEADER.copy()
    real = header.view(np.float32)
    flags = int(ParamFlags.ADMITTED)
    if params.is_greedy:
        flags |= int(ParamFlags.GREEDY)
    else:
        real[Param.TEMPERATURE] = params.temperature
        scale = LOG2_E / fp32(params.temperature)
        real[Param.SCALE] = scale
        header.view(np.float64)[Param.WIDE_SCALE // 2] = scale
    if active & FILTERS:
        flags |= int(ParamFlags.FILTERED)
    if params.logprobs is not None:
        flags |= int(ParamFlags.LOGPROBS)
        header[Param.TOP_LOGPROBS] = params.logprobs
    if params.logprobs_mode == "processed":
        flags |= int(ParamFlags.PROCESSED)
    if params.rank:
        flags |= int(ParamFlags.RANK)
    if params.allowed_token_ids is not None:
        flags |= int(ParamFlags.ALLOWED)
    if active & PENALTIES:
        flags |= int(ParamFlags.PENALTIES)
    if not params.is_greedy and not active & BOUNDING_FILTERS:
        flags |= int(ParamFlags.TOTAL)
        if active & {"typical_p", "eta_cutoff"} and "top_p" not in active:
            flags |= int(ParamFlags.MEAN)
    if params.reports and params.logprobs_mode == "raw":
        flags |= int(ParamFlags.RAW)
    if params.logit_bias or params.bad_words_ids or params.min_tokens:
        flags |= int(ParamFlags.LISTS)
    if active & PENALTIES and _is_lowered(params, active, flags):
        flags |= int(ParamFlags.LOWERED)
    for name in active & _FP32_FIELDS.keys():
        real[_FP32_FIELDS[name]] = getattr(params, name)
    if "top_k" in active:
        header[Param.TOP_K] = params.top_k
    if "min_p" in active:
        offset = fp32(params.temperature) * math.log(fp32(params.min_p))
        header.view(np.float64)[Param.MIN_P_OFFSET // 2] = offset
    header[Param.FLAGS] = flags
    header[Param.MIN_TOKENS] = params.min_tokens
    header[Param.MAX_TOKENS] = params.max_tokens or 0
    header.view(np.uint64)[Param.SEED // 2] = seed

    record = slot * layout.params_words
    parts = []

    def add(start: int, values: Words) -> None:
        parts.append(Segments.run(Target.PARAMS, record + start, values))

    if params.logit_bias:
        header[Param.NUM_BIAS] = len(params.logit_bias)
        add(layout.bias_ids, np.fromiter(params.logit_bias, np.int32))
        biases = np.fromiter(params.logit_bias.values(), np.float32)
        add(layout.bias_values, biases.view(np.int32))
    stop_ids = dict.fromkeys(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= dict.fromkeys(eos_token_ids)
    if stop_ids:
        header[Param.NUM_STOP] = len(stop_ids)
        add(layout.stop_ids, np.fromiter(stop_ids, np.int32))
    if params.bad_words_ids:
        header[Param.NUM_BAD_WORDS] = len(params.bad_words_ids)
        shape = (len(params.bad_words_ids), layout.max_bad_word_length)
        bad_words = np.full(shape, -1, np.int32)
        for row, ids in zip(bad_words, params.bad_words_ids, strict=True):
            row[: len(ids)] = ids[::-1]
        add(layout.bad_words, bad_words.reshape(-1))
    if params.logprob_token_ids:
        header[Param.NUM_GIVEN] = len(params.logprob_token_ids)
        add(layout.given_ids, np.array(params.logprob_token_ids, np.int32))
    if params.allowed_token_ids is not None:
        allowed = np.array(params.allowed_token_ids, np.int64)
        parts.append(_bitmap_row(layout, layout.allowed_bits, slot, allowed))
    add(0, header)
    return Segments.join(parts)


def pack_vacancy(layout: TableLayout, slot: int) -> Segments:
    """The parameter record of a slot that was released."""
    return Segments.run(Target.PARAMS, slot * layout.params_words, NEUTRAL_HEADER)


def pack_state(
    layout: TableLayout,
    slot: int,
    generation: int,
    prompt: npt.NDArray[np.int64],
    output: npt.NDArray[np.int64],
    prompt_length: int,
) -> Segments:
    """The slot's state record at admission, and with penalties its bitmaps and counts."""
    record = np.zeros(layout.state_words, np.int32)
    long = record.view(np.int64)
    long[State.POSITION // 2] = prompt_length + len(output)
    last = output if len(output) else prompt
    long[State.LAST_TOKEN // 2] = last[-1] if len(last) else -1
    record[State.NUM_GENERATED] = len(output)
    record[State.FINISH_REASON] = FinishReason.NONE
    record[State.GENERATION] = generation
    recent = record[State.RECENT : State.RECENT + layout.recent_tokens]
    recent[:] = -1
    newest = output[::-1][: layout.recent_tokens]
    recent[: len(newest)] = newest
    parts = [Segments.run(Target.STATE, slot * layout.state_words, record)]
    if layout.penalties:
        parts.append(_bitmap_row(layout, layout.prompt_bits, slot, prompt))
        parts.append(_bitmap_row(layout, layout.output_bits, slot, output))
        if len(output):
            ids, counts = np.unique(output, return_counts=True)
            offsets = layout.counts + slot * layout.vocab_size + ids
            parts.append(Segments.single_words(Target.TABLES, offsets, counts.astype(np.int32)))
    return Segments.join(parts)


def _bitmap_row(layout: TableLayout, start: int, slot: int, ids: npt.NDArray[np.int64]) -> Segments:
    """A slot's row of the bitmap at `start`, with the bits of `ids` set."""
    if len(ids):
        member = np.zeros(32 * layout.bitmap_words, np.bool_)
        member[ids] = True
        bits = np.packbits(member, bitorder="little").view(np.int32)
    else:
        bits = np.zeros(layout.bitmap_words, np.int32)
    return Segments.run(Target.TABLES, start + slot * layout.bitmap_words, bits)
