// Draws every figure that holds lines, and again when a control moves: one scale of steps, one of numbers.
//
// A figure's numbers are JSON inside it: {logarithmic, lines: [{name, colour, dash, points: [[step, mean, low, high]],
// gaps: [step]}], marks: [[step, text]]}. A line goes through means of stretches of steps, the pale band around it holds
// every number of them: no spike is hidden. Red marks are steps whose number was not finite, dotted verticals starts.
"use strict";
const WIDTH = 560, HEIGHT = 220, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 26; // margins around the lines, pixels
const MOST_NAMES = 12; // in what is told of a place
const controls = document.forms.controls;

function add(parent, name, attributes, text) {
  const child = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  if (text !== undefined) child.textContent = text;
  return parent.appendChild(child);
}

const least = numbers => numbers.reduce((one, other) => Math.min(one, other));

// Numbers to pixels; a range of one number lies in the middle.
function scale(low, high, start, end, logarithmic) {
  const of = logarithmic ? Math.log : Number;
  return value => high === low ? (start + end) / 2 : start + (of(value) - of(low)) / (of(high) - of(low)) * (end - start);
}

// Three to seven multiples of 1, 2 or 5 · 10ⁿ that reach over the range.
function roundNumbers(low, high) {
  if (high === low) return [low];
  const power = 10 ** Math.floor(Math.log10((high - low) / 4));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= (high - low) / 4);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, index) => (first + index) * step);
}

// Powers of ten that reach over the range.
function powers(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const stride = Math.max(1, Math.floor((last - first) / 6)), found = [];
  for (let power = first; power < last + stride; power += stride) found.push(10 ** power);
  return found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e3 && size < 1e15) {
    const thousands = Math.floor(Math.log10(size * 1.0000001) / 3);
    return String(+(value / 1e3 ** thousands).toPrecision(3)) + " KMGT"[thousands];
  }
  return value === 0 || (size >= 1e-3 && size < 1e3) ? String(+value.toPrecision(3)) : value.toExponential(0).replace("+", "");
}

// The points with an exponential moving average in the mean's place, corrected for its start.
function smooth(points, weight) {
  let sum = 0, total = 0;
  return points.map(([step, mean, low, high]) => {
    sum = weight * sum + (1 - weight) * mean;
    total = weight * total + (1 - weight);
    return [step, sum / total, low, high];
  });
}

