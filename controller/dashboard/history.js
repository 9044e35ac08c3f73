// The history of the devices' memory, as far as this page has it: answers are put together here,
// so that after the first one only what is new is asked for.

const KEPT_S = 600;

export class History {
  constructor() {
    this.startedAt = null;
    this.intervalS = 2;
    this.next = 0; // the number of the first sample that is not here
    // {at, devices: Map(key -> {capacity, others, reserved, free, instances: Map(name -> ...)})}
    this.samples = [];
  }

  /** What to ask for next. */
  get path() {
    const last = this.samples.at(-1);
    // The page's clock is not the controller's: the time since its own last answer is what counts.
    const seconds = last
      ? Math.min(KEPT_S, (performance.now() - this.takenMs) / 1000 + 10)
      : KEPT_S;
    return `/devices/history?seconds=${Math.ceil(seconds)}`;
  }

  /** Add an answer of /devices/history. True if a controller that started anew gave it. */
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

  /** When the first and the last sample were taken, in seconds since 1970. */
  get firstS() {
    return this.samples[0]?.at ?? 0;
  }

  get lastS() {
    return this.samples.at(-1)?.at ?? 0;
  }

  /** Keys of the devices that any sample has, in order. */
  get devices() {
    const keys = new Set();
    for (const sample of this.samples) for (const key of sample.devices.keys()) keys.add(key);
    return [...keys].sort();
  }
}

function sampleOf(answer, index) {
  const devices = new Map();
  for (const device of answer.devices) {
    if (device.capacity_bytes[index] === null) continue;
    const instances = new Map();
    for (const instance of device.instances) {
      const granted = instance.granted_bytes[index];
      if (granted === null) continue;
      instances.set(
        instance.name,
        heldBy({
          model: instance.model,
          granted_bytes: granted,
          in_use_bytes: instance.in_use_bytes[index],
          cached_bytes: instance.cached_bytes[index],
          parked_bytes: instance.parked_bytes[index],
          pledged_bytes: instance.pledged_bytes[index],
        }),
      );
    }
    devices.set(keyOf(device), {
      device: device.device,
      group: device.group,
      capacity: device.capacity_bytes[index],
      others: device.others_bytes[index],
      othersOfCapacity: device.others_of_capacity_bytes[index],
      reserved: device.reserved_bytes[index],
      reservedOfCapacity: device.reserved_of_capacity_bytes[index],
      free: device.free_bytes[index],
      instances,
    });
  }
  return { at: answer.at[index], devices };
}

/** What one member of a device holds there, as the charts and tables have it. */
export function heldBy(member) {
  const { granted_bytes: granted, in_use_bytes: inUse } = member;
  const { cached_bytes: cached, parked_bytes: parked, pledged_bytes: reserved, model } = member;
  // Facts are read one after the other while memory moves: a moment's contradiction is no sum.
  const slack = Math.max(0, granted - inUse - cached - parked);
  return { model, granted, inUse, cached, parked, slack, reserved };
}

/** One text for a ledger: groups on one device are apart. */
export function keyOf(device) {
  return `${device.device}\n${device.group}`;
}
