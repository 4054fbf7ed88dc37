// What the page knows: pure functions from the registry's snapshot to rows. No DOM in here.

const STATES = {
  lost: { mark: "✕", text: "connection lost", order: 0 },
  late: { mark: "!", text: "late", order: 1 },
  gone: { mark: "✕", text: "gone", order: 2 },
  missing: { mark: "–", text: "missing", order: 3 },
  trouble: { mark: "!", text: "in trouble", order: 4 },
  live: { mark: "●", text: "live", order: 5 },
  stock: { mark: "○", text: "no lease", order: 6 },
};
const LATE_INTERVALS = 1.5;
const AXES = ["dp", "cp", "tp", "pp"];
// By array position: how RankStatus encodes its lists (bootstrap_server/ranks/rank_status.py).
const PEER = { id: 0, host: 1, coords: 2, topology: 3, transport: 4, rate: 5 };

function rankName(coords) {
  return coords.map((number, axis) => `${AXES[axis]} ${number}`).join(" ");
}

// Only the axes that tell ranks of this topology apart.
function shortName(coords, topology) {
  const parts = coords.map((number, axis) => (topology[axis] > 1 ? `${AXES[axis]}${number}` : ""));
  return parts.filter(Boolean).join(" ") || "rank 0";
}

function stateOf(row, nowS, renewS) {
  if (row.state) return row.state;
  if (row.lostS !== null) return "lost";
  if (row.renewedS === null) return "stock";
  if (nowS - row.renewedS > LATE_INTERVALS * renewS) return "late";
  return row.trouble ? "trouble" : "live";
}

function keyOf(name, coords) {
  return `${name} ${coords}`;
}

// For narrow places; with the name of the instance where there are several.
function placeOf(snapshot, instance, coords) {
  const short = shortName(coords, instance.topology);
  return snapshot.instances.length > 1 ? `${instance.name} ${short}` : short;
}

function rowOf(snapshot, instance, rank, status) {
  const name = rankName(rank.coords);
  const where = `${rank.host}:${rank.port}`;
  return {
    key: keyOf(instance.name, rank.coords),
    instance: instance.name,
    role: instance.role,
    coords: rank.coords,
    short: placeOf(snapshot, instance, rank.coords),
    name,
    where,
    startedS: rank.started_s,
    renewedS: rank.renewed_s,
    lostS: rank.lost_s,
    ended: rank.ended,
    trouble: rank.trouble,
    status,
    state: null,
    words: `${instance.name} ${name} ${where} `.toLowerCase(),
  };
}

function missingRow(snapshot, instance, coords) {
  const name = rankName(coords);
  return {
    key: keyOf(instance.name, coords),
    instance: instance.name,
    role: instance.role,
    coords,
    short: placeOf(snapshot, instance, coords),
    name,
    where: "",
    startedS: 0,
    renewedS: null,
    lostS: null,
    ended: null,
    trouble: null,
    status: null,
    state: "missing",
    words: `${instance.name} ${name} `.toLowerCase(),
  };
}

// A rank whose lease has lapsed lately. Its instance may be forgotten.
function goneRow(gone) {
  const name = rankName(gone.coords);
  const where = `${gone.host}:${gone.port}`;
  return {
    key: keyOf(gone.instance, gone.coords),
    instance: gone.instance,
    role: gone.role,
    coords: gone.coords,
    short: `${gone.instance} ${name}`,
    name,
    where,
    startedS: 0,
    renewedS: null,
    lostS: gone.at_s,
    ended: null,
    trouble: null,
    status: gone.rooms && { rooms: gone.rooms },
    state: "gone",
    words: `${gone.instance} ${name} ${where} `.toLowerCase(),
  };
}

// `statuses` are the reports that have come so far, by key. Until a new one is here the former is
// shown; `rank.report` is null where there is none.
function rowsOf(snapshot, statuses) {
  const gone = snapshot.gone.map(goneRow);
  const lapsed = new Set(gone.map((row) => row.key));
  const rows = snapshot.instances.flatMap((instance) => [
    ...instance.ranks.map((rank) => {
      const status = statuses.get(keyOf(instance.name, rank.coords));
      return rowOf(snapshot, instance, rank, rank.report === null ? null : (status ?? null));
    }),
    ...instance.missing
      .filter((coords) => !lapsed.has(keyOf(instance.name, coords)))
      .map((coords) => missingRow(snapshot, instance, coords)),
  ]);
  return rows.concat(gone);
}

function compareCoords(a, b) {
  for (let axis = 0; axis < a.length; axis += 1) {
    if (a[axis] !== b[axis]) return a[axis] - b[axis];
  }
  return 0;
}

function byText(a, b) {
  return a < b ? -1 : Number(a > b);
}

function problemsFirst(a, b) {
  return (
    STATES[a.now].order - STATES[b.now].order ||
    byText(a.instance, b.instance) ||
    compareCoords(a.coords, b.coords)
  );
}

