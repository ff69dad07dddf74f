"""`apply_records`: a table that only hears of steps has the state of the table that took them."""

from __future__ import annotations

import pytest
import torch
from helpers import BackendDevice
from histories import History, used_state
from test_ops import device_params

from graphed_sampling import RequestTable, Sampler, SamplingParams, ops
from graphed_sampling.advance import apply_records

OPS = torch.ops.graphed_sampling
WRONG = (ValueError, RuntimeError)
"""What is refused: in Python, and in C++, where every error arrives as the latter."""


# The op is native where that is built. What stands for it elsewhere is tested always.
IMPLEMENTATIONS = {"op": OPS.apply_records, "torch": ops._apply_records}


def apply(records: torch.Tensor, slots: torch.Tensor, table: RequestTable) -> None:
    OPS.apply_records(records, slots, table.state, table.tables, table.layout.to_ints())


@pytest.mark.parametrize("vocab", [7, 70])
def test_the_state_is_that_of_the_table_that_stepped(
    backend_device: BackendDevice, vocab: int
) -> None:
    pair = backend_device
    history = History(vocab, vocab, 6, supported=pair.supported, takes_words=pair.takes_words)
    stepped, told, told_in_torch = (history.table(pair.device) for _ in range(3))
    sampler = Sampler(stepped, pair.backend)
    finished = drawn = 0
    for _ in range(pair.rows(300, 12, 9)):
        history.change(stepped, told, told_in_torch)
        inputs = history.step(5)
        output = sampler(inputs.logits.to(pair.device), inputs.slots, **inputs.optional)
        told.upload()
        apply(output.record, inputs.slots.to(pair.device), told)
        # Where there is a native implementation, the op does not get here.
        other = told_in_torch
        other.upload()
        apply_records(
            output.record, inputs.slots.to(pair.device), other.state, other.tables, other.layout
        )
        drawn += int((output.token_ids >= 0).sum())
        finished += int((output.finish_reason > 0).sum())
        assert torch.equal(used_state(stepped), used_state(told))
        assert torch.equal(used_state(stepped), used_state(other))
    assert drawn > 10 and finished > 0


@pytest.mark.parametrize("device", device_params())
def test_rows_that_are_nobodys_change_nothing(device: str) -> None:
    tables = [RequestTable(3, 40, device=device, seed=1) for _ in range(2)]
    for table in tables:
        for _ in range(3):
            table.admit(SamplingParams(max_tokens=2), [1, 2])
    stepped, told = tables
    told.upload()
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    records = Sampler(stepped, "torch")(torch.randn(3, 40, device=device), slots).record
    before = used_state(told)
    for wrong in ([-1, -1, -1], [3, -5, 2**31 - 1]):
        apply(records, torch.tensor(wrong, dtype=torch.int32, device=device), told)
        assert torch.equal(used_state(told), before)
    # The request that the records are of has left, and its slot is another's.
    told.release(1)
    told.admit(SamplingParams(), [3], slot=1)
    told.upload()
    apply(records, slots.to(device), told)
    assert told.positions.tolist() == [3, 1, 3]
    assert told.last_token_ids.tolist()[1] == 3
    # Requests that have ended stay as they are: the record is older than their end.
    old = records.clone()
    apply(records, slots.to(device), told)
    ended = used_state(told)
    apply(old, slots.to(device), told)
    told.state[:, 5] = 2
    before = used_state(told)
    apply(old, slots.to(device), told)
    assert torch.equal(used_state(told), before) and not torch.equal(ended, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_accepted(implementation: str) -> None:
    def apply(records: torch.Tensor, slots: torch.Tensor, state: torch.Tensor) -> None:
        layout = table.layout.to_ints()
        IMPLEMENTATIONS[implementation](records, slots, state, table.tables, layout)

    table = RequestTable(3, 40, device="cpu", seed=1)
    records = torch.zeros(3, table.layout.output_words, dtype=torch.int32)
    slots = torch.zeros(3, dtype=torch.int32)
    for wrong in (
        records[0],
        records[0, 0],
        records[:2],
        records[:, 2:],
        records.long(),
        records.t().contiguous().t(),
    ):
        with pytest.raises(WRONG, match="records"):
            apply(wrong, slots, table.state)
    for wrong in (slots.long(), slots[0], slots.unsqueeze(0)):
        with pytest.raises(WRONG, match="slots"):
            apply(records, wrong, table.state)
    with pytest.raises(WRONG, match="state"):
        apply(records, slots, table.tables)


@pytest.mark.parametrize("device", device_params())
def test_opcheck(device: str) -> None:
    table = RequestTable(3, 40, device=device, seed=1)
    records = torch.zeros(3, table.layout.output_words, dtype=torch.int32, device=device)
    torch.library.opcheck(
        OPS.apply_records.default,
        (records, records[:, 0].contiguous(), table.state, table.tables, table.layout.to_ints()),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
