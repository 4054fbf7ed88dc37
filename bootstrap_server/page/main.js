// Asks the registry for snapshots, and shows them.

const WAIT_S = 2;
const ANSWER_DEADLINE_MS = 8000;
const RETRY_MS = 1000;
const ASK_AGAIN_MS = 300;
const FAILURES_SHOWN = 100;
const NEWS_SHOWN = 5;
const BAD_NEWS = new Set(["connection lost", "lease lapsed"]);

const byId = (id) => document.getElementById(id);
const ui = { filter: byId("filter"), state: byId("state"), link: byId("link"), news: byId("news") };
let snapshot = null;
let rows = [];
let statuses = new Map(); // reports of ranks, by key
let plans = new Map();
let receivedMs = 0; // of performance.now()
let heardMs = performance.now();
let problem = "";
let lastEvent = null;
let openKey = null;

// The registry's clock of leases, as far as we know it.
const nowS = () => snapshot.now_s + (performance.now() - receivedMs) / 1000;
const wallS = () => snapshot.time_s + (performance.now() - receivedMs) / 1000;

const rails = (row) => {
  const all = row.status?.rails ?? [];
  const up = all.filter((rail) => rail[1]).length;
  return all.length ? `${up} of ${all.length} up` : "";
};
const roomsText = (row) => {
  const counts = row.status?.rooms;
  if (!counts) return "";
  return ["open", "done", "failed", "aborted"].map((end) => counts[end] ?? 0).join(" · ");
};
// Rooms of the last minutes, with how many ranks are in trouble.
const endedText = (one) => {
  const ranks = rows.filter((row) => row.instance === one.name);
  const ended = ["done", "failed", "aborted"].map((end) => sum(ranks, (row) => row.ended?.[end] ?? 0));
  const troubled = ranks.filter((row) => row.now === "trouble").length;
  const text = ended.join(" · ");
  if (!troubled) return { mark: "", text };
  return { mark: "✕", text: `${text}, ${troubled} rank${troubled > 1 ? "s" : ""} in trouble` };
};
const lastFailure = (row) => {
  const [failure] = [...(row.status?.failures ?? [])].sort((a, b) => b[0] - a[0]);
  return failure ? failure[1] : "";
};
const renewedText = (row) => {
  if (row.lostS !== null) return `${row.state === "gone" ? "lapsed" : "lost"} ${ageText(nowS() - row.lostS)} ago`;
  return row.renewedS === null ? "" : `${ageText(nowS() - row.renewedS)} ago`;
};
const upText = (row) => (row.startedS ? ageText(wallS() - row.startedS) : "");
const peersText = (row) => (row.status && row.role === "prefill" ? String(row.status.peers_total ?? 0) : "");
const outText = (row) => (row.status ? rateText(rateOf(row, 2)) : "");

