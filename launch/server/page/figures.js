// The live figures: asks the server once a second while the page is looked at.

const $ = (id) => document.getElementById(id);
const HISTORY = 120;
let apiKey = sessionStorage.getItem("headrace-key") || "";
let modelName = "";
let samples = [];
let heat = null;

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("no answer from the server");
  });
  if (answer.status === 401) $("key-form").hidden = false;
  if (!answer.ok) {
    const said = await answer.json().catch(() => null);
    throw new Error(said?.error?.message || `status ${answer.status}`);
  }
  return answer;
}

const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at++; }
  return `${bytes >= 100 || at === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[at]}`;
};
const percent = (share) => share === null ? "–" : `${(100 * share).toFixed(share > 0.995 ? 1 : 0)}%`;
const number = (value, digits = 1) => value === null || value === undefined ? "–"
  : value === 0 ? "0" : value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);

function figure(id, value, unit) {
  const small = document.createElement("small");
  small.textContent = ` ${unit}`;
  $(id).replaceChildren(value, ...(unit ? [small] : []));
}

function legend(id, entries) {
  $(id).replaceChildren(...entries.map(([color, name, value]) => {
    const item = document.createElement("li"), swatch = document.createElement("i");
    const strong = document.createElement("b");
    swatch.style.background = color;
    strong.textContent = value;
    item.append(swatch, name, strong);
    return item;
  }));
}

function list(id, rows) {
  $(id).replaceChildren(...rows.flatMap(([name, value, share]) => {
    const term = document.createElement("dt"), said = document.createElement("dd");
    term.textContent = name;
    said.textContent = value;
    if (share === undefined) return [term, said];
    const bar = document.createElement("div"), filled = document.createElement("span");
    bar.className = "bar";
    filled.style.width = `${Math.min(100, 100 * share)}%`;
    bar.append(filled);
    return [term, said, bar];
  }));
}

const last = (pick) => {
  for (let at = samples.length - 1; at >= Math.max(0, samples.length - 10); at--) {
    const value = pick(samples[at]);
    if (value !== null && value !== undefined) return value;
  }
  return null;
};
const column = (pick) => samples.map((sample) => pick(sample) ?? null);

function showTiles(stats) {
  figure("speed", number(last((s) => s.tokens_per_s)), "tokens/s");
  figure("hits", percent(last((s) => s.hit_rate)), "");
  figure("disk", stats.now ? size(stats.now.read_bytes_per_s) : "–", "/s");
  const { running, waiting, capacity } = stats.queue;
  figure("queue", String(running), waiting ? `running, ${waiting} of ${capacity} waiting` : "running");
  const request = stats.request;
  $("request").textContent = !request ? "idle"
    : request.tokens === 0 ? `reading the prompt: ${request.prefilled} of ${request.prompt_tokens} tokens`
    : `${request.tokens} tokens in ${request.seconds.toFixed(1)} s`;
  const spark = { axis: false, fill: true, slots: HISTORY };
  lineChart($("speed-line"), [{ values: column((s) => s.tokens_per_s), color: css("--blue") }], spark);
  lineChart($("hits-line"), [{ values: column((s) => s.hit_rate), color: css("--aqua") }],
    { ...spark, top: 1 });
  lineChart($("disk-line"), [{ values: column((s) => s.read_bytes_per_s), color: css("--orange") }], spark);
}

function showSplit() {
  const split = last((s) => s.pass_ms);
  const parts = [["compute", "compute", "--blue"], ["expert", "waiting for experts", "--orange"],
    ["engram", "waiting for engram rows", "--aqua"]];
  $("split").replaceChildren(...(split ? parts : []).map(([key, , color]) => {
    const bar = document.createElement("span");
    bar.style.flexGrow = split[key];
    bar.style.background = css(color);
    return bar;
  }));
  const shown = parts.map(([key, name, color]) =>
    [css(color), name, split ? `${number(split[key])} ms` : "–"]);
  legend("split-legend", shown);
  $("split").setAttribute("aria-label", shown.map(([, name, value]) => `${name} ${value}`).join(", "));
  lineChart($("split-line"), parts.map(([key, , color]) => (
    { values: column((s) => s.pass_ms ? s.pass_ms[key] : null), color: css(color) })),
  { slots: HISTORY, stacked: true,
    format: (value) => value >= 1000 ? `${number(value / 1000)} s` : `${number(value, 0)} ms` });
}

function showLanes() {
  const lanes = [["urgent", "--orange"], ["predicted", "--blue"], ["background", "--grey"]];
  legend("lanes-legend", lanes.map(([name, color]) =>
    [css(color), name, `${number(last((s) => s.reads_per_s[name]))}/s`]));
  lineChart($("lanes"), lanes.map(([name, color]) => (
    { values: column((s) => s.reads_per_s[name]), color: css(color) })),
  { slots: HISTORY, format: (value) => number(value, 0) });
  legend("prediction-legend", [
    [css("--violet"), "precision: read ahead and used", percent(last((s) => s.precision))],
    [css("--aqua"), "recall: needed and read ahead", percent(last((s) => s.recall))]]);
  lineChart($("prediction"), [{ values: column((s) => s.precision), color: css("--violet") },
    { values: column((s) => s.recall), color: css("--aqua") }],
  { slots: HISTORY, top: 1, format: (value) => `${Math.round(100 * value)}%` });
}

