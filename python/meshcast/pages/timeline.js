// The page of schedules, recorded steps and flight records: two timelines under each other, on one axis.

const KINDS = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient", wait: "waits for a value",
  SEND_F: "sends an activation", SEND_B: "sends a gradient",
  ended: "ended", failed: "failed", unfinished: "not ended", late: "not waited for",
};
const MOST_BARS = 20000; // of a panel, that are drawn one by one
const MOST_ROWS = 64; // in the table
const panels = data.panels.map((panel) => {
  const bars = panel.bars.map(([row, kind, start, end, label, text, tone], index) => ({ row, kind, start, end, label, text, tone, index }));
  const critical = new Set(panel.critical);
  const rows = panel.rows.map(() => ({ work: [], sends: [] }));
  for (const bar of bars) rows[bar.row][bar.kind.startsWith("SEND") ? "sends" : "work"].push(bar);
  for (const row of rows) for (const list of Object.values(row)) list.sort((a, b) => a.start - b.start);
  return { ...panel, bars, critical, byRow: rows };
});
const labelWidth = 74, foot = 26, head = 4;
let shown = [], end = 1, all = () => {};

const number = (value) => digits(value, 5);
const amount = (value, panel) => `${number(value)}${panel.unit ? ` ${panel.unit}` : ""}`;

// The last one of a list by begin that has begun, if it has not ended. Those of a row may overlap.
function at(list, time) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].start <= time) low = middle + 1; else high = middle;
  }
  for (let index = low - 1; index >= Math.max(0, low - 64); index--) {
    if (time < list[index].end) return list[index];
  }
  return undefined;
}

class Timeline {
  constructor(panel) {
    this.panel = panel;
    this.rowHeight = Math.min(34, Math.max(7, 1200 / Math.max(panel.rows.length, 1)));
    this.picture = new Picture(`Timeline of ${panel.title}; the table below says what each row does at the time chosen`,
      head + panel.rows.length * this.rowHeight + foot);
    const facts = panel.facts.length ? [figures(`Figures of ${panel.title}`, panel.facts)] : [];
    const many = panel.bars.length > MOST_BARS
      ? [make("p", {}, `${panel.bars.length} bars are more than ${MOST_BARS}: those less than half a pixel wide are left out where another one is.`)] : [];
    this.element = make("section", {}, make("h2", {}, panel.title), ...facts, ...many, this.picture.element);
    this.picture.hover((x, y) => this.find(x, y));
  }
  x(time) {
    return labelWidth + ((this.picture.width - labelWidth - 12) * time) / end;
  }
  draw() {
    const context = this.picture.context(this.picture.still);
    const { panel, rowHeight } = this, width = this.picture.width - labelWidth - 12;
    const every = Math.ceil(14 / rowHeight);
    const few = panel.bars.length <= MOST_BARS;
    const marks = document.getElementById("critical")?.checked;
    panel.rows.forEach((name, index) => {
      const y = head + index * rowHeight;
      context.fillStyle = colour("row");
      context.fillRect(labelWidth, y, width, rowHeight - 2);
      context.fillStyle = colour("fg");
      context.textAlign = "left";
      if (index % every === 0) context.fillText(name, 0, y + rowHeight / 2);
      const sends = panel.byRow[index].sends.length > 0;
      const work = (rowHeight - 2) * (sends ? 0.7 : 1);
      this.drawBars(context, panel.byRow[index].work, y, work, few);
      this.drawBars(context, panel.byRow[index].sends, y + work + 1, rowHeight - 3 - work, few);
      if (!marks) return;
      context.strokeStyle = colour("critical");
      context.lineWidth = 2.4;
      for (const bar of [...panel.byRow[index].work, ...panel.byRow[index].sends]) {
        if (!panel.critical.has(bar.index)) continue;
        const strip = bar.kind.startsWith("SEND"), x = this.x(bar.start);
        context.strokeRect(x + 1, strip ? y + work + 1 : y + 1, Math.max(1, this.x(bar.end) - x - 2), (strip ? rowHeight - 4 - work : work - 2));
      }
      context.lineWidth = 1;
    });
    context.fillStyle = colour("fg");
    context.fillRect(this.x(panel.makespan), 0, 1.5, this.picture.height - foot);
    axis(context, labelWidth, width, this.picture.height - foot + 2, end, panel.unit);
  }
  drawBars(context, list, y, height, few) {
    const edge = colour("edge"), fills = new Map();
    let drawn = -1;
    for (const bar of list) {
      const x = this.x(bar.start), width = this.x(bar.end) - x;
      if (!few && width < 0.5 && x + width < drawn + 0.5) continue;
      drawn = x + width;
      if (!fills.has(bar.kind)) fills.set(bar.kind, colour(bar.kind));
      context.fillStyle = fills.get(bar.kind);
      context.globalAlpha = 1 - Math.min(0.36 * bar.tone, 0.6);
      context.fillRect(x, y, Math.max(width, 0.7), height);
      context.globalAlpha = 1;
      if (width > 4) {
        context.fillStyle = edge;
        context.fillRect(x + width - 0.7, y, 0.7, height);
      }
      if (bar.label && height > 11 && width > 7 * bar.label.length + 3) {
        context.fillStyle = bar.kind === "wait" || bar.tone ? colour("fg") : "#101214";
        context.textAlign = "center";
        context.fillText(bar.label, x + width / 2, y + height / 2 + 0.5);
      }
    }
  }
  find(x, y) {
    const row = this.panel.byRow[Math.floor((y - head) / this.rowHeight)];
    if (!row || x < labelWidth) return "";
    const time = ((x - labelWidth) / (this.picture.width - labelWidth - 12)) * end;
    const low = ((y - head) % this.rowHeight) > (this.rowHeight - 2) * 0.7;
    const bar = low && row.sends.length ? at(row.sends, time) : at(row.work, time);
    return bar ? `${bar.text}\n${amount(bar.start, this.panel)} to ${amount(bar.end, this.panel)}${this.panel.critical.has(bar.index) ? "\non the critical path" : ""}` : "idle";
  }
}

