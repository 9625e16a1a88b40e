// The page of a plan. Times are nanoseconds.

const hops = Object.fromEntries(Object.entries(data.hops).map(([name, list]) => [name, Float64Array.from(list)]));
const count = hops.src.length;
const span = Math.max(data.makespan, data.bound) || 1;
const nbytes = Float64Array.from(hops.chunk, (chunk) => data.chunk_bytes[chunk]);
const hostOf = data.host_of, nicOf = data.nic_of, hosts = data.hosts;

const MOST_BARS = 20000; // hops that are drawn one by one
const MOST_LINES = 300; // chunks in flight that are
const MOST_RANKS = 512;
const MOST_LISTED = 20;
const MOST_NICS = 64; // in the table

// Rows of the chart: each NIC out and in; where nothing leaves a host, each rank. hops: by begin.
function rowsOf() {
  const crosses = (hop) => hostOf[hops.src[hop]] !== hostOf[hops.dst[hop]];
  let any = false;
  for (let hop = 0; hop < count && !any; hop++) any = crosses(hop);
  const rows = [], byKey = new Map();
  function add(key, label, out, into) {
    byKey.set(key, rows.length);
    rows.push({ label, ways: [{ rate: out, hops: [], bytes: 0 }, { rate: into, hops: [], bytes: 0 }] });
  }
  hosts.forEach((host, index) => {
    if (any) {
      host.nics.forEach(([out, into], nic) => add(`${index} ${nic}`, host.nics.length > 1 ? `host ${index} NIC ${nic}` : `host ${index}`, out, into));
    } else {
      host.ranks.forEach((rank) => add(`${rank}`, `rank ${rank}`, host.local, host.local));
    }
  });
  const order = Array.from({ length: count }, (_, hop) => hop).sort((a, b) => hops.start[a] - hops.start[b]);
  for (const hop of order) {
    if (any && !crosses(hop)) continue;
    [hops.src[hop], hops.dst[hop]].forEach((rank, way) => {
      const row = rows[byKey.get(any ? `${hostOf[rank]} ${nicOf[rank]}` : `${rank}`)];
      row.ways[way].hops.push(hop);
      row.ways[way].bytes += nbytes[hop];
    });
  }
  return { rows, any };
}

const { rows, any } = rowsOf();
const what = any ? "NIC" : "rank";
const busy = (way) => (data.makespan ? (way.bytes / way.rate) * 1e9 / data.makespan : 0);
const time = (ns) => seconds(ns / 1e9);
function hopText(hop) {
  const task = data.tasks[hops.task[hop]];
  return `rank ${hops.src[hop]} → rank ${hops.dst[hop]}: chunk ${hops.chunk[hop]}, ${bytes(nbytes[hop])}\n` +
    `${time(hops.start[hop])} to ${time(hops.finish[hop])}, task ${hops.task[hop]}${task ? ` (${task})` : ""}`;
}

// ---- the hosts, and what is in flight between them

const columns = Math.max(1, Math.min(hosts.length, Math.ceil(Math.sqrt(hosts.length * 1.8))));
const lines = Math.ceil(hosts.length / columns);
const drawsRanks = hostOf.length <= MOST_RANKS;
const most = Math.max(1, ...hosts.map((host) => host.ranks.length));
const inner = most <= 5 ? most : Math.ceil(Math.sqrt(most * 2)); // ranks next to each other
const boxHeight = drawsRanks ? Math.max(70, Math.ceil(most / inner) * 34 + 34) : 56;
const gap = 46;
const map = new Picture("Hosts and ranks with the chunks in flight between them; the table below lists these", lines * (boxHeight + gap) + gap / 2);
const places = new Array(hostOf.length);
let boxes = [];
let radius = 11; // of a rank's circle, in pixels

function place() {
  const width = map.width / columns;
  boxes = hosts.map((host, index) => {
    const line = Math.floor(index / columns), inLine = Math.min(columns, hosts.length - line * columns);
    const x = ((index % columns) + (columns - inLine) / 2) * width + Math.min(40, width * 0.16);
    return { x, y: line * (boxHeight + gap) + gap / 2, w: width - 2 * Math.min(40, width * 0.16), h: boxHeight };
  });
  radius = Math.max(3, Math.min(11, boxes[0].w / Math.min(inner, most) / 2 - 1));
  hosts.forEach((host, index) => {
    const box = boxes[index];
    host.ranks.forEach((rank, at) => {
      const across = Math.min(inner, host.ranks.length);
      places[rank] = drawsRanks
        ? [box.x + (box.w * ((at % inner) + 0.5)) / across, box.y + 40 + Math.floor(at / inner) * 34]
        : [box.x + box.w / 2, box.y + box.h / 2];
    });
  });
}

