# SPDX-License-Identifier: Apache-2.0
"""Which buffers of two layouts are the same tensor, and every reason why they cannot be."""

from __future__ import annotations

from collections.abc import Mapping

from bootstrap_server import MismatchError, Why
from bootstrap_server.ranks.records import FLAGS
from sglang_mooncake.layout.description import Component, Layout, LayoutMismatch, Place

__all__ = ["DRAFT", "Pair", "aux_buffers", "pair_buffers"]

#: Kinds of the draft model's caches begin so. One side may have a draft model and the other not:
#: what it caches is of use to the draft model of the other side alone.
DRAFT = "draft "

_Buffer = tuple[Component, int]
#: (source component, its buffer, target component, its buffer)
Pair = tuple[Component, int, Component, int]


def pair_buffers(
    source: Layout,
    target: Layout,
    prefill: Place,
    decode: Place,
    flags: Mapping[str, str] = FLAGS,
) -> list[Pair]:
    """The buffers that `source` and `target` have in common. `flags`: of the server, behind what
    may differ.

    Raises:
        LayoutMismatch: the two cannot be copied into each other.
    """
    try:
        return _pairs(source, target, prefill, decode, flags)
    except LayoutMismatch as error:
        if source.release != target.release:
            error.args = (f"{error} ({_releases(source, target)})",)
        raise


def _pairs(
    source: Layout, target: Layout, prefill: Place, decode: Place, flags: Mapping[str, str]
) -> list[Pair]:
    _check_alike(source, target, flags)
    here, there = _kinds(source), _kinds(target)
    if not here <= there or (_is_whole(prefill, decode) and here != there):
        _differ("caches of the model", sorted(here), sorted(there), "use the same model", Why.MODEL)
    pairs: list[Pair] = []
    kinds = dict.fromkeys(c.kind for c in (*source.components, *target.components))
    for kind in kinds:
        ours, theirs = _of_kind(source, kind), _of_kind(target, kind)
        if kind.startswith(DRAFT) and not (ours and theirs and _has_drafter(prefill, decode)):
            continue
        pairs += _pair_kind(kind, ours, theirs, prefill, decode)
    dealt = _check_dealt(source, target, prefill)
    for component, _, counterpart, _ in pairs:
        _check_cuts(component, counterpart, dealt, flags)
    _check_sizes(source, prefill, "prefill")
    _check_sizes(target, decode, "decode")
    return pairs


def _check_dealt(source: Layout, target: Layout, prefill: Place) -> int:
    """Over how many decode ranks the tokens of a prefill rank are dealt out."""
    ours, theirs = source.tokens_dealt, target.tokens_dealt
    if target.pages_dealt.of > 1 or (source.pages_dealt.of > 1 and theirs.of > 1):
        raise LayoutMismatch(
            "prefill ranks that each hold some of the pages can only send to decode ranks that "
            "hold "
            "whole pages: start decode without --dcp-size, and without --enable-kv-cache-sharding"
        )
    heads = [c.kind for c in source.components if c.state is None and _has_heads(c)]
    if source.pages_dealt.of > 1 and prefill.topology.cp_size == 1 and heads:
        raise LayoutMismatch(
            f"{heads[0]}: pages are dealt out over prefill's TP ranks, which hold different heads "
            "of them: start prefill with --enable-prefill-cp, or without --enable-kv-cache-sharding"
        )
    if ours == theirs:
        return 1
    remedy = "use the same --tp-size and --dcp-size on both servers, or no --dcp-size on prefill"
    if ours.of > 1:
        raise LayoutMismatch(
            f"the tokens of a page are distributed over ranks: prefill has part {ours.index} of "
            f"{ours.of}, decode part "
            f"{theirs.index} of {theirs.of}: {remedy}"
        )
    for one in target.components:
        whole_latents = not _has_heads(one) and one.rows == target.page_size
        if one.state is None and not one.kind.startswith(DRAFT) and not whole_latents:
            raise LayoutMismatch(
                f"{one.kind}: tokens that decode deals out over {theirs.of} ranks must be MLA "
                f"latents, one for each token of a page: {remedy}"
            )
    return theirs.of


def _has_heads(component: Component) -> bool:
    return any(cut.total > 1 for cut in component.cuts)


def _has_drafter(prefill: Place, decode: Place) -> bool:
    """The last stage runs the draft model; a decode rank of one stage hears from it alone."""
    rank, size = prefill.stage
    return prefill.stage == decode.stage or rank == size - 1


def _of_kind(layout: Layout, kind: str) -> list[Component]:
    return [component for component in layout.components if component.kind == kind]


def _pair_kind(
    kind: str, ours: list[Component], theirs: list[Component], prefill: Place, decode: Place
) -> list[Pair]:
    src_layers, dst_layers = _layers(ours), _layers(theirs)
    if not all(component.numbered for component in (*ours, *theirs)):
        if prefill.stage == decode.stage and len(src_layers) == len(dst_layers):
            return _by_position(ours, theirs)
        raise LayoutMismatch(
            f"{kind} of {len(src_layers)} layers on prefill (stage {prefill.stage}) and "
            f"{len(dst_layers)} on decode (stage {decode.stage}): SGLang does not say which layers "
            "of the model these are, so use the same model and --pp-size on both servers"
        )
    unknown = sorted(src_layers - dst_layers)
    if unknown:
        raise LayoutMismatch(
            f"{kind}: prefill has layers {_short(unknown)}, which decode has not; "
            "use the same model on both servers, and the --pp-size of prefill or 1 on decode"
        )
    missing = sorted(dst_layers - src_layers)
    if missing and _is_whole(prefill, decode):
        raise LayoutMismatch(
            f"{kind}: decode has layers {_short(missing)}, which prefill has not; "
            "use the same model and --pp-size on both servers"
        )
    return _by_number(_places(ours), _places(theirs))


