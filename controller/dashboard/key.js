// The dialog that asks for a key, and the button that opens it again.

import { hasKey, setKey } from "./api.js";
import { byId, setText } from "./dom.js";

export class KeyDialog {
  /** `changed` is called after a key was set or removed. */
  constructor(changed) {
    this.dialog = byId("key");
    this.button = byId("key-button");
    this.button.hidden = !hasKey();
    this.button.addEventListener("click", () => this.ask("Another key is used from now on."));
    byId("key-cancel").addEventListener("click", () => this.dialog.close());
    byId("key-forget").addEventListener("click", () => {
      setKey(null);
      this.dialog.close();
      changed();
    });
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setKey(byId("key-value").value.trim());
      byId("key-value").value = "";
      this.dialog.close();
      changed();
    });
  }

  /** Open the dialog and show the reason. */
  ask(reason) {
    this.button.hidden = false;
    byId("key-forget").hidden = !hasKey();
    setText(byId("key-reason"), reason);
    if (!this.dialog.open) this.dialog.showModal();
    byId("key-value").focus();
  }

  /** Return the text that says why this error needs a key. */
  static reasonOf(error) {
    if (error.code === "admin_key_needed")
      return "The key in use is for models; this needs an admin key.";
    if (hasKey()) return "The key in use is not accepted for this.";
    return "This controller asks for a key.";
  }
}
