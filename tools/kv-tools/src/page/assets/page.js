"use strict";
const runs = data;

// What happened in each sample, from counts that only grow.
const steps = (column) => column.map((value, at) => value - (at ? column[at - 1] : 0));
const sum = (a, b) => a.map((value, at) => value + b[at]);
// Over so many samples that a few lookups do not make it jump.
function rate(parts, wholes) {
  const span = Math.max(1, Math.ceil(wholes.length / 40));
  return wholes.map((whole, at) => {
    const from = at - span;
    const all = whole - (from >= 0 ? wholes[from] : 0);
    return all > 0 ? (100 * (parts[at] - (from >= 0 ? parts[from] : 0))) / all : null;
  });
}
function speed(bytes, times) {
  const span = Math.max(1, Math.ceil(times.length / 80));
  return times.map((now, at) => {
    const from = at - span;
    const passed = now - (from >= 0 ? times[from] : 0);
    return passed > 0 ? (1e9 * (bytes[at] - (from >= 0 ? bytes[from] : 0))) / passed : null;
  });
}

// Lines over time, one figure for each run, all with the same limits.
function lines(section, title, note, draw, format, most) {
  const figures = el("div", { class: "runs" });
  let limit = 0;
  const drawn = runs.filter((run) => run.series && run.series.samples.time_ns.length > 1).map((run) => {
    const series = draw(run).filter((one) => one.values.some((value) => value));
    for (const one of series) for (const value of one.values) if (value > limit) limit = value;
    return { run, series };
  });
  if (!drawn.some(({ series }) => series.length)) return;
  limit = most || limit * 1.05 || 1;
  // Their place must be in the page before a plot asks how wide it is.
  section.append(el("h3", {}, title), el("p", { class: "note" }, note), figures);
  for (const { run, series } of drawn) {
    const times = run.series.samples.time_ns;
    const place = el("div", { class: "plot", role: "img", "aria-label": `${title}, ${run.name}. ` + spoken(series, format) });
    const rows = [];
    const stride = Math.max(1, Math.ceil(times.length / 20));
    for (let at = stride - 1; at < times.length; at += stride)
      rows.push([time(times[at]), ...series.map((one) => format(one.values[at]) || "–")]);
    figures.append(el("figure", {}, el("figcaption", {}, run.name), place,
      folded("As a table", table(["Time", ...series.map((one) => one.name)], rows))));
    plot(place, (size) => ({
      ...size,
      cursor: { sync: { key: run.name }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: [0, limit] } },
      axes: axes(time, format),
      series: [{ label: "time", value: (_, value) => time(value) || "–" }, ...series.map((one) => ({
        label: one.name, stroke: colour(one.colour), width: 1.5, dash: one.dash, spanGaps: true, points: { show: false },
        fill: one.fill ? colour(one.colour) + "30" : undefined, value: (_, value) => format(value) || "–",
      }))],
    }), [times, ...series.map((one) => one.values)], 240);
  }
}
function spoken(series, format) {
  return series.map((one) => {
    const there = one.values.filter((value) => value != null);
    return `${one.name}: at most ${format(Math.max(...there))}, ${format(there[there.length - 1])} at the end.`;
  }).join(" ");
}

// Histograms with logarithmic buckets, and their quantiles as a table.
function histograms(section, title, note, draw, format) {
  const drawn = runs.filter((run) => run.series).map((run) => ({ run, of: draw(run.series).filter(([, of]) => of && of.count) }));
  if (!drawn.some(({ of }) => of.length)) return;
  const figures = el("div", { class: "runs" });
  section.append(el("h3", {}, title), el("p", { class: "note" }, note), figures);
  for (const { run, of } of drawn) {
    if (!of.length) continue;
    const place = el("div", { class: "plot", role: "img", "aria-label": `${title}, ${run.name}; the table below has the numbers` });
    const rows = of.map(([name, one]) => [name, short(one.count, ""), ...["p50", "p99", "p999", "max"].map((at) => format(one[at]))]);
    figures.append(el("figure", {}, el("figcaption", {}, run.name), place,
      table(["", "count", "p50", "p99", "p99.9", "most"], rows)));
    const xs = [...new Set(of.flatMap(([, one]) => one.buckets.map(([to]) => Math.max(to, 1))))].sort((a, b) => a - b);
    const columns = of.map(([, one]) => {
      const shares = new Map();
      for (const [to, count] of one.buckets) shares.set(Math.max(to, 1), (100 * count) / one.count + (shares.get(Math.max(to, 1)) || 0));
      return xs.map((x) => shares.get(x) ?? 0);
    });
    if (xs.length < 2) continue;
    plot(place, (size) => ({
      ...size,
      cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false, distr: 3 }, y: { range: (_, __, max) => [0, max * 1.05] } },
      axes: axes(format, percent),
      series: [{ label: "up to", value: (_, value) => format(value) || "–" }, ...of.map(([name], at) => ({
        label: name, stroke: colour(at % 6), width: 1.5, points: { show: false }, paths: uPlot.paths.stepped({ align: -1 }),
        value: (_, value) => percent(value) || "–",
      }))],
    }), [xs, ...columns], 220);
  }
}

