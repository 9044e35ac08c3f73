// Which node copies KV from which: one line for each link, grouped by node.

import { byId, make, reconcile, row, setCells, setText } from "./dom.js";
import { bytes, number } from "./format.js";

export class Links {
  constructor() {
    this.rows = new Map();
  }

  /** `nodes` are those of /links. Without nodes the section is hidden. */
  update(nodes) {
    byId("links-section").hidden = nodes.length === 0;
    const items = nodes.flatMap((node) =>
      node.links.map((link) => [`${node.name} ${node.pid} ${link.number}`, { node, link }]),
    );
    reconcile(byId("link-rows"), this.rows, items, () => new Line());
    const standing = items.filter(([, { link }]) => link.state === "linked").length;
    const held = nodes.reduce((sum, node) => sum + node.registered_bytes, 0);
    const counts = `${nodes.length} nodes, ${standing} ends of links that stand`;
    setText(byId("links-totals"), `${counts}; peers reach ${bytes(held)}`);
  }
}

class Line {
  constructor() {
    this.peer = make("span");
    this.state = make("span", { class: "problem" });
    this.element = row([], ["", "", "", "", "", ""]);
    [this.node, this.with, ...this.cells] = this.element.children;
    this.with.append(this.peer, " ", this.state);
  }

  update({ node, link }) {
    const role = node.role ? `${node.role}, ` : "";
    setText(this.node, `${node.name} (${role}process ${node.pid})`);
    setText(this.peer, `${link.peer_name} (${link.peer})`);
    setText(this.state, link.state === "linked" ? "" : `${link.state}: ${link.reason}`);
    const texts = [
      link.way,
      bytes(link.in_bytes),
      bytes(link.out_bytes),
      number(link.leases),
      number(link.failures),
    ];
    setCells(this.cells, texts, link.failures);
  }
}
