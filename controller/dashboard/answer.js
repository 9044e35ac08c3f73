// What came of an action, in words, for as long as it is true.

import { make, mark, say } from "./dom.js";

export class Answer {
  constructor() {
    this.element = make("p", { class: "answer", role: "status" });
    this.holds = null;
    this.toldAt = 0;
  }

  /**
   * Say it. `holds(facts)` is whether it is still true of what is looked at later; without it, it
   * is taken back when those facts are others than at the first look after it was said.
   */
  tell(kind, text, holds = null) {
    mark(this.element, "data-kind", kind);
    say(this.element, text);
    this.holds = holds;
    this.toldAt = performance.now();
  }

  /** `facts` were asked for at `askedAt`: those from before the answer say nothing of it. */
  look(askedAt, facts) {
    if (this.element.dataset.kind === "wait" || askedAt < this.toldAt) return;
    if (this.holds === null) {
      const first = JSON.stringify(facts);
      this.holds = (later) => JSON.stringify(later) === first;
    } else if (!this.holds(facts)) say(this.element, "");
  }
}
