// Draws a step from the JSON in #step (explanation.py: explain), and tells what one points at: a rank, an action of it,
// a collective or transfer within the action, a parameter. Ranks of one pp coordinate have one lane's cells.
"use strict";
const step = JSON.parse(document.getElementById("step").textContent);
const $ = id => document.getElementById(id), details = $("details"), svg = $("lanes");
const HEIGHT = 30, LEAST = 18, AROUND = 136; // of a lane, of the shortest action, of what is around the pipeline, pixels
const COLOURS = {F: "#4a86c5", B: "#4f9d69", BW: "#3f8f8f", W: "#d9a03f", step: "#8b93a1"};
const AXES = ["#c2407a", "#8e5bb5", "#d9662b", "#2a6fb0", "#3b8f57", "#b8860b", "#5b6675", "#d22"];
const axes = Object.keys(step.groups);
const colourOf = axis => AXES[axes.indexOf(axis) % AXES.length];

function add(parent, name, attributes = {}, text) {
  const space = parent.namespaceURI.endsWith("svg") || name === "svg" ? "http://www.w3.org/2000/svg" : parent.namespaceURI;
  const child = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  if (text !== undefined) child.textContent = text;
  return parent.appendChild(child);
}

function button(parent, text, act, attributes = {}) {
  const made = add(parent, "button", {type: "button", ...attributes}, text);
  made.addEventListener("click", act);
  return made;
}

function table(parent, rows) {
  const body = add(add(parent, "table"), "tbody");
  for (const row of rows) {
    const line = add(body, "tr");
    for (const cell of row) add(line, "td", {}, cell);
  }
}

