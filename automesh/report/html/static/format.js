// Figures as `automesh show` prints them; the tests compare each function with the one in Python.
const Format = {
  threeDigits(value) {
    const size = Math.abs(value);
    return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
  },
  seconds(seconds) {
    if (seconds === null || seconds === undefined) return "";
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]) {
      if (seconds >= 0.9995 * scale || unit === "ns") return `${Format.threeDigits(seconds / scale)} ${unit}`;
    }
    return "";
  },
  bytes(count) {
    if (count === null || count === undefined) return "";
    for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (Math.abs(count) >= 0.9995 * scale) return `${Format.threeDigits(count / scale)} ${unit}`;
    }
    return `${count.toFixed(0)} B`;
  },
  percent(fraction) {
    const percent = 100 * fraction;
    return Math.abs(percent) < 9.95 ? `${percent.toFixed(1)} %` : `${percent.toFixed(0)} %`;
  },
  change(ratio) {
    const percent = Math.round(1000 * (ratio - 1)) / 10;
    return `${percent < 0 ? "-" : "+"}${Math.abs(percent).toFixed(1)} %`;
  },
  factor(factor) {
    return `${Format.threeDigits(factor)}x`;
  },
  plural(number, one, many) {
    return `${number.toLocaleString("en")} ${number === 1 ? one : many || `${one}s`}`;
  },
  // One unit for all marks of a chart: {unit, scale}, chosen by the largest.
  timeUnit(most) {
    const [unit, scale] = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]].find(
      ([name, each]) => most >= each || name === "ns",
    );
    return { unit, scale };
  },
  memoryUnit(most) {
    const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
    const [unit, scale] = units.find(([name, each]) => most >= each || name === "B");
    return { unit, scale };
  },
  // The longest beginning and end of a name that fit: both ends of a plan tell it apart.
  short(text, most) {
    if (text.length <= most) return text;
    const head = Math.ceil((most - 1) * 0.6);
    return `${text.slice(0, head)}\u2026${text.slice(text.length - (most - 1 - head))}`;
  },
};
