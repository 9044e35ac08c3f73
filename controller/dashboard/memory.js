// A model's memory: its usage, and two sliders. Releasing a slider sends its value as a request.
// The outcome is shown as text below the sliders, and the model's tiers below that.

import { Answer } from "./answer.js";
import { ApiError, call, pathOf } from "./api.js";
import { make, mark, setText } from "./dom.js";
import { bytes, exactBytes } from "./format.js";
import { Tiers } from "./tiers.js";

const WAIT = "2s";
const STEPS = 100;
const PARTS = [
  ["in_use_bytes", "use-in"],
  ["cached_bytes", "use-cached"],
  ["parked_bytes", "use-parked"],
  ["slack_bytes", "use-slack"],
];

export class Memory {
  /** `report(error or null)` is called after each request; the error is one that needs a key. */
  constructor(model, report) {
    this.model = model;
    this.report = report;
    this.row = null;
    this.waiting = null; // values to send after the response to the last request
    this.isSending = false;
    this.promised = null; // {words, revision} of a request that is not applied yet
    this.parts = PARTS.map(([, shade]) => make("span", { class: shade }));
    this.bar = make("div", { class: "bar", "aria-hidden": "true" }, ...this.parts);
    this.min = new Setting("min", "Min", model, (request) => this.send(request));
    this.limit = new Setting("limit", "Limit", model, (request) => this.send(request));
    this.facts = make("p", { class: "held dim" });
    this.tiers = new Tiers(model);
    this.answer = new Answer();
    this.controls = make(
      "div",
      { class: "settings" },
      this.bar,
      ...this.min.elements,
      ...this.limit.elements,
    );
    this.none = make("p", { class: "dim" });
    this.element = make(
      "div",
      { class: "memory" },
      this.none,
      this.controls,
      this.facts,
      this.answer.element,
      this.tiers.element,
    );
  }

  /**
   * `row` is the instance's row of /memory: null if the instance does not run, undefined if none
   * is configured. It was requested at `askedAt` (performance.now()).
   */
  update(row, instance, askedAt) {
    this.row = row ?? null;
    this.controls.hidden = this.facts.hidden = !row;
    this.none.hidden = Boolean(row);
    this.tiers.update(row?.tiers ?? []);
    this.answer.look(askedAt, { revision: row?.revision, asleep: row?.asleep });
    if (!row) {
      setText(
        this.none,
        row === undefined ? "No instance is configured." : `Its instance ${instance} is not there.`,
      );
      return;
    }
    const capacity = row.capacity_bytes ?? 0;
    PARTS.forEach(([key], number) => {
      this.parts[number].style.width = capacity ? `${(100 * (row[key] ?? 0)) / capacity}%` : "0";
    });
    this.min.update(row.min_bytes ?? 0, capacity, row.page_bytes ?? 1);
    const limit = row.requested_limit_bytes ?? row.limit_bytes ?? capacity;
    this.limit.update(limit, capacity, row.page_bytes ?? 1);
    const effective = row.effective_limit_bytes; // 0 during sleep
    const isLimited = !row.asleep && effective < capacity;
    const most = isLimited ? `its limit of ${bytes(effective)}` : bytes(capacity);
    const held =
      `${bytes(row.mapped_bytes)}${row.asleep ? "" : ` of ${most}`}: ` +
      `${bytes(row.in_use_bytes)} in use, ${bytes(row.cached_bytes)} cached, ` +
      `${bytes(row.parked_bytes)} parked, ${bytes(row.slack_bytes)} slack`;
    const whatFor = row.asleep ? "to be given back" : "over its limit";
    const over = row.over_bytes ? `; ${bytes(row.over_bytes)} ${whatFor}` : "";
    const when = row.asleep ? "reserved when it wakes" : "reserved besides";
    const reserved = row.reserved_bytes ? `; ${bytes(row.reserved_bytes)} ${when}` : "";
    const asks = row.ask_bytes ? `; it waits for ${bytes(row.ask_bytes)}` : "";
    const sleep = row.asleep ? ". Asleep: its limit counts when it wakes" : "";
    setText(this.facts, held + over + reserved + asks + sleep);
    if (this.promised && askedAt >= this.answer.shownAt) this.follow(row, this.promised);
  }

  /** Show the outcome of a request that was not applied when its response came. */
  follow(row, { words, revision }) {
    if (row.revision !== revision) {
      this.answer.show("no", "Overtaken: somebody else has requested something later.");
      this.promised = null;
    } else if (row.state === "applied") {
      this.answer.show("ok", `In force now: ${words}.`);
      this.promised = null;
    } else if (row.state === "shrinking") {
      this.answer.show("wait", `Taken: ${words}. ${bytes(row.over_bytes)} still to be given back.`);
    } else if (row.state === "refused") {
      this.answer.show("no", `Refused: ${row.reason}`);
      this.promised = null;
    }
  }

