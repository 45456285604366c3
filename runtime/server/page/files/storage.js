// The browser's storage, or memory where it is not allowed: the page then works until it is closed.

class Storage {
  #kept = new Map();

  constructor(find) {
    this.find = find; // gives the browser's own, or throws
  }

  get(name) {
    try {
      return this.find().getItem(name);
    } catch {
      return this.#kept.get(name) ?? null;
    }
  }

  // Throws where the browser's own is full.
  set(name, value) {
    let own;
    try {
      own = this.find();
    } catch {
      this.#kept.set(name, value);
      return;
    }
    own.setItem(name, value);
  }

  remove(name) {
    this.#kept.delete(name);
    try {
      this.find().removeItem(name);
    } catch {
      // it was in memory
    }
  }
}

export const local = new Storage(() => window.localStorage);
export const session = new Storage(() => window.sessionStorage);
