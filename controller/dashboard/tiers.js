// The blocks in a model's tiers: one line for each tier, nearest first.

import { head, make, reconcile, row, setCells, setText } from "./dom.js";
import { bytes, number } from "./format.js";

const HEADINGS = ["Tier", "Held", "Hits", "Misses", "Errors"];
const WHY = {
  stuck: "It hangs, and is not asked until it answers.",
  silent: "It does not report: these values are older.",
};

export class Tiers {
  constructor(model) {
    this.rows = new Map();
    this.body = make("tbody");
    this.element = make(
      "table",
      { class: "tiers", "aria-label": `Tiers of ${model}` },
      head(HEADINGS),
      this.body,
    );
  }

  /** `tiers` is the field of a row of /memory. Without tiers the table is hidden. */
  update(tiers) {
    this.element.hidden = tiers.length === 0;
    const items = tiers.map((tier) => [tier.tier, tier]);
    reconcile(this.body, this.rows, items, (name) => new Line(name));
  }
}

class Line {
  constructor(name) {
    this.state = make("span", { class: "problem" });
    this.element = row([`${name} `, this.state], HEADINGS.slice(1));
    this.cells = [...this.element.children].slice(1);
  }

  update(tier) {
    const isWell = tier.state === "ok";
    setText(this.state, isWell ? "" : tier.state);
    this.state.title = WHY[tier.state] ?? "";
    const of = tier.limit_bytes === null ? "" : ` of ${bytes(tier.limit_bytes)}`;
    const texts = [
      `${bytes(tier.used_bytes)}${of}`,
      number(tier.hits),
      number(tier.misses),
      number(tier.errors),
    ];
    setCells(this.cells, texts, tier.errors);
  }
}