const rankTable = new LongTable(
  byId("ranks"),
  [
    { title: "State", of: (row) => STATES[row.now] },
    { title: "Instance", className: "wide instance", of: (row) => row.instance },
    { title: "Rank", opens: true },
    { title: "Endpoint", className: "wide", of: (row) => row.where },
    { title: "Renewed", of: renewedText },
    { title: "Up for", className: "wide number", of: upText },
    { title: "Out", className: "wide number", of: outText },
    { title: "Rails", className: "wide", of: rails },
    { title: "Peers", className: "wide number", of: peersText },
    { title: "Open · done · failed · aborted", className: "wide number", of: roomsText },
    { title: "Trouble, or last failure", className: "wide cut", of: (row) => row.trouble ?? lastFailure(row) },
  ],
  (row) => openDetails(row.key),
);
const matrix = new Matrix(byId("matrix"), byId("cell-text"));
const ratesTable = new PlainTable(
  byId("rates"),
  [
    { title: "Transport", of: (rate) => rate.transport },
    { title: "In", className: "number", of: (rate) => rateText(rate.inRate) },
    { title: "Out", className: "number", of: (rate) => rateText(rate.outRate) },
  ],
  "No rank has reported a rate.",
);
const railsTable = new PlainTable(
  byId("rails"),
  [
    { title: "Rail", of: (rail) => rail.name },
    { title: "Up", className: "number", of: (rail) => String(rail.up) },
    { title: "Down", className: "wrap", of: (rail) => (rail.down ? { mark: "✕", text: `${rail.down}, first ${rail.downAt}` } : { mark: "", text: "0" }) },
    { title: "Rate", className: "number", of: (rail) => rateText(rail.rate) },
  ],
  "No rank has reported its rails.",
);
const instancesTable = new PlainTable(
  byId("instances"),
  [
    { title: "Role", of: (one) => one.role },
    { title: "Server", of: (one) => one.name },
    { title: "Ranks", of: (one) => ({ mark: one.registered === one.expected ? "●" : "!", text: `${one.registered} of ${one.expected}` }) },
    { title: "Done · failed · aborted in 5 min", of: endedText },
    { title: "Topology", of: (one) => one.topology.map((size, axis) => `${AXES[axis]} ${size}`).join(" × ") },
    { title: "KV cache", of: (one) => `${one.format.kv_cache_dtype}, page ${one.format.page_size}` },
    { title: "Generation", className: "number", of: (one) => String(one.generation) },
  ],
  "No instance is registered.",
);
// A router tells of itself every second.
const ROUTER_LATE_S = 5;
const heardText = (one) => {
  const age = nowS() - one.last_s;
  return { mark: age > ROUTER_LATE_S ? "!" : "●", text: `${ageText(age)} ago` };
};
const wellText = (wells) => ({ mark: wells.well < wells.all ? "!" : "", text: `${wells.well} of ${wells.all} well` });
const partText = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "");
const routersTable = new PlainTable(
  byId("routers"),
  [
    { title: "Router", of: (one) => (one.port ? `${one.address} port ${one.port}` : one.address) },
    { title: "Heard", of: heardText },
    { title: "Under way", className: "number", of: (one) => String(one.requests) },
    { title: "Waiting", className: "number", of: (one) => String(one.waiting) },
    { title: "Answered · refused · failed", of: (one) => `${one.answered} · ${one.refused} · ${one.failed}` },
    { title: "Prefill servers", of: (one) => wellText(one.prefill) },
    { title: "Decode servers", of: (one) => wellText(one.decode) },
    { title: "In a cache", className: "number", of: (one) => partText(one.cached_tokens, one.prompt_tokens) },
    { title: "As expected", className: "number", of: (one) => partText(one.cached_tokens, one.expected_cached_tokens) },
    { title: "Time off by", className: "number", of: (one) => (one.error === null ? "" : partText(one.error, 1)) },
    { title: "Version", of: (one) => one.version },
  ],
  "No router asks this registry for servers.",
);
const awayTable = new PlainTable(
  byId("away"),
  [
    { title: "When", of: (one) => `${ageText(nowS() - one.last_s)} ago` },
    { title: "Times", className: "number", of: (one) => String(one.times) },
    { title: "From", of: (one) => one.address },
    { title: "Why", className: "wrap", of: (one) => ({ mark: "✕", text: one.why }) },
  ],
  "None, in the last 10 minutes.",
);
const failuresTable = new PlainTable(
  byId("failures"),
  [
    { title: "When", of: (failure) => `${ageText(wallS() - failure.atS)} ago` },
    { title: "Times", className: "number", of: (failure) => String(failure.count) },
    { title: "Rank", of: (failure) => `${failure.row.instance} ${failure.row.name}` },
    { title: "Reason", className: "wrap", of: (failure) => failure.reason },
  ],
  "No rank has reported a failure.",
);
const eventsTable = new PlainTable(
  byId("events"),
  [
    { title: "When", of: (event) => `${ageText(nowS() - event.at_s)} ago` },
    { title: "What", of: (event) => ({ mark: BAD_NEWS.has(event.what) ? "✕" : "", text: event.what }) },
    { title: "Rank", of: (event) => `${event.instance} ${rankName(event.coords)}` },
    { title: "Endpoint", of: (event) => `${event.host}:${event.port}` },
  ],
  "Nothing has happened since the registry started.",
);

