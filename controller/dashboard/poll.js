// Repeats work while the page is visible: immediately, then with a pause after each end.

const PAUSE_MS = 2_000;
const LONGEST_PAUSE_MS = 15_000;

export class Poller {
  /** `work` is async; if it throws, the pause grows. It does not run while `stopped()` is true. */
  constructor(work, stopped = () => false) {
    this.work = work;
    this.stopped = stopped;
    this.timer = null;
    this.running = false;
    this.again = false;
    this.failures = 0;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.pause();
      else this.now();
    });
  }

  /** Run the work now. If it is already running, run it once more afterwards. */
  async now() {
    this.pause();
    if (this.running) {
      this.again = true;
      return;
    }
    if (document.hidden || this.stopped()) return;
    this.running = true;
    try {
      await this.work();
      this.failures = 0;
    } catch {
      this.failures += 1;
    }
    this.running = false;
    const again = this.again;
    this.again = false;
    if (again) this.now();
    else if (!document.hidden) {
      this.timer = setTimeout(
        () => this.now(),
        Math.min(LONGEST_PAUSE_MS, PAUSE_MS * 2 ** Math.min(this.failures, 3)),
      );
    }
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
  }
}
