// Asks the gateway for a view of the engine twice a second and draws it.
// Whatever comes from a request (ids, users, details) is put in as text, never as HTML.

const POLL_MS = 500;
const RETRY_MS = 2000;
const PATIENCE_MS = 5000;
const HISTORY_S = 120;
const RATE_WINDOW_S = 2.5;
const MOST_CARDS = 60;
const DENSE_FROM = 9;
const COLOURS = 8;
const KEY = "deepinfer.key";

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// ---- words and numbers ----------------------------------------------------------------------

const count = (n) => Math.round(n).toLocaleString("en");
const rate = (n) => (n >= 100 ? count(n) : n.toFixed(1));
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(0)} %` : "–");

function duration(ms) {
  if (ms < 10) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 60e3) return `${(ms / 1e3).toFixed(1)} s`;
  if (ms < 3600e3) return `${Math.floor(ms / 60e3)} min ${Math.floor((ms % 60e3) / 1e3)} s`;
  return `${Math.floor(ms / 3600e3)} h ${Math.floor((ms % 3600e3) / 60e3)} min`;
}

function ago(ms) {
  if (ms < 1000) return "now";
  return `${duration(ms < 60e3 ? Math.floor(ms / 1e3) * 1e3 : ms).replace(".0 s", " s")} ago`;
}

const median = (numbers) => {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
};
const sum = (numbers) => numbers.reduce((total, n) => total + n, 0);
const nameOf = (user) => user || "anonymous";

// ---- elements -------------------------------------------------------------------------------

function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** The svg of a plot, as large as the plot is now. */
function canvas(plot) {
  let svg = plot.querySelector("svg");
  if (!svg) {
    svg = shape("svg", { "aria-hidden": "true" });
    plot.replaceChildren(svg);
  }
  const width = plot.clientWidth;
  const height = plot.clientHeight;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  return { svg, width, height };
}

const colours = new Map();
function paint(node, user) {
  if (!colours.has(user)) colours.set(user, `var(--t${colours.size % COLOURS})`);
  node.style.setProperty("--colour", colours.get(user));
  return node;
}

// ---- asking ---------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The gateway did not answer; the message is why. */
class Unreachable extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(path, {
    headers: key ? { authorization: `Bearer ${key}` } : {},
    signal: AbortSignal.timeout(PATIENCE_MS),
    cache: "no-store",
  }).catch((error) => {
    throw new Unreachable(error.name);
  });
  if (response.ok) return response.json();
  const body = await response.json().catch(() => ({}));
  throw new Refused(response.status, body?.error?.message ?? `status ${response.status}`);
}

let paused = false;
let latest = null; // the latest view
let seenAt = 0;
let timer = 0;
let asking = false;

async function poll() {
  if (asking) return; // one at a time, so that views come in their order
  asking = true;
  clearTimeout(timer);
  let wait = POLL_MS;
  if (!paused && !document.hidden) {
    try {
      const view = await ask("v1/engine/view");
      if (!paused) show(view);
    } catch (error) {
      wait = RETRY_MS;
      fail(error);
    }
  }
  asking = false;
  if ($("ask").hidden) timer = setTimeout(poll, wait);
}

function fail(error) {
  const old = latest ? ` What is shown is ${duration(performance.now() - seenAt)} old.` : "";
  if (error.status === 401 || error.status === 403) {
    state("denied", "needs a key");
    setText($("ask-why"), error.status === 403 || sessionStorage.getItem(KEY)
      ? `The engine says: ${error.message}.`
      : "Only an operator's key shows the requests of all tenants.");
    $("ask").hidden = false;
    document.querySelector("main").hidden = true;
    $("key").focus();
  } else if (error.status) {
    state(error.status === 429 ? "loading" : "down", error.status === 429 ? "reconnecting" : "down",
      `The engine does not answer: ${error.message}.${old}`);
  } else if (error instanceof Unreachable && error.message === "TimeoutError") {
    state("down", "no answer", `The engine did not answer within ${PATIENCE_MS / 1e3} s.${old}`);
  } else if (error instanceof Unreachable) {
    state("down", "unreachable",
      `The gateway at ${location.host} does not answer; it is asked again every ${RETRY_MS / 1e3} s.${old}`);
  } else {
    state("down", "this page failed", `This page failed: ${error.message}.`);
    console.error(error);
  }
}

function state(name, word, banner = "") {
  document.body.dataset.state = name;
  setText($("health").lastElementChild, word);
  setText($("banner"), banner);
  $("banner").hidden = !banner;
}

// ---- the whole view -------------------------------------------------------------------------

const history = []; // the numbers of past views, oldest first; at is in seconds

function show(view) {
  latest = view;
  seenAt = performance.now();
  $("ask").hidden = true;
  document.querySelector("main").hidden = false;
  remember(view);
  // Names in order, so that a page that is loaded again gives the same colours.
  for (const { user_id } of [...view.users].sort((a, b) => (a.user_id < b.user_id ? -1 : 1))) {
    paint(document.body, user_id);
  }
  if (view.ok) state("ok", "healthy");
  else if (view.worker === "starting") {
    state("loading", "loading", "The device worker is loading; what was accepted goes on when it is ready.");
  } else state("down", view.worker === "down" ? "down" : "stuck", `${view.cause || "no progress"}.`);
  const { engine, stats } = view;
  setText($("model"), view.models[0] ?? "");
  setText($("facts"), [engine.device, engine.dtype, `${count(engine.max_model_len)} tokens a request`,
    `up ${duration(stats.uptime_s * 1e3)}`].join(" · "));
  document.title = `${count(stats.running)} running · ${count(stats.waiting)} waiting · deepinfer`;
  showGauges(view);
  showBoard(view);
  showSteps(view);
  showBlocks(view);
  showTenants(view);
}

function remember(view) {
  const at = view.now_ns / 1e9;
  const last = history.at(-1);
  if (last && (at < last.at || view.stats.output_tokens < last.tokens)) history.length = 0; // another engine
  if (last && at - last.at < 0.1 && history.length) return;
  history.push({
    at,
    tokens: view.stats.output_tokens,
    users: new Map(view.users.map((u) => [u.user_id, u.output_tokens])),
    busy: view.stats.worker_busy_s,
    idle: view.stats.worker_idle_s,
    running: view.stats.running,
    waiting: view.stats.waiting,
    used: view.blocks_total - view.blocks_free - view.blocks_cached,
    stepMs: median(view.steps.filter((s) => s.ended_ns).slice(-40).map((s) => (s.ended_ns - s.began_ns) / 1e6)),
    cached: view.stats.cached_tokens / Math.max(view.stats.prompt_tokens, 1),
    preemptions: view.stats.preemptions,
    restarts: view.stats.worker_restarts,
    rate: 0,
  });
  history.at(-1).rate = over((point) => point.tokens);
  while (history[0].at < at - HISTORY_S) history.shift();
}

/** How much a number of the history grew per second lately, at its point `index`. */
function over(number, index = history.length - 1) {
  const end = history[index];
  let begin = index;
  while (begin > 0 && history[begin].at > end.at - RATE_WINDOW_S) begin -= 1;
  const seconds = end.at - history[begin].at;
  return seconds > 0 ? Math.max(0, (number(end) - number(history[begin])) / seconds) : 0;
}

// ---- gauges ---------------------------------------------------------------------------------

const gauges = new Map();

/** A number, and how it went in the last minute: `series` takes it from a point of the history. */
function gauge(name, value, unit, note, series, alert = false) {
  let node = gauges.get(name);
  if (!node) {
    node = make("div", "gauge");
    node.append(make("span", "", name), make("b"), make("em"));
    node.children[1].append(make("span"), make("small"));
    node.append(shape("svg", { "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 24" }));
    node.lastChild.append(shape("polygon", {}), shape("polyline", {}));
    $("gauges").append(node);
    gauges.set(name, node);
  }
  node.classList.toggle("alert", alert);
  setText(node.children[1].firstChild, value);
  setText(node.children[1].lastChild, unit);
  setText(node.children[2], note);
  const points = history.map(series);
  const top = Math.max(...points, 1e-9);
  const now = history.at(-1).at;
  const from = Math.max(now - HISTORY_S / 2, Math.min(history[0].at, now - 5));
  const line = history
    .map((point, i) => [((point.at - from) / (now - from)) * 100, 22 - (points[i] / top) * 20])
    .filter(([x]) => x >= 0).map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
  const [first] = line[0].split(",");
  node.querySelector("polygon").setAttribute("points", `${line.join(" ")} 100,24 ${first},24`);
  node.querySelector("polyline").setAttribute("points", line.join(" "));
}

function showGauges(view) {
  const { stats, engine } = view;
  const { stepMs } = history.at(-1);
  const used = view.blocks_total - view.blocks_free - view.blocks_cached;
  gauge("Output", rate(history.at(-1).rate), "tok/s", `${count(stats.output_tokens)} in all`, (p) => p.rate);
  gauge("In slots", count(stats.running), `of ${count(engine.max_num_seqs)}`,
    `${count(stats.prefilling)} of them prefill`, (p) => p.running);
  gauge("Waiting", count(stats.waiting), "", `${count(stats.refused)} refused in all`, (p) => p.waiting);
  gauge("KV blocks in use", percent(used, view.blocks_total), "",
    `${count(view.blocks_free + view.blocks_cached)} of ${count(view.blocks_total)} available`, (p) => p.used);
  gauge("Step", stepMs ? duration(stepMs).split(" ")[0] : "–", stepMs ? duration(stepMs).split(" ")[1] : "",
    `last ended ${ago(stats.last_step_age_s * 1e3)}`, (p) => p.stepMs);
  gauge("Prompt from cache", percent(stats.cached_tokens, stats.prompt_tokens), "",
    `${count(stats.cached_tokens)} of ${count(stats.prompt_tokens)} tokens`, (p) => p.cached);
  gauge("Preemptions", count(stats.preemptions), "", `${count(stats.recomputed_tokens)} tokens recomputed`, (p) => p.preemptions);
  gauge("Worker restarts", count(stats.worker_restarts), "", `worker is ${view.worker}`,
    (p) => p.restarts, stats.worker_restarts > 0 && view.worker !== "ready");
}

// ---- requests -------------------------------------------------------------------------------

const columns = new Map([...document.querySelectorAll(".column")].map((c) => [c.dataset.column, c]));
const cards = new Map(); // by key: {node, column, request}
let opened = null; // the key of the card whose story is open

function newCard(key) {
  const item = make("li");
  const node = make("button", "card");
  node.type = "button";
  const top = make("span", "top");
  top.append(make("span", "id"), make("span", "when"));
  const bar = make("span", "bar");
  bar.append(make("i"), make("u"));
  const low = make("span", "low");
  low.append(make("span", "who"), make("span", "what"));
  node.append(top, bar, low);
  node.addEventListener("click", () => openStory(key));
  item.append(node);
  return { key, item, node, column: "", request: null };
}

function fillCard(card, column, request) {
  const { node } = card;
  const [id, when] = node.children[0].children;
  const [bar, cached] = node.children[1].children;
  const [who, what] = node.children[2].children;
  const prefix = `${request.user_id}/`;
  setText(id, request.request_id.startsWith(prefix) ? request.request_id.slice(prefix.length) : request.request_id);
  id.title = request.request_id;
  paint(node, request.user_id);
  who.className = "who";
  who.title = "";
  setText(who, nameOf(request.user_id));
  const words = [];
  let done = 0;
  let fromCache = 0;
  if (column === "ended") {
    setText(when, ago(request.ago_ms));
    who.className = `who reason ${["stop", "length", "abort"].includes(request.reason) ? request.reason : "failed"}`;
    setText(who, request.detail && request.detail !== request.reason ? `${request.reason} · ${request.detail}` : request.reason);
    who.title = `${nameOf(request.user_id)}: ${who.textContent}`;
    words.push(`${count(request.output_tokens)} tok`, duration(request.total_ms));
  } else {
    setText(when, duration(request.age_ms));
    if (column === "running") {
      done = request.output_tokens / Math.max(request.max_tokens, 1);
      words.push(`${count(request.output_tokens)} / ${count(request.max_tokens)}`, `${count(request.blocks)} blk`);
    } else if (column === "prefilling") {
      done = request.computed_tokens / Math.max(request.prompt_tokens + request.output_tokens, 1);
      fromCache = request.cached_tokens / Math.max(request.prompt_tokens, 1);
      words.push(`${count(request.computed_tokens)} / ${count(request.prompt_tokens + request.output_tokens)}`, `${count(request.blocks)} blk`);
    } else {
      words.push(`${count(request.prompt_tokens)} prompt`);
      if (request.output_tokens) words.push(`${count(request.output_tokens)} out`);
    }
    if (request.priority) words.push(`p${request.priority}`);
    if (request.preemptions) words.push(`⟲${request.preemptions}`);
  }
  setText(what, words.join(" · "));
  bar.style.transform = `scaleX(${Math.min(done, 1)})`;
  cached.style.transform = `scaleX(${Math.min(fromCache, 1)})`;
  node.setAttribute("aria-expanded", String(opened === card.key));
  card.column = column;
  card.request = request;
}

function showBoard(view) {
  const places = { waiting: [], prefilling: [], running: [], ended: [] };
  const placed = new Set();
  const put = (column, request) => {
    let key = `${request.user_id}\n${request.request_id}`;
    while (placed.has(key)) key += "\n";
    placed.add(key);
    if (places[column].length < MOST_CARDS) places[column].push([key, request]);
  };
  for (const request of view.requests) put(request.status, request);
  for (const request of [...view.ended].reverse()) put("ended", request);

  const before = new Map();
  if (!calm.matches) for (const card of cards.values()) before.set(card, card.node.getBoundingClientRect());
  const kept = new Set();
  const moved = [];
  for (const [column, list] of Object.entries(places)) {
    const ol = columns.get(column).querySelector("ol");
    ol.classList.toggle("dense", list.length >= DENSE_FROM && column !== "ended");
    list.forEach(([key, request], index) => {
      if (!cards.has(key)) cards.set(key, newCard(key));
      const card = cards.get(key);
      kept.add(key);
      if (card.column && card.column !== column) moved.push([card, visible(card)]);
      fillCard(card, column, request);
      if (ol.children[index] !== card.item) {
        const focused = card.item.contains(document.activeElement);
        ol.insertBefore(card.item, ol.children[index] ?? null);
        if (focused) card.node.focus({ preventScroll: true });
      }
    });
  }
  for (const [key, card] of cards) {
    if (!kept.has(key)) {
      card.item.remove();
      cards.delete(key);
    }
  }
  animate(before, moved);

  const { stats } = view;
  const ended = sum(Object.entries(stats).filter(([name]) => name.startsWith("ended_")).map(([, n]) => n));
  const totals = { waiting: stats.waiting, prefilling: stats.prefilling, running: stats.running - stats.prefilling, ended };
  for (const [column, total] of Object.entries(totals)) {
    const node = columns.get(column);
    setText(node.querySelector("h3 b"), count(total));
    const hidden = total - places[column].length;
    setText(node.querySelector(".more"), hidden > 0 && total && places[column].length
      ? `and ${count(hidden)} ${column === "ended" ? "earlier" : "more"}` : "");
  }
}

function visible(card) {
  const inside = card.item.parentElement.getBoundingClientRect();
  const own = card.node.getBoundingClientRect();
  return own.bottom > inside.top && own.top < inside.bottom;
}

/** Let cards that changed their column fly there, and those that gave way glide. */
function animate(before, moved) {
  if (calm.matches) return;
  const timing = { duration: 420, easing: "cubic-bezier(.3, .7, .2, 1)" };
  const flying = new Set();
  for (const [card, seen] of moved.slice(0, 24)) {
    const from = before.get(card);
    const to = card.node.getBoundingClientRect();
    if (!seen || !from || !visible(card)) continue;
    flying.add(card);
    const ghost = card.node.cloneNode(true);
    ghost.classList.add("ghost");
    ghost.dataset.column = card.column;
    ghost.setAttribute("aria-hidden", "true");
    ghost.tabIndex = -1;
    Object.assign(ghost.style, { left: `${to.left}px`, top: `${to.top}px`, width: `${to.width}px`, height: `${to.height}px` });
    document.body.append(ghost);
    card.node.style.opacity = "0"; // and not hidden, which would lose the focus
    const flight = ghost.animate([
      { transform: `translate(${from.left - to.left}px, ${from.top - to.top}px)` }, { transform: "none" }], timing);
    flight.onfinish = flight.oncancel = () => {
      ghost.remove();
      card.node.style.opacity = "";
    };
  }
  for (const [card, from] of before) {
    if (!card.item.isConnected || flying.has(card) || moved.some(([other]) => other === card)) continue;
    const dy = from.top - card.node.getBoundingClientRect().top;
    if (Math.abs(dy) > 1 && Math.abs(dy) < 400) {
      card.node.animate([{ transform: `translateY(${dy}px)` }, { transform: "none" }], { ...timing, duration: 260 });
    }
  }
}

// ---- steps ----------------------------------------------------------------------------------

let zoom = 40;
let hits = []; // {from, to, text} of the drawn steps, x in pixels
let pointer = null;

/**
 * Map times to pixels. Where nothing happens for long (no request was there) the axis is cut, else
 * a pause would leave no room for the steps.
 */
function timeAxis(intervals, longest, x0, x1) {
  const sorted = [...intervals].sort((a, b) => a[0] - b[0]);
  const knots = [[sorted[0][0], 0]];
  const cuts = [];
  let end = sorted[0][0];
  let length = 0;
  for (const [from, to] of sorted) {
    if (from - end > longest) {
      knots.push([end, length], [from, length + longest]);
      cuts.push([end, from]);
      length += longest;
    } else length += Math.max(0, from - end);
    length += Math.max(0, to - Math.max(from, end));
    end = Math.max(end, to);
    knots.push([end, length]);
  }
  const scale = (x1 - x0) / Math.max(length, 1);
  const at = (time) => {
    let i = knots.findIndex(([t]) => t >= time);
    if (i <= 0) return i === 0 ? x0 : x1;
    const [[t0, l0], [t1, l1]] = [knots[i - 1], knots[i]];
    return x0 + scale * (t1 > t0 ? l0 + ((time - t0) / (t1 - t0)) * (l1 - l0) : l1);
  };
  return { at, cuts, end, scale };
}

function showSteps(view) {
  const steps = view.steps.slice(-zoom);
  const done = steps.filter((step) => step.ended_ns);
  if (!done.length) return;
  const typical = median(done.map((s) => s.ended_ns - s.began_ns));
  // A step in flight is drawn for as long as a step takes, or since it began, up to now.
  const open = steps.filter((s) => !s.read_ns && s.plan_ended_ns > done.at(-1).plan_ended_ns).slice(0, 1).map((s) => {
    const began = Math.max(s.plan_ended_ns, done.at(-1).ended_ns);
    return { step: s, began, ended: Math.min(view.now_ns, began + 3 * typical) };
  });
  const intervals = steps.flatMap((s) => [[s.plan_began_ns, s.plan_ended_ns],
    ...(s.ended_ns ? [[s.began_ns, Math.max(s.ended_ns, s.read_ns)]] : [])]);
  intervals.push(...open.map((o) => [o.began, o.ended]));
  const { svg, width, height } = canvas($("timeline"));
  const left = 66;
  const axis = timeAxis(intervals, Math.max(3 * typical, 3e6), left, width - 4);
  const X = axis.at;
  const box = (className, from, to, y, h, least = 1) => shape("rect", {
    class: className, x: X(from).toFixed(1), y, width: Math.max(least, X(to) - X(from)).toFixed(1), height: h, rx: 1.5 });
  const parts = [];
  const lanes = { scheduler: [8, 26], worker: [54, 40], tokens: [110, 58] };
  for (const [name, [y, h]] of Object.entries(lanes)) {
    parts.push(shape("rect", { class: "lane", x: left, y: y - 4, width: width - 4 - left, height: h + 8, rx: 4 }));
    parts.push(shape("text", { x: 0, y: y + h / 2 + 4 }, name));
  }
  const [[planY, planH], [execY, execH], [tokY, tokH]] = Object.values(lanes);
  done.forEach((s, i) => {
    const before = done[i - 1];
    if (before && s.began_ns > before.ended_ns && !axis.cuts.some(([a, b]) => a < s.began_ns && b > before.ended_ns)) {
      parts.push(box("rest", before.ended_ns, s.began_ns, execY, execH, 0));
    }
  });
  const most = Math.max(...steps.map((s) => s.decode_rows + s.prefill_tokens), 1);
  hits = [];
  for (const s of steps) {
    parts.push(box("plan", s.plan_began_ns, s.plan_ended_ns, planY, planH, 1.5));
    if (!s.ended_ns) continue;
    parts.push(shape("line", { class: "hand", x1: X(s.plan_ended_ns), y1: planY + planH, x2: X(s.began_ns), y2: execY }));
    parts.push(box(s.prefill_tokens ? "exec chunks" : "exec", s.began_ns, s.ended_ns, execY, execH));
    parts.push(shape("line", { class: "read", x1: X(s.read_ns), x2: X(s.read_ns), y1: planY, y2: planY + planH }));
    const bar = (className, tokens, below) => {
      const h = (tokens / most) * tokH;
      if (tokens) parts.push(box(className, s.began_ns, s.ended_ns, (tokY + tokH - below - h).toFixed(1), h.toFixed(1)));
      return below + h;
    };
    bar("prefill", s.prefill_tokens, bar("decode", s.decode_rows, 0));
    hits.push({ from: X(s.began_ns), to: X(s.ended_ns), text: [
      `step ${count(s.step)}`,
      `planned in ${duration((s.plan_ended_ns - s.plan_began_ns) / 1e6)}`,
      `began ${duration((s.began_ns - s.plan_ended_ns) / 1e6)} after that`,
      `executed in ${duration((s.ended_ns - s.began_ns) / 1e6)}`,
      `read ${duration((s.read_ns - s.ended_ns) / 1e6)} later`,
      `${count(s.decode_rows)} decode rows, ${count(s.prefill_tokens)} prefill tokens`].join("\n") });
  }
  for (const o of open) parts.push(box("open", o.began, o.ended, execY, execH, 3));
  parts.push(shape("text", { x: left - 8, y: tokY + 8, "text-anchor": "end", class: "axis" }, count(most)));
  for (const [from, to] of axis.cuts) {
    const x = (X(from) + X(to)) / 2;
    parts.push(shape("line", { class: "cut", x1: x, x2: x, y1: 4, y2: tokY + tokH + 4 }));
    if (X(to) - X(from) > 34) parts.push(shape("text", { x, y: execY + execH / 2 + 4, "text-anchor": "middle" }, `${duration((to - from) / 1e6)} idle`));
  }
  const every = nice((100 / axis.scale) / 1e6) * 1e6;
  let last = width + 60;
  for (let time = axis.end; time > intervals[0][0]; time -= every) {
    const x = X(time);
    if (axis.cuts.some(([a, b]) => time > a && time < b) || last - x < 56 || x < left + 8) continue;
    last = x;
    parts.push(shape("line", { class: "grid", x1: x, x2: x, y1: tokY + tokH + 4, y2: tokY + tokH + 9 }));
    parts.push(shape("text", { x: Math.min(x, width - 4), y: height - 10, "text-anchor": x > width - 30 ? "end" : "middle", class: "axis" },
      time === axis.end ? "0" : `−${tick((axis.end - time) / 1e6)}`));
  }
  svg.replaceChildren(...parts);
  svg.dataset.steps = done.length;
  const plans = median(steps.map((s) => (s.plan_ended_ns - s.plan_began_ns) / 1e6));
  const busy = over((p) => p.busy);
  const idle = over((p) => p.idle);
  setText($("step-facts"), [`${duration(typical / 1e6)} a step`, `planned in ${duration(plans)}`,
    ...(busy + idle > 0 ? [`worker busy ${percent(busy, busy + idle)} of the time with work`] : [])].join(" · "));
  point();
}

const tick = (ms) => (ms >= 1000 ? `${+(ms / 1e3).toFixed(2)} s` : `${+ms.toPrecision(3)} ms`);

/** The next larger number that reads well. */
function nice(n, steps = [1, 2, 5, 10]) {
  const power = 10 ** Math.floor(Math.log10(n));
  return power * (steps.find((step) => step * power >= n) ?? 10);
}

function point() {
  const tip = $("tip");
  const box = $("timeline").getBoundingClientRect();
  const x = pointer && pointer.x - box.left;
  const near = (hit) => Math.max(hit.from - x, x - hit.to, 0);
  const hit = pointer && hits.length ? hits.reduce((a, b) => (near(b) < near(a) ? b : a)) : null;
  tip.hidden = !hit || near(hit) > 6;
  if (tip.hidden) return;
  setText(tip, hit.text);
  tip.style.left = `${Math.min(pointer.x + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(pointer.y + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

// ---- KV blocks ------------------------------------------------------------------------------

const WAFFLE_PX = 200;

function showBlocks(view) {
  const owners = view.users.filter((u) => u.blocks).map((u) => ({ name: nameOf(u.user_id), user: u.user_id, n: u.blocks }));
  const known = sum(owners.map((o) => o.n));
  const rest = view.blocks_total - known - view.blocks_shared - view.blocks_cached - view.blocks_free;
  if (rest > 0) owners.push({ name: "other tenants", colour: "var(--faint)", n: rest });
  if (view.blocks_shared) owners.push({ name: "shared by tenants", colour: "var(--shared)", n: view.blocks_shared });
  owners.push({ name: "cached, unowned", kind: "cached", colour: "var(--cached)", n: view.blocks_cached });
  owners.push({ name: "free", kind: "free", n: view.blocks_free });

  const plot = $("waffle");
  const gap = 2;
  const room = (size) => Math.floor((plot.clientWidth + gap) / (size + gap)) * Math.floor((WAFFLE_PX + gap) / (size + gap));
  let size = 20; // the largest squares of which there is room for all, or the smallest
  while (size > 8 && room(size) < view.blocks_total) size -= 1;
  const wide = Math.max(1, Math.floor((plot.clientWidth + gap) / (size + gap)));
  const cells = Math.min(view.blocks_total, room(size));
  const high = Math.ceil(cells / wide);
  plot.style.height = `${high * (size + gap) - gap}px`;
  const { svg } = canvas(plot);
  const kinds = owners.flatMap((o) => Array(cellsOf(o.n, view.blocks_total, cells)).fill(o));
  while (kinds.length > cells) { // small owners were rounded up: the largest gives way
    const largest = owners.reduce((a, b) => (b.n > a.n ? b : a));
    kinds.splice(kinds.lastIndexOf(largest), 1);
  }
  while (kinds.length < cells) kinds.push(owners.at(-1));
  while (svg.children.length > cells) svg.lastChild.remove();
  kinds.forEach((o, i) => {
    let cell = svg.children[i];
    if (!cell) svg.append((cell = shape("rect", { rx: 1.5 })));
    cell.setAttribute("width", size - 1);
    cell.setAttribute("height", size - 1);
    cell.setAttribute("x", (i % wide) * (size + gap) + 0.5);
    cell.setAttribute("y", Math.floor(i / wide) * (size + gap) + 0.5);
    cell.setAttribute("class", `cell ${o.kind ?? "owned"}`);
    swatch(cell, o);
  });
  const each = view.blocks_total / Math.max(cells, 1);
  setText($("block-facts"), `${count(view.blocks_total)} blocks of ${view.engine.block_size} tokens` +
    (each > 1.01 ? `, a square is ${each.toFixed(1)} blocks` : ""));
  keyed($("owners"), owners, (o) => o.name, () => {
    const item = make("li");
    item.append(make("i"), make("span"), make("b"));
    return item;
  }, (item, o) => {
    item.firstChild.classList.toggle("swatch-free", o.kind === "free");
    swatch(item, o);
    setText(item.children[1], o.name);
    setText(item.children[2], count(o.n));
  });
}

const cellsOf = (n, total, cells) => (n ? Math.max(1, Math.round((n / total) * cells)) : 0);

function swatch(node, owner) {
  if (owner.user !== undefined) paint(node, owner.user);
  else node.style.setProperty("--colour", owner.colour ?? "transparent");
}

/** Keep one child a key, in the order of the items. */
function keyed(parent, items, key, create, fill) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = `k${key(item)}`;
    const node = old.get(name) ?? create(item);
    old.delete(name);
    node.dataset.key = name;
    fill(node, item);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  for (const node of old.values()) node.remove();
}

// ---- tenants --------------------------------------------------------------------------------

function showTenants(view) {
  const rows = view.users.map((u) => ({ ...u, rate: over((p) => p.users.get(u.user_id) ?? u.output_tokens) }));
  const total = sum(rows.map((r) => r.rate));
  rows.sort((a, b) => b.rate - a.rate || b.running - a.running || b.output_tokens - a.output_tokens
    || (a.user_id < b.user_id ? -1 : 1));
  keyed($("tenants"), rows.slice(0, 12), (r) => r.user_id, () => {
    const row = make("tr");
    for (let i = 0; i < 8; i += 1) row.append(make("td"));
    row.children[0].append(make("i"), make("span"));
    const share = make("span", "share");
    share.append(make("u"), make("s"));
    row.children[2].append(share);
    return row;
  }, (row, r) => {
    paint(row, r.user_id);
    const cells = row.children;
    setText(cells[0].lastChild, nameOf(r.user_id));
    cells[0].title = r.user_id;
    setText(cells[1], rate(r.rate));
    cells[2].firstChild.firstChild.style.transform = `scaleX(${total ? r.rate / total : 0})`;
    setText(cells[2].firstChild.lastChild, percent(r.rate, total));
    [r.running, r.prefilling, r.waiting, r.blocks, r.output_tokens].forEach((n, i) => setText(cells[i + 3], count(n)));
  });
  showRates(rows);
}

/** Tokens per second of the largest tenants over the history, stacked. */
function showRates(rows) {
  if (history.length < 3 || !history.some((point) => point.rate)) return;
  const { svg, width, height } = canvas($("rates"));
  const [left, bottom] = [44, height - 20];
  const past = history.slice(1); // the first point has no rate
  const now = past.at(-1).at;
  const from = Math.max(now - HISTORY_S, Math.min(past[0].at, now - 20));
  const X = (at) => left + ((at - from) / (now - from)) * (width - left - 2);
  const users = [...rows].sort((a, b) => b.output_tokens - a.output_tokens).slice(0, COLOURS).reverse();
  const stacks = past.map((_, index) => {
    let level = 0;
    return users.map((u) => {
      const had = (p) => p.users.get(u.user_id) ?? 0;
      return (level += over(had, index + 1));
    });
  });
  const top = nice(Math.max(...stacks.map((s) => s.at(-1) ?? 0), 1), [1, 2, 3, 4, 6, 8, 10]);
  const Y = (n) => bottom - (n / top) * (bottom - 8);
  const parts = [0, 0.5, 1].flatMap((part) => [
    shape("line", { class: "grid", x1: left, x2: width, y1: Y(part * top), y2: Y(part * top) }),
    shape("text", { class: "axis", x: left - 8, y: Y(part * top) + 4, "text-anchor": "end" }, tickCount(part * top))]);
  users.forEach((u, n) => {
    const upper = past.map((p, i) => `${X(p.at).toFixed(1)},${Y(stacks[i][n]).toFixed(1)}`);
    const lower = past.map((p, i) => `${X(p.at).toFixed(1)},${Y(n ? stacks[i][n - 1] : 0).toFixed(1)}`).reverse();
    parts.push(paint(shape("path", { class: "area", d: `M${upper.join("L")}L${lower.join("L")}Z` }), u.user_id));
  });
  for (const [part, anchor] of [[0, "start"], [1, "end"]]) {
    parts.push(shape("text", { class: "axis", x: part ? width - 2 : left, y: height - 4, "text-anchor": anchor },
      part ? "now" : `−${Math.round(now - from)} s`));
  }
  svg.replaceChildren(...parts);
}

const tickCount = (n) => (n >= 1e4 ? `${+(n / 1e3).toFixed(1)}k` : `${+n.toFixed(1)}`);

// ---- one request's story --------------------------------------------------------------------

const PHASE_AFTER = { arrived: "waiting", queued: "waiting", preempted: "waiting", worker_restart: "waiting",
  admitted: "prefill", resumed: "prefill", chunk: "prefill", first_token: "running", continued: "running", ended: "ended" };
const PHASES = { waiting: "waiting", prefill: "prefill", running: "decode" };
let storyTimer = 0;
let told = null;

function openStory(key) {
  const { request } = cards.get(key);
  opened = key;
  told = { key, id: request.request_id, user: request.user_id };
  for (const card of cards.values()) card.node.setAttribute("aria-expanded", String(card.key === key));
  setText($("story-title"), request.request_id);
  setText($("story-facts"), "…");
  for (const id of ["phases", "phase-legend", "events"]) $(id).replaceChildren();
  $("story").hidden = false;
  $("story-close").focus();
  tellStory();
}

function closeStory() {
  clearTimeout(storyTimer);
  const card = cards.get(opened);
  opened = told = null;
  $("story").hidden = true;
  card?.node.setAttribute("aria-expanded", "false");
  card?.node.focus();
}

async function tellStory() {
  clearTimeout(storyTimer);
  const asked = told;
  try {
    const { events } = await ask(`v1/engine/requests/${encodeURIComponent(asked.id)}/story`);
    if (told !== asked) return;
    showStory(events, asked);
    if (events.at(-1)?.event !== "ended") storyTimer = setTimeout(tellStory, 1000);
  } catch (error) {
    if (told === asked) setText($("story-facts"), error.message);
  }
}

function showStory(events, { key, user }) {
  const live = cards.get(key)?.request.age_ms ?? 0;
  const ended = events.at(-1)?.event === "ended";
  const end = Math.max(events.at(-1)?.at_ms ?? 0, ended ? 0 : live);
  const spent = { waiting: 0, prefill: 0, running: 0 };
  const segments = [];
  events.forEach((event, i) => {
    const phase = PHASE_AFTER[event.event] ?? segments.at(-1)?.phase ?? "waiting";
    const ms = Math.max(0, (events[i + 1]?.at_ms ?? end) - event.at_ms);
    if (phase === "ended") return;
    spent[phase] += ms;
    if (segments.at(-1)?.phase === phase) segments.at(-1).ms += ms;
    else segments.push({ phase, ms });
  });
  const last = events.at(-1)?.detail ?? {};
  setText($("story-facts"), ended
    ? `${nameOf(user)} · ${last.reason} · ${last.detail} after ${duration(end)}`
    : `${nameOf(user)} · live for ${duration(end)}`);
  $("phases").replaceChildren(...segments.map(({ phase, ms }) => {
    const bar = make("i");
    bar.style.setProperty("--colour", `var(--${phase})`);
    bar.style.width = `${(100 * ms) / Math.max(end, 1e-9)}%`;
    return bar;
  }));
  keyed($("phase-legend"), Object.keys(PHASES), (phase) => phase, () => {
    const item = make("li");
    item.append(make("i"), make("span"), make("b"));
    return item;
  }, (item, phase) => {
    item.style.setProperty("--colour", `var(--${phase})`);
    setText(item.children[1], PHASES[phase]);
    setText(item.children[2], duration(spent[phase]));
  });
  keyed($("events"), withoutRuns(events), (event) => event.i, () => {
    const item = make("li");
    item.append(make("span", "at"), make("b"), make("dl"));
    return item;
  }, (item, event) => {
    item.style.setProperty("--colour", `var(--${PHASE_AFTER[event.kind] ?? "faint"})`);
    setText(item.children[0], `${event.at_ms.toFixed(1)} ms`);
    setText(item.children[1], event.event.replaceAll("_", " "));
    keyed(item.children[2], Object.entries(event.detail), ([name]) => name, () => {
      const pair = make("div");
      pair.append(make("dt"), make("dd"));
      return pair;
    }, (pair, [name, value]) => {
      setText(pair.firstChild, `${name.replaceAll("_", " ")} `);
      setText(pair.lastChild, typeof value === "number" ? String(+value.toFixed(1)) : String(value));
    });
  });
}

/** The events, chunks that follow each other as one. */
function withoutRuns(events) {
  const shown = [];
  for (const [i, event] of events.entries()) {
    const before = shown.at(-1);
    if (event.event === "chunk" && before?.chunks) {
      before.chunks += 1;
      before.event = `${before.chunks} chunks`;
      before.detail = { tokens: before.detail.tokens + event.detail.tokens, left: event.detail.left,
        "the last at": `${event.at_ms.toFixed(1)} ms` };
    } else shown.push({ ...event, i, kind: event.event, chunks: event.event === "chunk" ? 1 : 0 });
  }
  return shown;
}

// ---- what the user does ---------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("ask").hidden = true;
  poll();
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  setText($("pause"), paused ? "Resume" : "Pause");
  if (!paused) poll();
});
function choose(steps) {
  zoom = steps;
  for (const button of $("zoom").children) button.setAttribute("aria-pressed", String(+button.value === zoom));
  if (latest) showSteps(latest);
}
$("zoom").addEventListener("click", (event) => event.target.value && choose(+event.target.value));
$("story-close").addEventListener("click", closeStory);
document.addEventListener("keydown", (event) => event.key === "Escape" && told && closeStory());
$("timeline").addEventListener("pointermove", (event) => {
  pointer = { x: event.clientX, y: event.clientY };
  point();
});
$("timeline").addEventListener("pointerleave", () => {
  pointer = null;
  point();
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
new ResizeObserver(() => {
  if (!latest || document.querySelector("main").hidden) return;
  showSteps(latest);
  showBlocks(latest);
  showTenants(latest);
}).observe(document.querySelector("main"));

choose(zoom);
poll();
