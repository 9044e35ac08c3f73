// One card for each device: its statistics, the chart, and the values at the chosen moment.

import { Chart } from "./chart.js";
import { byId, head, make, reconcile, row, setText } from "./dom.js";
import { bytes, clock } from "./format.js";
import { heldBy, keyOf } from "./history.js";

const SHADES = 8;
const TABLE_EVERY_S = 30;
const USES = [
  { key: "inUse", name: "In use", shade: "use-in", about: "Blocks that requests hold" },
  {
    key: "cached",
    name: "Cached",
    shade: "use-cached",
    about: "Blocks kept for their prefixes; evicted when memory is needed",
  },
  { key: "parked", name: "Parked", shade: "use-parked", about: "Free pages that are still mapped" },
  {
    key: "slack",
    name: "Slack",
    shade: "use-slack",
    about: "Free blocks in pages that are in use, and pages granted and not mapped yet",
  },
];
// Only the bytes that are part of the capacity, because the chart shows the capacity.
const BESIDE = [
  { name: "Reserved", shade: "reserved", valueOf: (device) => device.reservedOfCapacity },
  { name: "Others", shade: "others", valueOf: (device) => device.othersOfCapacity },
];
const FACTS = {
  Capacity: "capacity_bytes",
  Held: "granted_bytes",
  Guaranteed: "guaranteed_bytes",
  Reserved: "reserved_bytes",
  "Asked for": "asked_bytes",
  Free: "free_bytes",
};
const RESERVED_ABOUT = "Weights, activations and the like of models that are awake";

/** The section of devices; `divide` is "use" or "model". */
export class Devices {
  constructor() {
    this.cards = new Map();
    this.divide = "use";
    for (const input of document.getElementsByName("divide")) {
      input.addEventListener("change", () => {
        this.divide = input.value;
        if (this.last) this.update(...this.last);
      });
    }
  }

  /** `ledgers` are the devices of /memory, `history` is a History. */
  update(ledgers, history) {
    this.last = [ledgers, history];
    const now = new Map(ledgers.map((ledger) => [keyOf(ledger), ledger]));
    // Devices that no instance uses now come last, until their samples expire.
    const keys = [...now.keys()].sort();
    keys.push(...history.devices.filter((key) => !now.has(key)));
    const items = keys.map((key) => [key, { ledger: now.get(key), history, divide: this.divide }]);
    reconcile(byId("devices"), this.cards, items, (key) => new Card(key));
    byId("no-devices").hidden = keys.length > 0;
  }
}

class Card {
  constructor(key) {
    this.key = key;
    this.shades = new Map();
    this.points = [];
    this.chosen = null;
    const [device, group, node] = key.split("\n");
    const name = (device === "host" ? "Host memory" : device) + (node ? ` of ${node}` : "");
    this.chart = new Chart(`Memory of ${name} over time`, (point) => {
      this.chosen = point;
      this.paintLegend();
    });
    this.facts = make("dl", { class: "facts" });
    this.problem = make("p", { class: "problem" });
    this.gone = make("p", { class: "gone dim" });
    this.legend = make("table", { class: "legend" });
    this.past = make("div", { class: "past" });
    const details = make(
      "details",
      {},
      make("summary", {}, "The last ten minutes as a table"),
      this.past,
    );
    details.addEventListener("toggle", () => this.paintPast(details.open));
    this.element = make(
      "article",
      { class: "card", "aria-label": name },
      make(
        "div",
        { class: "card-head" },
        make("h3", {}, name, " ", make("span", { class: "dim" }, group ? `group ${group}` : "")),
        this.facts,
      ),
      this.problem,
      this.gone,
      this.chart.element,
      this.legend,
      details,
    );
  }

  update({ ledger, history, divide }) {
    this.divide = divide;
    this.points = history.samples
      .filter((sample) => sample.devices.has(this.key))
      .map((sample) => ({ at: sample.at, device: sample.devices.get(this.key) }));
    this.paintFacts(ledger);
    this.layers = divide === "use" ? this.layersByUse() : this.layersByModel();
    const isThere = (layer) => this.points.some((point) => layer.valueOf(point.device) > 0);
    this.layers.push(...BESIDE.filter(isThere));
    // All charts have the same time axis, even for a device that no instance uses now.
    this.chart.show(this.points, this.layers, history);
    // The values of /memory, as in the models' rows. They are newer than the last sample.
    this.now = ledger?.status === "readable" ? nowOf(ledger) : null;
    this.paintLegend();
  }