function size(bytes) {
  const power = bytes < 1024 ? 0 : Math.min(3, Math.floor(Math.log2(bytes) / 10));
  return `${+(bytes / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

const words = kind => kind.replaceAll("_", "-");
const laneOf = rank => step.lanes[step.ranks[rank].pp];
const groupOf = (axis, rank) => step.groups[axis].find(group => group.includes(rank)) || [rank];
const span = box => "[" + box[0].map((start, dim) => `${start}:${start + box[1][dim]}`).join(", ") + "]";
// The rank at another stage of the same pipeline.
const across = (rank, pp) => rank + (pp - step.ranks[rank].pp) * step.ranks.length / step.sizes.pp;

// ---------------------------------------------------------------- details

function tell(title, ranks) {
  details.replaceChildren();
  add(details, "h2", {}, title);
  for (const marked of document.querySelectorAll("button[data-rank]")) {
    marked.classList.toggle("met", ranks.includes(+marked.dataset.rank));
  }
}

function tellRank(rank) {
  tell(`Rank ${rank}`, [rank]);
  const at = step.ranks[rank];
  add(details, "p", {}, Object.keys(at).filter(axis => step.sizes[axis] > 1).map(axis => `${axis} ${at[axis]}`).join(" · "));
  table(details, step.stages[at.pp].map((text, chunk) => [`chunk ${chunk}`, text]));
  if (axes.length) add(details, "h3", {}, "Meets");
  table(details, axes.map(axis => [axis, `ranks ${groupOf(axis, rank).join(" ")}`]));
  const totals = {};
  for (const cell of laneOf(rank)) {
    for (const [kind, axis, bytes] of step.contents[cell.content]) {
      const total = totals[`${words(kind)} · ${axis}`] ||= [0, 0];
      total[0] += 1, total[1] += bytes;
    }
  }
  add(details, "h3", {}, "In a step");
  table(details, Object.entries(totals).map(([name, [calls, bytes]]) => [name, `${calls} ×`, size(bytes)]));
  const held = step.parameters.filter(one => one.holds.some(hold => hold.ranks.includes(rank)));
  add(details, "h3", {}, `Holds of ${held.length} parameters`);
  for (const one of held) button(add(details, "div"), one.name, () => tellParameter(one));
}

function tellCell(rank, cell) {
  tell(`Rank ${rank}: ${cell.kind === "step" ? "around the pipeline" : cell.name}`, [rank]);
  if (cell.line !== null) code(step.lines[cell.line]);
  const events = step.contents[cell.content];
  if (!events.length) add(details, "p", {}, "Nothing leaves the rank.");
  const list = add(details, "ol");
  for (const event of events) {
    const [kind, axis, bytes] = event;
    const made = button(add(list, "li"), `${words(kind)} · ${axis} · ${size(bytes)}`, () => tellEvent(rank, cell, event), {class: "event"});
    made.style.borderColor = colourOf(axis);
  }
}

function tellEvent(rank, cell, [kind, axis, bytes, lines, forward]) {
  const ranks = cell.peer === undefined ? groupOf(axis, rank) : [rank, across(rank, cell.peer)];
  tell(`${words(kind)} of ${size(bytes)} over ${axis}`, ranks);
  add(details, "p", {}, `ranks ${ranks.join(" ")}; in `);
  button(details.lastChild, cell.name, () => tellCell(rank, cell));
  // Who says the word; the word itself is parallel/comm.py's, and backward is started by the engine.
  const says = [...lines, ...forward].find(line => !/parallel.comm|pipeline.engine/.test(step.lines[line].at)) ?? lines[0];
  add(details, "h3", {}, "The line that does it");
  code(step.lines[says]);
  for (const [title, found] of [["Of the forward", forward], ["Within it, and around it", lines]]) {
    if (found.some(line => line !== says)) add(details, "h3", {}, title);
    for (const line of found) if (line !== says) code(step.lines[line]);
  }
}

function code({at, function: name, code, first}) {
  add(details, "p", {class: "at"}, `${at}, ${name}`);
  const block = add(details, "pre");
  code.forEach((text, index) => add(block, first + index === +at.split(":").pop() ? "mark" : "span", {}, text + "\n"));
}

function tellParameter(one) {
  tell(one.name, one.holds.flatMap(hold => hold.ranks));
  const cut = one.cut.length ? `cut: ${one.cut.join(", ")}` : "not cut";
  add(details, "p", {}, `[${one.shape.join(", ")}], ${cut}; optimizer ${one.optimizer}, weight decay ${one.decay}`);
  drawShards(one);
  for (const hold of one.holds) {
    add(details, "h3", {}, `Ranks ${hold.ranks.join(" ")}`);
    const rows = Object.entries(hold.parts).map(([name, boxes]) => [name, boxes.map(span).join(" ")]);
    if (hold.bucket) rows.push(["updates", hold.updates.map(span).join(" ") || "nothing of it"],
      [`gradient ${hold.gradient}`, hold.whole ? "whole" : "what it updates"], ["bucket", hold.bucket]);
    table(details, rows);
  }
}

// Who updates what: rows are the first dim, columns the second; ranks with equal parts have one colour.
function drawShards(one) {
  const [rows, columns] = one.shape.length > 1 ? one.shape : [1, one.shape[0]];
  const picture = add(details, "svg", {viewBox: "0 0 100 60", preserveAspectRatio: "none", class: "shards"});
  one.holds.forEach((hold, index) => {
    for (const [offset, shape] of hold.updates || Object.values(hold.parts)[0]) {
      const [top, left, high, wide] = one.shape.length > 1 ? [offset[0], offset[1], shape[0], shape[1]] : [0, offset[0], 1, shape[0]];
      const box = add(picture, "rect", {x: left / columns * 100, y: top / rows * 60, width: wide / columns * 100,
        height: high / rows * 60, fill: `hsl(${index * 360 / one.holds.length} 55% 55%)`});
      add(box, "title", {}, `ranks ${hold.ranks.join(" ")}: ${span([offset, shape])}`);
    }
  });
}

// ---------------------------------------------------------------- the page

function drawMesh() {
  const perStage = step.ranks.length / step.sizes.pp;
  for (let pp = 0; pp < step.sizes.pp; pp++) {
    const row = add($("mesh"), "tr");
    add(row, "th", {scope: "row"}, `pp ${pp}: ${step.stages[pp].join("; ")}`);
    for (let first = pp * perStage; first < (pp + 1) * perStage; first += step.sizes.tp) {
      const at = step.ranks[first], cell = add(row, "td");
      const shown = ["dp", "ep", "cp"].filter(axis => step.sizes[axis] > 1);
      if (shown.length) add(cell, "small", {}, shown.map(axis => `${axis} ${at[axis]}`).join(" · "));
      for (let rank = first; rank < first + step.sizes.tp; rank++) {
        button(cell, rank, () => tellRank(rank), {"data-rank": rank, title: `tp ${step.ranks[rank].tp}`});
      }
    }
  }
}

const cells = step.ranks.map(() => []); // of each rank, its cells' pictures
let chosen = [0, 0]; // (rank, cell) at which arrow keys begin

function choose(rank, index) {
  cells[chosen[0]][chosen[1]].classList.remove("chosen");
  chosen = [rank, index];
  const cell = cells[rank][index];
  cell.classList.add("chosen");
  cell.scrollIntoView({block: "nearest", inline: "nearest"});
  tellCell(rank, laneOf(rank)[index]);
  for (const arrow of document.querySelectorAll(".arrows g")) {
    const {ranks, message} = arrow.dataset, shown = laneOf(rank)[index].transfers || [];
    arrow.classList.toggle("met", ranks.split(" ").includes(String(rank)) && shown.some(one => nameOf(one.for) === message));
  }
}

const nameOf = message => Object.values(message).join(" ");

function drawLanes() {
  const all = step.lanes.flat(), start = all.reduce((least, cell) => Math.min(least, cell.start), 0);
  const end = all.reduce((most, cell) => Math.max(most, cell.end), 0);
  const actions = all.filter(cell => cell.microbatch !== undefined);
  const shortest = actions.reduce((least, cell) => Math.min(least, cell.end - cell.start), 1);
  const done = actions.reduce((most, cell) => Math.max(most, cell.end), 0), unit = Math.max(700 / done, LEAST / shortest);
  const x = time => Math.min(Math.max(time, 0), done) * unit + (Math.min(time, 0) - start + Math.max(time - done, 0)) * AROUND;
  svg.setAttribute("width", x(end) + 2), svg.setAttribute("height", step.ranks.length * HEIGHT);
  const arrows = document.createElementNS("http://www.w3.org/2000/svg", "g");
  arrows.setAttribute("class", "arrows");
  step.ranks.forEach((at, rank) => {
    const y = rank * HEIGHT;
    button($("names"), `rank ${rank}`, () => tellRank(rank), {"data-rank": rank});
    laneOf(rank).forEach((cell, index) => {
      const group = add(svg, "g", {"data-kind": cell.kind, class: "cell"});
      cells[rank].push(group);
      group.addEventListener("click", () => choose(rank, index));
      add(group, "title", {}, `rank ${rank}: ${cell.name}`);
      if (cell.transfers) drawExchange(group, arrows, rank, cell, x, y);
      else drawAction(group, cell, x(cell.start), x(cell.end) - x(cell.start), y);
    });
  });
  svg.append(arrows); // in front
}

// An action with its microbatch, over a stripe for each axis that it talks along.
function drawAction(group, cell, left, width, y) {
  add(group, "rect", {x: left, y: y + 3, width: width - 1, height: HEIGHT - 8, fill: COLOURS[cell.kind], rx: 2});
  const called = /^(?:\w+ = )?(?:cache\()?(?:self\.)?([\w.]+)/.exec(cell.name)[1];
  add(group, "text", {x: left + width / 2, y: y + 16, "text-anchor": "middle"}, cell.microbatch ?? called);
  const met = [...new Set(step.contents[cell.content].map(event => event[1]))];
  met.forEach((axis, index) => add(group, "rect", {x: left + index * (width - 1) / met.length, y: y + HEIGHT - 9,
    width: (width - 1) / met.length, height: 5, fill: colourOf(axis)}));
}

function drawExchange(group, arrows, rank, cell, x, y) {
  const at = x(cell.start);
  add(group, "path", {d: `M${at - 4} ${y + 1}h8l-4 6z`});
  for (const {for: message, from, to} of cell.transfers.filter(one => one.from === step.ranks[rank].pp)) {
    const receiver = across(rank, to);
    const use = laneOf(receiver).find(other => other.kind[0] === message.kind && other.microbatch === message.microbatch
      && other.stage === message.stage);
    const bytes = step.contents[cell.content].find(event => event[0] === "send")[2];
    const arrow = add(arrows, "g", {"data-ranks": `${rank} ${receiver}`, "data-message": nameOf(message)}), y2 = (receiver + 0.5) * HEIGHT;
    add(arrow, "line", {x1: at, y1: y + HEIGHT / 2, x2: x(use.start), y2, stroke: COLOURS[message.kind]});
    add(arrow, "text", {x: (at + x(use.start)) / 2, y: (y + y2) / 2, "text-anchor": "middle"}, size(bytes));
  }
}

function drawParameters() {
  for (const one of step.parameters) {
    const row = add($("parameters"), "tr"), dtypes = new Set(one.holds.map(hold => Object.keys(hold.parts)[0].split(" ")[1]));
    button(add(row, "td"), one.name, () => tellParameter(one));
    for (const text of [`[${one.shape.join(", ")}]`, [...dtypes].join(" "), one.cut.join(", ") || "not cut"]) add(row, "td", {}, text);
  }
  $("filter").addEventListener("input", () => {
    for (const row of $("parameters").rows) row.hidden = !row.textContent.includes($("filter").value);
  });
}

svg.addEventListener("keydown", event => {
  const [rank, index] = chosen, last = cells.length - 1;
  const to = {ArrowLeft: [rank, index - 1], ArrowRight: [rank, index + 1], ArrowUp: [rank - 1, index],
    ArrowDown: [rank + 1, index], Home: [rank, 0], End: [rank, Infinity], Enter: [rank, index]}[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const next = Math.min(Math.max(to[0], 0), last);
  choose(next, Math.min(Math.max(to[1], 0), cells[next].length - 1));
});

for (const axis of axes) {
  const item = add($("legend"), "span");
  add(item, "i").style.background = colourOf(axis);
  item.append(axis);
}
drawMesh();
drawLanes();
drawParameters();
tellRank(0);
