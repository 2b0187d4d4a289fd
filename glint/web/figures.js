const PREFIXES = [
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

export function amount(value) {
  for (const [size, prefix] of PREFIXES) {
    if (value >= size * 9.995) return `${short(value / size)}${prefix}`;
  }
  return short(value);
}

function short(value) {
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value >= 10 ? value.toFixed(1) : value.toFixed(2).replace(/0$/, "");
}

export function duration(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 0.9995) return `${short(seconds * 1000)} ms`;
  return `${short(seconds)} s`;
}

export function percent(value) {
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function clock(seconds) {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (!minutes) return `${whole} s`;
  return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
}

function rate(now, before, key) {
  const seconds = before === null ? 0 : now.at - before.at;
  const added = before === null ? -1 : now.stats[key] - before.stats[key];
  return seconds > 0 && added >= 0 ? added / seconds : null;
}

export function reading(now, before) {
  const { stats } = now;
  const minute = stats.last_minute;
  const numPages = stats.pages.free + stats.pages.held + stats.pages.cached;
  const { failed, lost, refused } = minute.requests_by_outcome;
  const drafts = stats.draft_tokens;
  return {
    at: now.at,
    output: rate(now, before, "generated_tokens"),
    prompt: rate(now, before, "computed_prompt_tokens"),
    running: stats.requests_running,
    waiting: stats.requests_waiting,
    held: stats.pages.held / numPages,
    cached: stats.pages.cached / numPages,
    firstP50: minute.time_to_first_token_seconds.p50,
    firstP99: minute.time_to_first_token_seconds.p99,
    betweenP50: minute.inter_token_latency_seconds.p50,
    betweenP99: minute.inter_token_latency_seconds.p99,
    hits: minute.prefix_cache_hit_ratio,
    accepted: drafts > 0 ? stats.accepted_draft_tokens / drafts : null,
    failed: failed + lost,
    refused,
  };
}

export const CHARTS = [
  { id: "output", title: "Output, tok/s", format: amount, least: 10, series: [{ key: "output", label: "each second" }] },
  {
    id: "prompt",
    title: "Prompt computed, tok/s",
    format: amount,
    least: 10,
    series: [{ key: "prompt", label: "each second" }],
  },
  {
    id: "requests",
    title: "Requests",
    format: amount,
    least: 4,
    series: [
      { key: "running", label: "running" },
      { key: "waiting", label: "waiting" },
    ],
  },
  {
    id: "pages",
    title: "Pages, share of all",
    format: percent,
    max: 1,
    series: [
      { key: "held", label: "held" },
      { key: "cached", label: "cached" },
    ],
  },
  {
    id: "first",
    title: "Time to first token",
    format: duration,
    least: 0.01,
    series: [
      { key: "firstP50", label: "p50" },
      { key: "firstP99", label: "p99" },
    ],
  },
  {
    id: "between",
    title: "Time between tokens",
    format: duration,
    least: 0.001,
    series: [
      { key: "betweenP50", label: "p50" },
      { key: "betweenP99", label: "p99" },
    ],
  },
  {
    id: "hits",
    title: "Prompt tokens from the cache",
    format: percent,
    max: 1,
    series: [{ key: "hits", label: "of the last minute" }],
  },
  {
    id: "accepted",
    title: "Draft tokens accepted",
    format: percent,
    max: 1,
    isOptional: true,
    series: [{ key: "accepted", label: "since the start" }],
  },
  {
    id: "errors",
    title: "Errors, requests a minute",
    format: amount,
    least: 4,
    series: [
      { key: "failed", label: "failed, lost" },
      { key: "refused", label: "refused" },
    ],
  },
];
