// The history of the devices' memory in this page. It merges the controller's responses. So each
// later request asks only for the time since the last response.

const KEPT_S = 600;

export class History {
  constructor() {
    this.startedAt = null;
    this.intervalS = 2;
    this.next = 0; // the number of the first sample not received yet
    // {at, devices: Map(key -> {capacity, others, free, ..., instances: Map(name -> ...)})}
    this.samples = [];
  }

  /** The path of the next request. */
  get path() {
    const last = this.samples.at(-1);
    // The clocks differ. So use the time since the last response, by the page's clock.
    const seconds = last
      ? Math.min(KEPT_S, (performance.now() - this.takenMs) / 1000 + 10)
      : KEPT_S;
    return `/devices/history?seconds=${Math.ceil(seconds)}`;
  }

  /** Add a response of /devices/history. Return true if the controller has restarted. */
  take(answer) {
    const anew = this.startedAt !== null && answer.controller_started_at !== this.startedAt;
    if (anew || answer.first_sample > this.next) this.samples = [];
    this.startedAt = answer.controller_started_at;
    this.intervalS = answer.interval_seconds;
    this.takenMs = performance.now();
    for (let index = 0; index < answer.at.length; index += 1) {
      const number = answer.first_sample + index;
      if (this.samples.length && !anew && number < this.next) continue;
      this.samples.push(sampleOf(answer, index));
      this.next = number + 1;
    }
    const newest = this.samples.at(-1);
    if (newest) this.samples = this.samples.filter((sample) => sample.at >= newest.at - KEPT_S);
    return anew;
  }

  /** Time of the first sample, in seconds since 1970. */
  get firstS() {
    return this.samples[0]?.at ?? 0;
  }

  get lastS() {
    return this.samples.at(-1)?.at ?? 0;
  }

  /** Sorted keys of the devices in any sample. */
  get devices() {
    const keys = new Set();
    for (const sample of this.samples) for (const key of sample.devices.keys()) keys.add(key);
    return [...keys].sort();
  }
}

function sampleOf(answer, index) {
  // Replaces each series by its value in this sample.
  const valuesOf = (facts) =>
    Object.fromEntries(
      Object.entries(facts).map(([key, value]) => [
        key,
        key.endsWith("_bytes") ? value[index] : value,
      ]),
    );
  const devices = new Map();
  for (const device of answer.devices.map(valuesOf)) {
    if (device.capacity_bytes === null) continue;
    const there = device.instances.map(valuesOf).filter((one) => one.granted_bytes !== null);
    devices.set(keyOf(device), {
      capacity: device.capacity_bytes,
      others: device.others_bytes,
      othersOfCapacity: device.others_of_capacity_bytes,
      reservedOfCapacity: device.reserved_of_capacity_bytes,
      free: device.free_bytes,
      instances: new Map(there.map((one) => [one.name, heldBy(one)])),
    });
  }
  return { at: answer.at[index], devices };
}

/** Convert the memory of one member of a device to the fields of charts and tables. */
export function heldBy(member) {
  const { granted_bytes: granted, in_use_bytes: inUse } = member;
  const { cached_bytes: cached, parked_bytes: parked, pledged_bytes: reserved, model } = member;
  // The values are not read atomically, so their sum may exceed `granted` for a moment.
  const slack = Math.max(0, granted - inUse - cached - parked);
  return { model, granted, inUse, cached, parked, slack, reserved };
}

/** Return a key for a ledger. Each group on a device has its own ledger, on each node. */
export function keyOf(device) {
  return `${device.device}\n${device.group}\n${device.node ?? ""}`;
}