function showTotals() {
  const count = (state) => String(rows.filter((row) => row.now === state).length);
  const missing = sum(snapshot.instances, (one) => one.expected - one.registered);
  const prefill = rows.filter((row) => row.role === "prefill" && row.now !== "gone");
  const servers = (role) => String(snapshot.instances.filter((one) => one.role === role).length);
  const totals = [
    ["Prefill servers", servers("prefill"), ""],
    ["Decode servers", servers("decode"), ""],
    ["Live", count("live"), ""],
    ["Connection lost", count("lost"), "bad"],
    ["Late", count("late"), "warn"],
    ["Gone", count("gone"), "bad"],
    ["Missing", String(missing), "warn"],
    ["In trouble", count("trouble"), "bad"],
    ["Out", rateText(sum(rows.filter(isHeard), (row) => rateOf(row, 2))), ""],
    ["Rooms open", String(sum(prefill, (row) => row.status?.rooms?.open ?? 0)), ""],
    ["Rooms failed", String(sum(prefill, (row) => row.status?.rooms?.failed ?? 0)), ""],
    ["Rooms aborted", String(sum(prefill, (row) => row.status?.rooms?.aborted ?? 0)), ""],
  ];
  const list = byId("totals");
  totals.forEach(([title, text, tone], index) => {
    let item = list.children[index];
    if (!item) {
      item = list.appendChild(element("div"));
      item.append(element("dt", "", title), element("dd"));
    }
    setText(item.lastElementChild, text);
    setClass(item, text === "0" ? "" : tone);
  });
}

// What happened since the last snapshot, for the live region.
function showNews() {
  const seen = lastEvent;
  const [newest] = snapshot.events;
  lastEvent = Math.max(seen ?? 0, newest?.number ?? 0);
  if (seen === null) return;
  const fresh = snapshot.events.filter((event) => event.number > seen).reverse();
  for (const event of fresh.slice(-NEWS_SHOWN)) {
    const afterS = nowS() - event.at_s;
    const line = element("p", BAD_NEWS.has(event.what) ? "bad" : "");
    line.textContent =
      `${event.instance} rank ${rankName(event.coords)} at ${event.host}:${event.port}: ` +
      `${event.what} (shown ${afterS.toFixed(1)} s later)`;
    line.dataset.what = event.what;
    line.dataset.shownAfterS = afterS.toFixed(3);
    ui.news.append(line);
  }
  if (fresh.length > NEWS_SHOWN) {
    ui.news.append(element("p", "", `and ${fresh.length - NEWS_SHOWN} events more (below)`));
  }
  while (ui.news.children.length > NEWS_SHOWN) ui.news.firstElementChild.remove();
}

function openDetails(key) {
  openKey = key;
  showDetails();
  byId("details").scrollIntoView({ block: "nearest" });
}

function detailsOf(row) {
  const peers = row.status?.peers ?? [];
  const facts = [
    ["State", STATES[row.now].text],
    ...(row.trouble ? [["Trouble", row.trouble]] : []),
    ["Renewed", renewedText(row)],
    ["Endpoint", row.where],
    ["Up for", upText(row)],
    ["Rooms open · done · failed · aborted", roomsText(row)],
    ...(row.role === "prefill" ? [["Decode ranks", `${row.status?.peers_total ?? 0}`]] : []),
  ];
  for (const [transport, inRate, outRate] of row.status?.rates ?? []) {
    facts.push([`Rate, ${transport}`, `in ${rateText(inRate)}, out ${rateText(outRate)}`]);
  }
  for (const [name, isUp, rate] of row.status?.rails ?? []) {
    facts.push([`Rail ${name}`, `${isUp ? "● up" : "✕ down"}, ${rateText(rate)}`]);
  }
  for (const peer of peers.slice(0, 20)) {
    facts.push([
      "Connected to",
      `${rankName(peer[PEER.coords])} at ${peer[PEER.host]} over ${peer[PEER.transport]}, ` +
        rateText(peer[PEER.rate]),
    ]);
  }
  for (const [atS, reason, count] of row.status?.failures ?? []) {
    facts.push([`Failed ${count} ×, last ${ageText(wallS() - atS)} ago`, reason]);
  }
  return facts;
}

function showDetails() {
  const panel = byId("details");
  const row = rows.find((one) => one.key === openKey);
  panel.hidden = openKey === null;
  if (openKey === null) return;
  if (!panel.firstElementChild) {
    const close = panel.appendChild(element("button", "close", "Close"));
    close.type = "button";
    close.addEventListener("click", () => openDetails(null));
    panel.append(element("h3"), element("dl"));
  }
  const [, title, list] = panel.children;
  setText(title, row ? `${row.instance} rank ${row.name}` : "This rank is no longer registered.");
  const facts = row ? detailsOf(row) : [];
  while (list.children.length > 2 * facts.length) list.lastElementChild.remove();
  facts.forEach(([name, text], index) => {
    const term = list.children[2 * index] ?? list.appendChild(element("dt"));
    const value = list.children[2 * index + 1] ?? list.appendChild(element("dd"));
    setText(term, name);
    setText(value, text);
  });
}