const gets = new Float64Array(hostOf.length);
for (let hop = 0; hop < count; hop++) gets[hops.dst[hop]] += nbytes[hop];
const got = new Float64Array(hostOf.length);
let flying = [];

function drawHosts() {
  const context = map.context(map.still);
  place();
  boxes.forEach((box, index) => {
    context.fillStyle = colour("row");
    context.strokeStyle = colour("line");
    context.beginPath();
    context.roundRect(box.x, box.y, box.w, box.h, 6);
    context.fill();
    context.stroke();
    context.fillStyle = colour("muted");
    context.textAlign = "left";
    if (box.w > 40) context.fillText(`host ${index}`, box.x + 8, box.y + 13);
  });
}

function drawFlying() {
  const numbered = radius > 3.6 * String(hostOf.length - 1).length;
  const context = map.context(map.moving);
  const ink = colour("fg"), accent = colour("accent"), edge = colour("bg");
  const single = flying.length <= MOST_LINES && drawsRanks;
  for (const { hop } of single ? flying : []) drawWayOf(context, hop);
  const labelled = single || drawPairs(context, ink, accent, edge);
  if (drawsRanks) {
    context.textAlign = "center";
    places.forEach((at, rank) => {
      if (!at) return;
      context.beginPath();
      context.arc(at[0], at[1], radius, 0, 7);
      context.fillStyle = edge;
      context.fill();
      if (gets[rank]) { // how much of what it gets has arrived
        context.beginPath();
        context.moveTo(at[0], at[1]);
        context.arc(at[0], at[1], radius, -Math.PI / 2, -Math.PI / 2 + (2 * Math.PI * got[rank]) / gets[rank]);
        context.globalAlpha = 0.45;
        context.fillStyle = accent;
        context.fill();
        context.globalAlpha = 1;
      }
      context.beginPath();
      context.arc(at[0], at[1], radius, 0, 7);
      context.strokeStyle = ink;
      context.stroke();
      context.fillStyle = ink;
      if (numbered) context.fillText(String(rank), at[0], at[1] + 0.5);
    });
  } else {
    hosts.forEach((host, index) => {
      const wanted = host.ranks.reduce((sum, rank) => sum + gets[rank], 0);
      const come = host.ranks.reduce((sum, rank) => sum + got[rank], 0);
      const box = boxes[index];
      context.fillStyle = accent;
      context.globalAlpha = 0.45;
      context.fillRect(box.x, box.y + box.h - 8, wanted ? (box.w * come) / wanted : 0, 8);
      context.globalAlpha = 1;
    });
  }
  caption.textContent = `${flying.length} in flight` + (single ? "."
    : `: one line for each pair of hosts${labelled ? ", with their number" : ""}; those inside a host are left out.`);
  for (const { hop, part } of single ? flying : []) {
    context.beginPath();
    context.arc(...onWay(hop, part), 5, 0, 7);
    context.fillStyle = colourOf(hops.task[hop]);
    context.fill();
    context.strokeStyle = edge;
    context.stroke();
  }
}

// A hop bends to its right, so that it passes by the ranks between and both directions are seen.
function bend(hop) {
  const [x0, y0] = places[hops.src[hop]], [x1, y1] = places[hops.dst[hop]];
  const share = Math.min(0.22, 60 / (Math.hypot(x1 - x0, y1 - y0) || 1));
  return [x0, y0, (x0 + x1) / 2 - (y1 - y0) * share, (y0 + y1) / 2 + (x1 - x0) * share, x1, y1];
}

function onWay(hop, part) {
  const [x0, y0, xc, yc, x1, y1] = bend(hop);
  const rest = 1 - part;
  return [rest * rest * x0 + 2 * rest * part * xc + part * part * x1, rest * rest * y0 + 2 * rest * part * yc + part * part * y1];
}

function drawWayOf(context, hop) {
  const [x0, y0, xc, yc, x1, y1] = bend(hop);
  context.strokeStyle = colourOf(hops.task[hop]);
  context.lineWidth = 1.8;
  context.beginPath();
  context.moveTo(x0, y0);
  context.quadraticCurveTo(xc, yc, x1, y1);
  context.stroke();
  context.lineWidth = 1;
}

