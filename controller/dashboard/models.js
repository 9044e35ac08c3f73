// One row for each model: its state, traffic, latency, memory and actions.

import { Answer } from "./answer.js";
import { ApiError, call, pathOf } from "./api.js";
import { byId, head, make, mark, reconcile, row, setText } from "./dom.js";
import { duration, number } from "./format.js";
import { Memory } from "./memory.js";

const ACTION_TIMEOUT_MS = 300_000;

/** The table of models. Calls `report(error or null)` after an action, `showLogs(model)` on click. */
export class Models {
  constructor(report, showLogs) {
    this.rows = new Map();
    this.report = report;
    this.showLogs = showLogs;
  }

  /** Show responses of /models, /traffic/stats and /memory, requested at `askedAt`. */
  update(models, traffic, memory, askedAt) {
    const items = Object.entries(models).map(([name, model]) => [
      name,
      {
        askedAt,
        model,
        traffic: traffic[name],
        memory: model.instance === null ? undefined : memory[name],
      },
    ]);
    reconcile(byId("rows"), this.rows, items, (name) => new Row(name, this.report, this.showLogs));
    byId("no-models").hidden = items.length > 0;
    byId("node-column").hidden = !items.some(([, { model }]) => model.node);
    const count = (state) => items.filter(([, { model }]) => model.state === state).length;
    const sum = (key) => items.reduce((total, [, facts]) => total + (facts.traffic?.[key] ?? 0), 0);
    setText(
      byId("totals"),
      items.length
        ? `${items.length} served, ${count("awake")} awake, ${count("asleep")} asleep · ` +
            `${number(sum("request_rate"))} requests/s · ` +
            `${number(sum("in_flight"))} in flight, ${number(sum("queued"))} waiting`
        : "",
    );
  }
}

class Row {
  constructor(name, report, showLogs) {
    this.name = name;
    this.report = report;
    this.isActing = false;
    this.state = make("span", { class: "state" });
    this.about = make("p", { class: "dim" });
    this.turn = make("p", { class: "turn" });
    this.problem = make("p", { class: "problem" });
    this.traffic = figures([
      ["rate", "requests/s"],
      ["tokens", "tokens/s"],
      ["flight", "in flight"],
      ["queued", "waiting"],
      ["failed", "failed"],
    ]);
    this.node = cell("Node");
    this.latency = make("table", { class: "latency" });
    this.memory = new Memory(name, report);
    this.sleep = this.button("Sleep", "sleep");
    this.wake = this.button("Wake", "wakeup");
    this.logs = make(
      "button",
      { type: "button", "aria-label": `Logs of ${name}`, onclick: () => showLogs(name) },
      "Logs",
    );
    this.answer = new Answer();
    this.element = make(
      "tr",
      { role: "row" },
      make(
        "th",
        { role: "rowheader", scope: "row" },
        make("span", { class: "name" }, name),
        this.state,
        this.about,
        this.turn,
        this.problem,
      ),
      this.node,
      cell("Traffic", this.traffic.element),
      cell("Latency", this.latency),
      cell("Memory", this.memory.element),
      cell(
        "Actions",
        make("div", { class: "buttons" }, this.sleep, this.wake, this.logs),
        this.answer.element,
      ),
    );
    this.element.dataset.model = name;
  }

  update({ askedAt, model, traffic, memory }) {
    this.model = model;
    mark(this.state, "data-state", model.state);
    setText(this.state, model.state.replace("_", " "));
    setText(this.about, aboutOf(model, traffic));
    this.node.hidden = !model.node;
    setText(this.node, model.node ?? "");
    setText(this.turn, turnOf(model));
    setText(this.problem, model.last_problem ?? "");
    this.traffic.set({
      rate: number(traffic?.request_rate),
      tokens: number(traffic?.tokens_per_second),
      flight: number(model.in_flight),
      queued: number(model.queued),
      failed: number(traffic?.failed_requests),
    });
    this.traffic.warn("failed", traffic?.failed_requests > 0);
    this.paintLatency(traffic);
    this.memory.update(memory, model.instance, askedAt);
    this.logs.hidden = !model.launched;
    this.answer.look(askedAt, {
      state: model.state,
      isBusy: model.in_flight + model.queued > 0,
      problem: model.last_problem,
    });
    this.enable();
  }

