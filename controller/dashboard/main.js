// The page. While visible, it requests all data every two seconds and passes it to its parts.

import { ApiError, hasKey, read } from "./api.js";
import { Devices } from "./devices.js";
import { byId, mark, setText } from "./dom.js";
import { clock } from "./format.js";
import { History } from "./history.js";
import { KeyDialog } from "./key.js";
import { Links } from "./links.js";
import { Logs } from "./logs.js";
import { Models } from "./models.js";
import { Poller } from "./poll.js";

const WINDOW_S = 60;

const history = new History();
const devices = new Devices();
const links = new Links();
const keyDialog = new KeyDialog(() => {
  needsKey = false;
  poller.now();
});
const logs = new Logs(afterAction);
const models = new Models(afterAction, (model) => logs.show(model));
let needsKey = false;
const poller = new Poller(look, () => needsKey);

/** Update the page after an action. An error here is one that needs another key. */
function afterAction(error) {
  if (error) keyDialog.ask(KeyDialog.reasonOf(error));
  poller.now();
}

async function look() {
  const askedAt = performance.now();
  try {
    const [served, traffic, memory, linked, past] = await Promise.all([
      read("/models"),
      read(`/traffic/stats?window=${WINDOW_S}`),
      read("/memory"),
      read("/links"),
      read(history.path),
    ]);
    history.take(past);
    devices.update(memory.devices, history);
    links.update(linked.nodes);
    models.update(served.models, traffic.traffic_stats, memory.models, askedAt);
    // The page may have been hidden while it waited for the responses.
    if (document.hidden) link("paused", "Paused");
    else link("live", `Live, ${clock(Date.now() / 1000)}`);
    banner(withoutReply(memory));
  } catch (error) {
    if (!(error instanceof ApiError)) {
      banner(`This page has failed: ${error}. Load it again.`);
      throw error;
    }
    if (error.status === 401) {
      needsKey = true;
      const reason = KeyDialog.reasonOf(error);
      link("lost", "Stopped: no key");
      banner(
        hasKey()
          ? "The key in use is not accepted; press Key to give another."
          : "A key is needed; press Key to give one.",
      );
      keyDialog.ask(reason);
      return;
    }
    link("lost", "Not live");
    banner(`${error.message} What is shown may be old; it is tried again.`);
    throw error;
  }
}

/** Name the machines and replicas of a cluster that do not reply. */
function withoutReply({ nodes = [], no_reply: replicas = [] }) {
  const missing = [
    ...nodes.filter(({ state }) => state !== "ok").map(({ node }) => `machine ${node}`),
    ...replicas.map((replica) => `replica ${replica}`),
  ];
  return missing.length ? `No reply from ${missing.join(", ")}.` : "";
}

function link(state, text) {
  mark(byId("link"), "data-state", state);
  setText(byId("link"), text);
}

function banner(text) {
  setText(byId("banner"), text);
  byId("banner").hidden = text === "";
}

async function showVersion() {
  try {
    setText(byId("version"), (await read("/version")).version);
  } catch {
    // The first look() reports that the controller is unreachable.
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) link("paused", "Paused");
});
showVersion();
poller.now();