const area = make("div"), now = make("div");
const choices = [];
function chosen() {
  return [...new Set(choices.length ? choices.map((select) => Number(select.value)) : panels.map((_, index) => index))];
}

function choose() {
  shown = chosen().map((index) => new Timeline(panels[index]));
  end = Math.max(...shown.map((each) => each.panel.makespan), 1e-12);
  area.replaceChildren(legend(), ...shown.map((each) => each.element));
}

function legend() {
  const used = new Set(shown.flatMap(({ panel }) => panel.bars.map((bar) => bar.kind)));
  const items = Object.keys(KINDS).filter((kind) => used.has(kind)).map((kind) => {
    const box = make("span", { "aria-hidden": "true" });
    box.style.background = `var(--${kind})`;
    return make("li", {}, box, KINDS[kind]);
  });
  if (shown.some(({ panel }) => panel.bars.some((bar) => bar.tone))) items.push(make("li", {}, "paler: a later stage of the rank"));
  return make("ul", { class: "legend" }, ...items);
}

const chooser = make("div", { class: "choose" });
if (panels.length > 2) {
  ["upper", "lower"].forEach((name, index) => {
    const select = make("select", { id: name }, ...panels.map((panel, at) => make("option", { value: at }, panel.title)));
    select.value = wanted.get(name) ?? String(index ? Math.min(3, panels.length - 1) : 1);
    choices.push(select);
    chooser.append(pair(make("label", { for: name }, index ? "Below" : "Above"), select));
  });
}
if (panels.some((panel) => panel.critical.size)) {
  const box = make("input", { type: "checkbox", id: "critical", checked: "" });
  chooser.append(pair(box, make("label", { for: "critical" }, "Mark the critical path")));
}
if (data.text) main.append(make("pre", {}, data.text));
main.append(chooser, area, make("h2", {}, "At this time"), now);

function show(time) {
  for (const each of shown) each.picture.cursor(each.x(time), each.picture.height - foot);
  const rows = [];
  for (const { panel } of shown) {
    panel.rows.slice(0, MOST_ROWS).forEach((name, index) => {
      const { work, sends } = panel.byRow[index];
      const [does, sent] = [at(work, time), at(sends, time)];
      rows.push([...(shown.length > 1 ? [panel.title] : []), name, does ? does.text : "idle", sent ? sent.text : ""]);
    });
  }
  const sends = shown.some(({ panel }) => panel.byRow.some((row) => row.sends.length));
  const heads = [...(shown.length > 1 ? ["timeline"] : []), "row", "does", ...(sends ? ["sends"] : [])];
  now.replaceChildren(table("Actions of each row at this time", heads, rows.map((row) => row.slice(0, heads.length))));
  document.body.dataset.does = JSON.stringify(rows.map((row) => row.slice(shown.length > 1 ? 1 : 0)));
}

function redraw() {
  for (const each of shown) each.draw();
}

choose();
const begins = Float64Array.from(new Set(panels.flatMap((panel) => panel.bars.map((bar) => bar.start)))).sort();
// The end of time depends on which timelines are seen: time itself goes from 0 to 1.
const scaled = () => begins.map((begin) => begin / end);
Object.assign(document.body.dataset, {
  makespans: JSON.stringify(panels.map((panel) => panel.makespan)), bars: panels.reduce((sum, panel) => sum + panel.bars.length, 0),
});
const moments = scaled();
const withUnit = (value) => `${number(value)}${panels[0]?.unit ? ` ${panels[0].unit}` : ""}`;
all = play(1, moments, (part) => `at ${withUnit(part * end)}; ${shown.length > 1 ? "the longest" : "it"} ends at ${withUnit(end)}`, (part) => show(part * end), redraw);
for (const select of choices) {
  select.addEventListener("change", () => { choose(); moments.set(scaled()); all(); });
}
document.getElementById("critical")?.addEventListener("change", all);