  /** Send one request at a time. Newer values are merged and sent after its response. */
  async send(request) {
    this.waiting = { ...this.waiting, ...request };
    if (this.isSending) return;
    this.isSending = true;
    const sent = new Set();
    while (this.waiting) {
      const body = this.waiting;
      this.waiting = null;
      Object.keys(body).forEach((key) => sent.add(key));
      const words = wordsOf(body);
      this.promised = null;
      this.answer.show("wait", `Asking for ${words} …`);
      try {
        const { body: answer } = await call("PATCH", pathOf("/memory/", this.model), {
          ...body,
          wait: WAIT,
        });
        this.receive(answer, body, words);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        this.answer.show("no", `Not done: ${error.message}`);
        if (error.asksForKey) this.report(error);
      }
    }
    this.isSending = false;
    for (const setting of [this.min, this.limit]) if (sent.has(setting.key)) setting.isSent = false;
    this.report(null);
  }

  receive({ answer }, body, words) {
    if (answer.state === "asleep") {
      this.answer.show("ok", `Applied: ${words}. The model sleeps; its limit counts when it wakes.`);
    } else if (answer.state === "applied") {
      const effective = answer.effective_limit_bytes;
      const rounded = typeof body.limit === "number" && effective !== body.limit;
      const pages = rounded ? `, in whole pages of its device ${bytes(effective)}` : "";
      const beyond = answer.beyond_device_bytes
        ? `, but its device has only ${bytes(answer.capacity_bytes)}`
        : pages;
      this.answer.show("ok", `Applied: ${words}${beyond}.`);
    } else if (answer.state === "shrinking") {
      this.promised = { words, revision: answer.requested_revision };
      this.answer.show("wait", `Taken: ${words}. ${bytes(answer.over_bytes)} still to be given back.`);
    } else if (answer.state === "pending" || answer.state === "unknown") {
      this.promised = { words, revision: answer.requested_revision };
      this.answer.show("wait", `Requested: ${words}. No reply yet.`);
    } else if (answer.state === "overtaken") {
      this.answer.show("no", "Replaced by a later request.");
    } else if (answer.state === "not_taken") {
      this.answer.show("no", `Not taken by the instance: ${words}.`);
    } else {
      this.answer.show("no", `Refused: ${answer.reason || answer.state}`);
    }
  }
}

/** A slider and a text field for one size. `send({key: value})` gets bytes, or the typed text. */
class Setting {
  constructor(key, title, model, send) {
    this.key = key;
    this.page = 1;
    this.isHeld = false; // in use: polled values do not move it
    this.isSent = false; // its request is in progress: polled values do not move it
    const name = `${title} of ${model}`;
    this.slider = make("input", {
      type: "range",
      min: 0,
      step: "any",
      "aria-label": name,
      oninput: () => this.moved(),
      onchange: () => this.released(send),
      onpointerup: () => this.letGo(), // a drag that ends where it began changes nothing
      onkeydown: (event) => this.key_(event, send),
    });
    this.text = make("input", {
      type: "text",
      class: "size",
      "aria-label": `${name}, as text`,
      size: 9,
      spellcheck: "false",
      autocomplete: "off",
      oninput: () => {
        this.isHeld = true;
      },
      onchange: () => this.sendIt(send, this.text.value.trim()),
      onblur: () => this.letGo(),
    });
    this.elements = [
      make("span", { class: "label", "aria-hidden": "true" }, title),
      this.slider,
      this.text,
    ];
  }

  update(value, capacity, page) {
    this.page = page || 1;
    if (this.isHeld || this.isSent) return;
    this.slider.max = Math.max(capacity, this.page);
    this.slider.value = value;
    this.text.value = exactBytes(value);
    mark(this.slider, "aria-valuetext", bytes(value));
  }

  /** The slider's value in whole pages, rounded as the instance does. */
  get bytes() {
    const pages = Math.round(Number(this.slider.value) / this.page) * this.page;
    return Math.min(pages, Number(this.slider.max));
  }

  moved() {
    this.isHeld = true;
    this.text.value = exactBytes(this.bytes);
    mark(this.slider, "aria-valuetext", bytes(this.bytes));
  }

  letGo() {
    this.isHeld = false;
  }

  released(send) {
    this.moved();
    this.sendIt(send, this.bytes);
  }

  /** Move by 1% of the range for each key press, and at least by a page. */
  key_(event, send) {
    const direction = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (direction === undefined) return;
    event.preventDefault();
    const step = Math.max(
      this.page,
      Math.round(Number(this.slider.max) / STEPS / this.page) * this.page,
    );
    this.slider.value = this.bytes + direction * step;
    this.released(send);
  }

  sendIt(send, value) {
    this.isHeld = false;
    this.isSent = true;
    send({ [this.key]: value });
  }
}

function wordsOf(body) {
  const word = (value) => (typeof value === "number" ? bytes(value) : value);
  return Object.entries(body)
    .map(([key, value]) => `${key} ${word(value)}`)
    .join(", ");
}