function showLists(stats) {
  const now = stats.now || {};
  list("engram", [
    ["read queue", number(now.queue_depth ?? null, 0)],
    ["requests waiting", `${stats.queue.waiting} of ${stats.queue.capacity}`],
    ["engram rows a second", number(now.engram_rows_per_s ?? null, 0)],
    ["engram rows found in its cache", percent(last((s) => s.engram_hit_rate))],
    ["engram read, each row", last((s) => s.engram_row_us) === null ? "–"
      : `${number(last((s) => s.engram_row_us), 0)} µs`],
    ["prompt tokens reused", `${stats.totals.reused_tokens} of ${stats.totals.prompt_tokens}`],
    ["tokens generated", stats.totals.tokens.toLocaleString("en")]]);
  const { memory } = stats;
  const own = memory.resident_bytes;
  const readers = Object.keys(own).filter((name) => name.startsWith("reader-"));
  const others = ["compute", "experts", "engram", "server"].filter((name) => name in own);
  const resident = now.resident_experts ?? 0;
  list("memory", [
    [`expert slots used, of ${size(memory.arena_bytes)}`, `${resident} of ${memory.slots}`,
      resident / memory.slots],
    ["dense weights", size(memory.dense_bytes)],
    ...others.map((name) => [`${name} process`, size(own[name])]),
    [`${readers.length} readers`, size(readers.reduce((sum, name) => sum + own[name], 0))]]);
  $("resident").textContent = `${resident} of ${memory.all_experts}`;
}

function showHeat() {
  if (!heat) return;
  heatMap($("heat"), heat);
  const here = heat.cells.filter((cell) => cell > 0).length;
  $("heat").setAttribute("aria-label",
    `${here} of ${heat.cells.length} experts in memory, ${heat.layers} layers by ${heat.experts}`);
}

function say(state, good) {
  $("state").textContent = state;
  $("state").className = `pill ${good ? "ok" : "bad"}`;
}

async function refresh() {
  const stats = await (await ask(`/stats?history=${samples.length ? 2 : HISTORY}`)).json();
  const newest = samples.length ? samples[samples.length - 1].time : 0;
  samples = [...samples, ...stats.history.filter((s) => s.time > newest)].slice(-HISTORY);
  modelName = stats.model;
  $("model").textContent = `${stats.model} · ${stats.facts.device || ""}`;
  document.querySelector(".wheel").classList.toggle("turning", stats.queue.running > 0);
  const held = await (await ask("/residency")).json();
  heat = { ...held, cells: Uint8Array.from(atob(held.cells), (one) => one.charCodeAt(0)) };
  showTiles(stats); showSplit(); showLanes(); showLists(stats); showHeat();
  say(stats.queue.running ? "computing" : "ready", true);
}

async function live() {
  for (;;) {
    if (!document.hidden) {
      try { await refresh(); } catch (error) { say(error.message, false); }
    }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

$("heat").addEventListener("mousemove", (event) => {
  if (!heat) return;
  const box = event.target.getBoundingClientRect();
  const layer = Math.min(heat.layers - 1, Math.floor((event.clientY - box.top) / box.height * heat.layers));
  const expert = Math.min(heat.experts - 1, Math.floor((event.clientX - box.left) / box.width * heat.experts));
  const cell = heat.cells[layer * heat.experts + expert];
  $("heat-at").textContent = `layer ${layer}, expert ${expert}: ${cell === 0 ? "not in memory"
    : cell > 128 ? "read lately" : "in memory"}`;
});
$("heat").addEventListener("mouseleave", () => {
  $("heat-at").textContent = "rows are layers, columns are experts";
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = $("key").value;
  sessionStorage.setItem("headrace-key", apiKey);
  $("key-form").hidden = true;
});

$("trace").addEventListener("submit", async (event) => {
  event.preventDefault();
  const tokens = $("trace-tokens").value;
  $("trace-go").disabled = true;
  $("trace-state").textContent = `recording the next ${tokens} tokens…`;
  try {
    const answer = await ask(`/trace?tokens=${encodeURIComponent(tokens)}`, { method: "POST" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = "headrace-trace.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    $("trace-state").textContent = "downloaded; open it at ui.perfetto.dev";
  } catch (error) {
    $("trace-state").textContent = error.message;
  }
  $("trace-go").disabled = false;
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawRamp($("ramp"));
  showHeat();
});
drawRamp($("ramp"));
live();