// One line for each pair of hosts, with how many chunks are in flight. Returns whether there was room for the numbers.
function drawPairs(context, ink, accent, edge) {
  const pairs = new Map();
  for (const { hop } of flying) {
    const key = hostOf[hops.src[hop]] * hosts.length + hostOf[hops.dst[hop]];
    pairs.set(key, (pairs.get(key) ?? 0) + 1);
  }
  context.textAlign = "center";
  const labelled = pairs.size <= 60;
  for (const [key, number] of pairs) {
    const [from, to] = [boxes[Math.floor(key / hosts.length)], boxes[key % hosts.length]];
    if (from === to) continue;
    const [x0, y0, x1, y1] = [from.x + from.w / 2, from.y + from.h / 2, to.x + to.w / 2, to.y + to.h / 2];
    context.strokeStyle = accent;
    context.globalAlpha = labelled ? 0.8 : 0.35;
    context.lineWidth = 1 + Math.log2(1 + number);
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.globalAlpha = 1;
    if (labelled) { // nearer to where they go: lines of both directions overlap
      const [x, y] = [x0 + (x1 - x0) * 0.62, y0 + (y1 - y0) * 0.62];
      context.fillStyle = edge;
      context.fillRect(x - 13, y - 8, 26, 16);
      context.fillStyle = ink;
      context.fillText(String(number), x, y);
    }
  }
  context.lineWidth = 1;
  return labelled;
}

map.hover((x, y) => {
  let best = "", least = 9;
  for (const { hop, part } of flying.length <= MOST_LINES ? flying : []) {
    for (const share of [part, part / 2, (1 + part) / 2]) {
      const [atX, atY] = onWay(hop, share), distance = Math.hypot(atX - x, atY - y);
      if (distance < least) [best, least] = [hopText(hop), distance];
    }
  }
  if (best) return best;
  const rank = drawsRanks ? places.findIndex((at) => at && Math.hypot(at[0] - x, at[1] - y) < radius) : -1;
  if (rank >= 0) return `rank ${rank}: ${bytes(got[rank])} of ${bytes(gets[rank])} have arrived`;
  return "";
});

// ---- what each NIC carries over time

const rowHeight = Math.min(30, Math.max(6, 1600 / Math.max(rows.length, 1)));
const label = 104, foot = 26, head = 6;
const chart = new Picture(`When each ${what} sends and receives`, rows.length * rowHeight + foot + head);
const across = (ns) => label + ((chart.width - label - 12) * ns) / span;

function drawChart() {
  const context = chart.context(chart.still);
  const width = chart.width - label - 12, half = rowHeight / 2 - 1;
  const every = Math.ceil(14 / rowHeight);
  rows.forEach((row, index) => {
    const y = head + index * rowHeight;
    context.fillStyle = colour("row");
    context.fillRect(label, y, width, rowHeight - 2);
    context.fillStyle = colour("fg");
    context.textAlign = "left";
    if (index % every === 0) context.fillText(row.label, 0, y + rowHeight / 2);
    if (rowHeight >= 24) {
      context.fillStyle = colour("muted");
      context.textAlign = "right";
      context.font = '10px system-ui, "Liberation Sans", "DejaVu Sans", sans-serif';
      context.fillText("out", label - 5, y + half / 2 + 0.5);
      context.fillText("in", label - 5, y + half * 1.5 + 1);
      context.font = '12px system-ui, "Liberation Sans", "DejaVu Sans", sans-serif';
    }
    row.ways.forEach((way, at) => drawWay(context, way, y + at * half, half - 0.5, width));
  });
  context.fillStyle = colour("fg");
  context.fillRect(across(data.makespan), 0, 1.5, chart.height - foot);
  context.strokeStyle = colour("bound");
  context.lineWidth = 2;
  context.setLineDash([5, 3]);
  context.beginPath();
  context.moveTo(across(data.bound), 0);
  context.lineTo(across(data.bound), chart.height - foot);
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
  const [unit, scale] = span >= 1e9 ? ["s", 1e9] : span >= 1e6 ? ["ms", 1e6] : ["us", 1e3];
  axis(context, label, width, chart.height - foot + 2, span / scale, unit);
}

function drawWay(context, way, y, height, width) {
  const end = (hop) => hops.start[hop] + (nbytes[hop] / way.rate) * 1e9;
  if (count <= MOST_BARS) {
    for (const hop of way.hops) {
      const x = across(hops.start[hop]);
      context.fillStyle = colourOf(hops.task[hop]);
      context.fillRect(x, y, Math.max(0.7, across(end(hop)) - x), height);
    }
    return;
  }
  const bins = Math.max(1, Math.floor(width)), part = new Float64Array(bins), step = span / bins;
  for (const hop of way.hops) {
    const stop = Math.min(end(hop), span);
    for (let bin = Math.floor(hops.start[hop] / step); bin < bins && bin * step < stop; bin++) {
      part[bin] += Math.min(stop, (bin + 1) * step) - Math.max(hops.start[hop], bin * step);
    }
  }
  context.fillStyle = colour("accent");
  for (let bin = 0; bin < bins; bin++) {
    if (!part[bin]) continue;
    context.globalAlpha = Math.min(1, 0.15 + (0.85 * part[bin]) / step);
    context.fillRect(label + bin, y, 1.05, height);
  }
  context.globalAlpha = 1;
}