// What spans are drawn in: waits stand out.
function kind(name, cause, track) {
  if (cause) return 4;
  if (/host memory$/.test(track)) return 1;
  if (/to the device$/.test(track)) return 2;
  return /compute$/.test(track) ? 0 : 5;
}
function timeline(section, run) {
  const of = run.series.timeline;
  if (!of.track.length) return;
  const end = Math.max(...of.begin_ns.map((begin, at) => begin + of.length_ns[at]));
  const figure = el("figure", {}, el("figcaption", {}, run.name));
  section.append(figure);
  const legend = el("p", { class: "note" });
  for (const [at, text] of [[4, "waits"], [0, "computes"], [2, "copies to the device"], [1, "copies to host memory"], [5, "the engine's calls"]])
    legend.append(el("span", { class: "item" }, el("span", { class: "key", style: `background: var(--c${at})` }), text), " ");
  const tools = el("div", { class: "tools", role: "group", "aria-label": `Zoom the timeline of ${run.name}` });
  const place = el("div", { class: "plot", role: "img", tabindex: "0",
    "aria-label": `Timeline of ${run.name}. Plus and minus zoom, arrow keys move, 0 shows all. The longest waits are in the table below.` });
  const told = el("p", { class: "told", role: "status" }, "Point at a span to see what it is. Drag to zoom, double click to see all.");
  figure.append(legend, tools, place, told);
  const tracks = of.tracks.length;
  const describe = (at) => {
    const cause = of.cause[at] < 0 ? "" : `, waits for ${of.names[of.cause[at]]}`;
    const many = of.count[at] > 1 ? `, ${of.count[at]} operations` : "";
    return `${of.tracks[of.track[at]].name}: ${of.names[of.name[at]]}${cause}${many}; ${time(of.length_ns[at])} at ${time(of.begin_ns[at])}`;
  };
  const draw = (u) => {
    const { ctx } = u, { left, top, width, height } = u.bbox, row = height / tracks;
    const colours = [0, 1, 2, 3, 4, 5].map(colour);
    const { min, max } = u.scales.x, scale = width / (max - min);
    ctx.save();
    ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    for (let at = 0; at < of.track.length; at++) {
      const begin = of.begin_ns[at], until = begin + of.length_ns[at];
      if (until < min || begin > max) continue;
      ctx.fillStyle = colours[kind(of.names[of.name[at]], of.cause[at] >= 0, of.tracks[of.track[at]].name)];
      ctx.fillRect(left + (begin - min) * scale, top + of.track[at] * row + row * 0.42, Math.max((until - begin) * scale, 1), row * 0.5);
    }
    ctx.restore();
  };
  // Names are text of the page, above the spans of each track.
  const names = (u) => of.tracks.forEach((track, at) =>
    u.over.append(el("span", { class: "track", style: `top: ${(100 * at) / tracks}%` }, track.name)));
  const under = (u) => {
    const { left, top } = u.cursor;
    if (left == null || left < 0) return;
    const at = u.posToVal(left, "x"), track = Math.floor((top / u.over.clientHeight) * tracks);
    const near = (u.scales.x.max - u.scales.x.min) / u.over.clientWidth * 2;
    let found = -1;
    for (let i = 0; i < of.track.length; i++)
      if (of.track[i] === track && at >= of.begin_ns[i] - near && at <= of.begin_ns[i] + of.length_ns[i] + near
        && (found < 0 || of.length_ns[i] > of.length_ns[found])) found = i;
    if (found >= 0) told.textContent = describe(found);
  };
  const kept = plot(place, (size) => ({
    ...size,
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, y: false, points: { show: false } },
    scales: { x: { time: false, range: (_, min, max) => [min ?? 0, max ?? end] }, y: { range: [0, tracks] } },
    axes: [axes(time, String)[0], { show: false }],
    series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
    hooks: { ready: [names], draw: [draw], setCursor: [under] },
  }), [[0, end], [0, 0]], 40 + 46 * tracks);
  const view = (by, shift) => {
    const { min, max } = kept.drawn.scales.x, half = ((max - min) / 2) * by, middle = (min + max) / 2 + (max - min) * shift;
    const wide = Math.min(Math.max(2 * half, 100), end), from = Math.min(Math.max(middle - wide / 2, 0), end - wide);
    kept.drawn.setScale("x", { min: from, max: from + wide });
  };
  const actions = { "+": () => view(0.5, 0), "-": () => view(2, 0), ArrowLeft: () => view(1, -0.25), ArrowRight: () => view(1, 0.25), 0: () => view(1e9, 0) };
  for (const [key, text] of [["+", "Zoom in"], ["-", "Zoom out"], ["ArrowLeft", "Earlier"], ["ArrowRight", "Later"], ["0", "Show all"]]) {
    const button = el("button", { type: "button" }, text);
    button.addEventListener("click", actions[key]);
    tools.append(button);
  }
  place.addEventListener("keydown", (event) => {
    const action = actions[event.key === "=" ? "+" : event.key];
    if (action) { action(); event.preventDefault(); }
  });
  const waits = of.cause.map((_, at) => at).filter((at) => of.cause[at] >= 0).sort((a, b) => of.length_ns[b] - of.length_ns[a]).slice(0, 10);
  if (waits.length) figure.append(el("h4", {}, "The longest waits"), table(["Where", "what for", "how long", "when"],
    waits.map((at) => [of.tracks[of.track[at]].name, of.names[of.cause[at]], time(of.length_ns[at]), time(of.begin_ns[at])])));
}

