"""Which transport carries a vocab-parallel step: the one place where that is decided."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from graphed_sampling import backends
from graphed_sampling.table import RequestTable

TRANSPORTS: Final = ("auto", "symmetric", "exchange")


class Place(NamedTuple):
    """Where a rank's table is, and why it cannot take part in a symmetric step; "" where it can.

    visible_devices: what the numbers of devices mean to the process.
    """

    host: str
    device: str
    visible_devices: str
    obstacle: str


def place_of(table: RequestTable, backend: str, num_ranks: int) -> Place:
    """This rank's."""
    cuda = backends.module("cuda")
    obstacle = ""
    if table.device.type != "cuda":
        obstacle = f"the table is on {table.device.type}: it takes GPUs"
    elif backend != "cuda":
        obstacle = f"the backend is {backend!r}: it takes 'cuda'"
    elif num_ranks > cuda.MOST_SHARDS:
        obstacle = f"there are {num_ranks} ranks: it takes at most {cuda.MOST_SHARDS}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Place(_host(), str(table.device), visible, obstacle)


def choose_transport(asked: str, places: Sequence[Place]) -> str:
    """The transport of all ranks, by what all of them say. ValueError where the one that was asked
    for does not serve them.

    "auto": symmetric wherever it serves, since its step is one kernel and moves no rows, where the
    exchange moves every logit and waits for two collectives.
    """
    obstacle = next(
        (f"rank {r}: {place.obstacle}" for r, place in enumerate(places) if place.obstacle), ""
    )
    if not obstacle and len({place.host for place in places}) > 1:
        obstacle = "the ranks are on different hosts"
    if not obstacle:
        obstacle = _unreachable(places, certainly=asked == "symmetric")
    if asked == "symmetric" and obstacle:
        raise ValueError(f"transport = 'symmetric' is not possible: {obstacle}")
    return "exchange" if obstacle or asked == "exchange" else "symmetric"


def _unreachable(places: Sequence[Place], *, certainly: bool) -> str:
    """Why GPUs of one host do not reach each other; certainly: nothing where it cannot be told."""
    if len({place.visible_devices for place in places}) > 1:
        return "" if certainly else "the processes number their GPUs in different ways"
    devices = [torch.device(place.device) for place in places]
    if len(set(devices)) < len(devices):
        return "several ranks are on one GPU"
    for one, other in itertools.permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"{one} does not reach {other}"
    return ""


def _host() -> str:
    """Of containers with one name too."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