  layersByUse() {
    return USES.map((use) => ({ ...use, valueOf: (device) => sum(device, use.key) }));
  }

  layersByModel() {
    return this.names().map((name) => ({
      name,
      shade: this.shadeOf(name),
      valueOf: (device) => device.instances.get(name)?.granted ?? 0,
    }));
  }

  names() {
    const names = new Set();
    for (const point of this.points)
      for (const name of point.device.instances.keys()) names.add(name);
    return [...names].sort();
  }

  /** Return the instance's colour, which does not change until the page is loaded again. */
  shadeOf(name) {
    if (!this.shades.has(name)) this.shades.set(name, this.shades.size % SHADES);
    return `model-${this.shades.get(name)}`;
  }

  paintFacts(ledger) {
    setText(this.problem, ledger ? ledger.problem : "");
    setText(this.gone, ledger ? "" : "No instance has it open any more.");
    const facts = ledger?.status === "readable" ? Object.entries(FACTS) : [];
    this.facts.replaceChildren(
      ...facts.map(([name, key]) => {
        const urgent = name === "Asked for" && ledger[key] > 0 ? "urgent" : null;
        const value = make("dd", {}, bytes(ledger[key]));
        return make("div", { class: urgent }, make("dt", {}, name), value);
      }),
    );
  }

  paintLegend() {
    const last = this.points.at(-1);
    const isNow = !this.chosen && this.now !== null;
    const point = this.chosen ?? (isNow ? { device: this.now } : last);
    if (!point) return this.legend.replaceChildren();
    const byUse = this.divide === "use";
    const titles = [
      isNow ? "Now" : `At ${clock(point.at)}`,
      ...USES.map((use) =>
        make("th", { scope: "col", title: use.about }, byUse ? swatch(use.shade) : "", use.name),
      ),
      "Held",
      make("th", { scope: "col", title: RESERVED_ABOUT }, swatch("reserved"), "Reserved"),
    ];
    const { device } = point;
    const rows = [...device.instances]
      .sort(([a], [b]) => (a < b ? -1 : 1))
      .map(([name, held]) => {
        const heading = [byUse ? "" : swatch(this.shadeOf(name)), held.model ?? name];
        const values = [...USES.map((use) => held[use.key]), held.granted, held.reserved];
        return row(heading, values.map(bytes), `instance ${name}`);
      });
    const addTotal = (heading, value) => {
      const total = row(heading, ["", "", "", "", bytes(value), ""]);
      total.className = "total";
      rows.push(total);
    };
    if (device.others > 0) addTotal([swatch("others"), "Others on the device"], device.others);
    addTotal(["Free"], device.free);
    return this.legend.replaceChildren(head(titles), make("tbody", {}, ...rows));
  }

  /** Fill the table when it is opened. It is not updated while it is open. */
  paintPast(isOpen) {
    this.past.replaceChildren();
    if (!isOpen) return;
    const rows = [];
    let lastS = Infinity;
    for (const { at, device } of [...this.points].reverse()) {
      if (lastS - at < TABLE_EVERY_S) continue;
      lastS = at;
      const layers = this.layers.map((layer) => layer.valueOf(device));
      rows.push(row([clock(at)], [...layers, device.free, device.capacity].map(bytes)));
    }
    const names = this.layers.map(
      (layer) => this.points.at(-1)?.device.instances.get(layer.name)?.model ?? layer.name,
    );
    this.past.append(
      make(
        "table",
        {},
        make(
          "caption",
          {},
          `Every ${TABLE_EVERY_S} s, newest first; open it again for later values`,
        ),
        head(["Time", ...names, "Free", "Capacity"]),
        make("tbody", {}, ...rows),
      ),
    );
  }
}

function nowOf(ledger) {
  const instances = new Map();
  for (const member of ledger.members) {
    const held = heldBy({ ...member, granted_bytes: member.mapped_bytes });
    const other = instances.get(member.name); // a dead instance, and its successor
    if (other) for (const { key } of USES) held[key] += other[key];
    if (other) held.granted += other.granted;
    instances.set(member.name, held);
  }
  return { others: ledger.others_bytes, free: ledger.free_bytes, instances };
}

function swatch(shade) {
  return make("span", { class: `swatch ${shade}`, "aria-hidden": "true" });
}

function sum(device, key) {
  let total = 0;
  for (const instance of device.instances.values()) total += instance[key];
  return total;
}
