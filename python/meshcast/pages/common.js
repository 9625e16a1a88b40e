"use strict";
// What both kinds of page have: errors kept for tests, the theme, canvases, and the player that moves time.

const started = performance.now();
const errors = [];
function keepError(text) {
  errors.push(text);
  document.body.dataset.errors = errors.join("\n");
}
window.addEventListener("error", (event) => keepError(event.message));
window.addEventListener("unhandledrejection", (event) => keepError(String(event.reason)));

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
// A fragment sets the page up, so that a link can point to a moment: #t=0.5&theme=dark&click=forth,play.
const wanted = new URLSearchParams(location.hash.slice(1));

// Ten hues that stay apart in print and under the common colour deficiencies, then more by the golden ratio.
const PALETTE = ["#4477aa", "#ee8866", "#44aa99", "#ccaa44", "#aa6699", "#66b3dd", "#999933", "#bb9977", "#7799dd", "#88889c"];
function colourOf(index) {
  return index < PALETTE.length ? PALETTE[index] : `hsl(${((index * 222.4922) % 360).toFixed(0)} 55% 58%)`;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A label and its control, which stay on one line.
function pair(...parts) {
  return make("span", { class: "pair" }, ...parts);
}

// numbers: columns that are set to the right.
function table(caption, head, rows, numbers = []) {
  const cell = (tag) => (text, at) => make(tag, numbers.includes(at) ? { class: "number" } : {}, String(text));
  return make("div", { class: "scroll" }, make("table", { "aria-label": caption },
    make("thead", {}, make("tr", {}, ...head.map(cell("th")))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell("td")))))));
}

// One row of values, each on one line with its unit, below their names. pairs: [name, value].
function figures(caption, pairs) {
  const whole = table(caption, pairs.map(([name]) => name), [pairs.map(([, value]) => value)]);
  whole.classList.add("figures");
  return whole;
}

function digits(value, count = 4) {
  return Number(value.toPrecision(count)).toString();
}

function seconds(value) {
  if (value >= 1) return `${digits(value)} s`;
  return value >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} us`;
}

function bytes(value) {
  for (const [unit, power] of [["TiB", 4], ["GiB", 3], ["MiB", 2], ["KiB", 1]]) {
    if (value >= 1024 ** power) return `${digits(value / 1024 ** power)} ${unit}`;
  }
  return `${digits(value)} B`;
}

// Asking the page itself makes it work out its style each time.
const colours = new Map();
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

// Two canvases: one for what stays, one above it for what moves with time; units are pixels of CSS. label: read
// out instead of the picture.
class Picture {
  constructor(label, height) {
    this.height = height;
    this.still = make("canvas", { role: "img", "aria-label": label });
    this.moving = make("canvas", { "aria-hidden": "true", width: "0", height: "0" });
    this.line = make("div", { class: "cursor" });
    this.element = make("div", { class: "layers" }, this.still, this.moving, this.line);
  }
  // A line across, at the time that is shown.
  cursor(x, height) {
    this.line.style.height = `${height}px`;
    this.line.style.transform = `translateX(${x - 1}px)`;
  }
  context(canvas) {
    const scale = window.devicePixelRatio || 1;
    if (canvas === this.still) this.width = this.element.clientWidth; // drawn first, and again at a new size
    const size = [Math.max(1, Math.round(this.width * scale)), Math.max(1, Math.round(this.height * scale))];
    if (canvas.width !== size[0] || canvas.height !== size[1]) {
      [canvas.width, canvas.height] = size;
      canvas.style.height = `${this.height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = '12px system-ui, "Liberation Sans", "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    return context;
  }
  // find(x, y): text of what is there, or "".
  hover(find) {
    const tip = document.getElementById("tip");
    this.element.addEventListener("mousemove", (event) => {
      const box = this.element.getBoundingClientRect();
      const text = find(event.clientX - box.left, event.clientY - box.top);
      tip.hidden = !text;
      if (!text) return;
      tip.textContent = text;
      tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
    });
    this.element.addEventListener("mouseleave", () => { tip.hidden = true; });
  }
}