chart.hover((x, y) => {
  const row = rows[Math.floor((y - head) / rowHeight)];
  if (!row || x < label) return "";
  const way = row.ways[((y - head) % rowHeight) < rowHeight / 2 ? 0 : 1];
  const at = ((x - label) / (chart.width - label - 12)) * span;
  let low = 0, high = way.hops.length; // the last one that has begun
  while (low < high) {
    const middle = (low + high) >> 1;
    if (hops.start[way.hops[middle]] <= at) low = middle + 1; else high = middle;
  }
  const hop = way.hops[low - 1];
  const inside = hop !== undefined && at <= Math.max(hops.finish[hop], hops.start[hop] + span / 500);
  return `${row.label} ${way === row.ways[0] ? "out" : "in"}, ${digits(busy(way) * 100, 3)} % of the time\n${inside ? hopText(hop) : "idle"}`;
});

// ---- the page

const ratio = data.bound ? data.makespan / data.bound : 1;
const facts = [["makespan", time(data.makespan)], ["lower bound", time(data.bound)], ["ratio", digits(ratio)],
  ["strategy", data.strategy], ["hops", count], ["tasks", new Set(hops.task).size]];
const caption = make("p", { id: "flying" });
const listed = make("div");
const aggregated = count > MOST_BARS
  ? `${count} hops are more than ${MOST_BARS}: each pixel shows for which part of its time the ${what} is busy, the darker the longer.`
  : "One colour for each task.";
const table_ = table(`Traffic of each ${what}`, [what, "out", "in", "out busy", "in busy"],
  rows.slice(0, MOST_NICS).map((row) => [row.label, ...row.ways.map((way) => bytes(way.bytes)), ...row.ways.map((way) => `${(busy(way) * 100).toFixed(1)} %`)]), [1, 2, 3, 4]);
const about = make("dl", { class: "about" }, ...data.about.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
main.append(
  about, figures("Figures", facts),
  make("h2", {}, "Chunks in flight"), caption, map.element,
  make("p", {}, "A rank's circle fills with what it receives."),
  make("h2", {}, `Traffic of each ${what}`),
  make("p", {}, `${aggregated} Dashed: the lower bound; solid: the makespan.`), chart.element,
  make("h2", {}, "Chunks in flight, listed"), listed,
  make("h2", {}, `Utilisation of each ${what}`), table_);
if (rows.length > MOST_NICS) main.append(make("p", {}, `and ${rows.length - MOST_NICS} more`));

function show(now) {
  flying = [];
  got.fill(0);
  for (let hop = 0; hop < count; hop++) {
    if (hops.finish[hop] <= now) got[hops.dst[hop]] += nbytes[hop];
    else if (hops.start[hop] <= now) {
      const part = (now - hops.start[hop]) / (hops.finish[hop] - hops.start[hop]);
      flying.push({ hop, part });
      got[hops.dst[hop]] += nbytes[hop] * part;
    }
  }
  drawFlying();
  chart.cursor(across(now), chart.height - foot);
  listed.replaceChildren(table("Chunks in flight", ["from rank", "to rank", "chunk", "bytes", "task", "begins", "ends"],
    flying.slice(0, MOST_LISTED).map(({ hop }) => [hops.src[hop], hops.dst[hop], hops.chunk[hop], bytes(nbytes[hop]), hops.task[hop], time(hops.start[hop]), time(hops.finish[hop])]), [0, 1, 2, 3, 4, 5, 6]));
  if (flying.length > MOST_LISTED) listed.append(make("p", {}, `and ${flying.length - MOST_LISTED} more`));
  document.body.dataset.flying = String(flying.length);
}

Object.assign(document.body.dataset, {
  makespan: data.makespan, bound: data.bound, hops: count,
  busy: JSON.stringify(rows.map((row) => row.ways.map((way) => Math.round(way.bytes)))),
});
const begins = Float64Array.from(new Set(hops.start)).sort();
play(data.makespan, begins, (now) => `at ${time(now)}; all has arrived at ${time(data.makespan)}`, show, () => { drawHosts(); drawChart(); });
