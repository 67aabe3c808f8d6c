/** Format bytes, seconds, watts and percent, as gpumagic/display/units.py does. */

import type { Host, KernelSample } from '../snapshot.js';

export const NOT_KNOWN = 'N/A';
const SIZES = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
const GIB = 2 ** 30;
/** From this share on, RAM is nearly full. */
const NEARLY = 0.9;

/** Used and all bytes of RAM: of the container if it has a limit. */
export const ram = (host: Host): [number | null, number | null] =>
  host.memory_limit ? [host.limit_used, host.memory_limit] : [host.memory_used, host.memory_total];

export function isFull(host: Host, share = NEARLY): boolean {
  const [used, total] = ram(host);
  return (used ?? 0) >= share * (total ?? Number.POSITIVE_INFINITY);
}

/** Return the kernel whose RAM grows fastest; undefined if none grows. */
export const fastest = (kernels: readonly KernelSample[]): KernelSample | undefined =>
  kernels
    .filter(({ growth }) => (growth ?? 0) > 0)
    .sort((a, b) => (b.growth ?? 0) - (a.growth ?? 0))[0];

/** Bytes with at most three digits: "1.2 GiB", "512 MiB". */
export function size(count: number | null): string {
  if (count === null) return NOT_KNOWN;
  let value = count;
  let n = 0;
  // 999.95 KiB would round to four digits.
  while (Math.abs(value) >= 1023.5 && n < SIZES.length - 1) {
    value /= 1024;
    n++;
  }
  return `${value.toFixed(n === 0 || Math.abs(value) >= 99.95 ? 0 : 1)} ${SIZES[n]}`;
}

/** Used bytes of all, in one unit: "34.2/80 GiB"; null if unknown. */
export function filled(used: number | null, total: number | null): string | null {
  if (used === null || total === null) return used === null ? null : size(used);
  const [unit, name] = total < GIB ? [2 ** 20, 'MiB'] : [GIB, 'GiB'];
  const round = (value: number) => value.toFixed(value < 99.95 && value % 1 ? 1 : 0);
  return `${(used / unit).toFixed(used / unit < 99.95 ? 1 : 0)}/${round(total / unit)} ${name}`;
}

/** `filled` in few characters: "76/80 GiB", "2.0/8 GiB". */
export const share = (used: number | null, total: number | null): string | null =>
  filled(used, total)?.replace(/^(\d\d+)\.\d/, '$1') ?? null;

/** An age: "4 s", "8 min", "2 h 5 min", "4 d 15 h". */
export function age(seconds: number): string {
  const whole = Math.max(Math.trunc(seconds), 0);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.trunc(whole / 60);
  const hours = Math.trunc(whole / 3600);
  const days = Math.trunc(whole / 86400);
  if (days) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
}

/** A duration: "0.2 s", "12 s", "2 min". */
export const lasted = (seconds: number): string =>
  seconds < 10 ? `${Math.max(seconds, 0).toFixed(1)} s` : age(seconds);

/** "97 %", "88 °C", "N/A". */
export const reading = (value: number | null, unit: string): string =>
  value === null ? NOT_KNOWN : `${Math.round(value)} ${unit}`;

/** "698 / 700 W". */
export const watts = (power: number | null, limit: number | null): string =>
  power === null || limit === null
    ? reading(power, 'W')
    : `${Math.round(power)} / ${reading(limit, 'W')}`;
