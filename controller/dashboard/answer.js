// The outcome of an action as text, shown as long as it is true.

import { make, mark, setText } from "./dom.js";

export class Answer {
  constructor() {
    this.element = make("p", { class: "answer", role: "status" });
    this.holds = null;
    this.shownAt = 0;
  }

  /**
   * Show a text. It is removed when `holds(facts)` returns false for later facts. Without `holds`
   * it is removed when the facts differ from those of the first `look` after it was shown.
   */
  show(kind, text, holds = null) {
    mark(this.element, "data-kind", kind);
    setText(this.element, text);
    this.holds = holds;
    this.shownAt = performance.now();
  }

  /** Remove the text if `facts` contradict it. Ignores facts requested before it was shown. */
  look(askedAt, facts) {
    if (this.element.dataset.kind === "wait" || askedAt < this.shownAt) return;
    if (this.holds === null) {
      const first = JSON.stringify(facts);
      this.holds = (later) => JSON.stringify(later) === first;
    } else if (!this.holds(facts)) setText(this.element, "");
  }
}
