// Formats numbers for readers. An unknown value (null) is a dash.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export const NONE = "–";

/** 1610612736 is "1.5 GiB": three digits at most. */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let unit = 0;
  let scaled = value;
  while (scaled >= 999.5 && unit < UNITS.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  return `${figures(scaled)} ${UNITS[unit]}`;
}

/** Return bytes as exact text that a request accepts, for the text field of a size. */
export function exactBytes(value) {
  if (value === null || value === undefined) return "";
  let unit = 0;
  let scaled = value;
  while (scaled >= 1024 && unit < UNITS.length - 1 && Number.isInteger((scaled / 1024) * 100)) {
    scaled /= 1024;
    unit += 1;
  }
  return `${scaled} ${UNITS[unit]}`;
}

/** 0.0123 s is "12 ms". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.9995) return `${figures(seconds * 1000)} ms`;
  if (seconds < 99.5) return `${figures(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Format a rate or a count, to three digits. */
export function number(value) {
  return value === null || value === undefined ? NONE : figures(value);
}

/** A clock time. */
export function clock(unixS, withSeconds = true) {
  const second = withSeconds ? "2-digit" : undefined;
  return new Date(unixS * 1000).toLocaleTimeString([], {
    hour: "2-digit",
    minute: "2-digit",
    second,
    hour12: false,
  });
}

function figures(value) {
  if (value === 0) return "0";
  const digits = value >= 99.5 ? 0 : value >= 9.95 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
}
