// The end of a launched engine's output, in a dialog that updates it while open.

import { ApiError, pathOf, read } from "./api.js";
import { byId, setText } from "./dom.js";
import { Poller } from "./poll.js";

const LINES = 500;

export class Logs {
  constructor(report) {
    this.report = report;
    this.model = null;
    this.dialog = byId("logs");
    this.poller = new Poller(
      () => this.look(),
      () => !this.dialog.open,
    );
    byId("logs-close").addEventListener("click", () => this.dialog.close());
  }

  /** Open the dialog for a model. */
  show(model) {
    this.model = model;
    setText(byId("logs-title"), `Logs of ${model}`);
    setText(byId("logs-facts"), "");
    setText(byId("logs-problem"), "");
    setText(byId("logs-lines"), "");
    byId("logs-lines").hidden = true;
    this.dialog.showModal();
    this.poller.now();
  }

  async look() {
    const model = this.model;
    let answer;
    try {
      answer = await read(pathOf("/admin/models/", model, `/logs?lines=${LINES}`));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setText(byId("logs-problem"), error.message);
      if (error.asksForKey) {
        this.dialog.close();
        this.report(error);
      }
      throw error;
    }
    if (model !== this.model) return;
    const lines = byId("logs-lines");
    const atEnd = lines.hidden || lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4;
    lines.hidden = false;
    setText(byId("logs-problem"), answer.lines.length ? "" : "It has written nothing yet.");
    const pid = answer.pid === null ? "not running" : `process ${answer.pid}`;
    const starts = answer.starts === 1 ? "started once" : `started ${answer.starts} times`;
    setText(byId("logs-facts"), [answer.state, pid, starts, answer.file].join(" · "));
    setText(lines, answer.lines.join("\n"));
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }
}