// An axis of time below a picture: about eight round numbers, fewer where they would meet.
function axis(context, left, width, y, end, unit) {
  const step = end / Math.max(2, Math.min(8, width / 60));
  const power = 10 ** Math.floor(Math.log10(step));
  const round = [1, 2, 5, 10].find((factor) => factor * power >= step) * power;
  context.fillStyle = colour("muted");
  context.textAlign = "center";
  for (let index = 0; index * round <= end * 1.0001; index++) {
    const x = left + (width * index * round) / end;
    context.fillRect(x, y, 1, 4);
    context.fillText(`${digits(index * round)}${index ? "" : ` ${unit}`}`, x + (index ? 0 : 8), y + 12);
  }
}

// Moves time from 0 to end. show(time) draws; redraw() also what stays; begins: sorted times, for Back and Forward.
function play(end, begins, text, show, redraw) {
  const slider = document.getElementById("time");
  const button = document.getElementById("play");
  const speed = document.getElementById("speed");
  let time = 0, last = null;
  function set(value) {
    time = Math.min(Math.max(value, 0), end);
    slider.value = String(end ? Math.round((time / end) * 10000) : 0);
    slider.setAttribute("aria-valuetext", text(time));
    document.getElementById("now").textContent = text(time);
    const begin = performance.now();
    show(time);
    const body = document.body.dataset;
    body.drawMs = (performance.now() - begin).toFixed(2);
    body.time = String(time);
  }
  // By a timer: frames may not come where nothing is painted.
  let timer = 0;
  const later = () => { timer = setTimeout(tick, 16); };
  function tick() {
    const stamp = performance.now();
    set(time + ((stamp - last) / 1000 / Number(speed.value)) * end);
    last = stamp;
    if (time >= end) stop(); else later();
  }
  function stop() {
    clearTimeout(timer);
    last = null;
    button.textContent = "Play";
    button.setAttribute("aria-pressed", "false");
  }
  function start() {
    if (time >= end) set(0);
    last = performance.now();
    button.textContent = "Pause";
    button.setAttribute("aria-pressed", "true");
    later();
  }
  // A step of its own by keys: the slider's is 1/10000, so that a pointer moves it smoothly.
  const keys = { ArrowLeft: -0.01, ArrowDown: -0.01, ArrowRight: 0.01, ArrowUp: 0.01, PageDown: -0.1, PageUp: 0.1 };
  slider.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    stop();
    set(time + keys[event.key] * end);
  });
  slider.addEventListener("input", () => { stop(); set((slider.value / 10000) * end); });
  button.addEventListener("click", () => (last === null ? start() : stop()));
  document.getElementById("forth").addEventListener("click", () => {
    stop();
    set(begins.find((begin) => begin > time) ?? end);
  });
  document.getElementById("back").addEventListener("click", () => {
    stop();
    set(begins.findLast((begin) => begin < time) ?? 0);
  });
  const theme = document.getElementById("theme");
  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    colours.clear();
    theme.textContent = name === "dark" ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Use ${name === "dark" ? "light" : "dark"} colours`);
  }
  function all() { redraw(); set(time); }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(wanted.get("theme") ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { setTheme(dark.matches ? "dark" : "light"); all(); });
  theme.addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    all();
  });
  window.addEventListener("resize", all);
  redraw();
  // A page says most where something is in flight.
  slider.value = String(Math.round(10000 * Number(wanted.get("t") ?? 0.4)));
  slider.dispatchEvent(new Event("input"));
  document.body.dataset.openMs = (performance.now() - started).toFixed(1);
  if (wanted.has("point")) { // #point=1,0.3,0.2: to a place in the second picture
    const [index, x, y] = wanted.get("point").split(",").map(Number);
    const picture = document.querySelectorAll(".layers")[index], box = picture.getBoundingClientRect();
    const place = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
    picture.dispatchEvent(new MouseEvent("mousemove", place));
  }
  for (const key of (wanted.get("key") ?? "").split(",").filter(Boolean)) {
    slider.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
  }
  for (const id of (wanted.get("click") ?? "").split(",")) document.getElementById(id)?.click();
  return all;
}