function draw(figure) {
  const {lines, marks} = figure.data, svg = figure.svg;
  const logarithmic = figure.log.checked, byPowers = controls.steps.checked;
  const shown = lines.map(line => ({...line, points: smooth(line.points, +controls.smoothing.value)
    .filter(point => !logarithmic || point[1] > 0)}));
  figure.shown = shown;
  svg.replaceChildren();
  const points = shown.flatMap(line => line.points);
  if (!points.length) return;
  const steps = [...points.map(point => point[0]), ...lines.flatMap(line => line.gaps)];
  const first = least(steps), last = -least(steps.map(step => -step));
  let low = least(points.map(point => logarithmic && point[2] <= 0 ? point[1] : point[2]));
  let high = -least(points.map(point => -point[3]));
  const ticks = logarithmic ? powers(low, high) : roundNumbers(low, high);
  low = Math.min(low, ticks[0]), high = Math.max(high, ticks[ticks.length - 1]);
  const x = figure.x = scale(first, last, LEFT, WIDTH - RIGHT, byPowers);
  const y = figure.y = scale(low, high, HEIGHT - BOTTOM, TOP, logarithmic);
  const at = (step, value) => x(step).toFixed(1) + "," + y(Math.max(value, low)).toFixed(1);
  for (const tick of ticks) {
    add(svg, "line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick)});
    add(svg, "text", {x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end"}, short(tick));
  }
  const stepTicks = (byPowers ? powers(first, last) : roundNumbers(first, last))
    .filter(tick => first <= tick && tick <= last && Number.isInteger(tick));
  for (const tick of stepTicks.length ? stepTicks : [first]) {
    add(svg, "text", {x: x(tick), y: HEIGHT - 8, "text-anchor": "middle"}, short(tick));
  }
  for (const [step, text] of marks.filter(([step]) => first <= step && step <= last)) {
    const mark = add(svg, "line", {class: "start", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM});
    add(mark, "title", {}, text);
  }
  for (const line of [...shown].reverse()) {
    const upper = line.points.map(([step, , , top]) => at(step, top));
    const lower = line.points.map(([step, , bottom]) => at(step, bottom)).reverse();
    add(svg, "polygon", {points: [...upper, ...lower].join(" "), fill: line.colour, opacity: 0.18});
    add(svg, "polyline", {points: line.points.map(([step, mean]) => at(step, mean)).join(" "), fill: "none",
      stroke: line.colour, "stroke-width": 1.6, "stroke-dasharray": line.dash});
    if (line.points.length === 1) { // a line of one point shows nothing
      add(svg, "circle", {cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 3, fill: line.colour});
    }
    for (const step of line.gaps) {
      const gap = add(svg, "rect", {class: "none", x: x(step) - 1, y: HEIGHT - BOTTOM - 8, width: 2, height: 8});
      add(gap, "title", {}, `step ${step}: ${line.name} is not finite`);
    }
  }
  figure.cursor = add(svg, "g", {});
  figure.steps = [...new Set(points.map(point => point[0]))].sort((one, other) => one - other);
  tell(figure, last);
  figure.cursor.replaceChildren(); // the end is told, and pointed at only when asked for
}

// Say the numbers of every line at the place nearest to a step, and point at them.
function tell(figure, wanted) {
  const near = (list, of) => list.reduce((best, one) => Math.abs(of(one) - wanted) < Math.abs(of(best) - wanted) ? one : best);
  const step = figure.at = near(figure.steps, one => one);
  const lines = figure.shown.filter(line => line.points.length);
  const count = Math.min(MOST_NAMES, lines.length);
  const some = lines.filter((_, index) => Math.floor(index * count / lines.length) !== Math.floor((index - 1) * count / lines.length));
  figure.cursor.replaceChildren();
  add(figure.cursor, "line", {class: "cursor", x1: figure.x(step), x2: figure.x(step), y1: TOP, y2: HEIGHT - BOTTOM});
  const told = some.map(line => {
    const [place, mean, low, high] = near(line.points, point => point[0]);
    add(figure.cursor, "circle", {cx: figure.x(place), cy: figure.y(mean), r: 3, fill: line.colour});
    const range = low < high ? ` (${+low.toPrecision(4)} … ${+high.toPrecision(4)})` : "";
    return `${line.name} ${+mean.toPrecision(6)}${range}`;
  });
  figure.told.textContent = [`step ${step}`, ...told].join(" · ");
}

function liven(figure) {
  figure.data = JSON.parse(figure.querySelector("script").textContent);
  figure.svg = figure.querySelector("svg"), figure.told = figure.querySelector("output");
  figure.log = figure.querySelector("input");
  figure.log.checked = figure.data.logarithmic;
  figure.log.disabled = !figure.data.lines.some(line => line.points.some(point => point[1] > 0));
  figure.log.addEventListener("change", () => draw(figure));
  figure.svg.addEventListener("pointermove", event => {
    const box = figure.svg.getBoundingClientRect(), place = (event.clientX - box.left) / box.width * WIDTH;
    tell(figure, figure.steps.reduce((best, step) =>
      Math.abs(figure.x(step) - place) < Math.abs(figure.x(best) - place) ? step : best));
  });
  figure.svg.addEventListener("keydown", event => {
    const index = figure.steps.indexOf(figure.at), end = figure.steps.length - 1;
    const to = {ArrowLeft: Math.max(index - 1, 0), ArrowRight: Math.min(index + 1, end), Home: 0, End: end}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    tell(figure, figure.steps[to]);
  });
  draw(figure);
}

const figures = [...document.querySelectorAll("figure.lines")];
figures.forEach(liven);
controls.addEventListener("input", () => {
  controls.told.value = controls.smoothing.value;
  figures.forEach(draw);
});
