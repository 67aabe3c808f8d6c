/** Request from the server’s part of gpumagic, and let the stream use the browser. */

import { ServerConnection } from '@jupyterlab/services';
import type { Renderer } from './feeds.js';
import type { World } from './stream.js';

export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** How long an answer may take; the driver may stall, but never the server. */
const PATIENCE_MS = 20_000;

export class Api {
  #settings: ServerConnection.ISettings;

  constructor(settings: ServerConnection.ISettings) {
    this.#settings = settings;
  }

  get(path: string): Promise<unknown> {
    return this.#request(path, {});
  }

  post(path: string, body: unknown): Promise<unknown> {
    return this.#request(path, { method: 'POST', body: JSON.stringify(body) });
  }

  /** The code of the monitor. */
  renderer(attempt: number): Promise<Renderer> {
    const query = new URLSearchParams(attempt ? { attempt: `${attempt}` } : {});
    if (this.#settings.appendToken && this.#settings.token) {
      query.set('token', this.#settings.token);
    }
    const url = new URL(address(this.#settings.baseUrl, 'monitor.js'), location.href);
    url.search = `${query}`;
    return import(/* webpackIgnore: true */ /* @vite-ignore */ url.href);
  }

  /** A new socket of the stream, which begins to connect at once. */
  socket(): WebSocket {
    const { wsUrl, token, appendToken, WebSocket: Socket } = this.#settings;
    const query = appendToken && token ? `?token=${encodeURIComponent(token)}` : '';
    return new Socket(address(wsUrl, 'stream') + query);
  }

  async #request(path: string, init: RequestInit): Promise<unknown> {
    const response = await ServerConnection.makeRequest(
      address(this.#settings.baseUrl, path),
      { ...init, signal: AbortSignal.timeout(PATIENCE_MS) },
      this.#settings,
    );
    const body = await response.json().catch(() => null);
    if (response.ok) return body;
    throw new Refused(response.status, body?.message || response.statusText);
  }
}

/** base_url is where JupyterHub or a proxy has put the server. */
function address(base: string, path: string): string {
  return `${base.replace(/\/+$/, '')}/gpumagic/api/${path}`;
}

export function page(api: Api): World {
  return {
    socket: () => api.socket(),
    get: (path) => api.get(path),
    hidden: () => document.hidden,
    watch(changed) {
      document.addEventListener('visibilitychange', changed);
      window.addEventListener('online', changed);
      return () => {
        document.removeEventListener('visibilitychange', changed);
        window.removeEventListener('online', changed);
      };
    },
    after(milliseconds, then) {
      const timer = setTimeout(then, milliseconds);
      return () => clearTimeout(timer);
    },
    now: () => performance.now(),
    random: Math.random,
  };
}

/** What all pages of this browser share; null where it keeps nothing. */
export function storage(): Storage | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
