// Draws what the page's data block holds, and follows the directory: the page is asked for again every few
// seconds, and parts that changed are replaced. Text of files enters the page as text only.
"use strict";

const POLL_MS = 3000;
const HEIGHT = 170;
const WHOLE = [...Array(7).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const charts = []; // {chart, curve}, in the order of data.curves
let onMoment = null; // told the place in x under the pointer

const read = (page) => JSON.parse(page.getElementById("data").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const short = (value) => (Math.abs(value) < 1e5 ? Number(value.toPrecision(4)).toString() : value.toExponential(1));

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// curves

function columns(curve) {
  // uPlot's data: x, then a column of each line. Steps at which only an evaluation took place are added.
  const x = [...new Set([...curve.x, ...curve.dots.map((dot) => dot[0])])].sort((a, b) => a - b);
  const place = new Map(curve.x.map((value, index) => [value, index]));
  const lines = Object.values(curve.lines);
  return [x, ...(lines.length ? lines : [[]]).map((values) => x.map((value) => values[place.get(value)] ?? null))];
}

function drawDots(chart, curve) {
  const context = chart.ctx, size = 4 * devicePixelRatio;
  context.save();
  context.fillStyle = context.strokeStyle = colour("ink");
  context.lineWidth = devicePixelRatio;
  for (const [step, rate, low, high] of curve.dots) {
    const x = chart.valToPos(step, "x", true), at = (value) => chart.valToPos(value, "y", true);
    context.beginPath();
    context.moveTo(x, at(low));
    context.lineTo(x, at(high));
    context.stroke();
    context.beginPath();
    context.arc(x, at(rate), size, 0, 2 * Math.PI);
    context.fill();
  }
  context.restore();
}

function draw(curve, panel, xLabel) {
  const entry = { curve, chart: null };
  const names = Object.keys(curve.lines);
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const value = (_, raw) => (raw === null || raw === undefined ? "–" : Number(raw.toPrecision(5)).toString());
  const figure = element("figure", { className: "card" }, element("div", { className: "title" }, element("h3", { textContent: curve.title })));
  panel.append(figure);
  const room = () => figure.clientWidth - 2 * parseFloat(getComputedStyle(figure).paddingLeft);
  const options = {
    width: room(),
    height: HEIGHT,
    cursor: { sync: { key: "all" } },
    scales: { x: { time: false }, y: curve.range ? { range: curve.range } : {} },
    axes: [xLabel === "iteration" ? { ...axis, incrs: WHOLE } : axis, { ...axis, size: 56, values: (_, ticks) => ticks.map(short) }],
    series: [{ label: xLabel, value }].concat(
      (names.length ? names : [""]).map((label, index) => ({
        label,
        value,
        stroke: colour(`series-${index % 8}`),
        width: 1.5,
        spanGaps: curve.dots.length > 0,
      })),
    ),
    hooks: {
      draw: [(chart) => drawDots(chart, entry.curve)],
      setCursor: [(chart) => onMoment && chart.cursor.idx !== null && chart.cursor.idx !== undefined && onMoment(chart.cursor.idx)],
    },
  };
  entry.chart = new uPlot(options, columns(curve), figure);
  new ResizeObserver(() => entry.chart.setSize({ width: room(), height: HEIGHT })).observe(figure);
  charts.push(entry);
}

function drawCurves(data) {
  const panel = document.getElementById("curves"), more = document.getElementById("more");
  if (!panel) return;
  const others = data.curves.slice(data.main);
  more.classList.toggle("some", others.length > 0);
  const known = new Map(charts.map((entry) => [entry.curve.title, entry]));
  const show = (curve, where) => {
    const entry = known.get(curve.title);
    if (!entry) return draw(curve, where, data.x);
    entry.curve = curve;
    entry.chart.setData(columns(curve));
  };
  data.curves.slice(0, data.main).forEach((curve) => show(curve, panel));
  const showMore = () => more.open && others.forEach((curve) => show(curve, more.lastElementChild));
  more.ontoggle = showMore;
  showMore();
}

// films side by side

const chosen = { row: null, 0: null, 1: null };

function drawFilms(films) {
  const box = document.getElementById("films");
  if (!box || !films) return;
  const select = (key, names, otherwise) => {
    chosen[key] = names.includes(chosen[key]) ? chosen[key] : otherwise;
    const options = names.map((name) => element("option", { textContent: name, value: name, selected: name === chosen[key] }));
    return element("select", { onchange: (event) => { chosen[key] = event.target.value; drawFilms(films); } }, ...options);
  };
  const rows = Object.keys(films.rows), last = films.columns.at(-1);
  const controls = [select("row", rows, rows[0]), select(0, films.columns, films.columns[0])];
  if (films.columns.length > 1) controls.push(select(1, films.columns, last));
  const shown = controls.slice(1).map((_, side) => chosen[side]);
  const figures = shown.map((column) => {
    const film = films.rows[chosen.row][column];
    const video = film && element("video", { src: `/${film.source}`, controls: true, loop: true, muted: true, autoplay: true, playsInline: true });
    const caption = element("figcaption", {}, element("b", { textContent: `${column}. ` }), film ? film.title : "no film of this episode");
    return element("figure", {}, ...(video ? [video] : []), caption);
  });
  box.replaceChildren(element("div", { className: "controls" }, ...controls), element("div", { className: "pair" }, ...figures));
}

// the frames of an episode

function drawFrames(frames, x) {
  const box = document.getElementById("frames");
  if (!box || !frames) return;
  const images = frames.cameras.map((name, camera) => element("img", { alt: name, camera }));
  const slider = element("input", { type: "range", min: 0, max: frames.count - 1, value: 0, ariaLabel: "frame" });
  const told = element("span"), button = element("button", { textContent: "Play" });
  let frame = -1, timer = null;
  const load = (image) => {
    // one request at a time: moments that the pointer passes meanwhile are left out
    if (image.busy || image.frame === frame) return;
    image.busy = true;
    image.frame = frame;
    image.src = `/episodes/${frames.number}/${image.camera}/${frame}.jpg`;
  };
  const show = (index) => {
    if (index === frame) return;
    frame = index;
    slider.value = index;
    told.textContent = `frame ${index}, ${(index / frames.fps).toFixed(2)} s`;
    images.forEach(load);
  };
  images.forEach((image) => { image.onload = image.onerror = () => { image.busy = false; load(image); }; });
  const go = (index) => {
    show(index);
    charts.forEach(({ chart }) => chart.setCursor({ left: chart.valToPos(x[index], "x"), top: 1 }, false));
  };
  slider.oninput = () => go(Number(slider.value));
  button.onclick = () => {
    clearInterval(timer);
    timer = timer === null ? setInterval(() => go((frame + 1) % frames.count), 1000 / frames.fps) : null;
    button.textContent = timer === null ? "Play" : "Pause";
  };
  const figures = images.map((image) => element("figure", {}, image, element("figcaption", { textContent: image.alt })));
  box.append(element("div", { className: "controls" }, button, slider, told), element("div", { className: "pair" }, ...figures));
  onMoment = show;
  show(0);
}

// what changes in the directory

const parts = (page) => [page.querySelector("header"), ...page.querySelectorAll("section")];
const headings = (page) => [...page.querySelectorAll("h2")].map((each) => each.textContent).join("\n");
let served = parts(document).map((part) => part.outerHTML); // before anything is drawn
let version = null;
const live = element("div", { id: "live", role: "status" });

async function follow() {
  try {
    const answer = await fetch(location.href, { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
    live.className = answer.ok || answer.status === 304 ? "" : "lost";
    live.textContent = live.className ? `not answered: ${answer.status}` : `as of ${new Date().toLocaleTimeString()}`;
    if (answer.ok) {
      version = answer.headers.get("ETag");
      update(new DOMParser().parseFromString(await answer.text(), "text/html"));
    }
  } catch {
    live.className = "lost";
    live.textContent = "rlinf-vla view has ended";
  }
  setTimeout(follow, POLL_MS);
}

function update(page) {
  if (headings(page) !== headings(document)) return location.reload();
  const news = parts(page).map((part) => part.outerHTML), olds = parts(document);
  parts(page).forEach((part, place) => news[place] !== served[place] && olds[place].replaceWith(document.importNode(part, true)));
  served = news;
  if (charts.length && !charts[0].chart.root.isConnected) charts.length = 0;
  const last = data;
  data = read(page);
  if (JSON.stringify(data.curves) !== JSON.stringify(last.curves)) drawCurves(data);
  if (JSON.stringify(data.films) !== JSON.stringify(last.films)) drawFilms(data.films); // films that play go on
}

let data = read(document);
document.body.append(live);
if (data.curves) {
  drawCurves(data);
  drawFilms(data.films);
  drawFrames(data.frames, data.curves.length ? data.curves[0].x : []);
}
follow();
