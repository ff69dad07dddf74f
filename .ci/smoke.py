"""A pure install must sample: no native library, no numba."""

import importlib.util

import torch

import graphed_sampling
from graphed_sampling._build_info import build_info

info = build_info()
print(info)
assert "site-packages" in graphed_sampling.__file__, graphed_sampling.__file__
assert not info["native"] and not info["loaded"], info
assert importlib.util.find_spec("numba") is None

logits = torch.tensor([[0.0, 1.0, 5.0, 2.0]])
row = torch.zeros(1)
token_ids, logprobs = torch.ops.graphed_sampling.sample(
    logits, row, row.int(), row + 1, row, row.long(), row.long()
)
assert token_ids.tolist() == [2], token_ids
torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 2])
print("sampled", token_ids.tolist())