function showLink() {
  const silentS = (performance.now() - heardMs) / 1000;
  const lost = problem !== "";
  setClass(ui.link, lost ? "pill bad" : "pill");
  const told = snapshot ? `✕ no answer from the registry for ${ageText(silentS)}: ${problem}` : `✕ ${problem}`;
  setText(ui.link, lost ? told : "● up to date");
}

function show() {
  const beganMs = performance.now();
  showLink();
  if (!snapshot) return;
  const now = nowS();
  rows = rows.filter((row) => row.state !== "gone" || now - row.lostS < snapshot.gone_kept_s);
  for (const row of rows) {
    row.now = stateOf(row, now, snapshot.renew_s);
    row.className = row.now;
  }
  byId("ranks").classList.toggle("one-instance", new Set(rows.map((row) => row.instance)).size === 1);
  const asked = ui.filter.value.toLowerCase().trimStart().replace(/\s+/g, " ");
  const wanted = rows.filter((row) => isWanted(row, asked, ui.state.value)).sort(problemsFirst);
  setText(byId("found"), `${wanted.length} of ${rows.length} ranks`);
  showTotals();
  rankTable.show(wanted);
  const inOrder = [...wanted].sort(
    (a, b) => byText(a.instance, b.instance) || compareCoords(a.coords, b.coords),
  );
  matrix.show(inOrder.filter((row) => row.role === "prefill" && row.now !== "gone"), columnsOf(wanted), plans);
  ratesTable.show(byTransport(wanted.filter(isHeard)));
  railsTable.show(byRail(wanted.filter(isHeard)));
  instancesTable.show(snapshot.instances);
  routersTable.show(snapshot.routers);
  awayTable.show(snapshot.turned_away);
  failuresTable.show(failuresOf(wanted).slice(0, FAILURES_SHOWN));
  eventsTable.show(snapshot.events);
  showDetails();
  byId("main").dataset.updateMs = (performance.now() - beganMs).toFixed(1);
}

function take(answer) {
  if (answer.started !== snapshot?.started) {
    // Another registry, or one that has been started again: its events count from 1.
    lastEvent = snapshot === null ? null : 0;
    statuses.clear();
  }
  snapshot = answer;
  receivedMs = performance.now();
  for (const [name, coords, , status] of snapshot.reports) statuses.set(keyOf(name, coords), status);
  rows = rowsOf(snapshot, statuses);
  if (statuses.size > rows.length) {
    const known = new Set(rows.map((row) => row.key));
    statuses = new Map([...statuses].filter(([key]) => known.has(key)));
  }
  plans = plansOf(snapshot);
  setText(byId("late-after"), `${LATE_INTERVALS * snapshot.renew_s} s`);
  setText(byId("lapsed-after"), `${snapshot.lease_s} s`);
  setText(byId("renewed-every"), `${snapshot.renew_s} s`);
  showNews();
}

async function ask() {
  const path = `v1/status?after=${snapshot?.revision ?? 0}&wait_s=${WAIT_S}`;
  const answer = await fetch(path, { signal: AbortSignal.timeout(ANSWER_DEADLINE_MS) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const found = await answer.json();
  if (found.revision !== snapshot?.revision) take(found);
  heardMs = performance.now();
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Nobody sees a hidden page, and the registry need not work for it.
const visible = () =>
  document.hidden
    ? new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }))
    : null;

async function watch() {
  for (;;) {
    await visible();
    try {
      await ask();
      problem = "";
    } catch (error) {
      problem = error.name === "TimeoutError" ? "it takes too long" : error.message;
    }
    show();
    await pause(problem ? RETRY_MS : ASK_AGAIN_MS);
  }
}

ui.filter.addEventListener("input", show);
ui.state.addEventListener("change", show);
byId("search").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    ui.filter.focus();
  } else if (event.key === "Escape" && event.target === ui.filter) {
    ui.filter.value = "";
    show();
  }
});
setText(byId("place"), location.host);
setInterval(show, 1000);
watch();
