"""`OutputRing`: what a reader holds is never overwritten."""

from __future__ import annotations

import asyncio

import pytest
import torch

from graphed_sampling import HostStream, OutputRing

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("device", DEVICES)
def test_every_reader_sees_its_own_record(device: str, depth: int) -> None:
    """One record on the device is written again and again; readers take their time."""

    async def main() -> None:
        ring = OutputRing(torch.device(device), 4, 6, depth)
        record = torch.zeros(4, 6, dtype=torch.int32, device=device)
        host_stream = HostStream()
        readers = []

        async def read(number: int, slot: object, arrival: asyncio.Future[None]) -> None:
            await arrival
            for _ in range(number % 4):
                await asyncio.sleep(0)
                assert (slot.host[: 1 + number % 4] == number).all()  # type: ignore[attr-defined]
            slot.release()  # type: ignore[attr-defined]

        for number in range(40):
            slot = await ring.acquire()

            def step(number: int = number, slot: object = slot) -> None:
                ring.protect()
                record.fill_(number)
                slot.fill(record[: 1 + number % 4])  # type: ignore[attr-defined]

            if device == "cpu":
                host_stream.submit(step)
            else:
                step()
            readers.append(asyncio.create_task(read(number, slot, ring.arrival(host_stream))))
        await asyncio.gather(*readers)
        assert ring.num_free == ring.depth == depth
        host_stream.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_acquire_waits_for_a_free_entry_in_turn() -> None:
    async def main() -> None:
        ring = OutputRing(CPU, 1, 1, 2)
        first, second = await ring.acquire(), await ring.acquire()
        assert ring.try_acquire() is None
        waiting = [asyncio.create_task(ring.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        first.release()
        waiting[0].cancel()  # after its turn has come
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        assert waiting[0].cancelled() and waiting[1].result() is first
        waiting[2].cancel()
        await asyncio.wait([waiting[2]])
        second.release()
        assert ring.try_acquire() is second

    asyncio.run(asyncio.wait_for(main(), 20))


def test_refusals() -> None:
    for arguments, message in [
        ((0, 1, 1), "rows = 0"),
        ((1, True, 1), "words = True"),
        ((1, 1, -2), "depth = -2"),
    ]:
        with pytest.raises(ValueError, match=message):
            OutputRing(CPU, *arguments)
    with pytest.raises(ValueError, match="wait = 'never'"):
        OutputRing(CPU, 1, 1, 1, wait="never")  # type: ignore[arg-type]
    ring = OutputRing(CPU, 2, 3, 1)
    slot = ring.try_acquire()
    assert slot is not None
    for record in (
        torch.zeros(3, 3, dtype=torch.int32),
        torch.zeros(2, 2, dtype=torch.int32),
        torch.zeros(2, 3),
    ):
        with pytest.raises(ValueError, match=r"it must be torch.int32 \[<= 2, 3\]"):
            slot.fill(record)
    with slot:
        pass
    for use in (slot.release, lambda: slot.fill(torch.zeros(2, 3, dtype=torch.int32))):
        with pytest.raises(RuntimeError, match="not held"):
            use()