function charts() {
  const place = document.getElementById("charts");
  const recorded = runs.filter((run) => run.series);
  if (!recorded.length) {
    place.append(el("p", { class: "note" }, "These reports have totals only. With `kv-replay run --series` they also have charts and a timeline."));
    return;
  }
  const section = (title) => {
    const id = title.toLowerCase().replace(/[^a-z]+/g, "-"), made = el("section", { "aria-labelledby": id }, el("h2", { id }, title));
    place.append(made);
    return made;
  };
  const clock = recorded.some((run) => run.series.clock === "virtual")
    ? "Times are virtual: what the machine of the profile would have taken." : "Times are those of this host.";
  const over = section("Over time");
  over.append(el("p", { class: "note" }, clock));
  lines(over, "Found blocks", "Of the blocks that prompts looked up: where they were found, and those that were there before and had gone.", (run) => {
    const of = run.series.samples, hits = sum(of.hits_device, of.hits_host);
    return [
      { name: "found", colour: 0, values: rate(hits, of.lookups), fill: true },
      { name: "in host memory or below", colour: 1, values: rate(of.hits_host, of.lookups) },
      { name: "gone", colour: 4, values: rate(of.lost, of.lookups) },
    ];
  }, percent, 100);
  for (const [title, tier] of [["Device memory", "device"], ["Host memory", "host"]])
    lines(over, title, "Blocks in use by requests and copies; together with cached ones that nobody uses; and all that there are.", (run) => {
      const of = run.series.samples, used = sum(of[tier + "_in_use"], of[tier + "_retiring"]), filled = sum(used, of[tier + "_cached"]);
      return [
        { name: "in use", colour: 0, values: used, fill: true },
        { name: "in use or cached", colour: 2, values: filled },
        { name: "all", colour: 5, values: sum(filled, of[tier + "_free"]), dash: [4, 4] },
      ];
    }, (value) => short(value, ""));
  lines(over, "Bytes over the link", "Blocks only, and the most that the link of one device carries.", (run) => {
    const of = run.series.samples, limit = run.series.link_bytes_per_s;
    const made = [
      { name: "to the device", colour: 2, values: speed(of.bytes_to_device, of.time_ns) },
      { name: "to host memory", colour: 1, values: speed(of.bytes_to_host, of.time_ns) },
    ];
    if (limit) made.push({ name: "limit", colour: 5, values: of.time_ns.map(() => Math.max(...limit)), dash: [4, 4] });
    return made;
  }, (value) => (value == null ? "" : short(value, "B/s")));
  lines(over, "Requests", "The most in each sample.", (run) => {
    const of = run.series.samples;
    return [
      { name: "running", colour: 0, values: of.running, fill: true },
      { name: "waiting", colour: 4, values: of.waiting },
      { name: "suspended", colour: 3, values: of.suspended },
    ];
  }, (value) => short(value, ""));
  lines(over, "Stalls by cause", "How often in each sample a request or a step was told to wait.", (run) => {
    const of = run.series.samples;
    return ["prefix", "load", "room", "row", "growth"].map((cause, at) => ({ name: { prefix: "a prefix that another computes", load: "a load from below", room: "room", row: "a row of the table", growth: "memory to be mapped" }[cause], colour: at, values: steps(of["stalls_" + cause]) }))
      .concat([{ name: "preempted", colour: 5, values: steps(of.preemptions) }]);
  }, (value) => short(value, ""));
  const how = section("How long");
  histograms(how, "Calls of the engine", "By this host's clock. On simulated devices a call may run what a device would do meanwhile.",
    (series) => Object.entries(series.calls_ns), time);
  histograms(how, "Copies between a device and host memory", "From the moment that they could begin.", (series) => Object.entries(series.moves_ns), time);
  histograms(how, "Requests that waited to be admitted", "By what they waited for.", (series) => Object.entries(series.waits_ns), time);
  histograms(how, "Ages of blocks", "Since they were last asked for: when they were found again, when they were asked for and had gone, and when they were evicted.",
    (series) => [["found again", series.age_at_reuse_ms], ["had gone", series.age_at_loss_ms], ["evicted", series.age_at_eviction_ms]], (ms) => time(ms == null ? null : ms * 1e6));
  const when = section("Timeline");
  for (const run of recorded) timeline(when, run);
}

charts();