  paintLatency(traffic) {
    const percents = ["p50", "p95", "p99"];
    const line = (title, values) =>
      row([title], percents.map((percent) => duration(values?.[percent])));
    this.latency.replaceChildren(
      head([make("td"), ...percents]),
      make(
        "tbody",
        {},
        line("first byte", traffic?.time_to_first_token_seconds),
        line("whole", traffic?.response_time_seconds),
      ),
    );
  }

  button(title, action) {
    return make(
      "button",
      {
        type: "button",
        "aria-label": `${title} ${this.name}`,
        onclick: () => this.act(title, action),
      },
      title,
    );
  }

  /** Uses aria-disabled instead of disabled, so that a pressed button keeps the focus. */
  enable() {
    const { state, can_sleep: canSleep } = this.model;
    const ready = !this.isActing;
    mark(this.sleep, "aria-disabled", !(ready && canSleep && state === "awake"));
    mark(this.wake, "aria-disabled", !(ready && canSleep && state === "asleep"));
    mark(
      this.sleep,
      "title",
      canSleep ? null : `An engine of the kind ${this.model.engine} cannot sleep.`,
    );
  }

  async act(title, action) {
    const button = action === "sleep" ? this.sleep : this.wake;
    if (button.getAttribute("aria-disabled") === "true") return;
    this.isActing = true;
    this.enable();
    this.answer.show("wait", action === "sleep" ? "Falling asleep …" : "Waking …");
    let failure = null;
    try {
      const { body } = await call(
        "POST",
        pathOf(`/action/${action}/`, this.name),
        undefined,
        ACTION_TIMEOUT_MS,
      );
      if (body.success) this.answer.show("ok", body.message, ({ state }) => state === body.state);
      else this.answer.show("no", `Not done: ${body.message}`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.answer.show("no", `Not done: ${error.message}`);
      failure = error.asksForKey ? error : null;
    }
    this.isActing = false;
    this.enable();
    this.report(failure);
  }
}

function aboutOf(model, traffic) {
  // In a cluster, the row is a replica of this model.
  const parts = model.model ? [model.model, model.engine] : [model.engine];
  if (model.endpoints.length > 1) parts.push(`${model.endpoints.length} engines`);
  if (model.pinned) parts.push("pinned");
  if (model.aliases.length) parts.push(`also ${model.aliases.join(", ")}`);
  if (traffic && !traffic.in_flight) parts.push(`idle ${duration(traffic.idle_time_seconds)}`);
  return parts.join(" · ");
}

/** Describe why the model waits, which models make room for it, and for which it makes room. */
function turnOf({ waits, makes_room_for: others }) {
  const parts = [];
  if (waits !== null) {
    parts.push(`Waits for its turn: ${waits.why}.`);
    if (waits.for_room_of.length) parts.push(`To make room: ${waits.for_room_of.join(", ")}.`);
  }
  const names = Object.keys(others);
  if (names.length) parts.push(`Makes room for ${names.join(", ")}.`);
  return parts.join(" ");
}

function cell(label, ...children) {
  return make("td", { role: "cell", "data-label": label }, ...children);
}

/** Create a short list of named statistics: [[key, name], ...]. */
function figures(names) {
  const values = new Map(names.map(([key]) => [key, make("dd")]));
  const element = make(
    "dl",
    { class: "figures" },
    ...names.map(([key, name]) => make("div", {}, values.get(key), make("dt", {}, name))),
  );
  return {
    element,
    set: (facts) => {
      for (const [key, text] of Object.entries(facts)) setText(values.get(key), text);
    },
    warn: (key, isBad) => values.get(key).classList.toggle("bad", isBad),
  };
}
