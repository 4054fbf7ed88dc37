# SPDX-License-Identifier: Apache-2.0
"""The dry run in words: pairs that move the same are one line, however many there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bootstrap_server import RankCoords, Topology
from sglang_mooncake.sglang.dry_run.pairs import TOKENS, Move, PairPlan, Server

__all__ = ["Report"]

_EXAMPLES = 4
_JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """rail_gbit: what one rank can send, and what one can receive, in Gbit/s."""

    prefill: Server
    decode: Server
    pairs: Sequence[PairPlan]
    rail_gbit: float

    def text(self) -> str:
        """For people; its length does not grow with the number of ranks."""
        return "\n".join([*self._head(), "", *self._table(), "", *self._summary()])

    def as_json(self) -> dict[str, Any]:
        """For programs: every pair, and the same figures."""
        return {
            "version": _JSON_VERSION,
            "model": self.prefill.model.name,
            "token_nbytes": self.prefill.model.token_nbytes,
            "page_size": self.prefill.page_size,
            "tokens": TOKENS,
            "rail_gbit": self.rail_gbit,
            "prefill": _sizes(self.prefill.topology),
            "decode": _sizes(self.decode.topology),
            "pairs": [self._pair_json(pair) for pair in self.pairs],
            "request": {
                "nbytes_sent_max": max(self._sent().values()),
                "nbytes_received_max": max(self._received().values()),
                "time_ms": self._slowest_ms(),
            },
        }

    # --- text ---

    def _head(self) -> Iterator[str]:
        model, page = self.prefill.model, self.prefill.page_size
        yield f"{model.text}; {model.token_nbytes:,} bytes a token, {_plural(page, 'token')} a page"
        yield f"prefill  {_ranks(self.prefill.topology)}"
        yield f"decode   {_ranks(self.decode.topology)}"

    def _table(self) -> Iterator[str]:
        pages = -(-TOKENS // self.prefill.page_size)
        yield f"A request of {TOKENS:,} tokens ({_plural(pages, 'page')}) moves between two ranks:"
        header = ("pairs", "KV heads", "layers", "bytes", "blocks", "if in runs", "time", "")
        rows = [header, *self._rows()]
        widths = [max(len(row[at]) for row in rows) for at in range(len(header) - 1)]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            yield "  ".join([*cells, row[-1]]).rstrip()

    def _rows(self) -> Iterator[tuple[str, ...]]:
        groups: dict[Move, list[PairPlan]] = defaultdict(list)
        silent = [pair for pair in self.pairs if pair.move is None]
        for pair in self.pairs:
            if pair.move is not None:
                groups[pair.move].append(pair)
        for move, pairs in groups.items():
            yield (
                f"{len(pairs):,}",
                self._heads(move),
                f"{move.layers} of {self.prefill.model.layers}",
                f"{move.nbytes:,}",
                f"{move.blocks:,}",
                f"{move.blocks_in_runs:,}",
                _time(self._ms(move.nbytes)),
                self._who(pairs),
            )
        if silent:
            nothing = ("nothing", "", "0", "0", "0", "")
            yield (f"{len(silent):,}", *nothing, f"{self._who(silent)}: asked, as all ranks are")

    def _heads(self, move: Move) -> str:
        total = self.prefill.model.heads
        if total is None:
            return "latent"
        return f"{move.heads} of {total}" + (", sliced" if move.is_sliced else "")

    def _who(self, pairs: Sequence[PairPlan]) -> str:
        shown = [
            f"{_name(pair.prefill, self.prefill.topology, skip='dp')} -> "
            f"{_name(pair.decode, self.decode.topology)}"
            for pair in pairs[:_EXAMPLES]
        ]
        return ", ".join([*shown, "…"] if len(pairs) > _EXAMPLES else shown)

    def _summary(self) -> Iterator[str]:
        per_decode: dict[RankCoords, list[PairPlan]] = defaultdict(list)
        for pair in self.pairs:
            per_decode[pair.decode].append(pair)
        asked = sorted({len(pairs) for pairs in per_decode.values()})
        sending = sorted({sum(p.move is not None for p in ps) for ps in per_decode.values()})
        waits = sorted({pair.destinations for pair in self.pairs})
        yield (
            f"Prefill ranks that each decode rank asks: {_span(asked)}, of which send: "
            f"{_span(sending)}. Decode ranks that a prefill rank waits for: {_span(waits)}."
        )
        yield from self._balance()
        if any(pair.move is not None and pair.move.is_sliced for pair in self.pairs):
            yield (
                "Heads are sliced: a page goes in one block per token, so in many small ones; with "
                "equal attention TP sizes it would go whole."
            )
        yield (
            f"The busiest rank sends {max(self._sent().values()):,} and receives "
            f"{max(self._received().values()):,} bytes of such a request: "
            f"{_time(self._slowest_ms())} at {self.rail_gbit:g} Gbit/s a rank."
        )

    def _balance(self) -> Iterator[str]:
        """How evenly the ranks of a prefill group work for all decode groups together."""
        totals: dict[RankCoords, int] = defaultdict(int)
        for pair in self.pairs:
            totals[pair.prefill] += pair.move.nbytes if pair.move is not None else 0
        if len(totals) > 1:
            least, most = min(totals.values()), max(totals.values())
            share = "equal shares" if least == most else f"{least / most:.0%} to 100% of the most"
            yield f"Over requests of all decode groups, the prefill ranks of a group send {share}."

    # --- figures ---

    def _ms(self, nbytes: int) -> float:
        return nbytes * 8 / (self.rail_gbit * 1e6)

    def _slowest_ms(self) -> float:
        return self._ms(max(*self._sent().values(), *self._received().values()))

    def _sent(self) -> dict[tuple[RankCoords, int], int]:
        """Bytes of one request that a prefill rank sends, by rank and decode group."""
        sent: dict[tuple[RankCoords, int], int] = defaultdict(int)
        for pair in self.pairs:
            sent[pair.prefill, pair.decode.dp] += pair.move.nbytes if pair.move is not None else 0
        return sent

    def _received(self) -> dict[RankCoords, int]:
        """Bytes of one request that a decode rank receives."""
        received: dict[RankCoords, int] = defaultdict(int)
        for pair in self.pairs:
            received[pair.decode] += pair.move.nbytes if pair.move is not None else 0
        return received

    def _pair_json(self, pair: PairPlan) -> dict[str, Any]:
        move = pair.move
        return {
            "prefill": _coords(pair.prefill),
            "decode": _coords(pair.decode),
            "destinations": pair.destinations,
            "aux": pair.has_aux,
            "nbytes": move.nbytes if move else 0,
            "blocks": move.blocks if move else 0,
            "blocks_in_runs": move.blocks_in_runs if move else 0,
            "heads": move.heads if move else 0,
            "layers": move.layers if move else 0,
            "sliced": bool(move and move.is_sliced),
            "time_ms": self._ms(move.nbytes) if move else 0.0,
        }


def _sizes(topology: Topology) -> dict[str, int]:
    return {name.removesuffix("_size"): size for name, size in _axes(topology)}


def _axes(topology: Topology) -> list[tuple[str, int]]:
    return [(name, getattr(topology, name)) for name in Topology.__struct_fields__]


def _coords(coords: RankCoords) -> dict[str, int]:
    return {name: getattr(coords, name) for name in RankCoords.__struct_fields__}


def _ranks(topology: Topology) -> str:
    sizes = [f"{name.removesuffix('_size')} {size}" for name, size in _axes(topology) if size > 1]
    return f"{_plural(topology.ranks, 'rank')}: {', '.join(sizes) or 'a single one'}" + (
        " (attention TP)" if topology.tp_size > 1 else ""
    )


def _name(coords: RankCoords, topology: Topology, skip: str = "") -> str:
    """Without the axes along which there is one rank only."""
    parts = [
        f"{name} {getattr(coords, name)}"
        for name in RankCoords.__struct_fields__
        if name != skip and getattr(topology, f"{name}_size") > 1
    ]
    return " ".join(parts) or "the only rank"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _span(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _time(ms: float) -> str:
    return f"{ms:.2f} ms" if ms >= 0.1 else f"{ms * 1000:.1f} µs"
