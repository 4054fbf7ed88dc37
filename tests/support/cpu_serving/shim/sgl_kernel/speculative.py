# SPDX-License-Identifier: Apache-2.0
"""The kernels of SGLang's speculative decoding on a CPU, in plain torch, for drafts that are a
chain (``--speculative-eagle-topk 1``). SGLang itself decides, allocates and moves everything."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

#: SGLang's `TreeMaskMode.QLEN_ONLY`.
AMONG_DRAFTS = 1


def assign_draft_cache_locs_contiguous_cpu(
    rows: Any, slots: Any, seq_lens: Any, out: Any, _width: int, topk: int, steps: int
) -> None:
    """The slots of each request's next `topk` x `steps` tokens."""
    count = topk * steps
    for i, row in enumerate(rows.tolist()):
        start = int(seq_lens[i])
        out[i * count : (i + 1) * count] = slots[row, start : start + count]


def assign_extend_cache_locs_cpu(
    rows: Any, slots: Any, starts: Any, ends: Any, out: Any, _width: int
) -> None:
    """The slots of each request's tokens from its start to its end, one request after the other."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out[taken : taken + end - start] = slots[row, start:end]
        taken += end - start


def build_draft_decode_metadata_cpu(
    slots: Any, rows: Any, _seq_lens: Any, topk: int, _steps: int, _width: int
) -> Any:
    """The slots of each draft, prefix and all: of a chain, those that its request has."""
    _refuse_trees(topk)
    return slots[rows]


def build_tree_kernel_efficient_cpu(
    _parents: Any,
    _selected: Any,
    seq_lens: Any,
    mask: Any,
    positions: Any,
    index: Any,
    next_token: Any,
    next_sibling: Any,
    topk: int,
    _depth: int,
    width: int,
    mask_mode: int,
) -> None:
    """The tree of `width` tokens that a request has to verify."""
    _refuse_trees(topk)
    if mask_mode != AMONG_DRAFTS:
        raise NotImplementedError(f"a tree mask of mode {mask_mode} has no stand-in")
    count = seq_lens.numel()
    place = torch.arange(width)
    positions.view(count, width).copy_(seq_lens[:, None] + place)
    index.copy_(torch.arange(count * width).view(count, width))
    next_token[:, :-1] = place[1:]
    next_token[:, -1] = -1
    next_sibling.fill_(-1)
    mask.view(count, width, width).copy_(place <= place[:, None])


def verify_tree_greedy_cpu(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """How far along its chain each request's draft is what the target says, and what comes next."""
    if (retrive_next_sibling >= 0).any():
        _refuse_trees(2)
    index, following = retrive_index.tolist(), retrive_next_token.tolist()
    targets, drafts = target_predict.flatten().tolist(), candidates.tolist()
    longest = accept_index.shape[1]
    for i, places in enumerate(index):
        accepted, at = [places[0]], following[i][0]
        while at >= 0 and len(accepted) < longest and drafts[i][at] == targets[accepted[-1]]:
            accepted.append(places[at])
            at = following[i][at]
        accept_index[i, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[i] = len(accepted) - 1
        for place in accepted:
            predicts[place] = targets[place]


def fill_bonus_tokens_cpu(tokens: Any, lens: Any, bonus: Any, width: int) -> None:
    """The last token that each request accepted."""
    for i, accepted in enumerate(lens.tolist()):
        bonus[i] = tokens.flatten()[width * i + accepted - 1]


def fill_accept_out_cache_loc_cpu(accept_index: Any, slots: Any, out: Any) -> None:
    """The slots of the accepted tokens, without gaps."""
    accepted = accept_index.flatten()[accept_index.flatten() >= 0].long()
    out[: accepted.numel()] = slots[accepted]


def _refuse_trees(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError(
            "drafts that branch have no stand-in in tests/support/cpu_serving"
        )
