// A stacked area chart of one device, without a library: layers from the bottom, a capacity line.
//
//   layers   [{name, shade, valueOf(device)}]     shade is a class of the style sheet
//   points   [{at, device}]                       device as history.js makes it
//
// The pointer or the arrow keys choose a moment. The chart then calls `onChosen(point or null)`.

import { draw, make, mark } from "./dom.js";
import { bytes, clock } from "./format.js";

const HEIGHT = 190;
const NARROW_HEIGHT = 150;
const NARROW = 480;
const LEFT = 58;
const RIGHT = 10;
const TOP = 16;
const BOTTOM = 20;
const LEAST_SPAN_S = 60;

export class Chart {
  constructor(label, onChosen) {
    this.onChosen = onChosen;
    this.points = [];
    this.layers = [];
    this.gapS = 6;
    this.lastS = 0;
    this.spanS = LEAST_SPAN_S;
    this.chosen = null; // the index of a point
    this.svg = draw("svg", { "aria-hidden": "true", focusable: "false" });
    this.element = make(
      "div",
      {
        class: "chart",
        tabindex: "0",
        role: "group",
        "aria-roledescription": "chart",
        "aria-label": `${label}. Left and right choose a moment; the table below has the values.`,
        onpointermove: (event) => this.choose(this.nearest(event.clientX)),
        onpointerdown: (event) => this.choose(this.nearest(event.clientX)),
        onpointerleave: () => this.choose(null),
        onblur: () => this.choose(null),
        onkeydown: (event) => this.key(event),
      },
      this.svg,
    );
    this.width = 0;
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.paint();
    }).observe(this.element);
  }

  /** Show these points on the time axis of a history: {firstS, lastS, intervalS}. */
  show(points, layers, { firstS, lastS, intervalS }) {
    // The chosen moment keeps its time, not its index.
    const at = this.chosen === null ? null : this.points[this.chosen]?.at;
    this.points = points;
    this.layers = layers;
    this.lastS = lastS;
    this.spanS = Math.max(LEAST_SPAN_S, lastS - firstS);
    this.gapS = intervalS * 3;
    const found = at === null ? -1 : points.findIndex((point) => point.at >= at - 0.01);
    this.chosen = found < 0 ? null : found;
    this.paint();
    if (at !== null) this.onChosen(this.chosen === null ? null : points[this.chosen]);
  }

  choose(index) {
    if (index === this.chosen) return;
    this.chosen = index;
    this.paintChosen();
    this.onChosen(index === null ? null : this.points[index]);
  }

  key(event) {
    const last = this.points.length - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15 };
    let index = null;
    if (event.key in steps && last >= 0) {
      index = Math.min(last, Math.max(0, (this.chosen ?? last) + steps[event.key]));
    } else if (event.key === "Home" && last >= 0) index = 0;
    else if (event.key === "End" && last >= 0) index = last;
    else if (event.key !== "Escape") return;
    event.preventDefault();
    this.choose(index);
  }

  nearest(clientX) {
    if (!this.points.length) return null;
    const x = clientX - this.svg.getBoundingClientRect().left;
    let best = 0;
    for (let index = 1; index < this.points.length; index += 1) {
      if (Math.abs(this.x(index) - x) < Math.abs(this.x(best) - x)) best = index;
    }
    return best;
  }

  x(index) {
    const part = 1 - (this.lastS - this.points[index].at) / this.spanS;
    return LEFT + part * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return TOP + (1 - value / this.top) * (this.height - TOP - BOTTOM);
  }

  paint() {
    this.svg.replaceChildren();
    if (!this.width || !this.points.length) return;
    this.height = this.width < NARROW ? NARROW_HEIGHT : HEIGHT;
    mark(this.svg, "viewBox", `0 0 ${this.width} ${this.height}`);
    mark(this.svg, "height", this.height);
    const sums = this.stack();
    const highest = Math.max(...this.points.map((point) => point.device.capacity), ...sums.at(-1));
    this.top = highest || 1;
    this.paintGrid();
    this.layers.forEach((layer, number) => {
      this.svg.append(
        draw("path", {
          class: `area ${layer.shade}`,
          d: this.area(sums[number], sums[number + 1]),
        }),
      );
    });
    const capacity = this.runs().map(
      (run) => "M" + run.map((i) => this.at(i, this.points[i].device.capacity)).join("L"),
    );
    this.svg.append(draw("path", { class: "capacity", d: capacity.join("") }));
    this.svg.append(
      draw(
        "text",
        { class: "capacity-label", x: this.width - RIGHT, y: TOP - 5 },
        `capacity ${bytes(this.points.at(-1).device.capacity)}`,
      ),
    );
    this.cursor = draw("line", { class: "cursor", y1: TOP, y2: this.height - BOTTOM });
    this.when = draw("text", { class: "when", x: LEFT, y: TOP - 5 });
    this.svg.append(this.cursor, this.when);
    this.paintChosen();
  }

  /** Return cumulative sums: row 0 is the bottom, row n the upper edge of layer n-1. */
  stack() {
    const rows = [this.points.map(() => 0)];
    for (const layer of this.layers) {
      const below = rows.at(-1);
      rows.push(this.points.map((point, index) => below[index] + layer.valueOf(point.device)));
    }
    return rows;
  }

  /** Return runs of indices of points. A new run begins where samples are missing: a gap. */
  runs() {
    const runs = [[0]];
    for (let index = 1; index < this.points.length; index += 1) {
      if (this.points[index].at - this.points[index - 1].at > this.gapS) runs.push([]);
      runs.at(-1).push(index);
    }
    return runs;
  }

  area(lower, upper) {
    return this.runs()
      .map((run) => {
        const there = run.map((index) => this.at(index, upper[index]));
        const back = run.map((index) => this.at(index, lower[index])).reverse();
        return `M${[...there, ...back].join("L")}Z`;
      })
      .join("");
  }

  at(index, value) {
    return `${this.x(index).toFixed(1)},${this.y(value).toFixed(1)}`;
  }

  paintGrid() {
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const y = this.y(this.top * part);
      this.svg.append(
        draw("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }),
        draw(
          "text",
          { class: "tick end", x: LEFT - 6, y: y + 4 },
          part ? bytes(this.top * part) : "0",
        ),
      );
    }
    const count = this.width < NARROW ? 2 : 4;
    for (let number = 0; number <= count; number += 1) {
      const x = LEFT + (number / count) * (this.width - LEFT - RIGHT);
      const side = number === count ? "end" : number === 0 ? "start" : "middle";
      const text = clock(this.lastS - this.spanS * (1 - number / count));
      this.svg.append(draw("text", { class: `tick ${side}`, x, y: this.height - 5 }, text));
    }
  }

  paintChosen() {
    if (!this.cursor) return;
    const point = this.chosen === null ? null : this.points[this.chosen];
    this.cursor.classList.toggle("shown", point !== null);
    this.when.textContent = "";
    if (point === null) return;
    const x = this.x(this.chosen);
    mark(this.cursor, "x1", x);
    mark(this.cursor, "x2", x);
    this.when.textContent = clock(point.at);
  }
}