def _by_number(ours: dict[int, _Buffer], theirs: dict[int, _Buffer]) -> list[Pair]:
    """Layers that either side has elided move nothing."""
    return [(*ours[layer], *theirs[layer]) for layer in ours if layer in theirs]


def _by_position(ours: list[Component], theirs: list[Component]) -> list[Pair]:
    """The n-th layer here is the n-th there."""
    places = []
    for side in (ours, theirs):
        order = {layer: at for at, layer in enumerate(sorted(_layers(side)))}
        places.append({order[layer]: buffer for layer, buffer in _places(side).items()})
    return _by_number(*places)


def _places(components: list[Component]) -> dict[int, _Buffer]:
    return {
        layer: (component, at)
        for component in components
        for at, layer in enumerate(component.layers)
    }


def _layers(components: list[Component]) -> set[int]:
    return {layer for component in components for layer in (*component.layers, *component.elided)}


def _short(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _check_alike(source: Layout, target: Layout, flags: Mapping[str, str]) -> None:
    same = "use the same {} on both servers".format
    if source.conventions != target.conventions:
        raise LayoutMismatch(
            "the releases of both servers mean different things by the lists of a request: "
            f"{_told(source.conventions)} on prefill, {_told(target.conventions)} on decode; "
            f"{same('release')}",
            Why.RELEASE,
        )
    for what, flag, ours, theirs, why in (
        ("page size", "page_size", source.page_size, target.page_size, Why.PAGE_SIZE),
        ("KV cache dtype", "kv_cache_dtype", source.dtype, target.dtype, Why.DTYPE),
        ("KV layout", "kv_layout", source.kv_layout, target.kv_layout, Why.LAYOUT),
    ):
        _differ(what, ours, theirs, same(flags[flag]), why)
    both = min(len(source.states), len(target.states))
    _differ(
        "state of a request", source.states[:both], target.states[:both], same("model"), Why.MODEL
    )
    if aux_buffers(source, target) is None:
        _differ(
            "bytes per request of metadata buffers",
            source.aux.item_nbytes,
            target.aux.item_nbytes,
            same("version of SGLang and the same model"),
        )


def aux_buffers(source: Layout, target: Layout) -> list[int] | None:
    """Which metadata buffers move: all that are of one size. What a draft model continues from may
    differ, as one side may have none; then there is nothing to move. None when others differ."""
    ours, theirs = source.aux.item_nbytes, target.aux.item_nbytes
    if len(ours) != len(theirs):
        return None
    alike = [at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one == other]
    unlike = set(range(len(ours))) - set(alike)
    drafts = {source.draft_aux, target.draft_aux}
    return alike if not unlike or (len(drafts) == 1 and unlike == drafts) else None


def _releases(source: Layout, target: Layout) -> str:
    here, there = (layout.release or "an unknown release" for layout in (source, target))
    return f"the prefill server runs {here}, the decode server {there}"


def _kinds(layout: Layout) -> set[str]:
    return {c.kind for c in layout.components if not c.kind.startswith(DRAFT)}


def _is_whole(prefill: Place, decode: Place) -> bool:
    """Whether one prefill rank has all layers of the decode rank. With fewer stages on decode, or
    layers dealt out over CP ranks, the rest comes from other prefill ranks."""
    return prefill.topology.pp_size == decode.topology.pp_size and prefill.topology.cp_size == 1


def _differ(what: str, ours: object, theirs: object, remedy: str, why: Why = Why.LAYOUT) -> None:
    if ours != theirs:
        raise LayoutMismatch(
            f"{what}: the prefill server has {_told(ours)}, the decode server has "
            f"{_told(theirs)}: {remedy}",
            why,
        )


def _told(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value) or "none"
    return str(value)


def _check_cuts(ours: Component, theirs: Component, dealt: int, flags: Mapping[str, str]) -> None:
    if (ours.state, ours.segments) != (theirs.state, theirs.segments):
        raise LayoutMismatch(
            f"{ours.kind}: prefill names its items by state list {ours.state}, decode by "
            f"{theirs.state}: use the same model and version of SGLang on both servers"
        )
    # Rings may be of different length; their slots are compared when a request names them.
    rows = ours.rows * dealt if ours.kind.startswith(DRAFT) and ours.state is None else ours.rows
    if not ours.segments and (rows, ours.cuts) != (theirs.rows, theirs.cuts):
        raise LayoutMismatch(
            f"{ours.kind}: prefill stores {_cuts(ours)}, decode {_cuts(theirs)}: use the same "
            f"model, and the same {flags['tp_size']} where it cannot be cut otherwise"
        )


def _cuts(component: Component) -> str:
    units = " + ".join(f"{cut.total} units of {cut.nbytes} bytes" for cut in component.cuts)
    return f"{component.rows} rows of {units}"


def _check_sizes(layout: Layout, place: Place, role: str) -> None:
    tp_size, tp = place.topology.tp_size, place.coords.tp
    for component in layout.components:
        try:
            expected = component.held_nbytes(tp_size, tp)
        except MismatchError as error:
            raise LayoutMismatch(f"{role}: {error}") from error
        if component.layers and component.item_nbytes != expected:
            raise LayoutMismatch(
                f"{component.kind}: an item on {role} TP rank {tp} of {tp_size} has "
                f"{component.item_nbytes} bytes, but {_cuts(component)} make {expected}"
            )
