/** Timers by name: a new one of the same name ends the old one. */
export class Timers {
  #after: (milliseconds: number, then: () => void) => () => void;
  #ends = new Map<string, () => void>();

  constructor(after: (milliseconds: number, then: () => void) => () => void) {
    this.#after = after;
  }

  start(name: string, milliseconds: number, then: () => void): void {
    this.end(name);
    const end = this.#after(milliseconds, () => {
      this.#ends.delete(name);
      then();
    });
    this.#ends.set(name, end);
  }

  runs(name: string): boolean {
    return this.#ends.has(name);
  }

  end(...names: string[]): void {
    for (const name of names) {
      this.#ends.get(name)?.();
      this.#ends.delete(name);
    }
  }
}