// What a rank has reported last is past once its connection is lost.
function isHeard(row) {
  return row.now !== "lost" && row.now !== "gone";
}

function isProblem(state) {
  return STATES[state].order < STATES.live.order;
}

// `asked` is part of "INSTANCE dp 0 cp 0 tp 1 pp 0 HOST:PORT "; "tp 1 " leaves tp 10 out.
function isWanted(row, asked, state) {
  if (state && !(state === "problem" ? isProblem(row.now) : row.now === state)) return false;
  return row.words.includes(asked);
}

function sum(rows, value) {
  return rows.reduce((total, row) => total + value(row), 0);
}

function rateOf(row, column) {
  return row.status ? sum(row.status.rates ?? [], (rate) => rate[column]) : 0;
}

function byTransport(rows) {
  const totals = new Map();
  for (const row of rows) {
    for (const [transport, inRate, outRate] of row.status?.rates ?? []) {
      const total = totals.get(transport) ?? { transport, inRate: 0, outRate: 0 };
      total.inRate += inRate;
      total.outRate += outRate;
      totals.set(transport, total);
    }
  }
  return [...totals.values()].sort((a, b) => b.outRate + b.inRate - a.outRate - a.inRate);
}

// Rails of the same name on all ranks together; those that are down somewhere first.
function byRail(rows) {
  const totals = new Map();
  for (const row of rows) {
    for (const [name, isUp, rate] of row.status?.rails ?? []) {
      const total = totals.get(name) ?? { name, up: 0, down: 0, rate: 0, downAt: "" };
      total.rate += rate;
      total[isUp ? "up" : "down"] += 1;
      if (!isUp && !total.downAt) total.downAt = `${row.instance} ${row.name} at ${row.where}`;
      totals.set(name, total);
    }
  }
  return [...totals.values()].sort((a, b) => b.down - a.down || byText(a.name, b.name));
}

function failuresOf(rows) {
  const all = rows.flatMap((row) =>
    (row.status?.failures ?? []).map(([atS, reason, count]) => ({ row, atS, reason, count })),
  );
  return all.sort((a, b) => b.atS - a.atS);
}

// The decode ranks that some prefill rank is connected to, one column each.
function columnsOf(rows) {
  const columns = new Map();
  for (const row of rows) {
    for (const peer of row.status?.peers ?? []) {
      const id = peer[PEER.id];
      if (columns.has(id)) continue;
      const coords = peer[PEER.coords];
      const topology = peer[PEER.topology];
      columns.set(id, {
        id,
        host: peer[PEER.host],
        coords,
        topology,
        short: shortName(coords, topology),
        name: `decode ${rankName(coords)} at ${peer[PEER.host]}`,
      });
    }
  }
  return [...columns.values()].sort(
    (a, b) =>
      byText(a.topology.join(), b.topology.join()) ||
      compareCoords(a.coords, b.coords) ||
      byText(a.host, b.host) ||
      byText(a.id, b.id),
  );
}

// Whom decode ranks of each topology ask, by instance: sets of "tp pp>cp tp pp".
function plansOf(snapshot) {
  const plans = new Map();
  for (const instance of snapshot.instances) {
    for (const plan of instance.plans) {
      const pairs = new Set();
      for (const [tp, pp, places] of plan.asked) {
        for (const place of places) pairs.add(`${tp} ${pp}>${place.join(" ")}`);
      }
      plans.set(`${instance.name} ${plan.topology}`, plan.problem ? null : pairs);
    }
  }
  return plans;
}

function isPlanned(plans, row, column) {
  const pairs = plans.get(`${row.instance} ${column.topology}`);
  if (!pairs) return null;
  const [, cp, tp, pp] = row.coords;
  return pairs.has(`${column.coords[2]} ${column.coords[3]}>${cp} ${tp} ${pp}`);
}

function cellOf(plans, row, column) {
  row.peerOf ??= new Map((row.status?.peers ?? []).map((peer) => [peer[PEER.id], peer]));
  const peer = row.peerOf.get(column.id);
  const planned = isPlanned(plans, row, column);
  if (peer) {
    return {
      kind: planned === false ? "unplanned" : "connected",
      rate: peer[PEER.rate],
      transport: peer[PEER.transport],
    };
  }
  // Of the peers that did not fit into its report nothing is known.
  const isCut = (row.status?.peers_total ?? 0) > (row.status?.peers ?? []).length;
  return { kind: planned && row.status && !isCut ? "planned" : "none", rate: 0, transport: "" };
}

function rateText(bytesPerS) {
  if (bytesPerS < 1) return "0";
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  const power = Math.min(Math.floor(Math.log10(bytesPerS) / 3), units.length - 1);
  const value = bytesPerS / 1000 ** power;
  return `${value < 10 && power > 0 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

function ageText(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}
