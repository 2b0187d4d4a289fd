import { requestJson } from "./api.js";
import { Chart, LONGEST_SPAN } from "./charts.js";
import { askForKey } from "./dialogs.js";
import { byId, h } from "./dom.js";
import { CHARTS, amount, clock, reading } from "./figures.js";
import { RequestTable } from "./requests.js";
import { switchTheme, watchTheme } from "./theme.js";

const POLL_MILLISECONDS = 1000;
const RETRY_MILLISECONDS = 2000;

const table = new RequestTable(announce);
const charts = CHARTS.map((spec) => new Chart(spec, moveCursor));
let points = [];
let before = null;
let cursor = null;
let polling = null;
let timer = null;

function announce(text) {
  byId("announcement").textContent = text;
}

function showState(state, text) {
  byId("state").dataset.state = state;
  byId("state").textContent = text;
}

function showBanner(text) {
  byId("banner").hidden = text === null;
  if (text !== null && byId("banner").textContent !== text) byId("banner").textContent = text;
}

function seconds() {
  return performance.now() / 1000;
}

function moveCursor(at) {
  cursor = at;
  draw();
}

function draw() {
  const now = points.at(-1)?.at ?? seconds();
  for (const chart of charts) chart.draw(points, now, cursor);
}

function add(stats) {
  const now = { at: seconds(), stats };
  points.push(reading(now, before));
  points = points.filter((point) => point.at >= now.at - LONGEST_SPAN);
  before = now;
}

function showEngine(stats) {
  const { engine } = stats;
  const facts = [
    ["Device", engine.device_name === null ? engine.device : `${engine.device}, ${engine.device_name}`],
    ["Kernel set", engine.kernels],
    ["Ranks", engine.ranks === 1 ? "1" : `${engine.ranks}, experts by ${engine.expert_layout}`],
    ["Requests in a step", `up to ${engine.max_requests}`],
    ["Up", clock(stats.uptime_seconds)],
    ["Restarts", String(stats.restarts)],
    ["Steps", amount(stats.steps)],
    ["Preemptions", amount(stats.preemptions)],
    ["Tokens written", amount(stats.generated_tokens)],
    ["Version", engine.version],
  ];
  byId("engine").replaceChildren(...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function showMemory(rows) {
  if (byId("memory").childElementCount === rows.length) return;
  const made = rows.map(({ name, amount: size, remark }) =>
    h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "amount" }, size), h("td", { class: "remark" }, remark)),
  );
  byId("memory").replaceChildren(...made);
}

async function poll() {
  const began = performance.now();
  const own = (polling = new AbortController());
  let pause = POLL_MILLISECONDS;
  try {
    const stats = await requestJson("stats", { signal: own.signal });
    add(stats);
    byId("model").textContent = stats.model_name;
    showEngine(stats);
    showMemory(stats.memory_plan);
    await table.refresh(own.signal);
    if (byId("state").dataset.state === "lost") announce("The connection is back.");
    showState("live", "live");
    showBanner(null);
    draw();
  } catch (error) {
    if (own.signal.aborted) return;
    if (error.needsKey) return void takeKey(error.message);
    pause = RETRY_MILLISECONDS;
    before = null;
    showState("lost", "no connection");
    showBanner(error.message);
  }
  if (own.signal.aborted) return;
  timer = setTimeout(poll, Math.max(0, pause - (performance.now() - began)));
}

function stop() {
  clearTimeout(timer);
  polling?.abort();
}

function start() {
  stop();
  if (!document.hidden) poll();
}

async function takeKey(text) {
  stop();
  if (byId("ask").open) return;
  showState("waiting", "key needed");
  if (await askForKey(text)) {
    table.isRefused = false;
    showBanner(null);
    start();
  } else if (points.length > 0) {
    start();
  } else {
    showBanner("The server wants an API key. The button API key takes one.");
  }
}

function onVisibility() {
  if (document.hidden) {
    stop();
    before = null;
    showState("waiting", "paused");
  } else {
    start();
  }
}

byId("charts").append(...charts.map((chart) => chart.node));
byId("theme").addEventListener("click", switchTheme);
watchTheme((shown) => (byId("theme").textContent = shown === "dark" ? "Light" : "Dark"));
byId("set-key").addEventListener("click", () => takeKey("The API key, or the admin key for the requests of all keys."));
document.addEventListener("visibilitychange", onVisibility);
new ResizeObserver(draw).observe(byId("charts"));
start();
